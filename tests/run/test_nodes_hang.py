"""Runs on several hosts that hang: two launchers on this machine, a fault in one rank, and what both of them say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from free_ports import free_port
from gone_processes import wait_until_gone

from paceline.config.sections import RecoveryConfig
from paceline.health.diagnosis import FailedAttempt, Stop, TrainedSteps, after_failure, diagnose
from paceline.health.exit_codes import FAILED, HUNG, NO_PROGRESS
from paceline.health.failure import failure_of_verdict
from paceline.health.verdict import HangVerdict
from paceline.records.records import EndRecord, EventRecord, RunRecord, read_records

CONFIG = """
name: tiny
model: {kind: factory, factory: "user_code:net"}
data: {kind: synthetic_classification, samples: 64, features: 4, classes: 2}
train: {steps: 1000000, global_batch: 8}
parallel: {device: cpu, threads: 1}
checkpoint: {every_steps: 2}
monitor: {tensorboard: false, console: false, hang_s: 2}
"""
BAD_STEP = 5  # of each attempt

USER_CODE = f"""
import os, signal, time
import torch
from paceline.comm.base import DONE
from paceline.comm.traced import LedgerCommunicator

class Net(torch.nn.Linear):
    def __init__(self):
        super().__init__(4, 2)
        self.calls = 0
    def forward(self, values):
        self.calls += self.training
        if self.calls == {BAD_STEP} and os.environ["RANK"] == "1":
            globals()[os.environ["FAULT"]]()
        return super().forward(values)

def hang():
    time.sleep(600)  # stands here

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def mistake():
    raise TypeError("a mistake")

def once(change):
    real = LedgerCommunicator.issue
    def issue(self, call):
        if call.kind != "all_reduce":
            return real(self, call)
        LedgerCommunicator.issue = real
        return change(real, self, call)
    LedgerCommunicator.issue = issue

def skip():
    once(lambda real, comm, call: DONE)

def shape():
    short = torch.ones(5)
    once(lambda real, comm, call: real(comm, call._replace(output=short, tensor=short)))

def net():
    return Net()
"""


@dataclass(frozen=True, slots=True)
class Left:
    """How a launcher left, and what it said."""

    code: int
    err: str


def run_hosts(folder: Path, fault: str, *changes: str, hosts: tuple[str, ...] = ("", "")) -> list[Left]:
    """Runs a launcher for each host, all at the same time, until they leave; an empty name: this machine's."""
    (folder / "tiny.yaml").write_text(CONFIG)
    (folder / "user_code.py").write_text(USER_CODE)
    command = [sys.executable, "-m", "paceline", "train", "tiny.yaml", *changes, "--nnodes", str(len(hosts))]
    command += ["--node-ranks", "1", "--rdzv", f"127.0.0.1:{free_port()}"]
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    environment |= {"FAULT": fault, "PYTHONPATH": str(folder)}
    processes: list[subprocess.Popen[str]] = []
    try:
        for host in hosts:
            named = environment | ({"PACELINE_HOST": host} if host else {})
            processes.append(subprocess.Popen(command, cwd=folder, env=named, stderr=subprocess.PIPE, text=True))
        errors = [process.communicate()[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [Left(process.returncode, err) for process, err in zip(processes, errors, strict=True)]


def starts(folder: Path) -> list[RunRecord]:
    found = []
    for path in sorted((folder / "runs" / "tiny" / "records").glob("rank-*.jsonl")):
        found += [record for record in read_records(path) if isinstance(record, RunRecord)]
    return found


@pytest.mark.soak
@pytest.mark.timeout(400)
@pytest.mark.parametrize("hosts", [("", ""), ("a", "b")], ids=["one machine", "two hosts"])
@pytest.mark.parametrize(
    ("fault", "kinds"), [("hang", {"missing"}), ("skip", {"mismatch", "missing"}), ("shape", {"mismatch"})]
)
def test_every_console_tells_why_and_no_rank_is_left(
    tmp_path: Path, fault: str, kinds: set[str], hosts: tuple[str, ...]
) -> None:
    left = run_hosts(tmp_path, fault, "recovery.on_hang=stop", hosts=hosts)
    told = json.loads((tmp_path / "runs" / "tiny" / "verdict.json").read_text())
    assert told["kind"] in kinds
    assert told["ranks"] in ([1], [0, 1])
    if fault == "hang":
        lines = USER_CODE.splitlines()
        (number,) = (at for at, line in enumerate(lines, start=1) if line.endswith("# stands here"))
        assert f"user_code.py:{number} in hang" in told["sentence"]
    for each in left:
        assert (each.code, told["sentence"] in each.err) == (HUNG, True), each
    for rank in (0, 1):
        assert told["sentence"] in (tmp_path / "runs" / "tiny" / "logs" / f"rank-{rank}.log").read_text()
        records = list(read_records(tmp_path / "runs" / "tiny" / "records" / f"rank-{rank}.jsonl"))
        assert isinstance(records[-1], EndRecord)
        assert records[-1].status == "failed"
    assert len(starts(tmp_path)) == 2  # one attempt
    wait_until_gone([each.pid for each in starts(tmp_path)])


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_ranks_that_hang_are_started_again_while_that_helps(tmp_path: Path) -> None:
    """Each attempt comes a few steps further than the one before, until the limit."""
    left = run_hosts(tmp_path, "hang", "recovery.max_restarts=2")
    attempts = [each for each in starts(tmp_path) if each.rank == 0]
    assert len(attempts) == 3
    for each in left:
        assert each.code == HUNG
        for number in (1, 2):
            assert f"restarting from the newest checkpoint (restart {number} of 2)" in each.err
    records = list(read_records(tmp_path / "runs" / "tiny" / "records" / "rank-0.jsonl"))
    assert any(isinstance(each, EventRecord) and each.name == "resume" for each in records)
    wait_until_gone([each.pid for each in starts(tmp_path)])


@pytest.mark.soak
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("fault", "code", "num_attempts"), [("die", NO_PROGRESS, 2), ("mistake", FAILED, 1)])
def test_a_rank_that_fails_on_one_host_is_decided_about_once_for_all(
    tmp_path: Path, fault: str, code: int, num_attempts: int
) -> None:
    left = run_hosts(tmp_path, fault, "recovery.max_restarts=1", hosts=("a", "b"))
    assert [each.code for each in left] == [code, code], left
    assert len([each for each in starts(tmp_path) if each.rank == 0]) == num_attempts
    for each in left:
        if fault == "die":
            assert "rank 1 was killed by SIGKILL after step 4; restarting from the newest checkpoint" in each.err
            assert "recovery.max_restarts = 1 is reached" in each.err
        else:
            assert "TypeError: a mistake" in each.err
            assert "not started again: an error of this kind comes again" in each.err
    wait_until_gone([each.pid for each in starts(tmp_path)])


VERDICT = HangVerdict(kind="missing", ranks=(1,), sentence="rank 1 is missing (step 3, for 2.1 s); rank 0 waits for it")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_hang_is_the_same_failure_whichever_host_tells_it(tmp_path: Path, rank: int) -> None:
    failure = failure_of_verdict(VERDICT, rank, tmp_path / "verdict.txt")
    attempt = FailedAttempt.of(diagnose([failure], tmp_path), {1: TrainedSteps(first_step=10, last_step=13)})
    assert (attempt.first_step, attempt.last_step, attempt.rank) == (10, 13, 1)
    assert attempt.message == "rank 1 is missing (step 3); rank 0 waits for it"
    assert isinstance(after_failure(RecoveryConfig(on_hang="stop"), [attempt]), Stop)
    assert attempt.is_sure
    again = FailedAttempt.from_text(attempt.to_text())
    assert (again, again.diagnosis) == (attempt, attempt.diagnosis)
