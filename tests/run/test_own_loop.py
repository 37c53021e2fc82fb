"""Loops of users' own under a foreign launcher: they are watched without asking, and differences are told."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from free_ports import free_port

from paceline.run.processes import loopback_interface

POOL = Path(__file__).parents[1] / "pool"
PROGRAM = POOL / "own_loop.py"
GUILTY, LATER_S = 1, 2.0


@dataclass(frozen=True, slots=True)
class Left:
    """How the ranks left, what they said, and how long it took until the first had left."""

    codes: tuple[int, ...]
    err: str
    seconds: float


def line_of(fault: str) -> str:
    lines = PROGRAM.read_text().splitlines()
    (number,) = (at for at, line in enumerate(lines, start=1) if line.endswith(f"# stands here: {fault}"))
    return f"{PROGRAM}:{number} "


def run_loop(
    folder: Path,
    strategy: str,
    fault: str,
    backend: str = "shared_memory",
    timeout_s: float = 60.0,
    *,
    step_s: float = 0.0,
    hosts: tuple[str, ...] = ("", ""),
) -> Left:
    """Runs the loop on two ranks; when one has failed, the others are ended a little later, as launchers do.

    ``hosts`` are the names of the hosts on which the ranks think they are.
    """
    settings = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": loopback_interface()}
    settings |= {"PYTHONPATH": os.pathsep.join([str(POOL), os.environ.get("PYTHONPATH", "")]).strip(os.pathsep)}
    settings |= {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    settings |= {"TMPDIR": str(folder)}
    command = [sys.executable, "-m", "own_loop", strategy, fault, backend, str(timeout_s), str(step_s)]
    processes: list[subprocess.Popen[bytes]] = []
    started = time.monotonic()
    try:
        with (folder / "err").open("wb") as err:
            for rank, host in enumerate(hosts):
                environment = {**os.environ, **settings, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                environment |= {"PACELINE_HOST": host} if host else {}
                processes.append(
                    subprocess.Popen(command, cwd=folder, env=environment, stderr=err, start_new_session=True)
                )
        while not any(process.poll() for process in processes) and any(each.poll() is None for each in processes):
            time.sleep(0.02)
        seconds = time.monotonic() - started
        while any(each.poll() is None for each in processes) and time.monotonic() < started + seconds + LATER_S:
            time.sleep(0.02)
    finally:
        for process in processes:
            if process.poll() is None:
                os.kill(process.pid, signal.SIGKILL)
            process.wait()
    return Left(tuple(process.returncode for process in processes), (folder / "err").read_text(), seconds)


def verdict_of(folder: Path, left: Left) -> dict[str, object]:
    path = folder / "runs" / "own_loop" / "verdict.json"
    assert path.is_file(), left.err
    told: dict[str, object] = json.loads(path.read_text())
    assert str(told["sentence"]) in left.err
    assert (path.parent / "verdict.txt").read_text().startswith(str(told["sentence"]))
    return told


def test_a_rank_that_leaves_out_a_step_is_told_in_the_next(tmp_path: Path) -> None:
    check_pairing(tmp_path, "ddp", "step", "shared_memory")


@pytest.mark.exhaustive
@pytest.mark.parametrize("backend", ["shared_memory", "gloo"])
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp"])
@pytest.mark.parametrize("fault", ["step", "backward", "update"])
def test_a_rank_that_leaves_out_a_part_of_a_step_is_told(
    tmp_path: Path, strategy: str, fault: str, backend: str
) -> None:
    check_pairing(tmp_path, strategy, fault, backend)


def check_pairing(folder: Path, strategy: str, fault: str, backend: str) -> None:
    left = run_loop(folder, strategy, fault, backend)
    told = verdict_of(folder, left)
    assert told["kind"] == "mismatch"
    assert GUILTY in told["ranks"]  # type: ignore[operator]
    sentence = str(told["sentence"])
    assert "rank 0 " in sentence
    assert sentence.count(str(PROGRAM)) == 2
    if fault == "step":
        assert "rank 1 left out a step of its loop" in sentence
        assert "rank 0 at step = 12" in sentence
        assert "rank 1 at step = 13" in sentence


@pytest.mark.exhaustive
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_an_update_that_is_left_out_near_the_end_fails_the_rank_that_ends_last(tmp_path: Path, strategy: str) -> None:
    left = run_loop(tmp_path, strategy, "late update")
    sentence = str(verdict_of(tmp_path, left)["sentence"])
    assert sentence.startswith("rank 1 left out an update")
    assert sentence.count(str(PROGRAM)) == 2
    assert any(left.codes)


@pytest.mark.exhaustive
@pytest.mark.parametrize("backend", ["shared_memory", "gloo"])
@pytest.mark.parametrize("strategy", ["zero2", "fsdp"])
@pytest.mark.parametrize("fault", ["leave", "validate", "save"])
def test_a_rank_that_leaves_validates_or_saves_alone_is_told_and_none_hangs(
    tmp_path: Path, strategy: str, fault: str, backend: str
) -> None:
    left = run_loop(tmp_path, strategy, fault, backend, timeout_s=20.0)
    if fault == "leave" or any(left.codes):
        assert "paceline" in left.err
        assert "rank" in left.err
    else:  # zero's parameters were gathered already: nobody was needed
        assert (strategy, fault) == ("zero2", "validate")


@pytest.mark.some(1)
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "fsdp"])
def test_what_ranks_may_do_differently_is_no_difference(tmp_path: Path, strategy: str) -> None:
    left = run_loop(tmp_path, strategy, "none")
    assert (left.codes, left.err) == ((0, 0), "")
    assert not (tmp_path / "runs").exists()
    assert not list(tmp_path.glob("paceline-*/*"))  # ledgers go with the ranks


@pytest.mark.some(1)
@pytest.mark.parametrize("backend", ["shared_memory", "gloo"])
def test_a_mismatch_leaves_a_verdict_with_the_lines_that_called(tmp_path: Path, backend: str) -> None:
    told = verdict_of(tmp_path, run_loop(tmp_path, "ddp", "extra", backend))
    assert told["kind"] == "mismatch"
    assert line_of("extra") in str(told["sentence"])
    assert line_of("step") in str(told["sentence"])


@pytest.mark.soak
@pytest.mark.exhaustive
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp"])
@pytest.mark.parametrize("fault", ["step", "backward", "update"])
def test_ranks_on_two_hosts_that_pair_different_steps_are_told(
    tmp_path: Path, record_property: Callable[[str, object], None], strategy: str, fault: str
) -> None:
    record_property("faults", 1)
    left = run_loop(tmp_path, strategy, fault, "gloo", 12.0, step_s=0.005, hosts=("a", "b"))
    told = verdict_of(tmp_path, left)
    assert told["kind"] == "mismatch"
    assert GUILTY in told["ranks"]  # type: ignore[operator]
    sentence = str(told["sentence"])
    assert sentence.count(str(PROGRAM)) == 2
    assert "rank 0 " in sentence
    assert "rank 1 " in sentence
    if fault == "step":
        assert sentence.startswith("rank 1 left out a step of its loop")


@pytest.mark.exhaustive
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "fsdp"])
def test_what_ranks_on_two_hosts_may_do_differently_is_no_difference(tmp_path: Path, strategy: str) -> None:
    left = run_loop(tmp_path, strategy, "none", step_s=0.4, hosts=("a", "b"))
    assert (left.codes, left.err) == ((0, 0), "")  # nor a line of torch's, whose store goes with rank 0
    assert not (tmp_path / "runs").exists()


@pytest.mark.soak
@pytest.mark.exhaustive
@pytest.mark.parametrize("fault", ["first leave", "leave"])
def test_a_rank_that_ends_before_one_of_another_host_is_named_with_both_steps(tmp_path: Path, fault: str) -> None:
    left = run_loop(tmp_path, "ddp", fault, "gloo", 20.0, hosts=("a", "b"))
    guilty = 0 if fault == "first leave" else GUILTY
    told = verdict_of(tmp_path, left)
    assert (told["kind"], told["ranks"], left.codes[guilty]) == ("left", [guilty], 0)
    assert "it has finished after step 12, its last operation all_reduce(" in str(told["sentence"])
    assert f"rank {1 - guilty} waits for it after step 12 at {line_of('step')}" in str(told["sentence"])
    assert "TCPStore" not in left.err


@pytest.mark.exhaustive
@pytest.mark.parametrize("backend", ["shared_memory", "gloo"])
def test_a_rank_with_an_error_of_its_own_tells_it_and_no_verdict_hides_it(tmp_path: Path, backend: str) -> None:
    left = run_loop(tmp_path, "ddp", "error", backend)
    assert left.codes[GUILTY] == 1
    assert "ValueError: my own mistake" in left.err
    assert not (tmp_path / "runs").exists()


@pytest.mark.exhaustive
@pytest.mark.parametrize("backend", ["shared_memory", "gloo"])
@pytest.mark.parametrize("fault", ["hang", "unwatched hang", "stop"])
def test_a_loop_that_hangs_is_told_within_its_limit(tmp_path: Path, fault: str, backend: str) -> None:
    left = run_loop(tmp_path, "ddp", fault, backend, timeout_s=5.0)
    told = verdict_of(tmp_path, left)
    assert (told["kind"], told["ranks"]) == ("stopped" if fault == "stop" else "missing", [GUILTY])
    sentence = str(told["sentence"])
    assert "phase backward" in sentence
    assert "step 12" in sentence
    assert f"rank 0 waits for it at {line_of('step')}" in sentence
    if fault != "stop":
        assert line_of("hang") in sentence
