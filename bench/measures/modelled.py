"""The same features on four GPUs, on the virtual clock: modelled, not measured.

What is measured is one GPU's step, from a record; what is stated is the link between GPUs. From these, for a step of T
seconds and P parameters, of which a GPU computes a share of the batch (ddp, zero2) or a part of the layers (pipeline):

    one GPU     4 T                                                     16 P bytes of parameters, gradients, Adam
    ddp         T + all-reduce of 4 P bytes                             16 P
    zero2       T + reduce-scatter and all-gather of 4 P bytes each      4 P + 12 P / 4
    pipeline    the schedule's makespan, stages by their estimated      16 times the parameters of the largest stage
                cost, a message for the stream between two stages

Nothing overlaps with computing, so the collectives' share is an upper bound; a microbatch is as efficient as the batch
that was measured, so the pipeline's time is a lower one. Activations are left out. Collectives are rings, by the
formulas of ``cluster/costs.py``. Shared memory joins ranks on CPUs: its row here has no figures.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from paceline.cluster.costs import Placement, Wire, Wires, all_reduce_seconds, scatter_seconds
from paceline.engines.stages.costs import estimate_layers
from paceline.models.gpt import gpt_config
from paceline.predict.memory.facts import LayerCost, choose_bounds
from paceline.schedule.measure import ScheduleCosts, ScheduleMeasure, StageCost, measure_schedule
from paceline.schedule.schedules import make_schedule
from paceline_bench.arms import BenchWorkload

KIND = "on the virtual clock, modelled"
_WORKLOAD = BenchWorkload(model="gpt-124m", batch=32, context=1024)
_NVLINK = Wire(alpha_s=1e-5, bandwidth=450e9)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelledGPUs:
    """What the figures come from."""

    gpus: int = 4
    gpu: str = "H200"
    workload: BenchWorkload = _WORKLOAD
    step_ms: float = 77.9649
    step_source: str = "bench/results/engines-h200.json, plain loop bf16, median_ms: measured"
    link: Wire = _NVLINK
    link_source: str = "NVLink of an H200, one direction, nominal; 10 us a message is assumed"
    schedule: str = "1f1b"
    microbatch: int = 8
    stream_bytes: int = 4  # of each feature of a token between two stages: the residual stream is fp32

    @property
    def batch(self) -> int:
        """The global batch of a step: as much on each GPU as was measured."""
        return self.gpus * self.workload.batch


def model_features(given: ModelledGPUs | None = None) -> list[dict[str, Any]]:
    """Returns a row for each feature, with the inputs that it comes from."""
    given = given or ModelledGPUs()
    model = given.workload.make_model(torch.device("meta"))
    costs = estimate_layers(model)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    width = gpt_config(given.workload.model).width
    step_s, gradients = given.step_ms / 1e3, 4.0 * num_parameters
    where, links = Placement(ranks=given.gpus), Wires(inside=given.link, across=given.link)
    message_s = given.link.seconds(given.microbatch * given.workload.context * width * given.stream_bytes)
    measure = _measure(given, costs, message_s)
    reduce_s = all_reduce_seconds("ring", gradients, where, links)
    zero2_s = 2 * scatter_seconds("ring", gradients, where, links)
    zero2_bytes = 4 * num_parameters + 12 * num_parameters // given.gpus
    stage_bytes = max(_stage_sums(costs, given.gpus, "state_bytes"))
    piped = {"bubble": round(measure.bubble, 4), "message_ms": _ms(message_s)}
    piped["microbatches"] = given.batch // given.microbatch
    missing = "joins ranks on CPUs; GPUs talk over NCCL"
    return [
        _row(given, "one GPU", 1, given.gpus * step_s, 16 * num_parameters),
        _row(given, "ddp", given.gpus, step_s + reduce_s, 16 * num_parameters, collectives_ms=_ms(reduce_s)),
        _row(given, "zero2", given.gpus, step_s + zero2_s, zero2_bytes, collectives_ms=_ms(zero2_s)),
        _row(given, f"pipeline, {given.schedule}", given.gpus, measure.makespan, stage_bytes, **piped),
        _row(given, "ddp shared memory", given.gpus, None, None, missing=missing),
    ]


def _measure(given: ModelledGPUs, costs: tuple[LayerCost, ...], message_s: float) -> ScheduleMeasure:
    """Runs the schedule against a clock; a microbatch takes its share of the measured step, spread over the stages."""
    forward = _stage_sums(costs, given.gpus, "forward")
    backward = _stage_sums(costs, given.gpus, "backward")
    microbatch_s = given.step_ms / 1e3 * given.microbatch / given.workload.batch
    unit = microbatch_s / (sum(forward) + sum(backward))
    stages = tuple(
        StageCost(forward=unit * f, backward_input=unit * b / 2, backward_weight=unit * b / 2)
        for f, b in zip(forward, backward, strict=True)
    )
    schedule = make_schedule(given.schedule, given.gpus, given.batch // given.microbatch)
    return measure_schedule(schedule, ScheduleCosts(stages=stages, communication=message_s))


def _stage_sums(costs: tuple[LayerCost, ...], stages: int, name: str) -> list[float]:
    bounds = choose_bounds(costs, stages)
    return [sum(getattr(cost, name) for cost in costs[begin:end]) for begin, end in pairwise(bounds)]


def _row(
    given: ModelledGPUs, feature: str, gpus: int, step_s: float | None, state_bytes: float | None, **more: Any
) -> dict[str, Any]:
    """One row; no figure where there is no model for it."""
    return {
        "part": "modelled",
        "kind": KIND,
        "feature": feature,
        "model": given.workload.model,
        "gpus": gpus,
        "batch": given.batch,
        "samples_per_s": None if step_s is None else round(given.batch / step_s, 1),
        "step_ms": None if step_s is None else _ms(step_s),
        "state_bytes": None if state_bytes is None else round(state_bytes),
        **more,
        "inputs": dataclasses.asdict(given),
    }


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 4)
