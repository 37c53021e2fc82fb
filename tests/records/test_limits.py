"""What limits a run is told from its records, with what to change."""

from __future__ import annotations

from dataclasses import replace

import pytest
from made_records import STEP

from paceline.records.limits import find_limits
from paceline.records.records import StepRecord
from paceline.records.summary import StepTable

QUICK = replace(STEP, step_s=1.0, data_s=0.0, comm_s=0.0)


def table_of(record: StepRecord, steps: int = 10) -> StepTable:
    # The first step is warm-up: it must not count.
    first = replace(record, step_s=100.0, data_s=90.0, comm_s=90.0)
    return StepTable([{0: first}, *({0: replace(record, step=number)} for number in range(2, steps + 1))])


@pytest.mark.parametrize(
    ("changes", "what", "share"),
    [({"data_s": 0.17}, "data", 0.17), ({"comm_s": 0.3}, "communication", 0.3), ({"host_s": 0.9}, "host", 0.9)],
)
def test_each_limit_is_found_by_its_share(changes: dict[str, float], what: str, share: float) -> None:
    (found,) = find_limits(table_of(replace(QUICK, **changes)))
    assert (found.what, found.share) == (what, pytest.approx(share))
    assert str(found).startswith(f"limited by {what}: {100 * share:.0f} % of the step waits for")


def test_a_run_that_computes_has_no_limit() -> None:
    assert find_limits(table_of(replace(QUICK, data_s=0.01, comm_s=0.05, host_s=0.0))) == ()


def test_the_largest_comes_first() -> None:
    found = find_limits(table_of(replace(QUICK, data_s=0.2, comm_s=0.4)))
    assert [each.what for each in found] == ["communication", "data"]


def test_waiting_for_a_straggler_is_not_communication() -> None:
    assert find_limits(table_of(replace(QUICK, comm_s=0.4)), has_straggler=True) == ()


def test_a_few_steps_say_nothing() -> None:
    assert find_limits(table_of(replace(QUICK, data_s=0.5), steps=5)) == ()
    assert find_limits(StepTable([])) == ()
