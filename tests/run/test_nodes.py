"""Hosts that come and go: how they are asked for, and two launchers on this machine of which one is killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from free_ports import free_port
from gone_processes import is_running

from paceline.errors import UsageError
from paceline.records.records import EventRecord, Record, RunRecord, read_records
from paceline.run.folder import claim_folder, is_in_use
from paceline.run.whereami import address_towards, interface_of, parse_nodes

CONFIG = """
name: tiny
model: {kind: mlp, hidden_dim: 8}
data: {kind: synthetic_classification, samples: 256}
train: {steps: 1000000, global_batch: 8}
parallel: {device: cpu, threads: 1}
checkpoint: {every_steps: 20}
monitor: {tensorboard: false, console: false}
"""


def test_hosts_are_read_from_the_command_line() -> None:
    nodes = parse_nodes("1:4", "host1:29400")
    assert (nodes.least, nodes.count, nodes.endpoint) == (1, 4, "host1:29400")
    assert parse_nodes("2", "[::1]:29400").address == "::1"


@pytest.mark.parametrize(
    ("counts", "endpoint"), [("0:2", "h:1"), ("3:2", "h:1"), ("two", "h:1"), ("1:2", "h"), ("1:2", "h:99999")]
)
def test_what_is_no_number_of_hosts_is_refused(counts: str, endpoint: str) -> None:
    with pytest.raises(UsageError, match=r"--nnodes|--rdzv"):
        parse_nodes(counts, endpoint)


def test_the_way_to_a_host() -> None:
    assert address_towards("127.0.0.1", 29400) == "127.0.0.1"
    assert interface_of("127.0.0.1") in ("lo", "lo0")
    assert interface_of("203.0.113.7") is None


def test_a_folder_that_a_launcher_holds(tmp_path: Path) -> None:
    assert not is_in_use(tmp_path / "run")
    with claim_folder(tmp_path / "run", "name: run\n"):
        assert is_in_use(tmp_path / "run")
    assert not is_in_use(tmp_path / "run")


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_hosts_come_and_go_and_all_leave_when_one_is_asked_to(tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(CONFIG)
    command = [sys.executable, "-m", "paceline", "train", "tiny.yaml", "--nnodes", "1:2", "--node-ranks", "1"]
    command += ["--rdzv", f"127.0.0.1:{free_port()}", "recovery.max_restarts=1"]
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    with contextlib.ExitStack() as stack:

        def start(host: str) -> subprocess.Popen[bytes]:
            with (tmp_path / f"said-{host}").open("ab") as said:
                named = environment | {"PACELINE_HOST": host}
                process = subprocess.Popen(command, cwd=tmp_path, env=named, stderr=said)
            stack.callback(process.wait)
            stack.callback(process.kill)
            return process

        first = start("a")
        wait_for(first, lambda: len(attempts(tmp_path)) == 1)
        second = start("b")
        wait_for(first, lambda: attempts(tmp_path)[-1][0].world_size == 2 and has_saved(attempts(tmp_path)[-1]))
        second.send_signal(signal.SIGKILL)
        wait_for(first, lambda: attempts(tmp_path)[-1][0].world_size == 1 and has_saved(attempts(tmp_path)[-1]))
        last = attempts(tmp_path)[-1]
        assert any(isinstance(each, EventRecord) and each.name == "resume" for each in last)
        assert {each[0].global_batch for each in attempts(tmp_path)} == {8}
        third = start("c")
        wait_for(first, lambda: attempts(tmp_path)[-1][0].world_size == 2 and has_saved(attempts(tmp_path)[-1]))
        third.send_signal(signal.SIGTERM)
        assert [first.wait(500), third.wait(500)] == [75, 75]
        said = [line for line in (tmp_path / "said-a").read_text().splitlines() if "restarting" in line]
        changes = ["b has come", "b (its launcher has ended) is gone", "c has come"]  # more than restarts are allowed
        assert [change in line for change, line in zip(changes, said, strict=True)] == [True] * 3, said
        preempted = [each for each in attempts(tmp_path)[-1] if isinstance(each, EventRecord)][-1]
        assert preempted.name == "preempted"
        assert (tmp_path / "runs" / "tiny" / "checkpoints" / f"step-{preempted.step:08d}").is_dir()
        pids = {record.pid for records in (0, 1) for record in starts(tmp_path, records)}
        wait_until(lambda: not any(map(is_running, pids)))


def wait_for(process: subprocess.Popen[bytes], is_met: Callable[[], bool]) -> None:
    """Waits for something that a launcher's run does."""

    def is_over() -> bool:
        assert process.poll() is None
        return is_met()

    wait_until(is_over)


def wait_until(is_met: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 400
    while not is_met():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def starts(folder: Path, rank: int) -> list[RunRecord]:
    path = folder / "runs" / "tiny" / "records" / f"rank-{rank}.jsonl"
    return [record for record in read_records(path) if isinstance(record, RunRecord)]


def attempts(folder: Path) -> list[list[Record]]:
    """Returns the records of rank 0, one list for each attempt; its first is the start."""
    found: list[list[Record]] = []
    path = folder / "runs" / "tiny" / "records" / "rank-0.jsonl"
    for record in read_records(path) if path.exists() else ():
        if isinstance(record, RunRecord):
            found.append([])
        found[-1].append(record)
    return found


def has_saved(records: list[Record]) -> bool:
    return any(isinstance(each, EventRecord) and each.name == "checkpoint" for each in records)
