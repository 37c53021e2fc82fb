"""Whether a run has room, before it starts: what it needs by the estimate of memory, and what there is.

    GPUs            what the rank that holds most takes           the memory of the smallest GPU
    CPU ranks       what all of them hold; torch counts once      the host's memory, or the limit of its container
    virtual ranks   states of all, and the activations of one     that of the one GPU, or of the host

What is above the limit cannot run, and what is near it may. What ranks offload must have room on their host as well:
bytes of a rank there x ranks of the host <= what is free.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Literal

from paceline.cluster.detect import Machine
from paceline.cluster.devices import Cluster
from paceline.config import Config, config_from_dict, layout_of
from paceline.errors import ConfigError, Problem, UsageError
from paceline.plan.plan import MemoryEstimate
from paceline.plan.workload import config_values
from paceline.predict.formulas.step import Prediction
from paceline.predict.memory.activations import describe_model
from paceline.predict.memory.memory import StateFacts, estimate_memory, is_known, rank_estimates
from paceline.search.expect import present_cluster
from paceline.search.request import planned_values, request_for
from paceline.search.result import PlanResult, plan_for
from paceline.search.search import Change
from paceline.units import format_bytes

NEAR = 0.9  # of the memory there is: allocators lose some, and estimates are estimates
_TOLD = 3  # categories, the largest


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeed:
    """Bytes by category of those who share one memory, and who these are."""

    who: str
    parts: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryVerdict:
    """What is needed beside what there is: ``has_bytes`` of ``where``, of which ``free_bytes`` are free now."""

    need: MemoryNeed
    where: str
    has_bytes: float
    free_bytes: float

    @property
    def kind(self) -> Literal["fits", "near", "too large"]:
        """Memory that others hold may come back: only what there is in all refuses."""
        if self.need.total > self.has_bytes:
            return "too large"
        return "fits" if self.need.total <= min(NEAR * self.has_bytes, self.free_bytes) else "near"

    def __str__(self) -> str:
        has, ordered = format_bytes(self.has_bytes), sorted(self.need.parts.items(), key=lambda item: -item[1])
        largest = ", ".join(f"{name} {format_bytes(value)}" for name, value in ordered[:_TOLD] if value)
        free = f", of which {format_bytes(self.free_bytes)} are free" if self.free_bytes < NEAR * self.has_bytes else ""
        return (
            f"{self.need.who} {format_bytes(self.need.total)} of memory by estimate ({largest}), and "
            f"{self.where} has {has}{free}"
        )


def needed(config: Config, *, node_ranks: int | None = None, in_turns: bool = False) -> MemoryNeed | None:
    """Returns what the ranks of one host need of the memory that they share; None where that is not known.

    A GPU is not shared: of several, the one that needs most counts. ``node_ranks`` of the ranks are on a host; None:
    all of them. ``in_turns``: the least that virtual ranks need, all of them in one process.
    """
    if config.comm.backend == "virtual" and not in_turns:
        return None
    ranks = node_ranks or config.parallel.decided_ranks
    stages = rank_estimates(config, config.parallel.decided_ranks // ranks)
    if not stages:
        return None
    name = "virtual rank" if in_turns else "rank"
    who = f"1 {name} needs" if ranks == 1 else f"{ranks} {name}s need"
    if config.parallel.device == "cuda" and not in_turns:
        stages, ranks, who = (max(stages, key=lambda each: each.device_bytes),), 1, "a rank needs"
    names = [field.name for field in dataclasses.fields(MemoryEstimate) if field.name != "host"]
    # As many ranks of each stage; the framework is there once.
    parts = {name: ranks * sum(getattr(each, name) for each in stages) // len(stages) for name in names}
    parts["framework"] = int(stages[0].framework)
    if in_turns:
        largest = max(stages, key=lambda each: each.activations + each.temporary)  # of the one whose turn it is
        parts |= {"activations": int(largest.activations), "temporary": int(largest.temporary)}
    return MemoryNeed(who=who, parts=parts)


def host_problems(config: Config, *, node_ranks: int, free_bytes: int) -> list[Problem]:
    """Lists why a host cannot hold what is offloaded, for a config whose device, ranks and strategy are settled.

    Nothing is offloaded on CPU ranks. What a model of the user's own code needs, each rank finds when it is set up.
    """
    offload = config.memory.offload
    if not offload or config.parallel.device != "cuda":
        return []
    model, layout = describe_model(config, "cuda"), layout_of(config, config.parallel.decided_ranks, node_ranks)
    if model is None or not is_known(model, layout):
        return []
    own = estimate_memory(model, layout, StateFacts.of(config, "cuda")).host
    if own * node_ranks <= free_bytes:
        return []
    needed, each = format_bytes(own * node_ranks), format_bytes(own)
    count = "1 rank keeps" if node_ranks == 1 else f"{node_ranks} ranks keep"
    problem = Problem(
        what=f"memory.offload = [{', '.join(offload)}]: {count} {needed} on this host ({each} each), "
        f"and {format_bytes(free_bytes)} are free",
        rule="ranks share the memory of their host, and what is offloaded stays there for the whole run",
        fix="spread the ranks over more hosts, offload less, or remove memory.offload and set "
        "parallel.strategy = auto, which takes what fits",
    )
    return [problem]


def ways_out(config: Config, verdict: MemoryVerdict, machine: Machine, entry: Path | None = None) -> list[str]:
    """Returns what makes a run fit that does not: the smallest changes, the fastest by prediction first.

    Where nothing fits, what comes nearest; where this machine cannot be priced, why. ``entry`` is a file that
    ``paceline calibrate`` wrote.
    """
    is_gpu = config.parallel.device == "cuda"
    try:
        cluster, _ = present_cluster(config, machine, config.parallel.decided_ranks, None, entry)
        share = verdict.has_bytes / (1 if is_gpu else cluster.devices)  # which CPU ranks have of one memory
        node = dataclasses.replace(cluster.node, device=dataclasses.replace(cluster.device, memory_bytes=share))
        cluster = dataclasses.replace(cluster, node=node)
        request = request_for(config, cluster)
        if is_gpu:
            request = dataclasses.replace(request, host_memory=machine.memory_bytes)
        found = plan_for(request)
    except (UsageError, ConfigError) as error:
        return [
            f"which changes fit is not known: {error.headline}",
            "parallel.strategy=auto takes the first way that fits, where one does",
        ]
    fitting = [each for each in _changes(found) if each.ranked and _is_enough(config, each.ranked, cluster, verdict)]
    fitting.sort(key=lambda each: each.seconds)
    if fitting:
        return [f"fits with {each}" for each in fitting]
    lines = [f"would fit with {each}" for each in found.changes if found.winner is None]
    if found.found.nearest is not None:
        workload, least = found.found.nearest
        lines.insert(
            0,
            f"nothing fits here: of {found.found.looked_at} ways to train it {workload} needs least, "
            f"{format_bytes(least)} of a rank",
        )
    return [*lines, "take a smaller model or context, or look for another machine: paceline plan CONFIG --cluster NAME"]


def _changes(found: PlanResult) -> list[Change]:
    """Returns the changes that a plan knows; for a config that is not priced as it is written, its first plan."""
    winner = found.winner
    if winner is None or found.changes:
        return list(found.changes) if winner else []
    settings = config_values(winner.layout, names_precision=winner.workload.run.names_precision)
    written = {key: attrgetter(key)(found.request.config) for key in settings}
    return [Change(keys={key: to for key, to in settings.items() if written[key] != to}, ranked=winner)]


def _is_enough(config: Config, ranked: Prediction, cluster: Cluster, verdict: MemoryVerdict) -> bool:
    """Whether the changed config fits by the estimate that has refused this one, which counts all that it says."""
    try:
        changed = config_from_dict(planned_values(config, ranked.workload, cluster), "plan")
    except ConfigError:
        return False
    need = needed(changed.with_values("parallel", device=config.parallel.device))
    return need is not None and need.total <= verdict.has_bytes
