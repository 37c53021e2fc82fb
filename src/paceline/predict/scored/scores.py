"""How good predictions are: errors, ranking of alternatives, scaling efficiency.

error        predicted / measured - 1, in the row's own metric; mean of absolute values, median, p90, and bias
overall      the mean over families, so that a long table does not drown a short one
Spearman     of predicted and measured ranks within groups of 4 and more alternatives (same model, batch and devices)
regret       what the alternative predicted best takes over the best one, less 1
efficiency   throughput per device over that on the fewest devices of a group; its error is in points
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

LEAST_ALTERNATIVES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorScores:
    """Relative errors of some rows."""

    rows: int
    mean: float
    median: float
    p90: float
    bias: float


def errors_of(pairs: Sequence[tuple[float, float]]) -> ErrorScores | None:
    """Scores pairs of (measured, predicted); None where there are none."""
    if not pairs:
        return None
    signed = [predicted / measured - 1 for measured, predicted in pairs]
    sizes = sorted(abs(each) for each in signed)
    return ErrorScores(
        rows=len(pairs),
        mean=statistics.fmean(sizes),
        median=statistics.median(sizes),
        p90=sizes[math.ceil(0.9 * len(sizes)) - 1],
        bias=statistics.fmean(signed),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """How well groups of alternatives are ordered."""

    groups: int
    alternatives: int
    spearman: float
    mean_regret: float
    worst_regret: float
    top_three: float


def ranking_of(groups: Sequence[Sequence[tuple[float, float]]]) -> Ranking | None:
    """Scores groups of (measured, predicted) times, less being better; None where none is large enough."""
    kept = [group for group in groups if len(group) >= LEAST_ALTERNATIVES]
    if not kept:
        return None
    regrets = [_regret(group) for group in kept]
    return Ranking(
        groups=len(kept),
        alternatives=sum(map(len, kept)),
        spearman=statistics.fmean(spearman(group) for group in kept),
        mean_regret=statistics.fmean(regrets),
        worst_regret=max(regrets),
        top_three=statistics.fmean(_hit(group) for group in kept),
    )


def spearman(group: Sequence[tuple[float, float]]) -> float:
    """Returns the rank correlation; equal values share their mean rank. 0 where one side does not vary."""
    left = _ranks([pair[0] for pair in group])
    right = _ranks([pair[1] for pair in group])
    if len(set(left)) == 1 or len(set(right)) == 1:
        return 0.0
    return statistics.correlation(left, right)


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(values)
    first = {value: order.index(value) for value in set(values)}
    count = {value: values.count(value) for value in first}
    return [first[value] + (count[value] - 1) / 2 for value in values]


def _regret(group: Sequence[tuple[float, float]]) -> float:
    chosen = min(group, key=lambda pair: pair[1])
    return chosen[0] / min(pair[0] for pair in group) - 1


def _hit(group: Sequence[tuple[float, float]]) -> bool:
    best = min(pair[0] for pair in group)
    return any(pair[0] == best for pair in sorted(group, key=lambda pair: pair[1])[:3])


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingScore:
    """Efficiency on more devices: its mean absolute error in points, and errors of throughput given the first row."""

    groups: int
    rows: int
    points: float
    given_first: ErrorScores


def scaling_of(groups: Sequence[Sequence[tuple[int, float, float]]]) -> ScalingScore | None:
    """Scores groups of (devices, measured, predicted) throughput per device; None where no group has two counts."""
    points, pairs, used = [], [], 0
    for group in groups:
        first = min(devices for devices, _, _ in group)
        bases = [(measured, predicted) for devices, measured, predicted in group if devices == first]
        measured_base = statistics.fmean(base[0] for base in bases)
        predicted_base = statistics.fmean(base[1] for base in bases)
        more = [each for each in group if each[0] > first]
        used += bool(more)
        for _, measured, predicted in more:
            points.append(100 * abs(predicted / predicted_base - measured / measured_base))
            pairs.append((measured, predicted / predicted_base * measured_base))
    found = errors_of(pairs)
    if found is None:
        return None
    return ScalingScore(groups=used, rows=len(pairs), points=statistics.fmean(points), given_first=found)
