"""The Makefile: what is installed before what."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def commands_of(target: str, folder: Path) -> str:
    """Returns what make would run for a target on a fresh machine."""
    command = ["make", "--dry-run", f"VENV={folder / 'venv'}", target]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_make_run_installs_nothing_that_only_tests_need(tmp_path: Path) -> None:
    told = commands_of("run", tmp_path)
    assert "installing Paceline" in told
    assert "-e ." in told
    assert "[dev]" not in told


@pytest.mark.parametrize("target", ["test", "check", "docs", "soak", "fuzz"])
def test_targets_that_need_tools_install_them_after_the_package(tmp_path: Path, target: str) -> None:
    told = commands_of(target, tmp_path)
    assert told.index("-e .\n") < told.index("-e '.[dev]'")
