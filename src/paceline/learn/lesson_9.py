"""Exercises of lesson 9: how long a run takes, which strategy fits, and how often to save.

The truth comes from the catalog, from the estimate of memory that the engines are checked against, and from
``predict/formulas/saving.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from paceline.cluster.devices import load_cluster
from paceline.config import config_from_dict
from paceline.learn.exercise import Exercise, Verdict, right, wrong
from paceline.learn.number_answers import Mistake, judge_number
from paceline.predict.formulas.saving import best_interval, time_between_failures
from paceline.predict.memory.memory import rank_estimates

_NODE, _CLUSTER = "1x dgx-h100", "10x dgx-h100"
_PARAMETERS, _TOKENS, _MFU = 6.7e9, 1e12, 0.4
_DAY_S = 86_400


# 9.1


def training_days(flops: float = 6.0, *, devices: int | None = None, mfu: float = _MFU) -> float:
    """Returns the days of the exercise's run; ``flops`` are those of a parameter and token."""
    cluster = load_cluster(_CLUSTER)
    rate = (devices or cluster.devices) * cluster.device.peak("bf16") * mfu
    return flops * _PARAMETERS * _TOKENS / rate / _DAY_S


def _check_days(answer: float) -> Verdict:
    truth = training_days()
    mistakes = (
        Mistake(training_days(1.0), "You counted P D. Training takes 6 FLOPs for each parameter and token."),
        Mistake(training_days(2.0), "You counted the forward alone. Training takes three times as much."),
        Mistake(training_days(8.0), "You counted a forward that is computed again. The exercise asks for 6 P D."),
        Mistake(training_days(devices=10), "You counted nodes. Each of the ten has 8 devices."),
        Mistake(training_days(devices=8), "You counted one node. There are ten."),
        Mistake(training_days(mfu=1.0), "That is at an MFU of 100 %. Devices give the model 40 % of their peak."),
        Mistake(training_days(mfu=1.0) * _MFU, "You multiplied by the MFU. A lower MFU makes the run longer."),
        Mistake(truth * _DAY_S, "Those are seconds. The exercise asks for days."),
        Mistake(truth * 24, "Those are hours. The exercise asks for days."),
    )
    words = "Ask next whether the batch has enough tokens for each device, and add what failures cost."
    return judge_number(answer, truth, mistakes, tolerance=0.025, praise=words)  # 15 whole days are right


# 9.2

STRATEGIES = ("ddp", "zero1", "zero2", "fsdp")
# Other ways to write them.
_NAMES = {"zero 1": "zero1", "zero-1": "zero1", "zero 2": "zero2", "zero-2": "zero2", "zero3": "fsdp", "zero-3": "fsdp"}
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


def _check_strategy(answer: str) -> Verdict:
    cluster = load_cluster(_NODE)
    answer = _NAMES.get(answer, answer)
    if answer not in STRATEGIES:
        return wrong(f"{answer!r} is none of {', '.join(STRATEGIES)}.")
    need = {name: state_bytes(name, cluster.devices) for name in STRATEGIES}
    memory = cluster.device.memory_bytes
    first = next(name for name in STRATEGIES if need[name] <= memory)
    if answer == first:
        return right("Activations come on top: the planner counts them too, and may then choose a later one.")
    if need[answer] > memory:
        return wrong(f"The states of a rank under {answer} take {need[answer] / 1e9:.0f} GB, more than a device has.")
    return wrong(f"{answer} fits, but it is not the first of the list that does.")


# 9.3

_SAVES = ((40.0, 1.8e8, 8), (40.0, 1.8e8, 80), (5.0, 1e7, 512), (120.0, 6e7, 16))
_INTERVAL_SLIPS: tuple[tuple[Callable[[float, float, int], float], str], ...] = (
    (
        lambda save, failure, _: math.sqrt(2 * save * failure),
        "You took the failures of one device. With more devices, the run fails more often.",
    ),
    (
        lambda save, failure, devices: math.sqrt(2 * save * failure * devices),
        "You multiplied by the devices. With more of them, the time between failures is shorter.",
    ),
    (
        lambda save, failure, devices: math.sqrt(save * failure / devices),
        "Off by the square root of 2: after a failure half an interval is repeated, not a whole one.",
    ),
    (
        lambda save, failure, devices: 2 * save * failure / devices,
        "That is the square of an interval: its unit is seconds times seconds.",
    ),
    (lambda _save, failure, devices: failure / devices, "That is the time between failures: all work would be lost."),
)


def _check_interval(save_every: Callable[[float, float, int], Any]) -> Verdict:
    given = [save_every(*case) for case in _SAVES]
    if odd := [each for each in given if isinstance(each, bool) or not isinstance(each, int | float)]:
        return wrong(f"The function returns {odd[0]!r}. It should return a number of seconds.")
    if _are_near(given, [best_interval(save, time_between_failures(each, n)) for save, each, n in _SAVES]):
        return right("Four times the devices halve the interval, and double what is lost.")
    for mistake, words in _INTERVAL_SLIPS:
        if _are_near(given, [mistake(*case) for case in _SAVES]):
            return wrong(words)
    save, failure, devices = _SAVES[0]
    return wrong(
        f"save_every({save:g}, {failure:g}, {devices}) is {given[0]:g} s, and another interval loses less. Write down "
        "what saves and failures lose for an interval I, and look for the smallest sum."
    )


def _are_near(given: list[Any], wanted: list[float]) -> bool:
    return all(math.isclose(a, b, rel_tol=0.01) for a, b in zip(given, wanted, strict=True))


EXERCISES: tuple[Exercise, ...] = (
    Exercise(
        number="9.1",
        title="How many days",
        asks="A model of P = 6.7 billion parameters is to see D = 1e12 tokens on ten nodes of 8 H100, at 989 TFLOP/s "
        "each in bf16, with an MFU of 40 %. Give the days that this takes, by 6 P D; a whole number is near enough.",
        answer="number",
        hints=(
            "All FLOPs of the run, divided by the FLOP/s that the model gets from all devices.",
            "6 P D = 4.02e22. A day has 86,400 seconds.",
        ),
        check=_check_days,
    ),
    Exercise(
        number="9.2",
        title="Which strategy",
        asks="A model of 13 billion parameters trains on one node of 8 H100 (80 GB each) with bf16_master and Adam. "
        "Count the states alone: parameters, masters, gradients and moments. Give the first of ddp, zero1, zero2, "
        "fsdp, in this order, whose states fit.",
        answer="word",
        hints=(
            "Bytes a parameter: 18 for ddp, 6 + 12 / N for zero1, 2 + 16 / N for zero2, 16 / N for fsdp.",
            "Multiply by 13e9 with N = 8, and compare with 80e9.",
        ),
        check=_check_strategy,
    ),
    Exercise(
        number="9.3",
        title="How often to save",
        asks="Write save_every(save_s, device_failure_s, devices): the interval between saves in seconds that loses "
        "the least time. A device fails every device_failure_s seconds on average, and any failure stops the run.",
        answer="function",
        function="save_every",
        hints=(
            "First: how often does the run fail, if each of its devices fails independently?",
            "Saves lose t_save / I, and failures I / (2 t_fail). The best interval makes both losses equal.",
        ),
        check=_check_interval,
    ),
)
