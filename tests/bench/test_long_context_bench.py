"""The bench of long sequences: what its cases ask for, and how those around the limit find their lengths."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from paceline.config import load_config
from paceline.units import GIB

ROOT = Path(__file__).parents[2]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    return importlib.import_module("long_context")


def test_every_case_is_a_config_and_has_a_name_of_its_own(bench: Any) -> None:
    assert len({case.name for case in bench.CASES}) == len(bench.CASES)
    for case in bench.CASES:
        load_config(bench.CONFIG, bench.overrides(case, case.tokens or 4096))
    assert {case.peer for case in bench.CASES} <= {"", *(case.name for case in bench.CASES)}
    assert sum(case.whole_s for case in bench.CASES if case.group == "main") < 530


def test_pairs_lie_on_both_sides_of_the_limit(bench: Any) -> None:
    has = 139.8 * GIB
    for case in [case for case in bench.CASES if case.share]:
        share = bench.need_of(case, bench.tokens_for(case, has)) / has
        assert 0.92 < share < 0.97 if case.name.endswith("-fits") else 1.03 < share < 1.08
