"""The benchmark of loading: what its rows say, what it refuses, and a small folder that every arm loads."""

from __future__ import annotations

import pytest
import torch

from measures.load import LoadedState, LoadWorkload, bench_load, check_same, make_rows, sums_of
from paceline.errors import TrainingError


def loaded(seconds: float, memory_bytes: int, total: float = 1.0) -> LoadedState:
    return LoadedState(seconds=seconds, memory_bytes=memory_bytes, private_bytes=memory_bytes // 2, sums=(total, total))


def test_the_slowest_and_the_largest_rank_count() -> None:
    rows = make_rows(
        {
            "paceline": [[loaded(1.0, 30), loaded(2.0, 20)], [loaded(3.0, 40), loaded(1.0, 20)]],
            "accelerate": [[loaded(4.0, 90), loaded(3.0, 60)], [loaded(4.0, 80), loaded(4.0, 40)]],
            "transformers": [[loaded(8.0, 90), loaded(2.0, 90)], [loaded(4.0, 80), loaded(4.0, 80)]],
        }
    )
    ours = rows[0]
    assert (ours["median_s"], ours["ratio"], ours["memory_bytes"]) == (2.5, 0.625, [35, 20])
    assert ours["memory_ratio"] == round((30 / 90 + 40 / 80) / 2, 4)
    assert (ours["private_bytes"], ours["private_ratio"]) == ([17, 10], ours["memory_ratio"])
    assert [(row["arm"], row["peer"], row["ratio"]) for row in rows[1:]] == [
        ("accelerate", "accelerate", 1.0),
        ("transformers", "accelerate", 1.5),
    ]


def test_without_accelerate_ratios_are_to_the_plain_way() -> None:
    rows = make_rows({"paceline": [[loaded(1.0, 10)]], "transformers": [[loaded(2.0, 20)]]})
    assert [(row["peer"], row["ratio"], row["memory_ratio"]) for row in rows] == [
        ("transformers", 0.5, 0.5),
        ("transformers", 1.0, 1.0),
    ]


def test_arms_that_hold_other_values_are_told() -> None:
    same = [[loaded(1.0, 10, 2.0), loaded(1.0, 10, 3.0)]]
    check_same({"paceline": same, "transformers": [[loaded(1.0, 10, 5.0)]]})
    with pytest.raises(TrainingError, match="transformers has loaded other values than paceline"):
        check_same({"paceline": same, "transformers": [[loaded(1.0, 10, 5.1)]]})
    assert sums_of([torch.tensor([1.0, 2.0]), torch.tensor([[3.0]])]) == (6.0, 14.0)


@pytest.mark.exhaustive
def test_every_arm_loads_the_folder() -> None:
    rows = bench_load(LoadWorkload(mib=2, dtype="bfloat16", rounds=1))
    assert {"paceline", "accelerate", "transformers"} == {row["arm"] for row in rows}
    assert {row["folder_bytes"] for row in rows} == {2 * (16 * (4 * 64**2 + 3 * 64 * 170 + 128) + 64 + 2 * 1024 * 64)}
    for row in rows:
        assert "error" in row or (row["median_s"] > 0 and len(row["memory_bytes"]) == 2)
