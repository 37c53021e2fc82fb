"""Step records added up: attempts, rows of steps, sums and medians."""

from __future__ import annotations

from dataclasses import replace

import pytest
from made_records import RUN, STEP

from paceline.records.records import EndRecord, StepRecord
from paceline.records.summary import RunRecords, StepTable, add_up, final_steps, split_attempts


def step(number: int, *, step_s: float = 1.0, comm_s: float = 0.0, samples: int = 8) -> StepRecord:
    return replace(
        STEP, step=number, step_s=step_s, comm_s=comm_s, samples=samples, count=samples, loss_sum=2.0 * samples
    )


def test_an_attempt_is_what_follows_a_run_record() -> None:
    end = EndRecord(status="done", step=3, seconds=7.0, message="", time=20.0)
    again = replace(RUN, time=10.0)
    first, second = split_attempts([replace(RUN, time=0.0), replace(step(1), time=4.0), again, step(2), step(3), end])
    assert (first.seconds, first.end, len(first.steps)) == (4.0, None, 1)
    assert (second.run, second.seconds, second.end) == (again, 7.0, end)
    assert split_attempts([]) == split_attempts([step(1)]) == []


def test_a_step_made_again_replaces_it_and_all_later_ones() -> None:
    again = step(2, samples=3)
    attempts = split_attempts([RUN, step(1), step(2), step(3), RUN, again])
    assert final_steps(attempts) == {1: step(1), 2: again}


def test_the_slowest_rank_sets_the_pace() -> None:
    rows = [{0: step(n, step_s=2.0, comm_s=1.0), 1: step(n, step_s=4.0, samples=4)} for n in (1, 2)]
    table = StepTable([*rows, {0: step(3, step_s=1.0)}])
    assert table.lengths == [4.0, 4.0, 1.0]
    assert (table.step_s, table.took_s, table.samples_per_s) == (4.0, 9.0, 3.0)
    assert table.mean_s("comm_s") == 1.0
    assert [len(table.last(1)), len(table.without_warm_up()), len(StepTable(rows[:1]).without_warm_up())] == [1, 2, 1]
    assert [record.step for record in table.of_rank(1)] == [1, 2]
    assert StepTable([]).step_s is StepTable([]).samples_per_s is None


def test_sums_give_loss_shares_and_efficiency() -> None:
    totals = add_up([step(1, step_s=2.0, comm_s=1.0), step(1, step_s=2.0)])
    assert (totals.steps, totals.loss, totals.compute_s, totals.comm_share) == (2, 2.0, 3.0, 0.25)
    assert totals.efficiency(2, 2.0) == 0.75
    nothing = add_up([])
    assert (nothing.loss, nothing.step_s, nothing.comm_share, nothing.efficiency(2, 0.0)) == (None, 0.0, 0.0, 0.0)


@pytest.mark.parametrize("numbers", [range(1, 3), range(2, 9)])
def test_a_row_has_the_ranks_that_have_the_step(numbers: range) -> None:
    table = RunRecords.of([[RUN, step(1), step(2)], [RUN, step(2)]]).steps.only(numbers)
    assert set(table.rows[-1]) == {0, 1}
    assert len(table) == (2 if 1 in numbers else 1)


def test_a_run_that_went_back_is_what_it_made_since() -> None:
    """Report, page, analyzer and chaos agree on it: steps beyond the one that was made again are gone."""
    less = replace(RUN, world_size=1)
    records = RunRecords.of([[RUN, step(1), step(2), step(3), less, step(2)], [RUN, step(1), step(2), step(3)]])
    assert list(records.attempts) == [1, 2]
    assert [set(row) for row in records.steps.rows] == [{0, 1}, {0}]
    assert records.run is less
