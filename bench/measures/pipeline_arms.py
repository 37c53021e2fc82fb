"""The arms of the pipeline benchmark: our pipeline on Gloo and on shared memory, and torch.distributed.pipelining.

Every arm trains a copy of its own of one model, from the same values, cut at the same layers, on the same microbatches,
with the same loss and optimizer, without clipping: what differs is who runs the schedule and carries the messages. The
peer of an arm is torch's schedule of the same kind:

    gpipe         ScheduleGPipe                      1f1b     Schedule1F1B
    interleaved   ScheduleInterleaved1F1B            zb-h1    ScheduleInterleavedZeroBubble, one stage a rank
    zb-v          ScheduleZBVZeroBubble

torch is set up as fast as it goes: it gathers no outputs, and its loss divides by the number of tokens, so that no
gradient is scaled afterwards.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed import pipelining

from paceline.comm.base import Communicator
from paceline.comm.shared.communicator import SharedMemoryCommunicator
from paceline.engines.apply import parallelize
from paceline.engines.stages.costs import estimate_layers
from paceline.engines.stages.stages import split_model
from paceline.models.layers import model_layers
from paceline.predict.memory.facts import choose_bounds
from paceline.schedule.schedules import make_schedule
from paceline.train.loss import CrossEntropy
from paceline_bench.arms import SHARED, BenchWorkload, PeeredArm, TrainingStep

Runner = Literal["torch", "gloo", "shared memory"]

_TORCH = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "zb-h1": pipelining.ScheduleInterleavedZeroBubble,
    "zb-v": pipelining.ScheduleZBVZeroBubble,
}
_SINGLE = ("gpipe", "1f1b")  # in torch these take one stage, the others a list


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineArm(PeeredArm):
    """One schedule, and who runs it."""

    schedule: str
    runner: Runner


def pipeline_arms() -> list[PipelineArm]:
    """Returns the arms: torch's schedules, each followed by ours."""
    arms: list[PipelineArm] = []
    for name in _TORCH:
        peer = f"torch {name}"
        arms += [
            PipelineArm(name=peer, peer=peer, schedule=name, runner="torch"),
            PipelineArm(name=f"paceline {name}", peer=peer, schedule=name, runner="gloo"),
            PipelineArm(name=f"paceline {name} {SHARED}", peer=peer, schedule=name, runner="shared memory"),
        ]
    return arms


def set_up_pipeline(
    arm: PipelineArm, workload: BenchWorkload, microbatches: int, comm: Communicator, num_losses: int
) -> TrainingStep:
    """Builds an arm's model, cuts it over the ranks of ``comm``, and returns its training step."""
    model = workload.make_model(comm.device)
    inputs, targets = workload.make_batch(comm.device, 0)
    if arm.runner == "torch":
        passes, parameters = _torch_passes(arm.schedule, model, inputs, targets, microbatches, comm)
        return TrainingStep(passes, parameters, num_losses)
    if arm.runner == "shared memory":
        comm = SharedMemoryCommunicator.join(comm)
    engine = parallelize(model, comm, "ddp", pipeline=comm.size, schedule=arm.schedule)
    pairs = list(zip(inputs.chunk(microbatches), targets.chunk(microbatches), strict=True))
    loss, scale = CrossEntropy(float(targets.shape[1])), 1 / targets.numel()

    def run() -> list[torch.Tensor]:
        (value,) = engine.run_microbatches(pairs, loss, scale)
        return [value.total / value.count]

    return TrainingStep(run, engine.parameters(), num_losses)


def _torch_passes(
    schedule: str, model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, microbatches: int, comm: Communicator
) -> tuple[Callable[[], list[torch.Tensor]], list[nn.Parameter]]:
    """Returns forward and backward of torch's pipeline, and the parameters of this rank's stages."""
    placement = make_schedule(schedule, comm.size, microbatches).placement
    mine = [stage for stage, rank in enumerate(placement) if rank == comm.rank]
    layers = model_layers(model)
    bounds = choose_bounds(estimate_layers(model, layers), len(placement))  # as ours are cut
    parts = split_model(model, bounds, mine, layers=layers)
    stages = [pipelining.PipelineStage(parts[stage], stage, len(placement), comm.device) for stage in mine]
    made = _make_torch_schedule(schedule, stages, microbatches, targets.numel())
    options = _known_to(made.step, return_outputs=False)
    given = (inputs,) if 0 in mine else ()
    target = targets if len(placement) - 1 in mine else None

    def run() -> list[torch.Tensor]:
        losses: list[torch.Tensor] = []
        made.step(*given, target=target, losses=losses, **options)
        return losses

    return run, [parameter for part in parts.values() for parameter in part.parameters()]


def _make_torch_schedule(name: str, stages: Sequence[Any], microbatches: int, num_tokens: int) -> Any:
    def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        rows = logits.reshape(-1, logits.shape[-1])
        return F.cross_entropy(rows, targets.reshape(-1), reduction="sum") / num_tokens

    make: Any = _TORCH[name]
    held = stages[0] if name in _SINGLE else list(stages)
    return make(held, microbatches, loss_fn=loss, **_known_to(make, scale_grads=False))


def _known_to(function: Callable[..., Any], **options: Any) -> dict[str, Any]:
    """Returns the options that a function has: older versions of torch have fewer."""
    names = inspect.signature(function).parameters
    return {name: value for name, value in options.items() if name in names}
