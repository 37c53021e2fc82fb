"""Measures what memory binds, family by family and size by size, and what the host pays for each operation.

    seconds of a kernel  =  what a call takes  -  what a call on next to nothing takes        (a GPU: the call's alone)
    host, an operation   =  a training step of a small transformer on next to nothing / its operations; on a CPU, where
                            no device hides what else the host does in a step

Bytes are those that a dry run counts (rehearse/dryrun/operators.py), so that what is measured is what is priced later.
"""

from __future__ import annotations

import contextlib
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.calibrate.sampling import Stopwatch, Timed, summarize
from paceline.cluster.operations import MEMORY_FAMILIES, MemoryFamily, Operation
from paceline.comm.base import Communicator
from paceline.comm.solo import SoloCommunicator
from paceline.config import Config, config_from_dict
from paceline.engines.apply import parallelize
from paceline.models.gpt import GPT, gpt_config
from paceline.records.log_sink import LogSink
from paceline.records.sinks import Fanout, JsonlSink, Sink, Strided
from paceline.rehearse.dryrun.operators import Operators
from paceline.run.sampling import sampling
from paceline.train.assemble import build_trainer
from paceline.train.step import train_step
from paceline.train.trainer import Every, StepResult, Trainer
from paceline.train.update import update_if_finite
from paceline.units import KIB, MIB

# Measures what a training step costs the host beside its kernels, on transformers whose kernels have nothing to do.
#
#     step      S(n) = step + n operation        of two models with n operations each: two equations, two unknowns
#     loop      a trainer's step with the next batch, times, records and hooks  -  the same step without them
#
# The arms take turns, so that a machine that is slower for a while is so for all of them.


_LAYERS = (1, 3)
_MOST_STEPS = 1_000_000  # of which a few hundred are run


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopFigures:
    """Host seconds: of an operation, of a step besides, and of what surrounds a step in a run."""

    operation_s: float
    step_s: float
    loop_s: float
    spread: float


def measure_loop(tensor_s: float, *, rounds: int, steps: int = 4) -> LoopFigures:
    """Times ``rounds`` turns of ``steps`` steps of each arm. ``tensor_s`` is the host's time of a tensor of a list."""
    with contextlib.ExitStack() as stack:
        alone = SoloCommunicator(torch.device("cpu"))
        trainers = [stack.enter_context(recording_trainer(_config(layers), alone)) for layers in _LAYERS]
        bare = [_bare(trainer) for trainer in trainers]
        counts = [_count(step) for step in bare]
        samples = _take_turns([*bare, looped_step(trainers[0])], rounds, steps)
    short, long, looped = (statistics.median(each) for each in samples)
    (few, few_tensors), (many, many_tensors) = counts
    lists = (few_tensors * tensor_s, many_tensors * tensor_s)
    return figures_of(
        (few, max(short - lists[0], 0.5 * short)),
        (many, max(long - lists[1], 0.5 * long)),
        loop_s=looped - short,
        spread=summarize(samples[0]).spread,
    )


def figures_of(few: tuple[int, float], many: tuple[int, float], *, loop_s: float, spread: float) -> LoopFigures:
    """Solves the two equations. What noise has made negative is nothing: then operations take all of the time."""
    (short_count, short_s), (long_count, long_s) = few, many
    each = (long_s - short_s) / (long_count - short_count)
    fixed = short_s - short_count * each
    if each <= 0 or fixed < 0:
        each, fixed = long_s / long_count, 0.0
    return LoopFigures(operation_s=each, step_s=fixed, loop_s=max(0.0, loop_s), spread=spread)


def _take_turns(arms: list[Callable[[], object]], rounds: int, steps: int) -> list[list[float]]:
    """Returns seconds of a step, by arm; the first turn of each is not counted."""
    found: list[list[float]] = [[] for _ in arms]
    for number in range(rounds + 1):
        for arm, samples in zip(arms, found, strict=True):
            started = time.perf_counter()
            for _ in range(steps):
                arm()
            if number:
                samples.append((time.perf_counter() - started) / steps)
    return found


@contextlib.contextmanager
def recording_trainer(config: Config, comm: Communicator) -> Iterator[Trainer]:
    """Makes a trainer as a rank has it, whose records and log go to a folder that is removed.

    Rank 0 samples the host, as it does where the launcher is not ours.
    """
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder, logger = Path(name), logging.Logger(f"rank-{comm.rank}", logging.INFO)
        handler = logging.FileHandler(folder / "rank.log")
        stack.callback(handler.close)
        logger.addHandler(handler)
        sinks: list[Sink] = [
            JsonlSink(folder / f"rank-{comm.rank}.jsonl"),
            Strided(LogSink(logger), config.monitor.log_every),
        ]
        every_s = config.monitor.sample_s if comm.rank == 0 else None
        stack.enter_context(sampling(folder, every_s, lambda: {comm.rank: os.getpid()}, logger.log))
        with contextlib.closing(Fanout(sinks)) as sink:
            hooks = [Every(100, _idle), Every(7, _idle)]  # called when due
            yield build_trainer(config, comm, hooks=hooks, sink=sink)


def looped_step(trainer: Trainer) -> Callable[[], None]:
    """Returns a step as the trainer makes it, with its hooks."""
    steps = trainer.steps()

    def run() -> None:
        result = next(steps)
        for hook in trainer.hooks:
            hook(trainer, result)

    return run


def _bare(trainer: Trainer) -> Callable[[], object]:
    parts = trainer.parts
    with contextlib.closing(parts.loader.steps(0, 1)) as batches:
        batch = next(batches)
    return lambda: train_step(parts.engine, parts.optimizer, batch, parts.loss, parts.policy)


def _count(step: Callable[[], object]) -> tuple[int, int]:
    """Returns how many operations a step has, and how many further tensors those over lists."""
    step()
    found = recorded(step)
    return len(found), sum(each.tensors - 1 for each in found)


def _idle(trainer: Trainer, result: StepResult) -> None:
    """Does nothing: a hook that is called when it is due."""


def _config(layers: int) -> Config:
    sections: dict[str, Any] = {
        "model": {"kind": "gpt", "layers": layers, "heads": 2, "width": 8, "context": 4, "dropout": 0.0},
        "data": {"kind": "synthetic_tokens", "samples": 64, "context": 4, "vocab_size": 8},
        "train": {"steps": _MOST_STEPS, "global_batch": 1},
        "optim": {"kind": "adamw", "lr": 1e-6},
        "parallel": {"strategy": "ddp", "device": "cpu", "ranks": 1},
    }
    return config_from_dict(sections)


def recorded(call: Callable[[], object]) -> list[Operation]:
    """Runs a call, and returns its kernels as a dry run notes them: so what is measured is what is priced later."""
    recorder = _KernelRecorder()
    with recorder:
        call()
    return recorder.operations


class _KernelRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[Operation] = []
        self._operators = Operators(lambda tensor: int(tensor.untyped_storage()._cdata))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        result = func(*args, **(kwargs or {}))
        self.operations += self._operators.kernels(func, args, kwargs or {}, result)
        return result


Call = Callable[[], object]
ON_CPU_BYTES = (32 * KIB, 256 * KIB, 1 * MIB, 4 * MIB, 32 * MIB)
ON_CUDA_BYTES = (16 * MIB, 64 * MIB, 256 * MIB)  # less takes the host longer to launch than the device to run
_ROW = 512  # elements of a row, where kernels go row by row
_TINY_BYTES = 2 * KIB  # one row
_TENSORS, _FEW_TENSORS = 32, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyFigures:
    """Bytes per second by family: (bytes, rate) in growing order. Host seconds of an operation, and of each further
    tensor of an operation over lists; on a CPU also of a step besides, and of the loop around it."""

    rates: Mapping[str, tuple[tuple[int, float], ...]]
    operation_s: float
    tensor_s: float
    step_s: float = 0.0
    loop_s: float | None = None
    spreads: dict[str, float] = field(default_factory=dict)


def measure_families(device: torch.device, sizes: tuple[int, ...], watch: Stopwatch) -> FamilyFigures:
    """Measures all families at tensors of so many bytes."""
    spreads: dict[str, float] = {}
    rates: dict[str, tuple[tuple[int, float], ...]] = {}
    for family in MEMORY_FAMILIES:
        points = []
        # A GPU's calls return before the kernel runs; and the embedding's backward clears its table however few rows.
        is_counted = device.type == "cpu" and family != "embedding_backward"
        empty = watch.time(make_call(family, device, _TINY_BYTES)).seconds if is_counted else 0.0
        for size in sizes:
            call = make_call(family, device, size)
            counted = sum(each.num_bytes for each in recorded(call))
            timed = watch.time(call)
            spreads[f"{family} {size // KIB} KiB"] = timed.spread
            points.append((counted, counted / max(timed.seconds - empty, 0.1 * timed.seconds)))
        rates[family] = tuple(points)
    tensor = _tensor(device, watch)
    spreads["tensors of a list"] = tensor.spread
    if device.type != "cpu":
        operation = _operation(device, watch, tensor.seconds)
        spreads["operations"] = operation.spread
        return FamilyFigures(rates=rates, operation_s=operation.seconds, tensor_s=tensor.seconds, spreads=spreads)
    watch.meet()
    loop = measure_loop(tensor.seconds, rounds=3 * watch.samples)
    return FamilyFigures(
        rates=rates,
        operation_s=loop.operation_s,
        tensor_s=tensor.seconds,
        step_s=loop.step_s,
        loop_s=loop.loop_s,
        spreads=spreads | {"operations": loop.spread},
    )


def make_call(family: MemoryFamily, device: torch.device, num_bytes: int) -> Call:
    """Returns a call of a kernel of this family, over a tensor of so many bytes."""
    rows = max(1, num_bytes // (4 * _ROW))
    values, gradient = (torch.randn(rows, _ROW, device=device) for _ in range(2))
    weight, aten = torch.ones(_ROW, device=device), torch.ops.aten
    match family:
        case "pointwise":
            return lambda: values * gradient
        case "curve":
            return lambda: F.silu(values)
        case "curve_backward":
            return lambda: aten.silu_backward(gradient, values)
        case "norm":
            return lambda: torch.native_layer_norm(values, [_ROW], weight, None, 1e-5)
        case "norm_backward":
            _, mean, scale = torch.native_layer_norm(values, [_ROW], weight, None, 1e-5)
            arguments = (gradient, values, [_ROW], mean, scale, weight, None, [True, True, False])
            return lambda: aten.native_layer_norm_backward(*arguments)
        case "softmax":
            return lambda: torch.log_softmax(values, dim=-1)
        case "reduction":
            return lambda: values.mean(dim=-1)
        case "strided":  # heads and positions change places, as around attention
            heads = values.view(-1, _ROW // 64, 64).transpose(0, 1)
            return lambda: heads.clone(memory_format=torch.contiguous_format)
        case "convert":
            return lambda: values.to(torch.bfloat16)
        case "embedding":
            table, tokens = torch.randn(4096, _ROW, device=device), torch.randint(0, 4096, (rows,), device=device)
            return lambda: F.embedding(tokens, table)
        case "embedding_backward":
            tokens = torch.randint(0, 1024, (rows,), device=device)
            return lambda: aten.embedding_dense_backward(gradient, tokens, 1024, -1, False)
        case "optimizer":
            return _optimizer_step(device, num_bytes)
        case "random":  # what dropout draws: a processor makes the numbers one after another
            return lambda: values.bernoulli_(0.9)


def _optimizer_step(device: torch.device, num_bytes: int, tensors: int = 1) -> Call:
    shape = (max(1, num_bytes // (4 * _ROW)), _ROW)
    parameters = [torch.randn(shape, device=device, requires_grad=True) for _ in range(tensors)]
    for each in parameters:
        each.grad = torch.randn_like(each)
    return torch.optim.AdamW(parameters, lr=1e-6, fused=True).step


def _operation(device: torch.device, watch: Stopwatch, tensor_s: float) -> Timed:
    """Times a training step whose kernels have nothing to do: dispatch, autograd, the engine, the optimizer."""
    model = GPT(gpt_config(None, layers=4, heads=2, width=8, context=4, vocab_size=8)).to(device)
    engine = parallelize(model, SoloCommunicator(device), "ddp")
    optimizer = torch.optim.AdamW(engine.parameters(), lr=1e-6, fused=True)
    tokens = torch.zeros(1, 4, dtype=torch.int64, device=device)

    def step() -> None:
        logits = engine(tokens)
        F.cross_entropy(logits.view(-1, 8), tokens.view(-1)).backward()  # type: ignore[no-untyped-call]
        update_if_finite(optimizer, engine.clip_grad_norm_(float("inf")), 1.0)
        optimizer.zero_grad(set_to_none=True)

    step()
    found = recorded(step)
    timed = watch.time_host(step)
    lists = sum(each.tensors - 1 for each in found) * tensor_s
    return Timed(seconds=max(timed.seconds - lists, 0.5 * timed.seconds) / len(found), spread=timed.spread)


def _tensor(device: torch.device, watch: Stopwatch) -> Timed:
    """Times the optimizer's update of many empty tensors; on a CPU less one of few, as steps are priced besides."""
    timed = watch.time_host(_optimizer_step(device, _TINY_BYTES, _TENSORS))
    if device.type != "cpu":
        return Timed(seconds=timed.seconds / _TENSORS, spread=timed.spread)
    few = watch.time_host(_optimizer_step(device, _TINY_BYTES, _FEW_TENSORS))
    more = max(timed.seconds - few.seconds, 0.1 * timed.seconds)
    return Timed(seconds=more / (_TENSORS - _FEW_TENSORS), spread=timed.spread)
