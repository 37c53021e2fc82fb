"""How a thing is timed, when a machine is too noisy to be believed, and what a step costs the host beside its kernels.

A sample is many runs in a row, a millisecond at least. The median counts; the spread is the distance between the
quartiles over the median. A noisy machine has samples that spread, or a thread that was not running while the clock
was. The host is measured on transformers whose kernels have nothing to do, in turns:

    step      S(n) = step + n operation        of two models with n operations each: two equations, two unknowns
    loop      a trainer's step with the next batch, times, records and hooks  -  the same step without them
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
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.cluster.kernels import Operation
from paceline.comm.base import Communicator
from paceline.comm.solo import SoloCommunicator
from paceline.config import Config, config_from_dict
from paceline.errors import UsageError
from paceline.records.sinks import Fanout, JsonlSink, LogSink, Sink, Strided
from paceline.rehearse.dryrun.operators import Operators
from paceline.run.observe import sampling
from paceline.train.assemble import build_trainer
from paceline.train.step import train_step
from paceline.train.trainer import Every, Trainer

_FEWEST = 3
MOST_SPREAD = 0.15
LEAST_SHARE = 0.90


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopwatch:
    """Times steps: seconds of one run. ``meet`` brings ranks together first, ``finish`` waits for a device.

    Takes ``samples``, or fewer, three at least, of a step that would take longer than ``most_s`` together. A sample
    is as many runs as take ``shortest_s``: a GPU's clocks fall under load, which a short one does not see. ``spreads``
    keeps how far the samples of what has a name spread.
    """

    samples: int = 9
    most_s: float = 2.0
    shortest_s: float = 1e-3
    meet: Callable[[], None] = lambda: None
    finish: Callable[[], None] = lambda: None
    spreads: dict[str, float] = field(default_factory=dict)

    def time(self, step: Callable[[], object], name: str = "") -> float:
        """Times a step that a rank runs by itself; the ranks meet once, since one may take fewer samples."""
        step()
        self.finish()
        self.meet()
        once = max(self._once(step, 1), 1e-7)
        repeats = max(1, round(self.shortest_s / once))
        samples = min(self.samples, max(_FEWEST, int(self.most_s / (once * repeats))))
        return self._median(name, [self._once(step, repeats) / repeats for _ in range(samples)])

    def time_together(self, step: Callable[[], object], repeats: int, name: str = "") -> float:
        """Times a step that all ranks run together, as often on each; they meet before each sample."""
        step()
        self.finish()
        found = []
        for _ in range(self.samples):
            self.meet()
            found.append(self._once(step, repeats) / repeats)
        return self._median(name, found)

    def time_host(self, step: Callable[[], object], name: str = "") -> float:
        """Times the host alone: a device's queue is empty before, and what it still has to do after is not counted."""
        watch = Stopwatch(samples=4 * self.samples, meet=self.finish, spreads=self.spreads)
        return watch.time_together(step, 1, name)

    def _once(self, step: Callable[[], object], repeats: int) -> float:
        start = time.perf_counter()
        for _ in range(repeats):
            step()
        self.finish()
        return time.perf_counter() - start

    def _median(self, name: str, samples: list[float]) -> float:
        seconds, spread = summarize(samples)
        if name:
            self.spreads[name] = spread
        return seconds


def summarize(samples: list[float]) -> tuple[float, float]:
    """Returns the median, and how far apart the quartiles are, over it."""
    middle = statistics.median(samples)
    low, _, high = statistics.quantiles(samples, n=4) if len(samples) > 1 else [middle] * 3
    return middle, (high - low) / middle


def processor_share(step: Callable[[], object], seconds: float = 0.3) -> float:
    """Returns the share of the time in which this busy thread really ran. 1: no other process took its core."""
    start, busy = time.perf_counter(), time.thread_time()
    while time.perf_counter() - start < seconds:
        step()
    return min(1.0, (time.thread_time() - busy) / (time.perf_counter() - start))


def check_quiet(spreads: Mapping[str, float], share: float) -> None:
    """Raises UsageError where a calibration is plainly off: half of all spread too far, or the processor was shared."""
    middle = statistics.median(spreads.values()) if spreads else 0.0
    if middle <= MOST_SPREAD and share >= LEAST_SHARE:
        return
    worst = sorted(spreads, key=lambda name: -spreads[name])[:3]
    shown = ", ".join(f"{name} {100 * spreads[name]:.0f} %" for name in worst)
    spread = f"samples spread by {100 * middle:.0f} % (the widest: {shown}), and " if spreads else ""
    raise UsageError(
        f"this machine is too noisy to be measured: {spread}a thread had the processor {100 * share:.0f} % of the time"
        f"\n  at most {100 * MOST_SPREAD:.0f} % of spread, and {100 * LEAST_SHARE:.0f} % of a processor, are needed"
        "\n  end what else runs here and try again, or take it as it is with --noisy"
    )


_LAYERS = (1, 3)
_MOST_STEPS = 1_000_000  # of which a few hundred are run


class LoopFigures(NamedTuple):
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
        counts = []
        for step in bare:  # operations, and further tensors of those over lists
            step()
            kernels = recorded(step)
            counts.append((len(kernels), sum(each.tensors - 1 for each in kernels)))
        samples = _take_turns([*bare, looped_step(trainers[0])], rounds, steps)
    short, long, looped = (statistics.median(each) for each in samples)
    (few, few_tensors), (many, many_tensors) = counts
    lists = (few_tensors * tensor_s, many_tensors * tensor_s)
    return figures_of(
        (few, max(short - lists[0], 0.5 * short)),
        (many, max(long - lists[1], 0.5 * long)),
        loop_s=looped - short,
        spread=summarize(samples[0])[1],
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
    """Makes a trainer as a rank has it, whose records and log go to a folder that is removed."""
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
            hooks = [Every(100, lambda *_: None), Every(7, lambda *_: None)]  # called when due
            yield build_trainer(config, comm, hooks=hooks, sink=sink)


def looped_step(trainer: Trainer) -> Callable[[], None]:
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
    """Runs a call, and returns its kernels as a dry run notes them."""
    recorder = _KernelRecorder()
    with recorder:
        call()
    return recorder.operations


class _KernelRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[Operation] = []
        self._operators = Operators(lambda tensor: int(tensor.untyped_storage()._cdata))

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.operations += self._operators.kernels(func, args, kwargs or {}, result)
        return result
