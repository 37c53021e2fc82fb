"""The shell scripts: clean, and each of them one command that paceline reads; requirements.txt is the package's own."""

from __future__ import annotations

import os
import shutil
import subprocess
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.main

from paceline.cli.app import app
from paceline.config import load_config

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted([*ROOT.glob("scripts/*.sh"), *ROOT.glob("infrastructure/**/*.sh")])


def call(folder: Path, script: str, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a script with a paceline in its way that prints what it was given, one word a line."""
    stub = folder / "paceline"
    stub.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    stub.chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", **variables}
    command = [str(ROOT / "scripts" / script), *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@cache
def train_command() -> Any:
    whole: Any = typer.main.get_command(app)
    return whole.commands["train"]


def asked(folder: Path, script: str, *words: str, **variables: str) -> tuple[Any, dict[str, Any]]:
    """Returns the config that a script trains, and the options of paceline train."""
    done = call(folder, script, *words, **variables)
    assert done.returncode == 0, done.stderr
    verb, *given = done.stdout.splitlines()
    assert verb == "train"
    options: dict[str, Any] = train_command().make_context("train", given).params
    return load_config(Path(options["config"]), list(options["overrides"] or [])), options


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed (apt install shellcheck)")
def test_the_scripts_are_clean() -> None:
    assert len(SCRIPTS) >= 4
    done = subprocess.run(["shellcheck", *map(str, SCRIPTS)], capture_output=True, text=True, check=False)
    assert not done.returncode, done.stdout


@pytest.mark.parametrize(("ranks", "strategy", "batch"), [(4, "ddp", 32), (8, "fsdp", 64)])
def test_ranks_strategy_and_batch(tmp_path: Path, ranks: int, strategy: str, batch: int) -> None:
    config, options = asked(tmp_path, "launch_training.sh", str(ranks), strategy, str(batch), MASTER_ADDR="")
    assert (config.parallel.ranks, config.parallel.strategy) == (ranks, strategy)
    assert config.train.global_batch == ranks * batch
    assert options["nnodes"] is None


def test_several_machines_meet_at_the_first(tmp_path: Path) -> None:
    variables = {"MASTER_ADDR": "node0", "NODE_RANK": "1", "GPUS_PER_NODE": "8"}
    config, options = asked(tmp_path, "launch_training.sh", "16", "ddp", "32", **variables)
    assert (options["nnodes"], options["rdzv"], options["node_ranks"]) == ("2", "node0:29400", 8)
    assert config.train.global_batch == 512


def test_ranks_that_machines_cannot_share_are_refused(tmp_path: Path) -> None:
    done = call(tmp_path, "launch_training.sh", "12", "ddp", "32", MASTER_ADDR="node0", GPUS_PER_NODE="8")
    assert (done.returncode, done.stdout) == (2, "")
    assert "12 ranks cannot be shared by machines with 8 GPUs each" in done.stderr


def test_a_config_and_all_that_follows_it(tmp_path: Path) -> None:
    config, options = asked(
        tmp_path, "launch_training.sh", "--config", str(ROOT / "configs/gpt_fsdp.yaml"), "train.steps=7", "--force"
    )
    assert config.train.steps == 7
    assert options["force"]


def test_run_distributed(tmp_path: Path) -> None:
    config, _ = asked(tmp_path, "run_distributed.sh", "4", "128", "10", MASTER_ADDR="")
    assert (config.parallel.ranks, config.train.global_batch, config.train.epochs) == (4, 512, 10)


def test_benchmark_measures_scaling(tmp_path: Path) -> None:
    done = call(tmp_path, "benchmark.sh", "--ranks", "1,2")
    verb, what, config, *options = done.stdout.splitlines()
    assert (verb, what, options) == ("bench", "scaling", ["--ranks", "1,2"])
    assert Path(config).is_file()


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("launch_training.sh", []),
        ("launch_training.sh", ["--config"]),
        ("launch_training.sh", ["4", "ddp"]),
        ("launch_training.sh", ["four", "ddp", "32"]),
        ("launch_training.sh", ["4", "ddp", "3.2"]),
        ("run_distributed.sh", ["4", "128"]),
        ("run_distributed.sh", ["4", "128", "ten"]),
    ],
)
def test_what_is_no_call_is_refused(tmp_path: Path, script: str, words: list[str]) -> None:
    done = call(tmp_path, script, *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert " takes " in done.stderr


def test_requirements_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if not line.startswith("#")] == project["dependencies"]
