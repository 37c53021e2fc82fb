"""A measured table: what it says between its sizes, and which records it can be read from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.cluster.costs import MeasuredTable, Placement, read_table
from paceline.errors import UsageError

WHERE = Placement(ranks=4, hosts=2)
TABLE = MeasuredTable(
    where=WHERE, points={"native": [(1_000, 0.001), (100_000, 0.1)], "ring": [(1_000, 0.004), (100_000, 0.05)]}
)


def test_seconds_go_through_the_points_and_straight_between_them() -> None:
    assert TABLE.seconds("native", 1_000) == 0.001
    assert TABLE.seconds("native", 10_000) == pytest.approx(0.01)
    assert TABLE.seconds("native", 100_000) == pytest.approx(0.1)
    assert TABLE.seconds("native", 10) == 0.001
    assert TABLE.seconds("native", 300_000) == pytest.approx(0.3)


def test_the_fastest_is_another_one_for_small_and_for_large_messages() -> None:
    assert [TABLE.fastest(size) for size in (1, 5_000, 90_000, 10**9)] == ["native", "native", "ring", "ring"]


@given(st.floats(1, 1e9), st.floats(1, 1e9))
def test_more_bytes_never_take_less(one: float, other: float) -> None:
    low, high = sorted((one, other))
    assert TABLE.seconds("ring", low) <= TABLE.seconds("ring", high) * (1 + 1e-12)


def links_row(arm: str, size: int, ms: float, **more: Any) -> dict[str, Any]:
    row = {"part": "all_reduce", "ranks": 4, "hosts": 2, "arm": arm, "size_bytes": size, "median_ms": ms}
    return row | more


def comm_row(backend: str, algorithm: str, size: int, us: float) -> dict[str, Any]:
    return {"ranks": 4, "bytes": size, "backend": backend, "algorithm": algorithm, "median_us": us}


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text(json.dumps({"name": "links", "rows": rows}))
    return path


def test_a_record_of_links_is_read_for_one_placement(tmp_path: Path) -> None:
    path = write(
        tmp_path / "links.json",
        links_row("ring", 64, 2.0),
        links_row("ring", 8, 1.0),
        links_row("tree", 8, 3.0, hosts=4),
        {"part": "speed_up", "hosts": 2, "ranks": 4, "arm": "ring"},
    )
    assert read_table(path, WHERE) == MeasuredTable(where=WHERE, points={"ring": [(8, 0.001), (64, 0.002)]})


def test_a_record_of_this_machine_is_read_for_what_gloo_did(tmp_path: Path) -> None:
    path = write(
        tmp_path / "comm.json",
        comm_row("gloo", "native", 8, 100.0),
        comm_row("gloo", "hierarchical", 8, 1.0),  # as if on two hosts
        comm_row("shared memory", "native", 8, 1.0),
    )
    where = Placement(ranks=4)
    assert read_table(path, where) == MeasuredTable(where=where, points={"native": [(8, pytest.approx(1e-4))]})


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([links_row("ring", 8, 1.0, hosts=4)], r"no all-reduces of 4 ranks on 2 hosts\n.*ranks on hosts: 4 on 4\n"),
        ([], "ranks on hosts: none"),
        ([links_row("ring", 8, 1.0), links_row("ring", 8, 9.0)], "more than once how long ring takes"),
        ([{"loss": 1.0}], "no record of all-reduces: KeyError"),
    ],
)
def test_a_record_that_does_not_answer_is_refused(tmp_path: Path, rows: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        read_table(write(tmp_path / "table.json", *rows), WHERE)
    assert "paceline bench comm --output FILE" in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", '{"rows": 3}'])
def test_a_file_that_is_no_record_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "table.json"
    path.write_text(text)
    with pytest.raises(UsageError, match="is no record of all-reduces"):
        read_table(path, WHERE)
    with pytest.raises(UsageError, match="No such file or directory"):
        read_table(tmp_path / "missing.json", WHERE)
