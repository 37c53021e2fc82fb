"""Do the pieces of a checkpoint make up its tensors? Every element is in exactly one piece, each in its file.

Whoever reads a checkpoint asks this first, since what is missing would be read as zeros, and written on with good
hashes. All pieces that are cut alike (the same spans of the same dims) are intervals of one part of the tensor: these
must not overlap, nor may the spans of the parts; then the number of elements says whether something is missing.

Cost: one sort of the pieces of each tensor; with files, one header each. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from pathlib import Path

from paceline.checkpoint.header import Header, read_header
from paceline.checkpoint.manifest import COMPRESSION, ITEM_BYTES, Manifest, SavedTensor, damaged, overlaps
from paceline.checkpoint.storage import FileStore, file_in
from paceline.errors import CheckpointError
from paceline.shards import Region, Spans

Cuts = tuple[tuple[int, Spans], ...]


def check_coverage(path: Path, manifest: Manifest) -> None:
    """Raises CheckpointError where an element of a tensor is missing, or saved twice."""
    for name, tensor in manifest.tensors.items():
        for problem in coverage_problems(name, tensor):
            raise damaged(f"{path} is damaged: {name}: {problem}")


def coverage_problems(name: str, tensor: SavedTensor) -> list[str]:
    """Returns what is missing of a tensor, or there twice."""
    size, regions = math.prod(tensor.shape), [piece.region for piece in tensor.pieces if piece.region.size]
    found, problems = sum(region.size for region in regions), []
    if found != size and not name.startswith(COMPRESSION):  # a rank may have no residual of compression
        problems.append(f"{found:,} of {size:,} elements are saved")
    parts: dict[Cuts, list[Region]] = {}
    for region in regions:
        parts.setdefault(region.cuts, []).append(region)
    for part in parts.values():
        if len({region.order for region in part}) > 1:
            problems.append("its pieces lie in different orders of dims")
        shared = overlaps([(region.begin, region.end) for region in part])
        problems += [f"elements {first:,} to {last:,} are saved twice" for first, last in shared]
    if len({tuple(dim for dim, _ in cuts) for cuts in parts}) > 1:
        return [*problems, "its pieces are cut along different dims"]
    rows = _row_overlaps(list(parts))
    return problems + [f"rows {first:,} to {last:,} of the dim that is cut are saved twice" for first, last in rows]


def _row_overlaps(parts: Sequence[Cuts]) -> list[tuple[int, int]]:
    """Returns which rows several parts have, of the first dim that is cut; within the same rows, of the next one."""
    within: dict[Spans, list[Cuts]] = {}
    for cuts in parts:
        if cuts:
            within.setdefault(cuts[0][1], []).append(cuts[1:])
    found = overlaps([span for spans in within for span in spans])
    return found + [each for inner in within.values() for each in _row_overlaps(inner)]


def piece_problems(path: Path, manifest: Manifest, storage: FileStore, skip: Collection[str] = ()) -> list[str]:
    """Returns which pieces are not in their files at their full size. ``skip``: files that are damaged anyway."""
    problems: list[str] = []
    headers: dict[str, Header] = {}
    for file in sorted({piece.file for tensor in manifest.tensors.values() for piece in tensor.pieces} - set(skip)):
        try:
            headers[file] = read_header(storage, file_in(path, file))
        except CheckpointError as error:
            problems.append(str(error).splitlines()[0])
    for name, tensor in manifest.tensors.items():
        for piece in (piece for piece in tensor.pieces if piece.file in headers):
            place, wanted = headers[piece.file].tensors.get(name), piece.region.size * ITEM_BYTES[tensor.dtype]
            if place is None:
                problems.append(f"{piece.file} has no {name}")
            elif place.dtype != tensor.dtype:
                problems.append(f"{piece.file} has {name} as {place.dtype}, not {tensor.dtype}")
            elif place.num_bytes != wanted:
                problems.append(f"{piece.file} has {place.num_bytes:,} bytes of {name}, not {wanted:,}")
    return problems
