"""The trainer: a short generator of steps; everything else is a hook that runs every n of them.

trainer = Trainer(parts, hooks=[Every(100, evaluate_hook), ...])
for result in trainer.steps():      # plain Python: break, inspect, log as you like
    ...
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch

from paceline.checkpoint.manifest import State
from paceline.checkpoint.read import open_checkpoint
from paceline.checkpoint.storage import on_this_host
from paceline.clock import seconds_between
from paceline.comm.objects import broadcast_object
from paceline.config.sections import RecoveryConfig
from paceline.data.loader import StepBatch
from paceline.engines.blocks import take_notes
from paceline.engines.engine import OnPhase
from paceline.errors import CheckpointError, TrainingError
from paceline.records.records import EvalRecord, EventRecord, Record, StepRecord
from paceline.records.samples import samples_of
from paceline.records.sinks import Sink
from paceline.train.evaluate import Evaluation, evaluate, measure_histograms
from paceline.train.loads import LoadsHook
from paceline.train.optim import set_learning_rate
from paceline.train.run_state import RunState, TrainerParts
from paceline.train.step import OnGradients, Passes, StepCallbacks, StepOutcome, StepResult, train_step
from paceline.train.survive.recovery import BadStep, GoBack, GoOn, explain_bad_steps, find_overflow, on_bad_steps

_LARGEST_EXPONENT = 700.0  # of a float

Hook: TypeAlias = "Callable[[Trainer, StepResult], None]"
"""Runs after steps. A hook that communicates must run on all ranks at the same steps."""


class GoBackError(TrainingError):
    """A run that must go back to its last checkpoint: what was decided, and where the data of the step ends."""

    def __init__(self, decision: GoBack, *, step: int, position: int) -> None:
        self.decision = decision
        self.position = position
        super().__init__(f"{decision.reason}, at step {step}")


class Trainer(RunState):
    """Runs the steps of a plan from where the state stands."""

    def __init__(self, parts: TrainerParts, hooks: Sequence[Hook] = (), sink: Sink | None = None) -> None:
        parts.engine.check_optimizer(parts.optimizer)
        super().__init__(parts)
        loads = LoadsHook(parts.engine, parts.policy.loads_every, parts.meter.take, self._tell)
        self.hooks: list[Hook] = [*([loads] if parts.engine.routers else []), *hooks]
        self.sink = sink
        self.losses = RecoveryConfig()
        self.end_reason = ""  # why the run ends before its time
        self.find_checkpoint: Callable[[], Path] | None = None  # the newest to go back to; rank 0 asks
        self.memory: Path | None = None  # the folder of this host's snapshots
        self._has_constant_rate = parts.schedule.is_constant
        self._reports_samples = parts.engine.reports_samples
        if parts.passes is not None:  # memory ran out, and microbatches are smaller from here on
            parts.passes.on_cut = lambda size: self.note("microbatch", {"microbatch": size, "reason": "out of memory"})
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
                    with contextlib.closing(self.steps()) as steps:
                        for result in steps:
                            for hook in self.hooks:
                                hook(self, result)
                    self._wait_for_steps()
                    return
                except GoBackError as error:
                    asked = error
                self._go_back(asked)
        finally:
            if self.parts.eval_loader is not None:
                self.parts.eval_loader.close()

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
        for record in self._write_records(wait=wait):
            is_wrong = record.loss is not None and not math.isfinite(record.loss) and not record.is_skipped
            if is_wrong and self.losses.on_spike not in ("roll_back", "lower_rate"):  # else it is a spike
                facts = f"learning rate {record.lr:.3g}, gradient norm {record.grad_norm}"
                what = f"the loss is {record.loss} at step {record.step} ({facts})"
                rule = "its gradients are finite, so they say nothing of what is wrong; no later checkpoint was saved"
                raise TrainingError(f"{what}\n  {rule}\n  look at the loss function and the data of that step")

    def has_checkpoint(self) -> bool:
        return self.find_start() is not None

    def find_start(self) -> Path | None:
        """Returns the newest checkpoint that rank 0 finds, as this rank reads it; None without one."""
        comm, path = self.parts.engine.world, None
        if self.find_checkpoint is None:
            return None
        if comm.rank == 0:
            with contextlib.suppress(CheckpointError):
                path = self.find_checkpoint()
        path = broadcast_object(comm, path)
        return None if path is None else on_this_host(path, self.memory)

    def note(self, name: str, detail: dict[str, Any], *, step: int | None = None) -> None:
        """Writes an event into the records, if there are any; None: of the last step."""
        number = self.step if step is None else step
        self._tell(EventRecord(name=name, step=number, detail=detail, time=time.time()))

    def _tell(self, record: Record) -> None:
        if self.sink is not None:
            self.sink.write(record)

    def log_samples(self, texts: Sequence[str] = (), images: Any = ()) -> None:
        """Keeps texts and images, such as what the model makes of a prompt, for the page to show; those of rank 0."""
        self.note("samples", samples_of(texts, images))

    def evaluate(self) -> Evaluation | None:
        """Evaluates exactly, over all ranks; None without an evaluation set."""
        parts, meter = self.parts, self.parts.meter
        if parts.eval_loader is None:
            return None
        meter.enter("evaluation")
        start = meter.take()
        average = parts.average if parts.evaluates_average else None
        with contextlib.nullcontext() if average is None else average.in_place():
            is_last, shown = self.step == parts.plan.total_steps, parts.shown
            if shown is not None:
                shown.begin(is_last=is_last)
            result = evaluate(parts.engine, parts.eval_loader, parts.loss, parts.policy.dtype, parts.metrics, shown)
        if parts.has_perplexity:
            result.metrics["perplexity"] = math.exp(min(result.loss, _LARGEST_EXPONENT))
        seconds = seconds_between(start, meter.take())
        accuracy = {} if result.accuracy is None else {"accuracy": result.accuracy}
        found = {"loss": result.loss, **accuracy, **result.metrics}
        self.metrics = {"step": self.step, **{f"eval_{name}": value for name, value in found.items()}}
        self.early_stop.note(self.metrics)
        if self.sink is not None:
            self.sink.write(EvalRecord(**asdict(result), step=self.step, seconds=seconds, time=time.time()))
            if shown is not None and (samples := shown.detail()) is not None:
                self.note("samples", samples)
        meter.start()
        return result

    def state(self) -> State:
        """Returns this rank's part of the state, without a copy. Raises TrainingError for a loss that is not finite."""
        self._wait_for_steps()
        return self.collect_state()

    def _wait_for_steps(self) -> None:
        self.flush(wait=True)
        for bad in self.bad_steps.read():
            self._note_bad(bad)

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
        path = self.find_start()
        if path is None:
            raise asked
        scale, number, last_step = self.rate_scale * asked.decision.rate_factor, self.num_roll_backs + 1, self.step
        self.load_state(open_checkpoint(path))
        first = self.position
        if asked.decision.skips_data:
            self.position = max(first, asked.position)  # a step that came before the checkpoint is not read again
            self.consumed.skip(first, self.position)
        self.rate_scale, self.num_roll_backs = scale, number
        detail = {"from_step": last_step, "reason": str(asked), "skipped_samples": self.position - first}
        self.note("roll_back", {**detail, "rate_scale": scale, "number": number})

    def _note_bad(self, bad: BadStep) -> None:
        """Records a step that was left out. Raises TrainingError on all ranks if it is one too many in a row."""
        if self.sink is not None:  # without one, nobody waits for the device
            self.note("skipped", bad.detail(), step=bad.step)
        parts = self.parts
        limit = min(parts.policy.max_bad_steps, parts.plan.total_steps)
        goes_back = self.losses.on_nan in ("roll_back", "lower_rate") and bad.num_in_a_row >= limit
        has, count, row = goes_back and self.has_checkpoint(), self.num_roll_backs, bad.num_in_a_row
        reaction = on_bad_steps(self.losses, num_in_a_row=row, limit=limit, num_roll_backs=count, has_checkpoint=has)
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
        parts, plan, schedule = self.parts, self.parts.plan, self.parts.schedule
        if self._has_constant_rate and self.rate_scale == 1.0:
            lr = float(parts.optimizer.param_groups[0]["lr"])
        else:
            before, after = self.step, self.step + 1
            if schedule.unit == "samples":
                before, after = batch.position, batch.next_position
            lr = set_learning_rate(parts.optimizer, schedule.factor(before=before, after=after) * self.rate_scale)
        every = parts.policy.histogram_every
        if every is not None and (self.step + 1) % every == 0:  # not from a CUDA graph, which hides gradients
            outcome = self._train_step(batch, parts.meter.lap, self._write_histograms)
        elif parts.graphs is not None:
            outcome = parts.graphs(parts.engine, parts.optimizer, batch, parts.meter.lap, self._train_step)
        else:
            outcome = self._train_step(batch, parts.meter.lap)
        if parts.average is not None:
            parts.average.update()
        self.step += 1
        self.position = batch.next_position
        if batch.indices is not None:
            self.consumed.note(batch.position, batch.next_position, batch.indices)
        is_last = self.step == plan.total_steps
        samples = batch.local_samples if self._reports_samples else []
        return StepResult(self.step, self.position, samples, lr, outcome, plan.steps_per_epoch, is_last)

    def _train_step(self, batch: StepBatch, on_phase: OnPhase, on_gradients: OnGradients | None = None) -> StepOutcome:
        own, callbacks = self.parts, StepCallbacks(on_phase, on_gradients)
        return train_step(own.engine, own.optimizer, batch, own.loss, own.policy, callbacks, self.scaler, own.passes)

    def _write_histograms(self, weight: torch.Tensor | None) -> None:
        """Writes the histograms of the step under way, on rank 0, one event for each parameter. All ranks call it."""
        found = measure_histograms(self.parts.engine, weight)
        if self.sink is not None and self.parts.engine.world.rank == 0:
            self.flush(wait=True)  # the steps before come first
            step, now = self.step + 1, time.time()
            self.sink.write(*(EventRecord(name="histogram", step=step, detail=each, time=now) for each in found))


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


def note_compiled(trainer: Trainer, result: StepResult) -> None:
    """Records what was compiled and how long that took, and what could not be. A hook."""
    if result.step > 3 and result.step % 100 and not result.is_last:
        return
    notes = take_notes(trainer.parts.engine.module, getattr(trainer.parts.loss, "sum", None))
    if done := [note for note in notes if not note.problem]:
        seconds = sum(note.seconds for note in done)
        trainer.note("compiled", {"what": "; ".join(note.what for note in done), "seconds": round(seconds, 1)})
    for note in notes:
        if note.problem:
            trainer.note("not_compiled", {"what": note.what, "why": note.problem})


@dataclass(slots=True)
class NoteHook:
    """Records once what was decided: before the first step, or by a function that returns it when it has come."""

    name: str
    detail: dict[str, Any] | Callable[[Trainer], dict[str, Any] | None]
    is_recorded: bool = False

    def __call__(self, trainer: Trainer, result: StepResult) -> None:
        detail = None if self.is_recorded else self.detail(trainer) if callable(self.detail) else self.detail
        if detail is not None:
            self.is_recorded = True
            trainer.note(self.name, detail, step=result.step)


def bucket_choice(trainer: Trainer) -> dict[str, Any] | None:
    """Returns the buckets that the engine has chosen, once it has."""
    choice = trainer.parts.engine.bucket_choice
    return None if choice is None else {**choice.detail()}
