"""What ``auto`` chooses among: how a model may be spread over the ranks, in the order of what that costs.

Whole models are cheapest. Their strategies, checkpointing and offload, the cheapest first:

    strategy       ddp, zero1, zero2     2 P (N-1)/N bytes a step each; more is shared, a little less overlaps
                   hybrid                3 P inside a host, and little between hosts; only where there are several
                   fsdp                  3 P (N-1)/N
    checkpointing  none, matmuls, full   computes again: nothing, all but the matrix products, the whole forward (+ 1/3)
    offload        none, optimizer, + gradients and parameters    the host's memory and its bus, in every step

Recomputation costs time on every rank and offload more still, so that every strategy is tried before the next of them.
``parallel.sharding_strategy: auto`` leaves the mesh open as well: models are split before the ladder ends in what costs
most, computing the whole forward again, and the host's memory. The order:

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

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from paceline.config import Config, layout_of, run_checks
from paceline.errors import ConfigError, UsageError
from paceline.mesh import divisors
from paceline.plan.layout import Layout, Offload, Strategy
from paceline.predict.memory.facts import ModelFacts, stage_bounds
from paceline.predict.memory.memory import StateFacts
from paceline.search.choice import Judged, Room, judge

_OFFLOADS = (Offload(), Offload(optimizer=True), Offload(optimizer=True, gradients=True, parameters=True))
_CHECKPOINTS = ("none", "matmuls", "full")
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


def ladder_for(config: Config, model: ModelFacts, room: Room) -> tuple[list[Judged], list[str]]:
    """Returns all candidates in order, and what cannot be done here, with the reason.

    What ``memory`` says itself is kept as it is. A microbatch that is to be found counts as one sample.
    """
    left_out: list[str] = []
    whole = _whole(config, model, room, left_out)
    if config.parallel.sharding_strategy == "manual":
        return whole, left_out
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
    return ladder, left_out


def whole_ladder(
    model: ModelFacts, asked: Layout, room: Room, states: StateFacts, keep: frozenset[str] = frozenset()
) -> list[Judged]:
    """Returns the candidates of a whole model: ``asked`` with another strategy, checkpointing and offload.

    ``keep`` names what stays as asked: ``checkpoint_activations``, ``offload``. Shard ranks in ``asked`` are those of
    hybrid sharding.
    """
    return [judge(model, layout, room, states) for layout in _whole_layouts(model, asked, room, keep)]


def _whole(config: Config, model: ModelFacts, room: Room, left_out: list[str]) -> list[Judged]:
    try:
        asked = layout_of(with_degrees(config, room.ranks), room.ranks, room.node_ranks)
    except ConfigError as error:
        left_out.append(f"data {room.ranks}: {error.headline}")
        return []
    asked = replace(_smallest(asked, config), shard_ranks=config.parallel.shard_ranks or 0)
    keep = frozenset(config.memory.model_fields_set)
    return whole_ladder(model, asked, room, StateFacts.of(config, room.device), keep)


def _checkpoints_for(model: ModelFacts, asked: Layout, keep: frozenset[str]) -> tuple[str, ...]:
    """Returns the checkpointing to try, the cheapest first."""
    checkpoints = (asked.checkpoint_activations,) if "checkpoint_activations" in keep else _CHECKPOINTS
    return checkpoints if model.blocks else checkpoints[:1]  # there is nothing to checkpoint block by block


def _whole_layouts(model: ModelFacts, asked: Layout, room: Room, keep: frozenset[str]) -> Iterator[Layout]:
    """Iterates over the layouts of whole models, the cheapest first."""
    checkpoints = _checkpoints_for(model, asked, keep)
    offloads = (asked.offload,) if "offload" in keep else _OFFLOADS if room.device == "cuda" else _OFFLOADS[:1]
    for offload, checkpoint in itertools.product(offloads, checkpoints):
        for strategy, shards in _strategies(asked, room):
            if offload.is_any and not _can_offload(strategy, offload):
                continue
            if room.ranks == 1 and strategy != "ddp" and not offload.is_any:  # with nobody to share, nothing is saved
                continue
            yield replace(
                asked,
                strategy=strategy,
                data=room.ranks,
                shard_ranks=shards,
                node_ranks=room.node_ranks,
                chunks=1,
                checkpoint_activations=checkpoint,
                offload=offload,
            )


def _can_offload(strategy: Strategy, offload: Offload) -> bool:
    if strategy in ("zero1", "zero2"):
        return offload.optimizer and not offload.parameters
    return strategy != "ddp"


def _strategies(asked: Layout, room: Room) -> Iterator[tuple[Strategy, int]]:
    yield "ddp", 1
    yield "zero1", room.ranks
    if room.ranks > 1:
        yield "zero2", room.ranks
        group = asked.shard_ranks if asked.shard_ranks > 1 else room.node_ranks
        if 1 < group < room.ranks and room.ranks % group == 0:
            yield "hybrid", group
    yield "fsdp", room.ranks


def _smallest(layout: Layout, config: Config) -> Layout:
    """Returns the layout with microbatches of one sample, where their size is to be found."""
    if config.train.microbatch != "auto":
        return layout
    return replace(layout, microbatch=1, accumulate=layout.microbatch * layout.accumulate)


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
    asked = with_degrees(config, room.ranks, pipeline, tensor)
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
    base = replace(_smallest(layout, config), **_PLAIN)
    states = StateFacts.of(config, room.device)
    for checkpoint in _checkpoints_for(model, base, frozenset(config.memory.model_fields_set)):
        for strategy in _STRATEGIES if layout.data > 1 else _STRATEGIES[:1]:
            shards = 1 if strategy == "ddp" else layout.data
            each = replace(base, strategy=strategy, shard_ranks=shards, checkpoint_activations=checkpoint)
            yield judge(model, each, room, states, overhead_of(model, each, room, states.itemsize))


def overhead_of(model: ModelFacts, layout: Layout, room: Room, itemsize: int = 4) -> float:
    """Returns the time of a step beside computing, in parts of computing, by the rule of thumb above."""
    pipeline, tensor, count = layout.pipeline, layout.tensor, layout.accumulate
    data = room.ranks // (pipeline * tensor)
    operations = 3 * sum(layer.operations for layer in model.layers)
    computing = operations * layout.microbatch * count / (pipeline * tensor)
    stream = layout.microbatch * max(layer.input_bytes for layer in model.layers)
    part = model.parameters * itemsize / (pipeline * tensor)
    inside = 8 * stream * count * len(model.blocks) / pipeline * (tensor - 1) / tensor
    averaged = layout.sharing.copies_sent(count) * part * (data - 1) / data
    sent = 2 * stream * count if pipeline > 1 else 0.0
    time = _INSIDE * inside
    time += (_INSIDE if data * tensor <= room.node_ranks else _BETWEEN) * averaged
    time += (_INSIDE if room.ranks <= room.node_ranks else _BETWEEN) * sent
    recomputed = _RECOMPUTED.get(layout.checkpoint_activations, 1 / 3)
    return (pipeline - 1) / count + recomputed + time / max(computing, 1.0)


def with_degrees(config: Config, ranks: int, pipeline: int = 1, tensor: int = 1) -> Config:
    """Returns the config as it would be with these degrees, and a strategy that goes with all of them."""
    degrees = {"ranks": ranks, "pipeline": pipeline, "tensor": tensor}
    return config.with_values("parallel", strategy="ddp", sharding_strategy="manual", shard_ranks=None, **degrees)
