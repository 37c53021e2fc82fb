"""Checks of lesson 8: MFU, updates that bf16 loses, and the width from which on a product is compute-bound.

The truth comes from the catalog of devices and from torch's own rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from paceline.cluster.devices import Device, load_cluster
from paceline.learn.exercise import RIGHT, Said, judge_number, says

_CLUSTER = "1x dgx-h100"
_PARAMETERS, _TOKENS, _STEP_S = 6.7e9, 1_048_576, 12.9


def _h100() -> Device:
    return load_cluster(_CLUSTER).device


def mfu_percent(flops_per_parameter_and_token: float = 6.0, *, devices: int = 8, dtype: str = "bf16") -> float:
    """Returns the MFU of the exercise's step, in percent."""
    flops = flops_per_parameter_and_token * _PARAMETERS * _TOKENS
    return 100 * flops / (_STEP_S * devices * _h100().peak(dtype))


def check_mfu(answer: float) -> Said:
    mistakes = {
        "share": mfu_percent() / 100,
        "forward": mfu_percent(2.0),
        "backward": mfu_percent(4.0),
        "one_flop": mfu_percent(3.0),
        "recompute": mfu_percent(8.0),
        "one_device": mfu_percent(devices=1),
        "fp8": mfu_percent(dtype="fp8"),
    }
    return judge_number(answer, mfu_percent(), mistakes, tolerance=0.015)


_WEIGHTS = (1.0, 1.9921875, 0.0546875, 3.0, 300.0, 0.0078125)  # all of them are bf16 numbers
_PARTS = (0.05, 0.1, 0.3, 0.45, 0.55, 0.8, 1.3)  # updates, in distances to the next number


def _distance(weight: float, significant_bits: int = 8) -> float:
    return 2.0 ** (math.floor(math.log2(weight)) - significant_bits + 1)


_CASES = tuple((weight, part * _distance(weight)) for weight in _WEIGHTS for part in _PARTS)


def moves_in_bf16(weight: float, update: float) -> bool:
    """Returns whether a bf16 weight changes when an update is added, as torch rounds."""
    import torch  # here: the other exercises do not need it

    return bool(torch.tensor(weight + update, dtype=torch.float64).to(torch.bfloat16).item() != weight)


# What usual mistakes answer.
_MOVE_SLIPS: tuple[tuple[Callable[[float, float], bool], str], ...] = (
    (lambda w, u: u >= _distance(w), "whole_distance"),
    (lambda _, u: u > _distance(1.0) / 2, "same_for_all"),
    (lambda w, u: u > w / 256, "share"),
    (lambda w, u: u > w / 128, "share"),
    (lambda w, u: u > _distance(w, 9) / 2, "nine_bits"),
    (lambda w, u: u > _distance(w, 11) / 2, "fp16"),
    (lambda w, u: w + u != w, "float64"),
)


def check_moves(moves: Callable[[float, float], Any]) -> Said:
    """Compares with torch's own rounding, and with what usual mistakes answer."""
    given = [moves(weight, update) for weight, update in _CASES]
    if odd := [each for each in given if each not in (True, False)]:
        return says("no_bool", given=odd[0])
    expected = [moves_in_bf16(*case) for case in _CASES]
    if given == expected:
        return RIGHT
    for mistake, name in _MOVE_SLIPS:
        if given == [mistake(*case) for case in _CASES]:
            return says(name)
    index = next(place for place, each in enumerate(given) if each != expected[place])
    (weight, update), said = _CASES[index], given[index]
    return says("otherwise", weight=weight, update=update, given=said, expected=not said)


def balanced_width(num_bytes: float = 4.0, *, flops: float = 2.0, dtype: str = "fp8") -> float:
    """Returns the width at which ``flops`` d^3 at the peak take as long as ``num_bytes`` d^2 from memory."""
    device = _h100()
    return num_bytes / flops * device.peak(dtype) / device.memory_bandwidth


def check_width(answer: float) -> Said:
    mistakes = {
        "two_bytes": balanced_width(6.0),
        "one_byte": balanced_width(3.0),
        "one_way": balanced_width(2.0),
        "one_flop": balanced_width(flops=1.0),
        "bf16": balanced_width(dtype="bf16"),
        "twice": balanced_width(8.0),
    }
    return judge_number(answer, balanced_width(), mistakes, tolerance=0.015)


CHECKS = {"8.1": check_mfu, "8.2": check_moves, "8.3": check_width}
