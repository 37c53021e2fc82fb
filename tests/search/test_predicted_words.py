"""Predicted beside measured in words, what a file of expectations may hold, and clusters of other sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.cluster.devices import load_cluster
from paceline.errors import UsageError
from paceline.search.candidates import resized
from paceline.search.expectation import FILE, Compared, Expectation, compare, read_expectation


def lines_of(expected: dict[str, Any], step_s: float | None, memory: int | None = None) -> list[str]:
    return compare(Expectation(**expected), step_s, memory).lines()


@pytest.mark.parametrize(
    ("expected", "step_s", "words"),
    [
        ({"step_s": 2.0}, 2.0, "predicted 2.00 s a step, measured 2.00 s: as predicted"),
        ({"step_s": 2.0}, 3.0, "predicted 2.00 s a step, measured 3.00 s: 50 % more"),
        ({"step_s": 2.0}, 1.0, "predicted 2.00 s a step, measured 1.00 s: 50 % less"),
        ({"step_s": 2.0}, 20.0, "predicted 2.00 s a step, measured 20.00 s: 10 times as much"),
        ({"step_s": 0.25}, 0.5, "predicted 250.0 ms a step, measured 500.0 ms: 100 % more"),
        ({"step_s": 60.0}, 120.0, "predicted 1 min 0 s a step, measured 2 min 0 s: 100 % more"),
        ({"step_s": 2.0, "is_later": True}, 2.0, "predicted 2.00 s a step while it ran, measured 2.00 s: as predicted"),
        (
            {"step_s": 2.0, "step_s_low": 1.0, "step_s_high": 2.5},
            2.5,
            "predicted 2.00 s a step (band 25 %), measured 2.50 s: 25 % more",
        ),
        (
            {"step_s": 2.0, "step_s_low": 1.0, "step_s_high": 2.5},
            1.0,
            "predicted 2.00 s a step (band 25 %), measured 1.00 s: 50 % less",
        ),
        (
            {"step_s": 2.0, "step_s_low": 1.0, "step_s_high": 2.5},
            3.0,
            "predicted 2.00 s a step (band 25 %), measured 3.00 s: 50 % more, outside the band",
        ),
        (
            {"step_s": 2.0, "step_s_low": 1.5, "step_s_high": 2.5},
            1.0,
            "predicted 2.00 s a step (band 25 %), measured 1.00 s: 50 % less, outside the band",
        ),
    ],
)
def test_predicted_beside_measured(expected: dict[str, Any], step_s: float, words: str) -> None:
    assert lines_of(expected, step_s) == [words]


def test_memory_and_a_later_prediction_are_told_too() -> None:
    later = Expectation(step_s=4.0, is_later=True)
    told = lines_of({"step_s": 2.0, "memory_bytes": 2**30, "later": later}, 2.0, 3 * 2**29)
    assert told == [
        "predicted 2.00 s a step, measured 2.00 s: as predicted",
        "predicted 1.0 GiB of memory a rank, measured 1.5 GiB: 50 % more",
        "predicted 4.00 s a step while it ran, measured 2.00 s: 50 % less",
    ]


@pytest.mark.parametrize(("step_s", "memory"), [(None, None), (0.0, 0)])
def test_what_was_not_measured_is_not_compared(step_s: float | None, memory: int | None) -> None:
    found: Compared = compare(Expectation(step_s=2.0, memory_bytes=2**30), step_s, memory)
    assert (found.lines(), found.step_ratio, found.memory_ratio, found.measured_step_s) == ([], None, None, None)
    nothing = compare(Expectation(), 1.0, 1)
    assert (nothing.lines(), nothing.step_ratio, nothing.memory_ratio) == ([], None, None)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([], "it is not an object with the keys"),
        ({"other": 1}, "it is not an object with the keys"),
        ({"step_s": 0}, "step_s is 0, and not a number above 0"),
        ({"step_s": True}, "step_s is True, and not a number above 0"),
        ({"step_s_low": -1.0}, "step_s_low is -1.0, and not a number above 0"),
        ({"memory_bytes": "x"}, "memory_bytes is 'x', and not a number above 0"),
        ({"step_s_high": "Infinity"}, "step_s_high is 'Infinity', and not a number above 0"),
        ({"assumed": "x"}, "assumed is a list of texts"),
        ({"assumed": [3]}, "assumed is a list of texts"),
        ({"fitted": 1}, "fitted and is_later are true or false"),
        ({"reason": 3}, "and reason is text"),
        ({"later": {"later": {}}}, "later has a later one of its own"),
        ({"later": {"step_s": 0}}, "step_s is 0"),
    ],
)
def test_a_file_that_holds_something_else_is_a_reason_for_none(values: Any, words: str, tmp_path: Path) -> None:
    assert read_expectation(tmp_path) is None
    (tmp_path / FILE).write_text(json.dumps(values))
    found = read_expectation(tmp_path)
    assert found is not None
    assert found.reason.startswith(f"{tmp_path / FILE} cannot be read: ")
    assert words in found.reason


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    values = {"step_s": 2.0, "assumed": ["a"], "fitted": True, "later": {"step_s": 3.0, "is_later": True}}
    (tmp_path / FILE).write_text(json.dumps(values))
    found = read_expectation(tmp_path)
    assert found is not None
    assert (found.step_s, found.assumed, found.fitted) == (2.0, ("a",), True)
    assert found.later is not None
    assert (found.later.step_s, found.later.is_later) == (3.0, True)


@pytest.mark.parametrize(("devices", "name", "nodes"), [(1, "1 of", 1), (8, "8 of", 1), (16, "2x", 2), (24, "3x", 3)])
def test_a_part_of_a_node_or_whole_nodes(devices: int, name: str, nodes: int) -> None:
    found = resized(load_cluster("2x dgx-h100"), devices)
    assert found.name.startswith(f"{name} ")
    assert (found.nodes, found.devices) == (nodes, devices)


@pytest.mark.parametrize(("devices", "fix"), [(0, "8"), (9, "8 or 16"), (-3, "8"), (20, "16 or 24")])
def test_devices_that_fill_no_whole_nodes_are_refused(devices: int, fix: str) -> None:
    with pytest.raises(UsageError) as told:
        resized(load_cluster("2x dgx-h100"), devices)
    assert str(told.value).startswith(f"{devices} devices of ")
    assert str(told.value).endswith(f"\n  try {fix}")
