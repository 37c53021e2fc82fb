"""Loading a Hugging Face folder into fully sharded ranks, beside Accelerate's way and the plain one.

A Llama with random weights is written to a folder, and loaded by fresh processes on CPUs, arm after arm:

    paceline       each rank reads the bytes that it holds
    accelerate     ``fsdp_cpu_ram_efficient_loading``: rank 0 reads everything and broadcasts it, tensor by tensor
    transformers   every rank reads everything by ``from_pretrained``, and ``fully_shard`` keeps a part

    time      from the call until this rank has its parameters; the slowest rank counts
    memory    growth of the resident memory until then, at its peak: the kernel's high-water mark of the process, which
              is reset before (Linux). Pages of files that a library maps are in it.
    private   the same without pages of files, which the kernel could drop; looked at every 10 ms

What is alike and what is not (``FAIRNESS``) goes into the record. All ranks together must hold the same values in every
arm, or there is no record.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import math
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from paceline.checkpoint.tools.pretrained import open_pretrained
from paceline.comm.base import Communicator
from paceline.config.sections import HFModelConfig
from paceline.data.datasets import DataShape
from paceline.engines.apply import parallelize
from paceline.errors import TrainingError
from paceline.free_memory import MemoryGauge
from paceline.models.hugging_face import build_hugging_face, load_transformers
from paceline.run.function_ranks import run_processes
from paceline.units import MIB
from paceline_bench.timing import ratios_to, rotate

FAIRNESS = {
    "files": "in the page cache for all arms",
    "imports": "all libraries are imported, and ranks connected, before time and memory begin",
    "dtype": "parameters have the dtype of the files in all arms",
    "accelerate": "Accelerator.prepare knows FSDP on accelerators alone: its fsdp2_prepare_model is called directly",
    "threads": "one a rank, on a core of its own; all arms talk over the same Gloo group",
}
GOALS = {"time": 0.7, "memory": 0.7}  # at most, of Accelerate

OURS, ACCELERATE, PLAIN = "paceline", "accelerate", "transformers"
MISSING = "accelerate is not installed"

_TIMEOUT_S = 1800.0
_LAYERS, _HEAD_DIM = 16, 64
_PARAMETERS_OF_WIDTH_SQUARED = 12 * _LAYERS + 2 * 16  # a layer has 12 w^2, and 16 w tokens are embedded and predicted


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadWorkload:
    """What is loaded: a Llama of about so many bytes, into so many ranks, and how often."""

    mib: int = 1024
    dtype: str = "float32"
    ranks: int = 2
    rounds: int = 3
    folder: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedState:
    """What loading took on one rank, and two sums over the values that it holds, by which arms are compared."""

    seconds: float
    memory_bytes: int
    private_bytes: int
    sums: tuple[float, float]


def bench_load(work: LoadWorkload, tell: Callable[[str], None] = lambda _: None) -> list[dict[str, Any]]:
    """Loads the folder in turns of all arms; returns a row for each."""
    arms = [OURS, *([ACCELERATE] if importlib.util.find_spec("accelerate") else []), PLAIN]
    found: dict[str, list[list[LoadedState]]] = {name: [] for name in arms}
    with tempfile.TemporaryDirectory(prefix="load-", dir=work.folder) as name:
        folder = Path(name)
        num_bytes = write_llama(folder, work)
        for arm in rotate(arms, work.rounds):
            ranks = run_processes(_load, work.ranks, args=(arm, folder, work.dtype), timeout_s=_TIMEOUT_S)
            found[arm].append(ranks)
            tell(f"{arm}: {max(rank.seconds for rank in ranks):.2f} s")
    check_same(found)
    rows = make_rows(found)
    if ACCELERATE not in found:
        rows.append({"arm": ACCELERATE, "error": MISSING})
    return [{"ranks": work.ranks, "folder_bytes": num_bytes, **row} for row in rows]


def write_llama(folder: Path, work: LoadWorkload) -> int:
    """Writes a Llama of random weights as transformers does; returns the bytes of its parameters."""
    library = _load_library()
    dtype: torch.dtype = getattr(torch, work.dtype)
    count = work.mib * MIB / dtype.itemsize
    heads = max(round(math.sqrt(count / _PARAMETERS_OF_WIDTH_SQUARED) / _HEAD_DIM), 1)
    width = heads * _HEAD_DIM
    config = library.LlamaConfig(
        vocab_size=16 * width,
        hidden_size=width,
        intermediate_size=width * 8 // 3,
        num_hidden_layers=_LAYERS,
        num_attention_heads=heads,
        tie_word_embeddings=False,
        dtype=dtype,
    )
    torch.manual_seed(0)
    with torch.device("meta"):
        model = library.LlamaForCausalLM(config)
    model.to(dtype).to_empty(device="cpu")
    parameters = list(model.parameters())
    with torch.no_grad():
        for parameter in parameters:  # a few random rows are repeated: drawing them all takes longer than the rest
            values = torch.randn(min(parameter.numel(), MIB), dtype=dtype)
            parameter.copy_(values.repeat(-(-parameter.numel() // len(values)))[: parameter.numel()].view_as(parameter))
    model.save_pretrained(folder)
    return sum(parameter.numel() * parameter.element_size() for parameter in parameters)


def check_same(found: Mapping[str, Sequence[Sequence[LoadedState]]]) -> None:
    """Raises TrainingError where the ranks of some arm hold other values than those of another."""
    totals = {
        name: [tuple(math.fsum(rank.sums[at] for rank in ranks) for at in (0, 1)) for ranks in rounds]
        for name, rounds in found.items()
    }
    first = totals[OURS][0]
    for name, rounds in totals.items():
        for total in rounds:
            if not all(math.isclose(mine, other, rel_tol=1e-9) for mine, other in zip(total, first, strict=True)):
                raise TrainingError(f"{name} has loaded other values than {OURS}: their sums are {total}, {first}")


def make_rows(found: Mapping[str, Sequence[Sequence[LoadedState]]]) -> list[dict[str, Any]]:
    """Returns a row for each arm: medians over rounds, and ratios to Accelerate, or to the plain way without it."""
    peer = ACCELERATE if ACCELERATE in found else PLAIN
    rows = []
    for name, rounds in found.items():
        others = found[peer]
        time_ratios = ratios_to(*([max(one.seconds for one in ranks) for ranks in each] for each in (rounds, others)))
        row: dict[str, Any] = {
            "arm": name,
            "peer": peer,
            "median_s": round(statistics.median(max(one.seconds for one in ranks) for ranks in rounds), 3),
            **{key: round(value, 4) for key, value in time_ratios.items()},
            "goal": GOALS["time"],
        }
        for key in ("memory", "private"):
            amounts, peers = ([[getattr(one, f"{key}_bytes") for one in r] for r in each] for each in (rounds, others))
            row[f"{key}_bytes"] = [int(statistics.median(rank)) for rank in zip(*amounts, strict=True)]
            row[f"{key}_ratio"] = round(ratios_to([*map(max, amounts)], [*map(max, peers)])["ratio"], 4)
        rows.append({**row, "goal_memory": GOALS["memory"], "rounds": len(rounds)})
    return rows


# On a rank


def _load(comm: Communicator, arm: str, folder: Path, dtype: str) -> LoadedState:
    _load_library()
    load = {OURS: _prepare_ours, ACCELERATE: _prepare_accelerate, PLAIN: _prepare_plain}[arm](comm, folder, dtype)
    gauge = MemoryGauge(comm.device)
    gc.collect()
    comm.barrier()
    gauge.reset()
    with _PrivateMemory() as private:
        before, start = gauge.now_bytes(), time.perf_counter()
        parts = load()
        seconds = time.perf_counter() - start
        memory = max(gauge.peak_bytes() - before, 0)
    comm.barrier()
    return LoadedState(
        seconds=seconds, memory_bytes=memory, private_bytes=private.peak - private.before, sums=sums_of(parts())
    )


class _PrivateMemory:
    """Looks again and again at what of this process's memory is no page of a file."""

    def __init__(self) -> None:
        self._process, self._is_done = psutil.Process(), threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.before = self.peak = self._now()

    def _now(self) -> int:
        found = self._process.memory_info()
        return found.rss - getattr(found, "shared", 0)  # no such number but on Linux

    def _watch(self) -> None:
        while not self._is_done.wait(0.01):
            self.peak = max(self.peak, self._now())

    def __enter__(self) -> _PrivateMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_done.set()
        self._thread.join()


def _load_library() -> Any:
    """Imports what all arms need of transformers: a class is imported when it is first named."""
    library = load_transformers()
    library.utils.logging.disable_progress_bar()
    _ = library.LlamaForCausalLM
    return library


Load = Callable[[], Callable[[], Iterable[torch.Tensor]]]  # loads, and returns what lists this rank's values


def sums_of(parts: Iterable[torch.Tensor]) -> tuple[float, float]:
    """Returns the sum of all values and that of their squares, in double precision."""
    with torch.no_grad():
        pairs = [(part.double().sum().item(), part.double().square().sum().item()) for part in parts]
    return math.fsum(pair[0] for pair in pairs), math.fsum(pair[1] for pair in pairs)


def _prepare_ours(comm: Communicator, folder: Path, dtype: str) -> Load:
    def load() -> Callable[[], Iterable[torch.Tensor]]:
        config, shape = HFModelConfig(kind="hf", path=str(folder)), DataShape(kind="tokens")
        model = build_hugging_face(config, shape, is_unfilled=True).to(getattr(torch, dtype))
        weights = open_pretrained(folder, model)
        engine = parallelize(model, comm, "fsdp")
        weights.fill(engine)
        return lambda: (shard.tensor for shard in engine.shards())

    return load


def _prepare_accelerate(_comm: Communicator, folder: Path, dtype: str) -> Load:
    accelerate = importlib.import_module("accelerate")
    utils = importlib.import_module("accelerate.utils.fsdp_utils")
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.state.fsdp_plugin = accelerate.FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        cpu_ram_efficient_loading=True,
        reshard_after_forward=True,
    )
    utils.enable_fsdp_ram_efficient_loading()  # tells from_pretrained

    def load() -> Callable[[], Iterable[torch.Tensor]]:
        model = utils.fsdp2_prepare_model(accelerator, _from_pretrained(folder, dtype))
        return lambda: _local_parts(model)

    return load


def _prepare_plain(_comm: Communicator, folder: Path, dtype: str) -> Load:
    def load() -> Callable[[], Iterable[torch.Tensor]]:
        model = _from_pretrained(folder, dtype)
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        return lambda: _local_parts(model)

    return load


def _from_pretrained(folder: Path, dtype: str) -> Any:
    return load_transformers().LlamaForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))


def _local_parts(model: Any) -> Iterable[torch.Tensor]:
    for parameter in model.parameters():
        yield parameter.to_local() if isinstance(parameter, DTensor) else parameter
