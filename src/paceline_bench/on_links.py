"""Engines as one of many ranks on a real device whose links are emulated: ours beside torch's, for all alike.

Each arm takes its turns twice: with the links of a cluster, and with links that take no time.

    exposed    the step with links less the step without: what communication costs it, waits and contention
    tail       what no order can hide: the collective of the gradient that backward makes last, the embedding's
    can hide   the time on the wires less the tail, or the step without links where that is shorter
    hidden     (time on the wires - exposed) / can hide
    group host the host time of a step inside the emulated process group of a peer; one in C++ takes less

The first gather of a step counts as one that can be hidden: under the optimizer of the step before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from paceline.cluster.devices import Cluster
from paceline.cluster.wires import WireCost, num_channels
from paceline.comm.emulated.communicator import EmulatedCommunicator, EmulatedWorld, Fabric, Traffic
from paceline.predict.replay.replay import cost_in_training
from paceline_bench.arms import Arm, BenchWorkload, arms_on_links, select, sets_of
from paceline_bench.emulated_group import EmulatedGroup, emulated_group
from paceline_bench.engines import MeasuredArm, clean_up, row_of, warm_up
from paceline_bench.timing import Timing, Turns, interleave
from paceline_bench.traced_step import trace_step

_FREE = ", free links"
Rows = list[dict[str, Any]]


def bench_on_links(
    workload: BenchWorkload,
    turns: Turns,
    cluster: Cluster,
    ranks: int,
    device: torch.device,
    wanted: Sequence[str] | None = None,
    *,
    compiled: bool = True,
) -> Rows:
    """Times one of many ranks of each engine on a real device, with the links of a cluster emulated for all alike.

    An arm that does not fit, or fails, is a row with the reason.
    """
    price = cost_in_training(cluster, ranks, is_compiled=compiled)
    comm = one_rank(price, cluster, ranks, device)
    with emulated_group(comm) as group:
        bench = LinkBench(comm=comm, group=group, price=price, workload=workload, turns=turns, compiled=compiled)
        return [row for arms in sets_of(select(arms_on_links(), wanted)) for row in bench.measure(arms)]


def one_rank(price: WireCost, cluster: Cluster, ranks: int, device: torch.device) -> EmulatedCommunicator:
    """Returns the first of so many ranks of a cluster."""
    node_ranks = min(ranks, cluster.node.devices)
    fabric = Fabric(price, device, node_ranks=node_ranks, channels=num_channels(cluster))
    return EmulatedWorld(ranks, fabric).rank(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkBench:
    """What arms are timed on."""

    comm: EmulatedCommunicator
    group: EmulatedGroup
    price: WireCost
    workload: BenchWorkload
    turns: Turns
    compiled: bool

    @property
    def _fabric(self) -> Fabric:
        world = self.comm.own.world
        assert isinstance(world, EmulatedWorld)
        return world.fabric

    def measure(self, arms: Sequence[Arm]) -> Rows:
        """Times arms in turns; those that do not fit together in pairs with their peers, then alone."""
        try:
            return self._measure(arms)
        except torch.OutOfMemoryError as error:
            problem = str(error).partition(". ")[0]
        except Exception as error:  # a compiler, or a version of torch, that one arm alone meets
            problem = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        finally:
            clean_up(self.comm.device)
            self._fabric.is_free, self._fabric.keeps = False, True
            self._fabric.take_traffic()
        if len(arms) == 1:
            (arm,) = arms
            return [{"model": self.workload.model, "ranks": self.comm.size, "arm": arm.name, "error": problem}]
        peers = {arm.name: arm for arm in arms}
        smaller = [[arm] for arm in arms]
        if len(arms) > 2:
            smaller = [[peers[arm.peer], arm] for arm in arms if arm.peer != arm.name and arm.peer in peers] or smaller
        found: dict[str, dict[str, Any]] = {}
        for each in smaller:
            for row in self.measure(each):
                found.setdefault(row["arm"], row)
        return list(found.values())

    def _measure(self, arms: Sequence[Arm]) -> Rows:
        fabric, names = self._fabric, {arm.name for arm in arms}
        steps: dict[str, Callable[[], None]] = {}
        peaks: dict[str, int | None] = {}
        traffic: dict[str, dict[str, Traffic]] = {}
        on_host: dict[str, dict[str, float]] = {}

        def step_on_free_links(step: Callable[[], None]) -> None:
            fabric.is_free = True
            step()
            fabric.is_free = False

        for arm in arms:
            step, peaks[arm.name] = warm_up(arm, self.comm, self.workload, self.turns.warm_up, self.compiled)
            fabric.take_traffic()
            begun = self.group.host_s
            step()
            on_host[arm.name] = {"group_host_ms": round(1e3 * (self.group.host_s - begun), 4)}
            traffic[arm.name] = fabric.take_traffic()
            steps[arm.name], steps[f"{arm.name}{_FREE}"] = step, partial(step_on_free_links, step)
        fabric.keeps = False
        peers = {arm.name: arm.peer if arm.peer in names else arm.name for arm in arms}
        peers |= {f"{name}{_FREE}": f"{peer}{_FREE}" for name, peer in peers.items()}
        timed = interleave(steps, replace(self.turns, warm_up=0), baseline=peers, device=self.comm.device)
        ran = {arm.name: trace_step(steps[arm.name], self.comm.device) for arm in arms}
        fabric.keeps = True
        by_name = {each.arm: each for each in timed}
        return [
            self._row(by_name[arm.name], by_name[f"{arm.name}{_FREE}"], peaks[arm.name], traffic[arm.name])
            | on_host[arm.name]
            | ran[arm.name]
            for arm in arms
        ]

    def _row(self, timing: Timing, free: Timing, peak: int | None, traffic: Mapping[str, Traffic]) -> dict[str, Any]:
        measured = MeasuredArm(timing=timing, losses=[], peak_bytes=peak)
        on_wires = 1e3 * sum(each.seconds for each in traffic.values())
        exposed = timing.median_ms - free.median_ms
        return row_of(self.workload, measured, self.comm.size, self.comm.backend) | {
            "compiled": self.compiled,
            "exposed_ms": round(exposed, 4),
            "free_ms": round(free.median_ms, 4),
            "on_wires_ms": round(on_wires, 4),
            **self._hidden(on_wires, exposed, free.median_ms, traffic),
            "collectives": sum(each.calls for each in traffic.values()),
            "bytes": sum(each.num_bytes for each in traffic.values()),
            "by_kind": {kind: [each.calls, each.num_bytes] for kind, each in sorted(traffic.items())},
        }

    def _hidden(
        self, on_wires: float, exposed: float, alone: float, traffic: Mapping[str, Traffic]
    ) -> dict[str, float | None]:
        sent = {kind: traffic[kind].num_bytes for kind in ("reduce_scatter", "all_reduce") if kind in traffic}
        kind = max(sent, key=lambda each: sent[each], default="all_reduce")
        tail = 1e3 * self.price(kind, _last_gradient_bytes(self.workload), self.comm.ranks)
        can_hide = min(max(0.0, on_wires - tail), alone)
        hidden = (on_wires - exposed) / can_hide if can_hide else math.nan
        return {
            "tail_ms": round(tail, 4),
            "can_hide_ms": round(can_hide, 4),
            "hidden_share": round(min(hidden, 1.0), 4) if can_hide else None,
        }


def _last_gradient_bytes(workload: BenchWorkload) -> int:
    """Returns the bytes of the gradients that backward makes last, in fp32: of a GPT's embeddings."""
    if workload.model == "mlp":
        return 0
    shape = workload.gpt
    rows = shape.vocab_size + (shape.context if shape.positions == "learned" else 0)
    return 4 * rows * shape.width
