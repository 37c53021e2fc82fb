"""Which ranks share what, asked of the keys of a config."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.config.batch import batch_plan
from paceline.plan.plan import BatchPlan
from paceline.schedule.schedules import CHUNKS

if TYPE_CHECKING:
    from paceline.config.schema import Config, ParallelConfig

FULLY_SHARDED = ("fsdp", "zero3", "hybrid")


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
        return local if parallel.pipeline * parallel.tensor == 1 else min(data, max(1, local // parallel.tensor))
    if parallel.strategy == "hybrid":
        return parallel.shard_ranks or data
    return data


def is_split(parallel: ParallelConfig) -> bool:
    """Whether the model is spread over ranks, by layers or inside them."""
    return parallel.pipeline > 1 or parallel.tensor > 1


def num_chunks(parallel: ParallelConfig) -> int:
    """Returns how many stages each rank has: what was asked, or the fewest that the schedule takes."""
    return parallel.chunks or CHUNKS[parallel.schedule][0]


def num_stages(parallel: ParallelConfig) -> int:
    """Returns how many stages the model is cut into; 1 where there is no pipeline."""
    return parallel.pipeline * num_chunks(parallel) if parallel.pipeline > 1 else 1


def config_batch(config: Config, ranks: int) -> BatchPlan:
    """Resolves the batch of a config on this many ranks, of which only the data ranks share it.

    Raises ConfigError where it cannot be divided.
    """
    return batch_plan(config.train, data_ranks(config.parallel, ranks), config.parallel.pipeline)
