"""The rate that a range test suggests, by points that are known exactly; and the run that makes the points."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import made_records
import pytest
from made_records import write_records

from paceline.config import Config, load_config
from paceline.errors import LaunchError, UsageError
from paceline.run import find_rate as module
from paceline.run.find_rate import RateFinding, find_rate, suggest_rate
from paceline.run.location import RunOptions

RATES = [2.0 ** (number - 20) for number in range(20)]


def flat_then_falling(number: int) -> float:
    return 4.0 if number < 8 else max(1.0, 4.0 - (number - 8) / 2)


def by_hand(losses: list[float]) -> list[float]:
    """Smooths as a moving average does that knows how many it has seen."""
    found = []
    for count in range(1, len(losses) + 1):
        weights = [0.9 ** (count - 1 - place) for place in range(count)]
        found.append(sum(w * loss for w, loss in zip(weights, losses, strict=False)) / sum(weights))
    return found


def test_losses_are_smoothed_and_the_steepest_place_is_suggested() -> None:
    losses = [flat_then_falling(number) for number in range(20)]
    found = suggest_rate(list(zip(RATES, losses, strict=True)))
    smooth = by_hand(losses)
    assert found.losses == pytest.approx(smooth)
    assert found.rates == tuple(RATES)
    slopes = [smooth[place + 1] - smooth[place - 1] for place in range(1, 19)]  # rates grow by one factor
    assert found.suggestion == RATES[slopes.index(min(slopes)) + 1]
    assert found.lowest_loss_at == RATES[-1]
    assert found.folder is None


def test_the_slope_is_taken_over_the_logarithm_of_the_rate() -> None:
    """Of two falls by the same loss, the one within a smaller factor of the rate is steeper."""
    rates = [float(number) for number in range(1, 21)]
    losses = [10.0 - 0.1 * number for number in range(20)]
    found = suggest_rate(list(zip(rates, losses, strict=True)))
    smooth = by_hand(losses)
    slopes = [
        (smooth[place + 1] - smooth[place - 1]) / (math.log(rates[place + 1]) - math.log(rates[place - 1]))
        for place in range(1, 19)
    ]
    assert found.suggestion == rates[slopes.index(min(slopes)) + 1]


@pytest.mark.parametrize("last", [math.nan, math.inf])
def test_points_after_a_loss_that_is_no_number_do_not_count(last: float) -> None:
    losses = [5.0 - number / 4 for number in range(16)]
    found = suggest_rate([*zip(RATES[:16], losses, strict=True), (RATES[16], last), (RATES[17], 0.0)])
    assert len(found.rates) == 16
    assert found.lowest_loss_at == RATES[15]


def test_points_count_until_the_loss_is_four_times_its_lowest() -> None:
    losses = [5.0 - number / 4 for number in range(16)]
    smooth = by_hand(losses)
    weights = sum(0.9**place for place in range(17))

    def loss_that_smooths_to(value: float) -> float:
        return value * weights - smooth[-1] * (weights - 1)

    for factor, count in ((3.999, 17), (4.001, 16)):
        bad = loss_that_smooths_to(factor * min(smooth))
        found = suggest_rate([*zip(RATES[:16], losses, strict=True), (RATES[16], bad)])
        assert len(found.rates) == count
        assert found.lowest_loss_at == RATES[15]


@pytest.mark.parametrize("count", [0, 1, 11, 12])
def test_ten_slopes_are_needed(count: int) -> None:
    points = list(zip(RATES[:count], (5.0 - number / 4 for number in range(count)), strict=True))
    if count == 12:
        assert len(suggest_rate(points).rates) == 12
        return
    with pytest.raises(UsageError) as refused:
        suggest_rate(points)
    assert str(refused.value).splitlines() == [
        f"no learning rate can be suggested: the loss of {count} steps does not fall",
        "  it must fall somewhere between 1e-07 and 1",
        "  look at the loss and the data, or set optim.lr yourself",
    ]


@pytest.mark.parametrize(("fall", "is_found"), [(0.0, False), (-1e-3, False), (1e-8, False), (1e-3, True)])
def test_a_loss_that_hardly_falls_suggests_nothing(fall: float, is_found: bool) -> None:
    points = [(rate, 1.0 - fall * number) for number, rate in enumerate(RATES)]
    if is_found:
        assert isinstance(suggest_rate(points), RateFinding)
    else:
        with pytest.raises(UsageError, match="the loss of 20 steps does not fall"):
            suggest_rate(points)


# The run


Train = Callable[..., None]


@pytest.fixture
def asked(tmp_path: Path) -> Config:
    values = ["model.kind=mlp", "data.kind=digits", "train={epochs: 3, global_batch: 8, eval_every: 2}"]
    values += ["checkpoint.every_steps=5", "optim.lr=3e-4", "name=mine", f"monitor.folder={tmp_path}"]
    return load_config(None, values)


def test_a_range_test_is_a_short_run_of_its_own(asked: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Config, RunOptions]] = []

    def train(config: Config, *, options: RunOptions) -> None:
        seen.append((config, options))
        steps = [
            replace(made_records.STEP, step=number + 1, lr=rate, loss=flat_then_falling(number))
            for number, rate in enumerate(RATES)
        ]
        skipped = [replace(steps[3], loss=None), replace(steps[3], loss=0.0, grad_norm=math.nan)]
        write_records(tmp_path / config.name, 0, made_records.RUN, *steps[:4], *skipped, *steps[4:])

    monkeypatch.setattr(module, "train", train)
    found = find_rate(asked, steps=33)
    (config, options), folder = seen[0], tmp_path / "mine-find-lr"
    assert found == replace(
        suggest_rate([(rate, flat_then_falling(number)) for number, rate in enumerate(RATES)]), folder=folder
    )
    assert (config.name, config.train.steps, config.train.max_bad_steps) == ("mine-find-lr", 33, 34)
    assert (config.optim.lr, config.optim.lr_scaling, config.optim.lr_batch) == (1.0, "none", None)
    assert (config.optim.schedule.kind, config.optim.schedule.final_ratio) == ("range", 1e-7)
    assert (options.force, options.resume) == (False, None)
    find_rate(asked, options=RunOptions(resume="auto", is_quiet=True))
    config, options = seen[1]
    assert config.train.steps == module.STEPS == 100
    assert (options.force, options.resume, options.is_quiet) == (True, None, True)


def test_a_run_that_ended_early_suggests_by_what_it_recorded(
    asked: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise LaunchError("the loss is nan")

    monkeypatch.setattr(module, "train", fail)
    with pytest.raises(LaunchError, match="the loss is nan"):
        find_rate(asked)
    write_records(tmp_path / "mine-find-lr", 0, made_records.RUN)
    with pytest.raises(UsageError, match="the loss of 0 steps does not fall"):
        find_rate(asked)
