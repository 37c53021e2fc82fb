"""Checkpoints beside torch's distributed ones (DCP): the same sharded state, saved and loaded in turns in one run.

Both have a GPT under fully sharded data parallelism (ours, and FSDP2) with AdamW's state, over Gloo ranks of this
machine, and write to the same disk. What is alike and what is not (``FAIRNESS``) goes into the record.

    stall     until a save returns to training: all of it, or in the background until the copy is made
    total     until the checkpoint is there, on all ranks
    memory    growth of the resident memory while saving, at its peak, over the bytes that the rank writes: the kernel's
              own high-water mark of the process, which is reset before (Linux). The page cache is not in it.
    load      into ranks of another number; the files are in the page cache for both
"""

from __future__ import annotations

import gc
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from paceline.checkpoint.find import Depth, verify_checkpoint
from paceline.checkpoint.manifest import MODEL, State, prefixed
from paceline.checkpoint.optimizer import load_optimizer, optimizer_shards
from paceline.checkpoint.read import fill_model, open_checkpoint
from paceline.checkpoint.writer import CheckpointWriter
from paceline.comm.base import Communicator
from paceline.comm.objects import gather_objects
from paceline.engines.apply import parallelize
from paceline.free_memory import MemoryGauge
from paceline.models.gpt import GPT, gpt_config
from paceline.run.function_ranks import run_processes
from paceline_bench.timing import ratios_to, rotate, time_step

FAIRNESS = {
    "fsync": "both end every file with fsync",
    "hashes": "ours alone: SHA-256 of every byte, within the time; and a rename that commits",
    "state": "DCP's state dict is made before its time begins; ours collects its shards within it",
    "staging": "both keep the memory of copies for the background (DCP: a DefaultStager, where torch has it)",
    "threads": "one for computing; DCP's writer with its default, one for each rank; ours one for each rank, too",
    "load": "files are in the page cache for both; 'hashes compared' reads all of it once more, on rank 0",
}
GOALS = {"total": 1.0, "stall": 0.25, "memory": 1.1, "load": 1.0}  # at most, of DCP, of a save at once, of the shard

Rows = list[dict[str, Any]]
Measures = dict[str, float]

PEER = "torch DCP"
OURS = "paceline"
_TIMEOUT_S = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointWorkload:
    """What is saved: a GPT of a named size with more or fewer layers, and how often."""

    size: str = "gpt-11m"
    layers: int | None = None
    vocabulary: int = 8192
    ranks: int = 2
    load_ranks: tuple[int, ...] = (1, 3)
    rounds: int = 8
    folder: str | None = None


def bench_checkpoint(work: CheckpointWorkload, tell: Callable[[str], None] = lambda _: None) -> Rows:
    """Times saves on some ranks, and loads of what they saved on others; returns a row for each arm."""
    with tempfile.TemporaryDirectory(prefix="checkpoints-", dir=work.folder) as name:
        folder = Path(name)
        tell(f"saving on {work.ranks} ranks ...")
        rows: Rows = run_processes(_measure_saves, work.ranks, args=(work, folder), timeout_s=_TIMEOUT_S)[0]
        for ranks in work.load_ranks:
            tell(f"loading on {ranks} ranks ...")
            rows += run_processes(_measure_loads, ranks, args=(work, folder), timeout_s=_TIMEOUT_S)[0]
    return rows


# Saving


def _measure_saves(comm: Communicator, work: CheckpointWorkload, folder: Path) -> Rows:
    ours, theirs = _Ours(comm, work), _Theirs(comm, work)
    arms: dict[str, Callable[[Path], Measures]] = {
        f"{name} {kind}": partial(each.save, kind=kind)
        for name, each in ((OURS, ours), (PEER, theirs))
        for kind in ("at once", "in background")
    }
    # The first time, when nothing is kept from before.
    memory = [_peak_growth(partial(arm, folder / f"first {name}")) for name, arm in arms.items()]
    found = _take_turns(comm, arms, work.rounds, folder)
    shard = ours.num_bytes
    for name, each in ((OURS, ours), (PEER, theirs)):  # one of each for those who load
        each.save(folder / name, kind="at once")
    comm.barrier()
    largest = [max(memory_of) for memory_of in zip(*gather_objects(comm, memory), strict=True)]
    rows = []
    for at, name in enumerate(arms):
        kind = "at once" if name.endswith("at once") else "in background"
        row = _row("save", name, f"{PEER} {kind}", found)
        stall = ratios_to(found[name]["stall"], found[f"{OURS} at once"]["stall"])
        row |= {
            "ranks": comm.size,
            "stall_ms": round(statistics.median(found[name]["stall"]) * 1e3, 2),
            "stall_of_at_once": round(stall["ratio"], 4),
            "goal_stall": GOALS["stall"] if kind == "in background" else None,
            "shard_bytes": shard,
            "memory_bytes": int(largest[at]),
            "memory_of_shard": round(largest[at] / shard, 3),
            "goal_memory": GOALS["memory"],
            "mb_per_s": round(shard * comm.size / statistics.median(found[name]["total"]) / 1e6, 1),
        }
        rows.append(row)
    return rows


def _take_turns(
    comm: Communicator, arms: dict[str, Callable[[Path], Measures]], rounds: int, folder: Path
) -> dict[str, dict[str, list[float]]]:
    """Runs the arms in turns, each starting on all ranks together; the slowest rank's time counts."""
    found: dict[str, dict[str, list[float]]] = {name: {} for name in arms}
    for number, name in enumerate(rotate(list(arms), rounds)):
        place = folder / f"{number} {name}"
        gc.collect()
        comm.barrier()
        measured = arms[name](place)
        everywhere = gather_objects(comm, measured)
        for key in measured:
            found[name].setdefault(key, []).append(max(each[key] for each in everywhere))
        comm.barrier()
        if comm.rank == 0:
            shutil.rmtree(place, ignore_errors=True)
        comm.barrier()
    return found


class _Ours:
    """Our engine, its optimizer, and a writer for each way to save."""

    def __init__(self, comm: Communicator, work: CheckpointWorkload) -> None:
        self._comm = comm
        self.engine = parallelize(_model(work), comm, "fsdp")
        self.optimizer = torch.optim.AdamW(self.engine.parameters(), lr=1e-3)
        _fill_optimizer(self.optimizer)
        self._writers: dict[str, CheckpointWriter] = {}
        state = self._state()
        self.num_bytes = sum(shard.tensor.numel() * shard.tensor.element_size() for shard in state.shards)

    def save(self, place: Path, *, kind: str) -> Measures:
        """Saves at once or in the background, and waits until it is there. A writer of each kind keeps its memory."""
        if kind not in self._writers:
            self._writers[kind] = CheckpointWriter(place, self._comm)
        writer = self._writers[kind]
        writer.folder = place
        start = time.perf_counter()
        writer.save(self._state(), in_background=kind == "in background")
        stall = time.perf_counter() - start
        writer.finish()
        return {"stall": stall, "total": time.perf_counter() - start}

    def load(self, path: Path, depth: Depth) -> None:
        """Loads model and optimizer, after what ``depth`` says was checked by rank 0, as in training."""
        if depth != "none":
            if self._comm.rank == 0:
                verify_checkpoint(path, depth)
            self._comm.barrier()
        checkpoint = open_checkpoint(path)
        fill_model(checkpoint, self.engine)
        load_optimizer(checkpoint, self.optimizer, list(self.engine.shards()))

    def _state(self) -> State:
        held = list(self.engine.shards())
        tensors, found = optimizer_shards(self.optimizer, held)
        return State(step=1, position=0, shards=[*prefixed(MODEL, held), *tensors], found=found)


class _Theirs:
    """FSDP2's model and optimizer, and the state dict of both that DCP is given."""

    def __init__(self, comm: Communicator, work: CheckpointWorkload) -> None:
        model = _model(work)
        mesh = init_device_mesh("cpu", (comm.size,))
        for block in model.blocks():
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        _fill_optimizer(optimizer)
        weights, moments = get_state_dict(model, optimizer)
        self.state: dict[str, Any] = {"model": weights, "optim": moments}
        self._stager = _stager()

    def save(self, place: Path, *, kind: str) -> Measures:
        """Saves at once or in the background, and waits until it is there."""
        pending: Any = None
        start = time.perf_counter()
        if kind == "at once":
            save(self.state, storage_writer=FileSystemWriter(place))
        else:
            pending = async_save(self.state, storage_writer=FileSystemWriter(place), **self._stager)
        stall = time.perf_counter() - start
        if pending is not None:
            pending.result()
        return {"stall": stall, "total": time.perf_counter() - start}

    def load(self, path: Path) -> None:
        load_distributed(self.state, storage_reader=FileSystemReader(path))


def _stager() -> dict[str, Any]:
    """Returns what lets DCP keep the memory that it copies to; nothing before torch 2.9, which has no such stager.

    The writer's own ``cache_staged_state_dict`` pins its memory, and so wants an accelerator.
    """
    try:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
    except ImportError:
        return {}
    options = StagingOptions(
        use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
    )
    return {"async_stager": DefaultStager(options)}


def _model(work: CheckpointWorkload) -> GPT:
    torch.manual_seed(0)
    return GPT(gpt_config(work.size, layers=work.layers, vocab_size=work.vocabulary))


def _fill_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Gives the optimizer its state: a step with gradients of one."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _peak_growth(action: Callable[[], object]) -> float:
    """Returns by how much the resident memory grows while something is done, at its peak."""
    gauge = MemoryGauge(torch.device("cpu"))
    gc.collect()
    gauge.reset()
    before = gauge.now_bytes()
    action()
    return max(gauge.peak_bytes() - before, 0)


# Loading


def _measure_loads(comm: Communicator, work: CheckpointWorkload, folder: Path) -> Rows:
    ours, theirs = _Ours(comm, work), _Theirs(comm, work)
    path = folder / OURS / "step-00000001"

    def timed(load: Callable[[], None]) -> Callable[[Path], Measures]:
        return lambda _: {"total": time_step(load, comm.device)}

    arms = {
        OURS: timed(lambda: ours.load(path, "none")),
        f"{OURS}, hashes compared": timed(lambda: ours.load(path, "full")),
        PEER: timed(lambda: theirs.load(folder / PEER)),
    }
    for arm in arms.values():
        arm(folder)
    _check_loaded(ours, theirs)
    found = _take_turns(comm, arms, work.rounds, folder / "none")
    return [{**_row(f"load {work.ranks} to {comm.size}", name, PEER, found), "ranks": comm.size} for name in arms]


def _check_loaded(ours: _Ours, theirs: _Theirs) -> None:
    """Both have loaded the model that both have saved."""
    full = ours.engine.full_state_dict()
    for name, value in theirs.state["model"].items():
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        assert torch.equal(full[name], whole), name


def _row(what: str, name: str, peer: str, found: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    total = found[name]["total"]
    return {
        "what": what,
        "arm": name,
        "peer": peer,
        "median_ms": round(statistics.median(total) * 1e3, 2),
        "goal": GOALS["load" if what.startswith("load") else "total"],
        **{key: round(value, 4) for key, value in ratios_to(total, found[peer]["total"]).items()},
        "rounds": len(total),
    }
