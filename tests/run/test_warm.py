"""Ranks that are forked: they look to the agent as if it had started them, and nobody is left when somebody goes."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from command_runs import LiveRun, newest_ranks
from gone_processes import wait_until_gone

from paceline.run import warm_client
from paceline.run.warm import WarmRanks, warm_ranks

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked on Linux alone"),
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("real_starts"),  # a server of a test's own loads little: to fork it would cost more
]

RANK = """
import ctypes, gc, os, signal, subprocess, sys, threading, time
from pathlib import Path

def prepare(arguments):
    Path("prepared.partial").write_text(str(os.getpid()))
    Path("prepared.partial").rename("prepared")
    raise ValueError(arguments)  # that a rank would say, too

def main():
    deed, *details = sys.argv[1:]
    if deed == "leave":
        print("so long", os.environ["COLOUR"], Path.cwd().name, os.getpgrp() == os.getpid(), flush=True)
        sys.exit(int(details[0]))
    if deed == "count":
        print(gc.get_freeze_count(), flush=True)
        sys.exit(0)
    if deed == "kill":
        os.kill(os.getpid(), int(details[0]))
    if deed == "hear":
        signal.signal(signal.SIGUSR1, lambda *_: os._exit(7))
        Path("ready").touch()
    if deed == "answer":
        signal.signal(signal.SIGUSR1, lambda *_: os.write(1, b"."))
        print("ready", flush=True)
    if deed in ("stay", "ignore"):
        Path(f"pid-{os.getpid()}-{time.monotonic_ns()}").touch()
        while True:
            try:
                time.sleep(600)
            except BaseException:
                if deed == "stay":
                    raise
    if deed == "wait":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        Path("pids.partial").write_text(f"{os.getpid()} {child.pid}")
        Path("pids.partial").rename("pids")
    if deed == "linger":  # dead to everybody but the one who waits for it, as long as another thread has not ended
        threading.Thread(target=time.sleep, args=(600,)).start()
        Path("pids.partial").write_text(str(os.getpid()))
        Path("pids.partial").rename("pids")
        ctypes.CDLL(None).syscall(60 if os.uname().machine == "x86_64" else 93, 0)  # exit, of this thread alone
    while deed != "return":
        time.sleep(0.05)  # a signal that comes just before a sleep is handled after it
"""
Client = Callable[..., "subprocess.Popen[str]"]


@contextlib.contextmanager
def server_in(folder: Path) -> Iterator[WarmRanks]:
    """Starts a server in a folder that has the ranks' code."""
    (folder / "deeds.py").write_text(RANK)
    with contextlib.ExitStack() as stack:
        with contextlib.chdir(folder):
            found = stack.enter_context(warm_ranks(["deeds", "no_such_module"]))
        assert found is not None
        yield found


@contextlib.contextmanager
def clients_of(warm: WarmRanks) -> Iterator[Client]:
    started: list[subprocess.Popen[str]] = []

    def start(*deed: str) -> subprocess.Popen[str]:
        command = [sys.executable, *warm.arguments(["deeds", *deed])]
        environment = {**os.environ, "COLOUR": "green"}
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, forks: None) -> Iterator[WarmRanks]:  # noqa: ARG001
    """One server for all tests that leave it as it is. It has torch loaded, which each rank that stays needs."""
    with server_in(tmp_path_factory.mktemp("shared")) as found:
        yield found


@pytest.fixture
def client(shared: WarmRanks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    """Starts ranks in a folder of the test's own."""
    monkeypatch.chdir(tmp_path)
    with clients_of(shared) as start:
        yield start


@pytest.fixture
def warm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WarmRanks]:
    """A server of the test's own."""
    monkeypatch.chdir(tmp_path)
    with server_in(tmp_path) as found:
        yield found


def wait_for(path: Path) -> str:
    deadline = time.monotonic() + 240
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return path.read_text()


def test_a_rank_has_its_own_environment_output_folder_and_code(client: Client, tmp_path: Path) -> None:
    process = client("leave", "3")
    assert process.communicate(timeout=240)[0] == f"so long green {tmp_path.name} True\n"
    assert process.returncode == 3
    returned = client("return")
    assert returned.wait(240) == 0


def test_what_no_client_sends_is_dropped_without_a_word(capfd: pytest.CaptureFixture[str], warm: WarmRanks) -> None:
    request = b'{"command": ["deeds", "return"], "folder": "/", "environment": {}}'
    length = warm_client.LENGTH.pack
    for content in (
        b"",
        b"GET",
        b"\xff" * 64,
        length(2) + b"{}",
        length(3) + b"\xff{}",
        length(len(request)) + request,
    ):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
            link.connect(str(warm.address))
            link.sendall(content)
            link.shutdown(socket.SHUT_WR)
            assert link.recv(1) == b""
    with clients_of(warm) as client:
        assert client("leave", "3").wait(240) == 3
    assert capfd.readouterr().err == ""


def test_collections_in_a_rank_leave_out_what_the_server_has_loaded(client: Client) -> None:
    assert int(client("count").communicate(timeout=240)[0]) > 10_000


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_client_ends_as_its_rank_ends(client: Client, number: signal.Signals) -> None:
    assert client("kill", str(int(number))).wait(240) == -number


def test_signals_reach_the_rank(client: Client, tmp_path: Path) -> None:
    process = client("hear")
    wait_for(tmp_path / "ready")
    process.send_signal(signal.SIGUSR1)
    assert process.wait(240) == 7


def test_a_request_of_a_scheduler_leaves_the_server_alone(client: Client, tmp_path: Path) -> None:
    process = client("wait")
    rank = int(wait_for(tmp_path / "pids").split()[0])
    os.kill(server_of(rank), signal.SIGTERM)
    os.killpg(rank, signal.SIGTERM)  # which neither the rank nor its child handles
    assert process.wait(240) == -signal.SIGTERM
    assert client("leave", "3").wait(240) == 3


def test_no_signal_is_lost_that_comes_while_the_client_begins_to_wait(client: Client) -> None:
    process = client("answer")
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    for _ in range(200):
        process.send_signal(signal.SIGUSR1)
        assert select.select([process.stdout], [], [], 60)[0]
        assert process.stdout.read(1) == "."


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_client_that_is_ended_takes_the_rank_and_its_children_along(
    client: Client, tmp_path: Path, number: signal.Signals
) -> None:
    process = client("wait")
    pids = wait_for(tmp_path / "pids")
    process.send_signal(number)
    assert process.wait(240) == -number
    wait_until_gone([*map(int, pids.split())])


def attempts_in(folder: Path, count: int) -> list[int]:
    """Waits for so many attempts to have begun; returns the process of each, in order."""
    deadline = time.monotonic() + 240
    while len(found := sorted(folder.glob("pid-*"), key=lambda path: int(path.name.split("-")[2]))) < count:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return [int(path.name.split("-")[1]) for path in found]


def test_a_rank_that_may_stay_does_what_its_next_client_asks_for(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_STAYS", "60")
    monkeypatch.setenv("LOCAL_RANK", "0")
    for count, number in enumerate((signal.SIGTERM, signal.SIGTERM), start=1):
        process = client("stay")
        pids = attempts_in(tmp_path, count)
        process.send_signal(number)
        assert process.wait(240) == -number  # as if the rank had ended
    assert pids[0] == pids[1]
    monkeypatch.setenv("LOCAL_RANK", "1")  # which another process is
    other = client("leave", "3")
    assert other.communicate(timeout=240)[0].startswith("so long green")
    monkeypatch.setenv("LOCAL_RANK", "0")
    last = client("leave", "4")
    assert last.communicate(timeout=240)[0] == f"so long green {tmp_path.name} True\n"  # into the output of this client
    assert last.returncode == 4
    wait_until_gone(pids)


def test_a_spare_does_what_the_next_client_asks_for_in_the_place_of_a_rank_that_died(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_STAYS", "60")
    monkeypatch.setenv("PACELINE_SPARES", "1,0")
    monkeypatch.setenv("LOCAL_RANK", "5")
    process = client("stay")
    (first,) = attempts_in(tmp_path, 1)
    spare = int(wait_for(tmp_path / "prepared"))  # with the folder, the environment and the request of a rank
    (tmp_path / "prepared").unlink()
    os.kill(spare, signal.SIGTERM)  # which a scheduler sends to all of its processes
    os.kill(first, signal.SIGKILL)
    assert process.wait(240) == -signal.SIGKILL
    process = client("stay")
    assert attempts_in(tmp_path, 2)[1] == spare
    another = int(wait_for(tmp_path / "prepared"))
    process.send_signal(signal.SIGTERM)
    assert process.wait(240) == -signal.SIGTERM
    last = client("leave", "4")  # the process that has stayed goes before the spare
    assert last.communicate(timeout=240)[0] == f"so long green {tmp_path.name} True\n"
    assert last.returncode == 4
    wait_until_gone([spare])
    monkeypatch.setenv("LOCAL_RANK", "6")  # a spare takes the place of any rank
    process = client("stay")
    assert another in attempts_in(tmp_path, 3)


def test_a_spare_goes_with_its_server(warm: WarmRanks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_STAYS", "60")
    monkeypatch.setenv("PACELINE_SPARES", "2,0")
    with clients_of(warm) as client:
        client("stay")
        attempts_in(tmp_path, 1)
        deadline = time.monotonic() + 240
        while len(found := psutil.Process(warm._server.pid).children()) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        warm.close()
        wait_until_gone([each.pid for each in found])


def test_a_rank_that_waits_and_is_killed_is_replaced(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_STAYS", "60")
    process = client("stay")
    (first,) = attempts_in(tmp_path, 1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(240) == -signal.SIGTERM
    os.kill(first, signal.SIGKILL)
    wait_until_gone([first])  # its first thread: others may still hold its end of the link
    process = client("stay")
    assert attempts_in(tmp_path, 2)[1] != first
    process.kill()  # a client that is gone ends the attempt too


def test_a_rank_that_does_not_end_its_attempt_is_killed(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("PACELINE_STAYS", "60")
    process = client("stay")
    attempts_in(tmp_path, 1)
    process.send_signal(signal.SIGTERM)
    process.wait(240)
    monkeypatch.setenv("PACELINE_STAYS", "0.3")  # of the client that it has by then, not of its first one
    process = client("ignore")
    pid, *first = attempts_in(tmp_path, 2)
    assert first == [pid]
    process.send_signal(signal.SIGTERM)
    assert process.wait(240) == -signal.SIGTERM
    wait_until_gone([pid])


def test_a_rank_that_was_dead_before_its_client_was_ended_has_ended_by_itself(client: Client, tmp_path: Path) -> None:
    process = client("wait")
    rank, child = map(int, wait_for(tmp_path / "pids").split())
    server = int(Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(server, signal.SIGSTOP)  # so that it learns of both at once
    try:
        os.kill(rank, signal.SIGKILL)
        process.send_signal(signal.SIGTERM)
        while "SigPnd:\t0000000000000000" not in Path(f"/proc/{process.pid}/status").read_text():
            time.sleep(0.01)
        time.sleep(2 * warm_client._PATIENCE_S)  # until it has asked for the rank's end; it waits for the answer
    finally:
        os.kill(server, signal.SIGCONT)
    assert process.wait(240) == -signal.SIGKILL
    wait_until_gone([rank, child])


def test_a_rank_whose_threads_still_end_was_dead_before_its_client_was_ended(client: Client, tmp_path: Path) -> None:
    process = client("linger")
    rank = int(wait_for(tmp_path / "pids"))
    while Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    assert process.wait(240) == -signal.SIGKILL
    wait_until_gone([rank])


def test_the_end_of_the_launcher_ends_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deeds.py").write_text(RANK)
    monkeypatch.chdir(tmp_path)
    with warm_ranks([]) as found:
        assert found is not None
        process = subprocess.Popen([sys.executable, *found.arguments(["deeds", "wait"])])
        pids = wait_for(tmp_path / "pids")
    wait_until_gone([*map(int, pids.split())])
    assert process.wait(240) != 0


def test_libraries_are_told_how_many_threads_there_will_be_before_they_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "library.py").write_text("import os\nthreads = os.environ.get('OMP_NUM_THREADS')\n")
    (tmp_path / "deeds.py").write_text("import library\ndef main() -> None:\n    print(library.threads)\n")
    monkeypatch.chdir(tmp_path)
    with warm_ranks(["library"], threads=3) as found:
        assert found is not None
        done = subprocess.run(
            [sys.executable, *found.arguments(["deeds"])], stdout=subprocess.PIPE, text=True, timeout=240, check=True
        )
    assert done.stdout == "3\n"


def test_nothing_is_started_that_is_not_wanted() -> None:
    with warm_ranks(["deeds"], is_wanted=False) as found:
        assert found is None


def server_of(rank: int) -> int:
    return int(Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_server_that_is_killed_is_started_again(
    warm: WarmRanks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with clients_of(warm) as client:
        process = client("wait")
        rank, child = map(int, wait_for(tmp_path / "pids").split())
        os.kill(server_of(rank), signal.SIGKILL)
        assert process.wait(240) == -signal.SIGKILL  # as its rank, which has lost its parent
        for pid in (rank, child):
            os.kill(pid, signal.SIGKILL)  # this one does not watch its parent, as ranks of a run do
        warm._server.wait(240)  # its socket closes before it has ended
        arguments = warm.arguments(["deeds", "leave", "0"])
        assert capsys.readouterr().err == (
            "paceline: the process that ranks are forked from was killed by SIGKILL: another one is started\n"
        )
        assert str(warm.address) in arguments
        assert client("leave", "3").wait(240) == 3


def test_a_client_without_a_server_becomes_the_rank(tmp_path: Path) -> None:
    (tmp_path / "deeds.py").write_text(RANK + "\nmain()\n")
    client, nobody = warm_client.__file__, str(tmp_path / "nobody")
    command = [sys.executable, "-I", "-S", client, nobody, "deeds", "leave", "4"]
    environment = {**os.environ, "COLOUR": "red"}
    assert subprocess.run(command, env=environment, cwd=tmp_path, check=False, timeout=240).returncode == 4


@pytest.mark.exhaustive
def test_a_run_goes_on_when_the_server_is_killed(live: Callable[..., LiveRun]) -> None:
    run = live("recovery.max_restarts=2")
    before = run.ranks(step=20)
    os.kill(server_of(before[0]), signal.SIGKILL)
    run.wait_until(lambda: "another one is started" in run.error())
    run.wait_until(lambda: newest_ranks(run.folder / "runs" / "tiny") != before)
    assert "restarting 2 ranks from step" in run.error()
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 75
    wait_until_gone(before)
