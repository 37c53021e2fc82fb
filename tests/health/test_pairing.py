"""Ranks that meet in the same collectives in different steps; and all that is no difference."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from paceline.health.ledger_view import GroupName, LedgerCall, LedgerEntry
from paceline.health.pairing import PairedRanks, StepDifference, Update, pairing_verdict

STEP, SAMPLES = 1, 2


def updates(rows: Iterable[tuple[int, ...]]) -> list[Update]:
    """Makes updates of (updates, idle, step, samples), each after one collective more; what is left out is even."""
    found = []
    for number, row in enumerate(rows, start=1):
        count, idle, *counters = row
        named = dict(zip((STEP, SAMPLES), counters, strict=False))
        found.append(Update(collectives=number, updates=count, idle=idle, counters=named))
    return found


def compare(own: Iterable[tuple[int, ...]], other: Iterable[tuple[int, ...]]) -> tuple[int, StepDifference] | None:
    """Returns the first difference, and at which update it is found."""
    pair = PairedRanks()
    for one, two in zip(updates(own), updates(other), strict=True):
        found = pair.compare(one, two)
        if found is not None:
            return one.updates, found
    return None


PLAIN = [(number, 0, number) for number in range(1, 11)]


def test_a_step_that_is_left_out_is_found_at_once() -> None:
    skipped = [(number, 0, number + (number >= 6)) for number in range(1, 11)]
    expected = StepDifference(what="step", is_own=False, own=6, other=7, counter=STEP)
    assert compare(PLAIN, skipped) == (6, expected)
    assert compare(skipped, PLAIN) == (6, StepDifference(what="step", is_own=True, own=7, other=6, counter=STEP))


def test_an_update_without_a_backward_pass_and_one_that_is_left_out_are_told_apart() -> None:
    idle = [(number + (number >= 6), int(number >= 6), number) for number in range(1, 11)]
    assert compare(PLAIN, idle) == (6, StepDifference(what="backward", is_own=False, own=6, other=7))
    fewer = [(number - (number >= 6), 0, number) for number in range(1, 11)]
    assert compare(PLAIN, fewer) == (6, StepDifference(what="update", is_own=False, own=6, other=5))


@pytest.mark.parametrize(
    ("own", "other"),
    [
        pytest.param([(n, 0, n, 4 * n) for n in range(1, 11)], [(n, 0, n, 7 * n) for n in range(1, 11)], id="shares"),
        pytest.param([(n, 0, n % 5) for n in range(1, 11)], [(n, 0, n % 4) for n in range(1, 11)], id="epochs"),
        pytest.param([(n, 0, n) for n in range(1, 11)], [(n, 0, min(n, 6)) for n in range(1, 11)], id="sits out"),
        pytest.param([(n, 0, 32 * n) for n in range(1, 5)], [(n, 0, min(32 * n, 116)) for n in range(1, 5)], id="tail"),
        pytest.param(
            [(n, 0, n, n) for n in range(1, 11)], [(n, 0, n, n + (n > 5)) for n in range(1, 11)], id="a batch less"
        ),
        pytest.param([(n + 3, 0, n) for n in range(1, 11)], PLAIN, id="warm-up on one rank"),
        pytest.param([(n, 0, n) for n in range(1, 3)], [(n, 0, n + (n > 1)) for n in range(1, 3)], id="too early"),
        pytest.param([(n, 0) for n in range(1, 11)], PLAIN, id="no counters"),
    ],
)
def test_what_ranks_may_do_differently_is_no_difference(
    own: list[tuple[int, ...]], other: list[tuple[int, ...]]
) -> None:
    assert compare(own, other) is None
    assert compare(other, own) is None


def test_the_verdict_names_both_ranks_and_lines() -> None:
    call = LedgerCall(kind="all_reduce", shape=(4,), dtype="float32", op="sum")
    entries = [
        LedgerEntry(number=9, group=GroupName((0, 1)), sequence=8, call=call, site=f"train.py:{line} in main")
        for line in (20, 21)
    ]
    found = StepDifference(what="step", is_own=True, own=7, other=6, counter=STEP)
    verdict = pairing_verdict(found, (1, 0), (entries[0], entries[1]), "step")
    assert verdict.sentence == (
        "rank 1 left out a step of its loop, and ranks pair different steps from there on (operation 8 of group "
        "[0, 1]): rank 0 at step = 6, all_reduce(sum, float32 [4]) at train.py:21 in main; "
        "rank 1 at step = 7, all_reduce(sum, float32 [4]) at train.py:20 in main"
    )
    assert (verdict.kind, verdict.ranks, verdict.sequence) == ("mismatch", (1,), 8)
