"""The README's table of one GPU: every figure is the record's, and stands between the marks."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
ROW = {
    *[("model", "gpt-124m"), ("arm", "plain masters"), ("is_plain", True), ("step_ms", 58.04), ("ratio", 1.0)],
    *[("tokens_per_s", 564576.0), ("mfu", 0.441), ("peak_bytes", 14 * 2**30), ("first_step_s", 41.2)],
    *[("second_start_s", 12.4), ("loss", 10.01234), ("loss_step", 55)],
}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("speed_table")


def record() -> dict[str, Any]:
    ours = {**dict(ROW), "arm": "paceline train", "is_plain": False, "step_ms": 56.1, "ratio": 0.967}
    images = {"model": "resnet50", "images_per_s": 6900.4, "mfu": None, "peak_bytes": None, "second_start_s": None}
    failed = {"model": "resnet50", "arm": "accelerate", "is_plain": False, "error": "accelerate is not installed"}
    photos = {key: value for key, value in (dict(ROW) | images).items() if key != "tokens_per_s"}
    rows = [dict(ROW), ours, photos, failed]
    return {"hardware": {"gpu": "NVIDIA H200"}, "versions": {"torch": "2.11.0"}, "rows": rows}


def test_a_row_has_the_figures_of_the_record(script: ModuleType) -> None:
    lines = script.table(record()).splitlines()
    assert "| plain masters | 58.0 ms | 564,576 | 1.000 | 44.1 % | 14.0 GiB | 41 s, 12 s | 10.0123 after 55 |" in lines
    assert any(line.startswith("| **paceline train** | 56.1 ms |") and "| 0.967 |" in line for line in lines)
    assert "| plain masters | 58.0 ms | 6,900 | 1.000 |  |  | 41 s | 10.0123 after 55 |" in lines
    assert "Not run: accelerate (accelerate is not installed)." in lines


def test_of_a_model_in_several_records_the_last_counts(script: ModuleType) -> None:
    newer = record()
    newer["rows"] = [row | {"step_ms": 36.5} for row in newer["rows"] if row["model"] == "resnet50"][:1]
    text = script.table(record(), newer)
    assert text.count("ResNet-50") == 1
    assert "| plain masters | 36.5 ms |" in text
    assert "accelerate" not in text


def test_the_table_stands_between_the_marks_of_the_readme(script: ModuleType) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    written = script.with_table(readme, "| a table |")
    assert f"{script.BEGIN}\n| a table |\n{script.END}" in written
    assert script.with_table(written, "| a table |") == written
    with pytest.raises(ValueError, match="the page has no lines"):
        script.with_table("nothing", "| a table |")
