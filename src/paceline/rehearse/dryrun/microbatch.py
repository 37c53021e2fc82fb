"""``train.microbatch: auto`` of a dry run: the largest that fits, found by recordings in the place of trials.

Memory grows with the microbatch, so a few recordings of the sizes that divide a rank's samples find it.
"""

from __future__ import annotations

import bisect

from paceline.cluster.devices import Cluster
from paceline.config import Config, config_batch
from paceline.predict.replay.replay import replay
from paceline.rehearse.dryrun.calls import KnownCalls
from paceline.rehearse.dryrun.record import record_stages
from paceline.search.choice import MARGIN
from paceline.train.batch_search import microbatch_sizes


def with_fitting_microbatch(config: Config, cluster: Cluster, *, ranks: int, rank: int = 0) -> Config:
    """Returns a config with the largest microbatch that leaves some memory free, as a run's own search does.

    One that names its microbatch is returned as it is; where none fits, the smallest is taken.
    """
    if config.train.microbatch != "auto":
        return config
    calls, limit = KnownCalls(), cluster.device.memory_bytes * (1 - MARGIN)
    node_ranks = min(ranks, cluster.node.devices)

    def is_too_large(size: int) -> bool:
        programs = record_stages(_with(config, size), ranks=ranks, rank=rank, node_ranks=node_ranks, calls=calls)
        return replay(programs, cluster).total_memory > limit

    sizes = microbatch_sizes(config_batch(config, ranks).samples_per_rank)
    return _with(config, sizes[max(0, bisect.bisect_left(sizes, True, key=is_too_large) - 1)])


def _with(config: Config, microbatch: int) -> Config:
    return config.model_copy(update={"train": config.train.model_copy(update={"microbatch": microbatch})})
