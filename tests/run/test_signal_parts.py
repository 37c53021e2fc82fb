"""Signals, threads beside a block and scratch folders, one part at a time, in this process."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from paceline.run import signals
from paceline.run.seen_ranks import ProcessState, look_at_process
from paceline.run.signals import (
    ENDING,
    PREEMPTING,
    hear_requests,
    interrupts_withheld,
    launcher_signals,
    leave_early,
    polling,
    scratch_folder,
    signals_ignored,
    start_thread,
)

HANDLED = (*ENDING, *PREEMPTING)


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in HANDLED}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def send(number: int) -> None:
    handler = signal.getsignal(number)
    assert callable(handler)
    handler(number, None)


class Timer:
    """A timer that a test lets run out."""

    made: ClassVar[list[Timer]] = []

    def __init__(self, seconds: float, call: object, arguments: tuple[int, ...]) -> None:
        self.told, self.daemon, self.is_started = (seconds, call, arguments), False, False
        Timer.made.append(self)

    def start(self) -> None:
        self.is_started = self.daemon


@pytest.mark.parametrize("number", PREEMPTING)
def test_the_first_request_is_asked_and_a_later_one_ends(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    Timer.made.clear()
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr(threading, "Timer", Timer)
    asked: list[int] = []
    left: list[int] = []
    hear_requests(asked.append, grace_s=7.0, leave=left.append)
    send(number)
    (timer,) = Timer.made
    assert (asked, left, timer.is_started) == ([number], [], True)
    assert timer.told[::2] == (7.0, (128 + number,))
    now[0] = 104.9
    send(signal.SIGTERM)  # the same request
    assert (asked, left) == ([number], [])
    now[0] = 105.0
    send(signal.SIGUSR1)
    assert (asked, left, len(Timer.made)) == ([number], [128 + signal.SIGUSR1], 1)


def test_a_launcher_hands_requests_on_and_stops_by_the_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now, ranks, stopped, killed = [100.0], [7, 8], [], []  # type: ignore[var-annotated]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr(os, "kill", lambda *told: killed.append(told))
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    for number in (signal.SIGINT, signal.SIGQUIT):  # a shell ignores them for what it starts in the background
        signal.signal(number, signal.SIG_DFL)
    leave_early()
    with launcher_signals(lambda: ranks, stopped.append) as asked:
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # as with nohup
        send(signal.SIGTERM)
        assert (asked, stopped, killed) == ([signal.SIGTERM], [], [(7, signal.SIGTERM), (8, signal.SIGTERM)])
        now[0] = 104.9
        send(signal.SIGUSR1)
        assert (asked, stopped, len(killed)) == ([signal.SIGTERM], [], 2)
        now[0] = 105.0
        send(signal.SIGUSR1)
        assert (asked, stopped, len(killed)) == ([signal.SIGTERM, signal.SIGUSR1], [signal.SIGUSR1], 4)
        send(signal.SIGINT)
        send(signal.SIGQUIT)
        assert stopped[1:] == [signal.SIGINT, signal.SIGQUIT]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL  # what ended the process before is the launcher's matter


def test_a_request_before_there_are_ranks_stops_at_once() -> None:
    stopped: list[int] = []
    with launcher_signals(list, stopped.append) as asked:
        send(signal.SIGUSR2)
    assert (asked, stopped) == ([signal.SIGUSR2], [signal.SIGUSR2])


def test_early_signals_end_only_what_nobody_handles() -> None:
    own = lambda *_: None  # noqa: E731
    signal.signal(signal.SIGUSR1, own)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    leave_early()
    found = [signal.getsignal(number) for number in PREEMPTING]
    assert found == [signals._leave_early, own, signal.SIG_IGN]


def test_signals_that_are_ignored_for_a_moment_are_heard_again() -> None:
    heard: list[int] = []
    for number in HANDLED:
        signal.signal(number, lambda number, _: heard.append(number))
    signal.signal(signal.SIGQUIT, signal.SIG_IGN)
    with signals_ignored():
        for number in HANDLED:
            os.kill(os.getpid(), number)
        assert signal.getsignal(signal.SIGQUIT) is signal.SIG_IGN
        assert heard == []
    os.kill(os.getpid(), signal.SIGUSR1)
    assert heard == [signal.SIGUSR1]


def test_ctrl_c_is_withheld_from_processes_that_are_started() -> None:
    with interrupts_withheld():
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        assert signal.SIGINT in blocked
        assert signal.SIGTERM not in blocked
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_a_block_is_looked_beside_until_it_is_left_or_enough_was_seen() -> None:
    looks: list[int] = []
    enough = threading.Event()

    def look() -> bool:
        looks.append(len(looks))
        if len(looks) == 3:
            enough.set()
        return len(looks) == 3

    with polling(look, every_s=0.001, name="looking"):
        enough.wait()
        assert not any(each.name == "looking" for each in threading.enumerate()) or len(looks) == 3
    assert looks == [0, 1, 2]
    with pytest.raises(KeyError), polling(lambda: False, every_s=0.001, name="looking"):
        raise KeyError
    assert not any(each.name == "looking" for each in threading.enumerate())


def test_signals_of_a_threads_start_come_after_it() -> None:
    came: list[object] = []
    signal.signal(signal.SIGUSR1, lambda number, _: came.append(number))

    class Starting(threading.Thread):
        def start(self) -> None:
            os.kill(os.getpid(), signal.SIGUSR1)
            came.append("starting")
            super().start()

    start_thread(made := Starting(target=lambda: None))
    made.join()
    assert came == ["starting", signal.SIGUSR1]
    inner: list[threading.Thread] = []
    outer = threading.Thread(target=lambda: (inner.append(threading.Thread(target=int)), start_thread(inner[0])))
    start_thread(outer)
    outer.join()
    inner[0].join()


# Scratch folders


def test_a_scratch_folder_is_its_users_and_locked_while_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    with scratch_folder() as path:
        assert path.parent == tmp_path
        assert path.name.startswith("paceline-run-")
        assert path.stat().st_mode & 0o777 == 0o700
        assert [each.name for each in path.iterdir()] == [".lock"]
        assert signals._HELD[path] == os.getpid()
        with (path / ".lock").open("r+") as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with scratch_folder():  # which removes what nobody holds
            assert path.is_dir()
        signals._HELD[tmp_path / "another's"] = os.getpid() + 1
        (tmp_path / "another's").mkdir()
        signals.remove_held()
        assert not path.exists()
        assert (tmp_path / "another's").is_dir()
        del signals._HELD[tmp_path / "another's"]
    assert path not in signals._HELD


def test_a_folder_is_left_over_when_nobody_holds_its_lock_or_made_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ages = {"paceline-run-young": 59.0, "paceline-run-old": 61.0, "other": 99.0}
    monkeypatch.setattr("time.time", lambda: 1000.0)
    for name, age in ages.items():
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (1000.0 - age, 1000.0 - age))
    (tmp_path / "paceline-run-unlocked").mkdir()
    (tmp_path / "paceline-run-unlocked" / ".lock").touch()
    (tmp_path / "paceline-run-link").symlink_to(tmp_path / "other")
    signals._remove_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "paceline-run-link", "paceline-run-young"]


# What the system says of a process


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files as a system has them of process 7."""
    monkeypatch.setattr("paceline.run.seen_ranks._PROC", tmp_path / "proc")
    monkeypatch.setattr("paceline.run.seen_ranks._CGROUPS", tmp_path / "cgroup")
    for folder in ("proc/self", "proc/7", "proc/8", "cgroup/freezer/job", "cgroup/job", "cgroup/unified/slice"):
        (tmp_path / folder).mkdir(parents=True)
    return tmp_path


def show(system: Path, state: str, *, cgroup: str = "", last: int = 0, faults: int = 3) -> None:
    fields = [state, *("0" for _ in range(8)), str(faults), *("0" for _ in range(30)), str(last)]
    (system / "proc" / "7" / "stat").write_text(f"7 (a (nasty) name) {' '.join(fields)}\n")
    (system / "proc" / "7" / "cgroup").write_text(cgroup)


@pytest.mark.parametrize(
    ("state", "last", "halted", "is_blocked"),
    [
        ("R", 0, "", False),
        ("S", 0, "", False),
        ("D", 0, "", True),
        ("T", signal.SIGSTOP, "stopped (SIGSTOP)", False),
        ("T", signal.SIGTSTP, "stopped (SIGTSTP)", False),
        ("T", 0, "stopped (SIGSTOP)", False),
        ("t", 0, "held by a debugger", False),
    ],
)
def test_the_state_of_a_process_is_read(system: Path, state: str, last: int, halted: str, is_blocked: bool) -> None:
    show(system, state, last=last)
    assert look_at_process(7) == ProcessState(halted=halted, is_blocked=is_blocked, page_faults=3)
    if state == "t":
        (system / "proc" / "7" / "status").write_text("Name:\tx\nTracerPid:\t8\n")
        (system / "proc" / "8" / "comm").write_text("gdb\n")
        found = look_at_process(7)
        assert found is not None
        assert found.halted == "held by a debugger (gdb, process 8)"


def test_a_process_that_has_ended_is_none(system: Path) -> None:
    assert look_at_process(7) is None
    for state in "ZX":
        show(system, state)
        assert look_at_process(7) is None
    (system / "proc" / "self").rmdir()  # a system without such files
    with subprocess.Popen(["sleep", "60"]) as process:
        found = look_at_process(process.pid)
        assert found is not None
        assert not found.halted
        process.kill()
        process.wait()
        assert look_at_process(process.pid) is None


@pytest.mark.parametrize(
    ("cgroup", "file", "content", "halted"),
    [
        ("0::/job\n", "cgroup/job/cgroup.events", "populated 1\nfrozen 1\n", "frozen (cgroup /job)"),
        ("0::/job\n", "cgroup/job/cgroup.events", "populated 1\nfrozen 0\n", ""),
        ("0::/slice\n", "cgroup/unified/slice/cgroup.events", "frozen 1\n", "frozen (cgroup /slice)"),
        ("9:freezer:/job\n", "cgroup/freezer/job/freezer.state", "FROZEN\n", "frozen (cgroup /job)"),
        ("9:freezer:/job\n", "cgroup/freezer/job/freezer.state", "THAWED\n", ""),
        ("9:memory:/job\n", "cgroup/freezer/job/freezer.state", "FROZEN\n", ""),
        ("9:freezer:/gone\n0::/job\n", "cgroup/job/cgroup.events", "frozen 1\n", "frozen (cgroup /job)"),
        ("nonsense\n", "cgroup/job/cgroup.events", "frozen 1\n", ""),
    ],
)
def test_a_frozen_group_of_processes_is_named(system: Path, cgroup: str, file: str, content: str, halted: str) -> None:
    (system / file).write_text(content)
    for state in "SD":
        show(system, state, cgroup=cgroup)
        found = look_at_process(7)
        assert found == ProcessState(halted=halted, is_blocked=state == "D" and not halted, page_faults=3)
    show(system, "R", cgroup=cgroup)
    found = look_at_process(7)
    assert found is not None
    assert found.halted == ""
