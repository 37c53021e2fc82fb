"""Fair timing on a noisy machine: all arms take turns in one process, and only ratios are quoted.

Absolute times drift with the weather of the machine; the ratio of two arms that ran seconds apart, many times, does
not. Arms rotate, so that no arm is always first, and each turn's ratio to its peer is taken within the round.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """What one arm took: milliseconds per step, and its ratio to its peer in the same round."""

    arm: str
    peer: str
    median_ms: float
    spread_ms: float
    ratio: float
    ratio_low: float
    ratio_high: float
    num_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """How long arms take turns: in each round every arm has a turn of so many steps; before that, steps to warm up."""

    rounds: int
    steps_per_turn: int
    warm_up: int


def interleave(
    arms: Mapping[str, Callable[[], None]],
    turns: Turns,
    *,
    baseline: str | Mapping[str, str],
    device: torch.device,
    meet: Callable[[], None] = lambda: None,
) -> list[Timing]:
    """Times the arms' steps in turns. ``baseline`` is the peer of all arms, or says which is whose.

    ``meet`` brings all ranks together before a turn, so that none is billed for another's lateness.
    """
    for step in arms.values():
        for _ in range(turns.warm_up):
            step()
    names = list(arms)
    times: dict[str, list[float]] = {name: [] for name in names}
    medians: dict[str, list[float]] = {name: [] for name in names}
    for number in range(turns.rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            meet()
            turn = [_time_step(arms[name], device) for _ in range(turns.steps_per_turn)]
            times[name] += turn
            medians[name].append(statistics.median(turn))
    peers = dict.fromkeys(names, baseline) if isinstance(baseline, str) else baseline
    return [_timing(name, peers[name], times[name], medians) for name in names]


def _time_step(step: Callable[[], None], device: torch.device) -> float:
    start = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _timing(name: str, peer: str, times: list[float], medians: dict[str, list[float]]) -> Timing:
    ratios = sorted(ours / theirs for ours, theirs in zip(medians[name], medians[peer], strict=True))
    quarter = len(ratios) // 4
    quartiles = statistics.quantiles(times, n=4) if len(times) > 1 else [times[0]] * 3
    return Timing(
        arm=name,
        peer=peer,
        median_ms=statistics.median(times) * 1e3,
        spread_ms=(quartiles[2] - quartiles[0]) * 1e3,
        ratio=statistics.median(ratios),
        ratio_low=ratios[quarter],
        ratio_high=ratios[-1 - quarter],
        num_steps=len(times),
    )
