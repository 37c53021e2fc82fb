"""Batches of one's own data for loops of one's own: the exact order, ragged ends and resume of ``TrainLoader``.

    loader = paceline.loader(dataset, comm, batch_size=64)        # a batch of 64 over all ranks
    loader = paceline.shard(dataloader, comm)                     # the same from a DataLoader of one process

for epoch in range(loader.epoch, epochs):
    for inputs, targets in loader: ...
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_map
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from paceline.data.datasets import Batch, MapDataset, check_map_style
from paceline.data.fetch import LoaderOptions, fetch_batch
from paceline.data.loader import StepBatch, TrainLoader
from paceline.data.order import DataOrder
from paceline.data.own_stream import OwnStream, without_rows
from paceline.data.samplers import SampledOrder, are_alike, sampled_order
from paceline.errors import DataError, UsageError


class Ranks(Protocol):
    """Who shares the batches out: a communicator."""

    rank: int
    size: int
    device: torch.device


class OwnLoader:
    """Iterates over one epoch at a time; every rank gets its share of each batch, in the order of one process.

    Shares differ by one sample where a batch does not divide; a rank without a sample gets a batch without rows.
    ``state_dict()`` is where the loop stands: it loads at any number of ranks, and with another batch size.
    """

    def __init__(self, dataset: MapDataset, loader: TrainLoader, device: torch.device) -> None:
        self.dataset = dataset.dataset if isinstance(dataset, _Collated) else dataset
        self._read_from, self._device = dataset, device
        self._loader, self.order = loader, loader.order
        self._position = 0  # samples consumed by all ranks
        self._next = 0  # where the next epoch begins, or the rest of one that was loaded
        self._first = 0  # where the iteration began
        self._stream: Generator[StepBatch, None, None] | None = None
        self._stream_at = 0
        self._empty: Batch = None  # of no samples, once it was needed

    def __len__(self) -> int:
        """Returns the number of batches of an epoch, the same on every rank."""
        return self.order.steps_per_epoch

    @property
    def position(self) -> int:
        """How many samples all ranks have consumed, those of the batch that the loop has last among them."""
        return self._position

    @property
    def global_batch(self) -> int:
        return self.order.global_batch

    @property
    def num_epochs(self) -> float:
        """How many epochs all ranks have consumed, with the part of the one that is read."""
        return self._position / self.order.samples_per_epoch

    def turn(self, batches: int) -> tuple[int, int, int]:
        """Says of the batch that the loop has which of ``batches`` it is, of how many, and how many samples they have.

        Groups begin with the iteration; the last one of an epoch is as short as it is.
        """
        size, end = self.order.global_batch, self._next
        if getattr(self.order, "gives_batches", False):
            what = "engine.accumulate() with the batches of a batch_sampler"
            rule = "they may differ in size, so that nobody knows the samples of an update"
            raise UsageError(f"{what}\n  {rule}\n  use engine.no_sync() and engine.loss_scale() by hand")
        done = -((self._position - self._first) // -size)
        if not self._first < self._position <= end:
            what, fix = "engine.accumulate() outside of a loop over its loader", "call it inside: for batch in loader"
            raise UsageError(f"{what}\n  it counts the batches that the loop has had\n  {fix}")
        begun = (done - 1) // batches * batches
        of = min(batches, -((end - self._first) // -size) - begun)
        start = self._first + begun * size
        return done - begun, of, min(end, start + of * size) - start

    @property
    def epoch(self) -> int:
        """The number of the epoch that the next iteration reads: the one that was loaded in its middle, too."""
        return self._next // self.order.samples_per_epoch

    def __iter__(self) -> Iterator[Batch]:
        """Yields this rank's batches of the next epoch, or of the rest of the one that was loaded."""
        size = self.order.samples_per_epoch
        position = self._first = self._next
        self._next = end = (position // size + 1) * size
        while position < end:
            if self._stream is None or self._stream_at != position:  # else workers live on from epoch to epoch
                self.close()
                self._stream, self._stream_at = self._loader.steps(position), position
            step = next(self._stream)
            if step.epoch * size >= end:  # what is left of an epoch, loaded with another batch size, is dropped
                self.close()
                break
            self._position = self._stream_at = position = step.next_position
            batch = step.microbatches[0]
            if batch is None:  # as the step's, without its rows: made of one sample, when it is first needed
                if self._empty is None:
                    assert step.indices is not None
                    self._empty = without_rows(fetch_batch(self._read_from, step.indices[:1], step.epoch))
                batch = tree_map(lambda x: x.to(self._device) if isinstance(x, torch.Tensor) else x, self._empty)
            yield batch

    def close(self) -> None:
        """Ends the worker processes, if any; a later iteration starts new ones."""
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()

    def state_dict(self) -> dict[str, int]:
        """Returns where the loop stands after the batch that it was handed last: the same on every rank."""
        sizes = {"length": self.order.length, "epoch_samples": self.order.samples_per_epoch}
        return {"position": self._position, "seed": self.order.seed, **sizes}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Goes on after the batch at which ``state_dict`` was taken, at any number of ranks."""
        mine = self.state_dict()
        for key in ("length", "epoch_samples", "seed"):
            if state[key] != mine[key]:
                what = f"the loader was saved with {key} = {state[key]}, this one has {mine[key]}"
                rule = "the order of samples follows from it"
                raise DataError(f"{what}\n  {rule}\n  give the same data set, seed and drop_last")
        self.close()
        self._position = self._next = self._first = state["position"]


def loader(
    dataset: MapDataset,
    comm: Ranks,
    *,
    batch_size: int,
    shuffle: bool = True,
    seed: int = 0,
    drop_last: bool = False,
    workers: int = 0,
    collate: Callable[[list[Any]], Batch] | None = None,
) -> OwnLoader:
    """Makes the loader of a loop of one's own; ``batch_size`` samples are those of one step over *all* ranks.

    Order and batches are a function of seed, epoch and position alone. ``workers`` processes read ahead; ``collate``
    joins samples to a batch. On CUDA, batches are on the device of ``comm``.
    Raises DataError for a data set without a length, or without samples.
    """
    length = check_map_style(dataset, "the data set")
    order = DataOrder(length=length, global_batch=batch_size, seed=seed, shuffle=shuffle, drop_last=drop_last)
    return _warned(_share_out(dataset, order, comm, workers, collate), comm)


def shard(batches: DataLoader[Any], comm: Ranks, *, seed: int = 0) -> OwnLoader | OwnStream:
    """Shares the batches of a torch ``DataLoader`` of one process out among the ranks.

    Its batch size is then that of all ranks together; shuffled or not, collate function, workers and ``drop_last`` are
    taken over. The order of a shuffle is ours, of ``seed``; one with a ``generator``, other samplers, and those that
    give batches, draw theirs (``samplers.py``); a stream keeps its own (``own_stream.py``). Raises UsageError for
    samplers that cannot be asked again.
    """
    made = shard_weighed(batches, comm, seed=seed)
    return made if isinstance(made, OwnStream) else _warned(made, comm)


def shard_weighed(batches: DataLoader[Any], comm: Ranks, *, seed: int = 0) -> OwnLoader | OwnStream:
    """Does what ``shard`` does, for a loop that weighs samples and minds no batch without rows: it is not warned."""
    fix = "for a data set, call paceline.loader(dataset, comm, batch_size=...)"
    if not isinstance(batches, DataLoader):
        raise UsageError(f"shard() of a {type(batches).__name__}\n  it takes a torch DataLoader\n  {fix}")
    dataset: Any = batches.dataset
    if isinstance(dataset, IterableDataset) and batches.batch_size is not None:
        return OwnStream(batches, comm, seed=seed)
    if batches.batch_sampler is None:
        what, rule = "shard() of a DataLoader with batch_size=None", "ranks share batches out sample by sample"
        raise UsageError(f"{what}\n  {rule}\n  give it batch_size=..., and samples in place of batches")
    order = _order_of(batches, check_map_style(dataset, "the data set"), seed)
    whole: Any = comm
    if isinstance(order, SampledOrder) and comm.size > 1 and not are_alike(whole, order.fingerprint()):
        what = f"the {type(order.sampler).__name__} of rank {comm.rank} draws another order than that of another rank"
        rule = "ranks share out one order of samples"
        raise UsageError(f"{what}\n  {rule}\n  give it the same weights and the same seed on all ranks")
    return _share_out(dataset, order, comm, batches.num_workers, batches.collate_fn)


def _order_of(batches: DataLoader[Any], length: int, seed: int) -> DataOrder:
    """Returns the order of a DataLoader's batches: ours for a plain one, else that of its sampler."""
    cut: Any = batches.batch_sampler
    sampler: Any = getattr(cut, "sampler", None)
    if isinstance(sampler, DistributedSampler):
        what, rule = "shard() of a DataLoader with a DistributedSampler", "shard() shares batches out itself"
        raise UsageError(f"{what}\n  {rule}\n  give the DataLoader without it, or use that DataLoader as it is")
    if type(cut) is not BatchSampler:
        return sampled_order(cut, length, seed=seed, loaders=batches.generator)
    is_whole = type(sampler) is RandomSampler and not sampler.replacement and len(sampler) == length
    is_shuffle = is_whole and sampler.generator is None  # with one the order is torch's
    if is_shuffle or type(sampler) is SequentialSampler:
        options = {"shuffle": is_shuffle, "drop_last": cut.drop_last}
        return DataOrder(length=length, global_batch=cut.batch_size, seed=seed, **options)
    return sampled_order(sampler, length, seed=seed, loaders=batches.generator, cut=cut)


def _share_out(
    dataset: MapDataset, order: DataOrder, comm: Ranks, workers: int, collate: Callable[[list[Any]], Batch] | None
) -> OwnLoader:
    data: Any = dataset if collate is None else _Collated(dataset, collate)
    device = comm.device if comm.device.type == "cuda" else None
    options = LoaderOptions(workers=workers, device=device)
    reader = TrainLoader(data, order, rank=comm.rank, ranks=comm.size, options=options)
    return OwnLoader(data, reader, device or torch.device("cpu"))


def _warned(made: OwnLoader, comm: Ranks) -> OwnLoader:
    """Warns where ranks will have batches without samples, for which the loop of one process is not made."""
    short, most = made.order.shortest_batch, made.order.global_batch
    if short < comm.size:
        warnings.warn(
            f"a batch of an epoch has {short} of {most} samples, for {comm.size} ranks: "
            "ranks without one get tensors with no rows, whose mean loss is nan: take the sum times "
            "engine.loss_scale(len(targets)) (docs/convert.md), or give drop_last=True",
            stacklevel=3,
        )
    return made


class _Collated:
    def __init__(self, dataset: MapDataset, collate: Callable[[list[Any]], Batch]) -> None:
        self.dataset, self._collate = dataset, collate

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def __getitems__(self, indices: list[int]) -> Batch:
        read: Any = getattr(self.dataset, "__getitems__", None)
        samples = read(indices) if read is not None else [self.dataset[index] for index in indices]
        batch = self._collate(samples)
        return tuple(batch) if isinstance(batch, list) else batch
