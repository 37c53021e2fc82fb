"""Steps as columns: what ranks become together, steps made again, gaps, and buckets that hide no extreme."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.view.columns import KEYS, Columns, Rows, bucket_starts, extremes, means


def row(step: object, **values: object) -> tuple[object, ...]:
    return tuple({"step": step, "time": 100.0, "steps": 1, **values}.get(key) for key in KEYS)


def rows(*steps: int, **values: object) -> Rows:
    return [row(step, **values) for step in steps]


def test_ranks_become_one_value_a_step() -> None:
    columns = Columns()
    columns.take(1, [row(1, loss_sum=2.0, count=1, samples=1, step_s=0.5, comm_s=0.1, memory_bytes=7)])
    columns.take(0, [row(1, loss_sum=2.0, count=3, samples=3, step_s=0.2, comm_s=0.3, memory_bytes=9)])
    curves = columns.curves()
    found = {name: float(curves[name][0]) for name in ("loss", "samples_per_s", "step_s", "comm_s", "memory_bytes")}
    # The loss is weighed by counts, the slowest rank sets the pace, phases are means, memory is the largest.
    assert found == pytest.approx({"loss": 1.0, "samples_per_s": 8.0, "step_s": 0.5, "comm_s": 0.2, "memory_bytes": 9})
    assert np.isnan(curves["mfu"][0])


def test_a_step_made_again_replaces_it_and_all_later_ones() -> None:
    columns = Columns()
    columns.take(0, rows(1, 2, 3, 4, lr=1.0))
    columns.curves()  # kept, and to be computed again from step 2 on
    columns.take(0, [*rows(2, lr=2.0), *rows(3, lr=3.0)])
    assert columns.curves()["lr"].tolist()[:3] == [1.0, 2.0, 3.0]
    assert np.isnan(columns.curves()["lr"][3])
    columns.take(0, [*rows(4, lr=4.0), *rows(3, lr=9.0)])  # within one batch
    assert columns.curves()["lr"].tolist()[:3] == [1.0, 2.0, 9.0]


def test_ranks_that_a_run_goes_on_without_are_cut() -> None:
    columns = Columns()
    for rank in (0, 1, 2):
        columns.take(rank, rows(1, 2, 3, samples=1, step_s=1.0))
    columns.cut(2, 2)
    assert columns.curves()["samples_per_s"].tolist() == [3, 2, 2]


def test_steps_that_others_left_out_and_values_that_are_none() -> None:
    columns = Columns()
    assert columns.take(0, rows(10, 30, lr=1.0)) == 0
    assert columns.take(1, rows(20, 10**12, lr=3.0)) == 0
    assert columns.steps.tolist() == [10, 20, 30, 10**12]
    assert columns.curves()["lr"].tolist() == [1, 3, 1, 3]
    assert columns.take(0, [row(40, lr="much"), row(50, lr=5.0), row(-1), row(60, lr=10**400)]) == 3
    assert columns.steps.tolist() == [10, 20, 30, 50, 10**12]


def test_lateness_is_own_time_above_the_median() -> None:
    columns = Columns()
    for rank, (step_s, comm_s) in enumerate([(1.0, 0.5), (1.0, 0.5), (1.0, 0.1)]):
        columns.take(rank, rows(1, 2, 3, 4, step_s=step_s, comm_s=comm_s))
    ranks, steps, values = columns.heat("late_s", slice(None), 2)
    assert (ranks, steps.tolist()) == ([0, 1, 2], [1.5, 3.5])
    assert values == pytest.approx(np.array([[0, 0], [0, 0], [0.4, 0.4]]), abs=1e-6)


@given(st.lists(st.floats(-100, 100) | st.just(float("nan")), max_size=60), st.integers(1, 70))
def test_buckets_hold_every_step_once_and_hide_no_extreme(values: list[float], most: int) -> None:
    array = np.array(values, dtype=np.float64)
    starts = bucket_starts(len(array), most)
    assert len(starts) == min(len(array), most)
    parts = np.split(array, starts[1:]) if len(array) else []
    low, high = extremes(array, starts)
    for place, part in enumerate(parts):
        known = part[np.isfinite(part)]
        assert len(part)
        assert np.isnan(low[place]) if not len(known) else (low[place], high[place]) == (known.min(), known.max())
        assert means(array, starts)[place] == pytest.approx(known.mean() if len(known) else np.nan, nan_ok=True)
