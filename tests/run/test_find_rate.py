"""The learning-rate range test: what it suggests, and a whole one."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest

from paceline.config import config_from_dict
from paceline.errors import UsageError
from paceline.run.find_rate import find_rate, suggest_rate
from paceline.run.location import RunOptions
from paceline.train.optim import RateSchedule


def test_the_suggestion_is_where_the_loss_falls_fastest() -> None:
    rates = [10 ** (-7 + 7 * i / 99) for i in range(100)]
    losses = [2.3 - 2.0 / (1 + math.exp(-4 * (math.log10(rate) + 3))) for rate in rates]
    found = suggest_rate([*zip(rates, losses, strict=True), (2.0, 50.0), (3.0, math.nan)])
    assert 5e-4 < found.suggestion < 1e-2  # 1e-3, and what smoothing lags behind
    assert len(found.rates) in (100, 101)
    for points in ([(rate, 1.0) for rate in rates], list(zip(rates[:5], losses[:5], strict=True))):
        with pytest.raises(UsageError, match="no learning rate can be suggested"):
            suggest_rate(points)


def test_a_range_rises_by_one_factor_to_the_whole_rate() -> None:
    schedule = RateSchedule(kind="range", length=10, final_ratio=1e-5)
    found = [schedule.factor(before=step, after=step + 1) for step in range(11)]
    assert (found[0], found[-1]) == pytest.approx((1e-5, 1.0))
    assert [later / earlier for earlier, later in itertools.pairwise(found)] == pytest.approx([10**0.5] * 10)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_whole_range_test_leaves_no_checkpoint(tmp_path: Path) -> None:
    values = {
        "name": "mine",
        "model": {"kind": "mlp", "hidden_dim": 32},
        "data": {"kind": "digits"},
        "parallel": {"ranks": 2, "device": "cpu"},
        "train": {"epochs": 3},
        "monitor": {"folder": str(tmp_path), "tensorboard": False},
        "checkpoint": {"every_steps": 5},
    }
    config = config_from_dict(values)
    for _ in range(2):
        found = find_rate(config, options=RunOptions(is_quiet=True))
    assert 1e-5 < found.suggestion < 0.5
    assert [path.name for path in tmp_path.iterdir()] == ["mine-find-lr"]
    assert list((tmp_path / "mine-find-lr" / "checkpoints").iterdir()) == []
