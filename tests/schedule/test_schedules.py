"""Schedules of every name and size: complete, free of deadlock, as idle and as large as the formulas say."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paceline.errors import UsageError
from paceline.schedule.check import check_schedule
from paceline.schedule.grid import Action, Schedule, lower, parse_action
from paceline.schedule.measure import ScheduleCosts, StageCost, equal_costs, measure_schedule
from paceline.schedule.schedules import SCHEDULE_NAMES, make_schedule

MESSAGES = ("SF", "RF", "SB", "RB")


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    name = draw(st.sampled_from(SCHEDULE_NAMES))
    chunks = draw(st.integers(2, 4)) if name == "interleaved" else None
    return make_schedule(name, draw(st.integers(1, 6)), draw(st.integers(1, 10)), chunks)


def text(rows: tuple[tuple[Action | None, ...], ...]) -> list[str]:
    return [" ".join(str(action or "-") for action in row) for row in rows]


def test_small_ones_by_hand() -> None:
    assert text(make_schedule("gpipe", 2, 2).rows) == ["F0.0 F0.1 - - B0.0 B0.1", "- F1.0 F1.1 B1.0 B1.1 -"]
    assert text(make_schedule("1f1b", 2, 3).rows) == [
        "F0.0 F0.1 - B0.0 F0.2 B0.1 - B0.2",
        "- F1.0 B1.0 F1.1 B1.1 F1.2 B1.2 -",
    ]
    assert text(make_schedule("zb-h1", 2, 2).rows) == [
        "F0.0 F0.1 - I0.0 W0.0 I0.1 W0.1",
        "- F1.0 I1.0 F1.1 I1.1 W1.0 W1.1",
    ]
    interleaved = make_schedule("interleaved", 2, 2, 2)
    assert interleaved.placement == (0, 1, 0, 1)
    assert text(interleaved.rows)[0].split()[:4] == ["F0.0", "F0.1", "F2.0", "F2.1"]


def test_the_v_has_its_first_and_last_stage_on_rank_0() -> None:
    schedule = make_schedule("zb-v", 4, 8)
    assert schedule.placement == (0, 1, 2, 3, 3, 2, 1, 0)
    assert schedule.stages == 8
    assert schedule.splits_backward
    assert not make_schedule("1f1b", 4, 8).splits_backward


@settings(max_examples=60)
@given(schedules())
def test_every_schedule_passes_its_check_and_has_all_work_once(schedule: Schedule) -> None:
    check_schedule(schedule)
    assert len({len(row) for row in schedule.rows}) == 1
    actions = [action for order in schedule.orders() for action in order]
    parts = "FIW" if schedule.splits_backward else "FB"
    whole = {
        Action(kind, stage, microbatch)  # type: ignore[arg-type]
        for kind in parts
        for stage in range(schedule.stages)
        for microbatch in range(schedule.microbatches)
    }
    assert len(actions) == len(whole)
    assert set(actions) == whole


@settings(max_examples=60)
@given(schedules())
@example(make_schedule("interleaved", 4, 5, 3))
def test_idle_time_and_memory_are_those_of_the_formulas(schedule: Schedule) -> None:
    ranks, microbatches = schedule.ranks, schedule.microbatches
    measure = measure_schedule(schedule)
    chunks = schedule.stages // ranks
    divided_by = {"interleaved": chunks, "zb-h1": 3, "zb-v": 6}.get(schedule.name, 1)
    wanted = (ranks - 1) / (divided_by * microbatches)
    needed = {"interleaved": ranks, "zb-h1": ranks, "zb-v": 1.5 * ranks}.get(schedule.name, 1)
    if microbatches >= needed:
        assert measure.overhead == pytest.approx(wanted)
        assert measure.bubble == pytest.approx((ranks - 1) / (divided_by * microbatches + ranks - 1))
    else:
        # A pipeline that never is full gains less; it never loses.
        assert measure.overhead <= (ranks - 1) / microbatches + 1e-9
    assert measure.busy == pytest.approx([3.0 * microbatches] * ranks)
    if schedule.name != "interleaved":
        assert max(measure.in_flight_share) <= (microbatches if schedule.name == "gpipe" else ranks)
    elif microbatches % ranks == 0:
        assert max(measure.in_flight_share) <= ((chunks + 1) * ranks - 1) / chunks


@settings(max_examples=30)
@given(st.integers(2, 6), st.integers(1, 10))
def test_zero_bubble_is_less_idle_than_1f1b_in_the_same_memory(ranks: int, microbatches: int) -> None:
    plain, h1, v = (measure_schedule(make_schedule(name, ranks, microbatches)) for name in ("1f1b", "zb-h1", "zb-v"))
    assert h1.bubble < plain.bubble
    assert v.bubble <= h1.bubble
    assert max(h1.in_flight_share) <= max(plain.in_flight_share)
    assert max(v.in_flight_share) <= max(plain.in_flight_share)


def test_1f1b_holds_ranks_minus_rank_and_gpipe_all() -> None:
    assert measure_schedule(make_schedule("1f1b", 4, 8)).in_flight == (4, 3, 2, 1)
    assert measure_schedule(make_schedule("gpipe", 4, 8)).in_flight == (8, 8, 8, 8)


# Lowering.


def deliver(schedule: Schedule) -> None:
    """Runs the programs of all ranks: a receive is posted, its use waits, and channels know only order.

    The k-th receive of a channel gets what was sent k-th: where that is not what was meant, this fails.
    """
    programs = [deque(program) for program in lower(schedule)]
    sent: dict[tuple[str, int], list[int]] = {}
    posted: dict[tuple[str, int], list[int]] = {}
    done: set[Action] = set()

    def has_come(way: str, stage: int, microbatch: int, peer: int) -> bool:
        if not 0 <= peer < schedule.stages:
            return True
        if schedule.placement[peer] == schedule.placement[stage]:
            kinds = ("F",) if way == "F" else ("B", "I")
            return any(Action(kind, peer, microbatch) in done for kind in kinds)  # type: ignore[arg-type]
        place = posted[way, stage].index(microbatch)
        arrived = sent.get((way, stage), [])
        assert arrived[place : place + 1] in ([], [microbatch])
        return place < len(arrived)

    def can_run(action: Action) -> bool:
        stage, microbatch = action.stage, action.microbatch
        if action.kind == "F":
            return has_come("F", stage, microbatch, stage - 1)
        if action.kind in ("B", "I"):
            return Action("F", stage, microbatch) in done and has_come("B", stage, microbatch, stage + 1)
        if action.kind == "RB":
            assert Action("F", stage, microbatch) in done
        return True

    while any(programs):
        moved = False
        for program in programs:
            while program and can_run(program[0]):
                action, moved = program.popleft(), True
                done.add(action)
                if action.kind in ("SF", "SB"):
                    peer = action.stage + (1 if action.kind == "SF" else -1)
                    sent.setdefault((action.kind[1], peer), []).append(action.microbatch)
                elif action.kind in ("RF", "RB"):
                    posted.setdefault((action.kind[1], action.stage), []).append(action.microbatch)
        assert moved, [program[0] for program in programs if program]
    assert sent == posted


@settings(max_examples=60)
@given(schedules())
def test_programs_deliver_every_message_to_its_use(schedule: Schedule) -> None:
    deliver(schedule)


@settings(max_examples=60)
@given(schedules())
def test_sends_follow_what_makes_them_and_receives_come_ahead(schedule: Schedule) -> None:
    for rank, program in enumerate(lower(schedule)):
        assert [a for a in program if a.is_compute] == list(schedule.compute_orders()[rank])
        last_compute = None
        computed = [index for index, action in enumerate(program) if action.is_compute]
        for index, action in enumerate(program):
            if action.is_compute:
                last_compute = action
            if action.kind in ("SF", "SB"):
                assert last_compute is not None
                assert (last_compute.stage, last_compute.microbatch) == (action.stage, action.microbatch)
            if action.kind == "RF":
                use = program.index(Action("F", action.stage, action.microbatch))
                between = sum(index < place < use for place in computed)
                assert between >= 1 or computed[0] == use
        for stage in (stage for stage, home in enumerate(schedule.placement) if home == rank):
            ends = [index for index, a in enumerate(program) if a.stage == stage and a.kind in ("B", "W")]
            between = program[ends[-1] + 1 : program.index(Action("R", stage))]
            assert {action.kind for action in between} <= {"SB"}
        assert sum(action.kind == "R" for action in program) == schedule.placement.count(rank)


def test_stages_on_one_rank_send_nothing_to_one_another() -> None:
    programs = lower(make_schedule("zb-v", 3, 2))
    kinds = {str(action) for program in programs for action in program if action.kind in MESSAGES}
    assert not kinds & {"SF2.0", "RF3.0", "SB3.0", "RB2.0"}
    assert {"SF1.0", "RF2.0", "SF3.1", "RF4.1"} <= kinds
    assert all(action.kind not in MESSAGES for action in lower(make_schedule("zb-v", 1, 3))[0])


def test_receives_keep_the_order_of_sends_when_uses_do_not() -> None:
    rows = (
        tuple(map(parse_action, ["F0.0", "F0.1", "F0.2", "B0.2", "B0.0", "B0.1"])),
        tuple(map(parse_action, ["F1.2", "F1.1", "F1.0", "B1.0", "B1.2", "B1.1"])),
    )
    schedule = Schedule(name="mine", rows=rows, placement=(0, 1), microbatches=3)
    check_schedule(schedule)
    deliver(schedule)


# Measuring.


def test_given_costs_decide_the_makespan() -> None:
    schedule = make_schedule("1f1b", 2, 2)
    slow = StageCost(forward=2.0, backward_input=3.0, backward_weight=1.0)
    fast = StageCost(forward=1.0, backward_input=1.0, backward_weight=1.0)
    costs = ScheduleCosts(stages=(fast, slow), communication=0.5)
    measure = measure_schedule(schedule, costs)
    # F0.0 ends at 1; rank 1 runs F B F B from 1.5 without a gap to 13.5; the last gradient arrives at 14, B0.1 takes 2.
    assert measure.makespan == 16.0
    assert measure.busy == (6.0, 12.0)
    assert measure.bubble == pytest.approx(1 - 18 / 32)
    assert measure.overhead == pytest.approx(32 / 18 - 1)
    assert measure.times[parse_action("B0.0")] == (8.0, 10.0)


def test_only_messages_between_ranks_take_time() -> None:
    alone = make_schedule("zb-v", 1, 2)
    costs = ScheduleCosts(stages=equal_costs(alone).stages, communication=100.0)
    assert measure_schedule(alone, costs).makespan == 6.0


@pytest.mark.parametrize(
    ("costs", "what"),
    [
        (ScheduleCosts(stages=()), "costs for 0 stages, and schedule 'gpipe' has 2"),
        (ScheduleCosts(stages=(StageCost(forward=0, backward_input=1, backward_weight=1),) * 2), "stage 0 takes 0"),
        (ScheduleCosts(stages=(StageCost(forward=1, backward_input=-1, backward_weight=1),) * 2), "1 forward, -1"),
        (ScheduleCosts(stages=(StageCost(forward=float("nan"), backward_input=1, backward_weight=1),) * 2), "nan"),
    ],
)
def test_costs_that_make_no_sense_are_refused(costs: ScheduleCosts, what: str) -> None:
    with pytest.raises(UsageError, match=what):
        measure_schedule(make_schedule("gpipe", 2, 2), costs)


# Names and numbers.


@pytest.mark.parametrize(
    ("name", "ranks", "microbatches", "chunks", "parts"),
    [
        ("1f1", 2, 2, None, ("no schedule '1f1'", ", ".join(SCHEDULE_NAMES), "did you mean 1f1b?")),
        ("gpipe", 0, 2, None, ("ranks = 0", "at least one")),
        ("gpipe", 2, 0, None, ("microbatches = 0", "at least one")),
        ("1f1b", 2, 2, 2, ("'1f1b' with chunks = 2", "exactly 1", "interleaved")),
        ("interleaved", 2, 2, 1, ("chunks = 1", "at least 2")),
        ("zb-v", 2, 2, 3, ("chunks = 3", "exactly 2")),
    ],
)
def test_what_cannot_be_made_is_refused(
    name: str, ranks: int, microbatches: int, chunks: int | None, parts: tuple[str, ...]
) -> None:
    with pytest.raises(UsageError) as refused:
        make_schedule(name, ranks, microbatches, chunks)
    for part in parts:
        assert part in str(refused.value)


@pytest.mark.parametrize("action", ["F0.3", "B12.0", "I1.1", "W0.0", "SF0.1", "RF1.1", "SB1.0", "RB0.0", "R3"])
def test_actions_read_as_they_are_written(action: str) -> None:
    assert str(parse_action(action)) == action


@pytest.mark.parametrize("wrong", ["", "F", "F0", "F0.", "R0.1", "X0.1", "F-1.0", "f0.0", "SF0", "F0.1.2", "F0 .1"])
def test_what_is_no_action_is_refused(wrong: str) -> None:
    with pytest.raises(UsageError, match="is not an action"):
        parse_action(wrong)
