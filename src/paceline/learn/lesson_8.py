"""Exercises of lesson 8: MFU, updates that bf16 loses, and the width from which on a product is compute-bound.

The truth comes from the catalog of devices and from torch's own rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from paceline.cluster.devices import Device, load_cluster
from paceline.learn.exercise import Exercise, Verdict, right, wrong
from paceline.learn.number_answers import Mistake, judge_number

_CLUSTER = "1x dgx-h100"
_PARAMETERS, _TOKENS, _STEP_S = 6.7e9, 1_048_576, 12.9


def _h100() -> Device:
    return load_cluster(_CLUSTER).device


# 8.1


def mfu_percent(flops_per_parameter_and_token: float = 6.0, *, devices: int = 8, dtype: str = "bf16") -> float:
    """Returns the MFU of the exercise's step, in percent."""
    flops = flops_per_parameter_and_token * _PARAMETERS * _TOKENS
    return 100 * flops / (_STEP_S * devices * _h100().peak(dtype))


def _check_mfu(answer: float) -> Verdict:
    truth = mfu_percent()
    mistakes = (
        Mistake(truth / 100, "That is the share, not the percentage: multiply it by 100."),
        Mistake(mfu_percent(2.0), "You counted the forward alone. Backward takes twice as much."),
        Mistake(mfu_percent(4.0), "You counted the backward alone. The forward counts too."),
        Mistake(
            mfu_percent(3.0), "Each parameter takes a multiplication and an addition: two FLOPs a token in forward."
        ),
        Mistake(
            mfu_percent(8.0), "You counted a forward that is computed again. MFU counts the model's own FLOPs alone."
        ),
        Mistake(mfu_percent(devices=1), "You divided by the peak of one device. There are 8."),
        Mistake(mfu_percent(dtype="fp8"), "You took the peak of fp8. The step computes in bf16."),
    )
    words = "The rest of the time goes to attention, memory-bound kernels, communication, and products below the peak."
    return judge_number(answer, truth, mistakes, tolerance=0.015, praise=words)


# 8.2

_WEIGHTS = (1.0, 1.9921875, 0.0546875, 3.0, 300.0, 0.0078125)  # all of them are bf16 numbers
_PARTS = (0.05, 0.1, 0.3, 0.45, 0.55, 0.8, 1.3)  # updates, in distances to the next number


def _distance(weight: float, significant_bits: int = 8) -> float:
    return 2.0 ** (math.floor(math.log2(weight)) - significant_bits + 1)


_CASES = tuple((weight, part * _distance(weight)) for weight in _WEIGHTS for part in _PARTS)


def moves_in_bf16(weight: float, update: float) -> bool:
    """Returns whether a bf16 weight changes when an update is added, as torch rounds."""
    import torch  # here: the other exercises do not need it

    return bool(torch.tensor(weight + update, dtype=torch.float64).to(torch.bfloat16).item() != weight)


_SHARE = "Your limit is a share of the weight. Between two powers of two the distance is the same."

# What usual mistakes answer, and what to say about them.
_MOVE_SLIPS: tuple[tuple[Callable[[float, float], bool], str], ...] = (
    (lambda w, u: u >= _distance(w), "Your limit is twice the right one: a sum goes to the nearest number."),
    (lambda _, u: u > _distance(1.0) / 2, "Your limit is the same for all weights. The distance grows with them."),
    (lambda w, u: u > w / 256, _SHARE),
    (lambda w, u: u > w / 128, _SHARE),
    (lambda w, u: u > _distance(w, 9) / 2, "Your limit is half of the right one: bf16 has 8 significant bits, not 9."),
    (lambda w, u: u > _distance(w, 11) / 2, "That is the limit of fp16, which has 11 significant bits. bf16 has 8."),
    (
        lambda w, u: w + u != w,
        "Your function returns True for all updates of the check, as a sum in Python's own 64 bits does. The sum must "
        "be rounded to bf16.",
    ),
)


def _check_moves(moves: Callable[[float, float], Any]) -> Verdict:
    given = [moves(weight, update) for weight, update in _CASES]
    if odd := [each for each in given if each not in (True, False)]:
        return wrong(f"The function returns {odd[0]!r}. It should return True or False.")
    expected = [moves_in_bf16(*case) for case in _CASES]
    if given == expected:
        return right("With a learning rate of 1e-4, most bf16 weights above 0.05 never move: hence masters in fp32.")
    for mistake, words in _MOVE_SLIPS:
        if given == [mistake(*case) for case in _CASES]:
            return wrong(words)
    index = next(place for place, each in enumerate(given) if each != expected[place])
    (weight, update), said = _CASES[index], given[index]
    return wrong(f"moves({weight:g}, {update:g}) is {said}, and torch's bf16 says {not said}.")


# 8.3


def balanced_width(num_bytes: float = 4.0, *, flops: float = 2.0, dtype: str = "fp8") -> float:
    """Returns the width at which ``flops`` d^3 at the peak take as long as ``num_bytes`` d^2 from memory."""
    device = _h100()
    return num_bytes / flops * device.peak(dtype) / device.memory_bandwidth


def _check_width(answer: float) -> Verdict:
    mistakes = (
        Mistake(balanced_width(6.0), "You moved 2 bytes for each number. The operands are in fp8."),
        Mistake(balanced_width(3.0), "You moved 1 byte for each number. The result is written in bf16."),
        Mistake(balanced_width(2.0), "You counted the reads or the write alone. Three matrices move."),
        Mistake(balanced_width(flops=1.0), "A multiplication and an addition are two FLOPs: the product takes 2 d^3."),
        Mistake(balanced_width(dtype="bf16"), "You took the peak of bf16. The operands are in fp8."),
        Mistake(balanced_width(8.0), "Your traffic is twice what moves: each matrix is read or written once."),
    )
    words = "Faster arithmetic moves the limit up: the same memory must feed twice the FLOPs of bf16."
    return judge_number(answer, balanced_width(), mistakes, tolerance=0.015, praise=words)


EXERCISES: tuple[Exercise, ...] = (
    Exercise(
        number="8.1",
        title="MFU",
        asks="A GPT with P = 6.7 billion parameters trains on one node of 8 H100. A step of T = 1,048,576 tokens takes "
        "12.9 s. The peak in bf16 is 989 TFLOP/s a device. Give its MFU in percent, by 6 P T.",
        answer="number",
        hints=(
            "FLOPs of the step, divided by what all devices could do in that time.",
            "All devices: 8 x 989e12 FLOP/s x 12.9 s. Give a percentage, such as 37.5.",
        ),
        check=_check_mfu,
    ),
    Exercise(
        number="8.2",
        title="Does it move?",
        asks="Write moves(weight, update): whether a positive bf16 weight changes when a positive update is added to "
        "it and the sum is rounded to bf16, True or False. Both are Python numbers. Use no torch. The updates are "
        "never exactly half a distance.",
        answer="function",
        function="moves",
        hints=(
            "bf16 has 8 significant bits. How far is the next number from the weight? The function spacing of the "
            "lesson computes it.",
            "The sum goes to the nearest number. How large must the update be, as a part of that distance?",
        ),
        check=_check_moves,
    ),
    Exercise(
        number="8.3",
        title="From which width on?",
        asks="An H100 has F = 1,979 TFLOP/s in fp8 and W_mem = 3.35 TB/s. A product multiplies two matrices of (d, d) "
        "in fp8, 1 byte a number, and writes the result in bf16. It reads both and writes the result once. Give the d "
        "from which on its arithmetic takes longer than its memory traffic.",
        answer="number",
        hints=(
            "The arithmetic takes 2 d^3 / F. How many bytes move?",
            "Two matrices with one byte a number, and one with two. Set both times equal, and solve for d.",
        ),
        check=_check_width,
    ),
)
