"""Where training ends under each compression: the arms, the rows of a real, short run, and the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from measures.convergence import arms_to_run, bench_convergence
from measures.verbs import app
from paceline.config import Config, config_from_dict
from paceline.errors import ConfigError, UsageError

ARMS = [("none", False), *((p, f) for p in ("topk", "randomk", "powersgd", "int8", "sign") for f in (True, False))]


def make_config(**sections: Any) -> Config:
    values: dict[str, Any] = {
        "model": {"kind": "mlp", "hidden_dim": 32, "dropout": 0.0},
        "data": {"kind": "digits", "eval_fraction": 0.2},
        "train": {"steps": 20, "global_batch": 32},
        "optim": {"lr": 5e-3},
    }
    return config_from_dict(values | sections)


@pytest.mark.exhaustive
def test_every_policy_runs_with_feedback_and_without_beside_the_plain_run() -> None:
    told: list[str] = []
    rows = bench_convergence(make_config(), ranks=2, seeds=1, progress=told.append)
    assert [(row["policy"], row["error_feedback"]) for row in rows] == ARMS
    plain, *others = rows
    assert plain["loss_percent"] == plain["accuracy_points"] == 0
    assert plain["bytes_ratio"] == 1
    assert plain["is_close"]
    for row in others:
        assert (row["steps"], row["plain_steps"]) == (20, 2)
        assert row["loss_percent"] == pytest.approx(100 * (row["loss"] / plain["loss"] - 1))
        assert row["accuracy_points"] == pytest.approx(100 * (row["accuracy"] - plain["accuracy"]))
        assert row["is_close"] == (row["accuracy_points"] >= -0.5)
        assert row["bytes_ratio"] > 1
    by_arm = {(row["policy"], row["error_feedback"]): row for row in rows}
    assert by_arm["topk", True]["loss"] < by_arm["topk", False]["loss"]
    assert abs(by_arm["int8", True]["loss_percent"]) < 1
    assert len(told) == len(ARMS)


@pytest.mark.exhaustive
def test_a_gpt_is_judged_by_its_loss_and_seeds_are_averaged() -> None:
    config = make_config(
        model={"kind": "gpt", "layers": 1, "heads": 1, "width": 8, "context": 8},
        data={"kind": "synthetic_tokens", "context": 8, "vocab_size": 16, "samples": 64, "eval_fraction": 0.2},
        train={"steps": 2, "global_batch": 4},
    )
    rows = bench_convergence(config, ranks=2, seeds=2)
    for row in rows:
        assert row["judged_by"] == "loss"
        assert row["is_close"] == (row["loss_percent"] <= 1)
        assert row["loss"] == pytest.approx(sum(row["losses"]) / 2)
    assert rows[0]["losses"][0] != rows[0]["losses"][1]


def test_plain_steps_of_the_config_are_kept() -> None:
    config = make_config(comm={"compression": {"policy": "topk", "plain_steps": 7, "min_size": 64}})
    arms = arms_to_run(config, total_steps=100)
    assert {(arm.plain_steps, arm.min_size) for arm in arms} == {(7, 64)}
    assert {arm.plain_steps for arm in arms_to_run(make_config(), total_steps=100)} == {10}
    assert {arm.ratio for arm in arms if arm.policy == "topk"} == {0.01}
    assert {arm.ratio for arm in arms if arm.policy == "randomk"} == {0.05}


def test_what_cannot_be_judged_is_refused() -> None:
    with pytest.raises(UsageError, match=r"data\.eval_fraction = 0"):
        bench_convergence(make_config(data={"kind": "digits", "eval_fraction": 0.0}), ranks=2, seeds=1)
    with pytest.raises(ConfigError, match=r"parallel\.ranks = 3"):
        bench_convergence(make_config(), ranks=3, seeds=1)


@pytest.mark.exhaustive
def test_the_command_prints_and_writes_a_record(tmp_path: Path) -> None:
    config, record = tmp_path / "config.yaml", tmp_path / "record.json"
    config.write_text(
        "model: {kind: mlp, hidden_dim: 16}\ndata: {kind: digits, eval_fraction: 0.2}\ntrain: {steps: 3}\n"
    )
    words = ["convergence", str(config), "--seeds", "1", "--output", str(record)]
    called = CliRunner().invoke(app, words)  # two processes
    assert called.exit_code == 0, called.output
    assert "close" in called.output
    found = json.loads(record.read_text())
    assert [(row["policy"], row["error_feedback"]) for row in found["rows"]] == ARMS
    assert found["config"]["seeds"] == 1
