"""What ``auto`` chooses among: how a model may be spread over the ranks, in the order of what that costs.

Whole models are cheapest. Their strategies, checkpointing and offload, the cheapest first:

    strategy       ddp, zero1, zero2     2 P (N-1)/N bytes a step each; more is shared, a little less overlaps
                   hybrid                3 P inside a host, and little between hosts; only where there are several
                   fsdp                  3 P (N-1)/N
    checkpointing  none, matmuls, full   computes again: nothing, all but the matrix products, the whole forward (+ 1/3)
    offload        none, optimizer, + gradients and parameters    the host's memory and its bus, in every step

Recomputation costs time on every rank and offload more still, so that every strategy is tried before the next of them.
Models are split before the ladder ends in what costs most, computing the whole forward again, and the host's memory.
The order:

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
from dataclasses import dataclass, replace
from typing import Any

from paceline.config import Config, layout_of, run_checks
from paceline.errors import ConfigError, UsageError
from paceline.mesh import divisors
from paceline.plan.workload import layout_label
from paceline.plan.layout import Layout, Offload, Strategy
from paceline.plan.plan import MARGIN, MemoryEstimate, RunMachine
from paceline.predict.memory.facts import ModelFacts, stage_bounds
from paceline.predict.memory.memory import StateFacts, estimate_memory
from paceline.units import format_bytes

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A layout, what it would need, and why it was not taken; empty where it was, or was not looked at."""

    layout: Layout
    memory: MemoryEstimate
    overhead: float = 0.0  # of a split model: time beside computing, in parts of it, by a rule of thumb
    rejected: str = ""
    seconds: float | None = None  # that a step is predicted to take, where that was asked

    @property
    def label(self) -> str:
        """The layout in a few words: ``fsdp, checkpoint full``."""
        return layout_label(self.layout)

    def to_json(self) -> dict[str, Any]:
        layout = self.layout
        return {
            **{name: getattr(layout, name) for name in ("strategy", "microbatch", "pipeline", "tensor", "data")},
            **{name: getattr(self, name) for name in ("overhead", "rejected", "seconds", "label")},
            "group": layout.shards,
            "checkpoint": layout.checkpoint_activations,
            "offload": layout.offload.parts,
            "memory": self.memory.to_json(),
        }


def judge(model: ModelFacts, layout: Layout, machine: RunMachine, states: StateFacts, overhead: float = 0.0) -> Judged:
    """Estimates what a layout needs; it is rejected, with the reason, if that is more than there is."""
    memory, rejected = estimate_memory(model, layout, states), ""
    on_host = memory.host * machine.local_ranks
    if memory.device_bytes > machine.budget_bytes:
        rejected = f"needs {format_bytes(memory.device_bytes)}"
    elif on_host > machine.host_bytes * (1 - MARGIN):
        rejected = f"needs {format_bytes(on_host)} of the host's {format_bytes(machine.host_bytes)}"
    return Judged(layout=layout, memory=memory, overhead=overhead, rejected=rejected)


def ladder_for(config: Config, model: ModelFacts, machine: RunMachine) -> tuple[list[Judged], list[str]]:
    """Returns all candidates in order, and what cannot be done here, with the reason.

    What ``memory`` says itself is kept as it is. A microbatch that is to be found counts as one sample.
    """
    left_out: list[str] = []
    keep = frozenset(config.memory.model_fields_set)
    try:
        asked = layout_of(with_degrees(config, machine.ranks), machine.ranks, machine.local_ranks)
        asked = replace(_smallest(asked, config), shard_ranks=config.parallel.shard_ranks or 0)
        whole = whole_ladder(model, asked, machine, StateFacts.of(config, machine.device), keep)
    except ConfigError as error:
        left_out.append(f"data {machine.ranks}: {error.headline}")
        whole = []

    def place(judged: Judged) -> tuple[int, float]:
        layout = judged.layout
        is_full = layout.checkpoint_activations == "full"
        return 4 if layout.offload.is_any else 2 * is_full + layout.is_split, judged.overhead

    split = _split_ladder(config, model, machine, keep, left_out)
    return sorted([*whole, *split], key=place), left_out  # stable: the simpler strategy first, where all is equal


def whole_ladder(
    model: ModelFacts, asked: Layout, machine: RunMachine, states: StateFacts, keep: frozenset[str] = frozenset()
) -> list[Judged]:
    """Returns the candidates of a whole model: ``asked`` with another strategy, checkpointing and offload.

    ``keep`` names what stays as asked: ``checkpoint_activations``, ``offload``. Shard ranks in ``asked`` are those of
    hybrid sharding.
    """
    ranks = machine.ranks
    strategies: list[tuple[Strategy, int]] = [("ddp", 1), ("zero1", ranks)]
    if ranks > 1:
        group = asked.shard_ranks if asked.shard_ranks > 1 else machine.local_ranks
        strategies.append(("zero2", ranks))
        if 1 < group < ranks and ranks % group == 0:
            strategies.append(("hybrid", group))
    strategies.append(("fsdp", ranks))
    offloads = (asked.offload,) if "offload" in keep else _OFFLOADS if machine.device == "cuda" else _OFFLOADS[:1]
    found = []
    for offload, checkpoint in itertools.product(offloads, _checkpoints_for(model, asked, keep)):
        for strategy, shards in strategies:
            if offload.is_any:
                if strategy == "ddp" or (
                    strategy in ("zero1", "zero2") and (offload.parameters or not offload.optimizer)
                ):
                    continue
            elif ranks == 1 and strategy != "ddp":  # with nobody to share, nothing is saved
                continue
            layout = replace(asked, strategy=strategy, shard_ranks=shards, data=ranks, node_ranks=machine.local_ranks)
            layout = replace(layout, checkpoint_activations=checkpoint, offload=offload, chunks=1)
            found.append(judge(model, layout, machine, states))
    return found


def _checkpoints_for(model: ModelFacts, asked: Layout, keep: frozenset[str]) -> tuple[str, ...]:
    checkpoints = (asked.checkpoint_activations,) if "checkpoint_activations" in keep else _CHECKPOINTS
    return checkpoints if model.blocks else checkpoints[:1]  # there is nothing to checkpoint block by block


def _smallest(layout: Layout, config: Config) -> Layout:
    """Returns the layout with microbatches of one sample, where their size is to be found."""
    if config.train.microbatch != "auto":
        return layout
    return replace(layout, microbatch=1, accumulate=layout.microbatch * layout.accumulate)


def _split_ladder(
    config: Config, model: ModelFacts, machine: RunMachine, keep: frozenset[str], left_out: list[str]
) -> Iterator[Judged]:
    """Iterates over meshes, strategies and checkpointing of split models; says of a mesh that cannot be why."""
    if machine.ranks == 1:
        return
    if not model.layers:
        left_out.append("pipeline and tensor parallelism: only the model's own code knows its layers")
        return
    can_share = any(layer.split_parameters for layer in model.layers)
    if not can_share:
        left_out.append(f"tensor parallelism: there is no plan of what to split for model.kind = {config.model.kind}")
    tensors = [size for size in divisors(machine.local_ranks) if machine.ranks % size == 0] if can_share else [1]
    states = StateFacts.of(config, machine.device)
    for tensor, pipeline in ((each, size) for each in tensors for size in divisors(machine.ranks // each)):
        if pipeline * tensor == 1:
            continue
        asked = with_degrees(config, machine.ranks, pipeline, tensor)
        try:
            if problems := run_checks(asked):
                raise ConfigError(problems, source="config")
            layout = layout_of(asked, machine.ranks, machine.local_ranks)
            if pipeline > 1:
                stage_bounds(model, pipeline)  # refuses more stages than layers
        except (ConfigError, UsageError) as error:
            left_out.append(f"pipeline {pipeline} x tensor {tensor}: {error.headline}")
            continue
        base = replace(_smallest(layout, config), **_PLAIN)
        strategies = _STRATEGIES if layout.data > 1 else _STRATEGIES[:1]
        for checkpoint, strategy in itertools.product(_checkpoints_for(model, base, keep), strategies):
            shards = 1 if strategy == "ddp" else layout.data
            each = replace(base, strategy=strategy, shard_ranks=shards, checkpoint_activations=checkpoint)
            yield judge(model, each, machine, states, overhead_of(model, each, machine, states.itemsize))


def overhead_of(model: ModelFacts, layout: Layout, machine: RunMachine, itemsize: int = 4) -> float:
    """Returns the time of a step beside computing, in parts of computing, by the rule of thumb above."""
    pipeline, tensor, count = layout.pipeline, layout.tensor, layout.accumulate
    data = machine.ranks // (pipeline * tensor)
    operations = 3 * sum(layer.operations for layer in model.layers)
    computing = operations * layout.microbatch * count / (pipeline * tensor)
    stream = layout.microbatch * max(layer.input_bytes for layer in model.layers)
    part = model.parameters * itemsize / (pipeline * tensor)
    inside = 8 * stream * count * len(model.blocks) / pipeline * (tensor - 1) / tensor
    averaged = layout.sharing.copies_sent(count) * part * (data - 1) / data
    sent = 2 * stream * count if pipeline > 1 else 0.0
    time = _INSIDE * inside
    time += (_INSIDE if data * tensor <= machine.local_ranks else _BETWEEN) * averaged
    time += (_INSIDE if machine.ranks <= machine.local_ranks else _BETWEEN) * sent
    recomputed = _RECOMPUTED.get(layout.checkpoint_activations, 1 / 3)
    return (pipeline - 1) / count + recomputed + time / max(computing, 1.0)


def with_degrees(config: Config, ranks: int, pipeline: int = 1, tensor: int = 1) -> Config:
    """Returns the config as it would be with these degrees, and a strategy that goes with all of them."""
    degrees = {"ranks": ranks, "pipeline": pipeline, "tensor": tensor}
    return config.with_values("parallel", strategy="ddp", shard_ranks=None, **degrees)
