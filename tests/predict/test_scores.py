"""Scores of predictions on small cases that can be checked by hand."""

from __future__ import annotations

import pytest

from paceline_bench.scored.validation import errors_of, ranking_of, scaling_of, spearman


def test_errors_are_relative_to_what_was_measured() -> None:
    found = errors_of([(10.0, 11.0), (10.0, 8.0), (10.0, 10.0), (10.0, 13.0)])
    assert found is not None
    assert (found.rows, found.p90) == (4, pytest.approx(0.3))
    assert (found.mean, found.median, found.bias) == pytest.approx((0.15, 0.15, 0.05))
    assert errors_of([]) is None


def test_ranks_agree_or_not() -> None:
    assert spearman([(1, 10), (2, 20), (3, 30), (4, 40)]) == pytest.approx(1.0)
    assert spearman([(1, 40), (2, 30), (3, 20), (4, 10)]) == pytest.approx(-1.0)
    assert spearman([(1, 5), (2, 5), (3, 5), (4, 5)]) == 0.0
    # Two that are equal share their mean rank.
    assert spearman([(1, 1), (2, 2), (2, 2), (3, 3)]) == pytest.approx(1.0)


def test_regret_is_what_the_choice_costs() -> None:
    found = ranking_of([[(10, 5), (8, 6), (9, 7), (12, 8)], [(1, 1), (2, 2)]])
    assert found is not None
    assert (found.groups, found.alternatives) == (1, 4)
    assert found.mean_regret == found.worst_regret == pytest.approx(0.25)
    assert found.top_three == 1.0
    assert ranking_of([[(1, 1), (2, 2)]]) is None


def test_scaling_is_judged_from_the_smallest_run() -> None:
    found = scaling_of([[(1, 100.0, 50.0), (8, 90.0, 40.0)], [(4, 1.0, 1.0)]])
    assert found is not None
    assert (found.groups, found.rows) == (1, 1)
    assert found.points == pytest.approx(10.0)
    assert found.given_first.mean == pytest.approx(10 / 90)
    assert scaling_of([[(4, 1.0, 1.0)]]) is None
