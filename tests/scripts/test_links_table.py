"""The table and the time line of emulated links: every figure is the record's."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("links_table")


def arm(name: str, step: float, exposed: float, gib: float, **more: Any) -> dict[str, Any]:
    timeline = {"compute": [[0.0, 5.0], [5.5, step]], "wires": [[1.0, 5.5]]}
    found = {"case": "7b/8", "arm": name, "compiled": True, "median_ms": step, "exposed_ms": exposed, "free_ms": 8.0}
    return found | {"peak_bytes": gib * 2**30, "hidden_share": 0.97, "timeline": timeline, **more}


def record(**more: Any) -> dict[str, Any]:
    rows = [
        arm("torch ddp bf16", 10.0, 1.5, 20.0),
        arm("torch fsdp2 bf16_master, kept", 9.5, 1.0, 8.0, compiled=False),
        arm("paceline zero2 bf16_master", 9.0, 0.5, 7.5),
        {"case": "7b/8", "arm": "paceline fsdp bf16_master", "error": "out of memory"},
        {"case": "7b/8", "arm": "best, all", "ratio": 0.947},
        {"case": "7b/8", "arm": "best, replicated", "ratio": 0.9},
        {"case": "7b/8", "arm": "paceline predict --on gpu, ddp", "off": 0.031},
        {"case": "124m/8", "error": "its process died"},
    ]
    return {"hardware": {"gpu": "NVIDIA H200"}, "versions": {"torch": "2.11.0"}, "rows": rows} | more


def test_a_case_has_the_figures_of_the_record(script: ModuleType) -> None:
    lines = script.table(record()).splitlines()
    assert lines[0].startswith("One NVIDIA H200, torch 2.11.0, emulated links.")
    cells = (
        "zero2 9.0 ms | fsdp2, kept, eager 9.5 ms | 0.947 | 0.900 |  | 0.5, 1.0 ms | 97 % | 7.5, 8.0 GiB | +3.1 % |  |"
    )
    assert f"| 3 blocks of a 7B | 8 | {cells}" in lines
    assert any(line.startswith("| GPT-124M | 8 |  |") for line in lines)
    assert "Not run: 124m/8  (its process died); 7b/8 paceline fsdp bf16_master (out of memory)." in lines
    widths = {line.count("|") for line in lines if line.startswith("|")}
    assert len(widths) == 1


def test_the_last_record_of_a_case_counts_and_machines_are_not_mixed(script: ModuleType) -> None:
    newer = record(rows=[{"case": "7b/8", "arm": "best, all", "error": "nothing ran"}])
    assert [row["arm"] for row in script.cases_of(record(), newer)["7b/8"]] == ["best, all"]
    with pytest.raises(ValueError, match="several machines"):
        script.cases_of(record(), record(versions={"torch": "2.13.0"}))


def test_the_time_line_shows_both_engines_on_one_scale(script: ModuleType) -> None:
    picture = script.draw("7b/8", script.cases_of(record())["7b/8"])
    texts = [each.text for each in ElementTree.fromstring(picture).iter() if each.text]
    assert {"paceline zero2 bf16_master", "torch fsdp2 bf16_master, kept", "9.0 ms", "9.5 ms"} <= set(texts)
