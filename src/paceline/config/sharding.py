"""Who shares what with whom, in one place: the ranks of a shard group, and the rules that sharding keys obey.

    ddp                     no group: every rank holds everything
    zero1, zero2, fsdp      one group: all ranks
    hybrid                  groups of shard_ranks, by default those of one host; each group holds one copy of the model

``zero3`` is another name of ``fsdp``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from paceline.errors import Problem

if TYPE_CHECKING:
    from paceline.config.schema import Config, ParallelConfig

FULLY_SHARDED = ("fsdp", "zero3", "hybrid")
SHARDED = ("zero1", "zero2", *FULLY_SHARDED)
_ONLY_FULLY = {"reshard_after_forward": True, "units": None, "unit_mb": None, "prefetch": 1}  # with their defaults


def data_ranks(parallel: ParallelConfig, ranks: int) -> int:
    """Returns how many of the ranks share the batch: all, where the model itself is not split."""
    return max(1, ranks // (parallel.pipeline * parallel.tensor))


def shard_group(parallel: ParallelConfig, ranks: int, node_ranks: int | None = None) -> int:
    """Returns how many data ranks share one copy of the model, or of a part of it: 1 where every one has its own.

    ``ranks`` are all ranks; ``node_ranks`` is how many of them share a host, as detected; what the config says goes
    before it.
    """
    if parallel.strategy in ("ddp", "auto"):
        return 1
    data = data_ranks(parallel, ranks)
    if parallel.strategy == "hybrid" and parallel.shard_ranks is None:
        local = parallel.node_ranks or node_ranks or ranks
        # Tensor ranks are neighbours, and data ranks come next: those of one host, if it has all of a part.
        return local if parallel.pipeline * parallel.tensor == 1 else min(data, max(1, local // parallel.tensor))
    if parallel.strategy == "hybrid":
        return parallel.shard_ranks or data
    return data


def check_sharding(config: Config, ranks: int, node_ranks: int | None = None) -> list[Problem]:
    """Lists what these ranks, ``node_ranks`` of them on a host (None: all), break about sharding."""
    parallel = config.parallel
    if ranks % (parallel.pipeline * parallel.tensor):
        return []  # said by the rules of the degrees
    problems = list(_groups_divide(parallel, ranks))
    if parallel.strategy == "hybrid" and not parallel.shard_ranks:
        problems += _hybrid_has_groups(parallel, ranks, parallel.node_ranks or node_ranks or ranks)
    reshard = parallel.reshard_after_forward
    group = shard_group(parallel, ranks, node_ranks)
    if not isinstance(reshard, bool) and parallel.strategy in FULLY_SHARDED and group % reshard:
        problems.append(
            Problem(
                what=f"parallel.reshard_after_forward = {reshard} does not divide the {group} ranks of a shard group",
                rule="after forward, parameters are kept by equal parts of a group",
                fix=f"try parallel.reshard_after_forward = {nearest_divisor(group, reshard)}, or true",
            )
        )
    return problems


def sharding_fits(config: Config) -> list[Problem]:
    """Groups fit the ranks, where their number is given; where hosts are is known only when the run starts."""
    parallel = config.parallel
    if parallel.ranks == "auto" or (
        parallel.strategy == "hybrid" and not (parallel.shard_ranks or parallel.node_ranks)
    ):
        return []
    return check_sharding(config, parallel.ranks)


def sharding_keys_apply(config: Config) -> list[Problem]:
    """No key of sharding is changed that the strategy does not read."""
    parallel = config.parallel
    if parallel.strategy == "auto":
        return []
    unread = [] if parallel.strategy in FULLY_SHARDED else list(_ONLY_FULLY)
    owners = dict.fromkeys(_ONLY_FULLY, "fsdp and hybrid")
    if parallel.strategy != "hybrid":
        unread, owners["shard_ranks"] = [*unread, "shard_ranks"], "hybrid"
    return [
        Problem(
            what=f"parallel.{key} = {_text(value)} has no effect with parallel.strategy = {parallel.strategy}",
            rule=f"it belongs to {owners[key]}",
            fix=f"remove parallel.{key}, or set parallel.strategy = {owners[key].partition(' ')[0]}",
        )
        for key in unread
        if (value := getattr(parallel, key)) != _ONLY_FULLY.get(key)
    ]


def one_way_to_cut(config: Config) -> list[Problem]:
    """Units are named, or made by size."""
    parallel = config.parallel
    if parallel.units is None or parallel.unit_mb is None:
        return []
    return [
        Problem(
            what=f"parallel.units = {_text(parallel.units)} and parallel.unit_mb = {parallel.unit_mb:g} are both given",
            rule="a model is cut into units by name or by size",
            fix="remove one of them",
        )
    ]


def units_are_names(config: Config) -> list[Problem]:
    """Units name modules, each once."""
    units = config.parallel.units or ()
    twice = sorted({name for name in units if units.count(name) > 1})
    if config.parallel.units is None or (units and not twice):
        return []
    return [
        Problem(
            what=f"parallel.units = {_text(units)} " + (f"names {twice[0]} twice" if twice else "names no module"),
            rule="each unit is a module of the model, such as layers.0; what is left makes a unit of its own",
            fix="name each once" if twice else "leave it out for the model's repeated blocks",
        )
    ]


def offload_has_shards(config: Config) -> list[Problem]:
    """What is offloaded are shards: ddp has none, and ZeRO 1 and 2 keep whole parameters where they compute."""
    strategy, offload = config.parallel.strategy, config.memory.offload
    if not offload or strategy in (*FULLY_SHARDED, "auto"):
        return []
    if strategy not in SHARDED:
        rule = "what is offloaded are the shards of a rank, and ddp has none"
        fix = "set parallel.strategy = zero1 or fsdp (on one rank too), or remove memory.offload"
    elif "parameters" in offload or "optimizer" not in offload:
        rule = f"{strategy} keeps whole parameters on the device, and gradients where the optimizer updates"
        fix = "set memory.offload = [optimizer], or parallel.strategy = fsdp"
    else:
        return []
    what = f"memory.offload = {_text(offload)} with parallel.strategy = {strategy}"
    return [Problem(what=what, rule=rule, fix=fix)]


def _groups_divide(parallel: ParallelConfig, ranks: int) -> Iterator[Problem]:
    for key in ("shard_ranks", "node_ranks"):
        size = getattr(parallel, key)
        whole = data_ranks(parallel, ranks) if key == "shard_ranks" else ranks
        if size is None or whole % size == 0:
            continue
        near, multiple = nearest_divisor(whole, size), max(round(whole / size), 1) * size * (ranks // whole)
        left = f"the {whole} data ranks of " if whole < ranks else ""
        yield Problem(
            what=f"parallel.{key} = {size} does not divide {left}parallel.ranks = {ranks}",
            rule="groups of ranks are of equal size" if key == "shard_ranks" else "every host runs as many ranks",
            fix=f"try parallel.{key} = {near}, or parallel.ranks = {multiple}",
        )


def _hybrid_has_groups(parallel: ParallelConfig, ranks: int, node_ranks: int) -> Iterator[Problem]:
    if ranks > node_ranks or parallel.node_ranks:
        return
    half = next((size for size in range(ranks // 2, 1, -1) if ranks % size == 0), 1)
    yield Problem(
        what=f"parallel.strategy = hybrid on {ranks} ranks of one host, without parallel.shard_ranks",
        rule="hybrid shards inside a host and replicates across hosts, and here there is one host",
        fix=f"set parallel.shard_ranks = {half}, or parallel.strategy = fsdp",
    )


def nearest_divisor(number: int, wanted: int) -> int:
    """Returns the divisor of ``number`` that is nearest to ``wanted``, the larger of two."""
    divisors = [each for each in range(1, number + 1) if number % each == 0]
    return min(divisors, key=lambda each: (abs(each - wanted), -each))


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(str(each) for each in value) + "]"
    return str(value).lower() if isinstance(value, bool) else str(value)
