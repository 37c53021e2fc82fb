"""The order of samples that a sampler of torch's kind draws, the same on every rank, and again after a resume.

    an epoch    the sampler is asked once, with all random numbers set by the seed and the number of the epoch
    generator   of the sampler's own: goes on from epoch to epoch, so that the order is that of torch in one process
    state       as of any order: the number of samples consumed

So ``WeightedRandomSampler`` and most samplers of one's own resume exactly; with a generator the epochs before are drawn
again. One that draws from elsewhere, or remembers what it gave, cannot: it gives another order when it is asked again,
and is refused.
"""

from __future__ import annotations

import contextlib
import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from paceline.data.order import DataOrder, GlobalBatch, Indices, mix_seed
from paceline.errors import DataError, UsageError

_KEPT = 2  # epochs: a loader that reads ahead is in the next one already


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledOrder(DataOrder):
    """The order of a sampler over ``num_items``. ``gives_batches``: of ``global_batch`` at most, it ends them."""

    sampler: Any = field(compare=False)
    num_items: int
    gives_batches: bool = False
    known: dict[int, _Epoch] = field(default_factory=dict, compare=False)
    generator: OwnGenerator = field(compare=False)

    @property
    def num_indices(self) -> int:
        return self.num_items

    @property
    def steps_per_epoch(self) -> int:
        return len(self._epoch(0).ends) if self.gives_batches else -(-self.samples_per_epoch // self.global_batch)

    @property
    def shortest_batch(self) -> int:
        batches = pairwise([0, *self._epoch(0).ends])
        return min(b - a for a, b in batches) if self.gives_batches else super(SampledOrder, self).shortest_batch

    def fingerprint(self) -> int:
        """Returns a number for the first epoch's order: ranks that have another one would train on other samples."""
        return zlib.crc32(self._epoch(0).indices.tobytes())

    def batches(self, position: int) -> Iterator[GlobalBatch]:
        if not self.gives_batches:
            yield from super(SampledOrder, self).batches(position)
        while True:
            epoch, start = self._locate(position)
            found = self._epoch(epoch)
            for end in found.ends:
                if end > start:
                    yield self._cut(epoch, start, found.indices[start:end])
                    start = end
            position = (epoch + 1) * self.samples_per_epoch

    def _indices(self, epoch: int, start: int, stop: int) -> Indices:
        return self._epoch(epoch).indices[start:stop]

    def _epoch(self, epoch: int) -> _Epoch:
        """Returns the samples of an epoch; the last ones are kept, since batches are cut from them."""
        if epoch not in self.known:
            for number in range(self.generator.nearest(epoch), epoch + 1):
                found = _draw(self.sampler, self.seed, number, self.gives_batches, self.generator)
            if len(found.indices) != self.length:
                drew = f"drew {len(found.indices):,} samples in epoch {epoch}, and {self.length:,} in the first"
                rule, fix = "an epoch has as many samples as any other", "give it a fixed number of samples"
                raise DataError(f"the {type(self.sampler).__name__} {drew}\n  {rule}\n  {fix}")
            while len(self.known) >= _KEPT:
                self.known.pop(next(iter(self.known)))
            self.known[epoch] = found
        return self.known[epoch]


class _Epoch(NamedTuple):
    indices: Indices
    ends: list[int]


class OwnGenerator:
    """The generator of a sampler, if it has one, with its states before epochs; after each it is as it was."""

    def __init__(self, generator: torch.Generator | None, *, is_loaders: bool) -> None:
        self._generator, self._is_loaders = generator, is_loaders
        self._states = {} if generator is None else {0: generator.get_state()}

    def nearest(self, epoch: int) -> int:
        """Returns the epoch from which to draw up to this one."""
        return max((each for each in self._states if each <= epoch), default=epoch)

    @contextlib.contextmanager
    def at(self, epoch: int) -> Iterator[None]:
        if self._generator is None:
            yield
            return
        self._generator.set_state(self._states[epoch])
        if self._is_loaders:  # which draws a number for its workers when an epoch begins
            torch.empty((), dtype=torch.int64).random_(generator=self._generator)
        yield
        self._states = {0: self._states[0], epoch: self._states[epoch], epoch + 1: self._generator.get_state()}
        self._generator.set_state(self._states[0])


def sampled_order(sampler: Any, num_items: int, *, seed: int, loaders: Any = None, cut: Any = None) -> SampledOrder:
    """Makes the order of a sampler, with batches as ``cut`` has them; without it, of one that gives batches.

    ``loaders`` is the DataLoader's generator. Raises UsageError for a sampler that gives another order the next time.
    """
    found = getattr(getattr(sampler, "sampler", sampler), "generator", None)
    generator = OwnGenerator(found, is_loaders=found is loaders)
    seed = seed if found is None else found.initial_seed()
    first, again = (_draw(sampler, seed, 0, cut is None, generator) for _ in range(2))
    if first.ends != again.ends or not np.array_equal(first.indices, again.indices):
        raise UsageError(
            f"shard() of a DataLoader with a {type(sampler).__name__}: asked twice for the same epoch, "
            "it gives two orders\n  every rank draws the order by itself, and again after a resume: from the random "
            "numbers of torch, numpy and Python, which are set before\n"
            "  draw from these, or from a torch.Generator called self.generator, and remember nothing between epochs"
        )
    return SampledOrder(
        length=len(first.indices),
        global_batch=max((b - a for a, b in pairwise([0, *first.ends])), default=1) if cut is None else cut.batch_size,
        seed=seed,
        drop_last=cut is not None and cut.drop_last,
        sampler=sampler,
        num_items=num_items,
        gives_batches=cut is None,
        generator=generator,
    )


def _draw(sampler: Any, seed: int, epoch: int, gives_batches: bool, generator: OwnGenerator) -> _Epoch:
    inner: Any = getattr(sampler, "sampler", sampler)
    for each in (sampler, inner):
        if hasattr(each, "set_epoch"):
            each.set_epoch(epoch)
    with seeded(mix_seed(seed, epoch)), generator.at(epoch):
        found = [[int(each) for each in batch] for batch in sampler] if gives_batches else [[int(i) for i in sampler]]
    indices = np.array([each for batch in found for each in batch], dtype=np.int64)
    return _Epoch(indices, list(accumulate(len(batch) for batch in found if batch)))


def are_alike(comm: Any, number: int) -> bool:
    """Whether all ranks have the same number; they call it together."""
    found = torch.tensor([number, -number], dtype=torch.int64, device=comm.device)
    comm.all_reduce(found, "max").wait()
    return bool(found[0] == -found[1])


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Sets the random numbers of torch, numpy and Python for a while."""
    outside = random_states()
    torch.default_generator.manual_seed(seed % 2**63)  # torch.manual_seed sets those of GPUs too
    np.random.seed(seed % 2**32)
    random.seed(seed)
    try:
        yield
    finally:
        set_random_states(outside)


def random_states() -> tuple[Any, Any, Any]:
    return torch.random.get_rng_state(), random.getstate(), np.random.get_state()


def set_random_states(states: tuple[Any, Any, Any]) -> None:
    torch.random.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])
