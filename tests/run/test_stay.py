"""Ranks that are well stay when another one fails: losses are the same to the last bit, and nothing is left over."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from command_runs import Called

from paceline.health.exit_codes import DONE
from paceline.records.records import EventRecord, RunRecord, StepRecord, read_records
from paceline.run.stay import CODE
from paceline.run.warm_client import LENGTH

pytestmark = [
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),  # of torch's redirected output
    pytest.mark.timeout(600),
]

Call = Callable[..., Called]
Losses = dict[int, tuple[float | None, float | None]]
CONFIG = """
name: tiny
model: {kind: gpt, layers: 2, width: 16, heads: 2, context: 8, dropout: 0.1}
data: {kind: synthetic_tokens, samples: 400, vocab_size: 23, context: 8}
train: {steps: 14, global_batch: 4, microbatch: 1, hooks: ["deeds:act"]}
optim: {kind: adamw, lr: 0.01, clip_norm: 1.0}
parallel: {ranks: 2, device: cpu, threads: 1}
checkpoint: {every_steps: 4}
monitor: {tensorboard: false, console: false}
recovery: {max_restarts: 9, max_stalled_restarts: 9}
"""
# A hook of the user's. A line "rank step deed" in the file deeds has a rank do something once, after that step.
DEEDS = '''
import os, random, signal, sys, threading, time
from pathlib import Path
import numpy, torch

def act(trainer, result):
    for number, line in enumerate(Path(ROOT, "deeds").read_text().splitlines()):
        rank, step, deed = line.split()
        mark = Path(ROOT, f"done-{number}")
        if os.environ["RANK"] == rank and result.step == int(step) and not mark.exists():
            mark.touch()
            globals()[deed](trainer)

def kill(trainer):
    while os.environ["RANK"] == "1" and trainer.step == 6 and not Path(ROOT, "planted").exists() and PLANTS:
        time.sleep(0.01)  # the other rank is interrupted wherever it is
    os.kill(os.getpid(), signal.SIGKILL)

def kill_beside_spare(trainer):
    """Dies when the spare is there: a process beside the ranks, of the same parent."""
    import psutil
    while len(psutil.Process(os.getppid()).children()) < 3:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)

def plant(trainer):
    """Leaves behind what a step, or code that trusts in a process of its own, may leave."""
    global left
    left = "of an earlier attempt"
    engine = trainer.parts.engine
    for parameter in engine.module.parameters():
        parameter.grad = torch.full_like(parameter, 1e3)
        parameter.data.add_(1.0)
    torch.manual_seed(1), numpy.random.seed(1), random.seed(1)
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.set_num_threads(2)
    os.environ["LEFT"] = "1"
    os.environ["RANK"] = "7"
    sys.path.insert(0, "/nowhere")
    os.chdir("/")
    import subprocess
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(ROOT, "child").write_text(str(child.pid))
    # A handle of the old communicator, in the hands of what is not freed.
    torch.kept = engine.world, engine.world.all_reduce(torch.ones(3))
    os.environ["RANK"] = "0"
    Path(ROOT, "planted").touch()
    time.sleep(600)  # until the other rank's death ends this attempt: with all this, the next step would fail by itself

def handle_slowly(trainer):
    """Has what is done when a step fails take its time, as on a busy machine."""
    meter = trainer.parts.meter
    drain = type(meter).drain
    def slowly(self, **how):
        if sys.exc_info()[0] is not None:
            time.sleep(1.0)
        return drain(self, **how)
    type(meter).drain = slowly

def thread(trainer):
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()

def run_on(trainer):
    def loop():
        while True:
            time.sleep(0.01)
    threading.Thread(target=loop, daemon=True).start()

def enter(trainer):
    torch.autocast("cpu", dtype=torch.bfloat16).__enter__()

def check(trainer):
    found = ["left" in globals(), "LEFT" in os.environ, "/nowhere" in sys.path, os.getcwd() != ROOT]
    found += [torch.get_num_threads() != 1, len(threading.enumerate()) > 6]
    Path(ROOT, "found").write_text(repr(found))
'''
STRATEGIES = {
    "ddp": ["parallel.strategy=ddp"],
    "zero2": ["parallel.strategy=zero2"],
    "fsdp": ["parallel.strategy=fsdp"],
    "pipeline": ["parallel.pipeline=2", "parallel.strategy=ddp"],
}


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call) -> Call:
    """Trains in a folder named by the first argument, with the deeds of the second; returns the losses by step."""
    (tmp_path / "config.yaml").write_text(CONFIG)
    monkeypatch.setattr("paceline.run.supervise._STAYS_S", 60.0)  # on a busy machine too, who is well stays

    def run(name: str, deeds: list[str], *arguments: str) -> Called:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "deeds").write_text("\n".join(deeds))
        (folder / "deeds.py").write_text(f"ROOT, PLANTS = {str(folder)!r}, {'0 6 plant' in deeds}\n{DEEDS}")
        monkeypatch.chdir(folder)
        return call("train", str(tmp_path / "config.yaml"), *arguments)

    return run


def records(folder: Path, rank: int = 0) -> list[Any]:
    return list(read_records(folder / "runs" / "tiny" / "records" / f"rank-{rank}.jsonl"))


def losses(folder: Path) -> Losses:
    """Returns what was recorded last of each step."""
    return {each.step: (each.loss, each.grad_norm) for each in records(folder) if isinstance(each, StepRecord)}


@pytest.fixture(scope="module")
def plain_losses() -> dict[str, Losses]:
    """The losses of runs without a fault, by strategy."""
    return {}


@pytest.fixture
def losses_without(train: Call, tmp_path: Path, plain_losses: dict[str, Losses]) -> Callable[[str], Losses]:
    """Returns the losses of a run without a fault, whose processes would not stay, with a strategy: trained once."""

    def found(strategy: str) -> Losses:
        if strategy not in plain_losses:
            assert train("none", [], *STRATEGIES[strategy], "recovery.keep_processes=false").code == DONE
            plain_losses[strategy] = losses(tmp_path / "none")
        return plain_losses[strategy]

    return found


def processes(folder: Path, rank: int) -> list[tuple[int, str]]:
    """Returns the process of each attempt of a rank, and whether it was kept, as the attempt tells."""
    found = records(folder, rank)
    told = [str(each.detail["process"]) for each in found if isinstance(each, EventRecord) and each.name == "restart"]
    pids = [each.pid for each in found if isinstance(each, RunRecord)]
    return list(zip(pids, ["new", *told], strict=True))


@pytest.mark.parametrize("strategy", list(STRATEGIES))
def test_losses_are_those_of_a_run_without_the_fault(
    train: Call, losses_without: Callable[[str], Losses], tmp_path: Path, strategy: str
) -> None:
    deeds = ["0 6 plant", "1 6 kill", "0 10 check", "0 10 kill", "1 11 kill"]
    assert train("faults", deeds, *STRATEGIES[strategy]).code == DONE
    assert losses(tmp_path / "faults") == losses_without(strategy)
    assert sorted(losses_without(strategy)) == list(range(1, 15))
    first, second = processes(tmp_path / "faults", 0), processes(tmp_path / "faults", 1)
    assert [how for _, how in first] == ["new", "kept", "new", "kept"]
    assert [how for _, how in second] == ["new", "new", "kept", "new"]
    assert [pid == first[0][0] for pid, _ in first] == [True, True, False, False]
    assert second[1][0] == second[2][0]
    assert (tmp_path / "faults" / "found").read_text() == repr([False] * 6)
    assert not psutil.pid_exists(int((tmp_path / "faults" / "child").read_text()))
    assert not any(psutil.pid_exists(pid) for pid, _ in first + second)


def test_a_death_during_a_save_in_the_background_leaves_no_thread_that_waits(
    train: Call, losses_without: Callable[[str], Losses], tmp_path: Path
) -> None:
    arguments = ["checkpoint.asynchronous=true"]
    assert train("faults", ["1 4 kill", "1 8 kill"], *arguments).code == DONE
    assert [how for _, how in processes(tmp_path / "faults", 0)] == ["new", "kept", "kept"]
    assert losses(tmp_path / "faults") == losses_without("ddp")


def test_what_an_error_clears_is_not_interrupted(train: Call, tmp_path: Path) -> None:
    """Rank 0 notices the death by itself, and is told so while it ends the thread that saves."""
    arguments = ["checkpoint.asynchronous=true"]
    assert train("faults", ["0 4 handle_slowly", "1 4 kill"], *arguments).code == DONE
    assert [how for _, how in processes(tmp_path / "faults", 0)] == ["new", "kept"]


ATTEMPTS = """# forked
import socket, sys, time
from paceline.run.stay import StayingProcess, is_told_over

staying, code = StayingProcess(socket.socket(fileno=int(sys.argv[1]))), None
for attempt, seconds in enumerate((600.0, 0.3, 600.0), start=1):
    staying.wait_for_next(code)
    while attempt == 1 and not is_told_over():
        time.sleep(0.001)  # the word comes before the attempt has begun
    code = staying.run(lambda: time.sleep(seconds))
staying.wait_for_next(code)
"""


def test_a_word_that_an_attempt_is_over_counts_for_that_attempt_whenever_it_comes() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        child = subprocess.Popen([sys.executable, "-c", ATTEMPTS, str(theirs.fileno())], pass_fds=[theirs.fileno()])
        theirs.close()
        ours.settimeout(60.0)
        over, begin = LENGTH.pack(0), LENGTH.pack(2) + b"{}"
        ours.sendall(begin + over)
        assert ours.recv(CODE.size) == CODE.pack(1)
        ours.sendall(over + begin)  # late: of the attempt before
        assert ours.recv(CODE.size) == CODE.pack(0)
        ours.sendall(begin + over)
        assert ours.recv(CODE.size) == CODE.pack(1)
    assert child.wait(60) == 1  # with its parent's end of the link


@pytest.mark.parametrize(("deed", "told"), [("run_on", "deeds.py:"), ("enter", "it left a context of torch")])
def test_a_process_that_cannot_be_cleared_does_not_stay(
    train: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deed: str, told: str
) -> None:
    monkeypatch.setattr("paceline.run.supervise._STAYS_S", 1.5)
    assert train("faults", [f"0 2 {deed}", "1 2 kill"]).code == DONE
    assert [how for _, how in processes(tmp_path / "faults", 0)] == ["new", "new"]
    log = tmp_path / "faults" / "runs" / "tiny" / "logs" / "rank-0.log"
    assert "the process of rank 0 cannot stay for another attempt, so a new one takes its place" in log.read_text()
    assert told in log.read_text()


def test_a_spare_takes_the_place_of_a_rank_that_died(
    train: Call, losses_without: Callable[[str], Losses], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.run.supervise._SPARES_AFTER_S", 0.0)
    assert train("faults", ["1 5 kill_beside_spare", "0 9 kill_beside_spare"], "recovery.spares=1").code == DONE
    assert losses(tmp_path / "faults") == losses_without("ddp")
    first, second = processes(tmp_path / "faults", 0), processes(tmp_path / "faults", 1)
    assert [how for _, how in first] == ["new", "kept", "spare"]
    assert [how for _, how in second] == ["new", "spare", "kept"]
    assert len({pid for pid, _ in first + second}) == 4
    assert not any(psutil.pid_exists(pid) for pid, _ in first + second)


def test_a_spare_has_compiled_before_it_is_needed(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG.replace("gpt,", "gpt, compile: true,"))
    code = "import sys, torch._dynamo.utils as known; from paceline.run.worker import prepare; prepare(sys.argv[1:])\n"
    code += "print(known.counters['stats']['unique_graphs'], known.counters['aot_autograd']['ok'])"
    found = subprocess.run([sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE, text=True, check=True)
    assert found.stdout.split() == ["1", "1"]


def test_nothing_stays_where_that_is_not_wanted(train: Call, tmp_path: Path) -> None:
    assert train("faults", ["1 2 kill"], "recovery.keep_processes=false").code == DONE
    assert [how for _, how in processes(tmp_path / "faults", 0)] == ["new", "new"]
