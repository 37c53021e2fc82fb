"""One arm in a process of its own: nothing of the arms before it is in memory, and its start is timed from the outside.

    python -m paceline.bench.gpu.process ORDER OUTPUT

``ORDER`` is a JSON file that says which arm trains what; ``OUTPUT`` is where the figures go. All batches are on the
device when the second step begins, so that a loop never waits for data. The time of a step is that between the ends of
two steps on the device's own time line, and nobody waits for the device in between.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import islice, pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from paceline.bench.gpu.loops import ARMS, ENGINE, GpuArm, Step, set_up_loop
from paceline.bench.gpu.workloads import GpuWorkload, OnDevice, all_workloads
from paceline.clock import DeviceClock, seconds_between
from paceline.comm.solo import SoloCommunicator
from paceline.config import Config
from paceline.data.datasets import DataShape
from paceline.data.fetch import fetch_batch
from paceline.data.loader import StepBatch
from paceline.data.order import DataOrder
from paceline.data.registry import DataSplits, data_of
from paceline.free_memory import MemoryGauge
from paceline.train.assemble import build_trainer, build_workload
from paceline.train.step import place, train_step
from paceline.untrusted import parse_json_object, read_regular

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What an arm's process is asked for."""

    arm: str
    model: str
    device: OnDevice
    file: str
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmTurn:
    """What one turn of an arm measured: seconds and losses of all its steps, and the moment the first was done.

    ``started_at``: the moment at which whoever asked for it did so.
    """

    step_s: list[float]
    losses: list[float]
    peak_bytes: int | None
    first_step_at: float
    samples: int  # of a step
    started_at: float = 0.0

    @property
    def first_step_s(self) -> float:
        return self.first_step_at - self.started_at

    def median_s(self, warm_up: int) -> float:
        """Returns the seconds of the median step after the warm-up."""
        return median(self.step_s[warm_up:] or self.step_s)


def run_order(order: Order) -> ArmTurn:
    """Sets an arm up and lets it train."""
    workload, device = replace(all_workloads()[order.model], device=order.device), torch.device(order.device)
    arm = next(each for each in ARMS if each.name == order.arm)
    config = workload.config(Path(order.file), order.steps, precision=arm.precision)
    if arm.name.startswith(ENGINE):
        return _measure(*_set_up_engine(config, device), device)
    return _measure(*_set_up_loop(arm, workload, config, device), device)


def _set_up_loop(
    loop: GpuArm, workload: GpuWorkload, config: Config, device: torch.device
) -> tuple[Step, Iterator[Batch]]:
    work = build_workload(config)
    batches = make_batches(config, work.data, device)
    if workload.unit == "images":
        batches = (
            (_as_images(inputs, work.data.shape, is_last=loop.is_channels_last), targets) for inputs, targets in batches
        )
    return set_up_loop(loop, work.model, config, device), batches


def _as_images(inputs: Tensor, shape: DataShape, *, is_last: bool) -> Tensor:
    """Returns images as a loop trains on them: bytes are normalised before the time begins."""
    images = inputs
    if not inputs.is_floating_point():
        mean, std = (getattr(shape, name, None) for name in ("mean", "std"))
        as_channels = [inputs.new_tensor(each, dtype=torch.float32).view(1, -1, 1, 1) for each in (mean, std) if each]
        images = (inputs - as_channels[0]) / as_channels[1] if len(as_channels) == 2 else inputs / 255
    return images.contiguous(memory_format=torch.channels_last) if is_last else images


def _set_up_engine(config: Config, device: torch.device) -> tuple[Step, Iterator[Batch]]:
    trainer = build_trainer(config, SoloCommunicator(device))
    parts = trainer.parts
    data = data_of(config)

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        samples = len(targets)
        batch = StepBatch(microbatches=[(inputs, targets)], global_samples=samples, local_samples=[samples])
        outcome = train_step(
            parts.engine, parts.optimizer, batch, parts.loss, parts.policy, scaler=trainer.scaler, passes=parts.passes
        )
        return outcome.loss_sum / outcome.count

    return step, make_batches(config, data, device)


def make_batches(config: Config, data: DataSplits, device: torch.device) -> Iterator[Batch]:
    """Yields the batches of all steps of a run on one rank, in its order, on the device."""
    batch_size, seed = config.train.global_batch, config.data.seed
    assert batch_size is not None
    assert config.train.steps is not None
    order = DataOrder(
        length=len(data.train),
        global_batch=batch_size,
        seed=config.train.seed if seed is None else seed,
        shuffle=config.data.shuffle,
        drop_last=config.data.last_batch == "drop",
    )
    for batch in islice(order.batches(0), config.train.steps):
        inputs, targets = place(fetch_batch(data.train, batch.indices, batch.epoch), device, None)
        yield inputs, targets


def _measure(step: Step, batches: Iterator[Batch], device: torch.device) -> ArmTurn:
    gauge, clock = MemoryGauge(device), DeviceClock(device)
    first = next(batches)
    start, losses = clock.take(), [step(*first)]
    marks = [clock.take()]
    losses[0].item()  # waits for the first step
    first_step_at, first_s = time.time(), seconds_between(start, marks[0])
    ready = list(batches)
    gauge.reset()
    for batch in ready:
        losses.append(step(*batch))
        marks.append(clock.take())
    ends = [float(loss) for loss in losses]
    # Of the batches that lie ready a loop would hold one; the others are the benchmark's.
    held = sum(each.numel() * each.element_size() for batch in ready[1:] for each in batch)
    return ArmTurn(
        step_s=[first_s, *(seconds_between(before, after) for before, after in pairwise(marks))],
        losses=ends,
        peak_bytes=gauge.peak_bytes() - held if device.type == "cuda" else None,
        first_step_at=first_step_at,
        samples=len(first[1]),
    )


def main() -> None:
    """Runs the order of the command line. An arm that fails says why in its output, and leaves with code 1."""
    order_file, output = map(Path, sys.argv[1:3])
    order = Order(**parse_json_object(read_regular(order_file)))
    found: dict[str, Any]
    try:
        found = asdict(run_order(order))
    except BaseException as error:
        found = {"error": f"{type(error).__name__}: {error}"}
        raise
    finally:
        output.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
