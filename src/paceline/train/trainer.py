"""The trainer: a short generator of steps; everything else is a hook that runs every n of them.

trainer = Trainer(parts, hooks=[Every(100, evaluate_hook), ...])
for result in trainer.steps():      # plain Python: break, inspect, log as you like
    ...
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from paceline.checkpoint import TrainingState
from paceline.clock import seconds_between
from paceline.comm.compress import Compressor
from paceline.comm.objects import gather_objects
from paceline.data.loader import EvalLoader, StepBatch, TrainLoader
from paceline.errors import CheckpointError, TrainingError
from paceline.monitor.meter import StepMeter
from paceline.monitor.records import EvalRecord, EventRecord, StepRecord
from paceline.monitor.sinks import Sink
from paceline.parallel.engine import Engine
from paceline.planner.plan import Plan
from paceline.train.bad_steps import BadStep, BadSteps
from paceline.train.evaluate import Evaluation, evaluate
from paceline.train.loss import Loss
from paceline.train.optim import set_learning_rate
from paceline.train.overflow import explain_bad_steps, find_overflow
from paceline.train.randomness import capture_random_states, restore_random_states, seed_everything
from paceline.train.retry import Retry
from paceline.train.scaler import make_scaler
from paceline.train.schedule import Schedule
from paceline.train.step import StepOutcome, StepPolicy, train_step


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerParts:
    """What a trainer is made of; each part is usable alone."""

    plan: Plan
    engine: Engine
    optimizer: torch.optim.Optimizer
    loader: TrainLoader
    eval_loader: EvalLoader | None
    loss: Loss
    schedule: Schedule
    policy: StepPolicy
    meter: StepMeter
    seed: int
    passes: Retry | None = None
    compressor: Compressor | None = None


@dataclass(slots=True)
class StepResult:
    """A step that was issued. Its numbers come as records, when the device has finished it.

    Neither frozen nor by keywords: it is made every step, between matrix products, where every call counts.
    """

    step: int
    position: int
    local_samples: list[int]
    lr: float
    outcome: StepOutcome
    steps_per_epoch: int
    is_last: bool

    @property
    def epoch(self) -> float:
        """How many epochs the run has gone through."""
        return self.step / max(self.steps_per_epoch, 1)

    @property
    def samples(self) -> int:
        """How many samples this rank had in the step."""
        return sum(self.local_samples)


class Hook(Protocol):
    """Runs after steps. A hook that communicates must run on all ranks at the same steps."""

    def __call__(self, trainer: Trainer, result: StepResult) -> None:
        """Looks at a step, and does what it is there for."""


@dataclass(slots=True)
class Every:
    """Runs a hook every ``steps`` steps, and after the last one if ``at_end``."""

    steps: int | None
    hook: Hook
    at_end: bool = True

    def __call__(self, trainer: Trainer, result: StepResult) -> None:
        """Runs the hook if it is due."""
        is_due = self.steps is not None and result.step % self.steps == 0
        if is_due or (self.at_end and result.is_last):
            self.hook(trainer, result)


@dataclass(slots=True)
class EverySeconds:
    """Runs a hook every ``seconds`` of rank 0's clock: all ranks ask it every ``ask_every`` steps, and agree."""

    seconds: float
    hook: Hook
    ask_every: int = 10
    _last: float = field(default_factory=time.monotonic)

    def __call__(self, trainer: Trainer, result: StepResult) -> None:
        """Runs the hook if rank 0 says that it is due."""
        if result.step % self.ask_every:
            return
        comm = trainer.parts.engine.world
        due = torch.tensor([float(time.monotonic() - self._last >= self.seconds)], device=comm.device)
        comm.broadcast(due).wait()
        if due.item():  # sync point, once in ask_every steps
            self._last = time.monotonic()
            self.hook(trainer, result)


class Trainer:
    """Runs the steps of a plan from where the state stands."""

    def __init__(self, parts: TrainerParts, hooks: Sequence[Hook] = (), sink: Sink | None = None) -> None:
        parts.engine.check_optimizer(parts.optimizer)
        self.parts = parts
        self.hooks = list(hooks)
        self.sink = sink
        self.step = 0
        self.position = 0
        self.scaler = make_scaler(parts.engine.precision, parts.engine.comm.device, parts.policy.loss_scale)
        self.bad_steps = BadSteps()
        self._has_constant_rate = parts.schedule.is_constant
        self._reports_samples = parts.engine.reports_samples
        if parts.passes is not None:
            parts.passes.on_cut = self._note_cut

    def run(self) -> None:
        """Runs all remaining steps and their hooks, and waits for the last records."""
        try:
            for result in self.steps():
                for hook in self.hooks:
                    hook(self, result)
            self.flush(wait=True)
            for bad in self.bad_steps.settle():
                self._note_bad(bad)
        finally:
            if self.parts.eval_loader is not None:
                self.parts.eval_loader.close()

    def steps(self) -> Iterator[StepResult]:
        """Yields the remaining steps as they are issued."""
        meter, total = self.parts.meter, self.parts.plan.total_steps
        batches = self.parts.loader.steps(self.position, max(0, total - self.step))
        meter.start()
        try:
            for batch in batches:
                meter.lap("data")
                result = self._step(batch)
                if meter.finish(result):
                    self.flush()
                outcome = result.outcome
                if not outcome.is_updated or self.bad_steps.num_in_a_row:
                    for bad in self.bad_steps.note(self.step, outcome, batch):
                        self._note_bad(bad)
                yield result
        finally:
            batches.close()

    def flush(self, *, wait: bool = False) -> None:
        """Writes the records of finished steps. Raises TrainingError when a loss is not finite that was trained on."""
        records: list[StepRecord] = []
        try:
            records.extend(self.parts.meter.drain(wait=wait))
        finally:  # what was read before a device failed is written all the same
            if self.sink is not None and records:
                self.sink.write(*records)
        for record in records:
            _check_loss(record)

    def evaluate(self) -> Evaluation | None:
        """Evaluates exactly, over all ranks; None without an evaluation set."""
        if self.parts.eval_loader is None:
            return None
        start = self.parts.meter.take()
        result = evaluate(self.parts.engine, self.parts.eval_loader, self.parts.loss, self.parts.policy.dtype)
        seconds = seconds_between(start, self.parts.meter.take())
        if self.sink is not None:
            record = EvalRecord(
                step=self.step,
                loss=result.loss,
                accuracy=result.accuracy,
                samples=result.samples,
                seconds=seconds,
                time=time.time(),
            )
            self.sink.write(record)
        self.parts.meter.start()
        return result

    def state(self) -> TrainingState:
        """Collects the full state, as copies, on rank 0; the random states of all ranks take one exchange."""
        self.flush(wait=True)  # a state with a loss that is not finite is not worth saving
        for bad in self.bad_steps.settle():
            self._note_bad(bad)
        comm, engine = self.parts.engine.world, self.parts.engine
        extra: dict[str, Any] = {"bad_steps": self.bad_steps.state_dict()}
        if self.scaler is not None:
            extra["scaler"] = self.scaler.state_dict()
        if self.parts.compressor is not None:
            extra["compression"] = self.parts.compressor.state_dict(comm)
        return TrainingState(
            step=self.step,
            position=self.position,
            model=engine.full_state_dict(rank0_only=True),
            optimizer=engine.full_optimizer_state(self.parts.optimizer, rank0_only=True),
            random=gather_objects(comm, capture_random_states(comm.device)),
            extra=extra,
        )

    def load_state(self, state: TrainingState) -> None:
        """Continues from a state: the same samples and learning rates at any number of ranks.

        With the same number of ranks the random states continue too; with another one each rank gets a fresh stream.
        """
        comm = self.parts.engine.world
        try:
            self.parts.engine.load_full_state_dict(state.model)
            asked = [_settings(group) for group in self.parts.optimizer.param_groups]
            self.parts.engine.load_full_optimizer_state(self.parts.optimizer, state.optimizer)
            _check_groups(self.parts.optimizer)
            for group, settings in zip(self.parts.optimizer.param_groups, asked, strict=True):
                group.update(settings)  # rates and decay are what the config asks for now
        except (RuntimeError, ValueError, KeyError) as error:
            text = str(error)
            raise CheckpointError(
                f"the checkpoint of step {state.step} does not fit this model or optimizer\n  {text}\n"
                "  resume with the config that the run was started with"
            ) from error
        self.step, self.position = state.step, state.position
        if self.scaler is not None and "scaler" in state.extra:
            self.scaler.load_state_dict(state.extra["scaler"])
        if self.parts.compressor is not None and "compression" in state.extra:
            self.parts.compressor.load_state_dict(state.extra["compression"], comm)
        if "bad_steps" in state.extra:
            self.bad_steps.load_state_dict(state.extra["bad_steps"])
        if len(state.random) == comm.size:
            restore_random_states(state.random[comm.rank], comm.device)
        else:
            seed_everything(self.parts.seed, self.parts.engine.random_stream, state.step)

    def _note_cut(self, microbatch: int) -> None:
        """Records that memory ran out, and that microbatches are smaller from here on."""
        if self.sink is not None:
            detail = {"microbatch": microbatch, "reason": "out of memory"}
            self.sink.write(EventRecord(name="microbatch", step=self.step, detail=detail, time=time.time()))

    def _note_bad(self, bad: BadStep) -> None:
        """Records a step that was left out. Raises TrainingError if it is one too many in a row, on all ranks alike.

        A run that is shorter than the limit must have trained on one step at least.
        """
        if self.sink is not None:
            self.sink.write(EventRecord(name="skipped", step=bad.step, detail=bad.detail(), time=time.time()))
        parts = self.parts
        if bad.num_in_a_row < min(parts.policy.max_bad_steps, parts.plan.total_steps):
            return
        self.flush(wait=True)
        microbatches, factor = bad.batch.microbatches, bad.outcome.factor
        finding = find_overflow(parts.engine, microbatches, parts.loss, factor, parts.policy.dtype, parts.passes)
        raise TrainingError(explain_bad_steps(bad, finding, parts.engine.precision))

    def _step(self, batch: StepBatch) -> StepResult:
        parts, plan, step = self.parts, self.parts.plan, self.step + 1
        lr = self._set_learning_rate(batch)
        outcome = train_step(
            parts.engine,
            parts.optimizer,
            batch,
            parts.loss,
            parts.policy,
            parts.meter,
            scaler=self.scaler,
            passes=parts.passes,
        )
        self.step, self.position = step, batch.next_position
        is_last = step == plan.total_steps
        samples = batch.local_samples if self._reports_samples else []
        return StepResult(step, batch.next_position, samples, lr, outcome, plan.steps_per_epoch, is_last)

    def _set_learning_rate(self, batch: StepBatch) -> float:
        """Sets the rates of the step and returns the first group's. A constant schedule leaves them alone."""
        schedule, optimizer = self.parts.schedule, self.parts.optimizer
        if self._has_constant_rate:
            return float(optimizer.param_groups[0]["lr"])
        steps = schedule.unit == "steps"
        before, after = (self.step, self.step + 1) if steps else (batch.position, batch.next_position)
        return set_learning_rate(optimizer, schedule.factor(before=before, after=after))


def _check_groups(optimizer: torch.optim.Optimizer) -> None:
    """Raises ValueError where the groups that were loaded are another optimizer's: torch takes them as they come."""
    for group in optimizer.param_groups:
        missing = sorted(optimizer.defaults.keys() - group.keys())
        if missing:
            raise ValueError(f"its optimizer is not {type(optimizer).__name__}, which needs {', '.join(missing)}")


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """Returns a parameter group's settings, with its rate as it was asked for."""
    kept = {name: value for name, value in group.items() if name != "params"}
    peak = kept.get("initial_lr", kept["lr"])
    return {**kept, "lr": peak, "initial_lr": peak}


def _check_loss(record: StepRecord) -> None:
    """Raises TrainingError for a loss that is not finite although its gradients are, so that it was trained on."""
    if record.loss is not None and not math.isfinite(record.loss) and not record.is_skipped:
        raise TrainingError(
            f"the loss is {record.loss} at step {record.step} (learning rate {record.lr:.3g}, "
            f"gradient norm {record.grad_norm})\n"
            "  its gradients are finite, so they say nothing of what is wrong; no later checkpoint was saved\n"
            "  look at the loss function and the data of that step"
        )
