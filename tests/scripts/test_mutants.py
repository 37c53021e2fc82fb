"""Small mistakes: where they can be made, and which tests are asked."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
from loaded_script import load_script

ROOT = Path(__file__).parents[2]
SOURCE = """
LIMIT = 3 * 4


def first(a, b):
    if a < b and a:
        print(a)
    return a - b


@cached
def second():
    return 1
"""


@pytest.fixture
def mutants() -> ModuleType:
    return load_script(ROOT / "scripts" / "mutants.py")


def test_an_operator_is_turned_and_a_call_left_out(mutants: ModuleType) -> None:
    rows = SOURCE.split("\n")
    made = [rows[line - 1][:a] + new + rows[line - 1][b:] for line, a, b, new in mutants.mistakes_in(SOURCE)]
    expected = ["LIMIT = 3 + 4", "    if a <= b and a:", "    if a < b or a:", "        pass", "    return a + b"]
    assert sorted(made) == sorted(expected)
    assert [mutants.function_at(SOURCE, line) for line in (2, 6, 8, 13)] == [0, 5, 5, 11]  # a decorator belongs to it


def test_the_tests_of_a_mistake_are_those_that_enter_its_function(mutants: ModuleType) -> None:
    file, (line, *_) = "clock.py", next(mutants.mistakes_in((mutants.PACKAGE / "clock.py").read_text()))
    function = mutants.function_at((mutants.PACKAGE / file).read_text(), line)
    here = "tests/scripts/test_mutants.py::"
    long, short, broken, gone = (
        here + name
        for name in (
            "test_a_share_is_of_all_that_were_tried",
            "test_the_tests_of_a_mistake_are_those_that_enter_its_function",
            "test_broken",
            "test_that_was_renamed",
        )
    )
    other = "tests/test_public_names.py::test_the_public_names"
    touched = {
        "functions": {f"{file}:{function}": [long, short, other, broken, gone], "x.py:1": ["another"]},
        "times": {long: 2.0, short: 0.1, other: 0.1, broken: 1.0, gone: 0.1},
        "failed": [broken],
    }
    own, others = mutants.tests_for({"file": file, "line": line, "room": "scripts"}, touched)
    assert own[:2] == [short, long]
    assert all("::" not in each for each in own[2:])  # files that the map does not know
    assert others == [other]


def test_a_share_is_of_all_that_were_tried(mutants: ModuleType) -> None:
    known = [{"noticed": who} for who in ("room", "room", "other", "nobody")]
    found = mutants.summary_of(known)
    assert (found["mistakes"], found["by_all"], found["by_room"]) == (4, 0.75, 0.5)
