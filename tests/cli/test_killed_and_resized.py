"""Real runs that are killed at any moment and go on at any number of ranks: every sample once an epoch, in order."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from recomputed import recompute

from paceline.checkpoint import list_checkpoints, open_checkpoint
from paceline.health.exit_codes import DONE

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]

SAMPLES, BATCH, EVERY, KILLS = 52, 12, 5, 7
EPOCH = 5  # steps; the last of them is shorter
PATIENCE_S = 600.0  # a machine under load takes its time
VICTIMS = ("launcher", "all", "a rank", "the ranks")
STRATEGIES = ("ddp", "zero2", "fsdp")
CONFIG = f"""
name: resized
model: {{kind: factory, factory: "noting:Net"}}
data: {{kind: factory, factory: "noting:Data", eval_fraction: 0.0}}
train: {{steps: 1000000, global_batch: {BATCH}}}
parallel: {{ranks: 2, device: cpu, threads: 1}}
checkpoint: {{every_steps: {EVERY}}}
monitor: {{tensorboard: false, console: false}}
recovery: {{max_restarts: 0}}
"""
# A model that writes down what it is trained on, and in which step: a buffer counts them, so that it knows after a
# resume. One line at a time, which SIGKILL leaves whole or does not leave.
CODE = f"""
import os, time
import torch

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return {SAMPLES}
    def __getitem__(self, index):
        return torch.full((8,), float(index)), index % 4

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 4)
        self.register_buffer("made", torch.zeros((), dtype=torch.int64))
    def forward(self, inputs):
        if self.training and "RANK" in os.environ and inputs.device.type == "cpu":
            self.made += 1
            words = [time.time_ns(), self.made.item(), os.environ["WORLD_SIZE"], os.environ["RANK"]]
            line = " ".join(map(str, [*words, *map(int, inputs[:, 0].tolist())]))
            file = os.open(f"ids/{{os.getpid()}}", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.write(file, line.encode() + b"\\n")
            os.close(file)
        return self.linear(inputs / {SAMPLES})
"""


class Life:
    """One start of ``paceline train``, until it ends or is killed."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.folder = folder
        self.start = newest(folder)
        command = [sys.executable, "-m", "paceline", "train", "resized.yaml", "--resume", "auto", *arguments]
        environment = {name: value for name, value in os.environ.items() if name != "RANK"} | {"SLURM_JOB_ID": "1"}
        self._error = (folder / "stderr").open("wb")
        self.process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=self._error
        )

    def live(self, steps: int, delay_s: float) -> None:
        """Lets it live until it has saved so many steps later, and a moment longer."""
        deadline = time.monotonic() + PATIENCE_S
        while steps and newest(self.folder) < self.start + steps:
            assert self.process.poll() is None, self.error()
            assert time.monotonic() < deadline, self.error()
            time.sleep(0.005)
        time.sleep(delay_s)

    def kill(self, victim: str, draw: random.Random) -> None:
        """Kills it, or some of it, and waits until the launcher is gone; others may still be on their way out."""
        ranks = self.ranks()
        children = [each.pid for each in psutil.Process(self.process.pid).children(recursive=True)]
        whom = {"launcher": [self.process.pid], "all": [self.process.pid, *children], "the ranks": ranks}
        for pid in whom.get(victim, draw.sample(ranks, min(1, len(ranks)))) or [self.process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        code = self.process.wait(PATIENCE_S)
        assert code != DONE, self.error()
        self._error.close()

    def ranks(self) -> list[int]:
        """Returns the processes that train."""
        known = {int(path.name) for path in (self.folder / "ids").iterdir()}
        return [each.pid for each in psutil.Process(self.process.pid).children(recursive=True) if each.pid in known]

    def finish(self) -> None:
        """Waits for its end."""
        assert self.process.wait(PATIENCE_S) == DONE, self.error()
        self._error.close()

    def error(self) -> str:
        """Returns what was written to standard error."""
        return (self.folder / "stderr").read_text()


@pytest.fixture
def lives(tmp_path: Path) -> Iterator[list[Life]]:
    """All lives of a run, none of which outlives the test."""
    (tmp_path / "resized.yaml").write_text(CONFIG)
    (tmp_path / "noting.py").write_text(CODE)
    (tmp_path / "ids").mkdir()
    made: list[Life] = []
    yield made
    for each in made:
        each.process.kill()
        each.process.wait()


def newest(folder: Path) -> int:
    """Returns the step of the newest checkpoint."""
    names = [path.name for path in folder.glob("runs/resized/checkpoints/step-????????")]
    return max((int(name[5:]) for name in names), default=0)


def trained_on(folder: Path) -> dict[int, list[int]]:
    """Returns the samples of each step, sorted: where it was done several times, those of the last one."""
    lines: dict[int, list[list[int]]] = {}
    for path in (folder / "ids").iterdir():
        for line in path.read_text().splitlines():
            moment, step, world, rank, *ids = map(int, line.split())
            lines.setdefault(step, []).append([moment, world, rank, *ids])
    found = {}
    for step, noted in lines.items():
        noted.sort()
        last = noted[-noted[-1][1] :]
        assert sorted(each[2] for each in last) == list(range(last[-1][1])), (step, noted)
        found[step] = sorted(index for each in last for index in each[3:])
    return found


@pytest.mark.parametrize("seed", [0, 1])
def test_ids_are_exact_whoever_is_killed(tmp_path: Path, lives: list[Life], seed: int) -> None:
    draw = random.Random(f"resized {seed}")
    told: list[Any] = []
    for number in range(KILLS):
        ranks, strategy = draw.randrange(1, 5), draw.choice(STRATEGIES)
        victim, steps = VICTIMS[(number + seed) % len(VICTIMS)], draw.randrange(5) * EVERY
        delay_s = draw.random() * (0.03 if steps else 4.0)
        told.append((ranks, strategy, victim, steps, delay_s, newest(tmp_path)))
        lives.append(Life(tmp_path, f"parallel.ranks={ranks}", f"parallel.strategy={strategy}"))
        lives[-1].live(steps, delay_s)
        lives[-1].kill(victim, draw)
    end = newest(tmp_path) + 7
    lives.append(Life(tmp_path, f"train.steps={end}", f"parallel.ranks={draw.randrange(1, 5)}"))
    lives[-1].finish()
    check_ids(tmp_path, end, told)
    lives.append(Life(tmp_path, f"train.steps={end}", "parallel.ranks=1", "name=twin"))
    lives[-1].finish()
    found, twin = (consumed(tmp_path / "runs" / name) for name in ("resized", "twin"))
    assert found == twin, told
    assert recompute(found) == {"hash": found["hash"], "count": found["count"]}, told
    command = [sys.executable, "-m", "paceline", "checkpoint", "verify", "runs/resized"]
    verified = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert verified.returncode == DONE, verified.stderr


def check_ids(folder: Path, end: int, told: list[Any]) -> None:
    """Every step was done, and every epoch has every sample once, as the model has seen them."""
    found = trained_on(folder)
    assert set(found) >= set(range(1, end + 1)), told
    for first in range(1, end - EPOCH + 2, EPOCH):
        epoch = [index for step in range(first, first + EPOCH) for index in found[step]]
        assert sorted(epoch) == list(range(SAMPLES)), (first, told)


def consumed(run: Path) -> dict[str, Any]:
    """Returns what the newest checkpoint of a run says of the samples consumed."""
    values: dict[str, Any] = open_checkpoint(list_checkpoints(run / "checkpoints")[-1]).values["consumed"]
    return values
