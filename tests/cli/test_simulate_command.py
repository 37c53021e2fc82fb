"""``paceline simulate``: its summary and time line, its folder, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.simulate import read_slow
from paceline.errors import UsageError

Call = Callable[..., Any]

CONFIG = """
name: small
model: {kind: mlp, hidden_dim: 16, num_classes: 4}
data: {kind: synthetic_classification, samples: 40, features: 6, classes: 4}
train: {steps: 3, global_batch: 8}
parallel: {device: cpu, threads: 1}
"""


@pytest.fixture
def small(project: Path) -> Path:
    (project / "small.yaml").write_text(CONFIG)
    return project


def test_a_simulation_shows_accuracy_and_a_time_line(small: Path, call: Call) -> None:
    called = call("simulate", "small.yaml", "--ranks", "2", "--slow", "rank=1:2x", "--trace", "line.json")
    assert called.code == 0, called.err
    for text in ("test accuracy", "rank 0", "F forward", "Times are simulated", "rank 1 2 x slower"):
        assert text in called.out
    folder = small / "runs" / "small-simulated"
    assert {path.name for path in (folder / "records").iterdir()} == {"rank-0.jsonl", "rank-1.jsonl"}
    assert (small / "line.json").read_bytes() == (folder / "trace.json").read_bytes()
    assert {path.name for path in folder.iterdir() if path.is_dir()} == {"records"}
    assert call("report", str(folder)).code == 0


@pytest.mark.usefixtures("small")
def test_json_repeats_to_the_bit_and_replaces_the_simulation_before(call: Call) -> None:
    command = ["simulate", "small.yaml", "--ranks", "4", "--cluster", "1x dgx-a100", "--compute", "modelled", "--json"]
    first, second = call(*command), call(*command)
    assert first.code == second.code == 0, first.err + second.err
    assert first.out == second.out
    found = json.loads(first.out)
    assert found["world_size"] == 4
    assert found["simulation"]["cluster"] == "1x dgx-a100"
    assert len(found["simulation"]["by_rank"]) == 4


def test_a_folder_of_something_else_is_not_replaced(small: Path, call: Call) -> None:
    folder = small / "runs" / "small-simulated"
    folder.mkdir(parents=True)
    (folder / "precious.txt").write_text("mine")
    called = call("simulate", "small.yaml", "--ranks", "2")
    assert called.code == 2
    assert "exists already" in called.err
    assert (folder / "precious.txt").read_text() == "mine"


def test_a_simulation_that_fails_leaves_the_one_before(small: Path, call: Call) -> None:
    assert call("simulate", "small.yaml", "--ranks", "2", "--compute", "modelled").code == 0
    folder = small / "runs" / "small-simulated"
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert call("simulate", "small.yaml", "--ranks", "2", "--slow", "rank=5:2x").code == 2
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--device", "tpu"], "take cpu or cuda"),
        (["--slow", "2:1.5x"], "--slow 2:1.5x"),
        (["--slow", "rank=9:2x"], "slow = {9: 2}"),
        (["--cluster", "4x dgx-h1000"], "did you mean"),
        (["--cluster", "1x a100-sxm-80gb"], "2 ranks on 1x a100-sxm-80gb"),
        (["--compute", "guessed"], "compute = 'guessed'"),
        (["--ranks", "16"], "global_batch"),
    ],
)
def test_what_cannot_be_is_refused(small: Path, call: Call, options: list[str], message: str) -> None:
    called = call("simulate", "small.yaml", "--ranks", "2", *options)
    assert called.code == 2
    assert message in called.err
    assert not (small / "runs" / "small-simulated").exists()


@pytest.mark.usefixtures("small")
def test_problems_are_headed_by_the_name_of_the_file(call: Call) -> None:
    called = call("simulate", "small.yaml", "--ranks", "3")
    assert called.code == 2
    assert "small.yaml: 1 problem" in called.err


@pytest.mark.usefixtures("small")
def test_a_folder_that_cannot_be_made_is_told_before_training(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.rehearse.simulate.run.simulate", None)
    called = call("simulate", "small.yaml", "--ranks", "2", "monitor.folder=/proc/x")
    assert called.code == 2
    assert "cannot make the run's folder /proc/x/small-simulated" in called.err
    assert "monitor.folder" in called.err


def test_slow_ranks_and_links_are_read() -> None:
    assert read_slow(["rank=2:1.5x", "link=0:3", "rank = 1 : 2x"]) == ({2: 1.5, 1: 2.0}, {0: 3.0})
    for text in ("rank=2", "rank=-1:2x", "host=1:2x", "rank=1:0x", "rank=1:fast"):
        with pytest.raises(UsageError, match="--slow"):
            read_slow([text])


def test_ranks_whose_states_no_host_holds_are_refused_first(call: Call) -> None:
    config = Path(__file__).parents[2] / "configs" / "gpt_1t.yaml"
    called = call("simulate", str(config), "--ranks", "4", "train.global_batch=4", "data.samples=64")
    assert called.code == 2
    assert "out of memory: 4 virtual ranks need" in called.err
    assert "--no-memory-check" in called.err
