"""Microbatches that fit into memory: cut finer where a step runs out of it, and found for ``train.microbatch: auto``.

While a microbatch is new, the ranks tell one another after the passes of each step whether they came through. If one
did not, all of them drop the gradients, put random states and buffers back, and run the same samples in half the size,
so that none is lost or counted twice:

    passes --ok on all ranks--> clip, update
           --out of memory on one--> drop gradients, halve the microbatch, passes again

A rank that fails leaves the others inside collectives. Engines that only reduce gradients (ddp, zero1, zero2) let it
sit out the rest, with zeros for the gradients that it does not have. Full sharding gathers parameters in every pass,
and synchronised batch norm talks in it: there a pass cannot be left half done, and the run stops.

A trial of the search is one forward and backward on real samples beside gradients that are there already. It leaves
nothing: gradients are dropped, buffers and random states put back. What a pass holds grows with its samples along a
line that starts no lower than what is there without it, so one trial bounds all larger ones:
extra(n) <= extra(tried) x n / tried. Two trials give the line, and the search goes up to where it ends. A trial that
goes over the limit, but not out of memory, ends it: the line says what fits. Trying again would not, since a process on
a CPU keeps what it once had.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from paceline.comm.objects import reduce_number
from paceline.data.datasets import MapDataset
from paceline.data.fetch import fetch_batch
from paceline.engines.batchnorm import SyncBatchNorm
from paceline.engines.engine import Engine
from paceline.engines.loss_sums import LossSum
from paceline.errors import MemoryExhaustedError, TrainingError
from paceline.free_memory import MemoryGauge
from paceline.mesh import divisors
from paceline.plan.plan import MARGIN
from paceline.train.loss import Loss
from paceline.train.randomness import capture_random_states, restore_random_states
from paceline.train.step import Passes, accumulate
from paceline.units import format_bytes

PROVING_STEPS = 3  # of a new microbatch: allocators reach their peak in the second
_SMALLER = "set memory.checkpoint_activations = full, shard more (parallel.strategy = auto), or use more ranks"
_STUCK = "the other ranks wait in collectives of this pass, which cannot be left half done"
_MOST_GROWTH = 4  # from one trial to the next: where memory comes in large pieces a line may look flat
_OUT_OF_MEMORY, _OVER, _FITS = 0, 1, 2


class Retry:
    """Runs the passes of a step, for as often as it takes. Takes the place of ``accumulate``."""

    def __init__(self, microbatch: int, *, is_allowed: bool, on_cut: Callable[[int], None] | None = None) -> None:
        self.microbatch = microbatch  # the size that comes; ``is_allowed``: it may be cut, and ``on_cut`` hears of it
        self.on_cut = on_cut
        self._loaded = microbatch
        self._pieces = 1
        self._is_allowed = is_allowed
        self._num_unproven = PROVING_STEPS if is_allowed else 0

    def __call__(self, passes: Passes) -> Sequence[LossSum]:
        """Runs forward and backward over the microbatches. Raises TrainingError where memory runs out for good."""
        loaded = passes.microbatches
        if self._pieces > 1:
            passes = replace(passes, microbatches=cut_finer(loaded, self._pieces))
        engine = passes.engine
        if not self._num_unproven:
            try:
                return accumulate(passes)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                raise MemoryExhaustedError(self._explain(engine)) from error
        state = PassState(engine)
        while True:
            values = try_passes(passes, lambda: MemoryExhaustedError(self._explain(engine)))
            if not reduce_number(engine.gradient_comm, values is None, "max"):  # sync point
                self._num_unproven -= 1
                return values or []
            engine.zero_grad()
            engine.forget_pass()  # nothing of an attempt that failed on some rank may last
            if self.microbatch == 1:
                raise MemoryExhaustedError(self._explain(engine))
            state.restore()
            self._pieces = min(2 * self._pieces, self._loaded)
            self.microbatch = -(-self._loaded // self._pieces)
            self._num_unproven = PROVING_STEPS
            if self.on_cut is not None:
                self.on_cut(self.microbatch)
            passes = replace(passes, microbatches=cut_finer(loaded, self._pieces))

    def _explain(self, engine: Engine) -> str:
        half = max(1, self.microbatch // 2)
        if self.microbatch == 1:
            fix = _SMALLER
        elif self._is_allowed and not can_fail_alone(engine):
            fix = f"set train.microbatch = {half}, or memory.checkpoint_activations = full"
        else:
            fix = f"set train.microbatch = {half} or auto: the global batch stays, in more microbatches"
        why = "what a pass holds grows with the samples of a microbatch"
        if self._is_allowed and self.microbatch > 1:
            why = _STUCK
        return f"rank {engine.world.rank} ran out of memory with a microbatch of {self.microbatch}\n  {why}\n  {fix}"


def try_passes(passes: Passes, explain: Callable[[], TrainingError]) -> Sequence[LossSum] | None:
    """Returns what the passes gave; None where this rank ran out of memory, and has sat out the rest of them.

    Raises what ``explain`` returns where the other ranks could not finish theirs then.
    """
    engine, num_passes, num_finished = passes.engine, len(passes.microbatches), 0

    def count(phase: str) -> None:
        nonlocal num_finished
        num_finished += phase == "backward"  # with which a pass ends
        passes.on_phase(phase)

    try:
        return accumulate(replace(passes, on_phase=count))
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        if not can_fail_alone(engine):
            raise explain() from error
    # Only here, where the traceback is gone that held the activations.
    engine.zero_grad()
    release_memory(engine.device)
    for number in range(num_finished, num_passes):
        with contextlib.nullcontext() if number == num_passes - 1 else engine.no_sync():
            engine.join_pass()  # the others may wait in a reduction
    return None


class PassState:
    """What a pass moves besides gradients: random states and buffers, as they were when this was made."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._random = capture_random_states(engine.device)
        self._buffers = [buffer.clone() for buffer in engine.module.buffers()]

    def restore(self) -> None:
        restore_random_states(self._random, self._engine.device)
        for buffer, before in zip(self._engine.module.buffers(), self._buffers, strict=True):
            buffer.data.copy_(before)


def can_fail_alone(engine: Engine) -> bool:
    """Says whether a rank whose pass fails can let the others finish theirs."""
    talks = engine.meets_in_passes or any(isinstance(each, SyncBatchNorm) for each in engine.module.modules())
    return engine.can_leave_pass and (engine.gradient_comm.size == 1 or not talks)


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator: can't allocate memory" in str(error)


def release_memory(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def cut_finer(microbatches: Sequence[Any], pieces: int) -> list[Any]:
    """Cuts microbatches into ``pieces`` along the first dim, None where there are no samples. Raises TrainingError."""
    found: list[Any] = []
    for microbatch in microbatches:
        if microbatch is None:
            found += [None] * pieces
            continue
        leaves, structure = tree_flatten(microbatch)
        rows = {leaf.shape[0] if isinstance(leaf, torch.Tensor) and leaf.ndim else None for leaf in leaves}
        if len(rows) != 1 or None in rows:
            what = f"a microbatch of {type(microbatch).__name__} cannot be cut to fit into memory"
            rule = "it is cut along the first dim of its tensors, which counts the samples"
            raise TrainingError(f"{what}\n  {rule}\n  set train.microbatch to a number that fits")
        cuts = zip(*(leaf.tensor_split(pieces) for leaf in leaves), strict=True)
        found += [tree_unflatten(list(parts), structure) if len(parts[0]) else None for parts in cuts]
    return found


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
    """Finds the largest of ``sizes`` whose peak, by ``measure`` (None: out of memory), stays within the limit.

    ``base_bytes`` is held without any pass. ``agree`` returns the smallest of what all ranks pass: so all go one way.
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
    """Returns how many samples fit: by the last two points, or by the base and the last if that goes further."""
    last, last_peak = points[-1]
    slopes = [max(last_peak - peak, 1) / (last - start) for start, peak in (points[0], points[-2])]
    return max(last + int((limit_bytes - last_peak) // slope) for slope in slopes)


def _at_most(sizes: Sequence[int], bound: int) -> int:
    return max((size for size in sizes if size <= bound), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialLimits:
    """What a search must know: bytes held besides, where to begin, ranks of the host, a limit if not what is free."""

    samples_per_rank: int
    reserve_bytes: int = 0
    first: int = 1
    node_ranks: int = 1
    limit_bytes: int | None = None


def find_microbatch(engine: Engine, loss: Loss, dataset: MapDataset, dtype: torch.dtype, limits: TrialLimits) -> Found:
    """Finds the largest microbatch that fits on all ranks. Raises TrainingError if none does, or a pass is stuck."""

    def agree(value: int) -> int:
        return int(reduce_number(engine.gradient_comm, value, "min"))

    gauge, state, sizes = MemoryGauge(engine.device), PassState(engine), divisors(limits.samples_per_rank)
    limit = gauge.limit_bytes(limits.node_ranks) if limits.limit_bytes is None else limits.limit_bytes
    limit = round(limit * (1 - MARGIN))
    base = gauge.now_bytes() + optimizer_bytes(engine, slots=1) + limits.reserve_bytes  # a gradient is one slot more
    found, largest = Found(samples=None, trials=()), 0

    def explain() -> TrainingError:
        fits = f"set train.microbatch = {largest}, which fits" if largest else "use more ranks"
        what = f"rank {engine.world.rank} ran out of memory while train.microbatch = auto was searched for"
        return TrainingError(f"{what}\n  {_STUCK}\n  {fits}, or memory.checkpoint_activations = full")

    def measure(size: int) -> int | None:
        """Returns the peak of a pass over the first samples, with what is reserved; None where memory ran out."""
        nonlocal largest
        gauge.reset()
        batch = fetch_batch(dataset, np.arange(size, dtype=np.int64) % len(dataset))
        with engine.no_sync():  # a last, empty microbatch would reduce the gradients, and is left out
            values = try_passes(Passes(engine, [batch], loss, 1.0 / size, dtype), explain)
        largest = largest if values is None else max(size, largest)
        return None if values is None else gauge.peak_bytes() + limits.reserve_bytes

    # The first pass makes the gradients, beside which the others are measured.
    if agree(int(measure(sizes[0]) is not None)):
        found = search_microbatch(sizes, measure, base_bytes=base, limit_bytes=limit, first=limits.first, agree=agree)
    engine.abandon_accumulation()  # not after an error: the other ranks may be elsewhere
    engine.zero_grad()
    release_memory(engine.device)
    state.restore()
    if found.samples is None:
        peak = found.trials[-1].peak_bytes if found.trials else None
        taken = "more than there is" if peak is None else format_bytes(peak)
        what = f"train.microbatch = auto: not even 1 sample fits: it takes {taken} of {format_bytes(limit)}"
        raise TrainingError(f"{what}\n  that is all but {MARGIN:.0%} of what is free\n  {_SMALLER}")
    return found


def optimizer_bytes(engine: Engine, slots: int) -> int:
    """Returns what an optimizer with ``slots`` numbers a parameter will hold on this rank's device."""
    here = [p for p in engine.parameters() if p.requires_grad and p.device.type == engine.device.type]
    return slots * sum(parameter.numel() * parameter.element_size() for parameter in here)
