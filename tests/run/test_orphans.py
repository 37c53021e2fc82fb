"""No process is left behind, with real processes that know nothing of torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from gone_processes import wait_until_gone

from paceline.run.notes import forget_attempt, note_process, noted_processes
from paceline.run.processes import end_groups

Start = Callable[..., "subprocess.Popen[str]"]

# A child that says its number and then waits; one that does not mind being asked to end.
CHILD = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {CHILD}"
# A rank in a session of its own, with a child, that watches the process that started it.
RANK = f"""
import os, subprocess, sys, time
from paceline.run.processes import end_with_parent
end_with_parent(int(sys.argv[1]) or os.getppid(), every_s=0.02)
print(os.getpid(), flush=True)
subprocess.run([sys.executable, "-c", {CHILD!r}])
"""
LAUNCHER = f"""
import subprocess, sys
subprocess.run([sys.executable, "-c", {RANK!r}, "0"], start_new_session=True)
"""


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[subprocess.Popen[str]] = []

    def run(code: str, *args: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", code, *args], stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def said(process: subprocess.Popen[str], count: int) -> list[int]:
    """Returns the process numbers that were printed."""
    assert process.stdout is not None
    return [int(process.stdout.readline()) for _ in range(count)]


def test_a_rank_and_its_children_go_when_the_launcher_is_killed(start: Start) -> None:
    launcher = start(LAUNCHER)
    rank, child = said(launcher, 2)
    assert os.getpgid(child) == rank
    launcher.kill()
    wait_until_gone([rank, child])


def test_a_rank_whose_launcher_went_before_it_started_does_not_stay(start: Start) -> None:
    rank = start(RANK, "1")  # its parent is this process
    assert rank.wait(timeout=120) == 1
    assert rank.stdout is not None
    assert rank.stdout.read() == ""


def test_a_group_is_ended_also_when_its_leader_is_gone(start: Start) -> None:
    leader = start(f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {CHILD!r}])")
    (child,) = said(leader, 1)
    assert leader.wait(timeout=120) == 0
    assert os.getpgid(child) == leader.pid
    end_groups([leader.pid])
    wait_until_gone([child])


def test_one_that_does_not_listen_is_made_to_end(start: Start) -> None:
    stubborn, polite = start(STUBBORN), start(CHILD)
    pids = said(stubborn, 1) + said(polite, 1)
    end_groups([polite.pid], patience_s=120.0)  # it returns when the group is gone, which takes a busy machine a while
    end_groups([stubborn.pid], patience_s=0.05)
    wait_until_gone(pids)
    assert stubborn.wait() == -signal.SIGKILL
    assert polite.wait() == -signal.SIGTERM


def test_groups_that_are_gone_are_no_matter(start: Start) -> None:
    process = start("")
    process.wait(timeout=120)
    end_groups([process.pid])


def test_processes_are_noted_by_rank_until_they_are_forgotten(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    for rank in (0, 11):
        note_process(tmp_path, rank)
    (tmp_path / "logs" / "rank-2.pid").write_text("")  # killed while it wrote
    assert noted_processes(tmp_path) == {0: os.getpid(), 11: os.getpid()}
    forget_attempt(tmp_path)
    assert noted_processes(tmp_path) == {}
