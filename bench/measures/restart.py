"""How long a killed rank stops a run: from SIGKILL to the first new step, beside a bare script under torchrun.

Both train the same small classifier on two Gloo ranks, save every ten steps and resume by themselves. A rank is killed
once it is past a step between two saves; the time runs until a restarted rank has trained its first step. The arms take
turns, so that the ratio stands when the machine is noisy. A round counts as failed where the run does not come back: a
rank under torchrun may find the address that a dead one left in the store, and use up all restarts that way.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from paceline.errors import LaunchError
from paceline.health.diagnosis import TrainedSteps
from paceline.run.notes import noted_processes, read_progress

_KILL_AFTER = 35
_PATIENCE_S = 120.0

_CONFIG = """
name: run
model: {kind: mlp, hidden_dim: 256, dropout: 0.0}
data: {kind: synthetic_classification, features: 64, classes: 10, samples: 4096, eval_fraction: 0.0}
train: {steps: 1000000, global_batch: 64}
optim: {kind: adamw, lr: 0.001}
parallel: {ranks: RANKS, device: cpu, threads: 1}
comm: {backend: gloo}
checkpoint: {every_steps: 10}
monitor: {tensorboard: false, console: false, folder: .}
"""

_SCRIPT = """
import os, sys
from pathlib import Path
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from paceline.run.notes import StepNote, note_process

folder = Path(sys.argv[1])
rank = int(os.environ["RANK"])
note_process(folder, rank)
torch.set_num_threads(1)
torch.distributed.init_process_group("gloo")
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
saved, step = folder / "state.pt", 0
if saved.exists():
    state = torch.load(saved, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    step = state["step"]
note = StepNote(folder, rank, step)
parallel = DistributedDataParallel(model)
generator = torch.Generator().manual_seed(rank)
while True:
    inputs = torch.randn(32, 64, generator=generator)
    targets = torch.randint(10, (32,), generator=generator)
    nn.functional.cross_entropy(parallel(inputs), targets).backward()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    note.write(step)
    if step % 10 == 0:
        if rank == 0:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, "partial.pt")
            os.replace("partial.pt", saved)
        torch.distributed.barrier()
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restarted:
    """One kill: how long until the first new step, and between which steps."""

    seconds: float
    killed_after: int
    resumed_from: int


def bench_restart(
    ranks: int, rounds: int, environment: Mapping[str, str], tell: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Measures both arms in turn; returns a row for each, with the ratio of medians in ours."""
    arms = {"paceline train": _start_ours, "torchrun, bare DDP script": _start_bare}
    found: dict[str, list[Restarted]] = {name: [] for name in arms}
    for number in range(rounds):
        for name, start in arms.items():
            try:
                result = _measure(start, ranks, environment)
            except LaunchError as error:
                tell(f"round {number + 1}: {name}: {error}")
                continue
            found[name].append(result)
            tell(f"round {number + 1}: {name}: {result.seconds:.2f} s")
    bare = found["torchrun, bare DDP script"]
    base = median(each.seconds for each in bare) if bare else None
    return [_row(name, results, rounds, base) for name, results in found.items()]


def _row(name: str, results: Sequence[Restarted], rounds: int, base: float | None) -> dict[str, Any]:
    row: dict[str, Any] = {"arm": name, "failed": rounds - len(results)}
    if not results:
        return row
    seconds = sorted(each.seconds for each in results)
    return {
        **row,
        "median_s": round(median(seconds), 3),
        "least_s": round(seconds[0], 3),
        "most_s": round(seconds[-1], 3),
        "ratio": None if base is None else round(median(seconds) / base, 3),
        "steps_lost": median(each.killed_after - each.resumed_from for each in results),
    }


Starter = Callable[[Path, int, Mapping[str, str]], "subprocess.Popen[bytes]"]


def _measure(start: Starter, ranks: int, environment: Mapping[str, str]) -> Restarted:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        process = start(Path(scratch), ranks, environment)
        try:
            before = _wait(process, folder, lambda found: found.last_step >= _KILL_AFTER)
            os.kill(noted_processes(folder)[1], signal.SIGKILL)
            began = time.perf_counter()
            after = _wait(process, folder, lambda found: 0 < found.first_step < found.last_step)
            seconds = time.perf_counter() - began
            return Restarted(seconds=seconds, killed_after=before.last_step, resumed_from=after.first_step)
        finally:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30.0)
            with contextlib.suppress(ProcessLookupError):  # ranks that a launcher has left behind go with it
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait(process: subprocess.Popen[bytes], folder: Path, is_met: Callable[[TrainedSteps], bool]) -> TrainedSteps:
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        found = read_progress(folder).get(1)
        if found is not None and is_met(found):
            return found
        if process.poll() is not None:
            raise LaunchError(f"{process.args!r} left with exit code {process.returncode} and did not come back")
        time.sleep(0.002)
    raise LaunchError(f"{process.args!r} did not get there within {_PATIENCE_S:g} s")


def _start_ours(scratch: Path, ranks: int, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    (scratch / "config.yaml").write_text(_CONFIG.replace("RANKS", str(ranks)), encoding="utf-8")
    return _start([sys.executable, "-m", "paceline", "train", "config.yaml"], scratch, environment)


def _start_bare(scratch: Path, ranks: int, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    (scratch / "run" / "logs").mkdir(parents=True)
    (scratch / "bare.py").write_text(_SCRIPT, encoding="utf-8")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "3"]
    return _start([*launcher, "--nproc-per-node", str(ranks), "bare.py", str(scratch / "run")], scratch, environment)


def _start(command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    variables = {name: value for name, value in environment.items() if name not in ("RANK", "WORLD_SIZE")}
    return subprocess.Popen(
        command,
        cwd=folder,
        env={**variables, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
