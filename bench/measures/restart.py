"""How long a killed rank stops a run: from SIGKILL to the first new step, beside torchrun.

On CPU ranks all arms train the same small classifier on Gloo, save every ten steps and resume by themselves; ours with
processes that stay, with these and snapshots in memory in place of the disk, with a spare process besides, and with new
processes; torchrun's is a bare script. On a GPU they train a compiled GPT of 124 million parameters on two NCCL ranks
that share the device, each a host of its own; torchrun starts ranks of ours, with the same checkpoints and the same
cache of the compiler, which the first arm fills.

A rank is killed once it is past a step between two saves; the time runs until a restarted rank has trained its first
step (on a GPU has issued its third, which waits for the first). The arms take turns, so that the ratio stands when the
machine is noisy. A round counts as failed where the run does not come back: a rank of the bare script may find the
address that a dead one left in torchrun's store, and use up all restarts that way.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from paceline.errors import LaunchError
from paceline.health.diagnosis import TrainedSteps
from paceline.records.records import EventRecord, RunRecord, read_records
from paceline.run.notes import noted_processes, read_progress
from paceline.run.processes import loopback_interface

_KILL_AFTER = 35
_EVERY = 10  # steps between checkpoints
_GPU_SPARE_S = 20.0  # in which a spare has loaded the compiler and opened its GPU
_PATIENCE_S = 180.0
_KEPT, _NEW = "paceline train, kept processes", "paceline train, new processes"
_SPARE = "paceline train, spare processes"
_SPARES = ("recovery.spares=1",)
_MEMORY = ("checkpoint.every_steps=1000000", "checkpoint.memory.every_steps=10")

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

_GPT = """
name: run
model: {kind: gpt, size: gpt-124m, vocab_size: 50304, compile: true}
data: {kind: synthetic_tokens, vocab_size: 50304, context: 1024, samples: 8192, eval_fraction: 0.0}
train: {steps: 1000000, global_batch: 8, precision: bf16_master}
optim: {kind: adamw, lr: 0.0001}
checkpoint: {every_steps: 10}
recovery: {max_restarts: 3}
monitor: {tensorboard: false, console: false, folder: .}
"""

# One of torchrun's ranks, on the first GPU as all of them.
_RANK = """
import os, runpy, sys
os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", NCCL_HOSTID="host" + os.environ["RANK"])
sys.argv = ["paceline", "train", "config.yaml"]
if os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
    sys.argv += ["--resume", "auto"]
runpy.run_module("paceline", run_name="__main__")
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restarted:
    """One kill: how long until the first new step, between which steps, and memory of the GPU before and after."""

    seconds: float
    killed_after: int
    resumed_from: int
    gib: tuple[float, float] | None = None
    starts: tuple[dict[str, Any], ...] = ()  # of each rank: its process, and what its first step waited for


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartArm:
    """What is started, and after which step a rank is killed; a new step counts when so many others are issued.

    ``spare_s`` after the host of that rank has a spare process it is ready.
    """

    name: str
    start: Starter
    kill_after: int = _KILL_AFTER
    steps_behind: int = 0
    spare_s: float | None = None


def restart_arms(device: str) -> list[RestartArm]:
    """Returns the arms on a device. The last is the one that the others are compared with."""
    if device == "cpu":
        in_memory = partial(_start_ours, settings=_MEMORY)
        spare = partial(_start_ours, settings=(*_MEMORY, *_SPARES))
        starts: list[Starter] = [_start_ours, in_memory, spare, partial(_start_ours, keeps=False), _start_bare]
        names: tuple[str, ...] = (_KEPT, f"{_KEPT}, snapshots in memory", _SPARE, _NEW, "torchrun, bare DDP script")
        waits = [1.0 if name == _SPARE else None for name in names]
        return [RestartArm(name=a, start=b, spare_s=c) for a, b, c in zip(names, starts, waits, strict=True)]
    starts = [_start_hosts, partial(_start_hosts, settings=_SPARES), partial(_start_hosts, keeps=False), _start_elastic]
    names = (_KEPT, _SPARE, _NEW, "torchrun, ranks of paceline")
    return [
        RestartArm(
            name=name, start=start, kill_after=15, steps_behind=2, spare_s=_GPU_SPARE_S if name == _SPARE else None
        )
        for name, start in zip(names, starts, strict=True)
    ]


def bench_restart(
    arms: Sequence[RestartArm], ranks: int, rounds: int, environment: Mapping[str, str], tell: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Measures arms in turn; returns a row for each, with the ratio of its median to that of torchrun's."""
    found: dict[str, list[Restarted]] = {arm.name: [] for arm in arms}
    for number in range(rounds):
        for arm in arms:
            began = time.monotonic()
            try:
                result = _measure(arm, ranks, environment)
            except LaunchError as error:
                tell(f"round {number + 1}: {arm.name}: {error}")
                continue
            found[arm.name].append(result)
            memory = "" if result.gib is None else f", {result.gib[0]:.2f} GiB before and {result.gib[1]:.2f} after"
            took = f"{time.monotonic() - began:.0f} s with its start"
            tell(f"round {number + 1}: {arm.name}: {result.seconds:.2f} s ({took}{memory})")
            for rank, start in enumerate(result.starts):
                tell(f"  rank {rank}: {start}")
    bare = next((results for name, results in found.items() if name.startswith("torchrun")), [])
    base = median(each.seconds for each in bare) if bare else None
    return [_row(name, results, rounds, base) for name, results in found.items()]


def _row(name: str, results: Sequence[Restarted], rounds: int, base: float | None) -> dict[str, Any]:
    row: dict[str, Any] = {"arm": name, "failed": rounds - len(results)}
    if not results:
        return row
    seconds = sorted(each.seconds for each in results)
    memory = [each.gib for each in results if each.gib is not None]
    if memory:
        row["gib_before"], row["gib_after"] = (round(median(column), 2) for column in zip(*memory, strict=True))
    return {
        **row,
        "median_s": round(median(seconds), 3),
        "least_s": round(seconds[0], 3),
        "most_s": round(seconds[-1], 3),
        "ratio": None if base is None else round(median(seconds) / base, 3),
        "steps_lost": median(each.killed_after - each.resumed_from for each in results),
        "starts": list(results[-1].starts),
    }


Starter = Callable[[Path, int, Mapping[str, str]], "list[subprocess.Popen[bytes]]"]


def _measure(arm: RestartArm, ranks: int, environment: Mapping[str, str]) -> Restarted:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        processes = arm.start(Path(scratch), ranks, environment)
        try:
            _wait(processes, folder, lambda found: found.last_step >= arm.kill_after)
            if arm.spare_s is not None:
                _wait(processes, folder, lambda _: _has_spare(folder))
                time.sleep(arm.spare_s)
            if arm.steps_behind:  # on a GPU a save may take longer than the steps until the first kill
                _wait(processes, folder, lambda _: any((folder / "checkpoints").glob("step-*")))
            # As far behind a save as the first that it may be.
            before = _wait(processes, folder, lambda found: found.last_step % _EVERY == arm.kill_after % _EVERY)
            used = _used_gib() if arm.steps_behind else None
            os.kill(_process_of(folder), signal.SIGKILL)
            began = time.perf_counter()
            behind = arm.steps_behind
            after = _wait(processes, folder, lambda found: 0 < found.first_step < found.last_step - behind)
            seconds = time.perf_counter() - began
            gib = None
            if used is not None:
                _wait(
                    processes, folder, lambda found: found.last_step >= arm.kill_after
                )  # as far as when it was killed
                gib = used, _used_gib()
            steps = {"killed_after": before.last_step, "resumed_from": after.first_step}
            return Restarted(seconds=seconds, **steps, gib=gib, starts=tuple(_starts(folder, ranks)))
        finally:
            for process in processes:
                process.send_signal(signal.SIGINT)
            for process in processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(30.0)
                with contextlib.suppress(ProcessLookupError):  # ranks that a launcher has left behind go with it
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _has_spare(folder: Path) -> bool:
    """Says whether the server that rank 1 comes from has forked a process long after it."""
    rank = psutil.Process(_process_of(folder))
    parent = rank.parent()
    return parent is not None and any(each.create_time() > rank.create_time() + 5.0 for each in parent.children())


def _process_of(folder: Path) -> int:
    """Returns the process of rank 1: as it has noted it, or as its records begin under another launcher."""
    if 1 in (noted := noted_processes(folder)):
        return noted[1]
    starts = [each for each in read_records(folder / "records" / "rank-1.jsonl") if isinstance(each, RunRecord)]
    return starts[-1].pid


def _starts(folder: Path, ranks: int) -> Iterator[dict[str, Any]]:
    """Yields of each rank how it began again, as its records tell: on a GPU, where launchers write them."""
    for rank in range(ranks):
        path = folder / "records" / f"rank-{rank}.jsonl"
        found = list(read_records(path)) if path.exists() else []
        events = [each for each in found if isinstance(each, EventRecord)]
        told = {each.name: each.detail for each in events if each.name in ("restart", "first_step")}
        yield {"process": told.get("restart", {}).get("process"), **told.get("first_step", {})}


def _used_gib() -> float:
    """Returns what all processes hold of the first GPU."""
    import pynvml

    pynvml.nvmlInit()
    return float(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).used) / 2**30


def _wait(
    processes: Sequence[subprocess.Popen[bytes]], folder: Path, is_met: Callable[[TrainedSteps], bool]
) -> TrainedSteps:
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        found = read_progress(folder).get(1)
        if found is not None and is_met(found):
            return found
        for process in processes:
            if process.poll() is not None:
                raise LaunchError(f"{process.args!r} left with exit code {process.returncode} and did not come back")
        time.sleep(0.002)
    raise LaunchError(f"{processes[0].args!r} did not get there within {_PATIENCE_S:g} s")


def _start_ours(
    scratch: Path, ranks: int, environment: Mapping[str, str], *, keeps: bool = True, settings: Sequence[str] = ()
) -> list[subprocess.Popen[bytes]]:
    (scratch / "config.yaml").write_text(_CONFIG.replace("RANKS", str(ranks)), encoding="utf-8")
    return [_start([*_TRAIN, f"recovery.keep_processes={str(keeps).lower()}", *settings], scratch, environment)]


def _start_bare(scratch: Path, ranks: int, environment: Mapping[str, str]) -> list[subprocess.Popen[bytes]]:
    (scratch / "run" / "logs").mkdir(parents=True)
    (scratch / "bare.py").write_text(_SCRIPT, encoding="utf-8")
    # Else its new ranks may not reach one another at first, and restarts are used up.
    variables = {"GLOO_SOCKET_IFNAME": loopback_interface(), **environment}
    return [_start([*_TORCHRUN, str(ranks), "bare.py", str(scratch / "run")], scratch, variables)]


def _start_hosts(
    scratch: Path, ranks: int, environment: Mapping[str, str], *, keeps: bool = True, settings: Sequence[str] = ()
) -> list[subprocess.Popen[bytes]]:
    """Starts a launcher for each rank, which NCCL takes for a host of its own."""
    (scratch / "config.yaml").write_text(_GPT, encoding="utf-8")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{free.getsockname()[1]}"
    hosts = ["--nnodes", str(ranks), "--node-ranks", "1", "--rdzv", place]
    command = [*_TRAIN, f"recovery.keep_processes={str(keeps).lower()}", *settings, *hosts]
    return [
        _start(command, scratch, {**environment, **_ON_LOOPBACK, "NCCL_HOSTID": f"host{number}"})
        for number in range(ranks)
    ]


def _start_elastic(scratch: Path, ranks: int, environment: Mapping[str, str]) -> list[subprocess.Popen[bytes]]:
    (scratch / "config.yaml").write_text(_GPT, encoding="utf-8")
    (scratch / "rank.py").write_text(_RANK, encoding="utf-8")
    return [_start([*_TORCHRUN, str(ranks), "rank.py"], scratch, {**environment, **_ON_LOOPBACK})]


_TRAIN = [sys.executable, "-m", "paceline", "train", "config.yaml"]
_TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "3", "--nproc-per-node"]
_ON_LOOPBACK = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}


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
