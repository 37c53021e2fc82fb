"""The audit of consumed samples: computed anew from the order of the data, a pure function of (seed, epoch, index).

    order     the seed, shuffling, last batch, global batch and number of samples that the run noted are the config's
    path      the first segment begins at 0, each begins where the one before ended, the run goes on where the last did
    batches   segments end where batches do, and there are as many batches as steps
    ids       each at most once in an epoch, in a whole epoch exactly once; their hash is the one that the run has kept

Positions that a roll-back left out on purpose, and the ragged end of an epoch where the config drops it, are told and
no fault. Cost: 0.4 us a sample, and a byte of memory for each sample of the data set. Neither data nor model is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.checkpoint.manifest import Manifest
from paceline.checkpoint.tools.check import Check
from paceline.checkpoint.values import decode
from paceline.data.consumed import Segment, batches_of, extend_hash, hash_text, segments_of, skipped_of
from paceline.data.order import DataOrder, GlobalBatch
from paceline.errors import PacelineError

_AT_ONCE = 1 << 16  # ids
_UNREADABLE = (KeyError, TypeError, ValueError, AttributeError, IndexError, PacelineError)


def check_samples(manifest: Manifest) -> Check:
    """Computes anew which samples a run must have consumed, and compares that with what it has kept."""
    entry = manifest.values.get("consumed")
    if entry is None:
        return Check(
            what="samples", finding="not checked: this checkpoint keeps no hash of consumed samples", is_done=False
        )
    try:
        return _checked(manifest, decode(entry))
    except _UNREADABLE as error:
        problem = f"what is noted of consumed samples cannot be read: {type(error).__name__}: {error}"
        return Check(what="samples", finding="the running hash of consumed ids", problems=(problem,))


def _checked(manifest: Manifest, state: Mapping[str, Any]) -> Check:
    segments, skipped, count = segments_of(state), skipped_of(state), int(state["count"])
    path = follow(segments, skipped, manifest.position)
    problems = [*_order_problems(manifest, segments), *path.problems]
    wanted = sum(segment.last - segment.first for segment in segments)
    told = f"{count:,} ids"
    if wanted != count:
        problems.append(f"{count:,} samples were consumed, and the order of the data has {wanted:,} there")
    else:  # else the segments are not to be trusted: they may be of any length
        again = consume_again(segments)
        told += f" in {again.num_batches:,} batches hashed again in the order of the data"
        problems += again.problems
        problems += _step_problems(manifest, again)
        if again.hash != state["hash"]:
            problems.append(
                f"the ids that were consumed hash to {state['hash']}, those of the order to {again.hash}: "
                "samples were lost, repeated or taken in another order"
            )
    told += f" ({'; then '.join(map(_in_words, segments)) or 'none yet'})"
    if not problems:
        told += ", each at most once an epoch" if path.told else ", each once an epoch"
    return Check(what="samples", finding="; ".join([told, *path.told]), problems=tuple(problems))


# The way through the positions


@dataclass(slots=True)
class Path:
    """How segments follow on one another: what is wrong, and which gaps have a reason."""

    problems: list[str] = field(default_factory=list)
    told: list[str] = field(default_factory=list)


def follow(segments: Sequence[Segment], skipped: Sequence[tuple[int, int]], position: int) -> Path:
    """Goes through the segments from 0 to the position that the run goes on from."""
    found, unused, place = Path(), list(skipped), 0
    for segment in segments:
        if segment.last <= segment.first:
            raise ValueError(f"a segment from {segment.first:,} to {segment.last:,}")
        if segment.first < place:
            found.problems.append(
                f"positions {segment.first:,} to {min(place, segment.last):,} were consumed twice: "
                "a segment begins before the one before it has ended"
            )
        elif segment.first > place and not _has_reason(place, segment.first, segment.order, unused, found):
            found.problems.append(f"{_gap(place, segment.first)} were never consumed, and nothing noted says why")
        place = max(place, segment.last)
    if position < place:
        found.problems.append(
            f"the last sample was at position {place:,}, and the run goes on at {position:,}: "
            f"positions {position:,} to {place:,} would be consumed twice"
        )
    elif position > place and not _has_reason(place, position, None, unused, found):
        found.problems.append(
            f"the last sample was at position {place:,}, and the run goes on at {position:,}: "
            f"{_gap(place, position)} would never be consumed"
        )
    found.problems += [f"{_gap(*each)} are noted as left out, and are no gap in what was consumed" for each in unused]
    return found


def _has_reason(first: int, last: int, order: DataOrder | None, unused: list[tuple[int, int]], found: Path) -> bool:
    """Says whether a gap is one that was noted, or the end of an epoch that the config drops."""
    if (first, last) in unused:
        unused.remove((first, last))
        found.told.append(f"{_gap(first, last)} were left out by a roll-back, as it noted")
        return True
    if order is not None and order.drop_last and order.batch_at(first).position == last:
        found.told.append(f"{_gap(first, last)} are the end of an epoch that data.last_batch = drop leaves out")
        return True
    return False


# The ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Again:
    """What segments consist of, computed anew."""

    hash: str
    num_batches: int
    problems: tuple[str, ...]


def consume_again(segments: Sequence[Segment]) -> Again:
    """Hashes the ids of segments, counts their batches, and looks for ids that come twice in an epoch."""
    known, num_batches, problems = (0, 0), 0, []
    seen = _Seen(max((segment.order.length for segment in segments), default=0))
    for batches in _runs(segments):
        segment, last = batches[-1]
        first = batches[0][1]
        indices = np.concatenate([batch.indices for _, batch in batches])[: segment.last - first.position]
        known, num_batches = extend_hash(known, indices), num_batches + len(batches)
        seen.note(first.epoch, first.position, indices)
        if last.next_position > segment.last:
            problems.append(
                f"a segment ends at position {segment.last:,}, and the batch of {segment.order.global_batch:,} there "
                f"goes from {last.position:,} to {last.next_position:,}"
            )
    return Again(hash=hash_text(known), num_batches=num_batches, problems=(*problems, *seen.problems()))


def _runs(segments: Sequence[Segment]) -> Iterator[list[tuple[Segment, GlobalBatch]]]:
    """Yields batches of one segment and epoch together, many at a time: each by itself would cost more than its ids."""
    together: list[tuple[Segment, GlobalBatch]] = []
    for segment, batch in batches_of(segments):
        is_full = len(together) * segment.order.global_batch >= _AT_ONCE
        if together and (is_full or together[-1][0] is not segment or together[-1][1].epoch != batch.epoch):
            yield together
            together = []
        together.append((segment, batch))
    if together:
        yield together


class _Seen:
    """Which ids have come in an epoch, a byte for each; and what came a second time, by epoch."""

    def __init__(self, length: int) -> None:
        self._epoch = -1
        self._ids: NDArray[np.bool_] = np.zeros(length, dtype=np.bool_)
        self._twice: dict[int, tuple[int, list[int]]] = {}

    def note(self, epoch: int, position: int, indices: NDArray[np.int64]) -> None:
        """Takes ids from a position on, all of one epoch."""
        if epoch != self._epoch:
            self._epoch = epoch
            self._ids[:] = False
        is_first = np.zeros(len(indices), dtype=np.bool_)
        is_first[np.unique(indices, return_index=True)[1]] = True
        twice = np.flatnonzero(self._ids[indices] | ~is_first)
        self._ids[indices] = True
        if twice.size:
            _, ids = self._twice.setdefault(epoch, (position + int(twice[0]), []))
            ids += indices[twice].tolist()

    def problems(self) -> list[str]:
        """Returns the ids that came twice, in words."""
        return [
            f"epoch {epoch}: {len(ids):,} ids come a second time, from position {place:,} on: "
            f"{', '.join(map(str, ids[:3]))}{', ...' if len(ids) > 3 else ''}"
            for epoch, (place, ids) in self._twice.items()
        ]


# Against the config


def _order_problems(manifest: Manifest, segments: Sequence[Segment]) -> list[str]:
    """Compares the order that was noted last with what the saved config and the plan of the run ask for."""
    if not segments:
        return []
    config, plan = manifest.about.get("config") or {}, decode(manifest.values.get("data") or {"dict": []})
    data, train = config.get("data") or {}, config.get("train") or {}
    last_batch = data.get("last_batch")
    asked: dict[str, list[Any]] = {
        "seed": [train.get("seed") if data.get("seed") is None else data["seed"]],
        "shuffle": [data.get("shuffle")],
        "drop_last": [None if last_batch is None else last_batch == "drop"],
        "global_batch": [plan.get("global_batch"), train.get("global_batch")],
        "length": [plan.get("length")],
    }
    last = segments[-1].order
    return [
        f"the order had {name} = {getattr(last, name)}, and the saved config says {value}"
        for name, values in asked.items()
        for value in dict.fromkeys(values)
        if isinstance(value, int) and getattr(last, name) != value
    ]


def _step_problems(manifest: Manifest, again: Again) -> list[str]:
    if again.num_batches == manifest.step:
        return []
    return [f"{again.num_batches:,} batches were consumed, and the checkpoint is of step {manifest.step:,}"]


def _in_words(segment: Segment) -> str:
    order = segment.order
    return (
        f"{segment.first:,} to {segment.last:,} of {order.length:,} samples, seed {order.seed}, "
        f"batch {order.global_batch:,}"
    )


def _gap(first: int, last: int) -> str:
    return f"positions {first:,} to {last:,}"
