"""The part of a matrix that the default run takes: every value of every axis, and what is always wanted."""

from __future__ import annotations

import pytest
from covering import covering


def cases(mark: pytest.MarkDecorator) -> dict[str, bool]:
    """Returns the names of all cases, and whether the default run takes them."""
    return {case.id: not case.marks for case in mark.args[1]}


def test_every_value_of_every_axis_is_taken_and_nothing_is_lost() -> None:
    found = cases(covering(model=["a", "b", "c"], strategy=["x", "y", "z", "w"], flag=[True, False]))
    assert len(found) == 24
    taken = [name.split("-") for name, is_taken in found.items() if is_taken]
    assert len(taken) == 4
    assert [set(values) for values in zip(*taken, strict=True)] == [set("abc"), set("xyzw"), {"True", "False"}]


def test_what_is_always_wanted_is_taken_with_everything() -> None:
    found = cases(covering(always={"kind": [int], "size": [2]}, kind=[int, str, list], size={"one": 1, "2": 2}))
    assert [name for name, is_taken in found.items() if not is_taken] == ["str-one"]
    assert len(found) == 6


def test_a_dict_names_its_values() -> None:
    mark = covering(shares={"even": [4, 4], "ragged": [1, 7]}, ranks=[2])
    assert mark.args[0] == ("shares", "ranks")
    assert [(case.id, case.values) for case in mark.args[1]] == [("even-2", ([4, 4], 2)), ("ragged-2", ([1, 7], 2))]
