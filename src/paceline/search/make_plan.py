"""``make_plan``: from what was asked and what is there to decided numbers, the plan that a run is carried out by.

    plan = make_plan(config, RunMachine(device="cuda", ranks=16, node_ranks=8))

A strategy that the config leaves open is chosen by memory and predicted time (``choose_layout``), which needs to know
the model and the memory that is free.

``parallel.sharding_strategy: auto``: how a number of ranks is spread over pipeline, tensor and data, and why.

Whole models are cheapest, so the ladder of ``choice.py`` comes first, and models are split before it ends in what
costs most: computing the whole forward again, and the host's memory. The order:

    1  whole models         checkpoint none, matmuls
    2  split models         checkpoint none, matmuls; the least overhead first
    3  whole, split         checkpoint full
    4  whole models         offload

The overhead of a split model is the time of a step beside computing, in parts of computing. For p stages, m
microbatches, T tensor ranks and D data ranks, a part of P bytes, L blocks in it, and a stream of B bytes:

    bubble        (p - 1) / m                   equally, (p-1)/(m+p-1) of the step
    recompute     0, 0.1, 1/3                   none, matmuls, full
    tensor        8 B L m (T-1)/T bytes         inside a host always
    pipeline      2 B m bytes
    data          2 P (D-1)/D bytes for ddp and zero1; (m + 1) P for zero2 and 3 m P for fsdp, each microbatch anew

A byte that is sent inside a host counts as long as 128 operations, one between hosts as eight times that. This is a
rule of thumb for an order, not a prediction: nothing overlaps, and no link is measured.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from paceline.cluster.detect import Machine
from paceline.config import Config, check_ranks, config_batch, layout_of, run_checks, with_precision
from paceline.errors import ConfigError, UsageError
from paceline.mesh import divisors
from paceline.plan.layout import Layout, Strategy
from paceline.plan.plan import Plan
from paceline.predict.memory.facts import ModelFacts
from paceline.predict.memory.memory import StateFacts
from paceline.predict.memory.parts import stage_bounds
from paceline.search.automatic import choose_by_time
from paceline.search.choice import (
    Choice,
    Judged,
    Room,
    apply_choice,
    checkpoints_for,
    choose_for_config,
    data_layouts,
    judge,
    take_first,
)

_KEY = "parallel.sharding_strategy"
# What all split candidates are judged with, whatever the config says of it.
_PLAIN: dict[str, Any] = {
    "schedule": "1f1b",
    "chunks": 1,
    "sequence_parallel": False,
    "stages": "estimated",
    "stage_layers": None,
}
_INSIDE = 128.0  # operations in the time in which a byte is sent inside a host
_BETWEEN = 8 * _INSIDE
_RECOMPUTED = {"none": 0.0, "matmuls": 0.1, "full": 1 / 3}
_STRATEGIES: tuple[Strategy, ...] = ("ddp", "zero1", "zero2", "fsdp")


def choose_mesh(config: Config, model: ModelFacts, room: Room) -> Choice:
    """Takes the cheapest mesh, strategy and checkpointing that fit. What ``memory`` says itself is kept as it is.

    Raises ConfigError where nothing fits, or the batch divides among no number of data ranks.
    """
    left_out: list[str] = []
    whole = list(_whole(config, model, room, left_out))
    split = list(_split(config, model, room, left_out))
    split.sort(key=lambda judged: judged.overhead)  # stable: the simpler strategy first, where all is equal

    def is_full(judged: Judged) -> bool:
        return judged.layout.checkpoint_activations == "full"

    on_device = [each for each in whole if not each.layout.offload.is_any]
    ladder = [
        *(each for each in on_device if not is_full(each)),
        *(each for each in split if not is_full(each)),
        *(each for each in on_device if is_full(each)),
        *(each for each in split if is_full(each)),
        *(each for each in whole if each.layout.offload.is_any),
    ]
    if not ladder:
        config_batch(_with_degrees(config, room, 1, 1), room.ranks)  # says what is wrong with the batch
    return take_first(ladder, model, room, key=_KEY, left_out=tuple(left_out))


def _whole(config: Config, model: ModelFacts, room: Room, left_out: list[str]) -> Iterator[Judged]:
    try:
        asked = layout_of(_with_degrees(config, room, 1, 1), room.ranks, room.node_ranks)
    except ConfigError as error:
        left_out.append(f"data {room.ranks}: {error.headline}")
        return
    asked = dataclasses.replace(_smallest(asked, config), shard_ranks=config.parallel.shard_ranks or 0)
    for layout in data_layouts(model, asked, room, frozenset(config.memory.model_fields_set)):
        yield judge(model, layout, room, StateFacts.of(config, room.device))


def _smallest(layout: Layout, config: Config) -> Layout:
    """Returns the layout with microbatches of one sample, where their size is to be found."""
    if config.train.microbatch != "auto":
        return layout
    return dataclasses.replace(layout, microbatch=1, accumulate=layout.microbatch * layout.accumulate)


def _split(config: Config, model: ModelFacts, room: Room, left_out: list[str]) -> Iterator[Judged]:
    if room.ranks == 1:
        return
    if not model.layers:
        left_out.append("pipeline and tensor parallelism: only the model's own code knows its layers")
        return
    can_share = any(layer.split_parameters for layer in model.layers)
    if not can_share:
        left_out.append(f"tensor parallelism: there is no plan of what to split for model.kind = {config.model.kind}")
    tensors = [size for size in divisors(room.node_ranks) if room.ranks % size == 0] if can_share else [1]
    for tensor in tensors:
        for pipeline in divisors(room.ranks // tensor):
            if pipeline * tensor > 1:
                yield from _of_degrees(config, model, room, (pipeline, tensor), left_out)


def _of_degrees(
    config: Config, model: ModelFacts, room: Room, degrees: tuple[int, int], left_out: list[str]
) -> Iterator[Judged]:
    """Iterates over strategies and checkpointing for one mesh; says why if it cannot be."""
    pipeline, tensor = degrees
    asked = _with_degrees(config, room, pipeline, tensor)
    try:
        problems = run_checks(asked)
        if problems:
            raise ConfigError(problems, source="config")
        layout = layout_of(asked, room.ranks, room.node_ranks)
        if pipeline > 1:
            stage_bounds(model, pipeline)  # refuses more stages than layers
    except (ConfigError, UsageError) as error:
        left_out.append(f"pipeline {pipeline} x tensor {tensor}: {error.headline}")
        return
    base = dataclasses.replace(_smallest(layout, config), **_PLAIN)
    states = StateFacts.of(config, room.device)
    for checkpoint in checkpoints_for(model, base, frozenset(config.memory.model_fields_set)):
        for strategy in _STRATEGIES if layout.data > 1 else _STRATEGIES[:1]:
            shards = 1 if strategy == "ddp" else layout.data
            each = dataclasses.replace(base, strategy=strategy, shard_ranks=shards, checkpoint_activations=checkpoint)
            yield judge(model, each, room, states, overhead_of(model, each, room, states.itemsize))


def overhead_of(model: ModelFacts, layout: Layout, room: Room, itemsize: int = 4) -> float:
    """Returns the time of a step beside computing, in parts of computing, by the rule of thumb above."""
    pipeline, tensor, count = layout.pipeline, layout.tensor, layout.accumulate
    data = room.ranks // (pipeline * tensor)
    operations = 3 * sum(layer.operations for layer in model.layers)
    computing = operations * layout.microbatch * count / (pipeline * tensor)
    stream = layout.microbatch * max(layer.input_bytes for layer in model.layers)
    part = model.parameters * itemsize / (pipeline * tensor)
    trips = {"ddp": 2, "zero1": 2, "zero2": count + 1}.get(layout.strategy, 3 * count)
    inside = 8 * stream * count * len(model.blocks) / pipeline * (tensor - 1) / tensor
    averaged = trips * part * (data - 1) / data
    sent = 2 * stream * count if pipeline > 1 else 0.0
    time = _INSIDE * inside
    time += (_INSIDE if data * tensor <= room.node_ranks else _BETWEEN) * averaged
    time += (_INSIDE if room.ranks <= room.node_ranks else _BETWEEN) * sent
    recomputed = _RECOMPUTED.get(layout.checkpoint_activations, 1 / 3)
    return (pipeline - 1) / count + recomputed + time / max(computing, 1.0)


def _with_degrees(config: Config, room: Room, pipeline: int, tensor: int) -> Config:
    """Returns the config as it would be with these degrees, and a strategy that goes with all of them."""
    degrees = {"ranks": room.ranks, "pipeline": pipeline, "tensor": tensor}
    return config.with_values("parallel", strategy="ddp", sharding_strategy="manual", shard_ranks=None, **degrees)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMachine:
    """What there is for a run: ranks on devices, ``node_ranks`` of them on a host (None: all)."""

    device: str
    ranks: int
    node_ranks: int | None = None


def make_plan(config: Config, machine: RunMachine, *, source: str = "config") -> Plan:
    """Decides all about a run whose strategy is decided. Raises ConfigError with all that these ranks break."""
    problems = check_ranks(config, machine.ranks, machine.node_ranks)
    if problems:
        raise ConfigError(problems, source=source)
    config = with_precision(config, machine.device)
    return Plan(
        name=config.name,
        layout=layout_of(config, machine.ranks, machine.node_ranks),
        device=machine.device,
        finds_microbatch=config.train.microbatch == "auto",
    )


def choose_layout(config: Config, model: ModelFacts, room: Room, machine: Machine) -> tuple[Config, Choice]:
    """Decides ``parallel.strategy: auto`` or ``parallel.sharding_strategy: auto``; returns the config, and why.

    Of what fits into ``room``, the fastest by prediction is taken; the first in order where the machine cannot be
    priced. Raises ConfigError where nothing fits.
    """
    choose = choose_mesh if config.parallel.sharding_strategy == "auto" else choose_for_config
    config = with_precision(config, room.device)
    here = config.with_values("parallel", device=room.device)
    choice = choose_by_time(choose(config, model, room), here, model, machine)
    return apply_choice(config, choice), choice


def with_length(plan: Plan, config: Config, *, train_samples: int, eval_samples: int) -> Plan:
    """Returns the plan with how long the run is, which follows from the data."""
    batch, in_epoch = plan.batch.global_batch, train_samples
    if config.data.last_batch == "drop":
        in_epoch -= train_samples % batch
    steps_per_epoch = -(-in_epoch // batch)
    total_steps = config.train.steps
    if total_steps is None:
        total_steps = max(1, round((config.train.epochs_to_run or 1.0) * steps_per_epoch))
    whole, rest = divmod(total_steps, max(steps_per_epoch, 1))
    return replace(
        plan,
        train_samples=train_samples,
        eval_samples=eval_samples,
        steps_per_epoch=steps_per_epoch,
        total_steps=total_steps,
        total_samples=whole * in_epoch + rest * batch,
    )


def decided_config(config: Config, plan: Plan) -> Config:
    """Returns the config with what was decided in the place of what it left open: what a run's folder keeps."""
    return config.with_values("parallel", device=plan.device, ranks=plan.layout.ranks)
