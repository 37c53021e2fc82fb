"""The page of the judges is made from their last record."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
from loaded_script import load_script

ROOT = Path(__file__).parents[2]


@pytest.fixture
def judges() -> ModuleType:
    return load_script(ROOT / "scripts" / "judges.py")


def test_the_page_says_what_the_last_record_says(judges: ModuleType) -> None:
    records = judges.read_records()
    assert judges.PAGE.read_text() == judges.page_of(*records)
    assert {*records[0], "on_gpu"} == {path.parent.name for path in judges.JUDGES.glob("*/test_*.py")}
    if records[1] is not None:
        expected = {f"on_gpu/{path.stem.removeprefix('test_')}" for path in judges.JUDGES.glob("on_gpu/test_*.py")}
        assert records[1].keys() == {"machine", *expected}


def test_failures_and_reasons_are_on_the_page(judges: ModuleType) -> None:
    found = {"outcomes": {"passed": 3, "failed": 1, "error": 1}, "reasons": {"failed: a test": 2}}
    page = judges.page_of({"torch_optimizers": found})
    assert "| 3 | 0 | 0 | 2 |" in page
    assert "- 2 failed: `a test`" in page


def test_a_gpus_record_has_a_table_of_its_own(judges: ModuleType) -> None:
    found = {"outcomes": {"passed": 5, "refused": 1}, "reasons": {"refused: a rule": 1}}
    record = {"machine": {"device": "NVIDIA H200", "torch": "2.11.0"}, "on_gpu/fp8": found}
    page = judges.page_of({}, record)
    assert "on one NVIDIA H200 with torch 2.11.0" in page
    assert "| 5 | 1 | 0 | 0 |" in page
    assert "## on_gpu/fp8: what did not pass, and why" in page
    assert "on_gpu" not in judges.page_of({})


def test_mistakes_that_no_test_noticed_are_named(judges: ModuleType) -> None:
    lived = {"file": "a.py", "line": 3, "was": "x < y", "is": "x <= y", "noticed": "nobody", "why": "they never meet"}
    record = {
        "seed": 7,
        "summary": {"mistakes": 25, "by_all": 0.96, "by_room": 0.8},
        "mistakes": [lived, {**lived, "line": 9, "noticed": "room"}],
    }
    page = judges.page_of({}, None, record)
    assert "the tests noticed 96.0%, and those of the mistake's own room 80.0%" in page
    assert "`a.py:3`: `x < y` became `x <= y`: they never meet" in page
    assert "a.py:9" not in page
