"""Experts that are stacked in a model, and one by one in files of Hugging Face.

    gate_up (experts, 2 inner, width)        experts.0.gate (inner, width), experts.0.up, experts.1.gate, ...

A part is known by its row, which is the matrix that it is of an expert, and by the expert's number in its name. Numbers
count as numbers: expert 10 stands behind expert 9, not behind expert 1.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from paceline.checkpoint.manifest import SavedPiece, SavedTensor
from paceline.checkpoint.tensors import Stream
from paceline.shards import whole_region

Rows = Sequence[Sequence[str]]  # names of parts: for each matrix of an expert, those of all experts


def parts_of(name: str, rows: Rows, shapes: Mapping[str, tuple[int, ...]], count: int = 0) -> tuple[Rows, list[str]]:
    """Returns the rows of a stacked tensor in the order of its experts, ``count`` or more, and what is odd about them.

    What is odd is a part that is missing, or a matrix that does not fit those beside it.
    """
    numbered = [{_number(part)[1]: part for part in row} for row in rows]
    if not all(numbered):
        return [], [f"missing: a matrix of each expert of {name}"]
    count = max([count, *(number + 1 for row in numbered for number in row)])
    ordered, problems = [], []
    for row in numbered:
        first = row[min(row)]
        ordered.append([row.get(number) or _renumbered(first, number) for number in range(count)])
        for part in ordered[-1]:
            rule, found = (*shapes[first][:1], *shapes[ordered[0][min(numbered[0])]][1:]), shapes.get(part)
            if found is None:
                problems.append(f"missing: {part} {list(rule)}")
            elif found != rule or len(rule) != 2:
                problems.append(f"shape: {part} is {list(found)}, and those beside it {list(rule)}")
    return ordered, problems


def stacked_pieces(rows: Rows, saved: Mapping[str, SavedTensor]) -> SavedTensor:
    """Returns the stacked tensor, whose pieces are where the parts were."""
    parts = [saved[part] for expert in zip(*rows, strict=True) for part in expert]
    shape = (len(rows[0]), sum(saved[row[0]].shape[0] for row in rows), parts[0].shape[1])
    names, end, pieces = [part for expert in zip(*rows, strict=True) for part in expert], 0, []
    for name, part in zip(names, parts, strict=True):
        begin, end = end, end + math.prod(part.shape)
        region = whole_region(shape).narrow(begin, end)
        pieces += [SavedPiece(file=piece.file, region=region, name=name) for piece in part.pieces]
    return SavedTensor(shape=shape, dtype=parts[0].dtype, pieces=tuple(pieces))


def stacked_stream(name: str, rows: Rows, streams: Mapping[str, Stream]) -> Stream:
    """Returns the stacked tensor, which is read part by part."""
    parts = [streams[part] for expert in zip(*rows, strict=True) for part in expert]
    height = sum(streams[row[0]].shape[0] for row in rows)
    shape = (len(rows[0]), height, parts[0].shape[1])

    def read() -> itertools.chain[memoryview]:
        return itertools.chain.from_iterable(part.read() for part in parts)

    return Stream(name=name, region=whole_region(shape), dtype=parts[0].dtype, read=read)


def split_stream(stream: Stream, rows: Rows) -> list[Stream]:
    """Returns the parts of a stacked tensor under the names of ``rows``, all matrices being equally high."""
    _, height, width = stream.shape
    shape = (height // len(rows), width)
    size = shape[0] * width
    names = [name for expert in zip(*rows, strict=True) for name in expert]
    cuts = (stream.narrow(at * size, (at + 1) * size) for at in range(len(names)))
    return [replace(cut, name=name, region=whole_region(shape)) for name, cut in zip(names, cuts, strict=True)]


def _number(name: str) -> tuple[int, int]:
    """Returns the place of the last number among a name's parts, and the number: that of an expert."""
    parts = name.split(".")
    return next((place, int(parts[place])) for place in reversed(range(len(parts))) if parts[place].isdigit())


def _renumbered(name: str, number: int) -> str:
    parts = name.split(".")
    parts[_number(name)[0]] = str(number)
    return ".".join(parts)
