"""The constants that are fitted without a family are of the rows that the others have."""

from __future__ import annotations

from collections import Counter

from fit_constants import calibration_rows, distance, fit, prior_of
from paceline_bench.scored.held_out import held_out
from paceline_bench.scored.measured_table import SHIPPED


def test_held_out_sets_were_fitted_on_the_rows_of_all_other_families() -> None:
    groups = calibration_rows(SHIPPED)
    families = {row.family for rows in groups.values() for row in rows}
    assert set(held_out()) == families
    for family in families:
        others = Counter({key: sum(row.family != family for row in rows) for key, rows in groups.items()})
        assert {key: each.rows for key, each in held_out()[family].items()} == dict(+others)


def test_a_fit_of_few_rows_keeps_the_rates_that_many_rows_tell() -> None:
    groups = calibration_rows(SHIPPED)
    key, many = ("hopper", "compiled"), held_out()["titan"]["hopper", "eager"]
    prior = prior_of(key, {("hopper", "eager"): many})
    assert (prior.matmul, prior.k_half) == (many.matmul, many.k_half)
    (row,) = (row for row in groups[key] if row.family == "kempner")
    alone, weighty = fit(key, [row], prior), fit(key, [row] * 50, prior)
    assert 0 < distance(alone, prior) < distance(weighty, prior)
