"""The trainer for plain scripts: one call a microbatch, or whole epochs.

    trainer = DistributedTrainer(model, gradient_accumulation_steps=4, gradient_clip_val=1.0)
    optimizer = torch.optim.AdamW(trainer.parameters(), lr=3e-4)
    for epoch in range(epochs):
        for step, batch in enumerate(loader):             # this rank's share, (inputs, targets)
            metrics = trainer.train_step(batch, optimizer, criterion, step)
        trainer.flush(optimizer)                          # microbatches that do not fill a group
        trainer.save_checkpoint(epoch, optimizer, loss=metrics["loss"])

    history = trainer.fit(loader, optimizer, criterion, epochs=20, eval_loader=held_out, patience=3)
    result = trainer.evaluate(held_out, criterion, metrics={"accuracy": accuracy})     # the same on every rank
    outputs = trainer.predict(loader)                                                  # of this rank's samples

A face of ``parallelize`` and of ``train/step.py``. Every ``gradient_accumulation_steps`` calls make one update, of
*summed* losses divided once by the number of samples of all ranks and microbatches, also where some are smaller than
others. An update whose gradients are not finite is left out on all ranks, and ten in a row end the run.

``fit`` and ``evaluate`` share a plain ``DataLoader``, the same on every rank, out as ``paceline.shard`` does. Any other
loader is this rank's own share. Shares may differ in length: a rank that has no batch left takes part without samples,
so that nobody waits for it. That costs one small all-reduce a batch where there are several ranks.
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, SupportsFloat, TypeAlias, cast

import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from paceline.checkpoint.find import Retention, find_checkpoint
from paceline.checkpoint.optimizer import restore
from paceline.checkpoint.read import open_checkpoint
from paceline.checkpoint.writer import CheckpointWriter, raised_on_all, warn_of
from paceline.clock import on_device
from paceline.comm.base import clock_of
from paceline.comm.objects import ask_first_rank, gather_objects, mean, reduce_number
from paceline.comm.torch_dist import connect
from paceline.comm.traced import Trace, TracedCommunicator
from paceline.data.loader import StepBatch
from paceline.data.own_loader import OwnLoader, shard_weighed
from paceline.data.samplers import seeded
from paceline.engines.groups import fingerprint, tensors_in
from paceline.engines.torch_helpers import adopt_optimizer, is_of_former
from paceline.errors import TrainingError, UsageError
from paceline.free_memory import peak_memory_bytes
from paceline.plan.layout import StrategyName
from paceline.train.evaluate import apply_to_each, evaluate
from paceline.train.loss import Criterion, LossValue, OutputLoss, count_samples
from paceline.train.run_state import StepState
from paceline.train.step import Passes, StepPolicy, accumulate, place, train_step
from paceline.train.survive.recovery import Wording, explain_bad_steps, find_overflow
from paceline_classic.best import copy_checkpoint
from paceline_classic.config import DistributedConfig as DistributedConfig
from paceline_classic.config import check_arguments, check_count, make_engine, refuse
from paceline_classic.monitor import DistributedMonitor, StepMetrics, TimedCalls

Metric: TypeAlias = Callable[[Any, Any], Any]
"""``metric(outputs, targets)`` returns (sum, count), or one number: the mean over the batch's samples."""
_WORDING = Wording(
    step="update", rate="the learning rate", clip="gradient_clip_val", precision="mixed_precision = 'bf16'"
)


class DistributedTrainer:
    """Trains a plain module on the ranks that a launcher started, or on one where none did; all make the same calls.

    ``mixed_precision`` is bf16, or fp16 with a dynamic loss scale where the device has none; or a policy by name.
    ``options`` are the fields of ``TrainerOptions``. Raises UsageError with all problems of the arguments at once.
    """

    def __init__(
        self,
        model: nn.Module,
        strategy: StrategyName = "ddp",
        mixed_precision: bool | str = False,
        gradient_accumulation_steps: int = 1,
        gradient_clip_val: float | None = None,
        **options: Any,
    ) -> None:
        asked = model, strategy, mixed_precision, gradient_accumulation_steps, gradient_clip_val
        more = check_arguments(*asked, options)
        self.strategy = strategy
        self.gradient_accumulation_steps = gradient_accumulation_steps
        self.gradient_clip_val = gradient_clip_val
        self.checkpoint_dir = Path(more.checkpoint_dir)
        self.log_dir = None if more.log_dir is None else Path(more.log_dir)
        ranks = connect() if more.comm is None else more.comm
        trace = Trace(ranks.device, clock=clock_of(ranks))
        self.engine = make_engine(model, TracedCommunicator(ranks, trace), strategy, mixed_precision, more)
        self._policy = StepPolicy(clip_norm=gradient_clip_val, max_bad_steps=10)
        self._state = StepState(self.engine, self._policy)  # rank 0's position has that of a checkpoint
        self.fit_state: dict[str, Any] = {}  # the best loss so far, and epochs since
        log = None if self.log_dir is None else DistributedMonitor(self.log_dir / "trainer", ranks.rank)
        self._calls = TimedCalls(ranks.device, trace, log)
        weakref.finalize(self, self._calls.close)
        self._optimizer: torch.optim.Optimizer | None = None
        self._writer: CheckpointWriter | None = None
        self._retention = Retention(last=more.keep_checkpoints)
        # The last microbatch and its loss, for a replay; before the first call one without samples.
        self._last: tuple[list[Any], OutputLoss] = ([None], self.loss_of(nn.functional.cross_entropy))
        self._num_steps = self._num_samples = 0
        self._num_pending = 0  # microbatches since the last update, and the losses of those that had samples
        self._pending: list[LossValue] = []

    @property
    def num_updates(self) -> int:
        """How many updates there were, those left out and those of the checkpoint that was loaded among them."""
        return self._state.step

    def parameters(self) -> Iterator[nn.Parameter]:
        """Iterates over what an optimizer of this rank updates."""
        return self.engine.parameters()

    def train_step(
        self, batch: Any, optimizer: torch.optim.Optimizer, criterion: Criterion, step: int | None = None
    ) -> StepMetrics:
        """Trains on one microbatch of this rank; every ``gradient_accumulation_steps`` calls, updates the parameters.

        ``batch`` is (inputs, targets), on any device. With no rows, or None for no samples on this rank, the call
        takes part in the update alone; its loss is then nan. ``criterion(outputs, targets)`` returns the mean over
        the batch's samples, or with ``reduction='sum'`` the sum; one that divides by something else (class weights,
        targets not ignored) is weighed by samples all the same. ``step`` is a label that comes back in the metrics.

        The metrics are those of this call on this rank: loss (the mean over its samples), compute_time,
        communication_time (what backward did not hide), step_time (both), samples, grad_norm (before clipping; None
        without an update), learning_rate, is_update, is_skipped (an update that was left out, as its norm is not
        finite), step. On CUDA, reading the loss, the norm or a time waits for the device; the call itself does not.

        Raises UsageError for an optimizer of other parameters, and for a batch or a loss of another form; TrainingError
        after ten updates in a row whose gradients are not finite.
        """
        self._use(optimizer)
        self._calls.start()
        samples = count_samples(batch)
        placed = place(batch, self.engine.device, None) if samples else None
        loss, scaler = self.loss_of(criterion), self._state.scaler
        if scaler is not None and scaler.elements is None:  # how many the first update will have
            first = on_device(samples * self.gradient_accumulation_steps, self.engine.device)
            self.engine.comm.all_reduce(first).wait()
            scaler.note_elements(first)
        is_update = self._num_pending + 1 == self.gradient_accumulation_steps
        rate, norm = optimizer.param_groups[0]["lr"], None
        learning_rate = rate.detach().clone().item if isinstance(rate, torch.Tensor) else float(rate)
        self._last = ([placed], loss)
        if is_update:
            norm = self._update(optimizer, [placed])
        else:
            factor = None if scaler is None else scaler.factors(self.engine.comm.size, None)[0]
            with self.engine.no_sync():
                self._run_passes(Passes(self.engine, [placed], loss, factor))
        self._num_steps += 1
        self._num_samples += samples
        return self._calls.stop(
            self._num_steps,
            loss=math.nan if loss.mean is None else loss.mean.item,
            samples=samples,
            grad_norm=None if norm is None else norm.item,
            learning_rate=learning_rate,
            is_update=is_update,
            is_skipped=False if norm is None else lambda: not math.isfinite(norm.item()),
            step=step,
        )

    def loss_of(self, criterion: Criterion) -> OutputLoss:
        """Returns a criterion as the loss of a step; where parameters are less than fp32, it gets that all the same."""
        return OutputLoss(criterion, in_full=self.engine.precision.param_dtype is not None)

    def flush(self, optimizer: torch.optim.Optimizer) -> bool:
        """Updates the parameters with what is accumulated, for the end of an epoch that does not fill a last group.

        The update weighs each of its samples alike, however few they are. Without a flush they join the first group
        of the next epoch. Called by all ranks; says whether there was anything, on any rank.
        """
        self._use(optimizer)
        self._calls.start()
        has_gradients = reduce_number(self.engine.comm, self._pending_samples, "sum") > 0  # sync point
        if has_gradients:
            self._update(optimizer, [])
        self._forget_gradients()
        self._calls.stop()
        return has_gradients

    def save_checkpoint(
        self, epoch: int, optimizer: torch.optim.Optimizer, loss: SupportsFloat, is_best: bool = False
    ) -> Path:
        """Saves the state after the last update as ``checkpoint_dir/step-<updates>``; returns its path on every rank.

        Called by all ranks. Each writes what it holds; rank 0's ``epoch``, ``loss`` and ``is_best`` count. The best is
        kept as a copy in ``checkpoint_dir/best``. Gradients that wait for their group to fill are not saved: it warns
        when there are any. Raises CheckpointError on every rank when one cannot write.
        """
        comm = self.engine.comm
        if self._num_pending and comm.rank == 0:
            warnings.warn(
                f"{self._num_pending} of {self.gradient_accumulation_steps} microbatches are accumulated and not yet "
                "applied: the checkpoint does not hold them\n  call trainer.flush(optimizer) before saving",
                stacklevel=2,
            )
        value = loss.detach() if isinstance(loss, torch.Tensor) else loss
        if self._writer is None:
            self._writer = CheckpointWriter(self.checkpoint_dir, self.engine.world, self._retention)
        list(self._state.bad_steps.read())
        state, position = self._state.collect(self.engine, optimizer), sum(gather_objects(comm, self._state.position))
        extra = {"epoch": int(epoch), "loss": float(value), "fit": self.fit_state}
        values, about = {"extra": extra, **state.values}, {"strategy": self.strategy}
        path = self._writer.save(replace(state, position=position, values=values, about=about))
        ask_first_rank(comm, lambda: copy_checkpoint(path, "best") if is_best else None)
        return path

    def load_checkpoint(
        self, path: str | Path | None = None, optimizer: torch.optim.Optimizer | None = None
    ) -> dict[str, Any]:
        """Continues from a checkpoint: of ``path``, of the newest in that folder, or of the newest that was saved.

        Called by all ranks, which all read the files that rank 0 chooses. Returns its epoch, loss and step (updates
        done). Without an optimizer only the model is loaded. Gradients accumulated so far are dropped. Random states
        are restored if the number of ranks is the same. Raises CheckpointError on every rank if one cannot read it.
        """
        where = self.checkpoint_dir if path is None else Path(path)
        fix = "save_checkpoint writes into checkpoint_dir: check the path, or start without loading"
        find = partial(find_checkpoint, str(where), where, tell=warn_of, fix=fix)
        chosen = ask_first_rank(self.engine.comm, find)  # so that all ranks read the same one
        with raised_on_all(self.engine.comm):
            checkpoint = open_checkpoint(chosen)
            if optimizer is not None and is_of_former(optimizer):
                adopt_optimizer(self.engine, optimizer, optimizer.state_dict())
            restore(checkpoint, self.engine, optimizer, "build both as they were when it was saved")
            self._forget_gradients()
            self._state.go_on_from(checkpoint, self.engine)
            self._state.position = self._state.position if self.engine.comm.rank == 0 else 0
            extra = checkpoint.values.get("extra", {})
            self.fit_state = extra.get("fit") or {}
        return {"epoch": extra.get("epoch"), "loss": extra.get("loss"), "step": self._state.step}

    def get_performance_metrics(self) -> dict[str, Any]:
        """Returns this rank's averages over all calls of ``train_step``, the first and slowest among them.

        Local, so any rank may ask at any time: ``samples_per_second`` is this rank's rate times the world size,
        everything else this rank's own. A step is a call of ``train_step``; time between calls does not count.
        ``total_updates`` includes those of a checkpoint that was loaded. On CUDA it waits for the device.
        """
        self._calls.read_times(wait=True)
        step_s, waited_s = self._calls.step_s, self._calls.comm_s
        list(self._state.bad_steps.read())  # counts them; whether there are too many is for the next update to say
        rate = self._num_samples / step_s if step_s > 0 else 0.0
        num_steps = max(self._num_steps, 1)
        return {
            "samples_per_second": rate * self.engine.comm.size,
            "samples_per_second_per_gpu": rate,
            "communication_overhead_percent": 100 * waited_s / step_s if step_s > 0 else 0.0,
            "average_step_time": step_s / num_steps,
            "average_communication_time": waited_s / num_steps,
            "total_samples": self._num_samples,
            "total_steps": self._num_steps,
            "total_updates": self._state.step,
            "skipped_updates": self._state.bad_steps.num_skipped,
            "world_size": self.engine.comm.size,
            "strategy": self.strategy,
            "peak_memory_bytes": peak_memory_bytes(self.engine.device),
        }

    def fit(
        self,
        loader: Iterable[Any],
        optimizer: torch.optim.Optimizer,
        criterion: Criterion,
        epochs: int = 1,
        *,
        eval_loader: Iterable[Any] | None = None,
        metrics: Mapping[str, Metric] | None = None,
        patience: int | None = None,
        on_epoch: Callable[[dict[str, float]], None] | None = None,
        resume: bool = False,
    ) -> list[dict[str, float]]:
        """Trains for ``epochs``; returns what each gave, the same on every rank, and saves a checkpoint after each.

        The best by loss, that of ``eval_loader`` if there is one, is kept as ``best``. After ``patience`` epochs in a
        row without a better one the training ends. ``resume`` goes on from the newest checkpoint. A loader whose
        sampler has ``set_epoch`` is told the epoch; a plain ``DataLoader`` is shared out among the ranks.
        """
        refuse("fit", [] if patience is None else check_count("patience", patience, fix="for none, leave it out"))
        self.fit_state = {} if not resume else self.fit_state
        first, history = (int(self.load_checkpoint(None, optimizer)["epoch"]) + 1 if resume else 0), []
        for epoch in range(first, epochs):
            if patience is not None and self.fit_state.get("without_gain", 0) >= patience:
                break
            result: dict[str, float] = {"epoch": epoch, "loss": self._train_epoch(loader, optimizer, criterion, epoch)}
            if eval_loader is not None:
                found = self.evaluate(eval_loader, criterion, metrics)
                result.update({f"eval_{name}": value for name, value in found.items() if name != "samples"})
            value, best = result.get("eval_loss", result["loss"]), self.fit_state.get("best", math.inf)
            is_best = value < best
            bad = 0 if is_best else self.fit_state.get("without_gain", 0) + 1
            self.fit_state = {"best": value if is_best else best, "without_gain": bad}
            self.save_checkpoint(epoch, optimizer, value, is_best=is_best)
            history.append(result)
            if on_epoch is not None:
                on_epoch(result)
        return history

    def evaluate(
        self, loader: Iterable[Any], criterion: Criterion, metrics: Mapping[str, Metric] | None = None
    ) -> dict[str, float]:
        """Returns the mean loss over all samples of all ranks, each metric, and ``samples``. All ranks call it."""
        batches = ((batch, count_samples(batch)) for batch in self._together(self._shared(loader)))
        weighed = {name: _weighed(metric) for name, metric in (metrics or {}).items()}
        found = evaluate(self.engine, batches, self.loss_of(criterion), None, weighed)
        return {"loss": found.loss, **found.metrics, "samples": found.samples}

    @torch.no_grad()
    def predict(self, loader: Iterable[Any]) -> Any:
        """Returns the outputs for this rank's inputs, or (inputs, targets), on the CPU: a tensor, or a list."""

        def run(model: Callable[..., Any], batch: Any) -> Any:
            return model(batch[0] if isinstance(batch, tuple | list) and len(batch) == 2 else batch)

        found = apply_to_each(self.engine, ((batch, 0) for batch in self._together(loader)), run, None)
        outputs = [each.cpu() if isinstance(each, torch.Tensor) else each for each, _ in found]
        return torch.cat(outputs) if outputs and all(isinstance(each, torch.Tensor) for each in outputs) else outputs

    def _use(self, optimizer: torch.optim.Optimizer) -> None:
        """Checks an optimizer when it first comes: its parameters are ours, and no group of gradients is open."""
        if optimizer is self._optimizer:
            return
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise UsageError(f"optimizer is of type {type(optimizer).__name__}\n  it is a torch.optim.Optimizer")
        if self._num_pending:
            raise UsageError(
                f"another optimizer came after {self._num_pending} of {self.gradient_accumulation_steps} microbatches\n"
                "  a group makes one update of one optimizer\n  call trainer.flush with the former optimizer first"
            )
        if is_of_former(optimizer):  # built of the model's own parameters, which the engine has replaced
            adopt_optimizer(self.engine, optimizer, optimizer.state_dict())
        try:
            self.engine.check_optimizer(optimizer)
        except UsageError as error:
            raise UsageError(f"{error}\n  with a trainer: trainer.parameters()") from None
        self._optimizer = optimizer

    @property
    def _pending_samples(self) -> int:
        return int(sum(value.count for value in self._pending))

    def _run_passes(self, passes: Passes) -> list[LossValue]:
        """Adds the gradients of microbatches, in the dtypes that they came with; returns all losses that wait."""
        found = accumulate(replace(passes, dtype=None))
        self._num_pending += len(passes.microbatches)
        self._pending += [LossValue(value.total.detach(), value.count) for value in found]
        return self._pending

    def _update(self, optimizer: torch.optim.Optimizer, microbatches: list[Any]) -> torch.Tensor:
        """Makes the step of which ``microbatches`` are the last, with those that wait; returns the gradient norm."""
        batch = StepBatch(microbatches=microbatches, global_samples=1)  # how many there are is counted
        state, loss = self._state, self._last[1]
        outcome = train_step(
            self.engine, optimizer, batch, loss, self._policy, scaler=state.scaler, passes=self._run_passes
        )
        state.step += 1
        state.position += self._pending_samples
        self._forget_gradients()
        for bad in state.bad_steps.note(state.step, outcome, self._last):
            if bad.num_in_a_row >= self._policy.max_bad_steps:  # one too many: all ranks come here together
                microbatches, loss = bad.batch
                finding = find_overflow(Passes(self.engine, microbatches, loss, bad.outcome.factor))
                raise TrainingError(explain_bad_steps(bad, finding, self.engine.precision, _WORDING))
        return outcome.grad_norm

    def _forget_gradients(self) -> None:
        """Starts a new group. Not the optimizer's zero_grad(), which leaves parameters that it does not update."""
        self.engine.zero_grad()
        self._num_pending, self._pending = 0, []

    def _train_epoch(
        self, loader: Iterable[Any], optimizer: torch.optim.Optimizer, criterion: Criterion, epoch: int
    ) -> float:
        """Trains on a whole loader, and returns the mean loss over all samples of all ranks."""
        sampler: Any = getattr(loader, "sampler", None)
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        total, count = 0.0, 0
        for step, batch in enumerate(self._together(self._shared(loader, epoch))):
            metrics = self.train_step(batch, optimizer, criterion, step)
            if samples := metrics["samples"]:  # without any there is no loss
                total, count = total + metrics["loss"] * samples, count + samples
        self.flush(optimizer)
        return mean(total, count, self.engine.comm)

    def _shared(self, loader: Iterable[Any], epoch: int = 0) -> Iterable[Any]:
        """Returns what shares a plain ``DataLoader`` out, if all ranks have the same; else the loader itself."""
        comm = self.engine.comm
        found = gather_objects(comm, _describe(loader)) if comm.size > 1 else [None]
        if found[0] is None or any(each is None or each[1:] != found[0][1:] for each in found):
            return loader
        shared = shard_weighed(cast("DataLoader[Any]", loader), comm, seed=found[0][0])
        assert isinstance(shared, OwnLoader)  # no stream is described
        shared.load_state_dict({**shared.state_dict(), "position": epoch * shared.order.samples_per_epoch})
        return shared

    def _together(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yields this rank's batches, and None while others still have some."""
        comm, batches = self.engine.comm, iter(loader)
        while True:
            batch = next(batches, None)
            if isinstance(loader, OwnLoader) and any(not each.numel() for each in tensors_in(batch)):
                batch = None  # others have samples
            is_left = batch is not None
            if not (reduce_number(comm, is_left, "max") if comm.size > 1 else is_left):  # sync point
                return
            yield batch


def _describe(loader: Iterable[Any]) -> tuple[int, ...] | None:
    """Returns seed, settings and a fingerprint of some samples of a plain ``DataLoader``; None for others."""
    if not isinstance(loader, DataLoader) or loader.batch_size is None:
        return None
    sampler, dataset = loader.sampler, cast("Any", loader.dataset)
    is_shuffled = isinstance(sampler, RandomSampler) and not sampler.replacement
    if not (is_shuffled or isinstance(sampler, SequentialSampler)) or not len(dataset):
        return None
    length = len(dataset)
    with seeded(0):
        samples = loader.collate_fn([dataset[place] for place in sorted({0, length // 2, length - 1})])
    seed = torch.initial_seed() if loader.generator is None else loader.generator.initial_seed()
    return seed % 2**63, length, loader.batch_size, is_shuffled, loader.drop_last, fingerprint(samples)


def _weighed(metric: Metric) -> Callable[[Callable[..., Any], Any], Any]:
    """Returns a metric of outputs and targets as one of a model and a batch, which gives sum and count."""

    def weigh(model: Callable[..., Any], batch: Any) -> Any:
        value, samples = metric(model(batch[0]), batch[1]), count_samples(batch)
        is_mean = isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1)
        return (value * samples, samples) if is_mean else value

    return weigh


EnhancedDistributedTrainer = DistributedTrainer
