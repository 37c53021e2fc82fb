"""What keeps a process from running, and what a watch makes of it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from paceline.comm.ledger.file import PID, ledger_path
from paceline.comm.ledger.ledger import Ledger
from paceline.health.verdict import HangLimits, HangVerdict
from paceline.run.seen_ranks import ProcessState, look_at_process
from paceline.run.watch import Watch, WatchPolicy

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
FREEZERS = {"freezer": ("freezer.state", "FROZEN", "THAWED"), "unified": ("cgroup.freeze", "1", "0")}


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"]) as started:
        yield started
        started.kill()


def wait_for(pid: int, halted: str) -> ProcessState:
    """Waits until a process shows as asked; the test's own limit ends it otherwise."""
    while (found := look_at_process(pid)) is None or not found.halted.startswith(halted):
        time.sleep(0.01)
    return found


def test_a_stopped_process_shows_the_signal(process: subprocess.Popen[bytes]) -> None:
    found = look_at_process(process.pid)
    assert found is not None
    assert not found.halted
    process.send_signal(signal.SIGSTOP)
    assert wait_for(process.pid, "stopped").halted == "stopped (SIGSTOP)"
    process.send_signal(signal.SIGCONT)
    while wait_for(process.pid, "").halted:
        time.sleep(0.01)


def test_a_process_in_a_debugger_shows_who_holds_it(process: subprocess.Popen[bytes]) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.ptrace(16, process.pid, 0, 0):  # PTRACE_ATTACH
        pytest.skip("no process may be traced here")
    found = wait_for(process.pid, "held")
    assert f"process {os.getpid()})" in found.halted


def test_a_process_that_has_ended_is_told_apart_from_one_that_waits(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    while look_at_process(process.pid) is not None:  # a zombie, until it is waited for
        time.sleep(0.01)
    process.wait()
    assert look_at_process(process.pid) is None


@pytest.mark.parametrize("kind", list(FREEZERS))
def test_a_frozen_cgroup_is_named(process: subprocess.Popen[bytes], kind: str) -> None:
    name, frozen, thawed = FREEZERS[kind]
    group = Path("/sys/fs/cgroup") / kind / f"paceline-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / "cgroup.procs").write_text(str(process.pid))
        (group / name).write_text(frozen)
    except OSError:
        with contextlib.suppress(OSError):
            group.rmdir()
        pytest.skip("cgroups cannot be written here")
    try:
        assert wait_for(process.pid, "frozen").halted == f"frozen (cgroup /{group.name})"
    finally:
        (group / name).write_text(thawed)
        process.kill()
        process.wait()
        group.rmdir()


def look_twice(folder: Path, ranks: int = 2) -> HangVerdict | None:
    """Looks as a watch does that allows no standstill at all, until two looks agree."""
    watch = Watch(folder, {"a": range(ranks)}, WatchPolicy(limits=HangLimits(step_s=0.0, setup_s=100.0)), host="a")
    deadline = time.monotonic() + 30.0
    found = None
    while found is None and time.monotonic() < deadline:
        found = watch.look()
        time.sleep(0.02)
    return found


def test_a_stopped_rank_is_told_whatever_it_was_doing(
    tmp_path: Path, process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a checkpoint, which may take long, and with the other rank in no operation of theirs."""
    monkeypatch.setattr("paceline.run.seen_ranks.ask_for_stacks", lambda _: {})
    monkeypatch.setattr("time.time", count(1e9, -86_400).__next__)  # the clock on the wall jumps: no limit goes by it
    ledgers = [Ledger(rank=rank, world=2, path=ledger_path(tmp_path, rank)) for rank in range(2)]
    ledgers[1].cells[PID] = process.pid
    for ledger in ledgers:
        ledger.count_step()
        ledger.enter("checkpoint")
    process.send_signal(signal.SIGSTOP)
    found = look_twice(tmp_path)
    assert found is not None
    assert (found.kind, found.ranks) == ("stopped", (1,))
    assert found.sentence.startswith("rank 1 is stopped (SIGSTOP) in phase checkpoint (step 1), for ")


def test_a_rank_that_is_stopped_before_it_joins_is_told(tmp_path: Path, process: subprocess.Popen[bytes]) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-0.pid").write_text(f"{os.getpid()}\n")
    (tmp_path / "logs" / "rank-1.pid").write_text(f"{process.pid}\n")
    process.send_signal(signal.SIGSTOP)
    found = look_twice(tmp_path)
    assert found is not None
    assert (found.kind, found.ranks) == ("stopped", (1,))
    assert "rank 1 is stopped (SIGSTOP) before it joined the others" in found.sentence
