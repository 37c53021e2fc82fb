"""``train.microbatch: auto``: the largest microbatch that fits into memory, found by a few passes on real samples.

A trial is one forward and backward beside gradients that are there already, as in accumulation. It leaves nothing:
the gradients are dropped, buffers and random states put back, no parameter moves. What the optimizer will come to
hold is counted, since its state is made in the first update.

What a pass holds grows with its samples along a line that starts no lower than what is there without it. So one trial
bounds all larger ones: extra(n) <= extra(tried) x n / tried. Two trials give the line itself, and the search goes up to
where it ends: it runs out of memory only where memory does not grow along a line.

A trial that goes over the limit, but not out of memory, ends the search: the line between it and the one before says
what fits. Trying again would not, since a process on a CPU keeps what it once had.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from paceline.comm.objects import reduce_number
from paceline.data.datasets import MapDataset
from paceline.data.fetch import fetch_batch
from paceline.engines.engine import Engine
from paceline.errors import TrainingError
from paceline.free_memory import MemoryGauge
from paceline.mesh import divisors
from paceline.plan.plan import MARGIN
from paceline.train.loss import Loss
from paceline.train.step import Passes, accumulate
from paceline.train.survive.retry import PassState, can_fail_alone, drop_gradients, is_out_of_memory, release_memory
from paceline.units import format_bytes

_MOST_GROWTH = 4  # from one trial to the next: where memory comes in large pieces a line may look flat
_OUT_OF_MEMORY, _OVER, _FITS = 0, 1, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One size that was tried: its peak in bytes (None: out of memory), and whether all ranks found that it fits."""

    samples: int
    peak_bytes: int | None
    fits: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a search found: the largest size that fits, or None; and what was tried."""

    samples: int | None
    trials: tuple[Trial, ...]


def search_microbatch(
    sizes: Sequence[int],
    measure: Callable[[int], int | None],
    *,
    base_bytes: int,
    limit_bytes: int,
    first: int,
    agree: Callable[[int], int] = lambda value: value,
) -> Found:
    """Finds the largest of ``sizes`` whose peak stays within the limit.

    ``measure`` runs a trial and returns its peak, or None where memory ran out. ``base_bytes`` is held without any
    pass. ``first`` is where to begin, from an estimate. ``agree`` returns the smallest of what all ranks pass to it: so
    all of them go the same way, each by numbers of its own.
    """
    best, ceiling = 0, max(sizes) + 1
    points = [(0, base_bytes)]  # samples, and their peak
    trials: list[Trial] = []
    size = agree(_at_most(sizes, first) or sizes[0])
    while size:
        peak = measure(size)
        outcome = agree(_OUT_OF_MEMORY if peak is None else _FITS if peak <= limit_bytes else _OVER)
        trials.append(Trial(samples=size, peak_bytes=peak, fits=outcome == _FITS))
        if outcome == _FITS:
            best = size
        else:
            ceiling = size
        between = [each for each in sizes if best < each < ceiling]
        if outcome == _OUT_OF_MEMORY:  # on some rank: there is nothing to go by but that
            size = _at_most(between, size // 2) or (between[0] if between else 0)
            continue
        assert peak is not None
        points.append((size, peak))
        reach = _reach(points, limit_bytes)
        if outcome == _OVER:
            return Found(samples=agree(_at_most(between, reach)) or best or None, trials=tuple(trials))
        within = [each for each in between if each <= reach]
        size = agree(_at_most(within, _MOST_GROWTH * size) or (within[0] if within else 0))
    return Found(samples=best or None, trials=tuple(trials))


def _reach(points: Sequence[tuple[int, int]], limit_bytes: int) -> int:
    """Returns how many samples fit, by the line through the last two points, or that from the base if it goes further.

    The second may do so where the last step was short and its memory came in one large piece.
    """
    last, last_peak = points[-1]
    slopes = [max(last_peak - peak, 1) / (last - start) for start, peak in (points[0], points[-2])]
    return max(last + int((limit_bytes - last_peak) // slope) for slope in slopes)


def _at_most(sizes: Sequence[int], bound: int) -> int:
    return max((size for size in sizes if size <= bound), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialLimits:
    """What a search must know beforehand.

    ``reserve_bytes``: what will be held besides, such as the optimizer's state. ``first``: a size that should fit, from
    an estimate. ``node_ranks``: how many ranks share the host's memory. ``limit_bytes``: in the place of what is free.
    """

    samples_per_rank: int
    reserve_bytes: int = 0
    first: int = 1
    node_ranks: int = 1
    limit_bytes: int | None = None


def find_microbatch(engine: Engine, loss: Loss, dataset: MapDataset, dtype: torch.dtype, limits: TrialLimits) -> Found:
    """Finds the largest microbatch that all ranks can hold; all of them call it.

    Raises TrainingError where not even one sample fits, or where a sharded engine runs out of memory in a trial.
    """

    def agree(value: int) -> int:
        return int(reduce_number(engine.gradient_comm, value, "min"))

    gauge = MemoryGauge(engine.device)
    state = PassState(engine)
    sizes = divisors(limits.samples_per_rank)
    limit = gauge.limit_bytes(limits.node_ranks) if limits.limit_bytes is None else limits.limit_bytes
    limit = round(limit * (1 - MARGIN))
    base = gauge.now_bytes() + optimizer_bytes(engine, slots=1) + limits.reserve_bytes  # a gradient is one slot more
    trials = _Trials(engine, loss, dataset, dtype, gauge)
    found = Found(samples=None, trials=())
    # The first pass makes the gradients, beside which the others are measured.
    if agree(int(trials.measure(sizes[0], 0) is not None)):
        found = search_microbatch(
            sizes,
            lambda size: trials.measure(size, limits.reserve_bytes),
            base_bytes=base,
            limit_bytes=limit,
            first=limits.first,
            agree=agree,
        )
    engine.abandon_accumulation()  # not after an error: the other ranks may be elsewhere
    drop_gradients(engine)
    release_memory(engine.device)
    state.restore()
    if found.samples is None:
        peak = found.trials[-1].peak_bytes if found.trials else None
        raise TrainingError(
            f"train.microbatch = auto: not even 1 sample fits: it takes "
            f"{'more than there is' if peak is None else format_bytes(peak)} of {format_bytes(limit)}\n"
            f"  that is all but {MARGIN:.0%} of what is free\n"
            "  set memory.checkpoint_activations = full, shard more (parallel.strategy = auto), or use more ranks"
        )
    return found


def optimizer_bytes(engine: Engine, slots: int) -> int:
    """Returns what an optimizer with ``slots`` numbers a parameter will hold on this rank's device."""
    here = [p for p in engine.parameters() if p.requires_grad and p.device.type == engine.device.type]
    return slots * sum(parameter.numel() * parameter.element_size() for parameter in here)


@dataclass(slots=True)
class _Trials:
    """Runs passes of different sizes on the first samples of a data set."""

    engine: Engine
    loss: Loss
    dataset: MapDataset
    dtype: torch.dtype
    gauge: MemoryGauge
    largest: int = 0

    def measure(self, size: int, reserve_bytes: int) -> int | None:
        """Returns the peak of a pass over ``size`` samples, with what is reserved; None where memory ran out."""
        self.gauge.reset()
        if not self._fits(size):
            drop_gradients(self.engine)
            release_memory(self.engine.device)
            with self.engine.no_sync():
                self.engine.join_pass()  # the others may wait in a reduction
            return None
        self.largest = max(size, self.largest)
        return self.gauge.peak_bytes() + reserve_bytes

    def _fits(self, size: int) -> bool:
        """Makes one pass; a last, empty microbatch would reduce the gradients, and is left out."""
        batch = fetch_batch(self.dataset, np.arange(size, dtype=np.int64) % len(self.dataset))
        try:
            with self.engine.no_sync():
                accumulate(Passes(self.engine, [batch], self.loss, 1.0 / size, self.dtype))
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            if not can_fail_alone(self.engine):
                fits = f"set train.microbatch = {self.largest}, which fits" if self.largest else "use more ranks"
                raise TrainingError(
                    f"rank {self.engine.world.rank} ran out of memory while train.microbatch = auto was searched for\n"
                    "  the other ranks wait in collectives of this pass, which cannot be left half done\n"
                    f"  {fits}, or memory.checkpoint_activations = full"
                ) from error
            return False
        return True
