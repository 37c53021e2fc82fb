"""Predictions for one H200 beside what ``paceline bench gpu`` measured there: no GPU is needed to compare them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.predict.memory.memory import WORKSPACE_BYTES

ROOT = Path(__file__).parents[2]
EXHAUSTIVE = pytest.mark.exhaustive  # they take seconds
# The smallest GPT and fp8 are predicted 6.6 and 3.5 % too fast since predictions know that no gradient is cast.
# config, overrides, record, model and arm there; how far off time and memory may be
RUNS = [
    pytest.param(
        "gpt_10m_chars.yaml",
        (),
        "gpu-h200-10m.json",
        "gpt-10m",
        "paceline train",
        0.07,
        0.01,
        id="10m",
        marks=EXHAUSTIVE,
    ),
    pytest.param("gpt_124m.yaml", (), "gpu-h200.json", "gpt-124m", "paceline train", 0.05, 0.01, id="124m"),
    pytest.param("gpt_1b.yaml", (), "gpu-h200-1b.json", "gpt-1.1b", "paceline train", 0.03, 0.01, id="1b"),
    pytest.param(
        "gpt_1b.yaml",
        ("train.precision=fp8",),
        "gpu-h200-1b.json",
        "gpt-1.1b",
        "paceline train fp8",
        0.04,
        0.01,
        id="1b-fp8",
        marks=EXHAUSTIVE,
    ),
    pytest.param(
        "resnet50.yaml",
        (),
        "gpu-h200-resnet.json",
        "resnet50",
        "paceline train",
        0.05,
        0.03,
        id="r50",
        marks=EXHAUSTIVE,
    ),
]


def _measured(record: str, model: str, arm: str) -> dict[str, Any]:
    rows = json.loads((ROOT / "bench/results" / record).read_text(encoding="utf-8"))["rows"]
    (row,) = [each for each in rows if each["model"] == model and each["arm"] == arm]
    found: dict[str, Any] = row
    return found


@pytest.mark.parametrize(("config", "overrides", "record", "model", "arm", "time_error", "memory_error"), RUNS)
def test_a_step_on_an_h200_is_predicted_as_it_was_measured(
    config: str, overrides: tuple[str, ...], record: str, model: str, arm: str, time_error: float, memory_error: float
) -> None:
    measured = _measured(record, model, arm)
    found = paceline.predict(ROOT / "configs" / config, "1x h200", overrides=overrides, ranks=1)
    allocated = (
        found.total_memory - found.memory["framework"] + WORKSPACE_BYTES
    )  # with cuBLAS's workspaces, as records have it
    assert found.seconds * 1e3 == pytest.approx(measured["step_ms"], rel=time_error)
    assert allocated == pytest.approx(measured["peak_bytes"], rel=memory_error)
