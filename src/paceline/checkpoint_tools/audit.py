"""Verifying: is all of it there, is it what was written, and were the right samples consumed?

    files      sizes (fast) or SHA-256 of every file (full), against the manifest
    tensors    every element of every tensor is in exactly one piece, and every piece is in its file at its full size
    samples    the running hash of the consumed sample ids, against the one that the data order gives: a pure function
               of the number of samples, the batch and the seed, so that neither data nor model is needed

Cost: full reads everything once, at 1 to 2 GB/s a thread; the samples take 0.1 us each.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from paceline.checkpoint.find import read_manifest
from paceline.checkpoint.manifest import Manifest, SavedPiece, SavedTensor
from paceline.checkpoint.remote import storage_of
from paceline.checkpoint.state import COMPRESSION
from paceline.checkpoint.storage import Storage
from paceline.checkpoint.tensors import dtype_of, read_header
from paceline.checkpoint.values import decode
from paceline.checkpoint_tools.stream import Tell, be_silent
from paceline.data.consumed import recompute
from paceline.errors import CheckpointError, PacelineError
from paceline.layout import common_runs

Depth = Literal["fast", "full"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that was looked at: what, what was found in words, and whether it is as it should be.

    ``is_done`` is False where there was nothing to check it by.
    """

    what: str
    finding: str
    problems: tuple[str, ...] = ()
    is_done: bool = True

    @property
    def is_good(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems


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
        size = storage.size(path / name)
        if size is None:
            problems.append(f"{name} is missing")
        elif size != file.num_bytes:
            problems.append(f"{name} has {size:,} bytes, not {file.num_bytes:,}")
        elif depth == "full" and storage.digest(path / name) != file.sha256:
            problems.append(f"{name} has another hash than the manifest says: a bit has changed")
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


def check_samples(manifest: Manifest) -> Check:
    """Recomputes the hash of the samples that were consumed from the order of the data."""
    entry = manifest.values.get("consumed")
    if entry is None:
        return Check(
            what="samples", finding="not checked: this checkpoint keeps no hash of consumed samples", is_done=False
        )
    try:
        state: Mapping[str, Any] = decode(entry)
        wanted = recompute(state)
        problems, count = _sample_problems(manifest, state, wanted), int(state["count"])
        orders = [
            f"{s['first']:,} to {s['last']:,} of {s['length']:,} samples, seed {s['seed']}" for s in state["segments"]
        ]
    except (KeyError, TypeError, ValueError, PacelineError) as error:
        problem = f"what is noted of consumed samples cannot be read: {type(error).__name__}: {error}"
        return Check(what="samples", finding="the running hash of consumed ids", problems=(problem,))
    told = f"{count:,} ids hashed again in the order of the data ({'; then '.join(orders) or 'none yet'})"
    return Check(what="samples", finding=told, problems=tuple(problems))


def _sample_problems(manifest: Manifest, state: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    problems = []
    if wanted["count"] != state["count"]:
        problems.append(
            f"{state['count']:,} samples were consumed, and the order of the data has {wanted['count']:,} there"
        )
    elif wanted["hash"] != state["hash"]:
        problems.append(
            f"the ids that were consumed hash to {state['hash']}, those of the order to {wanted['hash']}: "
            "samples were lost, repeated or taken in another order"
        )
    last = state["segments"][-1]["last"] if state["segments"] else 0
    if last != manifest.position:
        problems.append(f"the last sample was at position {last:,}, and the run goes on at {manifest.position:,}")
    problems += _differs_from_config(manifest, state)
    return problems


def _differs_from_config(manifest: Manifest, state: Mapping[str, Any]) -> list[str]:
    """Compares the order that was noted last with the seed and shuffling that the saved config asks for."""
    config = manifest.about.get("config") or {}
    if not state["segments"] or "data" not in config or "train" not in config:
        return []
    last, data = state["segments"][-1], config["data"]
    seed = config["train"].get("seed") if data.get("seed") is None else data["seed"]
    asked: list[tuple[str, Any]] = [("seed", seed), ("shuffle", data.get("shuffle"))]
    return [
        f"the order had {name} = {last[name]}, and the saved config says {value}"
        for name, value in asked
        if value is not None and last[name] != value
    ]


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
