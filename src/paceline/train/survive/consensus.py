"""What ranks decide in common behind a step: to stop where one was asked to, to go back where the loss has jumped.

A signal only sets a flag on the rank that gets it. Behind a step the ranks add up what they know, in one small
all-reduce that nobody waits for; behind the next one it is there, and all of them read the same sum:

    step s      issue   [wishes, seconds of the step, summed loss, count]
    step s + 1  read    any wish: save and leave, on every rank alike

Cost: one all-reduce of 32 bytes whose latency hides behind a step. Where steps are shorter than 100 ms it is, after the
first 64, not issued in every one of them: how many are left out follows from the seconds in the sum, so that it is the
same number on all ranks. Where spikes are looked for, it is issued in every step, and since all ranks have the same
numbers they react alike, as ``recovery.py`` decides.
"""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Final

import torch

from paceline.comm.base import Work
from paceline.config.sections import RecoveryConfig
from paceline.errors import PreemptedError, TrainingError
from paceline.train.step import StepResult
from paceline.train.survive.recovery import GoBack, GoOn, Spike, StopRequest, find_spike, on_spike
from paceline.train.trainer import GoBackError, Trainer

_ASK_EVERY_S: Final = 0.1
_FREE_SUMS: Final = 64  # so that a short run hears of a wish at once, too
_MOST_STEPS: Final = 1000
_WISHES, _SECONDS, _LOSS, _COUNT = range(4)
_stream = cache(torch.cuda.Stream)  # to read on, one a device


@dataclass(frozen=True, slots=True, kw_only=True)
class Common:
    """What all ranks know of a step: whether any wishes to stop, and the loss over the global batch."""

    step: int
    position: int
    num_wishes: int
    loss: float
    step_s: float


@dataclass(slots=True)
class _PendingSum:
    """A sum on its way. On CUDA it is ``ready`` to be read when its own step is done."""

    step: int
    position: int
    values: torch.Tensor
    work: Work
    ready: torch.cuda.Event | None


@dataclass(slots=True)
class ConsensusHook:
    """Adds up what the ranks know of a step; one step later, all of them act on the sum.

    They go back or stop where the loss has jumped, as ``policy`` says. Where any rank was asked to stop by a signal
    that its ``request`` holds, all of them ``save`` and leave.
    """

    request: StopRequest
    save: Callable[[Trainer], None]
    policy: RecoveryConfig
    _pending: _PendingSum | None = None
    _next_step: int = 0
    _num_sums: int = 0
    _last_time: float = field(default_factory=time.perf_counter)
    _losses: list[tuple[int, float]] = field(default_factory=list)

    def __call__(self, trainer: Trainer, result: StepResult) -> None:
        """Reads the sum of an earlier step, and issues that of this one if it is due."""
        now = time.perf_counter()
        seconds, self._last_time = now - self._last_time, now
        common = None if self._pending is None else _read(self._pending, trainer.parts.engine.world.size)
        self._pending = None
        if common is not None:
            asks_always = self._needs_losses or self._num_sums < _FREE_SUMS
            self._next_step = result.step if asks_always else next_ask(common.step_s, result.step)
        if not result.is_last and result.step >= self._next_step:
            self._pending = self._issue(trainer, result, seconds)
            self._num_sums += 1
        if common is not None:
            self._act(trainer, common)

    @property
    def _needs_losses(self) -> bool:
        return self.policy.on_spike != "ignore"

    def _issue(self, trainer: Trainer, result: StepResult, seconds: float) -> _PendingSum:
        comm, outcome = trainer.parts.engine.world, result.outcome
        values = torch.tensor([float(bool(self.request.signal)), seconds, 0.0, 0.0], dtype=torch.float64)
        on_cuda = comm.device.type == "cuda"
        # A copy from memory that is not pinned might wait for the device.
        values = values.pin_memory().to(comm.device, non_blocking=True) if on_cuda else values.to(comm.device)
        if self._needs_losses:  # they stay on the device
            values[_LOSS] = outcome.loss_sum.detach()
            values[_COUNT] = outcome.count
        work = comm.all_reduce(values)
        ready = torch.cuda.current_stream(comm.device).record_event() if on_cuda else None
        return _PendingSum(result.step, result.position, values, work, ready)

    def _act(self, trainer: Trainer, common: Common) -> None:
        try:
            if self._needs_losses:
                # After the run went back, steps come again.
                self._losses = [known for known in self._losses if known[0] < common.step][-self.policy.spike_window :]
                spike = find_spike(self.policy, [loss for _, loss in self._losses], common.loss)
                if spike is not None:
                    self._react(trainer, common, spike)
                self._losses.append((common.step, common.loss))
            # Not after the last step: the run is done, and was saved as one that is.
            if common.num_wishes and trainer.step < trainer.parts.plan.total_steps:
                self.save(trainer)
                number = self.request.signal
                name = signal.Signals(number).name if number else "a signal to another rank"
                trainer.note("preempted", {"signal": name, "ranks_asked": common.num_wishes})
                raise PreemptedError(f"stopped by {name} after step {trainer.step}; the state is saved")
        except TrainingError:  # the run ends or goes back: the sum on its way is of no use
            if self._pending is not None:
                self._pending.work.wait()
                self._pending = None
            raise

    def _react(self, trainer: Trainer, common: Common, spike: Spike) -> None:
        count, has_checkpoint = trainer.num_roll_backs, trainer.has_checkpoint()
        reaction = on_spike(self.policy, spike, num_roll_backs=count, has_checkpoint=has_checkpoint)
        if isinstance(reaction, GoOn):
            if reaction.is_noted:
                trainer.note("spike", asdict(spike), step=common.step)
        elif isinstance(reaction, GoBack):
            raise GoBackError(reaction, step=common.step, position=common.position)
        else:
            raise TrainingError(
                f"{reaction.reason} at step {common.step}\n  recovery.on_spike = {self.policy.on_spike}\n"
                "  lower optim.lr, set optim.clip_norm, or look at the data of that step"
            )


def _read(pending: _PendingSum, ranks: int) -> Common:
    """Reads on a stream of its own: on the step's stream, to read is to wait for all that is issued.

    That would be the step after the one that is read, and the device would have nothing to do until the host has
    issued another.
    """
    on_cpu = pending.ready is None
    with contextlib.nullcontext() if on_cpu else torch.cuda.stream(_stream(pending.values.device)):
        if pending.ready is not None:
            pending.ready.wait()
        pending.work.wait()
        values = pending.values.tolist()  # sync point on CUDA, with the step before the last one issued
    return Common(
        step=pending.step,
        position=pending.position,
        num_wishes=round(values[_WISHES]),
        loss=values[_LOSS] / values[_COUNT] if values[_COUNT] else math.nan,
        step_s=values[_SECONDS] / ranks,
    )


def next_ask(step_s: float, step: int) -> int:
    """Returns the step behind which the ranks ask one another again."""
    return step + min(_MOST_STEPS, math.ceil(_ASK_EVERY_S / max(step_s, 1e-6)) - 1)
