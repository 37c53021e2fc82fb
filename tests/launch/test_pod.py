"""What runs in a pod beside the training: real processes, real signals, real sockets."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from paceline.health.exit_codes import DONE, FAILED, PREEMPTED, REFUSED
from paceline.launch.pod import alive, wait_for_host

STAY = [sys.executable, "-m", "paceline.launch.pod", "stay"]


@contextmanager
def started(*command: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_stopped_process_is_found() -> None:
    with started("sh", "-c", "sleep 60 & wait") as shell:
        process = psutil.Process(shell.pid)
        children: list[psutil.Process] = []
        while [each.name() for each in children] != ["sleep"]:  # it is a shell at first
            children = process.children()
        assert alive(shell.pid) == ""
        os.kill(children[0].pid, signal.SIGSTOP)
        while children[0].status() != psutil.STATUS_STOPPED:
            pass
        assert alive(shell.pid) == f"process {children[0].pid} (sleep) is stopped"
        children[0].kill()


def test_a_process_that_a_debugger_holds_is_alive() -> None:
    attach, detach = 16, 17
    ptrace = ctypes.CDLL(None, use_errno=True).ptrace
    ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    with started("sleep", "60") as process:
        if ptrace(attach, process.pid, None, None):
            pytest.skip(f"no process may be debugged here: {os.strerror(ctypes.get_errno())}")
        while psutil.Process(process.pid).status() != psutil.STATUS_TRACING_STOP:
            pass
        assert alive(process.pid) == ""
        ptrace(detach, process.pid, None, None)


def test_a_container_without_its_first_process_is_not_alive() -> None:
    with started("true") as process:
        process.wait()
    assert alive(process.pid) == f"there is no process {process.pid}"


def test_waiting_ends_when_somebody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        # Another address of the loopback: the first pod is not this one.
        with socket.create_server(("127.0.0.2", port)):
            assert wait_for_host("127.0.0.2", port, within_s=0)


def test_nobody_waits_for_itself() -> None:
    assert wait_for_host(socket.gethostbyname("localhost"), 1, within_s=0)


def test_waiting_has_an_end() -> None:
    assert not wait_for_host("first.invalid", 29400, within_s=0)


@pytest.mark.parametrize("code", [FAILED, PREEMPTED, 76, 137])
def test_what_may_be_started_again_ends(code: int) -> None:
    assert subprocess.run([*STAY, "sh", "-c", f"exit {code}"], check=False).returncode == code


@pytest.mark.parametrize("code", [DONE, REFUSED])
def test_a_pod_stays_behind_a_run_that_is_over(code: int) -> None:
    with started(*STAY, "sh", "-c", f"exit {code}") as process:
        assert process.stderr is not None
        assert "this pod stays until it is deleted" in process.stderr.readline()
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == code


def test_a_signal_reaches_the_run() -> None:
    script = "trap 'exit 75' TERM; echo ready; while :; do sleep 0.05; done"
    with started(*STAY, "sh", "-c", script) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        timer = threading.Timer(60, process.kill)
        timer.start()
        assert process.wait() == PREEMPTED
        timer.cancel()


def test_what_is_neither_verb_is_refused() -> None:
    done = subprocess.run([sys.executable, "-m", "paceline.launch.pod", "walk"], capture_output=True, check=False)
    assert done.returncode == REFUSED
