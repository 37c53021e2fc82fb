"""The search: of all ways to train a model on a cluster, those that fit, the fastest (or smallest) first, and why.

Memory comes before time: a footprint is a few additions, a prediction about a millisecond. Computing again never makes
a step faster, so that of a candidate only the least recomputation that fits is timed.

A candidate fits where it needs no more than 90 % of the device by the formulas of ``footprint.py`` and, where the
model is one that this package builds, by the estimate that its engines are checked against (``estimate/``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from paceline.cluster.devices import Cluster
from paceline.errors import UsageError
from paceline.estimate.choice import MARGIN
from paceline.planner.candidates import RECOMPUTE, Candidate, Task, candidates_for, divisors, recomputing
from paceline.planner.engine_costs import engine_footprint, price
from paceline.planner.predict import Prediction, model_flops
from paceline.units import format_bytes, format_seconds

Order: TypeAlias = Literal["time", "memory"]
Need: TypeAlias = Callable[[Candidate], float]

TOO_LARGE = "more memory than the device has"
_TIMED_BY_MEMORY = 200  # of the smallest candidates, where the smallest are asked for
# Parts of a step in words: where a slower candidate spends more.
_PARTS = {
    "compute": "computing",
    "tensor_wait": "waiting for tensor-parallel ranks",
    "launch_wait": "waiting for kernel launches",
    "bubble": "pipeline bubble",
    "exposed": "communication that nothing hides",
    "contention": "computing slowed by communication",
    "optimizer": "the optimizer",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """A candidate that fits, what a step of it takes, and what a rank needs."""

    candidate: Candidate
    prediction: Prediction
    memory_bytes: float
    peak_flops: float

    @property
    def seconds(self) -> float:
        return self.prediction.seconds

    @property
    def tokens_per_s(self) -> float:
        return self.prediction.samples_per_s * self.candidate.workload.run.seq_len

    @property
    def mfu(self) -> float:
        """Model FLOPs, attention in full, as a share of the devices' dense peak."""
        workload = self.candidate.workload
        return self.prediction.samples_per_s * model_flops(workload) / workload.layout.devices / self.peak_flops

    @property
    def communication(self) -> float:
        """The share of a step that waits for other ranks: tensor-parallel waits, and what nothing hides."""
        step = self.prediction.step
        return (step.tensor_wait + step.exposed + step.contention) / step.total


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """What was found. ``num_fit``: how many fit, all of which are ranked where time is asked for.

    ``nearest``: where nothing fits, the candidate that needs least, and how much.
    """

    task: Task
    cluster: Cluster
    order: Order
    ranked: tuple[Ranked, ...]
    num_fit: int
    left_out: dict[str, int]
    nearest: tuple[Candidate, float] | None = None

    @property
    def looked_at(self) -> int:
        return self.num_fit + sum(self.left_out.values())

    @property
    def budget(self) -> float:
        """Bytes that a rank may take."""
        return budget_of(self.cluster)


def budget_of(cluster: Cluster) -> float:
    """Returns the bytes that a rank may take: a tenth is left to the allocator, and to the error of estimates."""
    return cluster.device.memory_bytes * (1 - MARGIN)


def search(task: Task, cluster: Cluster, *, order: Order = "time", need: Need | None = None) -> Search:
    """Ranks all candidates that fit. ``need``: bytes of a rank by another estimate; the larger of both counts.

    Raises UsageError where the batch can be shared by no mesh of these devices.
    """
    left_out: Counter[str] = Counter()
    fitting: list[tuple[Candidate, float]] = []
    nearest: tuple[Candidate, float] | None = None
    any_mesh = False
    for candidate in candidates_for(task, cluster, left_out):
        any_mesh = True
        fits, smallest = _that_fit(candidate, budget_of(cluster), need, every=order == "memory")
        if not fits:
            left_out[TOO_LARGE] += 1
            if nearest is None or smallest[1] < nearest[1]:
                nearest = smallest
        fitting += fits
    if not any_mesh:
        raise _no_mesh(task, cluster, left_out)
    num_fit = len(fitting)
    if order == "memory":
        fitting = sorted(fitting, key=lambda each: each[1])[:_TIMED_BY_MEMORY]
    ranked = [_rank(candidate, num_bytes, cluster) for candidate, num_bytes in fitting]
    ranked.sort(key=lambda each: (each.seconds, each.memory_bytes))
    if order == "memory":
        ranked.sort(key=lambda each: each.memory_bytes)  # stable: of equal ones the faster stays first
    return Search(
        task=task,
        cluster=cluster,
        order=order,
        ranked=tuple(ranked),
        num_fit=num_fit,
        left_out=dict(left_out),
        nearest=None if fitting else nearest,
    )


def rank_one(candidate: Candidate, cluster: Cluster, need: Need | None = None) -> Ranked:
    """Prices one candidate, whether it fits or not."""
    return _rank(candidate, _bytes_of(candidate, need), cluster)


def _rank(candidate: Candidate, num_bytes: float, cluster: Cluster) -> Ranked:
    prediction = price(candidate, cluster)
    peak = cluster.device.peak(candidate.workload.run.compute)
    return Ranked(candidate=candidate, prediction=prediction, memory_bytes=num_bytes, peak_flops=peak)


def _bytes_of(candidate: Candidate, need: Need | None) -> float:
    by_formula = engine_footprint(candidate.workload).total
    return by_formula if need is None else max(by_formula, need(candidate))


def _that_fit(
    candidate: Candidate, budget: float, need: Need | None, *, every: bool = False
) -> tuple[list[tuple[Candidate, float]], tuple[Candidate, float]]:
    """The least recomputation that fits (or every one), with its bytes; and the one that needs least."""
    found, smallest = [], (candidate, float("inf"))
    for recompute in RECOMPUTE:
        each = recomputing(candidate, recompute)
        num_bytes = engine_footprint(each.workload).total
        if num_bytes <= budget and need is not None:
            num_bytes = max(num_bytes, need(each))
        if num_bytes < smallest[1]:
            smallest = (each, num_bytes)
        if num_bytes <= budget:
            found.append((each, num_bytes))
            if not every:
                break
    return found, smallest


def _no_mesh(task: Task, cluster: Cluster, left_out: Counter[str]) -> UsageError:
    devices, batch = cluster.devices, task.global_batch
    near = [count for count in divisors(batch) if count <= devices]
    why = ", ".join(f"{reason} ({count})" for reason, count in left_out.items())
    more = -(-batch // devices) * devices
    return UsageError(
        f"{devices} devices: no mesh fits a batch of {batch}: {why}\n"
        "  devices = pipeline x data x tensor, and every data rank gets as many samples\n"
        f"  try train.global_batch={more}, or {near[-1]} devices"
    )


# Reasons.


def explain_winner(found: Search) -> str:
    """Returns a sentence on what the first one's step is made of."""
    winner = found.ranked[0]
    step = winner.prediction.step
    parts = sorted(((getattr(step, name), words) for name, words in _PARTS.items()), reverse=True)
    told = ", ".join(f"{words} {value / step.total:.0%}" for value, words in parts[:3] if value > 0.005 * step.total)
    first = "fastest" if found.order == "time" else "smallest"
    return f"{winner.candidate} is the {first} of {found.num_fit} that fit: {told}"


def explain_against(winner: Ranked, other: Ranked) -> str:
    """Returns a sentence on what another one loses, and gains, against the winner."""
    slower = other.seconds / winner.seconds - 1
    ours, theirs = winner.prediction.step, other.prediction.step
    gaps = {words: getattr(theirs, name) - getattr(ours, name) for name, words in _PARTS.items()}
    worst, best = max(gaps, key=lambda each: gaps[each]), min(gaps, key=lambda each: gaps[each])
    told = f"takes {abs(slower):.1%} {'longer' if slower > 0 else 'less'}" if abs(slower) >= 0.0005 else "takes as long"
    more = f"{format_seconds(gaps[worst])} more of {worst}" if gaps[worst] > 0.001 * winner.seconds else ""
    less = f"{format_seconds(-gaps[best])} less of {best}" if -gaps[best] > 0.001 * winner.seconds else ""
    if more or less:
        told += ", with " + " and ".join(part for part in (more, less) if part)
    change = other.memory_bytes - winner.memory_bytes
    if abs(change) > 0.01 * winner.memory_bytes:
        told += f"; needs {format_bytes(abs(change))} {'more' if change > 0 else 'less'}"
    return f"{other.candidate} {told}"


# What makes it fit.


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Keys to change, and what a step takes then; None where only memory was looked at."""

    keys: dict[str, int | str | bool]
    ranked: Ranked | None = None

    def __str__(self) -> str:
        told = " ".join(f"{key}={str(value).lower()}" for key, value in self.keys.items())
        if self.ranked is None:
            return told
        return (
            f"{told}: {format_seconds(self.ranked.seconds)} a step, {format_bytes(self.ranked.memory_bytes)} of a rank"
        )


def smallest_changes(asked: Candidate, found: Search, *, most: int = 3, named: Collection[str] = ()) -> list[Change]:
    """Returns the fewest decisions that make a candidate fit: for each number of them the fastest way, few first.

    ``named``: keys that a change names whether it decides them or not: those that the config derives from others and
    would derive anew, and those that it gives although they follow (``train.accumulate``, ``parallel.data``).
    """
    best: dict[int, Change] = {}
    for ranked in found.ranked:
        before, after = asked.knobs, ranked.candidate.knobs
        number = sum(before[key] != value for key, value in after.items())
        if number and number not in best:
            candidate = ranked.candidate
            follows = {"train.accumulate": candidate.accumulate, "parallel.data": candidate.layout.data}
            keys = {key: value for key, value in candidate.settings.items() if value != asked.settings.get(key)}
            keys |= {key: value for key, value in (candidate.settings | follows).items() if key in named}
            best[number] = Change(keys=keys, ranked=ranked)
    changes = [best[number] for number in sorted(best)]
    # More of them are worth it only where they are faster.
    return [
        each for place, each in enumerate(changes) if all(_time(each) < _time(before) for before in changes[:place])
    ][:most]


def _time(change: Change) -> float:
    return change.ranked.seconds if change.ranked else float("inf")


def room_makers(found: Search, need_for: Callable[[Task], Need | None]) -> list[Change]:
    """Returns what would make anything fit where nothing does: more devices, shorter sequences, fewer bytes."""
    return [change for change in _makers(found, need_for) if change.keys]


def _makers(found: Search, need_for: Callable[[Task], Need | None]) -> Iterator[Change]:
    task, cluster = found.task, found.cluster
    for factor in (2, 4, 8, 16, 32, 64):
        if cluster.between is None:
            break
        larger = replace(cluster, nodes=cluster.nodes * factor)
        if _fits_at_all(task, larger, need_for(task)):
            yield Change(keys={"devices": larger.devices})
            break
    for factor in (2, 4, 8):
        shorter = replace(task, seq_len=max(1, task.seq_len // factor))
        if _fits_at_all(shorter, cluster, need_for(shorter)):
            yield Change(keys={"data.context": shorter.seq_len})
            break


def _fits_at_all(task: Task, cluster: Cluster, need: Need | None) -> bool:
    ignored: Counter[str] = Counter()
    return any(
        _that_fit(each, budget_of(cluster), need)[0]
        for each in candidates_for(task, cluster, ignored)
        if each.microbatch == 1
    )
