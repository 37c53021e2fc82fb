"""A disk that takes no more, and a permission that is gone: older checkpoints stay, and the policy decides."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
from kept_records import Kept

from paceline.checkpoint import list_checkpoints, verify_checkpoint
from paceline.comm.base import Communicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.config import CheckpointConfig, Config, config_from_dict
from paceline.errors import CheckpointError, RankFailedError
from paceline.health.failure import describe_error
from paceline.train.assemble import build_trainer
from paceline.train.step import StepResult
from paceline.train.survive.hooks import Saver
from paceline.train.trainer import Trainer

NOBODY = 65534


class Trouble:
    """Begins behind the steps ``first`` to ``last``, before they are saved. Ranks are threads: once for all of them."""

    def __init__(self, begin: Callable[[], None], end: Callable[[], None], *, first: int, last: int) -> None:
        self.begin, self.end, self.first, self.last = begin, end, first, last

    def __call__(self, _: Trainer, result: StepResult) -> None:
        (self.begin if self.first <= result.step <= self.last else self.end)()


def full_disk(first: int, last: int) -> Trouble:
    """No file grows beyond 64 bytes."""
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(size: int) -> Callable[[], None]:
        return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, most))

    return Trouble(limit(64), limit(most), first=first, last=last)


def lost_permission(folder: Path, first: int, last: int) -> Trouble:
    """Nobody may write into the folder; root, who always may, is somebody else for that time."""
    if os.getuid() == 0:
        try:
            os.seteuid(NOBODY)
        except OSError as error:
            pytest.skip(f"root cannot act for another user here: {error}")
        os.seteuid(0)

    def lose() -> None:
        regain()  # another rank was here before
        folder.chmod(0o500)
        if os.getuid() == 0:
            os.seteuid(NOBODY)

    def regain() -> None:
        if os.getuid() == 0:
            os.seteuid(0)
        folder.chmod(0o700)

    return Trouble(lose, regain, first=first, last=last)


def make_config(steps: int) -> Config:
    return config_from_dict(
        {
            "model": {"kind": "mlp", "hidden_dim": 8},
            "data": {"kind": "synthetic_classification", "samples": 48, "features": 4, "classes": 2},
            "train": {"steps": steps, "global_batch": 12},
        }
    )


def train(
    folder: Path, trouble: Trouble, policy: Literal["stop", "warn"], *, steps: int = 8, in_background: bool = False
) -> list[list[Any]]:
    """Trains on two ranks with a checkpoint every two steps; returns the steps whose save failed, with the reasons."""

    def rank(comm: Communicator) -> list[Any]:
        sink = Kept()
        saver = Saver(folder, CheckpointConfig(every_steps=2, asynchronous=in_background, keep=99), on_full_disk=policy)

        def meet(_: Trainer, result: StepResult) -> None:
            """The trouble meets the saves of its own steps: one in the background is over before, or runs into it."""
            if result.step == trouble.first:
                saver.finish()
            pending = None if saver._writer is None else saver._writer._pending
            if result.step == trouble.last and pending is not None:
                pending.written.wait()

        hooks = [meet, trouble, saver]
        build_trainer(make_config(steps), comm, hooks=hooks, sink=sink).run()
        events = [each for each in sink.events if each.name == "not_saved"]
        return [(each.step, each.detail["reason"]) for each in events]

    folder.mkdir(exist_ok=True)
    try:
        return run_virtual(rank, 2)
    finally:
        trouble.end()


def saved(folder: Path) -> list[int]:
    """Returns the steps of the checkpoints that are there, all of them whole."""
    return [verify_checkpoint(path).step for path in list_checkpoints(folder)]


@pytest.mark.parametrize("in_background", [False, True])
def test_a_run_may_go_on_without_the_checkpoints_that_a_full_disk_does_not_take(
    tmp_path: Path, in_background: bool
) -> None:
    found = train(tmp_path / "saved", full_disk(4, 5), "warn", in_background=in_background)
    assert found[0] == found[1]
    ((step, reason),) = found[0]
    assert step == (6 if in_background else 4)  # behind the next save, before which it is waited for
    assert "File too large" in reason
    assert saved(tmp_path / "saved") == ([2, 8] if in_background else [2, 6, 8])
    assert {path.name[:5] for path in (tmp_path / "saved").iterdir()} == {"step-"}


def test_a_run_stops_at_a_full_disk_and_older_checkpoints_are_whole(tmp_path: Path) -> None:
    with pytest.raises(RankFailedError) as failed:
        train(tmp_path / "saved", full_disk(4, 5), "stop")
    cause = failed.value.__cause__
    assert isinstance(cause, CheckpointError)
    failure = describe_error(failed.value.rank, cause)
    assert failure.kind == "full_disk"
    assert "files may not grow that large here" in failure.message
    assert saved(tmp_path / "saved") == [2]


def test_the_last_checkpoint_must_be_written(tmp_path: Path) -> None:
    with pytest.raises(RankFailedError, match="File too large"):
        train(tmp_path / "saved", full_disk(4, 4), "warn", steps=4)
    assert saved(tmp_path / "saved") == [2]


def test_a_permission_that_is_gone_is_named_and_may_come_back(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    found = train(folder, lost_permission(folder, 4, 5), "warn")
    assert [(step, "Permission denied" in reason) for step, reason in found[0]] == [(4, True)]
    assert found[0] == found[1]
    assert saved(folder) == [2, 6, 8]
    failure = describe_error(0, CheckpointError(found[0][0][1]))
    assert failure.kind == "full_disk"
    assert "the permission to write there is gone" in failure.message


def test_a_preempted_run_saves_also_after_a_save_in_the_background_that_failed(tmp_path: Path) -> None:
    trouble = full_disk(4, 4)

    def rank(comm: Communicator) -> None:
        saver = Saver(tmp_path, CheckpointConfig(every_steps=4, at_end=False, asynchronous=True, keep=99))

        def leave(trainer: Trainer, result: StepResult) -> None:
            if result.step == 4:
                saver._writer._pending.written.wait()  # type: ignore[union-attr]
                comm.barrier()
                trouble.end()
                saver.save_now(trainer)

        build_trainer(make_config(5), comm, hooks=[trouble, saver, leave]).run()

    try:
        run_virtual(rank, 2)
    finally:
        trouble.end()
    assert saved(tmp_path) == [4]
