"""Experts that are stacked in a model, and one by one in files of Hugging Face.

    gate_up (experts, 2 inner, width)        experts.0.gate (inner, width), experts.0.up, experts.1.gate, ...

Numbers in names count as numbers: expert 10 stands behind expert 9, not behind expert 1.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from paceline.checkpoint.manifest import SavedPiece, SavedTensor
from paceline.checkpoint.read import Checkpoint
from paceline.checkpoint.storage import LocalFiles
from paceline.checkpoint.tensors import Stream
from paceline.errors import UsageError
from paceline.models.gpt import INIT_STD
from paceline.shards import whole_region

Rows = Sequence[Sequence[str]]  # for each matrix of an expert the names that it has in files, in any order


def with_stacks(
    files: Checkpoint, stacks: Mapping[str, Rows], counts: Mapping[str, int]
) -> tuple[Checkpoint, list[str]]:
    """Returns files in which the experts of a layer are one tensor, and what is odd: missing parts, other shapes.

    ``counts`` says how many experts a stack has at least. Nothing is read.
    """
    saved, problems = dict(files.manifest.tensors), []
    for name, rows in stacks.items():
        parts, odd = _parts_of(name, rows, files.shapes(), counts.get(name, 0))
        problems += odd
        if not odd:
            heights = [saved[part].shape[0] for part in parts]
            shape = (len(parts) // len(rows), sum(heights[: len(rows)]), saved[parts[0]].shape[1])
            ends = itertools.accumulate(math.prod(saved[part].shape) for part in parts)
            regions = [whole_region(shape).narrow(*span) for span in itertools.pairwise((0, *ends))]
            found = [(saved.pop(part), part, region) for part, region in zip(parts, regions, strict=True)]
            pieces = [SavedPiece(file=each.pieces[0].file, region=at, name=part) for each, part, at in found]
            saved[name] = SavedTensor(shape=shape, dtype=found[0][0].dtype, pieces=tuple(pieces))
    return Checkpoint(files.path, replace(files.manifest, tensors=saved), LocalFiles()), problems


def _parts_of(name: str, rows: Rows, shapes: Mapping[str, tuple[int, ...]], count: int) -> tuple[list[str], list[str]]:
    """Returns the parts of a stack in its order, and what is odd about them."""
    numbered = [{_number(part)[1]: part for part in row} for row in rows]
    if not all(numbered):
        return [], [f"missing: a matrix of each expert of {name}"]
    firsts = [row[min(row)] for row in numbered]
    count = max([count, *map(len, rows)])
    parts, problems = [], [f"unexpected: {row[number]}" for row in numbered for number in row if number >= count]
    for number, (row, first) in itertools.product(range(count), zip(numbered, firsts, strict=True)):
        parts.append(row.get(number) or renumbered(first, number))
        rule, found = (*shapes[first][:1], *shapes[firsts[0]][1:]), shapes.get(parts[-1])
        if found is None:
            problems.append(f"missing: {parts[-1]} {list(rule)}")
        elif found != rule or len(rule) != 2:
            problems.append(f"shape: {parts[-1]} is {list(found)}, and those beside it {list(rule)}")
    return parts, problems


def split_stream(stream: Stream, patterns: Sequence[str]) -> list[Stream]:
    """Returns equal matrices of each expert, under the names that ``patterns`` give with its number for ``*``."""
    experts, height, width = stream.shape
    shape, found = (height // len(patterns), width), []
    assert stream.narrow is not None, stream.name  # what a checkpoint has can be read in parts
    for at, (number, pattern) in enumerate(itertools.product(range(experts), patterns)):
        part = stream.narrow(at * math.prod(shape), (at + 1) * math.prod(shape))
        found.append(replace(part, name=pattern.replace("*", str(number)), region=whole_region(shape)))
    return found


def upcycled(streams: Mapping[str, Stream], experts: int, dense_layers: int, seed: int) -> dict[str, Stream]:
    """Returns a GPT whose MLPs became as many equal experts, but for the first layers; routers are drawn.

    Where the weights of a token's experts add up to 1, it computes what it did. Raises UsageError for other models.
    """
    found, layers = dict(streams), len({name.split(".")[1] for name in streams if name.startswith("layers.")})
    if not 0 <= dense_layers < layers or f"layers.{layers - 1}.mlp.down.weight" not in streams:
        what = f"upcycle: of {layers} layers, those from {dense_layers} on have no dense MLP of the package's GPT"
        rule = "the tensors layers.N.mlp.up.weight and layers.N.mlp.down.weight become those of experts"
        raise UsageError(f"{what}\n  {rule}\n  name a dense GPT, and a smaller --dense-layers than it has layers")
    for layer in range(dense_layers, layers):
        prefix = f"layers.{layer}.mlp."
        first = [found.pop(f"{prefix}{name}.weight", None) for name in ("gate", "up")]
        for name, parts in (("first", first), ("last", [found.pop(f"{prefix}down.weight", None)])):
            found[f"{prefix}experts.{name}"] = _copies(f"{prefix}experts.{name}", [p for p in parts if p], experts)
        width, dtype = found[f"{prefix}experts.first"].shape[2], found[f"{prefix}experts.first"].dtype
        draw = partial(
            _drawn, (experts, width), (1_000_003 * seed + layer) % 2**32
        )  # of a seed, torch takes as many bits
        found[f"{prefix}router.weight"] = Stream.made(f"{prefix}router.weight", (experts, width), dtype, draw)
    return found


def _copies(name: str, parts: Sequence[Stream], experts: int) -> Stream:
    def read() -> Iterator[memoryview]:
        return itertools.chain.from_iterable(part.read() for part in list(parts) * experts)

    shape = (experts, sum(part.shape[0] for part in parts), parts[0].shape[1])
    return Stream(name=name, region=whole_region(shape), dtype=parts[0].dtype, read=read)


def _drawn(shape: tuple[int, int], seed: int) -> torch.Tensor:
    return INIT_STD * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _number(name: str) -> tuple[int, int]:
    """Returns the place of the last number among a name's parts, and the number: that of an expert."""
    parts = name.split(".")
    return next(((at, int(parts[at])) for at in reversed(range(len(parts))) if parts[at].isdecimal()), (0, 0))


def renumbered(name: str, number: object) -> str:
    """Returns what a part is called for another expert, or with ``*`` for all."""
    parts = name.split(".")
    parts[_number(name)[0]] = str(number)
    return ".".join(parts)
