"""``python bench`` as typed: what it prints, what it writes, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from command_runs import Call
from command_runs import call as call

from measures.verbs import app

ROOT = Path(__file__).parents[2]
RECORD = {"name", "command", "rows", "config", "hardware", "versions", "commit", "time"}
MEMORY_ROW = {
    *("row", "strategy", "precision", "checkpoint_activations", "offload", "layers", "parameters", "device_bytes"),
    *("host_bytes", "tokens_per_s", "limit", "too_many_layers", "tried_layers"),
}


def test_memory_writes_a_record_of_the_rows_asked_for(call: Call, tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    arguments = ["--device", "cpu", "--budget-gb", "0.001", "--size", "gpt-nano", "--context", "8"]
    called = call("memory", *arguments, "--options", "ddp fp32", "--output", str(file), verbs=app)
    assert called.code == 0, called.err
    record = json.loads(file.read_text())
    assert set(record) == RECORD
    assert record["config"]["budget_bytes"] == 2**30 // 1000
    (row,) = record["rows"]
    assert set(row) == MEMORY_ROW
    assert row["limit"] == "device"
    assert f"{row['parameters'] / 1e3:.1f}k" in called.out


@pytest.mark.exhaustive
def test_pipeline_writes_the_parts_asked_for(call: Call, tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    called = call("pipeline", "--parts", "modelled,bubbles", "--output", str(file), verbs=app)
    assert called.code == 0, called.err
    record = json.loads(file.read_text())
    assert set(record) == RECORD
    assert record["command"] == "python bench pipeline --parts modelled,bubbles"
    assert record["config"]["workload"]["model"] == "gpt-11m"
    assert {row["part"] for row in record["rows"]} == {"modelled", "bubbles"}
    assert "on the virtual clock, modelled" in called.out
    assert "zb-h1" in called.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["pipeline", "--parts", "sped"], "--parts sped: they are speed, features, modelled, bubbles"),
        (["pipeline", "--arms", "2f2b"], "--arms 2f2b: no arm is called so"),
        (["pipeline", "--model", "gpt-9t"], "there is no GPT size 'gpt-9t'"),
        (["memory", "--device", "cpu", "--options", "zero9"], "--options zero9: no row is called so"),
        (["memory", "--device", "cpu", "--budget-gb", "0"], "--budget-gb is needed on a CPU"),
        (["memory", "--device", "cpu", "--size", "gpt-9t"], "there is no GPT size 'gpt-9t'"),
        (["losses", "--device", "tpu"], "--device tpu is not here"),
        (["checkpoint", "--folder", "nowhere"], "--folder nowhere cannot be used: it is not there"),
        (["checkpoint", "--folder", "README.md"], "--folder README.md cannot be used: Not a directory"),
        (["restart", "--output", "."], ". cannot be written: it is a folder"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_runs(
    call: Call, arguments: list[str], message: str
) -> None:
    called = call(*arguments, verbs=app)
    assert (called.code, called.out) == (2, "")
    assert message in called.err


def test_the_folder_is_run_as_a_program_from_the_top_of_the_repository() -> None:
    done = subprocess.run(
        [sys.executable, "bench", "checkpoint", "--folder", "nowhere"],  # refused before torch is loaded
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("paceline: --folder nowhere cannot be used: it is not there\n")
