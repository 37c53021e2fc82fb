"""The bench of a dense GPT beside mixtures: equal active weights, the same steps, and the dense one's longer time."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from paceline.config import load_config

ROOT = Path(__file__).parents[2]
TINY = ("model.layers=1", "model.width=16", "model.expert_width=8", "model.context=16", "data.eval_fraction=0.001")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    return importlib.import_module("experts_quality")


def test_arms_have_as_many_active_weights_and_their_losses_are_told(bench: Any) -> None:
    config = load_config(bench.CONFIG, [*bench._PLAIN, "train.steps=400", "train.global_batch=4", *TINY])
    arms = bench.make_arms(config, ["dense", "bias"])
    shapes = [arm.trainer.parts.engine.module.config for arm in arms.values()]
    assert shapes[0].active_matmul_params == shapes[1].active_matmul_params
    dense, mixture = bench.compare(arms, steps=4, every=2)
    assert (dense["arm"], mixture["arm"]) == ("dense", "bias")
    assert set(mixture["losses"]) == {2, 4}
    longer = mixture["dense_steps_in_same_time"]
    assert longer >= max(4, 3.99 * mixture["step_ms"] / dense["step_ms"])
    assert mixture["dense_loss_in_same_time"] == dense["losses"][longer]
    assert mixture["busiest_expert"] >= 1
    assert mixture["parameters"] > dense["parameters"]


def test_an_arm_may_be_keys_of_the_router(bench: Any) -> None:
    config = load_config(bench.CONFIG, [*bench._PLAIN, "train.steps=4", "train.global_batch=4", *TINY])
    (arm,) = bench.make_arms(config, ["scale=2 balance=bias"]).values()
    rule = arm.trainer.parts.engine.module.config.router
    assert (rule.scale, rule.balance, rule.balance_weight) == (2.0, "bias", 0.001)
