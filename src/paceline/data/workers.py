"""``data.workers: auto``: how many processes read batches for one rank.

    workers = seconds to read a batch here / 10 ms, at least 1 and at most the rank's cores but one

so that a batch is ready every 10 ms: few steps of a GPU are shorter. It is measured on a few samples before the run.
Data in memory needs no workers: a thread gathers it ahead (feed.py). Random augmentation differs between no workers and
some, but not between numbers of them (fetch.py). So data that is not in memory always gets some, however fast it reads.
"""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from paceline.data.datasets import MapDataset
from paceline.data.fetch import WorkerStart, fetch_batch, is_in_memory
from paceline.data.loader import check_picklable
from paceline.data.streams import StreamSamples
from paceline.errors import DataError

BATCH_INTERVAL_S = 0.010
_TRIAL_SAMPLES = 8
_TRIALS = 3  # on other samples each: the first may open files


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerChoice:
    workers: int
    reason: str

    def detail(self) -> dict[str, Any]:
        return asdict(self)


def choose_workers(dataset: MapDataset, batch_size: int, *, cores: int, worker_start: WorkerStart) -> WorkerChoice:
    """Chooses the workers of a rank that may use ``cores`` and reads ``batch_size`` samples at a time.

    Reads a few samples, and so draws random numbers where the data set does: the caller puts their states back.
    """
    if is_in_memory(dataset):
        return WorkerChoice(workers=0, reason="the data is in memory: a thread gathers batches ahead")
    try:
        check_picklable(dataset, worker_start)
        if isinstance(dataset, StreamSamples):
            return WorkerChoice(workers=1, reason="a stream is read in its order: a second process would read it again")
        seconds, is_on_host = _time_sample(dataset)
    except DataError as error:  # raised where it belongs: at the step that reads the sample
        return WorkerChoice(workers=0, reason=str(error).splitlines()[0])
    if not is_on_host:
        return WorkerChoice(workers=0, reason="its samples are on a device already")
    took = seconds * batch_size
    workers = min(max(math.ceil(took / BATCH_INTERVAL_S), 1), max(cores - 1, 1))
    return WorkerChoice(
        workers=workers,
        reason=f"a batch of {batch_size} takes {took * 1e3:.3g} ms to read, and the rank has {cores} cores",
    )


def _time_sample(dataset: MapDataset) -> tuple[float, bool]:
    """Returns the seconds to read a sample as part of a batch, and whether samples are in the host's memory."""
    seconds, is_on_host = [], True
    for indices in np.arange(_TRIALS * _TRIAL_SAMPLES, dtype=np.int64).reshape(_TRIALS, -1) % len(dataset):
        start = time.perf_counter()
        batch = fetch_batch(dataset, indices)
        seconds.append(time.perf_counter() - start)
        is_on_host &= all(leaf.device.type == "cpu" for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor))
    return statistics.median(seconds) / _TRIAL_SAMPLES, is_on_host
