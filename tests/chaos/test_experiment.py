"""A run with faults before it starts: what chaos sets where the config leaves it open."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.chaos.experiment import FaultyRun, prepare_run
from paceline.chaos.faults import DRAWN, TRAITS
from paceline.config import load_config_with_sources
from paceline.errors import ConfigError

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
        kinds=("kill", "nan"),
        ranks=2,
        environment={},
        say=said.append,
    )
    assert run.config.recovery.max_restarts == restarts
    assert said == ["the config saves nothing on the way: saving every 10 steps (checkpoint.every_steps)"]


def prepare(overrides: list[str], kinds: list[str], **others: Any) -> tuple[FaultyRun, list[str]]:
    said: list[str] = []
    loaded = load_config_with_sources(DIGITS, overrides)
    run = prepare_run(loaded, DIGITS, overrides, kinds=kinds, ranks=2, environment={}, say=said.append, **others)
    return run, said


def test_faults_of_memory_have_snapshots_and_those_of_launchers_a_disk() -> None:
    run, said = prepare(["checkpoint.every_steps=20"], ["kill-keeper"])
    assert run.config.checkpoint.memory.every_steps == 10
    assert said == ["the config keeps no snapshots: one every 10 steps (checkpoint.memory.every_steps)"]
    run, said = prepare(["checkpoint.memory.every_steps=5"], ["kill-host"])
    assert (run.config.checkpoint.every_steps, run.config.checkpoint.memory.every_steps) == (10, 5)
    assert said == [
        "the config saves nothing to disk, and memory goes with its launcher: saving every 10 steps "
        "(checkpoint.every_steps)"
    ]
    run, said = prepare(["checkpoint.memory.every_steps=5"], ["kill", "kill-in-snapshot", "memory-full"])
    assert (run.config.checkpoint.every_steps, said) == (None, [])


def test_hosts_share_the_ranks_evenly() -> None:
    assert prepare([], ["kill"], hosts=3)[0].ranks == 3
    run, _ = prepare(["parallel.ranks=4"], ["kill"], hosts=2)
    assert (run.ranks, run.hosts) == (4, 2)
    assert run.meeting is not None
    with pytest.raises(ConfigError, match=r"4 ranks on 3 hosts(?s:.)*set parallel\.ranks = 3"):
        prepare(["parallel.ranks=4"], ["kill"], hosts=3)


def test_a_seed_draws_what_it_always_drew() -> None:
    assert len(DRAWN) == 14
    assert not {"kill-two", "kill-in-recovery", "memory-full", "kill-host"} & set(DRAWN)
    assert set(DRAWN) < set(TRAITS)
