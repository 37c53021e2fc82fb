"""The adviser on compression: what its rows say of a real, small run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from measures.compression import bench_compression, policies_to_try
from measures.verbs import app
from paceline.config import Config, config_from_dict
from paceline.errors import ConfigError, UsageError


def make_config(**sections: Any) -> Config:
    values: dict[str, Any] = {
        "model": {"kind": "mlp", "hidden_dim": 128, "dropout": 0.0},
        "data": {"kind": "digits"},
        "train": {"steps": 1000, "global_batch": 32},
    }
    return config_from_dict(values | sections)


@pytest.mark.exhaustive
def test_every_policy_gets_a_row_beside_the_uncompressed_run() -> None:
    rows = {(row["policy"], row["setting"]): row for row in bench_compression(make_config(), ranks=2, steps=6)}
    plain = rows.pop(("none", ""))
    assert plain["bytes_ratio"] == 1
    assert plain["loss_difference"] == plain["residual_norm"] == plain["compute_ms"] == 0
    assert [policy for policy, _ in rows] == [
        *("topk", "topk", "randomk", "threshold", "powersgd", "sign", "int8", "fp16", "bf16")
    ]
    # The biases travel whole, and the small last layer is large beside a compressed one: not the ratio of a message.
    ratios = {name: row["bytes_ratio"] for name, row in rows.items()}
    assert ratios["topk", "ratio=0.001"] > ratios["topk", "ratio=0.01"] > 12
    assert ratios["fp16", ""] == pytest.approx(2, rel=0.05)
    assert 3 < ratios["int8", ""] < 4
    for row in rows.values():
        assert row["residual_norm"] > 0
        assert row["compute_ms"] > 0
        assert (row["pays_below_gbps"] is None) == (row["sent_bytes"] >= plain["sent_bytes"])
    assert abs(rows["bf16", ""]["loss_difference"]) < 0.01


def test_numbers_of_the_config_and_of_the_caller_are_used() -> None:
    config = make_config(comm={"compression": {"policy": "topk", "ratio": 0.2, "min_size": 7}})
    found = policies_to_try(config, {"factor_rank": 2}, both=True)
    assert {each.ratio for each in found if each.policy == "randomk"} == {0.2}
    assert {each.factor_rank for each in found if each.policy == "powersgd"} == {2}
    assert {each.min_size for each in found} == {7}
    assert sum(not each.error_feedback for each in found) == len(found) // 2 == 9


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(UsageError, match="2 steps on 2 ranks"):
        bench_compression(make_config(), ranks=2, steps=2)
    with pytest.raises(ConfigError, match=r"parallel\.ranks = 3"):
        bench_compression(make_config(), ranks=3, steps=6)


@pytest.mark.exhaustive
def test_the_command_prints_and_writes_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, record = tmp_path / "config.yaml", tmp_path / "record.json"
    config.write_text("model: {kind: mlp, hidden_dim: 16}\ndata: {kind: digits}\n")
    words = ["compression", str(config), "--steps", "4", "--ratio", "0.1"]
    called = CliRunner().invoke(app, [*words, "--json", "--output", str(record)])
    assert called.exit_code == 0, called.output
    rows = json.loads(called.output)["rows"]
    assert json.loads(record.read_text())["rows"] == rows
    assert rows[1]["setting"] == "ratio=0.1"
    monkeypatch.setattr("measures.compression.bench_compression", lambda *_, **__: rows)  # the run is the same
    table = CliRunner().invoke(app, words)
    assert table.exit_code == 0, table.output
    assert "pays below" in table.output
