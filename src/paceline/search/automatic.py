"""The one chooser: ``auto`` by memory, and by predicted time where this machine can be priced.

Candidates are judged by memory, in the order of what they cost. Whole models are cheapest. Their strategies,
checkpointing and offload, the cheapest first:

    strategy       ddp, zero1, zero2     2 P (N-1)/N bytes a step each; more is shared, a little less overlaps
                   hybrid                3 P inside a host, and little between hosts; only where there are several
                   fsdp                  3 P (N-1)/N
    checkpointing  none, matmuls, full   computes again: nothing, all but the matrix products, the whole forward (+ 1/3)
    offload        none, optimizer, + gradients and parameters    the host's memory and its bus, in every step

Every strategy is tried before more is computed again, and that before offload: whole models, then split ones by their
overhead, both without full checkpointing; then both with it; then whole models with offload.

The overhead of a split model is the time of a step beside computing, in parts of computing. For p stages, m
microbatches, T tensor ranks and D data ranks, a part of P bytes, L blocks in it, and a stream of B bytes:

    bubble        (p - 1) / m                   equally, (p-1)/(m+p-1) of the step
    recompute     0, 0.1, 1/3                   none, matmuls, full
    tensor        8 B L m (T-1)/T bytes         inside a host always
    pipeline      2 B m bytes
    data          2 P (D-1)/D bytes for ddp and zero1; (m + 1) P for zero2 and 3 m P for fsdp, each microbatch anew

A byte that is sent inside a host counts as long as 128 operations, one between hosts as eight times that. This is a
rule of thumb for an order, not a prediction: nothing overlaps, and no link is measured.

Of the candidates that fit, one is taken over those before it where a step of it is predicted to take at most 98 % as
long; an open microbatch is timed as the largest that has room. Where nothing can be priced, the order alone decides,
and the choice says so.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, NamedTuple

from paceline.cluster.detect import Machine
from paceline.cluster.devices import Cluster
from paceline.config import Config, config_batch, layout_of, run_checks, with_precision
from paceline.errors import ConfigError, Problem, UsageError
from paceline.mesh import divisors
from paceline.plan.layout import Layout, Offload, Strategy
from paceline.plan.plan import MARGIN, RunMachine
from paceline.plan.workload import RECOMPUTES
from paceline.predict.formulas.engine_costs import AGAIN_OF_STEP, price
from paceline.predict.formulas.step import Prediction
from paceline.predict.memory.facts import ModelFacts, stage_bounds
from paceline.predict.memory.memory import StateFacts, estimate_memory, largest_microbatch
from paceline.search.candidates import Candidate, TrainingTask, strategies_for
from paceline.search.expect import present_cluster, unpriced
from paceline.search.request import task_of
from paceline.units import format_bytes, format_count, format_seconds

KEY = "parallel.strategy"  # what is auto
ENOUGH = 0.98  # of the time of a simpler candidate
_OFFLOADS = (Offload(), Offload(optimizer=True), Offload(optimizer=True, gradients=True, parameters=True))


class Rung(NamedTuple):
    """What a rank does for memory beside its strategy: computes again, runs MLPs in tiles (0), inputs on the host."""

    checkpoint: str
    tiles: int = 1
    offloads: bool = False

    def on(self, layout: Layout) -> Layout:
        offload = replace(layout.offload, activations=self.offloads)
        return replace(layout, checkpoint_activations=self.checkpoint, mlp_tiles=self.tiles, offload=offload)


# In the order of what they cost; tiles go with no matmuls (plan/rules.py).
RUNGS = (
    *(Rung("none"), Rung("matmuls"), Rung("none", 0), Rung("every_4", 0), Rung("every_2", 0)),
    *(Rung("full"), Rung("full", 0), Rung("full", 1, offloads=True), Rung("full", 0, offloads=True)),
)
# What all split candidates are judged with, whatever the config says of it.
_PLAIN: dict[str, Any] = {"schedule": "1f1b", "chunks": 1, "sequence_parallel": False}
_PLAIN |= {"stages": "estimated", "stage_layers": None}
_INSIDE = 128.0  # operations in the time in which a byte is sent inside a host
_BETWEEN = 8 * _INSIDE


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What was chosen, all candidates in order, and where the ranks are for which they were judged."""

    chosen: Candidate
    ladder: tuple[Candidate, ...]
    where: RunMachine
    parameters: int
    left_out: tuple[str, ...] = ()  # what cannot be done here, and why
    machine: str = ""  # that seconds were predicted for
    untimed: str = ""  # why none were
    key: str = KEY

    def reason(self) -> str:
        chosen, where = self.chosen, self.where
        ranks = "1 rank" if where.ranks == 1 else f"{where.ranks} ranks"
        told = (
            f"{self.key} = auto: {chosen.label}, about {format_bytes(chosen.memory.device_bytes)} of "
            f"{format_bytes(where.budget_bytes)} a rank (all but {MARGIN:.0%} of {format_bytes(where.device_bytes)}) "
            f"for {format_count(self.parameters)} parameters on {ranks}, microbatch {chosen.layout.microbatch}"
        )
        tried = self.ladder[: self.ladder.index(chosen) + 1]
        if rejected := [f"{each.label} {each.rejected}" for each in tried if each.rejected]:
            more = f"; and {len(rejected) - 4} more" if len(rejected) > 4 else ""
            told += f"; not {'; '.join(rejected[:4])}{more}"
        else:
            told += "; it is the cheapest, and fits" if chosen.seconds is None else "; it fits"
        if rejected and self.left_out:
            told += f"; impossible: {'; '.join(self.left_out[:2])}"
        if chosen.seconds is None:
            return told + (f"; taken in order and not by time: {self.untimed}" if self.untimed else "")
        others = sorted(
            (each.seconds, place, each.label)
            for place, each in enumerate(self.ladder)
            if each.seconds is not None and each is not chosen
        )
        listed = ", ".join(f"{label} {format_seconds(seconds)}" for seconds, _, label in others[:3])
        told += f"; predicted {format_seconds(chosen.seconds)} a step on {self.machine}"
        return told + (f" ({listed})" if listed else "")

    def to_json(self) -> dict[str, Any]:
        return {
            "key": self.key,
            "budget_bytes": self.where.budget_bytes,
            **{name: getattr(self, name) for name in ("parameters", "machine", "untimed")},
            "chosen": self.chosen.label,
            "microbatch": self.chosen.layout.microbatch,
            "ladder": [each.to_json() for each in self.ladder],
            "left_out": list(self.left_out),
        }


def choose(config: Config, model: ModelFacts, where: RunMachine, machine: Machine | Cluster | None = None) -> Choice:
    """Decides ``strategy: auto`` and ``memory: auto``, by time where ``machine`` or cluster can be priced.

    Raises ConfigError where nothing fits.
    """
    config = with_precision(config, where.device)
    key = KEY if config.parallel.strategy == "auto" else "memory"
    left_out: list[str] = []
    ladder = _ladder_for(config, model, where, left_out)
    if not ladder:
        config_batch(with_degrees(config, where.ranks), where.ranks)  # says what is wrong with the batch
    choice = replace(take_first(ladder, model, where, key), left_out=tuple(left_out))
    return choice if machine is None else _by_time(choice, config, model, machine)


def take_first(ladder: Sequence[Candidate], model: ModelFacts, where: RunMachine, key: str = KEY) -> Choice:
    """Takes the first candidate that fits, of at least one. Raises ConfigError where none does.

    Where none leaves a margin, the one that needs least is taken if it fits without.
    """
    least = min(ladder, key=attrgetter("memory_bytes"))
    chosen = next((candidate for candidate in ladder if not candidate.rejected), None)
    if chosen is None and least.memory_bytes <= where.device_bytes and "host" not in least.rejected:
        chosen = replace(least, rejected="")
        ladder = [chosen if each is least else each for each in ladder]
    if chosen is not None:
        return Choice(chosen=chosen, ladder=tuple(ladder), where=where, parameters=model.parameters, key=key)
    need, layout = least.memory, least.layout
    parts = ", ".join(
        f"{name} {format_bytes(value)}"
        for name, value in sorted(dataclasses.asdict(need).items(), key=lambda item: -item[1])
        if value and name != "host"
    )
    half = layout.microbatch // 2
    smaller = f"train.microbatch = {half} or auto" if half else "a smaller model or context"
    is_host_full = any("host" in each.rejected for each in ladder)
    host = "; the host's memory is too small for more offload" if is_host_full else ""
    set_keys = {"strategy": layout.strategy, "pipeline": layout.pipeline, "tensor": layout.tensor}
    keys = ", ".join(f"parallel.{name} = {value}" for name, value in set_keys.items() if value != 1)
    problem = Problem(
        what=f"{key} = auto: nothing fits into {format_bytes(where.budget_bytes)} of memory a rank; {least.label} "
        f"comes nearest with {format_bytes(need.device_bytes)} ({parts}){host}",
        rule=f"{format_count(model.parameters)} parameters, {where.ranks} ranks, and {MARGIN:.0%} of memory kept free",
        fix=f"try more ranks, or {smaller}; to try anyway, set {keys}",
    )
    raise ConfigError([problem], source="config")


def apply_choice(config: Config, choice: Choice) -> Config:
    """Returns the config with what was chosen in the place of ``auto``, and the precision of the device."""
    layout = choice.chosen.layout
    changed = with_precision(config, choice.where.device).with_values(
        "memory",
        auto=False,
        checkpoint_activations=layout.checkpoint_activations,
        offload=layout.offload.parts,
        mlp_tiles=layout.mlp_tiles or "auto",
    )
    if not config.opens_strategy:
        return changed
    return changed.with_values(
        "parallel",
        strategy=layout.strategy,
        shard_ranks=layout.shards if layout.strategy == "hybrid" else None,
        pipeline=layout.pipeline,
        tensor=layout.tensor,
    )


def _by_time(choice: Choice, config: Config, model: ModelFacts, machine: Machine | Cluster) -> Choice:
    """Returns the choice with predicted seconds, and with the fastest candidate in the place of the first that fits."""
    where = choice.where
    config = config.with_values("parallel", device=where.device)
    try:
        cluster, task = _priced(config, model, machine, where)

        def predicted(layout: Layout) -> Prediction | None:
            """Predicts a step of a candidate; None where that cannot be priced, as a sampled model's in parts."""
            size = layout.microbatch
            if layout.is_split and task.model.is_sampled:
                return None
            if layout.is_split:
                layout = replace(layout, sequence_parallel=config.parallel.sequence_parallel and layout.tensor > 1)
            elif config.train.microbatch == "auto":  # the largest that divides a rank's samples and has room
                most = largest_microbatch(model, layout, StateFacts.of(config, where.device), where.budget_bytes)
                local = max(1, task.global_batch // where.ranks)
                size = max(size for size in divisors(local) if size <= max(1, most))
            return _price(layout, size, task, cluster)

        ladder = tuple(
            each if each.rejected else replace(each, prediction=predicted(each.layout)) for each in choice.ladder
        )
    except (UsageError, ConfigError) as error:
        return replace(choice, untimed=error.headline)
    chosen: Candidate | None = None
    least = math.inf
    for each in ladder:
        if each.seconds is not None and each.seconds < ENOUGH * least:
            chosen, least = each, each.seconds
    if chosen is None:
        return replace(choice, untimed="none of these ways is priced")
    return replace(choice, ladder=ladder, chosen=chosen, machine=cluster.name)


def first_microbatch(
    config: Config, model: ModelFacts, machine: Machine, sizes: Sequence[int], *, ranks: int, node_ranks: int
) -> int | None:
    """Returns where trials begin: the largest of ``sizes`` predicted within 2 % of the fastest; None: unpriced."""
    layout = layout_of(config, ranks, node_ranks)
    if layout.is_split:
        return None
    where = RunMachine(device=config.parallel.device, ranks=ranks, node_ranks=node_ranks)
    try:
        cluster, task = _priced(config, model, machine, where)
        seconds = {size: _price(layout, size, task, cluster).seconds for size in sizes}
    except (UsageError, ConfigError):
        return None
    least = min(seconds.values(), default=0.0)
    return max((size for size, each in seconds.items() if each * ENOUGH <= least), default=None)


def _priced(
    config: Config, model: ModelFacts, machine: Machine | Cluster, where: RunMachine
) -> tuple[Cluster, TrainingTask]:
    """Returns this machine as a cluster, and what is trained on it. Raises UsageError for what no prediction knows."""
    policy, decided = config.comm.compression.policy, config.with_values("train", microbatch=1)
    is_cluster = isinstance(machine, Cluster)
    reason = unpriced(decided, hosts=1 if is_cluster else -(-where.ranks // where.local_ranks))
    if reason or policy != "none":
        raise UsageError(reason or f"comm.compression.policy = {policy} is not priced")
    cluster = machine if isinstance(machine, Cluster) else present_cluster(config, machine, where.ranks, None)[0]
    return cluster, task_of(with_degrees(config, where.ranks), where.ranks, facts=model)


def _price(layout: Layout, microbatch: int, task: TrainingTask, cluster: Cluster) -> Prediction:
    """Predicts a step with the buckets and the schedule that are usual."""
    layout = replace(
        layout,
        bucket_mb=task.base.bucket_mb,
        reshard_after_forward=True,
        microbatch=microbatch,
        accumulate=max(1, round(task.global_batch / (microbatch * layout.data))),
    )
    return price(task.workload(layout), cluster)


def _ladder_for(config: Config, model: ModelFacts, machine: RunMachine, left_out: list[str]) -> list[Candidate]:
    """Returns all candidates in order; ``left_out`` learns what cannot be done here. What ``memory`` says is kept."""
    keep = frozenset(config.memory.model_fields_set)
    states = StateFacts.of(config, machine.device)
    if not config.opens_strategy:
        asked = _smallest(layout_of(config, machine.ranks, machine.local_ranks), config)
        return list(climb(model, asked, machine, states, keep, [(asked.strategy, asked.shards)]))
    try:
        asked = layout_of(with_degrees(config, machine.ranks), machine.ranks, machine.local_ranks)
        asked = replace(_smallest(asked, config), shard_ranks=config.parallel.shard_ranks or 0)
        whole = whole_ladder(model, asked, machine, states, keep)
    except ConfigError as error:
        left_out.append(f"data {machine.ranks}: {error.headline}")
        whole = []

    def place(candidate: Candidate) -> tuple[int, float]:
        layout = candidate.layout
        is_full = layout.checkpoint_activations == "full"
        return 4 if layout.offload.moves_states else 2 * is_full + layout.is_split, candidate.overhead

    split = _split_ladder(config, model, machine, keep, left_out)
    return sorted([*whole, *split], key=place)  # stable: the simpler strategy first, where all is equal


def judge(
    model: ModelFacts, layout: Layout, machine: RunMachine, states: StateFacts, overhead: float = 0.0
) -> Candidate:
    """Estimates what a layout needs; it is rejected, with the reason, if that is more than there is."""
    memory, rejected = estimate_memory(model, layout, states), ""
    on_host = memory.host * machine.local_ranks
    if memory.device_bytes > machine.budget_bytes:
        rejected = f"needs {format_bytes(memory.device_bytes)}"
    elif on_host > machine.host_bytes * (1 - MARGIN):
        rejected = f"needs {format_bytes(on_host)} of the host's {format_bytes(machine.host_bytes)}"
    return Candidate(layout=layout, memory=memory, overhead=overhead, rejected=rejected)


def whole_ladder(
    model: ModelFacts, asked: Layout, machine: RunMachine, states: StateFacts, keep: frozenset[str] = frozenset()
) -> list[Candidate]:
    """Returns the candidates of a whole model: ``asked`` in other strategies; ``keep`` names what stays as asked."""
    ranks = machine.ranks
    group = asked.shard_ranks if asked.shard_ranks > 1 else machine.local_ranks
    asked = replace(asked, data=ranks, node_ranks=machine.local_ranks, chunks=1)
    return list(climb(model, asked, machine, states, keep, tuple(strategies_for(ranks, group, is_split=False))))


def climb(
    model: ModelFacts,
    asked: Layout,
    machine: RunMachine,
    states: StateFacts,
    keep: frozenset[str],
    strategies: Sequence[tuple[Strategy, int]],
) -> Iterator[Candidate]:
    """Iterates over the rungs of a layout, in each of the strategies, the cheapest first."""
    offloads = (asked.offload,) if "offload" in keep else _OFFLOADS if machine.device == "cuda" else _OFFLOADS[:1]
    rungs = rungs_for(model, asked, machine.device, keep)
    for offload, rung, (strategy, shards) in itertools.product(offloads, rungs, strategies):
        can_offload = strategy in ("fsdp", "hybrid") or (offload.optimizer and not offload.parameters)
        if offload.moves_states and (asked.is_split or strategy == "ddp" or not can_offload):
            continue
        is_alone = len(strategies) > 1 and machine.ranks == 1  # with nobody to share, nothing is saved
        if is_alone and strategy != "ddp" and not offload.moves_states:
            continue
        layout = rung.on(replace(asked, strategy=strategy, shard_ranks=shards, offload=offload))
        yield judge(model, layout, machine, states)


def rungs_for(model: ModelFacts, asked: Layout, device: str, keep: frozenset[str]) -> tuple[Rung, ...]:
    """Returns the rungs for a model on a device, the cheapest first; ``keep`` names what stays as asked."""
    own = Rung(asked.checkpoint_activations, asked.mlp_tiles, asked.offload.activations)
    fixed = {"checkpoint_activations": "checkpoint", "mlp_tiles": "tiles", "offload": "offloads"}
    held = {name: getattr(own, name) for key, name in fixed.items() if key in keep}
    has_tiles = any(block.mlp for block in model.blocks) and not asked.sequence_parallel
    found = []
    for each in RUNGS if model.blocks else RUNGS[:1]:  # else there is nothing to do block by block
        rung = each._replace(**held)
        can_tile = rung.tiles == 1 or "tiles" in held or (has_tiles and rung.checkpoint != "matmuls")
        can_offload = not rung.offloads or "offloads" in held or (device == "cuda" and rung.checkpoint != "none")
        if can_tile and can_offload and rung not in found:
            found.append(rung)
    return tuple(found)


def _smallest(layout: Layout, config: Config) -> Layout:
    if config.train.microbatch != "auto":
        return layout
    return replace(layout, microbatch=1, accumulate=layout.microbatch * layout.accumulate)


def _split_ladder(
    config: Config, model: ModelFacts, machine: RunMachine, keep: frozenset[str], left_out: list[str]
) -> Iterator[Candidate]:
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
        strategies = strategies_for(layout.data, 1, is_split=True)
        as_whole = (base.mlp_tiles, base.offload.activations)
        rungs = [each for each in rungs_for(model, base, machine.device, keep) if each[1:] == as_whole]
        for rung, (strategy, shards) in itertools.product(rungs, strategies):
            each = rung.on(replace(base, strategy=strategy, shard_ranks=shards))
            yield judge(model, each, machine, states, overhead_of(model, each, machine, states.itemsize))


def overhead_of(model: ModelFacts, layout: Layout, machine: RunMachine, itemsize: int = 4) -> float:
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
    recomputed = AGAIN_OF_STEP[RECOMPUTES[layout.checkpoint_activations]]
    return (pipeline - 1) / count + recomputed + time / max(computing, 1.0)


def with_degrees(config: Config, ranks: int, pipeline: int = 1, tensor: int = 1) -> Config:
    """Returns the config as it would be with these degrees, and a strategy that goes with all of them."""
    degrees = {"ranks": ranks, "pipeline": pipeline, "tensor": tensor}
    return config.with_values("parallel", strategy="ddp", shard_ranks=None, **degrees)
