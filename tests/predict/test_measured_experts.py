"""Predictions of mixtures of experts on one H200 beside what was measured there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.cluster.detect import Machine
from paceline.config import load_config
from paceline.search.expect import expect_run
from paceline.units import GIB

ROOT = Path(__file__).parents[2]
CONFIGS = {"train": "gpt_moe_7b", "dense": "gpt_124m", "mixture": "gpt_124m"}
MIXED = ("model.experts=8", "model.active=2", "model.expert_width=1536")
H200 = Machine(processor="", cores=16, memory_bytes=128 * GIB, gpus=("NVIDIA H200",), gpu_memory_bytes=(139.8 * GIB,))
RECORD = json.loads((ROOT / "bench/results/experts-h200.json").read_text())["rows"]
ROWS = [row for row in RECORD if "predicted_ms" in row]  # of paceline train


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["arm"])
def test_a_step_and_its_memory_are_predicted(row: dict[str, Any]) -> None:
    settings = MIXED if row["arm"] == "mixture" else ()
    config = load_config(
        ROOT / "configs" / f"{CONFIGS[row['arm']]}.yaml", ["parallel.device=cuda", "parallel.ranks=1", *settings]
    )
    found = expect_run(config, H200)
    assert found.step_s == pytest.approx(row["step_ms"] / 1e3, rel=0.12)
    assert found.memory_bytes is not None
    assert found.memory_bytes / GIB == pytest.approx(row["peak_gib"], rel=0.07)
