"""The one chooser: ``auto`` by memory, and by predicted time where this machine can be priced.

The candidates are those of ``search/ladder.py``, judged by memory. Of those that fit, in their order from simple to
costly, one is taken over those before it where a step of it is predicted to take at most 98 % as long: what differs by
less is not told apart, and the simpler one stays. Where nothing can be priced, the order alone decides, and the choice
says so.

With an open microbatch, a candidate is timed with the largest that the estimate finds room for.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.cluster.detect import Machine
from paceline.cluster.devices import Cluster
from paceline.config import Config, config_batch, layout_of, with_precision
from paceline.errors import ConfigError, Problem, UsageError
from paceline.mesh import divisors
from paceline.plan.layout import Layout
from paceline.plan.plan import MARGIN, RunMachine
from paceline.plan.workload import RECOMPUTES
from paceline.predict.formulas.engine_costs import price
from paceline.predict.memory.facts import ModelFacts
from paceline.predict.memory.memory import StateFacts, largest_microbatch
from paceline.search.candidates import TrainingTask
from paceline.search.expect import present_cluster, unpriced
from paceline.search.ladder import Judged, ladder_for, with_degrees
from paceline.search.request import task_of
from paceline.units import format_bytes, format_count, format_seconds

KEY = "parallel.strategy"  # what is auto
ENOUGH = 0.98  # of the time of a simpler candidate


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What was chosen, all candidates in order, and where the ranks are for which they were judged."""

    chosen: Judged
    ladder: tuple[Judged, ...]
    where: RunMachine
    parameters: int
    left_out: tuple[str, ...] = ()  # what cannot be done here, and why
    machine: str = ""  # that seconds were predicted for
    untimed: str = ""  # why none were

    @property
    def tried(self) -> tuple[Judged, ...]:
        """The candidates up to the one that was taken."""
        return self.ladder[: self.ladder.index(self.chosen) + 1]

    @property
    def budget_bytes(self) -> int:
        return self.where.budget_bytes

    def reason(self) -> str:
        """Says in one paragraph what was chosen and why."""
        chosen, where = self.chosen, self.where
        ranks = "1 rank" if where.ranks == 1 else f"{where.ranks} ranks"
        told = (
            f"{KEY} = auto: {chosen.label}, about {format_bytes(chosen.memory.device_bytes)} of "
            f"{format_bytes(self.budget_bytes)} a rank (all but {MARGIN:.0%} of {format_bytes(where.device_bytes)}) "
            f"for {format_count(self.parameters)} parameters on {ranks}, microbatch {chosen.layout.microbatch}"
        )
        if rejected := [f"{each.label} {each.rejected}" for each in self.tried if each.rejected]:
            more = f"; and {len(rejected) - 4} more" if len(rejected) > 4 else ""
            told += f"; not {'; '.join(rejected[:4])}{more}"
        else:
            told += "; it is the cheapest, and fits" if chosen.seconds is None else "; it fits"
        if rejected and self.left_out:
            told += f"; impossible: {'; '.join(self.left_out[:2])}"
        if chosen.seconds is None:
            return told + (f"; taken in order and not by time: {self.untimed}" if self.untimed else "")
        others = sorted(
            (each.seconds, place, each.label)
            for place, each in enumerate(self.ladder)
            if each.seconds is not None and each is not chosen
        )
        listed = ", ".join(f"{label} {format_seconds(seconds)}" for seconds, _, label in others[:3])
        told += f"; predicted {format_seconds(chosen.seconds)} a step on {self.machine}"
        return told + (f" ({listed})" if listed else "")

    def to_json(self) -> dict[str, Any]:
        plain = ("budget_bytes", "parameters", "machine", "untimed")
        return {
            "key": KEY,
            **{name: getattr(self, name) for name in plain},
            "chosen": self.chosen.label,
            "microbatch": self.chosen.layout.microbatch,
            "ladder": [each.to_json() for each in self.ladder],
            "left_out": list(self.left_out),
        }


def choose(config: Config, model: ModelFacts, where: RunMachine, machine: Machine | None = None) -> Choice:
    """Decides ``parallel.strategy: auto`` of a config whose ranks are decided.

    Of what fits into the memory of ``where``, the fastest by prediction on ``machine`` is taken; the first in order
    where that is None or cannot be priced. Raises ConfigError where nothing fits, or the batch divides among no number
    of data ranks.
    """
    config = with_precision(config, where.device)
    ladder, left_out = ladder_for(config, model, where)
    if not ladder:
        config_batch(with_degrees(config, where.ranks), where.ranks)  # says what is wrong with the batch
    choice = replace(take_first(ladder, model, where), left_out=tuple(left_out))
    return choice if machine is None else _by_time(choice, config, model, machine)


def take_first(ladder: Sequence[Judged], model: ModelFacts, where: RunMachine) -> Choice:
    """Takes the first candidate that fits, of at least one. Raises ConfigError where none does."""
    chosen = next((candidate for candidate in ladder if not candidate.rejected), None)
    if chosen is None:
        raise ConfigError([_nothing_fits(ladder, model, where)], source="config")
    return Choice(chosen=chosen, ladder=tuple(ladder), where=where, parameters=model.parameters)


def _nothing_fits(ladder: Sequence[Judged], model: ModelFacts, where: RunMachine) -> Problem:
    least = min(ladder, key=lambda candidate: candidate.memory.device_bytes)
    need, layout = least.memory, least.layout
    parts = ", ".join(
        f"{name} {format_bytes(value)}"
        for name, value in sorted(dataclasses.asdict(need).items(), key=lambda item: -item[1])
        if value and name != "host"
    )
    half = layout.microbatch // 2
    smaller = f"train.microbatch = {half} or auto" if half else "a smaller model or context"
    is_host_full = any("host" in each.rejected for each in ladder)
    host = "; the host's memory is too small for more offload" if is_host_full else ""
    set_keys = {"strategy": layout.strategy, "pipeline": layout.pipeline, "tensor": layout.tensor}
    keys = ", ".join(f"parallel.{name} = {value}" for name, value in set_keys.items() if value != 1)
    return Problem(
        what=f"{KEY} = auto: nothing fits into {format_bytes(where.budget_bytes)} of memory a rank; {least.label} "
        f"comes nearest with {format_bytes(need.device_bytes)} ({parts}){host}",
        rule=f"{format_count(model.parameters)} parameters, {where.ranks} ranks, and {MARGIN:.0%} of memory kept free",
        fix=f"try more ranks, or {smaller}; to try anyway, set {keys}",
    )


def apply_choice(config: Config, choice: Choice) -> Config:
    """Returns the config with what was chosen in the place of ``auto``, and the precision of the device."""
    layout = choice.chosen.layout
    changed = with_precision(config, choice.where.device).with_values(
        "memory", checkpoint_activations=layout.checkpoint_activations, offload=layout.offload.parts
    )
    return changed.with_values(
        "parallel",
        strategy=layout.strategy,
        shard_ranks=layout.shards if layout.strategy == "hybrid" else None,
        pipeline=layout.pipeline,
        tensor=layout.tensor,
    )


def _by_time(choice: Choice, config: Config, model: ModelFacts, machine: Machine) -> Choice:
    """Returns the choice with predicted seconds, and with the fastest candidate in the place of the first that fits."""
    where = choice.where
    config = config.with_values("parallel", device=where.device)
    try:
        cluster, task = _priced(config, model, machine, where)
        ladder = tuple(
            each if each.rejected else replace(each, seconds=_seconds(each, where, config, model, task, cluster))
            for each in choice.ladder
        )
    except (UsageError, ConfigError) as error:
        return replace(choice, untimed=error.headline)
    chosen: Judged | None = None
    least = math.inf
    for each in ladder:
        if each.seconds is not None and each.seconds < ENOUGH * least:
            chosen, least = each, each.seconds
    if chosen is None:
        return replace(choice, untimed="none of these ways is priced")
    return replace(choice, ladder=ladder, chosen=chosen, machine=cluster.name)


def first_microbatch(
    config: Config, model: ModelFacts, machine: Machine, sizes: Sequence[int], *, ranks: int, node_ranks: int
) -> int | None:
    """Returns the size of ``sizes`` that is predicted to be fastest: where trials begin. None where none is priced.

    All of them fit by the estimate. Of those that are within 2 % of the fastest, it is the largest.
    """
    layout = layout_of(config, ranks, node_ranks)
    if layout.is_split or layout.checkpoint_activations not in RECOMPUTES:
        return None
    where = RunMachine(device=config.parallel.device, ranks=ranks, node_ranks=node_ranks)
    try:
        cluster, task = _priced(config, model, machine, where)
        seconds = {size: _price(layout, size, task, cluster) for size in sizes}
    except (UsageError, ConfigError):
        return None
    least = min(seconds.values(), default=0.0)
    return max((size for size, each in seconds.items() if each * ENOUGH <= least), default=None)


def _priced(config: Config, model: ModelFacts, machine: Machine, where: RunMachine) -> tuple[Cluster, TrainingTask]:
    """Returns this machine as a cluster, and what is trained on it. Raises UsageError for what no prediction knows."""
    policy, decided = config.comm.compression.policy, config.with_values("train", microbatch=1)
    reason = unpriced(decided, hosts=-(-where.ranks // where.local_ranks))
    if reason or policy != "none":
        raise UsageError(reason or f"comm.compression.policy = {policy} is not priced")
    cluster = present_cluster(config, machine, where.ranks, None)[0]
    return cluster, task_of(with_degrees(config, where.ranks), where.ranks, facts=model)


def _seconds(
    each: Judged, where: RunMachine, config: Config, model: ModelFacts, task: TrainingTask, cluster: Cluster
) -> float | None:
    """Predicts a step of a candidate; None where that cannot be priced."""
    layout, size = each.layout, each.layout.microbatch
    if layout.checkpoint_activations not in RECOMPUTES:
        return None
    if layout.is_split:
        if task.model.is_sampled:
            return None  # a model known by its samples is not priced in parts
        layout = replace(layout, sequence_parallel=config.parallel.sequence_parallel and layout.tensor > 1)
    elif config.train.microbatch == "auto":  # the largest that divides a rank's samples and has room
        most = largest_microbatch(model, layout, StateFacts.of(config, where.device), where.budget_bytes)
        local = max(1, task.global_batch // where.ranks)
        size = max(size for size in divisors(local) if size <= max(1, most))
    return _price(layout, size, task, cluster)


def _price(layout: Layout, microbatch: int, task: TrainingTask, cluster: Cluster) -> float:
    """Predicts the seconds of a step, with the buckets and the schedule that are usual."""
    layout = replace(
        layout,
        bucket_mb=task.base.bucket_mb,
        reshard_after_forward=True,
        microbatch=microbatch,
        accumulate=max(1, round(task.global_batch / (microbatch * layout.data))),
    )
    return price(task.workload(layout), cluster).seconds
