"""The event core: overlap, waits, bubbles and stragglers follow from the order of the events."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.cluster.devices import Cluster, load_cluster
from paceline.cluster.kernels import Operation
from paceline.errors import UsageError
from paceline.predict.formulas.constants import Constants
from paceline.predict.formulas.step import COMPOSED_P90, FITTED_P90
from paceline.predict.replay.kernel_costs import fuse_blocks
from paceline.predict.replay.program import Drop, Event, Hold, Issue, Program, Run, Wait
from paceline.predict.replay.replay import replay
from paceline.predict.replay.replayed import trace_events, write_trace

MIB = 2**20
LARGE = 2**36  # so that messages count for nothing beside it
PLAIN = Constants(contention=0.0, slowdown=1.0)


def cluster(name: str = "1x dgx-h100") -> Cluster:
    """A cluster whose host takes no time."""
    found = load_cluster(name)
    device = replace(found.device, launch_s=0.0, compiled_launch_s=0.0, memory_rates={}, operation_s=None)
    return replace(found, node=replace(found.node, device=device))


def kernel(size: int = 256 * MIB, phase: str = "forward", block: str = "") -> Run:
    return Run(Operation(name="add", family="pointwise", reads=((1, size),), writes=((2, size),), phase=phase), block)


def program(events: list[Event], **values: object) -> Program:
    given = {"name": "p", "rank": 0, "ranks": 4, "strategy": "ddp", "resident": {}, "samples": 8, "elements": 64.0}
    return Program(events=tuple(events), **(given | values))  # type: ignore[arg-type]


def gather(number: int, size: int = 64 * MIB, lane: str = "world") -> Issue:
    return Issue(number, "all_gather", size, (0, 1, 2, 3), lane)


def alone(event: Event) -> float:
    ends: list[Event] = [event, Wait(event.number)] if isinstance(event, Issue) else [event]
    return replay(program(ends), cluster(), constants=PLAIN).seconds


def test_a_step_of_a_run_has_a_loop_around_it_and_costs_the_host_something_in_itself() -> None:
    found = cluster("cpu-host")
    host = replace(found.device, step_s=0.2, loop_s=0.3)
    found = replace(found, node=replace(found.node, device=host))
    run = program([kernel()], ranks=2)
    plain = replay(run, cluster("cpu-host"), constants=PLAIN).seconds - cluster("cpu-host").device.step_s
    engine, looped = (replay(run, found, constants=PLAIN, with_loop=each) for each in (False, True))
    assert engine.seconds == pytest.approx(plain + 0.2)
    assert looped.seconds == pytest.approx(plain + 0.5)
    rank = looped.longest
    assert (rank.loop, rank.phases["loop"], rank.launch_wait) == (0.3, 0.3, pytest.approx(0.2))
    assert (engine.longest.loop, "loop" in engine.longest.phases) == (0.0, False)
    assert rank.idle == pytest.approx(0.0, abs=1e-9)
    assert looped.to_json()["parts_s"]["loop"] == 0.3


def test_beside_a_gpu_the_host_does_it_ahead_where_kernels_take_longer() -> None:
    found = cluster()
    late = replace(found, node=replace(found.node, device=replace(found.device, loop_s=1e-3)))
    run = program([kernel(), kernel()])
    assert replay(run, late, constants=PLAIN, with_loop=True).seconds == pytest.approx(
        1e-3 + replay(run, found, constants=PLAIN).seconds
    )
    assert replay(run, late, constants=PLAIN).seconds == replay(run, found, constants=PLAIN).seconds


def test_communication_is_hidden_behind_what_does_not_need_it() -> None:
    run, issue = kernel(), gather(0)
    found = replay(program([issue, run, Wait(0), run]), cluster(), constants=PLAIN)
    rank = found.longest
    assert found.seconds == pytest.approx(max(alone(run), alone(issue)) + alone(run))
    assert rank.exposed == pytest.approx(max(0.0, alone(issue) - alone(run)))
    assert rank.exposed < sum(rank.communication.values())
    assert rank.hidden == pytest.approx(alone(issue) - rank.exposed)


def test_communication_that_is_waited_for_at_once_is_exposed() -> None:
    found = replay(program([gather(0), Wait(0), kernel()]), cluster(), constants=PLAIN)
    assert found.seconds == pytest.approx(alone(gather(0)) + alone(kernel()))
    assert found.longest.hidden == pytest.approx(0.0)


def test_what_is_least_certain_is_told_with_what_would_tell_it() -> None:
    waits = replay(program([gather(0), Wait(0)]), cluster(), constants=PLAIN)
    assert waits.doubt == "communication, by about 30% of the step; paceline calibrate on one node would tell"
    kernels = replay(program([kernel()]), cluster(), constants=PLAIN)
    assert kernels.doubt == "kernels, by about 13% of the step; paceline calibrate on one device would tell"
    measured = replay(program([kernel(16384 * MIB)]), load_cluster("1x dgx-h200"))
    assert measured.doubt.startswith("kernels, by about 5% of the step; paceline calibrate --for CONFIG")


def test_a_collective_starts_when_compute_has_come_so_far() -> None:
    found = replay(program([kernel(), gather(0), Wait(0)]), cluster(), constants=PLAIN)
    assert found.seconds == pytest.approx(alone(kernel()) + alone(gather(0)))


def test_one_lane_is_in_order_and_two_run_beside_one_another() -> None:
    one = replay(program([gather(0), gather(1), Wait(0), Wait(1)]), cluster(), constants=PLAIN)
    two = replay(program([gather(0), gather(1, lane="other"), Wait(0), Wait(1)]), cluster(), constants=PLAIN)
    assert one.seconds == pytest.approx(2 * alone(gather(0)))
    assert two.seconds == pytest.approx(alone(gather(0)))


def test_contention_slows_what_runs_beside_communication() -> None:
    events: list[Event] = [gather(0), kernel(), Wait(0)]
    calm = replay(program(events), cluster(), constants=PLAIN)
    loud = replay(program(events), cluster(), constants=replace(PLAIN, contention=0.5))
    beside = min(alone(kernel()), alone(gather(0)))
    assert loud.longest.contention == pytest.approx(0.5 * beside)
    assert loud.seconds > calm.seconds


def test_a_host_that_launches_slowly_holds_the_device_up() -> None:
    slow_host = cluster()
    device = replace(slow_host.device, launch_s=1e-3)
    slow_host = replace(slow_host, node=replace(slow_host.node, device=device))
    found = replay(program([kernel(MIB)] * 10), slow_host, constants=PLAIN)
    assert found.seconds == pytest.approx(10e-3 + alone(kernel(MIB)))
    assert "the host" in found.binds
    assert found.doubt.startswith("the host, by about ")


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 4), (4, 8)])
def test_the_bubble_of_equal_stages_is_that_of_the_formula(stages: int, microbatches: int) -> None:
    programs = [one_f_one_b(stage, stages, microbatches) for stage in range(stages)]
    found = replay(programs, cluster(), constants=PLAIN)
    one = alone(kernel(LARGE)) + alone(kernel(2 * LARGE))
    assert found.seconds == pytest.approx((microbatches + stages - 1) * one, rel=0.01)
    for times in found.times:
        assert times.bubble + times.idle == pytest.approx(times.seconds - microbatches * one, rel=0.01, abs=1e-9)
    first = found.times[0]
    assert first.bubble == pytest.approx((stages - 1) * one, rel=0.05)


def one_f_one_b(stage: int, stages: int, microbatches: int) -> Program:
    """A stage whose forward takes half of its backward."""
    events: list[Event] = []
    number = 0

    def pass_on(kind: str, peer: int, tag: int) -> int:
        nonlocal number
        ranks = (stage, peer) if kind == "send" else (peer, stage)
        events.append(Issue(number, kind, 1024, ranks, f"{ranks}", tag))
        number += 1
        return number - 1

    def forward() -> None:
        if stage:
            events.append(Wait(pass_on("recv", stage - 1, 0)))
        events.append(kernel(LARGE))
        if stage < stages - 1:
            pass_on("send", stage + 1, 0)

    def backward() -> None:
        if stage < stages - 1:
            events.append(Wait(pass_on("recv", stage + 1, 1)))
        events.append(kernel(2 * LARGE, "backward"))
        if stage:
            pass_on("send", stage - 1, 1)

    warm = min(stages - stage, microbatches)
    for _ in range(warm):
        forward()
    for place in range(microbatches):
        backward()
        if place + warm < microbatches:
            forward()
    return program(events, rank=stage, ranks=stages, stage=stage, stages=stages)


def test_all_wait_for_a_slow_rank() -> None:
    events: list[Event] = [kernel(), gather(0), Wait(0), kernel()]
    calm = replay(program(events), cluster(), constants=PLAIN)
    slow = replay(program(events), cluster(), constants=PLAIN, slow={2: 1.5})
    assert slow.seconds == pytest.approx(calm.seconds + alone(kernel()))
    first = slow.times[0]
    assert [(each.rank, each.slowed) for each in slow.times] == [(0, 1.0), (2, 1.5)]
    assert first.exposed == pytest.approx(alone(gather(0)) + 0.5 * alone(kernel()))
    assert "rank 2" in slow.binds


def test_the_host_of_a_slow_rank_is_slow_too() -> None:
    slow_host = cluster()
    device = replace(slow_host.device, launch_s=1e-3, step_s=4e-3, loop_s=6e-3)
    slow_host = replace(slow_host, node=replace(slow_host.node, device=device))
    run = program([kernel(MIB)] * 10)
    calm, slow = (replay(run, slow_host, constants=PLAIN, slow=each, with_loop=True) for each in ({}, {2: 1.5}))
    assert slow.seconds == pytest.approx(1.5 * calm.seconds)


def test_of_a_stage_with_a_slow_rank_that_one_is_told() -> None:
    programs = [replace(one_f_one_b(stage, 2, 4), rank=2 * stage, ranks=4) for stage in range(2)]
    renamed = [replace(each, events=tuple(_between_stages(event) for event in each.events)) for each in programs]
    found = replay(renamed, cluster(), constants=PLAIN, slow={3: 2.0})
    assert [(each.rank, each.slowed) for each in found.times] == [(0, 1.0), (3, 2.0)]
    assert replace(found, shown=2).longest.rank == 3
    assert replace(found, shown=1).longest.rank == 0


def _between_stages(event: Event) -> Event:
    """Gives the stages two ranks each."""
    if isinstance(event, Issue):
        return replace(event, ranks=tuple(2 * rank for rank in event.ranks))
    return event


@pytest.mark.parametrize("slow", [{}, {2: 0.5}])
def test_nobody_waits_for_a_rank_that_is_not_slow(slow: dict[int, float]) -> None:
    found = replay(program([kernel()]), cluster(), constants=PLAIN, slow=slow)
    assert "wait for rank" not in found.binds
    assert [each.rank for each in found.times] == [0]


def test_the_band_is_wide_outside_what_was_calibrated() -> None:
    inside, outside = (replay(program([kernel()], element=each), cluster()) for each in ("tokens", "samples"))
    assert not inside.outside
    assert outside.outside
    assert inside.band[1] == pytest.approx(inside.seconds * (1 + FITTED_P90))
    assert outside.band[1] == pytest.approx(outside.seconds * (1 + COMPOSED_P90))


def test_fused_kernels_read_and_write_what_others_see() -> None:
    def step(name: str, source: int, target: int, block: str = "block 0", family: str = "pointwise") -> Run:
        operation = Operation(name=name, family=family, reads=((source, 10),), writes=((target, 10),))  # type: ignore[arg-type]
        return Run(operation, block)

    events = [step("a", 1, 2), step("b", 2, 3), step("c", 3, 4), step("d", 4, 5, block=""), step("e", 3, 6, block="")]
    fused, *rest = fuse_blocks(events)
    assert isinstance(fused, Run)
    assert fused.operation.reads == ((1, 10),)
    assert fused.operation.writes == ((3, 10), (4, 10))  # 2 is seen by nobody else
    assert rest == events[3:]


def test_a_compiled_step_takes_less_than_an_eager_one() -> None:
    events: list[Event] = [kernel(block="block 0")] * 4
    eager = replay(program(events), cluster(), constants=PLAIN)
    compiled = replay(program(events, is_compiled=True), cluster(), constants=PLAIN)
    assert compiled.seconds < 0.5 * eager.seconds


def test_memory_is_that_of_the_worst_moment() -> None:
    events: list[Event] = [
        Hold(1, 100, "activations"),
        Hold(2, 50, "temporary"),
        Drop(2),
        Hold(3, 40, "gradients"),
        Drop(1),
    ]
    found = program(events, resident={"parameters": 10})
    assert {name: size for name, size in found.peak_memory().items() if size} == {
        "parameters": 10,
        "activations": 100,
        "temporary": 50,
    }
    memory = replay(found, cluster(), constants=PLAIN).memory
    assert memory["framework"] > 0


def test_rates_and_costs_follow_from_the_step() -> None:
    found = replay(program([kernel()], model_flops=1e9), cluster(), constants=PLAIN)
    assert found.elements_per_s == pytest.approx(64 / found.seconds)
    assert found.mfu == pytest.approx(1e9 / found.seconds / cluster().device.peak("fp32"))
    assert found.usd_per_step(3.6) == pytest.approx(4 * found.seconds * 1e-3)
    low, high = found.band
    assert low < found.seconds < high


def test_a_trace_has_every_span_and_the_same_bytes(tmp_path: Path) -> None:
    events: list[Event] = [gather(0), kernel(block="block 3"), Wait(0)]
    found = replay(program(events), cluster(), keeps_spans=True)
    write_trace(found, tmp_path / "t.json")
    written = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert written == trace_events(replay(program(events), cluster(), keeps_spans=True))
    spans = [event for event in written if event["ph"] == "X"]
    assert {"block 3 add"} < {event["name"] for event in spans}
    with pytest.raises(UsageError, match="kept no spans"):
        trace_events(replay(program(events), cluster()))
    (tmp_path / "none").write_text("a file")
    with pytest.raises(UsageError, match="cannot write the trace"):
        write_trace(found, tmp_path / "none" / "t.json")


def test_programs_that_wait_for_ever_are_named() -> None:
    first = program([Issue(0, "recv", 8, (1, 0), "x"), Wait(0)], ranks=2, stages=2)
    second = program([Issue(0, "recv", 8, (0, 1), "y"), Wait(0)], rank=1, ranks=2, stage=1, stages=2)
    with pytest.raises(UsageError, match=r"(?s)for ever.*rank 0 waits for recv"):
        replay([first, second], cluster())


def test_one_stage_of_several_and_unknown_ranks_are_refused() -> None:
    with pytest.raises(UsageError, match="record_stages"):
        replay(program([kernel()], stages=2), cluster())
    with pytest.raises(UsageError, match="ranks are 0 to 3"):
        replay(program([kernel()]), cluster(), slow={9: 2.0})
    with pytest.raises(UsageError, match="which has 8 devices"):
        replay(program([kernel()], ranks=16), cluster())
