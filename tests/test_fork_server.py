"""Processes that are forked from one with torch loaded: they are like those that are started from nothing."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fork_server
import psutil
import pytest

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or fork_server.HAS_GPU, reason="processes are forked on Linux alone, and not beside a GPU"
)

SAYS = """
import json, os, signal, sys
files = sorted(int(name) for name in os.listdir("/proc/self/fd"))
torch = sys.modules.get("torch")  # one that is started takes seconds to load it, and then obeys the variable
threads = torch.get_num_threads() if torch else int(os.environ["OMP_NUM_THREADS"])
print(json.dumps({
    "arguments": sys.argv[1:], "folder": os.getcwd(), "variable": os.environ.get("SAID"), "path": sys.path[0],
    "home": os.environ.get("HOME"), "pid": os.getpid(), "session": os.getsid(0) == os.getpid(),
    "files": files, "name": __name__,
    "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
    "threads": threads, "has_torch": torch is not None, "cores": sorted(os.sched_getaffinity(0)),
    "input": sys.stdin.read(),
}))
print("an error", file=sys.stderr)
sys.exit(7)
"""
ENDLESS = "import signal; print('ready', flush=True); signal.pause()"

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Starts a module that has the code given."""
    monkeypatch.setattr(fork_server, "FORKED", ("told",))

    def run(code: str, *arguments: str, **options: Any) -> subprocess.Popen[str]:
        (tmp_path / "told.py").write_text(code)
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        command = [sys.executable, "-m", "told", *arguments]
        return subprocess.Popen(command, cwd=tmp_path, text=True, **{**pipes, **options})

    return run


def test_a_forked_process_is_like_one_that_is_started(start: Start, request: pytest.FixtureRequest) -> None:
    options = {"env": {**os.environ, "SAID": "yes", "OMP_NUM_THREADS": "3"}, "start_new_session": True}
    found = []
    for _ in range(2):
        with start(SAYS, "one", "two words", **options) as process:
            output, error = process.communicate("some input")
        said = json.loads(output)
        assert said.pop("pid") == process.pid
        assert said.pop("has_torch") == (not found)
        found.append((said, error, process.returncode))
        request.getfixturevalue("real_starts")
    assert found[0] == found[1]
    assert found[0][1:] == ("an error\n", 7)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_signals_arrive_and_end_it(start: Start, number: int) -> None:
    with start(ENDLESS) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        assert process.poll() is None
        assert os.getpgid(process.pid) == os.getpgid(0)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)
        process.send_signal(number)
        assert process.wait() == -number


def exit_with(code: int) -> None:
    sys.exit(code)


def test_processes_of_multiprocessing_are_forked_too() -> None:
    process = multiprocessing.get_context("spawn").Process(target=exit_with, args=(5,))
    process.start()
    assert psutil.Process(process.pid).ppid() != os.getpid()
    process.join()
    assert process.exitcode == 5


def test_other_commands_are_started_as_ever() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert psutil.Process(process.pid).ppid() == os.getpid()
