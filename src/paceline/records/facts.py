"""What a run is judged by in limits.py. What its records do not say comes from its plan and the catalog.

Of what the ranks sent one another, by collective and group, the rank counts that waited least: the others waited for it
as well. Without records of operations, what a step sends follows from the strategy (``plan/layout.py``) and the
parameters, in fp32. How much of a run's time became training that counts, and what restarts cost:

    useful    the steps that the final state is made of
    repeated  steps that were made again, because a restart or a roll-back went back to a checkpoint
    down      from the last record of an attempt that failed to the start of the first step of the next one
    goodput   useful / duration of the run

A run that ended or was stopped, and was continued later, lost nothing in between: that time does not count.
"""

from __future__ import annotations

import contextlib
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from paceline.cluster.devices import Catalog, Cluster, load_cluster
from paceline.cluster.wires import WireCost, wire_cost
from paceline.errors import UsageError
from paceline.health.experts import ExpertsVerdict, judge_experts
from paceline.health.straggler import Straggler, find_straggler
from paceline.plan.layout import SHARING
from paceline.records.records import CommRecord, RunRecord
from paceline.records.summary import RankAttempt, RunRecords, StepTable, final_steps, settled
from paceline.records.thin import add_comm
from paceline.untrusted import parse_json_object, read_regular

_MOST_RANKS = 2**16  # records that name more were not written by a run
_BUCKET_BYTES = 25 * 2**20
_ELEMENT_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """Where the time of a run went, as its lowest rank saw it. ``evaluation_s`` is part of what is not useful."""

    wall_s: float
    useful_s: float
    repeated_s: float
    down_s: float
    evaluation_s: float
    restarts: int
    roll_backs: int
    repeated_steps: int
    skipped_steps: int
    saving_s: float = 0.0  # in which training waited for checkpoints and snapshots

    @property
    def share(self) -> float:
        """The share of the run's duration that became steps that count."""
        return min(1.0, self.useful_s / self.wall_s) if self.wall_s > 0 else 0.0

    @property
    def lost_share(self) -> float:
        """The share that faults cost: of the time in steps and between a failure and the next step."""
        total = self.useful_s + self.repeated_s + self.down_s
        return (self.repeated_s + self.down_s) / total if total > 0 else 0.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"share": self.share, "lost_share": self.lost_share}


def find_goodput(attempts: Sequence[RankAttempt]) -> Goodput:
    """Adds up the attempts of one rank, in their order."""
    made = [record for attempt in attempts for record in attempt.steps]
    kept = final_steps(attempts)
    useful_s = sum(record.step_s * record.steps for record in kept.values())
    wall_s, down_s, restarts = sum(max(0.0, each.last_time - each.run.time) for each in attempts), 0.0, 0
    for before, after in pairwise(attempts):
        if before.end is None or before.end.status == "failed":
            restarts += 1
            wall_s += max(0.0, after.run.time - before.last_time)
            progress = before.steps[-1].time if before.steps else before.run.time
            again = after.steps[0].time - after.steps[0].step_s if after.steps else after.last_time
            down_s += max(0.0, again - progress)
    return Goodput(
        wall_s=wall_s,
        useful_s=useful_s,
        repeated_s=max(0.0, sum(record.step_s * record.steps for record in made) - useful_s),
        down_s=down_s,
        evaluation_s=sum(record.seconds for attempt in attempts for record in attempt.evaluations),
        saving_s=sum(
            float(event.detail.get("stall_seconds", 0.0))
            for attempt in attempts
            for event in attempt.events
            if event.name in ("checkpoint", "snapshot")
        ),
        restarts=restarts,
        roll_backs=sum(event.name == "roll_back" for attempt in attempts for event in attempt.events),
        repeated_steps=sum(record.steps for record in made) - sum(record.steps for record in kept.values()),
        skipped_steps=sum(record.num_skipped for record in kept.values()),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """What is known of a run's memory: the peak of the rank that holds most, and what its device has."""

    peak_bytes: int = 0
    capacity_bytes: int | None = None
    cuts: Mapping[int, int] = field(default_factory=dict)  # microbatches after memory ran out, by step
    by_category: Mapping[str, int] = field(default_factory=dict)  # the plan's estimate

    @property
    def filled(self) -> float:
        """The share of the device's memory that is in use at the peak; 0 where its size is not known."""
        return self.peak_bytes / self.capacity_bytes if self.capacity_bytes else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What a run is judged by. ``priced_comm_s`` is what a step's traffic should take on the links; None: not known."""

    run: RunRecord
    steps: StepTable
    goodput: Goodput
    straggler: Straggler | None = None
    memory: MemoryUse = field(default_factory=MemoryUse)
    priced_comm_s: float | None = None
    num_hosts: int = 1
    traffic: tuple[CommRecord, ...] = ()  # of a rank over the whole run, most bytes first
    experts_wrong: tuple[ExpertsVerdict, ...] = ()

    @classmethod
    def of(cls, records: RunRecords) -> RunFacts:
        """Returns what the records alone say."""
        late, goodput = find_straggler(records.steps.rows), find_goodput(records.lead)
        wrong = tuple(judge_experts(list(records.loads().values())))
        return cls(run=records.run, steps=records.steps, goodput=goodput, straggler=late, experts_wrong=wrong)

    @property
    def by_load(self) -> ExpertsVerdict | None:
        """Returns why the straggler has more to do than others, where most rows are those of its experts."""
        late, tensor = self.straggler, re.search(r"\btensor (\d+)", self.run.strategy)
        if late is None:
            return None
        place = late.rank // int(tensor[1] if tensor else 1)  # neighbours share experts; tensor ranks have the same
        found = (each for each in self.experts_wrong if each.kind == "straggler" and place % each.ranks == each.rank)
        return next(found, None)

    @property
    def is_inside_a_host(self) -> bool:
        """Whether real ranks exchange with others of their host alone; simulated ones have links of their own."""
        return self.num_hosts == 1 and self.run.backend != "virtual"


def find_facts(folder: Path, records: RunRecords, cluster: str) -> RunFacts:
    """Returns the facts of a run, whose devices are those of a ``cluster`` of the catalog, where that is known."""
    traffic = find_traffic(records.ranks)
    hosts = len({own[-1].run.host for own in records.ranks.values()})
    memory, priced = _memory(folder, records), _priced(records, traffic, cluster)
    return replace(RunFacts.of(records), memory=memory, priced_comm_s=priced, num_hosts=hosts, traffic=traffic)


def catalog_name(cluster: str) -> str:
    """Returns the name of a cluster of the catalog; nothing for a file, which a run's folder must not name."""
    return "" if "/" in cluster or "\\" in cluster or cluster.endswith((".yaml", ".yml")) else cluster


def _memory(folder: Path, records: RunRecords) -> MemoryUse:
    run, capacity = records.run, None
    if run.device != "cpu":
        with contextlib.suppress(UsageError):  # a device that the catalog does not have
            capacity = int(Catalog().device(run.device).memory_bytes)
    found = [event for attempt in records.lead for event in attempt.events if event.name == "microbatch"]
    cuts = {event.step: size for event in found if isinstance(size := event.detail.get("microbatch"), int)}
    try:
        planned = parse_json_object(read_regular(folder / "plan.json")).get("memory")
    except (OSError, ValueError):  # there is no plan that can be read
        planned = None
    known = planned.items() if isinstance(planned, dict) else ()
    whole = {str(name): size for name, size in known if name != "device_bytes" and isinstance(size, int)}
    sizes = {name: size for name, size in whole.items() if size > 0 or (name == "at_other_times" and size)}
    peak = max((each.memory_bytes for row in records.steps.rows for each in row.values()), default=0)
    return MemoryUse(peak_bytes=peak, capacity_bytes=capacity, cuts=cuts, by_category=sizes)


def find_traffic(attempts: Mapping[int, Sequence[RankAttempt]]) -> tuple[CommRecord, ...]:
    """Adds up what ranks recorded of their operations, most bytes first; nothing where no rank recorded any."""
    found: defaultdict[tuple[str, str, int], list[CommRecord]] = defaultdict(list)
    for own in attempts.values():
        by_key: defaultdict[tuple[str, str, int], list[CommRecord]] = defaultdict(list)
        for each in (record for attempt in own for record in attempt.records if isinstance(record, CommRecord)):
            by_key[each.kind, each.group, each.ranks].append(each)
        for key, some in by_key.items():
            found[key].append(add_comm(some))
    rows = [min(own, key=lambda row: settled(row.seconds / max(row.bytes, 1))) for own in found.values()]
    return tuple(sorted(rows, key=lambda row: (-row.bytes, row.kind, row.group)))


def _priced(records: RunRecords, traffic: Sequence[CommRecord], cluster: str) -> float | None:
    """Returns what the traffic of a step should take; None where it is not known, and of stages, which wait besides."""
    run = records.run
    most = max((run.world_size, *(row.ranks for row in traffic)))
    if run.world_size < 2 or most > _MOST_RANKS or "pipeline" in run.strategy:
        return None
    place: Cluster | None = None  # None is hosts
    for name in (cluster, catalog_name(f"{run.world_size}x {run.device}")) if run.device != "cpu" else ():
        with contextlib.suppress(UsageError):  # a device that the catalog does not have
            if name and place is None:
                place = load_cluster(name)
    if place is None and run.backend == "nccl":
        return None
    node_ranks = sum(own[-1].run.host == run.host for own in records.ranks.values())
    steps = sum(record.steps for attempt in records.lead for record in attempt.steps)
    with contextlib.suppress(UsageError, ValueError, KeyError, ArithmeticError):  # an operation that has no price
        return _priced_step_s(run, traffic, steps, wire_cost(place, run.world_size, node_ranks))
    return None


def _priced_step_s(run: RunRecord, traffic: Sequence[CommRecord], steps: int, cost: WireCost) -> float | None:
    if traffic and steps > 0:
        times = (row.calls * cost(row.kind, row.bytes // max(row.calls, 1), tuple(range(row.ranks))) for row in traffic)
        return sum(times) / steps
    sharing, world = SHARING.get(run.strategy), tuple(range(run.world_size))
    if sharing is None or run.strategy == "hybrid" or run.num_parameters <= 0 or run.world_size < 2:
        return None
    total = _ELEMENT_BYTES * run.num_parameters
    calls = max(1, -(-total // _BUCKET_BYTES))
    # Beside the gradients a step exchanges a few numbers: how many samples count, and the norm.
    small = 2 * cost("all_reduce", _ELEMENT_BYTES, world)
    return small + sum(calls * cost(kind, total // calls, world) for kind in sharing.collectives)
