"""The trainer: a short generator of steps; everything else is a hook that runs every n of them.

trainer = Trainer(parts, hooks=[Every(100, evaluate_hook), ...])
for result in trainer.steps():      # plain Python: break, inspect, log as you like
    ...
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch

from paceline.checkpoint.manifest import State
from paceline.checkpoint.read import open_checkpoint
from paceline.clock import on_device, seconds_between
from paceline.comm.base import Communicator
from paceline.comm.objects import broadcast_object
from paceline.config.sections import RecoveryConfig
from paceline.data.loader import EvalLoader, StepBatch
from paceline.engines.compiled import take_notes
from paceline.engines.engine import Engine, OnPhase
from paceline.errors import CheckpointError, TrainingError
from paceline.records.records import EvalRecord, EventRecord, StepRecord
from paceline.records.sinks import Sink
from paceline.train.histograms import measure_histograms
from paceline.train.loss import Loss
from paceline.train.metrics import Metric, score_all
from paceline.train.optim import set_learning_rate
from paceline.train.run_state import RunState, TrainerParts
from paceline.train.step import Passes, StepOutcome, place, train_step
from paceline.train.survive.bad_steps import BadStep
from paceline.train.survive.overflow import explain_bad_steps, find_overflow
from paceline.train.survive.recovery import GoBack, GoOn, on_bad_steps

_LARGEST_EXPONENT = 700.0  # of a float

# Exact evaluation: every sample once, sums and counts added over ranks, divided once at the end.
#
# One model is evaluated: where rank 0's buffers are everyone's, the others take them over first, because each rank has
# moved its own (batch-norm statistics, say) since the last step began.


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What the whole evaluation set gave, the same on every rank."""

    loss: float
    accuracy: float | None
    samples: int
    metrics: dict[str, float] = field(default_factory=dict, hash=False)


@torch.no_grad()
def evaluate(
    engine: Engine, loader: EvalLoader, loss: Loss, dtype: torch.dtype, metrics: Mapping[str, Metric] | None = None
) -> Evaluation:
    """Evaluates the engine over all ranks. One all-reduce of a few numbers, and one wait for the device."""
    engine.share_buffers()
    device = engine.device
    modes = [(module, module.training) for module in engine.module.modules()]
    engine.eval()
    names, score = list(metrics or {}), score_all(loss, metrics or {})
    # Summed loss, elements, right answers, samples, batches without a count of right answers; of metrics sum and count.
    sums = torch.zeros(5 + 2 * len(names), dtype=torch.float64, device=device)
    try:
        for batch, samples in zip(loader, loader.local_samples(), strict=True):
            if batch is None:
                engine.join_pass()
                continue
            with engine.precision.context(device):
                scored = engine.apply_loss(score, place(batch, device, dtype))
            if scored is None:  # another stage of the pipeline has it
                continue
            value, rest = scored
            correct, unscored = (0.0, 1.0) if value.correct is None else (value.correct, 0.0)
            row = [value.total, value.count, correct, float(samples), unscored, *rest]
            sums += torch.stack([on_device(number, device) for number in row])
    finally:
        for module, was_training in modes:  # one by one: a frozen part may have been in evaluation mode all along
            module.training = was_training
    engine.add_up(sums)
    total, count, correct_sum, num_samples, num_unscored, *rest = sums.tolist()  # sync point
    return Evaluation(
        loss=total / max(count, 1.0),
        accuracy=correct_sum / max(count, 1.0) if num_unscored == 0 else None,
        samples=int(num_samples),
        metrics={name: rest[2 * i] / rest[2 * i + 1] if rest[2 * i + 1] else math.nan for i, name in enumerate(names)},
    )


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

    @property
    def loss(self) -> float:
        """The mean loss of this rank's samples, nan without any. On CUDA, reading it waits for the device."""
        count = float(self.outcome.count)
        return float(self.outcome.loss_sum) / count if count else math.nan


Hook: TypeAlias = "Callable[[Trainer, StepResult], None]"
"""Runs after steps. A hook that communicates must run on all ranks at the same steps."""


@dataclass(slots=True)
class Every:
    """Runs a hook every ``steps`` steps, or after each epoch, and after the last step if ``at_end``."""

    steps: int | Literal["epoch"] | None
    hook: Hook
    at_end: bool = True

    def __call__(self, trainer: Trainer, result: StepResult) -> None:
        steps = max(result.steps_per_epoch, 1) if self.steps == "epoch" else self.steps
        is_due = steps is not None and result.step % steps == 0
        if is_due or (self.at_end and result.is_last):
            self.hook(trainer, result)


def is_time(trainer: Trainer, since: float, seconds: float) -> bool:
    """Says whether so many seconds have passed since a moment, by rank 0's clock. All ranks ask; one broadcast."""
    comm = trainer.parts.engine.world
    due = torch.tensor([float(time.monotonic() - since >= seconds)], device=comm.device)
    comm.broadcast(due).wait()
    return bool(due.item())  # sync point


@dataclass(slots=True)
class EvaluateHook:
    """Evaluates over all ranks; the result goes to the records. Ends a run that does not get better, where asked to."""

    last_step: int = -1

    def __call__(self, trainer: Trainer, result: StepResult) -> None:
        if self.last_step != result.step:
            self.last_step = result.step
            trainer.evaluate()
            if trainer.early_stop.is_over and not result.is_last:
                result.is_last = True  # for what comes at the end, such as the last checkpoint
                trainer.end_reason = trainer.early_stop.reason
                trainer.note("early_stop", {"note": trainer.end_reason}, step=result.step)


@dataclass(slots=True)
class BucketHook:
    """Records the buckets that the engine has chosen, when it has."""

    is_told: bool = False

    def __call__(self, trainer: Trainer, result: StepResult) -> None:
        choice = None if self.is_told else trainer.parts.engine.bucket_choice
        if choice is not None and trainer.sink is not None:
            self.is_told = True
            trainer.note("buckets", {**choice.detail()}, step=result.step)


@dataclass(slots=True)
class CompileHook:
    """Records what was compiled and how long that took, and what could not be."""

    def __call__(self, trainer: Trainer, result: StepResult) -> None:
        if result.step > 3 and result.step % 100 and not result.is_last:
            return
        notes = take_notes(trainer.parts.engine.module, getattr(trainer.parts.loss, "sum", None))
        done = [note for note in notes if not note.problem]
        if done:
            seconds = sum(note.seconds for note in done)
            trainer.note("compiled", {"what": "; ".join(note.what for note in done), "seconds": round(seconds, 1)})
        for note in notes:
            if note.problem:
                trainer.note("not_compiled", {"what": note.what, "why": note.problem})


@dataclass(slots=True)
class NoteHook:
    """Records something that was decided before the first step, after that step."""

    name: str
    detail: dict[str, Any]
    is_told: bool = False

    def __call__(self, trainer: Trainer, result: StepResult) -> None:
        if not self.is_told:
            self.is_told = True
            trainer.note(self.name, self.detail, step=result.step)


class GoBackError(TrainingError):
    """A run that must go back to its last checkpoint: what was decided, about which step, and where its data ends."""

    def __init__(self, decision: GoBack, *, step: int, position: int) -> None:
        self.decision = decision
        self.step = step
        self.position = position
        super().__init__(f"{decision.reason}, at step {step}")


def find_together(comm: Communicator, find: Callable[[], Path] | None) -> Path | None:
    """Returns the checkpoint that rank 0 finds, the same on all ranks; None without one. One broadcast."""
    path: Path | None = None
    if find is not None and comm.rank == 0:
        with contextlib.suppress(CheckpointError):
            path = find()
    return path if find is None else broadcast_object(comm, path)


class Trainer(RunState):
    """Runs the steps of a plan from where the state stands."""

    def __init__(self, parts: TrainerParts, hooks: Sequence[Hook] = (), sink: Sink | None = None) -> None:
        parts.engine.check_optimizer(parts.optimizer)
        super().__init__(parts)
        self.hooks = list(hooks)
        self.sink = sink
        self.losses = RecoveryConfig()
        self.end_reason = ""  # why the run ends before its time
        self.find_checkpoint: Callable[[], Path] | None = None  # the newest to go back to; rank 0 asks
        self._has_constant_rate = parts.schedule.is_constant
        self._reports_samples = parts.engine.reports_samples
        if parts.passes is not None:
            parts.passes.on_cut = self._note_cut
        if parts.graphs is not None:
            parts.graphs.on_decided = lambda detail: self.note("cuda_graphs", detail)

    def run(self) -> None:
        """Runs all remaining steps and their hooks, and waits for the last records. Goes back where that is decided."""
        layout = self.parts.plan.layout
        if layout.is_compiled:
            self.note("compiling", {"what": "the whole model" if layout.compile == "whole" else "each block"})
        try:
            while True:
                try:
                    self._run_to_the_end()
                    return
                except GoBackError as error:
                    asked = error
                self._go_back(asked)
        finally:
            if self.parts.eval_loader is not None:
                self.parts.eval_loader.close()

    def _run_to_the_end(self) -> None:
        with contextlib.closing(self.steps()) as steps:
            for result in steps:
                for hook in self.hooks:
                    hook(self, result)
        self.flush(wait=True)
        for bad in self.bad_steps.read_all():
            self._note_bad(bad)

    def steps(self) -> Generator[StepResult, None, None]:
        """Yields the remaining steps as they are issued."""
        meter, total = self.parts.meter, self.parts.plan.total_steps
        if self.early_stop.is_over:  # of a checkpoint: a run that was over then still is
            self.end_reason = self.early_stop.reason
            total = self.step
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
                if self.end_reason:
                    return
        finally:
            batches.close()

    def flush(self, *, wait: bool = False) -> None:
        """Writes the records of finished steps. Raises TrainingError when a loss is not finite that was trained on."""
        records = self._write_records(wait=wait)
        if self.losses.on_spike in ("roll_back", "lower_rate"):
            return  # a loss that is not finite is a spike
        for record in records:
            _check_loss(record)

    def has_checkpoint(self) -> bool:
        """Says whether there is a checkpoint to go back to. All ranks ask; one broadcast."""
        return find_together(self.parts.engine.world, self.find_checkpoint) is not None

    def note(self, name: str, detail: dict[str, Any], *, step: int | None = None) -> None:
        """Writes an event into the records, if there are any; None: of the last step."""
        if self.sink is not None:
            number = self.step if step is None else step
            self.sink.write(EventRecord(name=name, step=number, detail=detail, time=time.time()))

    def evaluate(self) -> Evaluation | None:
        """Evaluates exactly, over all ranks; None without an evaluation set."""
        parts, meter = self.parts, self.parts.meter
        if parts.eval_loader is None:
            return None
        meter.enter("evaluation")
        start = meter.take()
        average = parts.average if parts.evaluates_average else None
        with contextlib.nullcontext() if average is None else average.in_place():
            result = evaluate(parts.engine, parts.eval_loader, parts.loss, parts.policy.dtype, parts.metrics)
        if parts.has_perplexity:
            result.metrics["perplexity"] = math.exp(min(result.loss, _LARGEST_EXPONENT))
        seconds = seconds_between(start, meter.take())
        self.metrics = {"step": self.step, "eval_loss": result.loss}
        if result.accuracy is not None:
            self.metrics["eval_accuracy"] = result.accuracy
        self.metrics.update({f"eval_{name}": value for name, value in result.metrics.items()})
        self.early_stop.note(self.metrics)
        if self.sink is not None:
            self.sink.write(EvalRecord(**asdict(result), step=self.step, seconds=seconds, time=time.time()))
        meter.start()
        return result

    def state(self) -> State:
        """Returns this rank's part of the state: tensors as they are, without a copy, and plain values.

        Sends nothing. Raises TrainingError for a loss that is not finite: its state is not worth saving.
        """
        self.flush(wait=True)
        for bad in self.bad_steps.read_all():
            self._note_bad(bad)
        return self.collect_state()

    def _write_records(self, *, wait: bool) -> list[StepRecord]:
        records: list[StepRecord] = []
        try:
            records.extend(self.parts.meter.drain(wait=wait))
        finally:  # what was read before a device failed is written all the same
            if self.sink is not None and records:
                self.sink.write(*records, *self.parts.meter.drain_comm(records[-1].step, wait=wait))
        return records

    def _go_back(self, asked: GoBackError) -> None:
        """Loads the last checkpoint on all ranks, and goes on as was decided. Raises ``asked`` if there is none."""
        self._write_records(wait=True)
        path = find_together(self.parts.engine.world, self.find_checkpoint)
        if path is None:
            raise asked
        scale, number, last_step = self.rate_scale * asked.decision.rate_factor, self.num_roll_backs + 1, self.step
        self.load_state(open_checkpoint(path))
        first = self.position
        if asked.decision.skips_data:
            self.position = max(first, asked.position)  # a step that came before the checkpoint is not read again
            self.consumed.skip(first, self.position)
        self.rate_scale, self.num_roll_backs = scale, number
        detail = {
            "from_step": last_step,
            "reason": str(asked),
            "skipped_samples": self.position - first,
            "rate_scale": scale,
            "number": number,
        }
        self.note("roll_back", detail)

    def _note_cut(self, microbatch: int) -> None:
        """Records that memory ran out, and that microbatches are smaller from here on."""
        self.note("microbatch", {"microbatch": microbatch, "reason": "out of memory"})

    def _note_bad(self, bad: BadStep) -> None:
        """Records a step that was left out. Raises TrainingError if it is one too many in a row, on all ranks alike.

        A run that is shorter than the limit must have trained on one step at least.
        """
        if self.sink is not None:  # without one, nobody waits for the device
            self.note("skipped", bad.detail(), step=bad.step)
        parts = self.parts
        limit = min(parts.policy.max_bad_steps, parts.plan.total_steps)
        goes_back = self.losses.on_nan in ("roll_back", "lower_rate") and bad.num_in_a_row >= limit
        reaction = on_bad_steps(
            self.losses,
            num_in_a_row=bad.num_in_a_row,
            limit=limit,
            num_roll_backs=self.num_roll_backs,
            has_checkpoint=goes_back and self.has_checkpoint(),
        )
        if isinstance(reaction, GoOn):
            return
        if isinstance(reaction, GoBack):
            raise GoBackError(reaction, step=bad.step, position=bad.batch.next_position)
        self.flush(wait=True)
        again = Passes(parts.engine, bad.batch.microbatches, parts.loss, bad.outcome.factor, parts.policy.dtype)
        finding = find_overflow(again, parts.passes)
        reason = f"\n  {reaction.reason}" if reaction.reason else ""
        raise TrainingError(explain_bad_steps(bad, finding, parts.engine.precision) + reason)

    def _step(self, batch: StepBatch) -> StepResult:
        parts, plan, step = self.parts, self.parts.plan, self.step + 1
        lr = self._set_learning_rate(batch)
        engine, optimizer, lap = parts.engine, parts.optimizer, parts.meter.lap

        every = parts.policy.histogram_every
        on_gradients = None if every is None or step % every else self._write_histograms
        outcome = (
            train_step(engine, optimizer, batch, parts.loss, parts.policy, lap, self.scaler, parts.passes, on_gradients)
            if parts.graphs is None or on_gradients is not None  # a graph shows nobody its gradients
            else parts.graphs(engine, optimizer, batch, lap, self._train_step)
        )
        if parts.average is not None:
            parts.average.update()
        self.step, self.position = step, batch.next_position
        if batch.indices is not None:
            self.consumed.note(batch.position, batch.next_position, batch.indices)
        is_last = step == plan.total_steps
        samples = batch.local_samples if self._reports_samples else []
        return StepResult(step, batch.next_position, samples, lr, outcome, plan.steps_per_epoch, is_last)

    def _train_step(self, batch: StepBatch, on_phase: OnPhase) -> StepOutcome:
        parts = self.parts
        return train_step(
            parts.engine, parts.optimizer, batch, parts.loss, parts.policy, on_phase, self.scaler, parts.passes
        )

    def _write_histograms(self, weight: torch.Tensor | None) -> None:
        """Writes the histograms of the step under way, on rank 0, one event for each parameter. All ranks call it."""
        found = measure_histograms(self.parts.engine, weight)
        if self.sink is not None and self.parts.engine.world.rank == 0:
            self.flush(wait=True)  # the steps before come first
            step, now = self.step + 1, time.time()
            self.sink.write(*(EventRecord(name="histogram", step=step, detail=each, time=now) for each in found))

    def _set_learning_rate(self, batch: StepBatch) -> float:
        """Sets the rates of the step and returns the first group's. A constant schedule leaves them alone."""
        schedule, optimizer = self.parts.schedule, self.parts.optimizer
        if self._has_constant_rate and self.rate_scale == 1.0:
            return float(optimizer.param_groups[0]["lr"])
        steps = schedule.unit == "steps"
        before, after = (self.step, self.step + 1) if steps else (batch.position, batch.next_position)
        return set_learning_rate(optimizer, schedule.factor(before=before, after=after) * self.rate_scale)


def _check_loss(record: StepRecord) -> None:
    """Raises TrainingError for a loss that is not finite although its gradients are, so that it was trained on."""
    if record.loss is not None and not math.isfinite(record.loss) and not record.is_skipped:
        raise TrainingError(
            f"the loss is {record.loss} at step {record.step} (learning rate {record.lr:.3g}, "
            f"gradient norm {record.grad_norm})\n"
            "  its gradients are finite, so they say nothing of what is wrong; no later checkpoint was saved\n"
            "  look at the loss function and the data of that step"
        )
