"""Gathers what a run is judged by: what its records do not say comes from its plan, its config and the catalog."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.cluster.devices import Catalog, Cluster, load_cluster
from paceline.cluster.wires import wire_cost
from paceline.errors import UsageError
from paceline.health.straggler import find_straggler
from paceline.records.facts import MemoryUse, RunFacts
from paceline.records.gains import Gains, gains_of
from paceline.records.goodput import find_goodput
from paceline.records.summary import RunRecords
from paceline.records.traffic import TrafficRow, find_traffic, priced_step_s
from paceline.search.expectation import Compared
from paceline.untrusted import parse_json, read_regular

_MOST_RANKS = 2**16  # records that name more were not written by a run


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where ranks are: ``cluster`` None is hosts, with ``node_ranks`` on each."""

    cluster: Cluster | None
    node_ranks: int


def find_facts(folder: Path, records: RunRecords, prediction: Compared | None) -> tuple[RunFacts, Gains]:
    """Returns the facts of a run, and what knows the changes of its config."""
    run, traffic = records.run, find_traffic(records.ranks)
    cluster = "" if prediction is None else _catalog_name(prediction.predicted.cluster)
    facts = RunFacts(
        run=run,
        steps=records.steps,
        goodput=find_goodput(records.lead),
        straggler=find_straggler(records.steps.rows),
        memory=_memory(folder, records),
        priced_comm_s=_priced(records, traffic, cluster),
        num_hosts=len({own[-1].run.host for own in records.ranks.values()}),
        traffic=traffic,
    )
    return facts, gains_of(folder, run, cluster)


def _catalog_name(cluster: str) -> str:
    """Returns the name of a cluster of the catalog; nothing for a file, which a run's folder must not name."""
    return "" if "/" in cluster or "\\" in cluster or cluster.endswith((".yaml", ".yml")) else cluster


def _memory(folder: Path, records: RunRecords) -> MemoryUse:
    run, capacity = records.run, None
    if run.device != "cpu":
        with contextlib.suppress(UsageError):  # a device that the catalog does not have
            capacity = int(Catalog().device(run.device).memory_bytes)
    cuts = {
        event.step: event.detail["microbatch"]
        for attempt in records.lead
        for event in attempt.events
        if event.name == "microbatch" and isinstance(event.detail.get("microbatch"), int)
    }
    peak = records.steps.totals().memory_bytes
    return MemoryUse(peak_bytes=peak, capacity_bytes=capacity, cuts=cuts, by_category=_planned(folder))


def _planned(folder: Path) -> dict[str, int]:
    """Returns what the plan expects of a rank, by category; nothing where there is no plan that can be read."""
    try:
        values: Any = parse_json(read_regular(folder / "plan.json"))
    except (OSError, ValueError):
        return {}
    memory = values.get("memory") if isinstance(values, dict) else None
    known = memory.items() if isinstance(memory, dict) else ()
    return {str(name): size for name, size in known if name != "device_bytes" and isinstance(size, int) and size > 0}


def _priced(records: RunRecords, traffic: Sequence[TrafficRow], cluster: str) -> float | None:
    """Returns what the traffic of a step should take; None where links or traffic are not known.

    Stages of a pipeline wait for one another besides, so that what they wait says nothing about links.
    """
    run = records.run
    most = max((row.ranks for row in traffic), default=run.world_size)
    if not 2 <= max(run.world_size, most) <= _MOST_RANKS or run.world_size < 2 or "pipeline" in run.strategy:
        return None
    place = _place(records, cluster)
    if place is None:
        return None
    steps = sum(len(attempt.steps) for attempt in records.lead)
    with contextlib.suppress(UsageError, ValueError, KeyError, ArithmeticError):  # an operation that has no price
        return priced_step_s(run, traffic, steps, wire_cost(place.cluster, run.world_size, place.node_ranks))
    return None


def _place(records: RunRecords, cluster: str) -> _Place | None:
    run = records.run
    on_host = sum(own[-1].run.host == run.host for own in records.ranks.values())
    for name in (cluster, _catalog_name(f"{run.world_size}x {run.device}")) if run.device != "cpu" else ():
        with contextlib.suppress(UsageError):  # a device that the catalog does not have
            if name:
                return _Place(cluster=load_cluster(name), node_ranks=on_host)
    return None if run.backend == "nccl" else _Place(cluster=None, node_ranks=on_host)
