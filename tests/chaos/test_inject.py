"""Faults that leave the process alive, on virtual ranks: they come where the plan says, once, and are told."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from kept_records import Kept

from paceline.chaos.faults import Fired, Passed, parse_faults, read_notes, write_plan
from paceline.chaos.inject import InjectedError, Injector, listens, victims
from paceline.checkpoint import list_checkpoints, verify_checkpoint
from paceline.comm.base import Communicator
from paceline.comm.control import kept as control_kept
from paceline.comm.control.wire import Address, listen
from paceline.comm.virtual.communicator import run_virtual
from paceline.config import CheckpointConfig, config_from_dict
from paceline.errors import CheckpointError, MemoryExhaustedError, RankFailedError
from paceline.train.assemble import build_trainer
from paceline.train.survive.hooks import ConsensusHook, Saver
from paceline.train.survive.recovery import StopRequest
from paceline.train.survive.snapshots import Snapshots
from paceline.train.trainer import Trainer

STEPS = 8


@pytest.fixture(autouse=True)
def fast_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda _: None)


def run(folder: Path, faults: str, *, on_full_disk: Any = "stop") -> list[Kept]:
    """Runs two virtual ranks with faults, saving every two steps; returns their records."""
    (folder / "plan").mkdir(exist_ok=True)
    write_plan(folder / "plan", 3, parse_faults(faults))
    config = config_from_dict(
        {
            "model": {"kind": "mlp", "hidden_dim": 8},
            "data": {"kind": "synthetic_classification", "samples": 48, "features": 4, "classes": 2},
            "train": {"steps": STEPS, "global_batch": 12},
        }
    )

    kept = control_kept.Kept(folder / "snapshots")
    if not kept.root.exists():
        kept.make(b"0" * 64)
        kept.write_keepers(0, [Address(str(folder / "keeper"))])

    def work(comm: Communicator) -> Kept:
        sink = Kept()
        injector = Injector(folder / "plan", comm.rank, folder / "checkpoints")
        policy = CheckpointConfig(every_steps=2, keep=99, asynchronous=False)
        saver = Saver(folder / "checkpoints", policy, storage=injector.storage(), on_full_disk=on_full_disk)
        snapshots = Snapshots(kept.root, 2)
        consensus = ConsensusHook(StopRequest(), lambda _: None, config.recovery, snapshots)
        hooks = [saver, snapshots, lambda *_: snapshots.join(), consensus]  # steps are shorter than a snapshot
        trainer: Trainer = build_trainer(config, comm, hooks=hooks, sink=sink)
        injector.attach(trainer)
        trainer.run()
        return sink

    return run_virtual(work, 2)


def fired(folder: Path) -> list[tuple[int, int, int]]:
    return [(each.number, each.rank, each.step) for each in read_notes(folder / "plan", Fired)]


def losses(kept: Kept) -> list[float]:
    return [record.loss_sum for record in kept.steps]


def test_losses_are_changed_in_one_step_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    plain = run(tmp_path / "plain", "slow:rank=1x1.5:steps=1@step=2")
    assert fired(tmp_path / "plain") == [(0, 1, 2)]
    found = run(tmp_path, "spike:x100@step=3,nan@step=5")
    assert losses(found[0])[2] == pytest.approx(100 * losses(plain[0])[2])
    skipped = [each.step for each in found[0].events if each.name == "skipped"]
    assert skipped == [5]
    bad = [each.step for each in found[1].steps if each.is_skipped]
    assert bad == [5]
    assert sorted(fired(tmp_path)) == [(0, 0, 3), (0, 1, 3), (1, 0, 5), (1, 1, 5)]
    assert len(losses(found[0])) == STEPS


@pytest.mark.parametrize(
    ("fault", "error"), [("exception:rank=1:phase=backward", InjectedError), ("oom:rank=1", MemoryExhaustedError)]
)
def test_errors_come_in_their_step_and_once(tmp_path: Path, fault: str, error: type[Exception]) -> None:
    with pytest.raises(RankFailedError) as failed:
        run(tmp_path, f"{fault}@step=4")
    assert failed.value.rank == 1
    assert isinstance(failed.value.__cause__, error)
    assert fired(tmp_path) == [(0, 1, 4)]
    run(tmp_path, f"{fault}@step=4")
    assert fired(tmp_path) == [(0, 1, 4)]
    assert [(each.number, each.step, each.is_later) for each in read_notes(tmp_path / "plan", Passed)] == [(0, 4, True)]


@pytest.mark.parametrize(("fault", "why"), [("disk-full", "No space left"), ("unwritable", "Permission denied")])
def test_a_disk_that_fails_leaves_older_checkpoints_whole(tmp_path: Path, fault: str, why: str) -> None:
    with pytest.raises(RankFailedError) as failed:
        run(tmp_path, f"{fault}:rank=1@step=5")
    assert isinstance(failed.value.__cause__, CheckpointError)
    assert why in str(failed.value.__cause__)
    assert "rank 1" in str(failed.value.__cause__)
    assert fired(tmp_path) == [(0, 1, 6)]
    found = list_checkpoints(tmp_path / "checkpoints")
    assert [verify_checkpoint(path).step for path in found] == [2, 4]


def test_a_run_that_may_goes_on_without_a_checkpoint(tmp_path: Path) -> None:
    found = run(tmp_path, "disk-full:rank=1@step=3", on_full_disk="warn")
    for kept in found:
        told = [each for each in kept.events if each.name == "not_saved"]
        assert [each.step for each in told] == [4]
        assert "No space left" in told[0].detail["reason"]
    assert [int(path.name[-8:]) for path in list_checkpoints(tmp_path / "checkpoints")] == [2, 6, 8]


def test_memory_that_is_full_ends_snapshots_and_nothing_else(tmp_path: Path) -> None:
    found = run(tmp_path, "memory-full:rank=1@step=3")
    assert [(number, rank) for number, rank, _ in fired(tmp_path)] == [(0, 1)]
    told = [[each for each in kept.events if each.name == "no_snapshots"] for kept in found]
    assert [len(each) for each in told] == [1, 1]
    assert "No space left" in told[1][0].detail["reason"]
    assert told[0][0].detail["reason"] == "another rank could not keep its part"
    assert len(losses(found[0])) == STEPS


LAUNCHER = """
import subprocess, sys
sleep = "import time; time.sleep(600)"
keeper = subprocess.Popen([sys.executable, "-c", sleep, "paceline.run.keeper"])
other = subprocess.Popen([sys.executable, "-c", sleep])
print(keeper.pid, other.pid, flush=True)
keeper.wait()
"""


def test_who_dies_by_a_fault() -> None:
    own = os.getpid()
    with subprocess.Popen([sys.executable, "-c", LAUNCHER], stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        keeper, other = map(int, launcher.stdout.readline().split())
        try:
            assert victims("kill-keeper", 1, launcher.pid, {}) == [keeper]
            assert victims("kill-launcher", 1, launcher.pid, {}) == [launcher.pid]
            assert sorted(victims("kill-host", 1, launcher.pid, {})) == sorted([launcher.pid, keeper, other])
        finally:
            for pid in (other, keeper):
                os.kill(pid, signal.SIGKILL)
    assert victims("kill-two", 0, 0, {0: own, 1: 12, 2: 13}) == [12, own]
    assert victims("kill-two", 2, 0, {0: 11, 1: 12, 2: own}) == [11, own]
    assert victims("kill-in-recovery", 0, 0, {0: own, 1: 12}) == [own]


def test_a_launcher_is_known_by_the_port_where_hosts_meet() -> None:
    with listen(Address("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert listens(os.getpid(), port)
    assert not listens(os.getpid(), port)
    assert listens(os.getpid(), None)  # it is alone
