"""What editors and mypy know of public names: the module behind an engine, its call, and the words of strategies."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

import paceline
from paceline.config.schema import ParallelConfig
from paceline.plan.layout import StrategyName

ROOT = Path(__file__).parents[1]
SAMPLE = ROOT / "tests" / "pool" / "typed_loop.py"


def test_one_definition_names_the_strategies() -> None:
    assert ParallelConfig.model_fields["strategy"].annotation == StrategyName
    assert get_args(get_type_hints(paceline.parallelize)["strategy"])[0] == StrategyName
    assert get_type_hints(paceline.verify)["strategy"] == StrategyName


def test_the_package_says_that_it_is_typed() -> None:
    assert (Path(paceline.__file__).parent / "py.typed").is_file()


@pytest.mark.exhaustive
def test_a_checker_knows_the_module_behind_an_engine() -> None:
    pytest.importorskip("mypy")
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", str(SAMPLE)]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    told = {int(line.split(":")[1]) for line in found.splitlines() if "typed_loop.py" in line and " error: " in line}
    lines = SAMPLE.read_text().splitlines()
    assert told == {number for number, line in enumerate(lines, start=1) if line.endswith("# wrong")}, found
