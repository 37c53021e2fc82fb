"""How differences are measured: what each measure sees, what it lets pass, and where the bounds lie."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from paceline.verify.case import Settings
from paceline.verify.measure import Bound, Errors, absolute, bound_for, compare, difference, merge, relative
from paceline.verify.runs import StepValues

RELATIVE = Bound(tolerance=0.1, reason="", floor=0.01)


def values(**changes: Any) -> StepValues:
    tensor = torch.ones(2, dtype=torch.float64)
    fields: dict[str, Any] = {
        "loss": torch.tensor(1.0),
        "norm": torch.tensor(2.0),
        "gradients": {"a": tensor, "b": None},
        "parameters": {"a": tensor, "b": tensor},
        "buffers": {"mean": tensor, "count": torch.tensor(3)},
    }
    return StepValues(**(fields | changes))


def test_a_comparison_finds_each_kind_of_difference() -> None:
    tensor = torch.ones(2, dtype=torch.float64)
    assert compare(values(), values()).largest == 0.0
    assert compare(values(loss=torch.tensor(1.5)), values()).loss == 0.5
    assert compare(values(norm=torch.tensor(1.5)), values()).norm == 0.5
    assert compare(values(gradients={"a": tensor * 3, "b": None}), values()).gradients == 2.0
    assert compare(values(gradients={"a": None, "b": None}), values()).gradients == math.inf
    assert compare(values(gradients={"a": tensor, "b": tensor * 0}), values()).gradients == math.inf
    assert compare(values(gradients={}), values()).gradients == math.inf  # the update was left out
    assert compare(values(parameters={"a": tensor, "b": -tensor}), values()).parameters == 2.0
    assert compare(values(buffers={"mean": tensor, "count": torch.tensor(4)}), values()).buffers == 1.0
    assert compare(values(buffers={"mean": tensor}), values()).buffers == math.inf


@pytest.mark.parametrize("field", ["loss", "gradients", "norm", "parameters", "buffers"])
def test_the_largest_error_is_that_of_any_field(field: str) -> None:
    assert Errors(**{field: 2.0}).largest == 2.0
    assert merge([Errors(), Errors(**{field: 2.0}), Errors(**{field: 1.0})]) == Errors(**{field: 2.0})


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_differs_from_what_is(bad: float) -> None:
    """A comparison with nan is false: no maximum and no limit may let it pass."""
    good, other = torch.tensor([1.0, 2.0]), torch.tensor([1.0, bad])
    assert difference(other, good) == math.inf
    assert difference(good, other) == math.inf
    assert difference(other, other.clone()) == 0.0
    assert difference(torch.ones(2), torch.ones(3)) == math.inf
    assert difference(torch.ones(0), torch.ones(0)) == 0.0
    for measure in (absolute, RELATIVE.measure):
        assert measure({"a": other}, {"a": good}, {}) == {"a": math.inf}


def test_relative_differences_are_norms_over_norms() -> None:
    ours, expected = torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0])
    assert relative({"a": ours}, {"a": expected}, {}, 0.01) == {"a": pytest.approx(0.1)}
    assert relative({"a": 10 * ours}, {"a": 10 * expected}, {}, 0.01) == {"a": pytest.approx(0.1)}
    assert relative({"a": torch.zeros(2)}, {"a": torch.zeros(2)}, {}, 0.01) == {"a": 0.0}
    assert relative({"a": torch.ones(2)}, {"a": torch.zeros(2)}, {}, 0.01) == {"a": math.inf}
    assert relative({"a": None}, {"a": ours}, {}, 0.01) == {"a": math.inf}
    assert relative({"a": torch.ones(3)}, {"a": torch.ones(2)}, {}, 0.01) == {"a": math.inf}


def test_the_floor_keeps_what_is_mere_rounding_small() -> None:
    """A gradient that cancels is measured by a share of all of them, and one of their size by itself."""
    expected = {"large": torch.tensor([100.0]), "cancels": torch.tensor([1e-6])}
    ours = {"large": torch.tensor([100.0]), "cancels": torch.tensor([-1e-6])}
    assert relative(ours, expected, {}, 0.01)["cancels"] == pytest.approx(2e-6)
    assert relative({**ours, "large": torch.tensor([0.0])}, expected, {}, 0.01)["large"] == pytest.approx(1.0)
    assert relative(ours, expected, {}, 0.0)["cancels"] == pytest.approx(2.0)


def test_parameters_are_measured_by_how_far_they_moved() -> None:
    """Against its size, an update that is missing would be a rounding error."""
    start, end = torch.tensor([10.0, 10.0]), torch.tensor([10.001, 10.001])
    expected = values(parameters={"a": end}, start={"a": start})
    found = compare(values(parameters={"a": start}), expected, RELATIVE.measure)
    assert found.parameters == pytest.approx(1.0, rel=1e-3)
    assert compare(values(parameters={"a": end}), expected, RELATIVE.measure).parameters == 0.0


def test_each_buffer_is_measured_by_itself() -> None:
    """Small statistics beside a large count."""
    expected = values(buffers={"mean": torch.tensor([1e-4]), "count": torch.tensor(1000)})
    ours = values(buffers={"mean": torch.tensor([2e-4]), "count": torch.tensor(1000)})
    assert compare(ours, expected, RELATIVE.measure).buffers == pytest.approx(1.0)


def test_bounds_follow_the_precision_and_the_pieces() -> None:
    exact = bound_for(Settings.of(), pieces=1)
    assert (exact.tolerance, exact.is_relative) == (1e-10, False)
    settings = Settings.of(precision="bf16", ranks=4, accumulate=3)
    same, other = bound_for(settings, pieces=12), bound_for(settings, pieces=3)
    assert same.is_relative
    assert other.is_relative
    assert (same.tolerance, other.tolerance) == (2.0**-12, 2.0**-6)
    assert bound_for(Settings.of(precision="bf16_master"), pieces=4).tolerance == same.tolerance
    assert bound_for(Settings.of(precision="fp16"), pieces=4).tolerance == 2.0**-15
    assert bound_for(replace(settings, tolerance=0.5), pieces=12).tolerance == 0.5
    for bound in (exact, same, other):
        assert bound.reason
