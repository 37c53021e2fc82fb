"""The search: of all ways to train a model on a cluster, those that fit, the fastest (or smallest) first, and why.

Memory comes before time: a footprint is a few additions, a prediction about a millisecond. Computing again never makes
a step faster, and neither does the host's memory, so that of a candidate only the least recomputation that fits is
timed, without offload and with each kind of it that lets less be computed again; on one rank alone, with all kinds.
Buckets and what stays gathered are other than usual where they gain half a per cent at least.

A candidate fits where it needs no more than 90 % of the device by the formulas of ``footprint.py`` and, where the
model is one that this package builds, by the estimate that its engines are checked against (``estimate/``). What the
host must hold counts where its memory is known.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeAlias

from paceline.cluster.devices import Cluster
from paceline.config.sharding import FULLY_SHARDED
from paceline.errors import UsageError
from paceline.plan.workload import SampleModel
from paceline.predict.formulas.engine_costs import candidate_footprint, price_untuned, with_tuning
from paceline.predict.formulas.predict import Prediction, model_flops
from paceline.predict.formulas.tuning import BUCKETS_MB, part_params
from paceline.search.candidates import Candidate, Task, Value, candidates_for, recomputing, tuned
from paceline.search.choice import MARGIN
from paceline.units import format_bytes, format_seconds

Order: TypeAlias = Literal["time", "cost", "memory"]
Need: TypeAlias = Callable[[Candidate], float]
ORDERS: tuple[Order, ...] = ("time", "cost", "memory")

TOO_LARGE = "more memory than the device has"
NOT_ALLOWED = "the config forbids them"
NO_ROOM_ON_HOST = "more memory than the host has"
_TIMED_BY_MEMORY = 200  # of the smallest candidates, where the smallest are asked for
_WORTH_TUNING = 0.995
_HOST_BYTES = 18  # of a parameter that is offloaded: masters, gradients, moments, and a copy in low precision
# Parts of a step in words: where a slower candidate spends more.
_PARTS = {
    "compute": "computing",
    "tensor_wait": "waiting for tensor-parallel ranks",
    "launch_wait": "waiting for kernel launches",
    "bubble": "pipeline bubble",
    "exposed": "communication that nothing hides",
    "contention": "computing slowed by communication",
    "slowest": "waiting for the slowest rank",
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
    def samples_per_s(self) -> float:
        return self.prediction.samples_per_s

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all samples; of a model whose samples are no rows of tokens, samples."""
        return self.prediction.samples_per_s * self.candidate.workload.run.seq_len

    @property
    def device_hours(self) -> float:
        """Of one step."""
        return self.seconds * self.candidate.layout.devices / 3600

    @property
    def host_bytes(self) -> float:
        """What a rank has in its host's memory."""
        return host_bytes(self.candidate)

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
    host_memory: float = float("inf")

    @property
    def looked_at(self) -> int:
        return self.num_fit + sum(self.left_out.values())

    @property
    def budget(self) -> float:
        """Bytes that a rank may take."""
        return budget_of(self.cluster)

    def host_holds(self, ranked: Ranked) -> bool:
        """Whether the ranks of a node have room for what they offload."""
        return node_bytes(ranked.candidate, self.cluster) <= self.host_memory


def budget_of(cluster: Cluster) -> float:
    """Returns the bytes that a rank may take: a tenth is left to the allocator, and to the error of estimates."""
    return cluster.device.memory_bytes * (1 - MARGIN)


def search(
    task: Task,
    cluster: Cluster,
    *,
    order: Order = "time",
    need: Need | None = None,
    host_memory: float = float("inf"),
    keep: Callable[[Candidate], bool] = lambda _: True,
) -> Search:
    """Ranks all candidates that fit. ``need``: bytes of a rank by another estimate; the larger of both counts.

    ``host_memory``: bytes that all ranks of a node may take of it. ``keep``: which candidates are looked at. On one
    cluster the cheapest is the fastest. Raises UsageError where the batch can be shared by no mesh of these devices.
    """
    left_out: Counter[str] = Counter()
    fitting: list[tuple[Candidate, float]] = []
    nearest: tuple[Candidate, float] | None = None
    any_mesh = False
    fitter = Fitter(task=task, cluster=cluster, need=need, host_memory=host_memory, every=order == "memory")
    for candidate in candidates_for(task, cluster, left_out):
        any_mesh = True
        if not keep(candidate):
            left_out[NOT_ALLOWED] += 1
            continue
        forms = fitter.fitting(candidate)
        if not forms.fitting:
            left_out[NO_ROOM_ON_HOST if forms.lacks_host else TOO_LARGE] += 1
            if nearest is None or forms.smallest[1] < nearest[1]:
                nearest = forms.smallest
        fitting += forms.fitting
    if not any_mesh:
        raise _no_mesh(task, cluster, left_out)
    num_fit = len(fitting)
    if order == "memory":
        fitting = sorted(fitting, key=lambda each: each[1])[:_TIMED_BY_MEMORY]
    ranked = [_tuned(candidate, num_bytes, fitter) for candidate, num_bytes in fitting]
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
        host_memory=host_memory,
    )


def rank_one(candidate: Candidate, cluster: Cluster, need: Need | None = None) -> Ranked:
    """Prices one candidate, whether it fits or not."""
    return _rank(candidate, _bytes_of(candidate, need), cluster)


def _rank(candidate: Candidate, num_bytes: float, cluster: Cluster, untuned: Prediction | None = None) -> Ranked:
    untuned = untuned or price_untuned(candidate, cluster)
    peak = cluster.device.peak(candidate.workload.run.compute)
    prediction = with_tuning(untuned, candidate, cluster)
    return Ranked(candidate=candidate, prediction=prediction, memory_bytes=num_bytes, peak_flops=peak)


def _bytes_of(candidate: Candidate, need: Need | None) -> float:
    by_formula = candidate_footprint(candidate).total
    if need is None:
        return by_formula
    # A sample's cost says less of memory than the layers do.
    is_sample = isinstance(candidate.workload.model, SampleModel)
    return need(candidate) if is_sample else max(by_formula, need(candidate))


def host_bytes(candidate: Candidate) -> float:
    """Returns what a rank has in its host's memory."""
    if not candidate.offload:
        return 0.0
    each = _HOST_BYTES if "optimizer" in candidate.offload else 8
    return each * part_params(candidate.workload) / candidate.shard


def node_bytes(candidate: Candidate, cluster: Cluster) -> float:
    """Returns what all ranks of a node have in its host's memory."""
    return host_bytes(candidate) * cluster.node.devices


class Forms(NamedTuple):
    """The forms of a candidate that fit, with their bytes; the one that needs least; whether hosts are too small."""

    fitting: list[tuple[Candidate, float]]
    smallest: tuple[Candidate, float]
    lacks_host: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitter:
    """Finds the forms of a candidate that fit. ``every``: all of them, not only those that may be fastest."""

    task: Task
    cluster: Cluster
    need: Need | None = None
    host_memory: float = float("inf")
    every: bool = False

    @property
    def budget(self) -> float:
        return budget_of(self.cluster)

    def fitting(self, candidate: Candidate) -> Forms:
        """Returns the forms that fit. Offload is looked at as long as it lets less be computed again.

        On one rank alone all kinds are: there parameters that come from the host come ahead, and may be faster.
        """
        found, smallest, lacks_host = list[tuple[Candidate, float]](), (candidate, float("inf")), False
        for offload in _offloads(candidate, self.cluster):
            moved = tuned(candidate, offload=offload) if offload else candidate
            has_room = self.host_holds(moved)
            for recompute in self.task.recompute:
                each = recomputing(moved, recompute)
                num_bytes = candidate_footprint(each).total if self.need is None else self._needed(each)
                if not has_room:
                    lacks_host = lacks_host or num_bytes <= self.budget
                    continue
                if num_bytes < smallest[1]:
                    smallest = (each, num_bytes)
                if num_bytes <= self.budget:
                    found.append((each, num_bytes))
                    if recompute == "none" and not self.every and not (offload and candidate.shard == 1):
                        return Forms(found, smallest, lacks_host)
                    if not self.every:
                        break
        return Forms(found, smallest, lacks_host)

    def host_holds(self, candidate: Candidate) -> bool:
        """Whether the ranks of a node have room for what they offload."""
        return node_bytes(candidate, self.cluster) <= self.host_memory

    def _needed(self, candidate: Candidate) -> float:
        """By the formula first, which is cheaper to ask."""
        assert self.need is not None
        if isinstance(candidate.workload.model, SampleModel):
            return self.need(candidate)
        by_formula = candidate_footprint(candidate).total
        return max(by_formula, self.need(candidate)) if by_formula <= self.budget else by_formula


def _offloads(candidate: Candidate, cluster: Cluster) -> Iterator[tuple[str, ...]]:
    """What may live on the host: shards of models that are whole, beside a device that has memory of its own."""
    layout = candidate.layout
    is_alone = candidate.strategy != "ddp" and candidate.shard == 1
    if not is_alone:  # with nobody to share with, shards gain nothing but this
        yield ()
    if layout.pipeline * layout.tensor * layout.expert > 1 or candidate.strategy == "ddp" or cluster.device.is_cpu:
        return
    yield ("optimizer",)
    if candidate.strategy in FULLY_SHARDED:
        yield ("optimizer", "parameters")


def _tuned(candidate: Candidate, num_bytes: float, fitter: Fitter) -> Ranked:
    """Prices a candidate in its fastest tuning; in the usual one, unless another gains enough and fits."""
    cluster = fitter.cluster
    untuned = price_untuned(candidate, cluster)
    usual = best = _rank(candidate, num_bytes, cluster, untuned)
    if fitter.every:
        return usual
    for each in _tunings(candidate):
        other = _rank(each, num_bytes, cluster, untuned)
        if other.seconds < min(best.seconds, _WORTH_TUNING * usual.seconds):
            other = replace(other, memory_bytes=_bytes_of(each, fitter.need))
            best = other if other.memory_bytes <= fitter.budget else best
    return best


def _tunings(candidate: Candidate) -> Iterator[Candidate]:
    if candidate.strategy in FULLY_SHARDED:
        if candidate.layout.pipeline == 1 and not candidate.offload and candidate.shard > 1:
            yield tuned(candidate, reshard=False)
    elif candidate.layout.data > 1:
        for bucket_mb in BUCKETS_MB:
            yield tuned(candidate, bucket_mb=bucket_mb)


def _no_mesh(task: Task, cluster: Cluster, left_out: Counter[str]) -> UsageError:
    devices, batch = cluster.devices, task.global_batch
    why = ", ".join(f"{reason} ({count})" for reason, count in left_out.items())
    more = -(-batch // devices) * devices
    near = [str(count) for count in _near_counts(task, cluster)]
    return UsageError(
        f"{devices} devices: no mesh fits a batch of {batch}: {why}\n"
        "  devices = pipeline x data x tensor, and every data rank gets as many samples\n"
        f"  try train.global_batch={more}, or {' or '.join(near)} devices"
    )


def _near_counts(task: Task, cluster: Cluster) -> Iterator[int]:
    """Iterates over the next smaller and the next larger number of devices that a mesh fits: parts of a node, nodes."""
    each, devices = cluster.node.devices, cluster.devices
    sizes = [*range(1, each), *range(each, 2 * devices + 1, each)]
    below = [count for count in reversed(sizes) if count < devices]
    above = [count for count in sizes if count > devices and cluster.between is not None]
    for counts in (below, above):
        found = next((count for count in counts if _has_mesh(task, cluster, count)), None)
        if found is not None:
            yield found


def _has_mesh(task: Task, cluster: Cluster, devices: int) -> bool:
    node, nodes = cluster.node, max(1, devices // cluster.node.devices)
    other = replace(cluster, nodes=nodes, node=replace(node, devices=min(devices, node.devices)))
    return next(candidates_for(task, other, Counter()), None) is not None


# Reasons.


def explain_winner(found: Search) -> str:
    """Returns a sentence on what the first one's step is made of."""
    winner = found.ranked[0]
    step = winner.prediction.step
    parts = sorted(((getattr(step, name), words) for name, words in _parts_of(winner.candidate).items()), reverse=True)
    told = ", ".join(f"{words} {value / step.total:.0%}" for value, words in parts[:3] if value > 0.005 * step.total)
    first = {"time": "fastest", "cost": "cheapest", "memory": "smallest"}[found.order]
    return f"{winner.candidate} is the {first} of {found.num_fit} that fit: {told}"


def _parts_of(*candidates: Candidate) -> dict[str, str]:
    """Parts in words: with offload the host works."""
    words = dict(_PARTS)
    if any("optimizer" in each.offload for each in candidates):
        words["optimizer"] = "the optimizer and sums of gradients on the host"
    return words


def explain_against(winner: Ranked, other: Ranked) -> str:
    """Returns a sentence on what another one loses, and gains, against the winner."""
    slower = other.seconds / winner.seconds - 1
    ours, theirs = winner.prediction.step, other.prediction.step
    names = _parts_of(winner.candidate, other.candidate)
    gaps = {words: getattr(theirs, name) - getattr(ours, name) for name, words in names.items()}
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

    keys: dict[str, Value]
    ranked: Ranked | None = None

    def __str__(self) -> str:
        told = " ".join(f"{key}={_written(value)}" for key, value in self.keys.items())
        if self.ranked is None:
            return told
        return (
            f"{told}: {format_seconds(self.ranked.seconds)} a step, {format_bytes(self.ranked.memory_bytes)} of a rank"
        )


def _written(value: Value) -> str:
    return f"[{','.join(value)}]" if isinstance(value, list) else str(value).lower()


def smallest_changes(asked: Candidate, found: Search, *, most: int = 3, named: Collection[str] = ()) -> list[Change]:
    """Returns the fewest decisions that make a candidate fit, the fastest first.

    For each number of decisions that is the fastest way; more of them are named only where they are faster.
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
    worth_it = [
        each for place, each in enumerate(changes) if all(_time(each) < _time(before) for before in changes[:place])
    ]
    return sorted(worth_it[:most], key=_time)


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
        if _fits_at_all(found, task, larger, need_for(task)):
            yield Change(keys={"devices": larger.devices})
            break
    if isinstance(task.model, SampleModel):
        return
    for factor in (2, 4, 8):
        shorter = replace(task, seq_len=max(1, task.seq_len // factor))
        if _fits_at_all(found, shorter, cluster, need_for(shorter)):
            yield Change(keys={"data.context": shorter.seq_len})
            break


def _fits_at_all(found: Search, task: Task, cluster: Cluster, need: Need | None) -> bool:
    ignored: Counter[str] = Counter()
    fitter = Fitter(task=task, cluster=cluster, need=need, host_memory=found.host_memory)
    return any(fitter.fitting(each).fitting for each in candidates_for(task, cluster, ignored) if each.microbatch == 1)
