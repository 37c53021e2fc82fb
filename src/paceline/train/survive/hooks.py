"""What a run does behind a step to survive: it saves its state, and its ranks decide in common to stop or to go back.

The saver saves every n steps or epochs, every so many minutes of rank 0's clock, where an evaluation is the best so far
(``keep_best``), at the end, and when it is asked to. A checkpoint that cannot be written (the disk is full, or a
permission is gone) is an error that all ranks learn of together, and older checkpoints are intact. The run goes on
without it where ``on_full_disk`` allows that: nothing is lost by going on but the way back to this step.

A signal only sets a flag on the rank that gets it. Behind a step the ranks add up what they know, in one small
all-reduce that nobody waits for; behind the next one it is there, and all of them read the same sum:

    step s      issue   [wishes, seconds of the step, summed loss, count, parts of a snapshot kept, that cannot be]
    step s + 1  read    any wish: save and leave, on every rank alike

Cost: one all-reduce of 48 bytes whose latency hides behind a step. Where steps are shorter than 100 ms it is, after the
first 64, not issued in every one of them: how many are left out follows from the seconds in the sum, so that it is the
same number on all ranks. Where spikes are looked for, it is issued in every step, and since all ranks have the same
numbers they react alike, as ``recovery.py`` decides.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal

import torch

from paceline.checkpoint.find import retention_of, spots_in
from paceline.checkpoint.manifest import Spot, line_from
from paceline.checkpoint.storage import FileStore
from paceline.checkpoint.writer import CheckpointWriter
from paceline.comm.base import Work
from paceline.config import CheckpointConfig
from paceline.config.sections import RecoveryConfig
from paceline.errors import CheckpointError, PreemptedError, TrainingError
from paceline.train.step import StepResult
from paceline.train.survive.recovery import GoBack, GoOn, Spike, StopRequest, find_spike, on_spike
from paceline.train.survive.snapshots import Snapshots
from paceline.train.trainer import GoBackError, Trainer, is_time

_ASK_EVERY_S: Final = 0.1
_FREE_SUMS: Final = 64  # so that a short run hears of a wish at once, too
_MOST_STEPS: Final = 1000
_WISHES, _SECONDS, _LOSS, _COUNT, _KEPT, _FAILED = range(6)
_stream = cache(torch.cuda.Stream)  # to read on, one a device
_AT_ONCE = ("end", "preempted", "final")  # reasons after which the process may end
_WORTH_BYTES = 2**25  # what is smaller is written before a copy of it would pay


class Saver:
    """Saves a trainer's state into a folder. All ranks call it at the same steps."""

    def __init__(
        self,
        folder: Path,
        config: CheckpointConfig,
        about: Mapping[str, Any] | None = None,
        storage: FileStore | None = None,
        on_full_disk: Literal["stop", "warn"] = "stop",
        ask_every: int = 10,
    ) -> None:
        """``about`` is what the run is, in JSON values; ``ask_every``: steps after which ranks ask rank 0's clock."""
        self._on_full_disk = on_full_disk
        self.folder = folder
        self.last_saved: int | None = None
        self._config = config
        self._retention = retention_of(config.model_dump())
        self._ask_every = ask_every
        self._about = dict(about or {})
        self._storage = storage
        self._writer: CheckpointWriter | None = None
        self._clock = time.monotonic()
        self._trainer: Trainer | None = None
        self._is_in_background = False

    def __call__(self, trainer: Trainer, result: StepResult) -> None:
        """Saves if it is time to. Raises CheckpointError, on all ranks, where the run cannot go on without."""
        try:
            if self.last_saved is not None and result.step < self.last_saved:
                self.last_saved = None  # the run went back
            if self._writer is None and self._config.may_use_background and not result.is_last:
                self._prepare(trainer)
            reason = self._reason(trainer, result)
            if reason:
                self.save(trainer, reason)
            if result.is_last:
                self.finish()
            self._tell(trainer)
        except CheckpointError as error:
            if self._on_full_disk == "stop" or result.is_last:
                raise
            trainer.note("not_saved", {"reason": str(error).splitlines()[0]}, step=result.step)
            trainer.parts.meter.start()

    def save(self, trainer: Trainer, reason: str) -> None:
        """Saves once a step. Raises CheckpointError on all ranks if one could not write this one, or the one before."""
        self._trainer = trainer
        if self.last_saved == trainer.step:
            if reason in _AT_ONCE:
                self.finish()
            return
        trainer.parts.meter.enter("checkpoint")
        writer, state = self._writer or self._prepare(trainer), trainer.state()
        if self._is_best(trainer):
            metric = self._retention.metric
            trainer.best = {"metric": metric, "value": trainer.metrics[metric], "step": trainer.step}
        values = {**state.values, "best": trainer.best}
        state = dataclasses.replace(state, values=values, about={**self._about, "reason": reason})
        writer.save(state, in_background=self._is_in_background and reason not in _AT_ONCE)
        self.last_saved = trainer.step
        self._tell(trainer)
        trainer.parts.meter.start()

    def save_now(self, trainer: Trainer) -> None:
        """Saves for a process that is about to end, whether or not the save before could be written."""
        try:
            self.finish()
        except CheckpointError:
            self.last_saved = None  # it may be of this very step
        trainer.parts.engine.world.barrier()  # some rank may still remove what a failed save of this step has left
        self.save(trainer, "preempted")
        self.finish()

    def finish(self) -> None:
        """Waits for what is being written. Raises CheckpointError on all ranks if one of them could not."""
        if self._writer is not None:
            self._writer.finish()
            if self._trainer is not None:
                self._tell(self._trainer)

    def leave(self) -> None:
        """Ends the thread that writes, soon: others have failed. Nothing is sent."""
        if self._writer is not None:
            self._writer.leave()

    def _prepare(self, trainer: Trainer) -> CheckpointWriter:
        """Makes the writer, and room to save in the background. All ranks call it when the optimizer has its state."""
        self._writer = CheckpointWriter(self.folder, trainer.parts.engine.world, self._retention, self._storage)
        if trainer.parts.engine.world.rank == 0:
            # Goes on with the trainer's line, or a new one where later steps lie that it did not come along.
            here = None if trainer.line is None else Spot(line=trainer.line, step=trainer.step)
            trainer.line = line_from(here, list(spots_in(self.folder).values()))
        if self._config.may_use_background:
            worth = _WORTH_BYTES if self._config.asynchronous == "auto" else 0
            self._is_in_background = self._writer.reserve(trainer.collect_state(), worth)
        return self._writer

    def _reason(self, trainer: Trainer, result: StepResult) -> str:
        config, step, reason = self._config, result.step, ""
        minutes, epochs = config.every_minutes, config.every_epochs
        if config.every_steps is not None and step % config.every_steps == 0:
            reason = "steps"
        elif epochs is not None and step % (epochs * max(result.steps_per_epoch, 1)) == 0:
            reason = "epochs"
        elif config.keep_best and self._is_best(trainer):
            reason = "best"
        if minutes is not None and step % self._ask_every == 0 and is_time(trainer, self._clock, 60.0 * minutes):
            self._clock = time.monotonic()
            reason = "minutes"
        return "end" if config.at_end and result.is_last else reason

    def _is_best(self, trainer: Trainer) -> bool:
        policy, known = self._retention, trainer.best
        value = trainer.metrics.get(policy.metric) if trainer.metrics.get("step") == trainer.step else None
        if value is None or value != value:
            return False
        if known is None or known["metric"] != policy.metric:
            return True
        return bool(value < known["value"] if policy.mode == "min" else value > known["value"])

    def _tell(self, trainer: Trainer) -> None:
        for step, detail in [] if self._writer is None else self._writer.reports():
            trainer.note("checkpoint", detail, step=step)


@dataclass(slots=True)
class _PendingSum:
    """What the ranks add up of a step. On CUDA it is ``ready`` to be read when its own step is done."""

    step: int
    position: int
    values: torch.Tensor
    work: Work
    ready: torch.cuda.Event | None
    snapshot: int | None  # the step of the one that was under way

    def read(self) -> list[float]:
        """Reads on a stream of its own: on the step's it would wait for all that is issued, and the device idle."""
        with contextlib.nullcontext() if self.ready is None else torch.cuda.stream(_stream(self.values.device)):
            if self.ready is not None:
                self.ready.wait()
            self.work.wait()
            return self.values.tolist()  # sync point on CUDA, with the step before the last one issued


@dataclass(slots=True)
class ConsensusHook:
    """Adds up what the ranks know of a step; one step later, all of them act on the sum.

    They go back or stop where the loss has jumped, as ``policy`` says. Where any rank was asked to stop by a signal
    that its ``request`` holds, all of them ``save`` and leave.
    """

    request: StopRequest
    save: Callable[[Trainer], None]
    policy: RecoveryConfig
    snapshots: Snapshots | None = None
    _pending: _PendingSum | None = None
    _next_step: int = 0
    _num_sums: int = 0
    _last_time: float = field(default_factory=time.perf_counter)
    _losses: list[tuple[int, float]] = field(default_factory=list)

    def __call__(self, trainer: Trainer, result: StepResult) -> None:
        """Reads the sum of an earlier step, and issues that of this one if it is due."""
        now = time.perf_counter()
        seconds, self._last_time = now - self._last_time, now
        known, self._pending = self._pending, None
        sums = [] if known is None else known.read()
        if sums:
            asks_always = self._needs_losses or self._num_sums < _FREE_SUMS
            step_s = sums[_SECONDS] / trainer.parts.engine.world.size
            self._next_step = result.step if asks_always else next_ask(step_s, result.step)
        is_asked = result.step >= self._next_step or (self.snapshots is not None and self.snapshots.step is not None)
        if is_asked and not result.is_last:
            self._pending = self._issue(trainer, result, seconds)
            self._num_sums += 1
        if known is not None and self.snapshots is not None:
            self.snapshots.hear(trainer, known.snapshot, round(sums[_KEPT]), round(sums[_FAILED]))
        if known is not None:
            self._act(trainer, known, sums)

    @property
    def _needs_losses(self) -> bool:
        return self.policy.on_spike != "ignore"

    def _issue(self, trainer: Trainer, result: StepResult, seconds: float) -> _PendingSum:
        comm, outcome = trainer.parts.engine.world, result.outcome
        own = [float(bool(self.request.signal)), seconds, 0.0, 0.0, 0.0, 0.0]
        if self.snapshots is not None:
            own[_KEPT:] = map(float, self.snapshots.progress())
        values = torch.tensor(own, dtype=torch.float64)
        on_cuda = comm.device.type == "cuda"
        # A copy from memory that is not pinned might wait for the device.
        values = values.pin_memory().to(comm.device, non_blocking=True) if on_cuda else values.to(comm.device)
        if self._needs_losses:  # they stay on the device
            values[_LOSS] = outcome.loss_sum.detach()
            values[_COUNT] = outcome.count
        work = comm.all_reduce(values)
        ready = torch.cuda.current_stream(comm.device).record_event() if on_cuda else None
        snapshot = None if self.snapshots is None else self.snapshots.step
        return _PendingSum(result.step, result.position, values, work, ready, snapshot)

    def _act(self, trainer: Trainer, known: _PendingSum, sums: list[float]) -> None:
        loss, num_wishes = sums[_LOSS] / sums[_COUNT] if sums[_COUNT] else math.nan, round(sums[_WISHES])
        try:
            if self._needs_losses:
                # After the run went back, steps come again.
                self._losses = [each for each in self._losses if each[0] < known.step][-self.policy.spike_window :]
                spike = find_spike(self.policy, [each for _, each in self._losses], loss)
                if spike is not None:
                    self._react(trainer, known, spike)
                self._losses.append((known.step, loss))
            # Not after the last step: the run is done, and was saved as one that is.
            if num_wishes and trainer.step < trainer.parts.plan.total_steps:
                self.save(trainer)
                number = self.request.signal
                name = signal.Signals(number).name if number else "a signal to another rank"
                trainer.note("preempted", {"signal": name, "ranks_asked": num_wishes})
                raise PreemptedError(f"stopped by {name} after step {trainer.step}; the state is saved")
        except TrainingError:  # the run ends or goes back: the sum on its way is of no use
            if self._pending is not None:
                self._pending.work.wait()
                self._pending = None
            raise

    def _react(self, trainer: Trainer, known: _PendingSum, spike: Spike) -> None:
        count, has_checkpoint = trainer.num_roll_backs, trainer.has_checkpoint()
        reaction = on_spike(self.policy, spike, num_roll_backs=count, has_checkpoint=has_checkpoint)
        if isinstance(reaction, GoBack):
            raise GoBackError(reaction, step=known.step, position=known.position)
        if not isinstance(reaction, GoOn):
            raise TrainingError(
                f"{reaction.reason} at step {known.step}\n  recovery.on_spike = {self.policy.on_spike}\n"
                "  lower optim.lr, set optim.clip_norm, or look at the data of that step"
            )
        if reaction.is_noted:
            trainer.note("spike", asdict(spike), step=known.step)


def next_ask(step_s: float, step: int) -> int:
    """Returns the step behind which the ranks ask one another again."""
    return step + min(_MOST_STEPS, math.ceil(_ASK_EVERY_S / max(step_s, 1e-6)) - 1)
