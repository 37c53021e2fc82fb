"""Fair timing on a noisy machine: all arms take turns in one process, and only ratios are quoted.

Absolute times drift with the weather of the machine; the ratio of two arms that ran seconds apart, many times, does
not. Arms rotate, so that no arm is always first, and each turn's ratio to the baseline is taken within the round.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """What one arm took: milliseconds per step, and its ratio to the baseline of the same round."""

    arm: str
    median_ms: float
    spread_ms: float
    ratio: float
    ratio_low: float
    ratio_high: float
    num_steps: int


def interleave(
    arms: dict[str, Callable[[], None]],
    *,
    baseline: str,
    rounds: int,
    steps_per_turn: int,
    warm_up: int,
    device: torch.device,
    meet: Callable[[], None] = lambda: None,
) -> list[Timing]:
    """Times the arms' steps in turns. ``meet`` brings all ranks together before a turn, so that none is billed
    for another's lateness."""
    for step in arms.values():
        for _ in range(warm_up):
            step()
    names = list(arms)
    times: dict[str, list[float]] = {name: [] for name in names}
    turns: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            meet()
            turn = [_time_step(arms[name], device) for _ in range(steps_per_turn)]
            times[name] += turn
            turns[name].append(statistics.median(turn))
    return [_timing(name, times[name], turns[name], turns[baseline]) for name in names]


def _time_step(step: Callable[[], None], device: torch.device) -> float:
    start = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _timing(name: str, times: list[float], turns: list[float], baseline: list[float]) -> Timing:
    ratios = sorted(ours / base for ours, base in zip(turns, baseline, strict=True))
    quarter = len(ratios) // 4
    quartiles = statistics.quantiles(times, n=4) if len(times) > 1 else [times[0]] * 3
    return Timing(
        arm=name,
        median_ms=statistics.median(times) * 1e3,
        spread_ms=(quartiles[2] - quartiles[0]) * 1e3,
        ratio=statistics.median(ratios),
        ratio_low=ratios[quarter],
        ratio_high=ratios[-1 - quarter],
        num_steps=len(times),
    )
