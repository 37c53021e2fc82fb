"""Batches of a stream for loops of one's own: an ``IterableDataset`` of torch, Hugging Face or webdataset.

    loader = paceline.shard(DataLoader(stream, batch_size=64), comm)

Every rank reads the same stream and takes its share of each batch, so that a step has the samples that it has in one
process. The random numbers of torch, numpy and Python that the stream draws are its own, set by the seed and the epoch;
``set_epoch`` is called where there is one. To resume is to pass over the samples that were consumed. A stream that
draws from elsewhere (the time, the process) gives every rank other samples, and others after a resume: a checksum over
the beginning of each sample tells.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves, tree_map

from paceline.data.datasets import Batch
from paceline.data.order import mix_seed, share
from paceline.data.samplers import are_alike, random_states, seeded, set_random_states
from paceline.errors import DataError, UsageError


class OwnStream:
    """Iterates over one pass of a stream at a time; every rank gets its share of each batch, in the stream's order."""

    def __init__(self, loader: Any, comm: Any, *, seed: int) -> None:
        if loader.num_workers:
            unused = (
                f"num_workers = {loader.num_workers} is not used, since workers would give its samples another order"
            )
            warnings.warn(f"shard() of a stream reads it in this process: {unused}", stacklevel=4)
        self.dataset, self._collate, self._drops = loader.dataset, loader.collate_fn, loader.drop_last
        self.global_batch, self._seed, self._comm = loader.batch_size, seed, comm
        self.epoch = 0  # that the next iteration reads
        self.position = 0  # samples consumed by all ranks
        self._place = 0  # those of the epoch that is read
        self._loaded = 0  # of which the next iteration passes over so many
        self._sum = 0  # over the samples of the epoch up to this place
        self._expected: int | None = None  # of a state that was loaded

    @property
    def num_epochs(self) -> float:
        """How many epochs are done: a stream tells no length, so that it is a whole number."""
        return float(self.epoch)

    def __iter__(self) -> Iterator[Batch]:
        epoch, passed = self.epoch, self._loaded
        self._place, self._loaded = passed, 0
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        samples = _OwnDraws(self.dataset, mix_seed(self._seed, epoch))
        self._pass_over(samples, passed, epoch)
        self.epoch = epoch + 1  # a loop that leaves early goes on with the next one, as with any loader
        number = 0
        while batch := list(islice(samples, self.global_batch)):
            if len(batch) < self.global_batch and self._drops:
                break
            self._sum = _checksum(batch, self._sum)
            number += 1
            if number & (number - 1) == 0:
                self._compare()
            self._place += len(batch)
            self.position += len(batch)
            yield self._own_share(batch)
        self._place = 0
        self._compare()

    def state_dict(self) -> dict[str, int]:
        """Returns where the loop stands after the batch that it was handed last: the same on every rank."""
        epoch = self.epoch - 1 if self._place and not self._loaded else self.epoch
        place = {"place": self._place, "checksum": self._sum if self._place else 0}
        return {"position": self.position, "epoch": epoch, "seed": self._seed, **place}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Goes on after the batch at which ``state_dict`` was taken, at any number of ranks."""
        if state["seed"] != self._seed:
            what = f"the stream was saved with seed = {state['seed']}, this one has {self._seed}"
            raise DataError(f"{what}\n  its random numbers follow from it\n  give the same seed")
        self.position, self.epoch = state["position"], state["epoch"]
        self._place = self._loaded = state["place"]
        self._expected = state.get("checksum")
        self._sum = self._expected or 0

    def turn(self, batches: int) -> tuple[int, int, int]:
        what = f"engine.accumulate({batches}, a stream)"
        rule = "nobody knows where a stream ends, and so which update is the last"
        raise UsageError(f"{what}\n  {rule}\n  use engine.no_sync() and engine.loss_scale() by hand, or larger batches")

    def _pass_over(self, samples: Iterator[Any], count: int, epoch: int) -> None:
        """Reads what was consumed before. Raises DataError where the stream gives other samples than it did then."""
        passed = found = 0
        for sample in islice(samples, count):
            passed, found = passed + 1, _checksum([sample], found)
        what = f"ended before sample {count:,}" if passed < count else f"gives other samples before sample {count:,}"
        if passed < count or (count and self._expected not in (None, found)):
            text = f"the stream {what} of epoch {epoch}, from which the loop goes on"
            fix = "give the one that the run began with, and a seed to all that shuffles in it"
            raise DataError(f"{text}\n  a stream gives the same samples each time it is read\n  {fix}")
        self._sum, self._expected = found, None

    def _compare(self) -> None:
        """Raises DataError on all ranks where they have read different samples: at batch 1, 2, 4, ... and the end."""
        if self._comm.size > 1 and not are_alike(self._comm, self._sum):
            raise DataError(
                f"the stream ({type(self.dataset).__name__}) gives ranks different samples\n"
                "  every rank reads the whole stream, and takes its share of each batch\n"
                "  give a seed to all that shuffles in it, and let nothing in it split by rank "
                "(webdataset: seed=..., nodesplitter=iter)"
            )

    def _own_share(self, samples: list[Any]) -> Batch:
        comm = self._comm
        numbers = share(np.arange(len(samples)), comm.rank, comm.size)
        mine = [samples[number] for number in numbers]
        batch = self._collate(mine) if mine else without_rows(self._collate(samples[:1]))
        batch = tuple(batch) if isinstance(batch, list) else batch
        if comm.device.type != "cuda":
            return batch
        return tree_map(lambda x: x.to(comm.device, non_blocking=True) if isinstance(x, torch.Tensor) else x, batch)


class _OwnDraws:
    """Iterates over a stream with random numbers of its own, whatever the loop draws in between."""

    def __init__(self, stream: Any, seed: int) -> None:
        with seeded(seed):
            self._samples = iter(stream)
            self._states = random_states()

    def __iter__(self) -> _OwnDraws:
        return self

    def __next__(self) -> Any:
        outside = random_states()
        set_random_states(self._states)
        try:
            return next(self._samples)
        finally:
            self._states = random_states()
            set_random_states(outside)


def without_rows(batch: Batch) -> Batch:
    """Returns a batch of the same form without samples: tensors and arrays with no rows, lists of strings empty."""

    def is_strings(tree: Any) -> bool:
        return isinstance(tree, list | tuple) and bool(tree) and all(isinstance(each, str | bytes) for each in tree)

    def cut(leaf: Any) -> Any:
        if is_strings(leaf) or (isinstance(leaf, torch.Tensor | np.ndarray) and leaf.ndim):
            return leaf[:0]
        kind: Any = type(leaf)  # a mapping that is no dict, as tokenizers return it
        return kind({key: without_rows(leaf[key]) for key in leaf}) if isinstance(leaf, Mapping) else leaf

    return tree_map(cut, batch, is_leaf=is_strings)


def _checksum(samples: list[Any], before: int) -> int:
    """Goes on with a checksum over samples: over the first bytes of whatever they are made of."""
    for leaf in tree_leaves(samples):
        if isinstance(leaf, torch.Tensor | np.ndarray):
            leaf = leaf.reshape(-1)[:8].tolist()
        if isinstance(leaf, list | bytes | str | int | float):
            before = zlib.crc32(repr(leaf[:64] if isinstance(leaf, bytes | str) else leaf).encode(), before)
    return before
