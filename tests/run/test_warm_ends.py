"""How the process that stands for a forked rank ends: with a server that says so, in a child of this process."""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline.run import warm_client
from paceline.run.stay import SPARES, STAYS
from paceline.run.warm import StayingRank, WarmServer
from paceline.run.warm_client import FORKED, LENGTH, OVER, STATUS

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked on Linux alone"),
    pytest.mark.timeout(60),
]


class Client:
    """A client in a forked process, and this end of its connection."""

    def __init__(self, pid: int, link: socket.socket) -> None:
        self.pid, self.link = pid, link
        head, self.output, _, _ = socket.recv_fds(link, LENGTH.size, 2)
        self.request = json.loads(warm_client.receive(link, LENGTH.unpack(head)[0]))

    def say(self, content: bytes) -> None:
        self.link.sendall(content)

    def heard(self) -> bytes:
        return self.link.recv(1)

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def end(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Client]]:
    address = str(tmp_path / "s")
    monkeypatch.setattr(sys, "argv", ["warm_client.py", address, "module", "argument"])
    monkeypatch.setenv("COLOUR", "green")
    monkeypatch.chdir(tmp_path)
    started: list[Client] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(address)
        listener.listen()

        def start() -> Client:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # threads: the child uses none of them
                pid = os.fork()
            if pid == 0:
                try:
                    for number in (*warm_client._ENDING, *warm_client._HANDED_ON, signal.SIGALRM):
                        signal.signal(number, signal.SIG_DFL)
                    warm_client.main()
                finally:
                    os._exit(99)
            started.append(Client(pid, listener.accept()[0]))
            return started[-1]

        yield start
    for each in started:
        each.link.close()
        for descriptor in each.output:
            os.close(descriptor)


def test_a_request_has_command_folder_environment_and_output(client: Callable[[], Client], tmp_path: Path) -> None:
    made = client()
    assert made.request["command"] == ["module", "argument"]
    assert Path(made.request["folder"]) == tmp_path
    assert made.request["environment"]["COLOUR"] == "green"
    assert len(made.output) == 2
    made.say(FORKED + STATUS.pack(3, False))
    assert made.end() == 3


@pytest.mark.parametrize(
    ("status", "was_asked", "ended"),
    [(0, False, 0), (7, True, 7), (-signal.SIGSEGV, False, -signal.SIGSEGV), (-signal.SIGKILL, False, -signal.SIGKILL)],
)
def test_a_client_ends_as_its_rank(client: Callable[[], Client], status: int, was_asked: bool, ended: int) -> None:
    made = client()
    made.say(FORKED)
    made.say(STATUS.pack(status, was_asked))
    assert made.end() == ended


@pytest.mark.parametrize("says", [b"", FORKED])
def test_a_client_whose_server_is_gone_is_killed_like_its_rank(client: Callable[[], Client], says: bytes) -> None:
    made = client()
    made.say(says)
    made.link.close()
    assert made.end() == -signal.SIGKILL


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT])
def test_a_client_that_is_ended_has_the_rank_killed_first(client: Callable[[], Client], number: signal.Signals) -> None:
    made = client()
    made.say(FORKED)
    time.sleep(0.05)
    made.signal(number)
    assert made.heard() == bytes([OVER if number == signal.SIGTERM else signal.SIGKILL])
    made.say(STATUS.pack(-signal.SIGKILL, True))
    assert made.end() == -number


def test_a_rank_that_was_dead_by_then_counts(client: Callable[[], Client]) -> None:
    made = client()
    made.say(FORKED)
    time.sleep(0.05)
    made.signal(signal.SIGTERM)
    assert made.heard() == bytes([OVER])
    made.say(STATUS.pack(-signal.SIGBUS, False))
    assert made.end() == -signal.SIGBUS


def test_a_client_does_not_wait_for_a_server_that_loads_its_modules(client: Callable[[], Client]) -> None:
    made = client()
    time.sleep(0.05)
    made.signal(signal.SIGTERM)
    assert made.heard() == bytes([OVER])
    assert made.end() == -signal.SIGTERM  # without a word of the server


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_signals_for_the_rank_are_handed_on(client: Callable[[], Client], number: signal.Signals) -> None:
    made = client()
    made.signal(number)  # whenever it comes
    assert made.heard() == bytes([number])
    made.say(FORKED + STATUS.pack(5, False))
    assert made.end() == 5


def test_a_request_of_a_scheduler_is_handed_on_to_the_rank(client: Callable[[], Client]) -> None:
    made = client()
    made.say(FORKED)
    subprocess.run(["kill", "-TERM", str(made.pid)], check=True)  # not by the agent, which is its parent
    assert made.heard() == bytes([signal.SIGTERM])
    made.say(STATUS.pack(75, False))
    assert made.end() == 75


def test_a_client_that_ends_by_a_signal_leaves_no_core(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[object] = []
    monkeypatch.setattr(resource, "setrlimit", lambda *limit: done.append(limit))
    monkeypatch.setattr(signal, "signal", lambda *handler: done.append(handler))
    monkeypatch.setattr(os, "kill", lambda *told: done.append(told))
    warm_client._end_by(signal.SIGSEGV)
    limit = (resource.RLIMIT_CORE, (0, 0))
    assert done == [limit, (signal.SIGSEGV, signal.SIG_DFL), (os.getpid(), signal.SIGSEGV)]
    done.clear()
    warm_client._end_by(signal.SIGKILL)
    assert done == [limit, (os.getpid(), signal.SIGKILL)]


# The server's side


class Selector:
    """Notes which clients are looked at no more."""

    def __init__(self) -> None:
        self.gone: list[socket.socket] = []

    def unregister(self, client: socket.socket) -> None:
        self.gone.append(client)


def server(clients: dict[int, socket.socket]) -> WarmServer:
    """A server that has forked ranks before: its constructor would take this process's input and signals."""
    made = WarmServer.__new__(WarmServer)
    made._clients, made._ended, made._ranks, made._late = clients, set(), {}, {}
    made._selector = Selector()  # type: ignore[assignment]
    return made


RANK = """
import os, time
os.setsid()
child = os.fork()
if child == 0:
    time.sleep(600)
print(child, flush=True)
"""


@pytest.mark.parametrize(
    ("asked", "goes"),
    [(b"", True), (bytes([OVER]), True), (bytes([signal.SIGKILL]), True), (bytes([signal.SIGUSR1]), False)],
)
def test_what_a_rank_had_started_goes_only_where_its_end_was_asked_for(asked: bytes, goes: bool) -> None:
    ours, theirs = socket.socketpair()
    read, write = os.pipe()
    pid = os.posix_spawn(
        sys.executable, [sys.executable, "-I", "-S", "-c", RANK], {}, file_actions=[(os.POSIX_SPAWN_DUP2, write, 1)]
    )
    os.close(write)
    child = int(os.read(read, 20))
    try:
        if asked:
            theirs.sendall(asked)
        else:
            theirs.shutdown(socket.SHUT_WR)
        made = server({pid: ours})
        while made._clients:
            made._reap()
            time.sleep(0.001)
        assert made._selector.gone == [ours]  # type: ignore[attr-defined]
        assert STATUS.unpack(theirs.recv(STATUS.size)) == (0, False)
        assert theirs.recv(1) == b""
        if goes:
            os.read(read, 1)  # returns when nobody holds the other end
        else:
            os.kill(child, 0)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.close(read)
        theirs.close()


def test_a_client_that_asks_for_the_end_gets_it_and_is_told_so() -> None:
    ours, theirs = socket.socketpair()
    process = subprocess.Popen(["sleep", "600"], start_new_session=True)
    made = server({process.pid: ours})
    made._obey(process.pid + 1)  # nobody's
    theirs.sendall(bytes([signal.SIGCONT]))
    made._obey(process.pid)
    assert (made._ended, process.poll()) == (set(), None)
    theirs.sendall(bytes([signal.SIGKILL]))
    made._obey(process.pid)
    assert made._ended == {process.pid}
    while made._clients:
        made._reap()
        time.sleep(0.001)
    assert STATUS.unpack(theirs.recv(STATUS.size)) == (-signal.SIGKILL, True)
    assert made._ended == set()
    process.returncode = -signal.SIGKILL  # it was waited for
    theirs.close()


def test_a_spare_that_ends_before_it_was_needed_is_told_and_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    link, other = socket.socketpair()
    process = subprocess.Popen(["sleep", "600"])
    with link, other:
        made = server({})
        made._ranks[process.pid] = StayingRank(link, "1", 60.0, waits=True, is_spare=True)
        made._requests = {"1": {"environment": {STAYS: "60.0", SPARES: "1,10.0", "LOCAL_RANK": "1"}}}
        made._spares_at_s = math.inf
        process.kill()
        while made._ranks:
            made._reap()
            time.sleep(0.001)
        process.returncode = -signal.SIGKILL  # it was waited for
    assert made._num_spares == 1
    assert made._spares_at_s <= time.monotonic() + 10.0
    assert "a spare process has ended before it was needed: another one is made" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_process_that_is_stopped_or_dead_takes_no_request(number: signal.Signals) -> None:
    """Though its end of the link is open: that of a process whose first thread has ended is, until its last one has."""
    link, ranks = socket.socketpair()
    process = subprocess.Popen(["sleep", "600"], start_new_session=True)
    made = server({})
    made._ranks[process.pid] = StayingRank(link, "0", 60.0, waits=True, is_spare=True)
    environment, output = {"PACELINE_STAYS": "60", "LOCAL_RANK": "0"}, [0, 1]
    try:
        process.send_signal(number)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        assert made._hand_over(environment, b"{}", output) == -1
        if number == signal.SIGSTOP:
            process.send_signal(signal.SIGCONT)
            os.waitid(os.P_PID, process.pid, os.WCONTINUED)
            assert made._hand_over(environment, b"{}", output) == process.pid
    finally:
        process.kill()
        process.wait()
        for each in (link, ranks):
            each.close()


@pytest.mark.parametrize(("asked", "stays"), [(OVER, True), (signal.SIGKILL, False)])
def test_a_rank_that_may_stay_outlives_its_attempt_alone(asked: int, stays: bool) -> None:
    """Ctrl-C ends it at once: there is no next attempt."""
    (ours, theirs), (link, ranks) = socket.socketpair(), socket.socketpair()
    process = subprocess.Popen(["sleep", "600"], start_new_session=True)
    try:
        made = server({process.pid: ours})
        made._ranks[process.pid] = StayingRank(link, "0", 60.0)
        theirs.sendall(bytes([asked]))
        made._obey(process.pid)
        ranks.settimeout(60.0 if stays else 0.0)
        if stays:
            assert ranks.recv(LENGTH.size) == LENGTH.pack(0)
            assert process.poll() is None
        else:
            assert process.wait(60) == -signal.SIGKILL
            with pytest.raises(BlockingIOError):
                ranks.recv(LENGTH.size)
    finally:
        process.kill()
        process.wait()
        for each in (ours, theirs, link, ranks):
            each.close()


def test_a_client_that_goes_takes_its_rank_along() -> None:
    ours, theirs = socket.socketpair()
    process = subprocess.Popen(["sleep", "600"], start_new_session=True)
    made = server({process.pid: ours})
    theirs.close()
    made._obey(process.pid)
    assert (made._clients, made._selector.gone, ours.fileno()) == ({}, [ours], -1)  # type: ignore[attr-defined]
    assert process.wait(30) == -signal.SIGKILL
