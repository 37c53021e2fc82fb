"""Broken schedules of every kind: what is wrong is named by its cell, before anything runs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import UsageError
from paceline.schedule.check import check_schedule
from paceline.schedule.grid import Action, Schedule, lower, parse_action
from paceline.schedule.schedules import make_schedule


def of(*rows: str, placement: tuple[int, ...] = (0, 1), microbatches: int = 1) -> Schedule:
    """Makes a schedule of rows such as ``"F0.0 - B0.0"``."""
    cells = tuple(tuple(None if cell == "-" else parse_action(cell) for cell in row.split()) for row in rows)
    return Schedule(name="mine", rows=cells, placement=placement, microbatches=microbatches)


GOOD = ("F0.0 - - B0.0", "- F1.0 B1.0 -")
LOWERED = ("F0.0 SF0.0 RB0.0 B0.0", "RF1.0 F1.0 B1.0 SB1.0")

BROKEN = {
    "nothing": (of(placement=()), "0 ranks, 0 stages"),
    "no microbatches": (of(*GOOD, microbatches=0), "0 microbatches"),
    "placed nowhere": (of(*GOOD, placement=(0, 2)), "places stage 1 on rank 2, and has 2 ranks"),
    "stage that is not there": (of("F0.0 B0.0 F2.0", "F1.0 B1.0"), "rank 0, slot 2: F2.0 is of stage 2"),
    "microbatch that is not there": (of("F0.0 F0.1 B0.0", "F1.0 B1.0"), "rank 0, slot 1: F0.1 is of microbatch 1"),
    "wrong rank": (of("F0.0 F1.0 B0.0", "- - B1.0"), "rank 0, slot 1: F1.0 is on the wrong rank: stage 1 is on rank 1"),
    "twice": (of("F0.0 F0.0 - B0.0", GOOD[1]), "rank 0, slot 1: F0.0 is there twice: first in slot 0"),
    "twice, backward": (of(GOOD[0], "- F1.0 B1.0 B1.0"), "rank 1, slot 3: B1.0 is there twice: first in slot 2"),
    "no forward": (of("- - - B0.0", GOOD[1]), "rank 0: F0.0 is missing"),
    "no backward": (of(GOOD[0], "- F1.0"), "rank 1: B1.0 is missing"),
    "no weights": (of("F0.0 - - I0.0", GOOD[1]), "rank 0: W0.0 is missing"),
    "no inputs": (of("F0.0 - - W0.0", GOOD[1]), "rank 0: I0.0 is missing"),
    "whole and in parts": (of("F0.0 - - B0.0 W0.0", GOOD[1]), "rank 0, slot 4: W0.0 is part of B0.0"),
    "an empty row": (of(GOOD[0], ""), "rank 1: F1.0 is missing"),
    "backward before forward": (of("B0.0 F0.0", GOOD[1]), "rank 0, slot 0: B0.0 comes before F0.0, which is in slot 1"),
    "weights before inputs": (of("F0.0 W0.0 I0.0", GOOD[1]), "rank 0, slot 1: W0.0 comes before I0.0"),
    "stages of one rank": (
        of("F1.0 F0.0 B1.0 B0.0", placement=(0, 0)),
        "rank 0, slot 0: F1.0 comes before F0.0, which is in slot 1",
    ),
    "reduce too early": (of("F0.0 R0 B0.0", GOOD[1]), "rank 0, slot 1: R0 comes before B0.0, which is in slot 2"),
    "reduce twice": (of("F0.0 B0.0 R0 R0", GOOD[1]), "rank 0, slot 3: R0 is there twice"),
    "no send": (of("F0.0 RB0.0 B0.0", LOWERED[1]), "rank 0: SF0.0 is missing"),
    "no receive": (of(LOWERED[0], "F1.0 B1.0 SB1.0"), "rank 1: RF1.0 is missing"),
    "sent before it is made": (
        of("SF0.0 F0.0 RB0.0 B0.0", LOWERED[1]),
        "rank 0, slot 0: SF0.0 comes before F0.0, which is in slot 1",
    ),
    "received after its use": (
        of(LOWERED[0], "F1.0 RF1.0 B1.0 SB1.0"),
        "rank 1, slot 0: F1.0 comes before RF1.0, which is in slot 1",
    ),
    "gradient before its output": (
        of("RB0.0 F0.0 SF0.0 B0.0", LOWERED[1]),
        "rank 0, slot 0: RB0.0 comes before F0.0, which is in slot 1",
    ),
    "message to nobody": (of("F0.0 SF0.0 RB0.0 B0.0 SB0.0", LOWERED[1]), "rank 0, slot 4: SB0.0 has no other side"),
    "message within a rank": (
        of("F0.0 SF0.0 F1.0 B1.0 B0.0", placement=(0, 0)),
        "rank 0, slot 1: SF0.0 has no other side on another rank",
    ),
    "messages out of order": (
        of(
            "F0.0 SF0.0 F0.1 SF0.1 RB0.0 RB0.1 B0.0 B0.1", "RF1.1 RF1.0 F1.0 F1.1 B1.0 SB1.0 B1.1 SB1.1", microbatches=2
        ),
        "rank 1, slot 0: RF1.1 comes before RF1.0, and SF0.0 is sent before SF0.1",
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_what_is_broken_is_named_by_its_cell(kind: str) -> None:
    schedule, message = BROKEN[kind]
    with pytest.raises(UsageError) as refused:
        check_schedule(schedule)
    assert message in str(refused.value), refused.value
    assert "schedule 'mine'" in str(refused.value)


@pytest.mark.parametrize("rows", [GOOD, LOWERED, ("F0.0 B0.0 R0", "F1.0 I1.0 - W1.0")])
def test_what_is_whole_passes(rows: tuple[str, ...]) -> None:
    check_schedule(of(*rows))


def test_ranks_that_wait_in_a_circle_are_all_named() -> None:
    # Rank 0 wants the gradient of microbatch 0 before it sends microbatch 1, rank 1 wants microbatch 1 first.
    schedule = of("F0.0 B0.0 F0.1 B0.1", "F1.0 F1.1 B1.0 B1.1", microbatches=2)
    with pytest.raises(UsageError) as refused:
        check_schedule(schedule)
    assert str(refused.value).splitlines() == [
        "schedule 'mine' deadlocks: rank 0, slot 1: B0.0 waits for B1.0 (rank 1, slot 2)",
        "  rank 1, slot 1: F1.1 waits for F0.1 (rank 0, slot 2)",
        "  ranks that wait in a circle wait for ever: move one of these actions to a later slot",
    ]


def test_a_send_that_comes_too_late_is_a_deadlock() -> None:
    rows = ("F0.0 RB0.0 B0.0 SF0.0", "RF1.0 F1.0 B1.0 SB1.0")
    with pytest.raises(UsageError) as refused:
        check_schedule(of(*rows))
    assert "rank 0, slot 2: B0.0 waits for SB1.0 (rank 1, slot 3)" in str(refused.value)
    assert "rank 1, slot 1: F1.0 waits for SF0.0 (rank 0, slot 3)" in str(refused.value)


NAMES = st.sampled_from(["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"])


@settings(max_examples=40)
@given(NAMES, st.integers(2, 4), st.integers(1, 6), st.data())
def test_any_schedule_that_loses_an_action_is_refused(
    name: str, ranks: int, microbatches: int, data: st.DataObject
) -> None:
    schedule = make_schedule(name, ranks, microbatches)
    if data.draw(st.booleans(), label="with messages"):
        schedule = replace(schedule, rows=lower(schedule))
    rank = data.draw(st.integers(0, ranks - 1), label="rank")
    slots = [slot for slot, action in enumerate(schedule.rows[rank]) if action and action.kind != "R"]
    slot = data.draw(st.sampled_from(slots), label="slot")
    lost = schedule.rows[rank][slot]
    row = (*schedule.rows[rank][:slot], None, *schedule.rows[rank][slot + 1 :])
    with pytest.raises(UsageError, match=f"rank {rank}"):
        check_schedule(replace(schedule, rows=(*schedule.rows[:rank], row, *schedule.rows[rank + 1 :])))
    assert lost is not None


@settings(max_examples=40)
@given(NAMES, st.integers(1, 4), st.integers(1, 6), st.booleans())
def test_idle_cells_and_own_messages_do_not_matter(name: str, ranks: int, microbatches: int, lowered: bool) -> None:
    schedule = make_schedule(name, ranks, microbatches)
    dense = replace(schedule, rows=lower(schedule) if lowered else schedule.orders())
    check_schedule(dense)
    assert lower(dense) == lower(schedule)


def test_a_backward_may_be_split_in_some_cells_only() -> None:
    check_schedule(of("F0.0 F0.1 I0.0 W0.0 B0.1", "F1.0 B1.0 F1.1 I1.1 W1.1", microbatches=2))
    assert Action("W", 0, 0) in lower(of("F0.0 I0.0 W0.0", placement=(0,)))[0]
