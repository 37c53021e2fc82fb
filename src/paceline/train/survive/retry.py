"""Out of memory in a step: the passes run again, cut finer, and no sample is lost or counted twice.

While a microbatch is new, the ranks tell one another after the passes of each step whether they came through. If one
did not, all of them drop the gradients, put random states and buffers back, and run the same samples in half the size:

    passes --ok on all ranks--> clip, update
           --out of memory on one--> drop gradients, halve the microbatch, passes again

A rank that fails leaves the others inside collectives. Engines that only reduce gradients (ddp, zero1, zero2) let it
sit out the rest from wherever it stands, with zeros for the gradients that it does not have. Full sharding gathers
parameters in every pass, and synchronised batch norm talks in it: there a pass cannot be left half done, and the run
stops with an explanation.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from paceline.comm.objects import reduce_number
from paceline.engines.batchnorm import SyncBatchNorm
from paceline.engines.engine import Engine, LossSum
from paceline.errors import MemoryExhaustedError, TrainingError
from paceline.train.randomness import capture_random_states, restore_random_states
from paceline.train.step import Passes, accumulate

PROVING_STEPS = 3  # of a new microbatch: allocators reach their peak in the second


class Retry:
    """Runs the passes of a step, for as often as it takes. Takes the place of ``accumulate``."""

    def __init__(self, microbatch: int, *, is_allowed: bool, on_cut: Callable[[int], None] | None = None) -> None:
        """``microbatch`` is the size that comes; ``is_allowed`` says whether it may be cut; ``on_cut`` hears of it."""
        self.microbatch = microbatch
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
        if not self._num_unproven:
            return self._run_or_explain(passes)
        engine, state = passes.engine, PassState(passes.engine)
        while True:
            values = self._try(passes)
            if not reduce_number(engine.gradient_comm, values is None, "max"):  # sync point
                self._num_unproven -= 1
                return values or []
            drop_gradients(engine)
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

    def _run_or_explain(self, passes: Passes) -> Sequence[LossSum]:
        try:
            return accumulate(passes)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise MemoryExhaustedError(self._explain(passes.engine)) from error

    def _try(self, passes: Passes) -> Sequence[LossSum] | None:
        """Returns what the passes gave; None where this rank ran out of memory, and has sat out the rest of them."""
        engine, num_passes, num_finished = passes.engine, len(passes.microbatches), 0
        if not can_fail_alone(engine):
            return self._run_or_explain(passes)

        def count(phase: str) -> None:
            nonlocal num_finished
            num_finished += phase == "backward"  # with which a pass ends
            passes.on_phase(phase)

        try:
            return accumulate(replace(passes, on_phase=count))
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        # Only here, where the traceback is gone that held the activations.
        drop_gradients(engine)
        release_memory(engine.device)
        for number in range(num_finished, num_passes):
            with contextlib.nullcontext() if number == num_passes - 1 else engine.no_sync():
                engine.join_pass()
        return None

    def _explain(self, engine: Engine) -> str:
        half = max(1, self.microbatch // 2)
        if self.microbatch == 1:
            fix = "set memory.checkpoint_activations = full, shard more (parallel.strategy = auto), or use more ranks"
        elif self._is_allowed and not can_fail_alone(engine):
            fix = f"set train.microbatch = {half}, or memory.checkpoint_activations = full"
        else:
            fix = f"set train.microbatch = {half} or auto: the global batch stays, in more microbatches"
        why = (
            "the other ranks wait in collectives of this pass, which cannot be left half done"
            if self._is_allowed and self.microbatch > 1
            else "what a pass holds grows with the samples of a microbatch"
        )
        return f"rank {engine.world.rank} ran out of memory with a microbatch of {self.microbatch}\n  {why}\n  {fix}"


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
    talks = any(isinstance(module, SyncBatchNorm) for module in engine.module.modules())
    return engine.can_leave_pass and (engine.gradient_comm.size == 1 or not talks)


def is_out_of_memory(error: BaseException) -> bool:
    """Says whether an error means that memory ran out, of a GPU or of the host."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator: can't allocate memory" in str(error)


def drop_gradients(engine: Engine) -> None:
    """Frees all gradients, those that the module holds too."""
    for parameter in [*engine.parameters(), *engine.module.parameters()]:
        parameter.grad = None


def release_memory(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def cut_finer(microbatches: Sequence[Any], pieces: int) -> list[Any]:
    """Cuts each microbatch into ``pieces`` along its first dim; None where a piece has no samples.

    Raises TrainingError for a batch that is not made of tensors with one row a sample.
    """
    if pieces == 1:
        return list(microbatches)
    return [piece for microbatch in microbatches for piece in _cut(microbatch, pieces)]


def _cut(microbatch: Any, pieces: int) -> list[Any]:
    if microbatch is None:
        return [None] * pieces
    leaves, structure = tree_flatten(microbatch)
    rows = {leaf.shape[0] if isinstance(leaf, torch.Tensor) and leaf.ndim else None for leaf in leaves}
    if len(rows) != 1 or None in rows:
        raise TrainingError(
            f"a microbatch of {type(microbatch).__name__} cannot be cut to fit into memory\n"
            "  it is cut along the first dim of its tensors, which counts the samples\n"
            "  set train.microbatch to a number that fits"
        )
    cuts = zip(*(leaf.tensor_split(pieces) for leaf in leaves), strict=True)
    return [tree_unflatten(list(parts), structure) if len(parts[0]) else None for parts in cuts]
