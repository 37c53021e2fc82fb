"""Verifying: is all of it there, is it what was written, and were the right samples consumed?

    files      sizes (fast) or SHA-256 of every file (full), against the manifest
    tensors    every element of every tensor is in exactly one piece, and every piece is in its file at its full size
    samples    the ids that the run has consumed, against those of the data order: see ``samples.py``

Cost: full reads everything once, at 1 to 2 GB/s a thread; the samples take 0.4 us each.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from paceline.checkpoint.find import read_manifest
from paceline.checkpoint.manifest import Manifest, SavedPiece, SavedTensor
from paceline.checkpoint.remote import storage_of
from paceline.checkpoint.state import COMPRESSION
from paceline.checkpoint.storage import Storage
from paceline.checkpoint.tensors import dtype_of, read_header
from paceline.checkpoint.tools.check import Check
from paceline.checkpoint.tools.samples import check_samples
from paceline.checkpoint.tools.stream import Tell, be_silent
from paceline.errors import CheckpointError
from paceline.shards import common_runs

Depth = Literal["fast", "full"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """All that was checked of one checkpoint."""

    path: Path
    step: int
    depth: Depth
    checks: tuple[Check, ...] = field(default_factory=tuple)

    @property
    def is_good(self) -> bool:
        """Whether nothing is wrong."""
        return all(check.is_good for check in self.checks)


def audit(path: Path, depth: Depth = "full", tell: Tell = be_silent) -> Audit:
    """Checks a checkpoint, all of it, and reports everything that is wrong. Raises CheckpointError if it is none."""
    storage = storage_of(path)
    manifest = read_manifest(path, storage)
    files = check_files(path, manifest, storage, depth, tell)
    checks = [files, check_tensors(path, manifest, storage, skip=set(_names_of(files))), check_samples(manifest)]
    return Audit(path=path, step=manifest.step, depth=depth, checks=tuple(checks))


def check_files(path: Path, manifest: Manifest, storage: Storage, depth: Depth, tell: Tell = be_silent) -> Check:
    """Compares every file with the manifest."""
    problems = []
    for name, file in manifest.files.items():
        try:
            size = storage.size(path / name)
            if size is None:
                problems.append(f"{name} is missing")
            elif size != file.num_bytes:
                problems.append(f"{name} has {size:,} bytes, not {file.num_bytes:,}")
            elif depth == "full" and storage.digest(path / name) != file.sha256:
                problems.append(f"{name} has another hash than the manifest says: a bit has changed")
        except OSError as error:
            problems.append(f"{name} cannot be read: {error.strerror or error}")
        tell(file.num_bytes)
    known = {*manifest.files, "manifest.json"}
    extra = [name for name in storage.names(path) if name not in known]
    told = f"{len(manifest.files)} files, {manifest.num_bytes:,} bytes: " + (
        "SHA-256 of each" if depth == "full" else "sizes (the hashes: --full)"
    )
    if extra:
        told += f"; {len(extra)} more that do not belong to it: {', '.join(extra[:3])}"
    return Check(what="files", finding=told, problems=tuple(problems))


def check_tensors(path: Path, manifest: Manifest, storage: Storage, skip: set[str] | None = None) -> Check:
    """Checks that every tensor is there whole, once, and that the files have the pieces. ``skip``: damaged files."""
    problems, num_pieces = [], 0
    headers: dict[str, dict[str, tuple[int, int]]] = {}
    for file in {piece.file for tensor in manifest.tensors.values() for piece in tensor.pieces} - (skip or set()):
        try:
            headers[file] = read_header(storage, path / file)
        except CheckpointError as error:
            problems.append(str(error).splitlines()[0])
    for name, tensor in manifest.tensors.items():
        num_pieces += len(tensor.pieces)
        problems += [f"{name}: {each}" for each in coverage_problems(name, tensor)]
        for piece in tensor.pieces:
            if piece.file in headers and (found := _misplaced(name, tensor, piece, headers[piece.file])):
                problems.append(found)
    elements = sum(math.prod(tensor.shape) for tensor in manifest.tensors.values())
    told = f"{len(manifest.tensors)} tensors, {elements:,} elements in {num_pieces} pieces: each element in exactly one"
    return Check(what="tensors", finding=told, problems=tuple(problems))


def coverage_problems(name: str, tensor: SavedTensor) -> list[str]:
    """Returns what is missing of a tensor, or there twice."""
    size, regions = math.prod(tensor.shape), [piece.region for piece in tensor.pieces]
    found, problems = sum(region.size for region in regions), []
    if found != size and not name.startswith(COMPRESSION):
        problems.append(f"{found:,} of {size:,} elements are saved")
    if all(region.dim is None and region.order == regions[0].order for region in regions):
        ordered = sorted((region for region in regions if region.size), key=lambda region: region.begin)
        for left, right in itertools.pairwise(ordered):
            if right.begin < left.end:
                problems.append(f"elements {right.begin:,} to {min(left.end, right.end):,} are saved twice")
        return problems
    shared = [int(common_runs(*pair).length.sum()) for pair in itertools.combinations(regions, 2)]
    return problems + [f"{both:,} elements are saved twice" for both in shared if both]


def _misplaced(name: str, tensor: SavedTensor, piece: SavedPiece, header: Mapping[str, tuple[int, int]]) -> str | None:
    place = header.get(name)
    if place is None:
        return f"{piece.file} has no {name}"
    wanted = piece.region.size * dtype_of(tensor.dtype).itemsize
    if place[1] - place[0] != wanted:
        return f"{piece.file} has {place[1] - place[0]:,} bytes of {name}, not {wanted:,}"
    return None


def _names_of(check: Check) -> list[str]:
    return [problem.split(" ", 1)[0] for problem in check.problems]
