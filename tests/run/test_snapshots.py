"""Runs that go on from snapshots in the memory of their host: real ranks, keepers and launchers that are killed."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from command_runs import LiveRun
from gone_processes import wait_until_gone

from paceline.comm.control.kept import Kept
from paceline.comm.control.wire import SECRET
from paceline.errors import UsageError
from paceline.health.exit_codes import DONE
from paceline.records.records import EventRecord, read_records
from paceline.run.keeper import keeping
from paceline.run.notes import noted_processes
from paceline.run.rendezvous import rendezvous

pytestmark = [
    # torch leaves the files of redirected output to the garbage collector.
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),
    pytest.mark.timeout(600),  # a machine under load takes its time to start processes
]

Call = Callable[..., Any]
MEMORY = Path("/dev/shm")


@pytest.fixture(autouse=True)
def nothing_left() -> Any:
    before = set(MEMORY.iterdir())
    yield
    deadline = time.monotonic() + 60.0
    while not_removed(before):
        assert time.monotonic() < deadline, f"left in memory: {not_removed(before)}"
        time.sleep(0.05)


def not_removed(before: set[Path]) -> set[Path]:
    """Returns what this user's runs have left; other tests may run beside this one."""
    return {
        path for path in set(MEMORY.iterdir()) - before if path.name.startswith("paceline-run-") and is_nobodys(path)
    }


def is_nobodys(path: Path) -> bool:
    return not any(str(path) in " ".join(each.info["cmdline"] or []) for each in psutil.process_iter(["cmdline"]))


def events(folder: Path, name: str, rank: int = 0) -> list[EventRecord]:
    path = folder / "records" / f"rank-{rank}.jsonl"
    found = read_records(path) if path.is_file() else ()
    return [each for each in found if isinstance(each, EventRecord) and each.name == name]


def keeper_of(launcher: psutil.Process) -> psutil.Process:
    found = []
    for each in launcher.children():
        with contextlib.suppress(psutil.NoSuchProcess):  # which has ended, and is not taken leave of yet
            found += [each] if "paceline.run.keeper" in each.cmdline() else []
    assert len(found) == 1
    return found[0]


def test_a_host_whose_memory_takes_no_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.run.keeper.FOLDER", tmp_path / "not there")
    monkeypatch.setenv("PACELINE_SECRET", "x" * 64)
    told = "nothing can be kept in .*: No such file or directory\n.*\n  give .* more room"
    with pytest.raises(UsageError, match=told), keeping(None):
        pass


KILLED = (
    "train.steps=40",
    "checkpoint.memory.every_steps=4",
    "checkpoint.every_steps=1000",
    "recovery.max_restarts=1",
    "--faults",
    "kill:rank=1@step=31",
    "--compare",
    "--json",
)


def test_a_killed_ranks_successors_go_on_from_memory(project: Path, call: Call) -> None:
    called = call("chaos", "tiny.yaml", *KILLED)
    assert called.code == DONE, called.err
    report = json.loads(called.out)
    assert (report["handled"], report["undisturbed"]["is_same"]) == (True, True)
    assert "up to step 40, each once an epoch, in order" in report["samples"]
    assert report["undisturbed"]["samples"] == "the same"
    fault = report["faults"][0]
    assert fault["how"] == "restarted"
    resumed = events(project / "runs" / "tiny-chaos", "resume")[-1]
    assert resumed.detail["checkpoint"].startswith("snapshot:/dev/shm/paceline-run-")
    assert 0 < resumed.step == 30 - fault["lost_steps"]
    assert f"from step {resumed.step} in the memory of hosts (restart 1 of 1)" in called.err


@pytest.mark.exhaustive
@pytest.mark.usefixtures("project")
@pytest.mark.parametrize("strategy", ["zero2", "fsdp", "pipeline"])
def test_losses_are_those_of_a_run_without_the_fault(call: Call, strategy: str) -> None:
    model = ["model={kind: mlp, hidden_dim: 64, dropout: 0.1}", "data={kind: synthetic_classification, samples: 256}"]
    spread = (
        ["parallel.pipeline=2", "train.accumulate=2"] if strategy == "pipeline" else [f"parallel.strategy={strategy}"]
    )
    settings = (*model, *spread)
    called = call("chaos", "tiny.yaml", *settings, *KILLED)
    assert called.code == DONE, called.err
    report = json.loads(called.out)
    assert report["undisturbed"]["is_same"]
    assert report["faults"][0]["how"] == "restarted"
    assert "in the memory of hosts" in called.err


def test_a_keeper_that_is_killed_is_started_again_and_holds_what_was_kept(
    project: Path, live: Callable[..., LiveRun]
) -> None:
    run = live("checkpoint.memory.every_steps=5", "checkpoint.every_steps=100000", "recovery.max_restarts=3")
    folder = project / "runs" / "tiny"
    run.wait_until(lambda: len(events(folder, "snapshot")) >= 2)
    keeper = keeper_of(psutil.Process(run.process.pid))
    keeper.kill()
    wait_until_gone([keeper.pid])
    known = len(events(folder, "snapshot"))
    run.wait_until(lambda: len(events(folder, "snapshot")) > known + 1)
    os.kill(noted_processes(folder)[1], signal.SIGKILL)
    run.wait_until(lambda: bool(events(folder, "resume")))
    assert events(folder, "resume")[0].detail["checkpoint"].startswith("snapshot:")
    assert events(folder, "no_snapshots") == []
    run.process.send_signal(signal.SIGINT)
    run.wait()


def test_a_keeper_that_is_stopped_is_replaced_and_snapshots_go_on(project: Path, live: Callable[..., LiveRun]) -> None:
    run = live("checkpoint.memory.every_steps=5", "checkpoint.every_steps=100000")
    folder = project / "runs" / "tiny"
    run.wait_until(lambda: len(events(folder, "snapshot")) >= 2)
    keeper = keeper_of(psutil.Process(run.process.pid))
    keeper.suspend()
    wait_until_gone([keeper.pid])
    known = len(events(folder, "snapshot"))
    run.wait_until(lambda: len(events(folder, "snapshot")) > known + 1)
    assert keeper_of(psutil.Process(run.process.pid)).pid != keeper.pid
    run.process.send_signal(signal.SIGINT)
    run.wait()


def test_the_keeper_of_another_run_with_the_same_secret_is_told_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a host is lost, and its port goes to a run of the same user."""
    monkeypatch.setenv(SECRET, secrets.token_hex(32))
    with contextlib.ExitStack() as stack:
        found = []
        for name in ("own", "other"):
            (tmp_path / name).mkdir()
            met = stack.enter_context(rendezvous(tmp_path / name, name, None))
            keeper = stack.enter_context(keeping(None))
            assert keeper is not None
            found.append((Kept(keeper.root), keeper, met))
        for _, keeper, met in found:
            keeper.meet(0, 1, met)
        (own, keeper, met), (_, other, _) = found
        keeper.meet(0, 1, met)  # as in its next attempt
        with own.asking(keeper.address) as ask:
            assert ask("held") == {}
        with pytest.raises(OSError, match="the secrets differ"), own.asking(other.address) as ask:
            ask("held")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_is_left_when_the_launcher_goes(
    project: Path, live: Callable[..., LiveRun], number: signal.Signals
) -> None:
    run = live("checkpoint.memory.every_steps=5")
    run.wait_until(lambda: bool(events(project / "runs" / "tiny", "snapshot")))
    launcher = psutil.Process(run.process.pid)
    keeper = keeper_of(launcher)
    root = Path(keeper.cmdline()[-2])
    assert root.is_dir()
    run.process.send_signal(number)
    run.wait()
    wait_until_gone([keeper.pid])
    assert not root.parent.exists()
