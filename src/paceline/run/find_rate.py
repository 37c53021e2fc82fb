"""A learning-rate range test: a short run whose rate rises from very small to large, and the rate that it suggests.

The rate grows by the same factor each step. While it is too small the loss stands still, then it falls, and where the
rate is too large it rises. The suggestion is where the smoothed loss falls fastest over the logarithm of the rate. It
is an ordinary run of the config, on the same ranks and with the same strategy; it evaluates and saves nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.config import Config, load_config
from paceline.config.schema import ScheduleConfig
from paceline.config.train_checks import short_run
from paceline.errors import LaunchError, UsageError
from paceline.records.records import StepRecord, read_records
from paceline.run.location import RunOptions
from paceline.run.train import train

STEPS = 100
_LOWEST, _HIGHEST = 1e-7, 1.0
_SMOOTHING = 0.9
_DIVERGED = 4.0  # times the lowest loss
_LEAST_POINTS = 10
_FLAT = 1e-6  # of the loss, over a factor e of the rate


@dataclass(frozen=True, slots=True, kw_only=True)
class RateFinding:
    """What a range test found. ``losses`` are smoothed, one for each of ``rates``, up to where training diverged."""

    suggestion: float
    lowest_loss_at: float
    rates: tuple[float, ...]
    losses: tuple[float, ...]
    folder: Path | None = None


def find_rate(
    config: Config | str | Path, overrides: Sequence[str] = (), *, steps: int = STEPS, options: RunOptions | None = None
) -> RateFinding:
    """Runs a range test of ``steps`` steps in a run folder of its own, NAME-find-lr. Raises as ``train`` and below."""
    asked = config if isinstance(config, Config) else load_config(config, overrides)
    result_folder = Path(asked.monitor.folder) / f"{asked.name}-find-lr"
    schedule = ScheduleConfig(kind="range", final_ratio=_LOWEST / _HIGHEST)
    changed = asked.model_copy(update={"name": result_folder.name})
    changed = changed.with_values("optim", lr=_HIGHEST, lr_scaling="none", lr_batch=None, schedule=schedule)
    changed = short_run(changed, steps).with_values("train", max_bad_steps=steps + 1)
    try:
        train(changed, options=replace(options or RunOptions(), force=result_folder.exists(), resume=None))
    except LaunchError:  # it may end where the loss is no longer a number
        if not (result_folder / "records" / "rank-0.jsonl").is_file():
            raise
    found = [each for each in read_records(result_folder / "records" / "rank-0.jsonl") if isinstance(each, StepRecord)]
    points = [(each.lr, each.loss) for each in found if each.loss is not None and not each.is_skipped]
    return replace(suggest_rate(points), folder=result_folder)


def suggest_rate(points: Sequence[tuple[float, float]]) -> RateFinding:
    """Returns where a smoothed loss falls fastest over the log of the rate. Raises UsageError if it never falls."""
    rates: list[float] = []
    losses: list[float] = []
    average = 0.0
    for number, (rate, loss) in enumerate(points, start=1):
        if not math.isfinite(loss):
            break
        average = _SMOOTHING * average + (1 - _SMOOTHING) * loss
        smooth = average / (1 - _SMOOTHING**number)
        if losses and smooth > _DIVERGED * min(losses):
            break
        rates.append(rate)
        losses.append(smooth)
    slopes = [
        (losses[i + 1] - losses[i - 1]) / (math.log(rates[i + 1]) - math.log(rates[i - 1]))
        for i in range(1, len(rates) - 1)
    ]
    if len(slopes) < _LEAST_POINTS or min(slopes) > -_FLAT * max(losses):
        what = f"no learning rate can be suggested: the loss of {len(rates)} steps does not fall"
        rule = "it must fall somewhere between 1e-07 and 1"
        raise UsageError(f"{what}\n  {rule}\n  look at the loss and the data, or set optim.lr yourself")
    steepest = slopes.index(min(slopes)) + 1
    lowest = rates[losses.index(min(losses))]
    return RateFinding(suggestion=rates[steepest], lowest_loss_at=lowest, rates=tuple(rates), losses=tuple(losses))
