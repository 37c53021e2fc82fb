"""Real ranks on a disk that is full for a while: a small file system in memory, which only root can mount."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.checkpoint import list_checkpoints, verify_checkpoint
from paceline.health.exit_codes import DONE, FAILED
from paceline.records.records import EventRecord, StepRecord, read_records

pytestmark = [
    pytest.mark.soak,
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),
    pytest.mark.timeout(900),
]

Call = Callable[..., Any]
# Rank 0 fills the disk in step 25, to the last byte, and frees it again in step 55.
CODE = """
import os
import torch

class Filler(torch.optim.SGD):
    def __init__(self, groups, lr, ballast):
        super().__init__(groups, lr=lr)
        self.ballast, self.made = ballast, 0
    def step(self, closure=None):
        self.made += 1
        if self.ballast and os.environ["RANK"] == "0" and self.made == 25:
            with open(self.ballast, "wb", buffering=0) as file:
                assert os.fstatvfs(file.fileno()).f_blocks * 4096 <= 2**24  # the small disk, and no other
                for size in (4096, 1):
                    try:
                        while True:
                            file.write(bytes(size))
                    except OSError:
                        pass
        if self.ballast and os.environ["RANK"] == "0" and self.made == 55:
            os.unlink(self.ballast)
        return super().step(closure)
"""
SETTINGS = ["train.steps=80", "checkpoint.every_steps=10", "checkpoint.keep=99", "recovery.max_restarts=3"]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 16 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder)]
    if not sys.platform.startswith("linux") or shutil.which("mount") is None:
        pytest.skip("needs mount, of Linux")
    mounted = subprocess.run(command, capture_output=True, check=False, text=True)
    if mounted.returncode:
        pytest.skip(f"a file system in memory cannot be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def train(project: Path, disk: Path, call: Call) -> Call:
    (project / "filler.py").write_text(CODE)
    kind = ["optim.kind=filler:Filler", f"optim.args.ballast={disk / 'ballast'}", f"monitor.folder={disk}"]
    return lambda *arguments: call("train", "tiny.yaml", *SETTINGS, *kind, *arguments)


def saved(disk: Path) -> list[int]:
    """Returns the steps of the checkpoints, all of them whole."""
    return [verify_checkpoint(path).step for path in list_checkpoints(disk / "tiny" / "checkpoints")]


@pytest.mark.parametrize("board", ["true", "false"])
def test_a_run_goes_on_without_checkpoints_and_catches_up_with_its_records(disk: Path, train: Call, board: str) -> None:
    called = train("recovery.on_full_disk=warn", f"monitor.tensorboard={board}")
    assert called.code == DONE, called.err
    assert saved(disk) == [10, 20, 60, 70, 80]
    for rank in (0, 1):
        found = list(read_records(disk / "tiny" / "records" / f"rank-{rank}.jsonl"))
        assert [each.step for each in found if isinstance(each, StepRecord)] == list(range(1, 81))
        missed = [each for each in found if isinstance(each, EventRecord) and each.name == "not_saved"]
        assert [each.step for each in missed] == [30, 40, 50]
        assert all("No space left on device" in each.detail["reason"] for each in missed)


def test_a_run_stops_and_goes_on_when_there_is_space(disk: Path, train: Call) -> None:
    called = train("recovery.on_full_disk=stop")
    assert called.code == FAILED
    assert "free some space" in called.err
    assert "restarting" not in called.err
    assert saved(disk) == [10, 20]
    (disk / "ballast").unlink()
    assert train('optim.args.ballast=""', "--resume", "auto").code == DONE
    assert saved(disk) == [10, 20, *range(30, 81, 10)]
