"""What hosts tell one another as text: views, updates and times of their ranks, and what a reader makes of them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from paceline.health.diagnosis import Diagnosis, FailedAttempt, TrainedSteps
from paceline.health.failure import Cause, Failure, FailureKind
from paceline.health.ledger_view import GroupName, LedgerCall, LedgerEntry, LedgerView, views_from_text, views_to_text
from paceline.health.pairing import (
    PairedRanks,
    PlacedUpdate,
    StepDifference,
    Update,
    UpdateHistory,
    pairing_verdict,
    updates_from_text,
    updates_to_text,
)
from paceline.health.straggler import PhaseTimes, RankLook, looks_from_text, looks_to_text

WORLD = GroupName((0, 1, 2))
AGAIN = GroupName((1, 2), 1)
SUM = LedgerCall(kind="all_reduce", shape=(4, 2), dtype="float32", op="sum")
MESSAGE = LedgerCall(kind="send", shape=(4,), dtype="float32", peer=2, tag=5)


def entry(number: int, call: LedgerCall = SUM, group: GroupName = WORLD) -> LedgerEntry:
    return LedgerEntry(number=number, group=group, sequence=number - 1, call=call, site=f"loop.py:{number}", step=2)


# Operations in words


def test_calls_and_groups_are_named() -> None:
    assert str(SUM) == "all_reduce(sum, float32 [4, 2])"
    assert str(MESSAGE) == "send(to rank 2, float32 [4], tag 5)"
    assert str(replace(MESSAGE, kind="recv", tag=0)) == "recv(from rank 2, float32 [4])"
    assert str(LedgerCall(kind="barrier")) == "barrier()"
    assert str(WORLD) == "[0, 1, 2]"
    assert str(AGAIN) == "[1, 2] (group 2 of these)"
    assert [LedgerCall(kind=kind).is_message for kind in ("send", "recv", "barrier")] == [True, True, False]
    assert entry(3).line == "loop.py:3"
    assert replace(entry(3), site="").line == "an unknown line"


def test_ranks_must_agree_on_elements_and_not_on_shapes() -> None:
    assert SUM.agreed == replace(SUM, shape=(8,)).agreed
    for other in ({"shape": (9,)}, {"dtype": "int64"}, {"op": "max"}, {"peer": 0}, {"kind": "broadcast"}):
        assert SUM.agreed != replace(SUM, **other).agreed  # type: ignore[arg-type]
    barrier, uneven = LedgerCall(kind="barrier"), LedgerCall(kind="all_to_all", shape=(4,), dtype="float32")
    assert barrier.agreed == replace(barrier, shape=(3,)).agreed
    assert uneven.agreed == replace(uneven, shape=(5,), op="x").agreed
    assert uneven.agreed != replace(uneven, dtype="int64").agreed


@pytest.mark.parametrize(("waiting", "state", "found"), [(2, "running", 2), (None, "running", 0), (2, "dead", 0)])
def test_a_rank_waits_in_the_operation_that_it_says(waiting: int | None, state: str, found: int) -> None:
    view = LedgerView(rank=0, entries=(entry(1), entry(2), entry(3)), waiting=waiting, state=state)  # type: ignore[arg-type]
    assert view.waits_in == (entry(found) if found else None)
    assert replace(view, waiting=9).waits_in is None


# Views


def test_views_come_back_on_the_readers_clock() -> None:
    entries = tuple(entry(number) for number in range(1, 13))
    view = LedgerView(
        rank=1, state="running", phase="backward", step=7, entries=entries, issued={WORLD: 12, AGAIN: 3}, waiting=2
    )
    view = replace(view, changed_s=90.0, halted="stopped (SIGSTOP)", halted_s=95.0, host="a", pid=12)
    (found,) = views_from_text(views_to_text([view], 100.0), 1000.0)
    kept = (entries[1], *entries[-8:])  # the one that it waits in, and the last
    assert found == replace(view, entries=kept, changed_s=990.0, halted_s=995.0)
    moving = replace(view, halted="", waiting=None)
    (found,) = views_from_text(views_to_text([moving], 100.0), 1000.0)
    assert (found.entries, found.changed_s, found.halted_s) == (entries[-8:], 990.0, 1000.0 * bool(found.halted))
    assert views_from_text(views_to_text([], 1.0), 2.0) == []


# Updates


def test_updates_come_back_with_the_collective_before_them() -> None:
    lines = [entry(5), entry(5), replace(entry(9), call=LedgerCall(kind="barrier")), None]
    updates: list[PlacedUpdate] = [
        (Update(collectives=5 * number, updates=number, idle=number // 3, counters={1: number, 7: 4 * number}), line)
        for number, line in enumerate(lines, start=1)
    ]
    text = updates_to_text(updates)
    assert len(json.loads(text)[0]) == 3  # each line and call once
    found = updates_from_text(text, WORLD)
    assert [update for update, _ in found] == [update for update, _ in updates]
    for (update, there), (_, line) in zip(found, updates, strict=True):
        if line is None:
            assert there is None
            continue
        assert there is not None
        assert (there.call, there.site, there.group) == (line.call, line.site, WORLD)
        assert there.sequence == update.collectives - 1
    assert updates_from_text(updates_to_text([]), WORLD) == []


@pytest.mark.parametrize(
    "text", ["nothing", "{}", "[]", "[[], [[1, 2, 3, 4, 5]]]", '[[""], [[1, 2, 3, [], 1]]]', "[[3], 4]"]
)
def test_a_text_of_somebody_else_is_no_update(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 (json's error is one too)
        updates_from_text(text, WORLD)


def test_a_history_keeps_the_first_updates_and_fewer_of_the_older_ones() -> None:
    history = UpdateHistory()
    assert history.updates() == []
    for number in range(1, 2001):
        history.add(Update(collectives=number, updates=number))
    kept = [each.updates for each in history.updates()]
    by_level = [range(1997, 2001), range(1976, 2001, 8), range(1792, 2001, 64), range(512, 2001, 512)]
    assert kept == sorted({*range(1, 9), *(number for each in by_level for number in each)})


def test_a_history_keeps_one_update_for_each_place() -> None:
    history = UpdateHistory()
    for number in (3, 3, 8, 9, 64):
        history.add(Update(collectives=number, updates=10 * number))
    assert [each.collectives for each in history.updates()] == [3, 8, 9, 64]
    sparse = UpdateHistory()
    for number in range(0, 4000, 40):  # each is the first of its eight, and some of their 64
        sparse.add(Update(collectives=number, updates=number))
    kept = [each.collectives for each in sparse.updates()]
    assert kept[:8] == list(range(0, 320, 40))
    assert kept[-4:] == [3840, 3880, 3920, 3960]


@pytest.mark.parametrize(
    ("difference", "sentence"),
    [
        (
            StepDifference(what="backward", is_own=True, own=4, other=3),
            "rank 2 made an update without a backward pass, and ranks pair different steps from there on (operation 4 "
            "of group [0, 1, 2]): rank 0 at update 3; rank 2 at update 4, all_reduce(sum, float32 [4, 2]) at loop.py:5",
        ),
        (
            StepDifference(what="update", is_own=False, own=4, other=3),
            "rank 0 left out an update, and ranks pair different steps from there on (operation 4 of group [0, 1, 2]): "
            "rank 0 at update 3; rank 2 at update 4, all_reduce(sum, float32 [4, 2]) at loop.py:5",
        ),
    ],
)
def test_a_difference_is_told_of_the_rank_that_it_is_due_to(difference: StepDifference, sentence: str) -> None:
    verdict = pairing_verdict(difference, (2, 0), (entry(5), None), "step")
    assert verdict.sentence == sentence
    assert (verdict.group, verdict.sequence) == ((0, 1, 2), 4)
    unknown = pairing_verdict(difference, (2, 0), (None, None), "step")
    assert unknown.sentence.endswith("from there on: rank 0 at update 3; rank 2 at update 4")
    assert (unknown.kind, unknown.group, unknown.sequence) == ("mismatch", (), None)


# Times


def test_looks_come_back_with_places_and_times_alone() -> None:
    entries = tuple(
        replace(entry(number, call=MESSAGE if number == 2 else SUM, group=AGAIN if number > 2 else WORLD), issued_s=0.5)
        for number in range(1, 5)
    )
    times = PhaseTimes(steps=7, step_s=1.5, phases={"data": 0.25})
    looks = [
        RankLook(view=LedgerView(rank=1, host="a", pid=12, entries=entries), times=times, ahead_s=0.125),
        RankLook(view=LedgerView(rank=2, host="b", pid=13), times=PhaseTimes(), ahead_s=None),
    ]
    first, second = looks_from_text(looks_to_text(looks))
    assert [(each.number, each.group, each.sequence, each.step, each.issued_s) for each in first.view.entries] == [
        (1, WORLD, 0, 2, 0.5),
        (2, AGAIN, 2, 2, 0.5),
        (3, AGAIN, 3, 2, 0.5),
    ]
    assert not any(each.call.is_message for each in first.view.entries)
    assert (first.view.rank, first.view.host, first.view.pid, first.times, first.ahead_s) == (1, "a", 12, times, 0.125)
    assert second == looks[1]


# Attempts


def attempt(cause: Cause, kind: FailureKind = "error", **values: object) -> FailedAttempt:
    failure = Failure(rank=1, cause=cause, message="bad", time=2.0, kind=kind)
    diagnosis = Diagnosis(cause=failure, message="rank 1 failed: bad\n  its log", code=1)
    return replace(FailedAttempt.of(diagnosis, {}), **values)  # type: ignore[arg-type]


def test_who_saw_the_cause_is_sure() -> None:
    sure = [cause for cause in ("killed", "raised", "died", "stuck", "ended", "lost") if attempt(cause).is_sure]  # type: ignore[arg-type]
    assert sure == ["killed", "raised", "died"]
    assert attempt("stuck", "hang").is_sure
    assert not attempt("raised", diagnosis=None).is_sure
    assert not attempt("stuck", "hang", diagnosis=None).is_sure


def test_an_attempt_comes_back_from_its_text() -> None:
    told = attempt("raised", first_step=3, step=9, can_halve=False)
    found = FailedAttempt.from_text(told.to_text())
    assert (found, found.diagnosis) == (told, told.diagnosis)


def test_an_attempt_is_told_by_the_rank_that_failed_and_its_step() -> None:
    failure = Failure(rank=1, cause="killed", message="was killed by SIGKILL in phase data, 3 steps", time=2.0)
    progress = {
        0: TrainedSteps(first_step=4, last_step=12),
        1: TrainedSteps(first_step=5, last_step=9),
        2: TrainedSteps(first_step=4, last_step=7),
    }
    found = FailedAttempt.of(Diagnosis(cause=failure, message="", code=1), progress)
    assert (found.first_step, found.rank, found.step, found.last_step) == (4, 1, 9, 9)
    assert str(found) == "rank 1 was killed by SIGKILL after step 9"
    blamed = replace(
        failure, blamed=2, kind="hang", message="rank 2 is stopped, for 3.2 s (process 7); it is in phase data"
    )
    found = FailedAttempt.of(Diagnosis(cause=blamed, message="", code=1), progress)
    assert (found.rank, found.step) == (2, 7)
    assert str(found) == "rank 2 is stopped; it is in phase data after step 7"
    found = FailedAttempt.of(Diagnosis(cause=replace(failure, rank=5), message="", code=1), progress)
    assert (found.rank, found.step) == (5, 12)  # it has noted no step of its own
    found = FailedAttempt.of(Diagnosis(cause=failure, message="", code=1), {})
    assert (found.first_step, found.step, found.last_step) == (0, 0, 0)
    assert str(found) == "rank 1 was killed by SIGKILL before its first step"
    assert replace(found, first_step=8, step=3).last_step == 8


# Counters of loops


def compared(own: list[tuple[int, ...]], other: list[tuple[int, ...]]) -> list[StepDifference | None]:
    """Compares updates of (updates, idle, counter), each after one collective more."""
    pair = PairedRanks()
    rows = [
        [
            Update(collectives=number, updates=row[0], idle=row[1], counters=dict(enumerate(row[2:], start=1)))
            for number, row in enumerate(rank, start=1)
        ]
        for rank in (own, other)
    ]
    return [pair.compare(one, two) for one, two in zip(*rows, strict=True)]


def first_difference(values: list[int], at: int, by: int = 1, idle: int = 0) -> int | None:
    """Returns at which update a counter of the other rank is found that is ahead ``by`` from the update ``at`` on."""
    own = [(number + 1 + idle, idle, value) for number, value in enumerate(values)]
    other = [(number + 1 + idle, idle, value + by * (number >= at)) for number, value in enumerate(values)]
    return next((number for number, found in enumerate(compared(own, other)) if found is not None), None)


def test_a_counter_is_trusted_after_three_equal_rises() -> None:
    assert first_difference([0, 1, 2, 3, 4, 5], 4) == 4
    assert first_difference([0, 1, 2, 3, 4, 5], 3) is None
    assert first_difference([0, 2, 4, 6, 8], 4, by=2) == 4
    assert first_difference([0, 2, 4, 6, 8], 4, by=3) is None  # not a whole number of steps
    assert first_difference([0, 5, 6, 7, 8, 9], 4) is None  # the first was another
    assert first_difference([0, 5, 6, 7, 8, 9], 5) == 5
    assert first_difference([0, 5, 5, 6, 7, 8, 9], 4) is None
    assert first_difference([0, 0, 0, 0, 0, 0], 5) is None  # it stands still
    assert first_difference([0, 1, 3, 6, 10, 15, 21], 5) is None  # it never rises alike
    assert first_difference([9, 8, 7, 6, 5, 4], 4) is None  # it falls
    assert first_difference([0, 1, 2, 3, 0, 1, 2, 3, 4, 5], 7) is None  # it has started over


def test_updates_without_a_collective_count_for_no_counter() -> None:
    """Both ranks make idle updates between some of the others: the counter rises with those that are none."""
    rows = [(1, 0), (2, 0), (4, 1), (5, 1), (7, 2), (8, 2), (9, 2)]
    own = [(updates, idle, number) for number, (updates, idle) in enumerate(rows)]
    other = [(updates, idle, number + (number >= 6)) for number, (updates, idle) in enumerate(rows)]
    found = compared(own, other)
    assert found[:6] == [None] * 6
    assert found[6] == StepDifference(what="step", is_own=False, own=6, other=7, counter=1)


def test_idle_updates_of_the_beginning_are_no_difference_later() -> None:
    own = [(3, 2), (4, 2), (5, 2), (7, 3)]
    other = [(1, 0), (2, 0), (3, 0), (4, 0)]
    found = compared(own, other)
    assert found[:3] == [None] * 3
    assert found[3] == StepDifference(what="backward", is_own=True, own=7, other=4)
    fewer = compared([*own[:3], (6, 2)], [*other[:3], (5, 0)])
    assert fewer[3] == StepDifference(what="update", is_own=True, own=6, other=5)
