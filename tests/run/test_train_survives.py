"""Runs that go on by themselves: real ranks that are killed, asked to stop, or fail again and again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from command_runs import LiveRun
from gone_processes import wait_until_gone

from paceline.checkpoint import list_checkpoints
from paceline.health.exit_codes import DONE, NO_PROGRESS, PREEMPTED
from paceline.records.records import EndRecord, EventRecord, RunRecord, StepRecord, read_records

pytestmark = [
    # torch leaves the files of redirected output to the garbage collector.
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),
    pytest.mark.timeout(600),  # a machine under load takes its time to start processes
]

Call = Callable[..., Any]
AllGone = Callable[[], list[int]]
OPTIMIZER = """
import os, signal
from pathlib import Path
import torch

class Mortal(torch.optim.SGD):
    '''Does what it is told when it makes its n-th step, on rank 1, once or whenever it comes there.'''
    def __init__(self, groups, lr, deed, at=6, once=True):
        super().__init__(groups, lr=lr)
        self.deed, self.at, self.once, self.made = deed, at, once, 0
    def step(self, closure=None):
        self.made += 1
        mark = Path("done")
        if self.made == self.at and os.environ["RANK"] == "1" and not (self.once and mark.exists()):
            mark.touch()
            if self.deed == "raise":
                raise ValueError("a bad day")
            os.kill(os.getpid(), getattr(signal, self.deed))
        return super().step(closure)
"""
SETTINGS = ["train.steps=12", "checkpoint.every_steps=4", "optim.kind=mortal:Mortal", "recovery.max_restarts=3"]


@pytest.fixture
def train(project: Path, call: Call) -> Call:
    (project / "mortal.py").write_text(OPTIMIZER)
    return lambda *arguments: call("train", "tiny.yaml", *SETTINGS, *arguments)


def records(project: Path, rank: int) -> list[Any]:
    return list(read_records(project / "runs" / "tiny" / "records" / f"rank-{rank}.jsonl"))


def test_a_killed_rank_is_started_again_from_the_last_checkpoint(project: Path, train: Call, all_gone: AllGone) -> None:
    called = train("optim.args.deed=SIGKILL")
    assert called.code == DONE
    sentence = "rank 1 was killed by SIGKILL after step 5"
    assert called.err == f"paceline: {sentence}; restarting 2 ranks from step 4 (restart 1 of 3)\n"
    assert not list((project / "runs" / "tiny").glob("verdict.*"))  # of the attempt before
    for rank, process in enumerate(("kept", "new")):
        found = records(project, rank)
        assert [type(each) for each in found if isinstance(each, RunRecord | EndRecord)] == [
            *(RunRecord, EndRecord),
            *(RunRecord, EndRecord),
        ]
        restart = next(each for each in found if isinstance(each, EventRecord) and each.name == "restart")
        assert (restart.step, restart.detail) == (4, {"number": 1, "of": 3, "reason": sentence, "process": process})
        assert isinstance(found[-1], EndRecord)
        assert (found[-1].status, found[-1].step) == ("done", 12)
        second = found[found.index(restart) :]
        assert [each.step for each in second if isinstance(each, StepRecord)] == list(range(5, 13))
    assert len(all_gone()) >= 3


def test_a_signal_to_one_rank_stops_all_after_the_same_step(project: Path, train: Call) -> None:
    called = train("optim.args.deed=SIGUSR1")
    assert called.code == PREEMPTED
    ends = [records(project, rank)[-1] for rank in (0, 1)]
    assert [end.status for end in ends] == ["stopped", "stopped"]
    assert ends[0].step == ends[1].step >= 6
    assert "SIGUSR1" in ends[1].message
    newest = list_checkpoints(project / "runs" / "tiny" / "checkpoints")[-1]
    assert newest.name == f"step-{ends[0].step:08d}"
    assert called.err.startswith("paceline: preempted: the state is saved\n")
    assert f"to go on from step {ends[0].step}:  paceline train runs/tiny/config.yaml --resume auto" in called.err


@pytest.mark.exhaustive
@pytest.mark.parametrize("at", [11, 12])
def test_a_signal_at_the_end_of_a_run_lets_it_be_done(project: Path, train: Call, at: int) -> None:
    called = train(f"optim.args={{deed: SIGTERM, at: {at}}}")
    assert (called.code, called.err) == (DONE, "")
    assert {(records(project, rank)[-1].status, records(project, rank)[-1].step) for rank in (0, 1)} == {("done", 12)}
    assert list_checkpoints(project / "runs" / "tiny" / "checkpoints")[-1].name == "step-00000012"


@pytest.mark.soak
@pytest.mark.parametrize("backend", ["virtual", "gloo"])
def test_memory_spikes_and_losses_that_are_not_finite_are_handled_as_the_policies_say(
    project: Path, call: Call, backend: str
) -> None:
    settings = [
        *("train.steps=24", "checkpoint.every_steps=4", "train.max_bad_steps=1", "monitor.console=false"),
        *("recovery.max_restarts=3", "recovery.on_oom=halve", "recovery.on_nan=lower_rate", "recovery.rate_factor=0.5"),
        *("recovery.on_spike=roll_back", "recovery.spike_window=4", "recovery.spike_threshold=20"),
    ]
    faults = "oom:rank=1@step=6,spike:x10000@step=12,nan@step=19"
    called = call("chaos", "tiny.yaml", *settings, "--backend", backend, "--faults", faults, "--json")
    assert called.code == 0, called.err
    report = json.loads(called.out)
    assert [each["how"] for each in report["faults"]] == ["restarted", "went back", "went back"]
    assert any("with half the microbatch" in line for line in report["told"])
    found = list(read_records(project / "runs" / "tiny-chaos" / "records" / "rank-0.jsonl"))
    starts = [each for each in found if isinstance(each, RunRecord)]
    assert [each.microbatch for each in starts] == [4, 2]
    assert {each.global_batch for each in starts} == {8}
    back = [each for each in found if isinstance(each, EventRecord) and each.name == "roll_back"]
    assert [each.step for each in back] == [8 if back[0].step == 8 else 12, 16]
    rates = {each.step: each.lr for each in found if isinstance(each, StepRecord)}
    assert rates[24] == pytest.approx(rates[1] / 2)


@pytest.mark.exhaustive
def test_a_preempted_run_goes_on_at_another_number_of_ranks(project: Path, train: Call, call: Call) -> None:
    assert train("optim.args.deed=SIGTERM").code == PREEMPTED
    again = call("train", "runs/tiny/config.yaml", "parallel.ranks=1", "--resume", "auto")
    assert again.code == DONE
    assert records(project, 0)[-1].step == 12


@pytest.mark.exhaustive
def test_the_same_error_twice_is_not_tried_a_third_time(project: Path, train: Call) -> None:
    called = train("optim.args={deed: raise, at: 2, once: false}")
    assert called.code == NO_PROGRESS
    assert called.err.count("restarting 2 ranks from the beginning: there is no checkpoint (restart 1 of 3)") == 1
    assert "  not started again: the same came twice, after step 1\n" in called.err
    assert sum(isinstance(each, RunRecord) for each in records(project, 1)) == 2


@pytest.mark.exhaustive
@pytest.mark.parametrize("arguments", [("data.workers=1",), (), ("recovery.warm=false", "data.workers=1")])
def test_a_scheduler_that_signals_all_processes_of_a_job_has_it_saved(
    live: Callable[..., LiveRun], arguments: tuple[str, ...]
) -> None:
    run = live(*arguments)
    ranks = run.ranks(step=20)
    launcher = psutil.Process(run.process.pid)
    for each in [*reversed(launcher.children(recursive=True)), launcher]:
        each.terminate()
    assert run.wait() == PREEMPTED, run.error()
    assert "preempted: the state is saved" in run.error()
    wait_until_gone(ranks)
