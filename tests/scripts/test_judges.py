"""The page of the judges is made from their last record."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def judges() -> ModuleType:
    spec = importlib.util.spec_from_file_location("judges", ROOT / "scripts" / "judges.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_says_what_the_last_record_says(judges: ModuleType) -> None:
    record = json.loads(judges.RECORD.read_text())
    assert judges.PAGE.read_text() == judges.page_of(record)
    assert record.keys() == {path.parent.name for path in judges.JUDGES.glob("*/test_*.py")}


def test_failures_and_reasons_are_on_the_page(judges: ModuleType) -> None:
    found = {"outcomes": {"passed": 3, "failed": 1, "error": 1}, "reasons": {"failed: a test": 2}}
    page = judges.page_of({"torch_optimizers": found})
    assert "| 3 | 0 | 0 | 2 |" in page
    assert "- 2 failed: `a test`" in page
