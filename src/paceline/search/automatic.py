"""The one chooser: ``auto`` by memory, and by predicted time where this machine can be priced.

The candidates are those of ``search/ladder.py``, judged by memory. Of those that fit, in their order from simple to
costly, one is taken over those before it where a step of it is predicted to take at most 98 % as long: what differs by
less is not told apart, and the simpler one stays. Where nothing can be priced, the order alone decides, and the choice
says so.

With an open microbatch, a candidate is timed with the largest that the estimate finds room for.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from paceline.cluster.detect import Machine
from paceline.cluster.devices import Cluster
from paceline.config import Config, config_batch, layout_of, with_precision
from paceline.errors import ConfigError, UsageError
from paceline.mesh import divisors
from paceline.plan.layout import Layout
from paceline.plan.workload import RECOMPUTES
from paceline.predict.formulas.engine_costs import price
from paceline.predict.memory.facts import ModelFacts
from paceline.predict.memory.memory import StateFacts, largest_microbatch
from paceline.search.candidates import TrainingTask
from paceline.search.choice import Choice, Judged, Room, take_first
from paceline.search.expect import present_cluster, unpriced
from paceline.search.from_config import task_of
from paceline.search.ladder import ladder_for, with_degrees

ENOUGH = 0.98  # of the time of a simpler candidate


def choose(config: Config, model: ModelFacts, room: Room, machine: Machine | None = None) -> Choice:
    """Decides ``parallel.strategy: auto`` or ``parallel.sharding_strategy: auto``, of a config whose ranks are decided.

    Of what fits into ``room``, the fastest by prediction on ``machine`` is taken; the first in order where that is None
    or cannot be priced. Raises ConfigError where nothing fits, or the batch divides among no number of data ranks.
    """
    config = with_precision(config, room.device)
    ladder, left_out = ladder_for(config, model, room)
    if not ladder:
        config_batch(with_degrees(config, room.ranks), room.ranks)  # says what is wrong with the batch
    is_whole = config.parallel.sharding_strategy == "manual"
    key = "parallel.strategy" if is_whole else "parallel.sharding_strategy"
    choice = take_first(ladder, model, room, key=key, left_out=tuple(left_out))
    return choice if machine is None else _by_time(choice, config, model, machine)


def _by_time(choice: Choice, config: Config, model: ModelFacts, machine: Machine) -> Choice:
    """Returns the choice with predicted seconds, and with the fastest candidate in the place of the first that fits."""
    room = choice.room
    config = config.with_values("parallel", device=room.device)
    try:
        cluster = _known_cluster(config, machine, ranks=room.ranks, node_ranks=room.node_ranks)
        task = task_of(with_degrees(config, room.ranks), room.ranks, facts=model)
        ladder = tuple(
            each
            if each.rejected
            else dataclasses.replace(each, seconds=_seconds(each, choice, config, model, task, cluster))
            for each in choice.ladder
        )
    except (UsageError, ConfigError) as error:
        return dataclasses.replace(choice, untimed=error.headline)
    chosen: Judged | None = None
    least = math.inf
    for each in ladder:
        if each.seconds is not None and each.seconds < ENOUGH * least:
            chosen, least = each, each.seconds
    if chosen is None:
        return dataclasses.replace(choice, untimed="none of these ways is priced")
    return dataclasses.replace(choice, ladder=ladder, chosen=chosen, machine=cluster.name)


def first_microbatch(
    config: Config, model: ModelFacts, machine: Machine, sizes: Sequence[int], *, ranks: int, node_ranks: int
) -> int | None:
    """Returns the size of ``sizes`` that is predicted to be fastest: where trials begin. None where none is priced.

    All of them fit by the estimate. Of those that are within 2 % of the fastest, it is the largest.
    """
    layout = layout_of(config, ranks, node_ranks)
    if layout.is_split or layout.checkpoint_activations not in RECOMPUTES:
        return None
    try:
        cluster = _known_cluster(config, machine, ranks=ranks, node_ranks=node_ranks)
        task = task_of(with_degrees(config, ranks), ranks, facts=model)
        seconds = {size: _price(layout, size, task, cluster) for size in sizes}
    except (UsageError, ConfigError):
        return None
    least = min(seconds.values(), default=0.0)
    return max((size for size, each in seconds.items() if each * ENOUGH <= least), default=None)


def _known_cluster(config: Config, machine: Machine, *, ranks: int, node_ranks: int) -> Cluster:
    """Returns this machine as a cluster. Raises UsageError for what no prediction knows of."""
    policy, decided = config.comm.compression.policy, config.with_values("train", microbatch=1)
    reason = unpriced(decided, hosts=-(-ranks // node_ranks))
    if reason or policy != "none":
        raise UsageError(reason or f"comm.compression.policy = {policy} is not priced")
    return present_cluster(config, machine, ranks, None)[0]


def _seconds(
    each: Judged, choice: Choice, config: Config, model: ModelFacts, task: TrainingTask, cluster: Cluster
) -> float | None:
    """Predicts a step of a candidate; None where that cannot be priced."""
    layout, size = each.layout, each.layout.microbatch
    if layout.checkpoint_activations not in RECOMPUTES:
        return None
    if layout.is_split:
        if task.model.is_sampled:
            return None  # a model known by its samples is not priced in parts
        layout = dataclasses.replace(layout, sequence_parallel=config.parallel.sequence_parallel and layout.tensor > 1)
    elif config.train.microbatch == "auto":  # the largest that divides a rank's samples and has room
        most = largest_microbatch(model, layout, StateFacts.of(config, choice.room.device), choice.budget_bytes)
        local = max(1, task.global_batch // choice.room.ranks)
        size = max(size for size in divisors(local) if size <= max(1, most))
    return _price(layout, size, task, cluster)


def _price(layout: Layout, microbatch: int, task: TrainingTask, cluster: Cluster) -> float:
    """Predicts the seconds of a step, with the buckets and the schedule that are usual."""
    layout = dataclasses.replace(
        layout,
        bucket_mb=task.base.bucket_mb,
        reshard_after_forward=True,
        microbatch=microbatch,
        accumulate=max(1, round(task.global_batch / (microbatch * layout.data))),
    )
    return price(task.workload(layout), cluster).seconds
