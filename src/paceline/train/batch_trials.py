"""``train.microbatch: auto``: the largest microbatch that fits into memory, found by a few passes on real samples.

A trial is one forward and backward beside gradients that are there already, as in accumulation. It leaves nothing:
the gradients are dropped, buffers and random states put back, no parameter moves. What the optimizer will come to
hold is counted, since its state is made in the first update.
"""

from __future__ import annotations

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
from paceline.train.batch_search import Found, search_microbatch
from paceline.train.loss import Loss
from paceline.train.step import Passes, accumulate
from paceline.train.survive.retry import PassState, can_fail_alone, drop_gradients, is_out_of_memory, release_memory
from paceline.units import format_bytes


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
    trials.clean_up()  # not after an error: the other ranks may be elsewhere
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
                raise TrainingError(self._explain()) from error
            return False
        return True

    def clean_up(self) -> None:
        self.engine.abandon_accumulation()
        drop_gradients(self.engine)
        release_memory(self.engine.device)

    def _explain(self) -> str:
        fits = f"set train.microbatch = {self.largest}, which fits" if self.largest else "use more ranks"
        return (
            f"rank {self.engine.world.rank} ran out of memory while train.microbatch = auto was searched for\n"
            "  the other ranks wait in collectives of this pass, which cannot be left half done\n"
            f"  {fits}, or memory.checkpoint_activations = full"
        )
