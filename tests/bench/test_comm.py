"""The benchmark of collectives: a row for every size and arm, on real ranks."""

from __future__ import annotations

import pytest

from paceline.comm.shared.segment import FOLDER
from paceline.errors import UsageError
from paceline_bench.comm import GLOO, bench_comm

ALGORITHMS = {"ring", "tree", "halving_doubling"}


@pytest.mark.exhaustive
@pytest.mark.skipif(not FOLDER.is_dir(), reason="the system has no /dev/shm")
def test_every_backend_and_algorithm_is_timed_beside_gloo() -> None:
    rows = bench_comm(2, [4096], rounds=1)
    assert {row["algorithm"] for row in rows if row["backend"] == "gloo"} == {"native", *ALGORITHMS}
    assert {row["algorithm"] for row in rows if row["backend"] == "shared_memory"} >= ALGORITHMS
    assert "shared_memory in Python" in {row["backend"] for row in rows}
    assert [row["speedup"] for row in rows if row["arm"] == GLOO] == [1.0]
    for row in rows:
        assert row["gbps"] == pytest.approx(8 * 4096 / row["median_us"] / 1e3, rel=0.1, abs=1e-3)


def test_sizes_that_are_no_whole_elements_are_refused() -> None:
    with pytest.raises(UsageError, match=r"sizes \[3, 10\]"):
        bench_comm(2, [3, 8, 10])
