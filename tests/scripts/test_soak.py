"""The record of the soak: how many tests and faults, by file and in all."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("soak")


def report(name: str, when: str, outcome: str, faults: int = 0) -> pytest.TestReport:
    properties = [("faults", faults)] if faults else []
    return pytest.TestReport(name, ("", 0, ""), {}, outcome, None, when, duration=1.5, user_properties=properties)  # type: ignore[arg-type]


def test_every_test_is_counted_once_with_its_faults(script: ModuleType) -> None:
    counter = script.Counter()
    for name, outcome, faults in (("a.py::x", "passed", 200), ("a.py::y", "failed", 0), ("b.py::z", "passed", 15)):
        for when in ("setup", "call", "teardown"):
            counter.pytest_runtest_logreport(report(name, when, outcome if when == "call" else "passed", faults))
    counter.pytest_runtest_logreport(report("b.py::w", "setup", "skipped"))
    a, b, total = script.summarize(counter, 4.0)
    assert a == {"file": "a.py", "passed": 1, "failed": 1, "skipped": 0, "faults": 200, "seconds": 9.0}
    assert b == {"file": "b.py", "passed": 1, "failed": 0, "skipped": 1, "faults": 15, "seconds": 6.0}
    assert total == {"file": "all", "passed": 2, "failed": 1, "skipped": 1, "faults": 215, "seconds": 4.0}


def test_a_share_is_spread_evenly_and_never_empty(script: ModuleType) -> None:
    assert script.take_share("abcdefghij", 1) == list("abcdefghij")
    assert script.take_share("abcdefghij", 4) == ["c", "g"]
    assert script.take_share("ab", 20) == ["a"]
