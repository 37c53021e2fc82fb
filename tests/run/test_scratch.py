"""Temporary folders of launchers: their user's alone, and removed by the next one where a process was killed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from paceline.run import signals
from paceline.run.signals import scratch_folder

HOLD = """
import sys
from paceline.run.signals import scratch_folder
with scratch_folder() as path:
    print(path, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_the_folder_of_a_killed_process_is_removed_by_the_next_start(temporary: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD],
        env={**os.environ, "TMPDIR": str(temporary)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        held = Path(process.stdout.readline().strip())
        (held / "ranks").touch()
        with scratch_folder() as own:
            assert held.is_dir()  # it is in use
            assert own.stat().st_mode & 0o777 == 0o700
        process.kill()
    with scratch_folder() as own:
        assert list(temporary.iterdir()) == [own]
    assert list(temporary.iterdir()) == []


def test_a_process_that_leaves_at_once_removes_its_folders_and_no_others(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with scratch_folder() as own, scratch_folder() as other:
        monkeypatch.setitem(signals._HELD, other, os.getppid())  # as after a fork
        (own / "ranks").touch()
        signals.remove_held()
        assert list(temporary.iterdir()) == [other]
    assert list(temporary.iterdir()) == []


def test_folders_of_others_and_folders_that_are_being_made_stay(temporary: Path) -> None:
    new, old, foreign, link = (temporary / name for name in ("paceline-run-1", "paceline-run-2", "paceline-3", "x"))
    for each in (new, old, foreign, link):
        each.mkdir()
    (temporary / "paceline-run-link").symlink_to(link)
    os.utime(old, (0, time.time() - 120))
    with scratch_folder():
        pass
    left = ["paceline-3", "paceline-run-1", "paceline-run-link", "x"]
    assert sorted(path.name for path in temporary.iterdir()) == left
