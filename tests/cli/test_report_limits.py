"""The report names what limits a run, in runs that are limited on purpose."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

Call = Callable[..., Any]

# torch leaves the files of redirected output to the garbage collector, which may come within the second command.
LATE_FILES = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")

SLOW_DATA = """
import time
import torch

class SlowData(torch.utils.data.Dataset):
    def __len__(self):
        return 4096
    def __getitem__(self, index):
        time.sleep(0.004)
        return torch.full((16,), float(index % 7)), index % 4

def data():
    return SlowData()
"""
CONFIG = """
name: limited
model: {kind: mlp, hidden_dim: 256}
data: {kind: synthetic_classification, samples: 4096, features: 64, classes: 8}
train: {steps: 40, global_batch: 512}
parallel: {ranks: 2, device: cpu, threads: 1}
monitor: {tensorboard: false}
recovery: {max_restarts: 9}
"""


@pytest.fixture
def limited(project: Path) -> Path:
    (project / "limited.yaml").write_text(CONFIG)
    (project / "slow_data.py").write_text(SLOW_DATA)
    return project


def verdict(call: Call, folder: str) -> dict[str, Any]:
    called = call("report", folder, "--json")
    assert called.code == 0, called
    found: dict[str, Any] = json.loads(called.out)["limits"]
    assert len(found["changes"]) == 2
    assert all(change["gain"] > 1 for change in found["changes"])
    assert found["found"][0]["evidence"]
    return found


LAUNCH_BOUND = ("train.steps=12", "train.global_batch=8", "model.hidden_dim=16", "parallel.device=cpu")


@pytest.mark.usefixtures("limited")
def test_a_simulated_gpu_that_waits_for_launches(call: Call) -> None:
    run = ("--ranks", "1", "--cluster", "1x h100-sxm", "--compute", "modelled", "--json")
    assert call("simulate", "limited.yaml", *LAUNCH_BOUND, *run).code == 0
    found = verdict(call, "runs/limited-simulated")
    assert found["what"] == "host"
    assert "compile" in found["changes"][0]["text"] or "microbatch" in found["changes"][0]["text"]


@pytest.mark.usefixtures("limited")
def test_a_simulated_slow_link_and_a_simulated_slow_rank(call: Call) -> None:
    small = ("train.steps=8", "train.global_batch=64", "--compute", "modelled", "--json", "--ranks", "4")
    assert call("simulate", "limited.yaml", *small, "--slow", "link=2:30x").code == 0
    assert verdict(call, "runs/limited-simulated")["what"] == "link"
    assert call("simulate", "limited.yaml", *small, "train.global_batch=4096", "--slow", "rank=2:3x").code == 0
    found = verdict(call, "runs/limited-simulated")
    assert found["what"] == "rank"
    assert "rank 2" in found["sentence"]


CHAOS = {
    "rank": ("slow:rank=1x4:steps=40@step=2",),
    "link": ("slow-link:rank=1x200:steps=40@step=2",),
    "restarts": ("kill:rank=1@step=9,kill:rank=0@step=18,kill:rank=1@step=27", "checkpoint.every_steps=5"),
    "memory": (
        *("oom:rank=0@step=2", "train.microbatch=auto", "parallel.ranks=1", "model.hidden_dim=2048"),
        *("recovery.on_oom=halve", "train.steps=20"),
    ),
}


@pytest.mark.exhaustive
@LATE_FILES
@pytest.mark.parametrize("what", list(CHAOS))
@pytest.mark.usefixtures("limited")
def test_real_runs_with_faults(what: str, call: Call) -> None:
    faults, *overrides = CHAOS[what]
    called = call("chaos", "limited.yaml", *overrides, "--faults", faults, "--json")
    assert called.code == 0, called
    assert verdict(call, "runs/limited-chaos")["what"] == what


@pytest.mark.exhaustive
@LATE_FILES
def test_a_real_run_with_slow_data(limited: Path, call: Call) -> None:
    values = yaml.safe_load(CONFIG)
    values["data"] = {"kind": "factory", "factory": "slow_data:data"}
    values["model"] |= {"input_dim": 16, "num_classes": 4}
    values["train"] = {"steps": 12, "global_batch": 32}
    (limited / "slow.yaml").write_text(yaml.safe_dump(values))
    called = call("train", "slow.yaml")
    assert called.code == 0, called
    found = verdict(call, "runs/limited")
    assert found["what"] == "data"
    assert "data.workers" in found["changes"][0]["text"]
