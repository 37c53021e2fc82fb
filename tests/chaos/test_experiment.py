"""A run with faults before it starts: what chaos sets where the config leaves it open."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.chaos.experiment import prepare_run
from paceline.config import load_config_with_sources

DIGITS = Path(__file__).parents[2] / "configs" / "digits.yaml"


@pytest.mark.parametrize(("overrides", "restarts"), [([], 2), (["recovery.max_restarts=7"], 7)])
def test_a_run_is_restarted_as_often_as_there_are_faults_unless_the_config_says_so(
    overrides: list[str], restarts: int
) -> None:
    said: list[str] = []
    run = prepare_run(
        load_config_with_sources(DIGITS, overrides),
        DIGITS,
        overrides,
        num_faults=2,
        may_hang=False,
        ranks=2,
        environment={},
        say=said.append,
    )
    assert run.config.recovery.max_restarts == restarts
    assert said == ["the config saves nothing on the way: saving every 10 steps (checkpoint.every_steps)"]
