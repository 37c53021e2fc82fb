"""The command line called in this process, a tiny run to call it with, and user code that misbehaves when told to."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer
from gone_processes import wait_until_gone
from proposed_fixes import unreadable_fixes

from paceline.records.records import Record, RunRecord, read_records

CONFIG = """
name: tiny
model: {kind: factory, factory: "user_code:net"}
data: {kind: factory, factory: "user_code:data"}
train: {steps: 3, global_batch: 8}
parallel: {ranks: 2, device: cpu, threads: 1}
monitor: {tensorboard: false}
recovery: {max_restarts: 0}
"""

# Steps without end, and a checkpoint every few of them.
ENDLESS = ("train.steps=1000000", "checkpoint.every_steps=20", "monitor.console=false")
PATIENCE_S = 300.0  # a machine under load takes its time

USER_CODE = '''
import logging, os, signal, threading, time
from pathlib import Path
from typing import Any
import torch

def misbehave(plot, phase, rank="1"):
    """Does what a rank is to do in this phase."""
    where, _, deed = plot.partition(":")
    if where != phase or os.environ.get("RANK", rank) != rank:
        return
    if deed == "raise":
        raise ValueError("a mistake of the user")
    os.kill(os.getpid(), getattr(signal, deed))

class Bomb(dict):
    """Goes off while it is written to a file."""
    def __init__(self, plot):
        super().__init__()
        self.plot = plot
    def items(self):
        misbehave(self.plot, "checkpoint", rank="0")
        return super().items()

class Data(torch.utils.data.Dataset):
    def __init__(self, plot, samples):
        self.plot, self.samples, self.reads = plot, samples, 0
    def __len__(self):
        return self.samples
    def __getitem__(self, index):
        Path(f"pid-{os.getpid()}").touch()
        self.reads += 1
        if self.reads > 5:  # in the second step
            misbehave(self.plot, "data")
        return torch.full((8,), float(index)), index % 4

class Net(torch.nn.Module):
    def __init__(self, plot, width):
        super().__init__()
        self.linear, self.plot = torch.nn.Linear(8, width), plot
    def forward(self, inputs):
        misbehave(self.plot, "forward" if self.training else "evaluation")
        outputs = self.linear(inputs)
        if self.training and outputs.requires_grad:
            # Not where the FLOPs of a model are counted, without values, before the run begins.
            outputs.register_hook(lambda gradient: None if gradient.is_meta else misbehave(self.plot, "backward"))
        return outputs * float("nan") if self.plot == "nan" else outputs

class Optimizer(torch.optim.SGD):
    def __init__(self, groups, lr, plot=""):
        super().__init__(groups, lr=lr)
        self.plot = plot
    def step(self, closure=None):
        misbehave(self.plot, "optimizer")
        return super().step(closure)
    def state_dict(self):
        return {**super().state_dict(), "bomb": Bomb(self.plot)}

def data(plot="", samples=64, lock=False):
    made = Data(plot, samples)
    made.lock = threading.Lock() if lock else None
    return made

def net(plot="", width=4, wander=False):
    misbehave(plot, "factory")
    logging.getLogger(__name__).info("a net of width %d", width)
    if wander:
        Path("elsewhere").mkdir(exist_ok=True)
        os.chdir("elsewhere")
    return Net(plot, width)
'''


@dataclass(frozen=True, slots=True, kw_only=True)
class Called:
    """What a call of the command line did."""

    code: int
    out: str
    err: str


Call = Callable[..., Called]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a config and code of the user's, and the current one."""
    (tmp_path / "tiny.yaml").write_text(CONFIG)
    (tmp_path / "user_code.py").write_text(USER_CODE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def call(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    plain_rendezvous: None,  # noqa: ARG001
) -> Iterator[Call]:
    """Calls ``paceline`` in this process, which has torch already; the ranks are processes all the same.

    With ``verbs`` it calls those of another program.
    """
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    from paceline.cli.app import app, run_command

    started: list[SubprocessHandler] = []
    start = SubprocessHandler.__init__

    def noted(handler: SubprocessHandler, *arguments: Any, **keywords: Any) -> None:
        started.append(handler)
        start(handler, *arguments, **keywords)

    monkeypatch.setattr(SubprocessHandler, "__init__", noted)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(sys, "path", sys.path[:])

    def run(*arguments: str, verbs: typer.Typer = app) -> Called:
        monkeypatch.setattr(sys, "argv", ["paceline", *arguments])
        with pytest.raises(SystemExit) as left:
            run_command(verbs)
        shown = capsys.readouterr()
        assert unreadable_fixes(shown.err, typed=" ".join(("paceline", *arguments[:2]))) == []
        code = left.value.code
        return Called(code=code if isinstance(code, int) else int(code is not None), out=shown.out, err=shown.err)

    yield run
    if started:
        started.clear()
        gc.collect()  # torch leaves the files of redirected output to the garbage collector


@pytest.fixture
def ends() -> Callable[[Path], list[Record]]:
    """Returns the last record of each rank of a run."""
    return lambda folder: [list(read_records(path))[-1] for path in sorted(folder.glob("records/rank-*"))]


@pytest.fixture
def all_gone(project: Path) -> Callable[[], list[int]]:
    """Waits until no rank runs, nor any process that read data, such as a loader worker; returns which there were.

    The process that predicts a long run reads data too, sooner or later: it may be among them or not.
    """

    def wait() -> list[int]:
        records = [record for path in project.glob("*/*/records/*.jsonl") for record in read_records(path)]
        pids = {record.pid for record in records if isinstance(record, RunRecord)}
        pids |= {int(path.name.removeprefix("pid-")) for path in project.glob("pid-*")}
        wait_until_gone(pids - {os.getpid()})
        return sorted(pids)

    return wait


class LiveRun:
    """A run of ``paceline train`` in a process of its own, to be looked at, signalled and killed."""

    def __init__(self, folder: Path, command: Sequence[str]) -> None:
        self.folder = folder
        environment = {name: value for name, value in os.environ.items() if name != "RANK"}
        self._error = (folder / "stderr").open("wb")
        self.process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=self._error
        )

    def ranks(self, step: int) -> list[int]:
        """Waits until a checkpoint of ``step`` or later is there; returns the processes of the newest attempt."""
        run = self.folder / "runs" / "tiny"
        self.wait_until(lambda: any(int(each.name[5:]) >= step for each in run.glob("checkpoints/step-????????")))
        return newest_ranks(run)

    def wait_until(self, is_met: Callable[[], bool]) -> None:
        """Waits for something that the run does."""
        deadline = time.monotonic() + PATIENCE_S
        while not is_met():
            assert self.process.poll() is None, self.error()
            assert time.monotonic() < deadline, self.error()
            time.sleep(0.02)

    def wait(self) -> int:
        """Waits for the end of the run; returns its code."""
        return self.process.wait(PATIENCE_S)

    def error(self) -> str:
        """Returns what the run wrote to standard error."""
        return (self.folder / "stderr").read_text()

    def close(self) -> None:
        """Ends the launcher, and with it the ranks."""
        self.process.kill()
        self.process.wait()
        self._error.close()


def newest_ranks(run: Path) -> list[int]:
    """Returns the process of each rank in its newest attempt, from its records."""
    paths = sorted(run.glob("records/rank-*.jsonl"))
    return [[each.pid for each in read_records(path) if isinstance(each, RunRecord)][-1] for path in paths]


@pytest.fixture
def live(project: Path) -> Iterator[Callable[..., LiveRun]]:
    """Starts ``paceline train`` on a run without end, with more arguments; with ``by`` something else starts it."""
    with contextlib.ExitStack() as stack:

        def start(*arguments: str, by: Sequence[str] = (sys.executable,)) -> LiveRun:
            command = [*by, "-m", "paceline", "train", "tiny.yaml", *ENDLESS, *arguments]
            run = LiveRun(project, command)
            stack.callback(run.close)
            return run

        yield start
