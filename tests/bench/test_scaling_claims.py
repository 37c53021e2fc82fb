"""Predictions beside claims: the page shows what the script prints, and what the page says of the claims is so."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest
from loaded_script import load_script

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "bench" / "scaling_claims.py"
ALONE = """
import runpy, sys
runpy.run_path(sys.argv[1], run_name="__main__")
assert not {"torch", "numpy", "matplotlib"} & set(sys.modules)
"""


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script(SCRIPT)


@pytest.mark.exhaustive
def test_the_page_shows_what_the_script_prints() -> None:
    run = subprocess.run([sys.executable, "-c", ALONE, str(SCRIPT)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    page = (ROOT / "docs" / "scaling-claims.md").read_text(encoding="utf-8")
    lines = [line for line in run.stdout.splitlines() if line]
    assert len(lines) == 29  # titles, tables, and the sentences below them
    shown = iter(line.removeprefix("## ") for line in page.splitlines())
    assert [line for line in lines if line not in shown] == []  # all of them, in this order


def test_what_the_page_says_of_the_claims(script: ModuleType) -> None:
    lost = {count: 100 * (1 - rate / count / 1150) for count, rate, _, _ in script.RESNET}
    share = {count: communication for count, _, _, communication in script.RESNET}
    assert all((lost[count] > share[count]) == (count > 16) for count in lost if count > 1)
    assert [rate / count for count, rate, _, _ in script.RESNET[4:]] == [1015, 960, 880, 820, 720]
    memory = [row[2] for row in script.LANGUAGE_MODEL]
    assert [more - less for more, less in pairwise(memory)] == [6, 4, 3]
    alone = [rate / count / efficiency * 100 for count, rate, _, efficiency in script.LANGUAGE_MODEL]
    assert (round(min(alone)), round(max(alone))) == (5921, 6039)
    assert 6 * 6e9 * 45000 / 8 > 200e12


@pytest.mark.exhaustive
def test_a_slow_network_costs_most_at_the_first_step_out_of_a_node(script: ModuleType) -> None:
    slow = script.load_cluster("32x dgx-1 over ethernet-25g")
    found = [point.efficiency for point in script.convolutional(slow, "fp16", [8, 16, 256])]
    assert found[0] - found[1] > 3 * (found[1] - found[2])
    freed = [point.memory_bytes for point in script.language(script.load_cluster("8x dgx-a100"), "bf16", [8, 16, 64])]
    assert freed[0] - freed[1] == pytest.approx(script.LANGUAGE.params * script.STATE_BYTES / 16)
    assert freed[1] - freed[2] == pytest.approx(0.75 * (freed[0] - freed[1]))
