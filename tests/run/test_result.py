"""How a run ends: what ranks that were ended have left is cleared."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from paceline.run.notes import RunStoppedError
from paceline.run.train import clearing_saves


def test_a_run_that_is_ended_in_a_save_leaves_nothing_of_it(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    for name in (".step-00000003.old", ".step-00000004.1a2b3c4d", ".other"):
        (folder / name).mkdir(parents=True)
    with pytest.raises(RunStoppedError), clearing_saves(folder):
        raise RunStoppedError(signal.SIGINT)
    assert [path.name for path in folder.iterdir()] == [".other"]
