"""Checks of functions that were broken and should be mended, by what all ranks return in the end."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from paceline.learn.exercise import RIGHT, Said
from paceline.learn.watched import Expected, compare, run_watched

Trial = tuple[Sequence[Any], Expected, Mapping[str, Expected]]  # what ranks bring, should return, and usually do


def _judge(function: Any, *trials: Trial) -> Said:
    """Runs the function with what each rank brings, and compares what the ranks return."""
    for brings, right, usual in trials:
        found = run_watched(lambda comm, own=brings: function(comm, *own[comm.rank]), len(brings))  # type: ignore[misc]
        if said := compare(found.results, right, usual):
            return said
    return RIGHT


def check_shift(function: Any) -> Said:
    own = [torch.arange(4.0) + 10 * rank for rank in range(3)]
    after, before = own[1:] + own[:1], own[-1:] + own[:-1]
    return _judge(function, ([[each] for each in own], before, {"unchanged": own, "other_way": after}))


def check_mean(function: Any) -> Said:
    def trial(*counts: int) -> Trial:  # samples of each rank
        losses = torch.arange(1.0, 7).square()
        parts = torch.split(losses, list(counts))
        of_means = torch.stack([each.mean() for each in parts]).mean()
        usual = {"mean_of_means": of_means, "sum": losses.sum(), "per_rank": losses.sum() / len(counts)}
        return [[each] for each in parts], losses.mean(), usual

    return _judge(function, trial(3, 1, 2), trial(4, 0, 2))


def check_step_means(function: Any) -> Said:
    table = torch.tensor([[4.0, math.nan, math.nan], [1.0, 2.0, 9.0], [7.0, 5.0, math.nan]])
    brings = [[[loss for loss in row if not loss.isnan()]] for row in table]
    return _judge(function, (brings, table.nanmean(0), {"all_ranks": table.nansum(0) / 3}))


def check_skipped(function: Any) -> Said:
    """With gradients that are finite, then with one that is not, on one rank."""

    def trial(times: float) -> Trial:
        gradients = [torch.arange(1.0, 4), torch.arange(3.0) + 2, times * torch.ones(3)]
        step = 0.1 * torch.stack(gradients).mean(0)
        usual = {"sum": torch.ones(3) - 3 * step} if math.isfinite(times) else {"taken": torch.ones(3) - step}
        right = torch.ones(3) - (step if math.isfinite(times) else 0)
        return [[torch.ones(3), each] for each in gradients], right, usual

    return _judge(function, trial(2.0), trial(math.inf), trial(math.nan))


CHECKS = {"1.4": check_shift, "3.4": check_mean, "3.5": check_step_means, "8.4": check_skipped}
