"""Ranks that hang: real processes, a fault in one of them, and what is said of it."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from free_ports import free_port

from paceline.health.exit_codes import FAILED, HUNG
from paceline.health.verdict import HangLimits
from paceline.run.notes import RunFailedError
from paceline.run.processes import loopback_interface
from paceline.run.supervise import LocalRanks, launching
from paceline.run.watch import WatchPolicy

# torch leaves the files of redirected output to the garbage collector.
pytestmark = [
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),
    pytest.mark.usefixtures("plain_rendezvous"),
]

POOL = Path(__file__).parents[1] / "pool"
PROGRAM = POOL / "faulty_rank.py"
GUILTY = 1


@dataclass(frozen=True, slots=True)
class Told:
    """What the launcher said."""

    code: int
    rank: int
    text: str


def line_of(fault: str) -> str:
    """Returns ``file:line`` of where a fault stands."""
    lines = PROGRAM.read_text().splitlines()
    (number,) = (at for at, line in enumerate(lines, start=1) if line.endswith(f"# stands here: {fault}"))
    return f"{PROGRAM}:{number} "


def hang(folder: Path, fault: str, backend: str, *, ranks: int) -> Told:
    """Runs ranks of which one has a fault, and returns what the launcher says of it."""
    for part in ("logs", "records"):
        (folder / part).mkdir()
    # In set-up nobody is late, however busy the machine is; in a step the limit is short.
    watch = WatchPolicy(limits=HangLimits(step_s=2.0, setup_s=100.0))
    asked = LocalRanks(
        ranks=ranks,
        threads=1,
        variables={"PYTHONPATH": os.pathsep.join([str(POOL), os.environ.get("PYTHONPATH", "")])},
        watch=watch,
    )
    with pytest.raises(RunFailedError) as caught, launching(folder, asked) as launcher:
        launcher.start(["faulty_rank", str(folder), fault, backend])
    told = Told(caught.value.code, caught.value.diagnosis.cause.rank, str(caught.value))
    del caught  # and with it the agent, whose files are open
    gc.collect()
    wait_until_gone(folder)
    return told


def wait_until_gone(folder: Path) -> None:
    """Returns when no process is left that was started for a run; the test's own limit ends it otherwise."""
    while any(str(folder) in (each.info["cmdline"] or []) for each in psutil.process_iter(["cmdline"])):
        time.sleep(0.05)


def check_verdict(folder: Path, error: Told, fault: str, *, ranks: int) -> None:
    told = json.loads((folder / "verdict.json").read_text())
    assert error.code == HUNG
    assert told["ranks"] == [GUILTY]
    assert line_of(fault) in told["sentence"]
    assert told["sentence"] in error.text
    assert told["kind"] == ("mismatch" if fault in ("skip", "order", "shape") else "missing")
    assert [state["rank"] for state in told["states"]] == list(range(ranks))
    for rank in range(ranks):
        assert told["sentence"] in (folder / "logs" / f"rank-{rank}.log").read_text()


def test_the_rank_and_its_line_are_named(tmp_path: Path) -> None:
    """A rank in a loop that never lets go of the interpreter, so that no thread of its own could tell."""
    error = hang(tmp_path, "loop", "gloo", ranks=2)
    check_verdict(tmp_path, error, "loop", ranks=2)


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", ["gloo", "shared_memory"])
@pytest.mark.parametrize("fault", ["skip", "order", "shape", "loop", "sleep", "loader"])
def test_the_rank_and_its_line_are_named_for_every_fault(tmp_path: Path, fault: str, backend: str) -> None:
    error = hang(tmp_path, fault, backend, ranks=4)
    check_verdict(tmp_path, error, fault, ranks=4)


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", ["gloo", "shared_memory"])
def test_a_dead_rank_is_named_with_what_it_did_last(tmp_path: Path, backend: str) -> None:
    error = hang(tmp_path, "dead", backend, ranks=4)
    assert error.code == FAILED
    assert error.rank == GUILTY
    assert re.search(
        rf"rank 1 was killed by SIGKILL\n  it was in phase forward.*after barrier\(\) at {PROGRAM}", error.text
    )
    assert json.loads((tmp_path / "verdict.json").read_text())["kind"] == "dead"


def watch_themselves(folder: Path, fault: str, hosts: str) -> list[int]:
    """Runs a rank on each of ``hosts``, which share no folder, and returns how they ended."""
    port = str(free_port())
    settings = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": loopback_interface(), "PYTHONPATH": str(POOL)}
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank, host in enumerate(hosts):
            meeting = {"RANK": str(rank), "WORLD_SIZE": str(len(hosts))}
            meeting |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            command = [sys.executable, "-m", "faulty_rank", str(folder / host), fault, "gloo", host]
            environment = {**os.environ, **meeting, **settings}
            processes.append(subprocess.Popen(command, env=environment, start_new_session=True))
        return [process.wait() for process in processes]
    finally:  # whatever went wrong, none is left: one of them may be in a loop for good
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("fault", "hosts"), [("loop", "aaa"), ("sleep", "aba"), ("skip", "aba"), ("loop", "abb"), ("sleep", "bac")]
)
def test_ranks_of_a_foreign_launcher_watch_themselves_across_hosts(tmp_path: Path, fault: str, hosts: str) -> None:
    codes = watch_themselves(tmp_path, fault, hosts)
    assert HUNG in codes
    assert 0 not in codes
    for host in set(hosts):
        told = json.loads((tmp_path / host / "verdict.json").read_text())
        assert told["ranks"] == [GUILTY]
        assert line_of(fault) in told["sentence"]
