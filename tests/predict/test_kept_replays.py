"""Kept figures of replays: made-up programs of all kinds of events, and what they take on clusters of all kinds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any

from kept_figures import assert_kept, told

from paceline.cluster.devices import Cluster, load_cluster
from paceline.cluster.kernels import MEMORY_FAMILIES, Family, Operation
from paceline.predict.formulas.constants import Constants
from paceline.predict.replay.kernel_costs import KernelCosts, fuse_blocks, without_what_is_made_again
from paceline.predict.replay.program import (
    CATEGORIES,
    END,
    LOSS,
    Drop,
    Event,
    EventMark,
    Hold,
    Issue,
    OnHost,
    Player,
    Program,
    Run,
    Turn,
    Wait,
    counted,
    is_playable,
    memory_alone,
    repeat,
)
from paceline.predict.replay.replay import replay
from paceline.predict.replay.replayed import ReplayedRank, trace_events
from paceline.schedule.schedules import make_schedule

RANKS = (0, 1, 2, 3)
FAMILIES: tuple[Family, ...] = (*MEMORY_FAMILIES, "matmul", "attention", "attention_backward", "pointwise", "convert")
NAMES = {"matmul": ("mm", "convolution", "convolution_backward"), "norm": ("native_batch_norm", "native_layer_norm")}
CLUSTERS = (
    "1x dgx-h100",
    "2x dgx-a100",
    "4x cpu-host",
    "4x h200-measured over roce-8x400",
    "4x cpu-host over ethernet-10g",
)


class _Maker:
    """Makes programs by chance, the same ones every time: ``Random.random`` is the same in every Python."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._numbers = self._tensors = 0
        self._issued: list[int] = []
        self._held: list[int] = []
        self._known: list[tuple[int, int]] = [(self.tensor(), 4096)]

    def below(self, limit: int) -> int:
        return int(self._random.random() * limit)

    def of(self, values: Any) -> Any:
        return values[self.below(len(values))]

    def tensor(self) -> int:
        self._tensors += 1
        return self._tensors

    def number(self) -> int:
        self._numbers += 1
        return self._numbers

    def run(self, phase: str, block: str) -> Run:
        family = self.of(FAMILIES)
        dtype = self.of(("fp32", "bf16", "fp16", "fp8") if family in ("matmul", "strided") else ("fp32", "bf16"))
        name = self.of(NAMES.get(family, (family,)))
        sizes: tuple[int, ...] = ()
        if family == "matmul":
            sizes = tuple(self.of((64, 100, 512, 3)) for _ in range(3))
        elif family.startswith("attention"):
            sizes = (2, 4, self.of((64, 256)), 32)
        reads = tuple(dict(self.of(self._known[-8:]) for _ in range(1 + self.below(3))).items())
        largest = max(size for _, size in reads)
        written = self.of((largest, largest, 2 * largest, largest // 2, max(1, largest // 8), 4))
        writes = ((self.tensor(), written),) if self.below(9) else (reads[0],)
        self._known += writes
        given = {
            "batch": 1 + self.below(2),
            "layout": self.of(("", "nn", "nt", "tn")),
            "is_causal": bool(self.below(3)),
        }
        operation = Operation(
            name=name,
            family=family,
            dtype=dtype,
            sizes=sizes,
            tensors=1 + 2 * self.below(2),
            reads=reads,
            writes=writes,
            phase=phase,
            **given,
        )
        return Run(operation, block)

    def issue(self, phase: str) -> Issue:
        kind = self.of(("all_reduce", "all_gather", "reduce_scatter", "broadcast", "barrier", "to_host", "to_device"))
        ranks = (0,) if kind.startswith("to_") else self.of((RANKS, (0, 1), (0, 2)))
        algorithm = self.of(("", "", "ring", "tree", "halving_doubling")) if kind in ("all_reduce", "broadcast") else ""
        if kind == "broadcast" and algorithm == "halving_doubling":
            algorithm = "tree"
        lane = self.of(("world", "shard", "bus"))
        found = Issue(
            self.number(), kind, self.of((4096, 2**20, 2**24)), ranks, lane, 0, phase, algorithm, self.of((1.0, 0.5))
        )
        self._issued.append(found.number)
        return found

    def event(self, phase: str, block: str) -> Event:
        match self.below(12):
            case 0:
                return self.issue(phase)
            case 1 if self._issued:
                return Wait(self._issued.pop(self.below(len(self._issued))), phase)
            case 2:
                hold = Hold(self.number(), self.of((100, 5000, 70000)), self.of(CATEGORIES), (self.of(self._known)[0],))
                self._held.append(hold.number)
                return hold
            case 3 if self._held:
                return Drop(self._held.pop(self.below(len(self._held))))
            case 4 if self.below(2):
                return OnHost("adam", self.of((10**6, 10**8)), tuple(self._issued[-1:]), bool(self.below(2)), phase)
            case _:
                return self.run(phase, block)

    def step(self, blocks: int = 3, each: int = 9) -> list[Event]:
        found: list[Event] = []
        parts = [("forward", f"block {place}") for place in range(blocks)] + [("forward", LOSS), ("backward", LOSS)]
        parts += [("backward", f"block {place}") for place in reversed(range(blocks))] + [("optimizer", "")]
        for phase, block in parts:
            found += [self.event(phase, block) for _ in range(each)]
        return found + [Wait(number, "optimizer") for number in self._issued]


def figures() -> dict[str, object]:
    parts = (_of_steps(), _of_fusing(), _of_repeats(), _of_pipelines(), _of_kernels())
    return {name: value for part in parts for name, value in part}


def test_replays_give_the_figures_that_were_kept() -> None:
    assert_kept(__file__, figures())


def program(events: list[Event], **values: Any) -> Program:
    given: dict[str, Any] = {"name": "p", "rank": 0, "ranks": 4, "strategy": "ddp", "samples": 8, "elements": 64.0}
    given |= {"resident": {"parameters": 1000, "optimizer": 2000}, "model_flops": 1e12}
    return Program(events=tuple(events), **(given | values))


def _rank(rank: ReplayedRank) -> object:
    spans = {"spans": len(rank.spans), "ends": sum(each.end - each.start for each in rank.spans)}
    return [replace(rank, spans=()), spans]


def _of_steps() -> Iterator[tuple[str, object]]:
    """Steps by chance on all clusters: compiled or not, graphs, slow ranks, the loop around them."""
    for seed in range(20):
        cluster = load_cluster(CLUSTERS[seed % len(CLUSTERS)])
        graphs = ("off", "auto", "on")[seed % 3]
        made = program(_Maker(seed).step(), is_compiled=seed % 2 == 0, graphs=graphs, dtype=("fp32", "bf16")[seed % 2])
        slow = {2: 1.5, 1: 1.25} if seed % 4 == 1 else {0: 2.0} if seed % 4 == 3 else None
        constants = Constants() if seed % 7 == 0 else None
        found = replay(
            made, cluster, slow=slow, constants=constants, keeps_spans=seed % 2 == 1, with_loop=seed % 3 == 1
        )
        told_of = json.loads(json.dumps(found.to_json()))
        ways = [found.mfu, found.band, found.binds, found.fits, found.usd_per_step(2.5), found.elements_per_s]
        yield f"step {seed} {cluster.name}", [told_of, ways, [_rank(each) for each in found.times], dict(found.memory)]
        if seed % 2:
            yield f"trace {seed}", json.dumps(trace_events(found))[:3000]


def _event(event: Event) -> str:
    if isinstance(event, Run):
        kernel = event.operation
        return f"{event.block}: {kernel.name} {kernel.family} {kernel.phase} {kernel.reads} -> {kernel.writes}"
    return str(event)


def _of_fusing() -> Iterator[tuple[str, object]]:
    for seed in range(30, 42):
        events = _Maker(seed).step(blocks=2, each=8)
        fused = fuse_blocks(events)
        yield f"fused {seed}", [_event(event) for event in fused if isinstance(event, Run)]
        kept = without_what_is_made_again(events)
        yield f"kept {seed}", [event.number for event in kept if isinstance(event, Hold)]


def _of_repeats() -> Iterator[tuple[str, object]]:
    for seed in range(50, 54):
        events = _Maker(seed).step(blocks=2, each=5)
        start, stop = 10, len(events) - 8
        for times in (1, 2, 4):
            found = repeat(events, start, stop, times)
            yield f"repeated {seed} {times}", [_event(event) for event in found[start:]]
            yield f"memory {seed} {times}", program(list(found)).peak_memory()
        yield f"memory alone {seed}", [str(event) for event in memory_alone(events)]


def _stage(rank: int, stages: int, few: int, many: int, name: str) -> tuple[list[Event], tuple[Turn, ...]]:
    """What a rank of a pipeline records with few microbatches, and the order of its actions with many."""
    maker = _Maker(100 + rank)
    events: list[Event] = [maker.run("forward", "")]
    given: dict[tuple[str, int], list[int]] = {}
    width = len(RANKS) // stages
    made: dict[int, int] = {}
    schedule = make_schedule(name, stages, few)
    for action in schedule.compute_orders()[rank]:
        kind, stage, number = action.kind, action.stage, action.microbatch
        events.append(EventMark(kind, stage, number))
        before, after = (stage - 1, stage + 1) if kind == "F" else (stage + 1, stage - 1)
        phase = "forward" if kind == "F" else "backward"
        if 0 <= before < stages:
            peers = (before * width, rank * width)
            receive = Issue(maker.number(), "recv", 2**20, peers, f"recv {phase}", stage, phase)
            events += [receive, Wait(receive.number, phase)]
        hold = Hold(maker.number(), 1000 + rank, "activations")
        runs = [maker.run(phase, f"block {place}") for place in range(2)]
        events += [hold, *runs, Hold(maker.number(), 10, "temporary"), Drop(hold.number - 1)]
        if kind == "F":
            given[kind, number] = [hold.number]
            made[number] = runs[-1].operation.writes[0][0]
        else:
            events += [Drop(each) for each in given.pop(("F", number), ())] + [Drop(hold.number)]
        if 0 <= after < stages:
            events.append(
                Issue(maker.number(), "send", 2**20, (rank * width, after * width), f"send {phase}", after, phase)
            )
    events.append(EventMark(END, 0, 0))
    for number, tensor in made.items():
        read = maker.run("optimizer", "")
        events.append(Run(replace(read.operation, reads=((tensor, 64 + number),)), ""))
    events += [maker.issue("optimizer"), maker.run("optimizer", "")]
    turns = [
        Turn(
            each.kind,
            each.stage,
            each.microbatch,
            0 if each.microbatch == 0 else few - 1 if each.microbatch == many - 1 else 1,
        )
        for each in make_schedule(name, stages, many).compute_orders()[rank]
    ]
    turns = [
        replace(turn, arrived=(("F", turn.stage, turn.microbatch - 1),))
        if turn.microbatch and turn.kind == "B"
        else turn
        for turn in turns
    ]
    return events, tuple(turns)


def _of_pipelines() -> Iterator[tuple[str, object]]:
    """Stages that were recorded with three microbatches, replayed with more."""
    for stages, name, cluster in ((2, "1f1b", "1x dgx-h100"), (4, "gpipe", "4x cpu-host"), (2, "gpipe", "2x dgx-a100")):
        made = [_stage(rank, stages, 3, 6, name) for rank in range(stages)]
        programs = [
            program(events, order=order, rank=rank * len(RANKS) // stages, stage=rank, stages=stages, dtype="bf16")
            for rank, (events, order) in enumerate(made)
        ]
        where: Cluster = load_cluster(cluster)
        for slow in ({}, {3: 1.5}):
            found = told(lambda programs=programs, where=where, slow=slow: replay(programs, where, slow=slow))
            assert not isinstance(found, str), found
            yield f"{stages} {name} {slow}", [[_rank(each) for each in found.times], dict(found.memory), found.binds]
        for rank, (events, order) in enumerate(made):
            played = list(Player(events, order).run())
            yield f"{stages} {name} played {rank}", [_event(event) for event in played]
            times = [count for _, count in counted(events, order)]
            yield f"{stages} {name} counted {rank}", [times, is_playable(events, order), programs[rank].peak_memory()]
            other = [Wait(event.number + 1) if isinstance(event, Wait) else event for event in events]
            fewer = [event for event in events if not (isinstance(event, EventMark) and event.microbatch == 1)]
            yield f"{stages} {name} playable {rank}", [is_playable(each, order) for each in (other, fewer)]


def _of_kernels() -> Iterator[tuple[str, object]]:
    """Prices of kernels one by one."""
    for name in ("h100-sxm", "h200-measured", "cpu-host", "v100-sxm-16gb", "rtx-4090"):
        device = load_cluster(f"1x {name}").device
        maker = _Maker(7)
        runs = [maker.run("forward", ("", "block 0")[place % 2]) for place in range(40)]
        for is_compiled, is_graphed in ((False, False), (True, False), (True, True)):
            costs = KernelCosts(device, Constants(), is_compiled=is_compiled, is_graphed=is_graphed)
            yield f"{name} {is_compiled} {is_graphed}", [costs(run) for run in runs]
