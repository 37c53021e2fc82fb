"""Hosts that are lost, and the state of their ranks from the memory of others: several launchers on this machine."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from free_ports import free_port

from paceline.checkpoint import list_checkpoints
from paceline.records.records import EventRecord, Record, RunRecord, StepRecord, read_records

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(900)]

CONFIG = """
name: tiny
model: {kind: mlp, hidden_dim: 64, dropout: 0.1}
data: {kind: synthetic_classification, samples: 4096}
train: {steps: 1000000, global_batch: 12}
parallel: {device: cpu, threads: 1, strategy: fsdp}
checkpoint: {every_steps: 1000000, memory: {every_steps: 5}}
recovery: {max_restarts: 3}
monitor: {tensorboard: false, console: false}
"""


class HostsRun:
    """A run on several hosts, whose launchers are processes here."""

    def __init__(self, folder: Path, nodes: str) -> None:
        self.folder = folder
        (folder / "tiny.yaml").write_text(CONFIG)
        self._command = [sys.executable, "-m", "paceline", "train", "tiny.yaml", "--nnodes", nodes, "--node-ranks", "1"]
        self._command += ["--rdzv", f"127.0.0.1:{free_port()}"]
        self.launchers: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, host: str, *settings: str) -> None:
        environment = {name: value for name, value in os.environ.items() if name != "RANK"} | {"PACELINE_HOST": host}
        with (self.folder / f"said-{host}").open("ab") as said:
            self.launchers[host] = subprocess.Popen(
                [*self._command, *settings], cwd=self.folder, env=environment, stderr=said
            )

    def lose(self, *hosts: str) -> None:
        """Ends all processes of hosts at once."""
        gone = [each for host in hosts for each in processes_of(self.launchers[host].pid)]
        for each in gone:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        for host in hosts:
            self.launchers.pop(host).wait()

    def said(self, host: str) -> str:
        return (self.folder / f"said-{host}").read_text()

    def attempt(self) -> list[Record]:
        """Returns the records of rank 0 in the newest attempt."""
        path, found = self.folder / "runs" / "tiny" / "records" / "rank-0.jsonl", list[Record]()
        for record in read_records(path) if path.exists() else ():
            found = [record] if isinstance(record, RunRecord) else [*found, record]
        return found

    def wait_until(self, is_met: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 400
        while not is_met():
            assert all(each.poll() is None for each in self.launchers.values()), self.said("a")
            assert time.monotonic() < deadline, self.said("a")
            time.sleep(0.05)

    def wait_for_world(self, size: int, snapshots: int = 2) -> list[Record]:
        """Waits until so many ranks train and have kept some snapshots; returns the records of their attempt."""

        def is_met() -> bool:
            found = self.attempt()
            return bool(found) and found[0].world_size == size and len(named(found, "snapshot")) >= snapshots  # type: ignore[union-attr]

        self.wait_until(is_met)
        return self.attempt()


def processes_of(launcher: int) -> list[psutil.Process]:
    found = psutil.Process(launcher)
    return [found, *found.children(recursive=True)]


def named(records: list[Record], name: str) -> list[EventRecord]:
    return [each for each in records if isinstance(each, EventRecord) and each.name == name]


def resumed(records: list[Record]) -> tuple[int, str]:
    """Returns from which step an attempt went on, and from where."""
    event = named(records, "resume")[0]
    return event.step, str(event.detail["checkpoint"])


def check_samples(records: list[Record], step: int) -> None:
    """After ``step`` come the next one and its samples: each of the data is trained once."""
    steps = [each for each in records if isinstance(each, StepRecord)]
    assert [each.step for each in steps[:3]] == [step + 1, step + 2, step + 3]
    assert [each.position for each in steps[:3]] == [12 * (step + 1), 12 * (step + 2), 12 * (step + 3)]


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Callable[[str], HostsRun]]:
    with contextlib.ExitStack() as stack:

        def start(nodes: str) -> HostsRun:
            run = HostsRun(tmp_path, nodes)
            stack.callback(lambda: run.lose(*run.launchers))
            return run

        yield start


def test_a_lost_hosts_ranks_are_resharded_onto_those_that_are_left(hosts: Callable[[str], HostsRun]) -> None:
    run = hosts("1:3")
    for host in "abc":
        run.start(host)
        run.wait_until(lambda: (run.folder / "runs" / "tiny" / "config.yaml").is_file())
    before = run.wait_for_world(3)
    run.lose("c")
    found = run.wait_for_world(2)
    step, where = resumed(found)
    assert where.startswith("snapshot:/dev/shm/")
    last = max(each.step for each in before if isinstance(each, StepRecord))
    assert step >= last - last % 5 - 5  # the newest that was whole
    check_samples(found, step)
    assert list_checkpoints(run.folder / "runs" / "tiny" / "checkpoints") == []  # without touching a disk
    run.lose("b")
    assert resumed(run.wait_for_world(1))[1].startswith("snapshot:/dev/shm/")


def test_a_spare_host_takes_the_place_of_a_lost_one(hosts: Callable[[str], HostsRun]) -> None:
    run = hosts("2:2")
    for host in "ab":
        run.start(host)
        run.wait_until(lambda: (run.folder / "runs" / "tiny" / "config.yaml").is_file())
    run.wait_for_world(2)
    run.start("c")
    run.wait_until(lambda: "joining the run" in run.said("c"))
    number = len(named(run.attempt(), "snapshot"))
    run.lose("b")
    run.wait_until(lambda: bool(named(run.attempt(), "resume")) and len(named(run.attempt(), "snapshot")) >= 2)
    found = run.attempt()
    assert number >= 2
    step, where = resumed(found)
    assert where.startswith("snapshot:/dev/shm/")
    check_samples(found, step)


def test_two_hosts_at_once_are_too_many_for_one_copy(hosts: Callable[[str], HostsRun]) -> None:
    run = hosts("1:3")
    for host in "abc":
        run.start(host, "checkpoint.every_steps=40", "checkpoint.memory.every_steps=7")
        run.wait_until(lambda: (run.folder / "runs" / "tiny" / "config.yaml").is_file())
    run.wait_for_world(3)
    run.wait_until(lambda: bool(named(run.attempt(), "checkpoint")))
    run.lose("b", "c")
    found = run.wait_for_world(1)
    step, where = resumed(found)
    assert where.endswith(f"checkpoints/step-{step:08d}")
    assert step % 40 == 0
    check_samples(found, step)
    log = (run.folder / "runs" / "tiny" / "logs" / "rank-0.log").read_text()
    assert "passed over the memory of hosts: no checkpoint in snapshot:" in log


def test_two_copies_outlive_two_hosts(hosts: Callable[[str], HostsRun]) -> None:
    run = hosts("1:3")
    for host in "abc":
        run.start(host, "checkpoint.memory.copies=2")
        run.wait_until(lambda: (run.folder / "runs" / "tiny" / "config.yaml").is_file())
    run.wait_for_world(3)
    run.lose("b", "c")
    found = run.wait_for_world(1)
    assert resumed(found)[1].startswith("snapshot:/dev/shm/")
    check_samples(found, resumed(found)[0])


def test_a_stopped_keeper_is_replaced_and_costs_no_step(hosts: Callable[[str], HostsRun]) -> None:
    """Other hosts wait for it in vain until its launcher sees that it is stopped; then copies are made again."""
    run = hosts("2:2")
    for host in "ab":
        run.start(host)
        run.wait_until(lambda: (run.folder / "runs" / "tiny" / "config.yaml").is_file())
    run.wait_for_world(2)
    children = processes_of(run.launchers["b"].pid)
    keeper = next(each for each in children if "paceline.run.keeper" in each.cmdline())
    keeper.suspend()
    run.wait_until(lambda: "the keeper of this host's snapshots was stopped" in run.said("b"))
    number = len(named(run.attempt(), "snapshot"))
    run.wait_until(lambda: len(named(run.attempt(), "snapshot")) > number + 2)
    assert "without_copy" not in named(run.attempt(), "snapshot")[-1].detail
    run.lose("b")  # the copies on the other host
    run.start("b")
    run.wait_until(lambda: bool(named(run.attempt(), "resume")))
    assert resumed(run.attempt())[1].startswith("snapshot:/dev/shm/")
    assert named(run.attempt(), "no_snapshots") == []
