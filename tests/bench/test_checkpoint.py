"""The benchmark of checkpoints on a model of a few weights: a row for every arm, and both load what they saved."""

from __future__ import annotations

import pytest

from measures.checkpoint import CheckpointWorkload, bench_checkpoint


@pytest.mark.exhaustive
def test_every_arm_is_timed_beside_dcp() -> None:
    work = CheckpointWorkload(size="gpt-nano", layers=1, vocabulary=32, ranks=2, load_ranks=(1,), rounds=2)
    rows = bench_checkpoint(work)
    assert [(row["what"], row["arm"]) for row in rows] == [
        ("save", "paceline at once"),
        ("save", "paceline in background"),
        ("save", "torch DCP at once"),
        ("save", "torch DCP in background"),
        ("load 2 to 1", "paceline"),
        ("load 2 to 1", "paceline, hashes compared"),
        ("load 2 to 1", "torch DCP"),
    ]
    for row in rows:
        assert row["median_ms"] > 0
        assert row["ratio_low"] <= row["ratio"] <= row["ratio_high"]
        if row["arm"].startswith("torch"):
            assert row["ratio"] == 1.0
    assert [row["stall_of_at_once"] for row in rows[:1]] == [1.0]
