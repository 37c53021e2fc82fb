"""The learning rate and the batch: the rules in numbers, and what they promise for any batch."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.config import OptimConfig
from paceline.config.layout import peak_learning_rate


def scaled(lr: float, rule: str, *, batch: int, reference: int) -> float:
    values = {"lr": lr, "lr_scaling": rule, "lr_batch": reference}
    return peak_learning_rate(OptimConfig.model_validate(values), batch)


@pytest.mark.parametrize(("rule", "expected"), [("none", 0.1), ("linear", 0.4), ("sqrt", 0.2)])
def test_rules(rule: str, expected: float) -> None:
    assert scaled(0.1, rule, batch=256, reference=64) == pytest.approx(expected)
    assert scaled(0.1, rule, batch=64, reference=64) == 0.1


@given(first=st.integers(1, 10**6), second=st.integers(1, 10**6), rule=st.sampled_from(["linear", "sqrt"]))
def test_scaling_in_two_steps_is_scaling_at_once(first: int, second: int, rule: str) -> None:
    halfway = scaled(1e-3, rule, batch=first, reference=32)
    there = scaled(halfway, rule, batch=second, reference=first)
    assert there == pytest.approx(scaled(1e-3, rule, batch=second, reference=32))


def test_the_peak_of_a_config() -> None:
    assert peak_learning_rate(OptimConfig(lr=0.1), 4096) == 0.1
    assert peak_learning_rate(OptimConfig(lr=0.1, lr_scaling="linear", lr_batch=256), 512) == pytest.approx(0.2)
