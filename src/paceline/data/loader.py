"""What a rank reads in each step, and exact evaluation.

A global batch is cut into ``accumulate x ranks`` contiguous parts; microbatch m of rank r is part ``m * ranks + r``,
and ``None`` where the batch is short. So the samples of a step, and their order, are the same for any number of ranks.
``data.workers: auto`` is decided by a trial before the run:

    workers = seconds to read a batch here / 10 ms, at least 1 and at most the rank's cores but one

Data in memory needs no workers: a thread gathers it ahead. Other data always get some, as random augmentation
differs between none and some (fetch.py).
"""

from __future__ import annotations

import math
import os
import pickle
import statistics
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice, tee
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from paceline.data import fetch
from paceline.data.datasets import Batch, MapDataset, check_map_style
from paceline.data.fetch import BatchRequest, LoaderOptions, WorkerStart
from paceline.data.order import DataOrder, GlobalBatch, Indices, share
from paceline.data.streams import StreamSamples
from paceline.errors import DataError, UsageError

# Epochs count from 0, so evaluation never repeats the random states of training.
_EVAL_EPOCH = -1
BATCH_INTERVAL_S = 0.010
_TRIAL_SAMPLES = 8
_TRIALS = 3  # on other samples each: the first may open files


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """One step of one rank. ``microbatches`` holds ``None`` where this rank has no samples (``local_samples`` 0)."""

    microbatches: list[Batch | None]
    global_samples: int
    local_samples: list[int] = field(default_factory=list)
    position: int = 0
    next_position: int = 0
    epoch: int = 0
    indices: Indices | None = None  # of the samples of all ranks, in order


class TrainLoader:
    """Reads one rank's microbatches, step by step, from any position on."""

    def __init__(
        self,
        dataset: MapDataset,
        order: DataOrder,
        *,
        rank: int = 0,
        ranks: int = 1,
        accumulate: int = 1,
        options: LoaderOptions | None = None,
    ) -> None:
        _check_rank(rank, ranks)
        if accumulate < 1:
            raise UsageError(f"accumulate = {accumulate}\n  a step has at least one microbatch")
        length = check_map_style(dataset, "the training set")
        if length != order.num_indices:
            what = f"the order is for {order.num_indices} samples, the training set has {length}"
            raise UsageError(f"{what}\n  the two must agree\n  make the order with length=len(dataset)")
        self.order = order
        self._rank, self._ranks, self._accumulate = rank, ranks, accumulate
        self._dataset = dataset
        self._options = options or LoaderOptions()
        if self._options.workers > 0:
            check_picklable(dataset, self._options.worker_start)

    def steps(self, position: int = 0, num_steps: int | None = None) -> Generator[StepBatch, None, None]:
        """Yields ``num_steps`` steps after ``position``, or all; ``contextlib.closing`` ends the workers at once."""
        source = _make_source(self._dataset, self._options, seed=self.order.seed, ahead=self._accumulate)
        # Workers run ahead: the same cuts are read once for what to request, and later for what to hand out.
        ahead, current = tee(self._cuts(position, num_steps))
        if isinstance(source, fetch.FeedSource):  # perhaps by two threads
            ahead = self._cuts(position, num_steps)
        batches = source.stream(BatchRequest(part, batch.epoch) for batch, cuts in ahead for part in cuts if len(part))
        try:
            for batch, shares in current:
                yield StepBatch(
                    position=batch.position,
                    next_position=batch.next_position,
                    epoch=batch.epoch,
                    global_samples=len(batch.indices),
                    microbatches=[next(batches) if len(indices) else None for indices in shares],
                    local_samples=[len(indices) for indices in shares],
                    indices=batch.indices,
                )
        finally:
            source.close()

    def _cuts(self, position: int, num_steps: int | None) -> Iterator[tuple[GlobalBatch, list[Indices]]]:
        return (self._cut(batch) for batch in islice(self.order.batches(position), num_steps))

    def _cut(self, batch: GlobalBatch) -> tuple[GlobalBatch, list[Indices]]:
        """Returns the batch with this rank's part of each microbatch."""
        parts = self._ranks * self._accumulate
        return batch, [share(batch.indices, part, parts) for part in range(self._rank, parts, self._ranks)]


class EvalLoader:
    """Reads one rank's share of an evaluation: each sample once over all ranks, as many batches on each."""

    def __init__(
        self, dataset: MapDataset, batch_size: int, rank: int = 0, ranks: int = 1, options: LoaderOptions | None = None
    ) -> None:
        _check_rank(rank, ranks)
        if batch_size < 1:
            raise UsageError(f"batch_size = {batch_size}\n  a batch (over all ranks) has at least one sample")
        self._length = check_map_style(dataset, "the evaluation set")
        self._batch_size, self._rank, self._ranks = batch_size, rank, ranks
        options = options or LoaderOptions()
        if options.workers > 0:
            check_picklable(dataset, options.worker_start)
        self._source = _make_source(dataset, options, seed=0, ahead=1)

    def __len__(self) -> int:
        """Returns the number of batches, the same on every rank."""
        return -(-self._length // self._batch_size)

    def local_samples(self) -> list[int]:
        return [len(indices) for indices in self._shares()]

    def __iter__(self) -> Iterator[Batch | None]:
        """Yields this rank's share of each batch. With workers, a second iteration ends the first."""
        batches = self._source.stream(BatchRequest(indices, _EVAL_EPOCH) for indices in self._shares() if len(indices))
        for indices in self._shares():
            yield next(batches) if len(indices) else None

    def close(self) -> None:
        """Ends the worker processes; a later iteration starts new ones."""
        self._source.close()

    def _shares(self) -> Iterator[Indices]:
        for start in range(0, self._length, self._batch_size):
            batch = np.arange(start, min(start + self._batch_size, self._length), dtype=np.int64)
            yield share(batch, self._rank, self._ranks)


def check_picklable(dataset: Any, worker_start: WorkerStart) -> None:
    """Raises ``DataError`` where workers that start this way could not be sent the data set. Copies no tensors."""
    start = fetch.start_method(worker_start)
    if start == "fork":
        return
    try:
        with Path(os.devnull).open("wb") as nowhere:
            _Probe(nowhere).dump(dataset)
    except Exception as error:
        what = f"the data set, a {type(dataset).__name__}, cannot be pickled: {error}"
        rule = f'with data.worker_start = "{worker_start}" loader workers start by {start}, which sends it to them'
        fix = "define its class and functions at the top of a module (no lambda, no open file or lock in it),"
        more = 'or set data.worker_start = "fork" on Linux, or data.workers = 0'
        raise DataError(f"{what}\n  {rule}\n  {fix}\n  {more}") from error


def _make_source(dataset: MapDataset, options: LoaderOptions, *, seed: int, ahead: int) -> fetch.BatchSource:
    """Makes what reads; ``ahead`` batches at least are brought to the device before they are asked for."""
    if options.device is None and options.pin_memory:
        return fetch.LoaderSource(dataset, options, seed)
    pinned = options.device is not None and options.device.type == "cuda"
    source: fetch.BatchSource = fetch.DirectSource(dataset, pinned=pinned)
    if options.workers:
        source = fetch.LoaderSource(dataset, replace(options, pin_memory=pinned), seed)
    if options.device is None:
        return source
    reads_ahead = options.workers == 0 and fetch.is_in_memory(dataset)
    return fetch.FeedSource(source, options.device, reads_ahead=reads_ahead, ahead=max(ahead, options.prefetch))


def _check_rank(rank: int, ranks: int) -> None:
    if not 0 <= rank < ranks:
        raise UsageError(f"rank = {rank} of {ranks}\n  ranks are numbered from 0 to {ranks - 1}")


class _Probe(pickle.Pickler):
    """Pickles everything but the contents of tensors and arrays of numbers."""

    def reducer_override(self, obj: Any) -> Any:
        is_plain = type(obj) is torch.Tensor or (type(obj) is np.ndarray and not obj.dtype.hasobject)
        return (int, ()) if is_plain else NotImplemented


class WorkerChoice(NamedTuple):
    workers: int
    reason: str


def choose_workers(dataset: MapDataset, batch_size: int, *, cores: int, worker_start: WorkerStart) -> WorkerChoice:
    """Chooses the workers of a rank by a trial, which may draw random numbers: the caller puts their states back."""
    if fetch.is_in_memory(dataset):
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
    reason = f"a batch of {batch_size} takes {took * 1e3:.3g} ms to read, and the rank has {cores} cores"
    return WorkerChoice(workers=workers, reason=reason)


def _time_sample(dataset: MapDataset) -> tuple[float, bool]:
    """Returns the seconds to read a sample as part of a batch, and whether samples are in the host's memory."""
    seconds, is_on_host = [], True
    for indices in np.arange(_TRIALS * _TRIAL_SAMPLES, dtype=np.int64).reshape(_TRIALS, -1) % len(dataset):
        start = time.perf_counter()
        batch = fetch.fetch_batch(dataset, indices)
        seconds.append(time.perf_counter() - start)
        is_on_host &= all(leaf.device.type == "cpu" for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor))
    return statistics.median(seconds) / _TRIAL_SAMPLES, is_on_host
