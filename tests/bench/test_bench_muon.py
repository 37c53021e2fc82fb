"""The benchmark of Muon: both arms train, and rows say which is which."""

from __future__ import annotations

from dataclasses import replace

import pytest

from measures.muon import CPU, KINDS, bench_muon
from paceline_bench.arms import BenchWorkload
from paceline_bench.timing import Turns

pytestmark = pytest.mark.exhaustive


def test_both_arms_take_turns() -> None:
    small = BenchWorkload(model="gpt-nano", batch=2, context=8)
    asked = replace(CPU["gpt-mini"], workload=small, turns=Turns(rounds=2, steps_per_turn=1, warm_up=1))
    rows = bench_muon(asked, 2, "zero2")
    assert [row["arm"] for row in rows] == list(KINDS)
    assert {row["tokens"] for row in rows} == {32}
    assert rows[0]["ratio"] == 1.0
