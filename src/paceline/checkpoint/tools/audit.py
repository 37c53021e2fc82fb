"""Verifying: is all of it there, is it what was written, and were the right samples consumed?

Samples are computed anew from the order of the data, a pure function of (seed, epoch, index): neither data nor model is
needed. Positions that a roll-back left out, and an epoch's ragged end that the config drops, are reported and no fault.

Cost: full reads everything once, at 1 to 2 GB/s a thread; the samples take 0.4 us each, and a byte of memory for each
sample of the data set.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from paceline.checkpoint.find import file_problem, read_manifest, value_problems
from paceline.checkpoint.formats import coverage_problems, piece_problems
from paceline.checkpoint.manifest import MALFORMED, MANIFEST, Manifest
from paceline.checkpoint.storage import FileStore, storage_of
from paceline.checkpoint.tensors import Progress, decode, ignore_progress
from paceline.data import order as orders
from paceline.errors import CheckpointError, PacelineError
from paceline.untrusted import is_count

Depth = Literal["fast", "full"]
_AT_ONCE = 1 << 16  # ids
_UNREADABLE = (*MALFORMED, ArithmeticError, MemoryError, PacelineError)
_MOST_SAMPLES = 2**36  # of a data set; a byte of memory for each
_MOST_BATCH = 2**26


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditCheck:
    """The result of one check, in words. ``is_done`` is False where there was nothing to check it by."""

    what: str
    finding: str
    problems: tuple[str, ...] = ()
    is_done: bool = True

    @property
    def is_good(self) -> bool:
        return not self.problems


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """All that was checked of one checkpoint."""

    path: Path
    step: int
    depth: Depth
    checks: tuple[AuditCheck, ...] = ()

    @property
    def is_good(self) -> bool:
        return all(check.is_good for check in self.checks)


def audit(path: Path, depth: Depth = "full", progress: Progress = ignore_progress) -> Audit:
    """Checks a checkpoint, all of it, and reports everything that is wrong. Raises CheckpointError if it is none."""
    storage, manifest = storage_of(path), read_manifest(path)
    files = check_files(path, manifest, storage, depth, progress)
    damaged = {problem.split(" ", 1)[0] for problem in files.problems}
    checks = [files, check_tensors(path, manifest, storage, skip=damaged), check_samples(manifest)]
    return Audit(path=path, step=manifest.step, depth=depth, checks=tuple(checks))


def check_files(path: Path, manifest: Manifest, storage: FileStore, depth: Depth, progress: Progress) -> AuditCheck:
    problems = []
    for name, file in manifest.files.items():
        try:
            problems += [found] if (found := file_problem(path, manifest, storage, depth, name)) else []
        except CheckpointError as error:
            problems.append(str(error).splitlines()[0])
        except OSError as error:
            problems.append(f"{name} cannot be read: {error.strerror or error}")
        progress(file.num_bytes)
    if depth == "full" and not problems:
        problems += value_problems(path, manifest, storage)
    extra = [name for name in storage.names(path) if name not in {*manifest.files, MANIFEST}]
    how = "SHA-256 of each" if depth == "full" else "sizes (the hashes: --full)"
    finding = f"{len(manifest.files)} files, {manifest.num_bytes:,} bytes: {how}"
    if extra:
        finding += f"; {len(extra)} more that do not belong to it: {', '.join(extra[:3])}"
    return AuditCheck(what="files", finding=finding, problems=tuple(problems))


def check_tensors(path: Path, manifest: Manifest, storage: FileStore, skip: Collection[str] = ()) -> AuditCheck:
    """Checks that every tensor is there whole, once, and that the files have the pieces. ``skip``: damaged files."""
    problems = piece_problems(path, manifest, storage, skip)
    for name, tensor in manifest.tensors.items():
        problems += [f"{name}: {each}" for each in coverage_problems(name, tensor)]
    elements = sum(math.prod(tensor.shape) for tensor in manifest.tensors.values())
    num_pieces = sum(len(tensor.pieces) for tensor in manifest.tensors.values())
    count = f"{len(manifest.tensors)} tensors, {elements:,} elements in {num_pieces} pieces"
    return AuditCheck(what="tensors", finding=f"{count}: each element in exactly one", problems=tuple(problems))


def check_samples(manifest: Manifest) -> AuditCheck:
    """Computes anew which samples a run must have consumed, and compares that with what it has kept."""
    entry = manifest.values.get("consumed")
    if entry is None:
        finding = "not checked: this checkpoint keeps no hash of consumed samples"
        return AuditCheck(what="samples", finding=finding, is_done=False)
    try:
        return _checked(manifest, decode(entry))
    except _UNREADABLE as error:
        problem = f"what is noted of consumed samples cannot be read: {type(error).__name__}: {error}"
        return AuditCheck(what="samples", finding="the running hash of consumed ids", problems=(problem,))


def _checked(manifest: Manifest, state: Mapping[str, Any]) -> AuditCheck:
    segments, skipped, count = orders.segments_of(state), orders.skipped_of(state), int(state["count"])
    for segment in segments:  # numbers that no run has would take memory and time without end
        order, places = segment.order, (segment.first, segment.last, count)
        is_right = is_count(order.length, _MOST_SAMPLES) and is_count(order.global_batch, _MOST_BATCH)
        if not is_right or not order.global_batch or not all(is_count(place) for place in places):
            raise ValueError(f"a segment has {order.length} samples in batches of {order.global_batch}")
    wrong_path, gaps = follow(segments, skipped, manifest.position)
    problems = [*_order_problems(manifest, segments), *wrong_path]
    wanted = sum(segment.last - segment.first for segment in segments)
    finding = f"{count:,} ids"
    if wanted != count:
        problems.append(f"{count:,} samples were consumed, and the order of the data has {wanted:,} there")
    elif wanted > manifest.step * max((segment.order.global_batch for segment in segments), default=0):
        problems.append(f"{count:,} samples were consumed, which is more than {manifest.step:,} batches have")
    else:  # else the segments are not to be trusted: they may be of any length
        found, num_batches, wrong_ids = consume_again(segments)
        finding += f" in {num_batches:,} batches hashed again in the order of the data"
        problems += wrong_ids
        if num_batches != manifest.step:
            problems.append(f"{num_batches:,} batches were consumed, and the checkpoint is of step {manifest.step:,}")
        if found != state["hash"]:
            problems.append(
                f"the ids that were consumed hash to {state['hash']}, those of the order to {found}: "
                "samples were lost, repeated or taken in another order"
            )
    finding += f" ({'; then '.join(map(_in_words, segments)) or 'none yet'})"
    if not problems:
        finding += ", each at most once an epoch" if gaps else ", each once an epoch"
    return AuditCheck(what="samples", finding="; ".join([finding, *gaps]), problems=tuple(problems))


def follow(
    segments: Sequence[orders.Segment], skipped: Sequence[tuple[int, int]], position: int
) -> tuple[list[str], list[str]]:
    """Follows the segments from 0 to the position that the run goes on from: what is wrong, gaps with a reason."""
    problems, gaps, unused, place = [], [], list(skipped), 0
    for segment in segments:
        if segment.last <= segment.first:
            raise ValueError(f"a segment from {segment.first:,} to {segment.last:,}")
        if segment.first < place:
            twice = _gap(segment.first, min(place, segment.last))
            problems.append(f"{twice} were consumed twice: a segment begins before the one before it has ended")
        elif reason := _reason(place, segment.first, segment.order, unused):
            gaps.append(reason)
        elif segment.first > place:
            problems.append(f"{_gap(place, segment.first)} were never consumed, and nothing noted says why")
        place = max(place, segment.last)
    end = f"the last sample was at position {place:,}, and the run goes on at {position:,}"
    if position < place:
        problems.append(f"{end}: {_gap(position, place)} would be consumed twice")
    elif reason := _reason(place, position, None, unused):
        gaps.append(reason)
    elif position > place:
        problems.append(f"{end}: {_gap(place, position)} would never be consumed")
    problems += [f"{_gap(*each)} are noted as left out, and are no gap in what was consumed" for each in unused]
    return problems, gaps


def _reason(first: int, last: int, order: orders.DataOrder | None, unused: list[tuple[int, int]]) -> str:
    """Says why there is a gap: it was noted, or is the end of an epoch that the config drops. Empty: neither."""
    if first < last and (first, last) in unused:
        unused.remove((first, last))
        return f"{_gap(first, last)} were left out by a roll-back, as it noted"
    if first < last and order is not None and order.drop_last and order.batch_at(first).position == last:
        return f"{_gap(first, last)} are the end of an epoch that data.last_batch = drop leaves out"
    return ""


def consume_again(segments: Sequence[orders.Segment]) -> tuple[str, int, list[str]]:
    """Returns the hash of the ids, the number of batches, and what is wrong: ids that come twice, batches cut."""
    known, num_batches, problems, epoch = (0, 0), 0, list[str](), -1
    has_come = np.zeros(max((segment.order.length for segment in segments), default=0), dtype=np.bool_)  # in an epoch
    twice: dict[int, tuple[int, list[int]]] = {}  # by epoch: the first position, and the ids
    for batches in _runs(segments):
        (segment, last), first = batches[-1], batches[0][1]
        indices = np.concatenate([batch.indices for _, batch in batches])[: segment.last - first.position]
        known, num_batches = orders.extend_hash(known, indices), num_batches + len(batches)
        if first.epoch != epoch:
            epoch, has_come[:] = first.epoch, False
        is_first = np.zeros(len(indices), dtype=np.bool_)
        is_first[np.unique(indices, return_index=True)[1]] = True
        again = np.flatnonzero(has_come[indices] | ~is_first)
        has_come[indices] = True
        if again.size:
            twice.setdefault(epoch, (first.position + int(again[0]), []))[1].extend(indices[again].tolist())
        if last.next_position > segment.last:
            problems.append(
                f"a segment ends at position {segment.last:,}, and the batch of {segment.order.global_batch:,} there "
                f"goes from {last.position:,} to {last.next_position:,}"
            )
    problems += [
        f"epoch {number}: {len(ids):,} ids come a second time, from position {place:,} on: "
        f"{', '.join(map(str, ids[:3]))}{', ...' if len(ids) > 3 else ''}"
        for number, (place, ids) in twice.items()
    ]
    return orders.hash_text(known), num_batches, problems


def _runs(segments: Sequence[orders.Segment]) -> Iterator[list[tuple[orders.Segment, orders.GlobalBatch]]]:
    """Yields batches of one segment and epoch together, many at a time: each by itself would cost more than its ids."""
    together: list[tuple[orders.Segment, orders.GlobalBatch]] = []
    for segment, batch in orders.batches_of(segments):
        is_full = len(together) * segment.order.global_batch >= _AT_ONCE
        if together and (is_full or together[-1][0] is not segment or together[-1][1].epoch != batch.epoch):
            yield together
            together = []
        together.append((segment, batch))
    if together:
        yield together


def _order_problems(manifest: Manifest, segments: Sequence[orders.Segment]) -> list[str]:
    """Compares the order that was noted last with what the saved config and the plan of the run ask for."""
    if not segments:
        return []
    plan, setting = decode(manifest.values.get("data") or {"dict": []}), manifest.setting
    data_seed, last_batch = setting("data", "seed"), setting("data", "last_batch")
    asked = [("seed", setting("train", "seed") if data_seed is None else data_seed)]
    asked += [("shuffle", setting("data", "shuffle"))]
    asked += [("drop_last", None if last_batch is None else last_batch == "drop")]
    asked += [("global_batch", plan.get("global_batch")), ("global_batch", setting("train", "global_batch"))]
    asked += [("length", plan.get("length"))]
    last = segments[-1].order
    return [
        f"the order had {name} = {getattr(last, name)}, and the saved config says {value}"
        for name, value in dict.fromkeys(asked)
        if isinstance(value, int) and getattr(last, name) != value
    ]


def _in_words(segment: orders.Segment) -> str:
    order, place = segment.order, f"{segment.first:,} to {segment.last:,}"
    return f"{place} of {order.length:,} samples, seed {order.seed}, batch {order.global_batch:,}"


def _gap(first: int, last: int) -> str:
    return f"positions {first:,} to {last:,}"
