"""The search: of all ways to train a model on a cluster, those that fit, the fastest (or smallest) first, and why.

Memory comes before time: a footprint is a few additions, a prediction about a millisecond. Computing again never makes
a step faster, and neither does the host's memory, so that of a candidate only the least recomputation that fits is
timed, without offload and with each kind of it that lets less be computed again. Buckets and what stays gathered are
other than usual where they gain half a per cent at least.

A candidate fits where it needs no more than 90 % of the device: by the estimate that the engines are checked against,
or by ``footprint`` for a model that this package does not build. The host's memory counts where it is known.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Literal, TypeAlias

from paceline.cluster.devices import Cluster
from paceline.errors import UsageError
from paceline.plan.layout import Layout, Offload
from paceline.plan.plan import MARGIN, MemoryEstimate
from paceline.plan.workload import Value, Workload, config_values, count_differences
from paceline.predict.formulas import engine_costs
from paceline.predict.formulas.step import Prediction
from paceline.predict.memory.memory import EngineMemory
from paceline.search.candidates import Candidate, TrainingTask, candidates_for, resized
from paceline.units import format_bytes, format_seconds

Order: TypeAlias = Literal["time", "cost", "memory"]
ORDERS: tuple[Order, ...] = ("time", "cost", "memory")

TOO_LARGE = "more memory than the device has"
NOT_ALLOWED = "the config forbids them"
HOST_TOO_SMALL = "more memory than the host has"
_TIMED_BY_MEMORY = 200  # of the smallest candidates, where the smallest are asked for
_WORTH_TUNING = 0.995
# Of a layout that the model's layers cannot be cut for.
_NO_MEMORY = MemoryEstimate(parameters=float("inf"), gradients=0, optimizer=0, activations=0, framework=0)
# Parts of a step in words: where a slower candidate spends more.
_PARTS = {
    "compute": "computing",
    "tensor_wait": "layers waiting for other ranks",
    "launch_wait": "waiting for kernel launches",
    "bubble": "pipeline bubble",
    "exposed": "communication that nothing hides",
    "contention": "computing slowed by communication",
    "slowest": "waiting for the slowest rank",
    "optimizer": "the optimizer",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """What was found, and how many fit; ``nearest``: where nothing does, what needs least."""

    task: TrainingTask
    cluster: Cluster
    order: Order
    ranked: tuple[Prediction, ...]
    num_fit: int
    left_out: dict[str, int]
    nearest: Candidate | None = None
    host_memory: float = float("inf")

    @property
    def looked_at(self) -> int:
        return self.num_fit + sum(self.left_out.values())

    @property
    def budget(self) -> float:
        return budget_of(self.cluster)

    def fits(self, ranked: Prediction) -> bool:
        on_host = node_bytes(ranked.workload, self.cluster)
        return ranked.memory_bytes <= self.budget and on_host <= self.host_memory


def budget_of(cluster: Cluster) -> float:
    return cluster.device.memory_bytes * (1 - MARGIN)


def search(
    task: TrainingTask,
    cluster: Cluster,
    *,
    order: Order = "time",
    host_memory: float = float("inf"),
    keep: Callable[[Layout], bool] = lambda _: True,
) -> Search:
    """Ranks all layouts that fit: by ``task.need``, else by the formulas.

    ``host_memory``: bytes that all ranks of a node may take. ``keep``: which layouts are looked at. Raises UsageError
    where the batch can be shared by no mesh of these devices.
    """
    left_out: Counter[str] = Counter()
    fitting: list[Candidate] = []
    nearest: list[Candidate] = []  # of each layout that does not fit, the form that needs least
    any_mesh, by_memory = False, attrgetter("memory_bytes")
    for layout in candidates_for(task, cluster, left_out):
        any_mesh = True
        if not keep(layout):
            left_out[NOT_ALLOWED] += 1
            continue
        forms = list(judge_forms(layout, task, cluster, host_memory, every=order == "memory"))
        fitting += (found := [each for each in forms if not each.rejected])
        if not found:
            left_out[HOST_TOO_SMALL if any(each.rejected == HOST_TOO_SMALL for each in forms) else TOO_LARGE] += 1
            too_large = [each for each in forms if each.rejected == TOO_LARGE]
            nearest.append(min(too_large, key=by_memory, default=Candidate(layout=layout, memory=_NO_MEMORY)))
    if not any_mesh:
        raise _no_mesh(task, cluster, left_out)
    num_fit = len(fitting)
    if order == "memory":
        fitting = sorted(fitting, key=by_memory)[:_TIMED_BY_MEMORY]
        ranked = [
            replace(engine_costs.price(task.workload(each.layout), cluster), memory_bytes=each.memory_bytes)
            for each in fitting
        ]
        ranked.sort(key=lambda each: (each.memory_bytes, each.seconds))
    else:
        ranked = [_tuned(each, task, cluster) for each in fitting]
        ranked.sort(key=lambda each: (each.seconds, each.memory_bytes))
    return Search(
        task=task,
        cluster=cluster,
        order=order,
        ranked=tuple(ranked),
        num_fit=num_fit,
        left_out=dict(left_out),
        nearest=None if fitting else min(nearest, key=by_memory, default=None),
        host_memory=host_memory,
    )


def rank_one(workload: Workload, cluster: Cluster, need: EngineMemory | None = None) -> Prediction:
    return replace(engine_costs.price(workload, cluster), memory_bytes=float(_memory_of(workload, need).device_bytes))


def _memory_of(workload: Workload, need: EngineMemory | None) -> MemoryEstimate:
    """Returns what a rank needs: by the estimate of the engines, as ``paceline predict`` shows it; else by formula."""
    return engine_costs.engine_footprint(workload) if need is None else need.estimate(workload.layout) or _NO_MEMORY


def host_bytes(workload: Workload) -> float:
    return workload.layout.offload.host_bytes * engine_costs.part_params(workload) / workload.layout.shards


def node_bytes(workload: Workload, cluster: Cluster) -> float:
    return host_bytes(workload) * cluster.node.devices


def judge_forms(
    layout: Layout, task: TrainingTask, cluster: Cluster, host_memory: float, *, every: bool = False
) -> Iterator[Candidate]:
    """Iterates over the forms of a layout, with the reason where one does not fit, until none after it can be faster.

    Offload is looked at as long as it lets less be computed again; on one rank alone all kinds are: parameters that
    come from the host come ahead there, and may be faster. ``every``: all forms, not only those that may be fastest.
    What fits neither the device nor the host is left out.
    """
    budget = budget_of(cluster)
    for offload in _offloads(layout, cluster):
        moved = replace(layout, offload=offload)
        has_room = node_bytes(task.workload(moved), cluster) <= host_memory
        for checkpoint in task.checkpoints:
            form = replace(moved, checkpoint_activations=checkpoint)
            memory = _memory_of(task.workload(form), task.need)
            is_small = memory.device_bytes <= budget
            if not is_small and not has_room:
                continue
            rejected = TOO_LARGE if not is_small else "" if has_room else HOST_TOO_SMALL
            yield Candidate(layout=form, memory=memory, rejected=rejected)
            if rejected or every:
                continue
            if checkpoint == "none" and not (offload.moves_states and layout.shards == 1):
                return
            break


def _offloads(layout: Layout, cluster: Cluster) -> Iterator[Offload]:
    """What may live on the host: shards of models that are whole, beside a device that has memory of its own."""
    is_alone = layout.strategy != "ddp" and layout.shards == 1
    if not is_alone:  # with nobody to share with, shards gain nothing but this
        yield Offload()
    if layout.is_split or layout.expert > 1 or layout.strategy == "ddp" or cluster.device.is_cpu:
        return
    yield Offload(optimizer=True)
    if layout.is_fully_sharded:
        yield Offload(optimizer=True, parameters=True)


def _tuned(candidate: Candidate, task: TrainingTask, cluster: Cluster) -> Prediction:
    """Prices a candidate in its fastest tuning; in the usual one, unless another gains enough and fits."""
    layout, workload = candidate.layout, task.workload(candidate.layout)
    untuned = engine_costs.price_untuned(workload, cluster)
    usual = best = replace(engine_costs.with_tuning(untuned, workload, cluster), memory_bytes=candidate.memory_bytes)
    tunings: list[Layout] = []
    if layout.is_fully_sharded:
        if layout.pipeline == 1 and not layout.offload.moves_states and layout.shards > 1:
            tunings = [replace(layout, reshard_after_forward=False)]
    elif layout.data > 1:
        tunings = [replace(layout, bucket_mb=bucket_mb) for bucket_mb in engine_costs.BUCKETS_MB]
    for each in tunings:
        other = engine_costs.with_tuning(untuned, replace(workload, layout=each), cluster)
        if other.seconds < min(best.seconds, _WORTH_TUNING * usual.seconds):
            other = replace(other, memory_bytes=float(_memory_of(other.workload, task.need).device_bytes))
            best = other if other.memory_bytes <= budget_of(cluster) else best
    return best


def _no_mesh(task: TrainingTask, cluster: Cluster, left_out: Counter[str]) -> UsageError:
    """Says that no mesh fits the batch, with the next smaller and larger numbers of devices that one fits."""
    each, devices, batch = cluster.node.devices, cluster.devices, task.global_batch

    def has_mesh(count: int) -> bool:
        return next(candidates_for(task, resized(cluster, count), Counter()), None) is not None

    sizes = [*range(1, each), *range(each, 2 * devices + 1, each)]
    below = next((count for count in reversed(sizes) if count < devices and has_mesh(count)), None)
    larger = sizes if cluster.between is not None else []
    above = next((count for count in larger if count > devices and has_mesh(count)), None)
    near = [str(count) for count in (below, above) if count is not None]
    why = ", ".join(f"{reason} ({count})" for reason, count in left_out.items())
    return UsageError(
        f"{devices} devices: no mesh fits a batch of {batch}: {why}\n"
        "  devices = pipeline x data x tensor, and every data rank gets as many samples\n"
        f"  try train.global_batch={-(-batch // devices) * devices}, or {' or '.join(near)} devices"
    )


def explain_winner(found: Search) -> str:
    winner, step = found.ranked[0], found.ranked[0].step
    parts = sorted(((getattr(step, name), words) for name, words in _parts_of(winner).items()), reverse=True)
    told = ", ".join(f"{words} {value / step.total:.0%}" for value, words in parts[:3] if value > 0.005 * step.total)
    first = {"time": "fastest", "cost": "cheapest", "memory": "smallest"}[found.order]
    return f"{winner} is the {first} of {found.num_fit} that fit: {told}"


def _parts_of(*ranked: Prediction) -> dict[str, str]:
    words = dict(_PARTS)
    if any(each.layout.offload.optimizer for each in ranked):
        words["optimizer"] = "the optimizer and sums of gradients on the host"
    return words


def explain_against(winner: Prediction, other: Prediction) -> str:
    slower, names = other.seconds / winner.seconds - 1, _parts_of(winner, other)
    gaps = {words: getattr(other.step, name) - getattr(winner.step, name) for name, words in names.items()}
    worst, best = max(gaps, key=lambda each: gaps[each]), min(gaps, key=lambda each: gaps[each])
    told = f"takes {abs(slower):.1%} {'longer' if slower > 0 else 'less'}" if abs(slower) >= 0.0005 else "takes as long"
    more = f"{format_seconds(gaps[worst])} more of {worst}" if gaps[worst] > 0.001 * winner.seconds else ""
    less = f"{format_seconds(-gaps[best])} less of {best}" if -gaps[best] > 0.001 * winner.seconds else ""
    if more or less:
        told += ", with " + " and ".join(part for part in (more, less) if part)
    change = other.memory_bytes - winner.memory_bytes
    if abs(change) > 0.01 * winner.memory_bytes:
        told += f"; needs {format_bytes(abs(change))} {'more' if change > 0 else 'less'}"
    return f"{other} {told}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Keys to change, and what a step takes then; None where only memory was looked at."""

    keys: dict[str, Value]
    ranked: Prediction | None = None

    def __str__(self) -> str:
        texts = [f"[{','.join(to)}]" if isinstance(to, list) else str(to).lower() for to in self.keys.values()]
        told, found = " ".join(map("{}={}".format, self.keys, texts)), self.ranked
        if found is None:
            return told
        return f"{told}: {format_seconds(found.seconds)} a step, {format_bytes(found.memory_bytes)} of a rank"

    @property
    def seconds(self) -> float:
        return self.ranked.seconds if self.ranked else float("inf")


def smallest_changes(asked: Workload, found: Search, *, most: int = 3, named: Collection[str] = ()) -> list[Change]:
    """Returns the fewest decisions that make a workload fit, the fastest first.

    More decisions are named only where they are faster. ``named``: keys that a change names whether it decides them or
    not: those that the config would derive anew, and those that it gives although they follow (``parallel.data``).
    """
    best: dict[int, Change] = {}
    written = config_values(asked.layout)
    for ranked in found.ranked:
        layout = ranked.layout
        number = count_differences(asked.layout, layout)
        if number and number not in best:
            values = config_values(layout)
            follows: dict[str, Value] = {"train.accumulate": layout.accumulate, "parallel.data": layout.data}
            keys = {key: value for key, value in values.items() if value != written.get(key)}
            keys |= {key: value for key, value in (values | follows).items() if key in named}
            best[number] = Change(keys=keys, ranked=ranked)
    changes = [best[number] for number in sorted(best)]
    worth_it = [
        each for place, each in enumerate(changes) if all(each.seconds < before.seconds for before in changes[:place])
    ]
    return sorted(worth_it[:most], key=lambda each: each.seconds)


def what_would_fit(found: Search) -> Iterator[Change]:
    """Iterates over what would make anything fit where nothing does: more devices, shorter sequences."""
    task, cluster = found.task, found.cluster
    for factor in (2, 4, 8, 16, 32, 64):
        if cluster.between is None:
            break
        larger = replace(cluster, nodes=cluster.nodes * factor)
        if _fits_at_all(found, task, larger):
            yield Change(keys={"devices": larger.devices})
            break
    if task.model.is_sampled:
        return
    for factor in (2, 4, 8):
        shorter = replace(task, seq_len=max(1, task.seq_len // factor), need=None)  # which is for the whole length
        if _fits_at_all(found, shorter, cluster):
            yield Change(keys={"data.context": shorter.seq_len})
            break


def _fits_at_all(found: Search, task: TrainingTask, cluster: Cluster) -> bool:
    layouts = (each for each in candidates_for(task, cluster, Counter()) if each.microbatch == 1)
    return any(not form.rejected for each in layouts for form in judge_forms(each, task, cluster, found.host_memory))
