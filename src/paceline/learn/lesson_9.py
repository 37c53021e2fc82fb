"""Checks of lesson 9: how long a run takes, which strategy fits, and how often to save.

The truth comes from the catalog, from the estimate of memory that the engines are checked against, and from
``predict/formulas/saving.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from paceline.cluster.devices import load_cluster
from paceline.config import config_from_dict
from paceline.learn.exercise import RIGHT, Said, judge_first, judge_number, says
from paceline.predict.formulas.saving import best_interval, time_between_failures
from paceline.predict.memory.memory import rank_estimates

_NODE, _CLUSTER = "1x dgx-h100", "10x dgx-h100"
_PARAMETERS, _TOKENS, _MFU = 6.7e9, 1e12, 0.4
_DAY_S = 86_400


def training_days(flops: float = 6.0, *, devices: int | None = None, mfu: float = _MFU) -> float:
    """Returns the days of the exercise's run; ``flops`` are those of a parameter and token."""
    cluster = load_cluster(_CLUSTER)
    rate = (devices or cluster.devices) * cluster.device.peak("bf16") * mfu
    return flops * _PARAMETERS * _TOKENS / rate / _DAY_S


def check_days(answer: float) -> Said:
    """Compares with the days by 6 P D; 15 whole days are right."""
    truth = training_days()
    mistakes = {
        "once": training_days(1.0),
        "forward": training_days(2.0),
        "recompute": training_days(8.0),
        "nodes": training_days(devices=10),
        "one_node": training_days(devices=8),
        "no_mfu": training_days(mfu=1.0),
        "times_mfu": training_days(mfu=1.0) * _MFU,
        "seconds": truth * _DAY_S,
        "hours": truth * 24,
    }
    return judge_number(answer, truth, mistakes, tolerance=0.025)


STRATEGIES = ("ddp", "zero1", "zero2", "fsdp")
_THIRTEEN = {"size": "gpt-7b", "layers": 40, "heads": 40, "kv_heads": 40, "width": 5120, "mlp_width": 13_824}


def state_bytes(strategy: str, ranks: int) -> int:
    """Returns the bytes of a rank's parameters, masters, gradients and moments, for 13 billion parameters."""
    config = config_from_dict(
        {
            "model": {"kind": "gpt", "vocab_size": 32_000, **_THIRTEEN},
            "data": {"kind": "synthetic_tokens", "vocab_size": 32_000, "context": 4096},
            "train": {"global_batch": ranks, "precision": "bf16_master", "steps": 1},
            "parallel": {"ranks": ranks, "strategy": strategy, "device": "cuda"},
        },
        "exercise 9.2",
    )
    found = rank_estimates(config)[0]
    return int(found.parameters + found.gradients + found.optimizer)


def check_strategy(answer: str) -> Said:
    cluster = load_cluster(_NODE)
    needs = {name: state_bytes(name, cluster.devices) / 1e9 for name in STRATEGIES}
    return judge_first(answer, needs, cluster.device.memory_bytes / 1e9)


_SAVES = ((40.0, 1.8e8, 8), (40.0, 1.8e8, 80), (5.0, 1e7, 512), (120.0, 6e7, 16))
_INTERVAL_SLIPS: dict[str, Callable[[float, float, int], float]] = {
    "one_device": lambda save, failure, _: math.sqrt(2 * save * failure),
    "times_devices": lambda save, failure, devices: math.sqrt(2 * save * failure * devices),
    "whole_interval": lambda save, failure, devices: math.sqrt(save * failure / devices),
    "square": lambda save, failure, devices: 2 * save * failure / devices,
    "between_failures": lambda _save, failure, devices: failure / devices,
}


def check_interval(save_every: Callable[[float, float, int], Any]) -> Said:
    """Compares with the best interval, and with what usual mistakes answer."""
    given = [save_every(*case) for case in _SAVES]
    if odd := [each for each in given if isinstance(each, bool) or not isinstance(each, int | float)]:
        return says("no_number", given=odd[0])
    if _are_near(given, [best_interval(save, time_between_failures(each, n)) for save, each, n in _SAVES]):
        return RIGHT
    for name, mistake in _INTERVAL_SLIPS.items():
        if _are_near(given, [mistake(*case) for case in _SAVES]):
            return says(name)
    save, failure, devices = _SAVES[0]
    return says("otherwise", save=save, failure=failure, devices=devices, given=given[0])


def _are_near(given: list[Any], wanted: list[float]) -> bool:
    return all(math.isclose(a, b, rel_tol=0.01) for a, b in zip(given, wanted, strict=True))


CHECKS = {"9.1": check_days, "9.2": check_strategy, "9.3": check_interval}
