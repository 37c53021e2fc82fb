"""The trainer for plain scripts: one call a microbatch (``microbatches.py``), or whole epochs.

    history = trainer.fit(loader, optimizer, criterion, epochs=20, eval_loader=held_out, patience=3)
    result = trainer.evaluate(held_out, criterion, metrics={"accuracy": accuracy})     # the same on every rank
    outputs = trainer.predict(loader)                                                  # of this rank's samples

In ``fit`` and ``evaluate`` a plain ``DataLoader`` of all the data, the same on every rank, is shared out as by
``paceline.shard``: a step has the samples that it has in one process. Any other loader is this rank's own share. Shares
may differ in length: a rank that has no batch left takes part without samples, so that nobody waits for it. That costs
one small all-reduce a batch where there are several ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from paceline.classic.config import DistributedConfig as DistributedConfig
from paceline.classic.config import check_count, refuse
from paceline.classic.microbatches import MicrobatchTrainer
from paceline.comm.objects import gather_objects
from paceline.data.own_loader import OwnLoader, shard_weighed
from paceline.engines.groups import fingerprint, tensors_in
from paceline.errors import UsageError
from paceline.train.evaluate import apply_to_each, evaluate
from paceline.train.loss import Criterion, count_samples
from paceline.train.randomness import capture_random_states, restore_random_states, seed_everything

Metric: TypeAlias = Callable[[Any, Any], Any]
"""``metric(outputs, targets)`` returns (sum, count), or one number: the mean over the batch's samples."""


class DistributedTrainer(MicrobatchTrainer):
    """Trains a plain module on the ranks that a launcher started, or on one where none did; all make the same calls.

    ``mixed_precision`` is bf16, or fp16 with a dynamic loss scale where the device has none; or a policy by name.
    ``options`` are the fields of ``TrainerOptions``. Raises UsageError with all problems of the arguments at once.
    """

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
        weighed = {name: _weighed(name, metric) for name, metric in (metrics or {}).items()}
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

    def _train_epoch(
        self, loader: Iterable[Any], optimizer: torch.optim.Optimizer, criterion: Criterion, epoch: int
    ) -> float:
        """Trains on a whole loader, and returns the mean loss over all samples of all ranks."""
        sampler: Any = getattr(loader, "sampler", None)
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        sums = torch.zeros(2, dtype=torch.float64, device=self.engine.device)
        for step, batch in enumerate(self._together(self._shared(loader, epoch))):
            metrics = self.train_step(batch, optimizer, criterion, step)
            if samples := metrics["samples"]:
                sums += torch.tensor([metrics["loss"] * samples, samples], dtype=torch.float64).to(sums.device)
        self.flush(optimizer)
        self.engine.comm.all_reduce(sums).wait()
        total, samples = sums.tolist()
        return float(total / max(samples, 1.0))

    def _shared(self, loader: Iterable[Any], epoch: int = 0) -> Iterable[Any]:
        """Returns what shares a plain ``DataLoader`` out, if all ranks have the same; else the loader itself."""
        comm = self.engine.comm
        if comm.size == 1:
            return loader
        everyone = gather_objects(comm, _describe(loader, comm.device))
        first = everyone[0]
        if first is None or any(each is None or each[1:] != first[1:] for each in everyone):
            return loader
        assert isinstance(loader, DataLoader)  # no other is described
        shared = shard_weighed(loader, comm, seed=first[0])
        assert isinstance(shared, OwnLoader)
        shared.load_state_dict({**shared.state_dict(), "position": epoch * shared.order.samples_per_epoch})
        return shared

    def _together(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yields this rank's batches, and None while others still have some."""
        comm, batches = self.engine.comm, iter(loader)
        while True:
            batch = next(batches, None)
            if isinstance(loader, OwnLoader) and any(not each.numel() for each in tensors_in(batch)):
                batch = None  # others have samples
            left = torch.tensor([float(batch is not None)], device=comm.device)
            if comm.size > 1:
                comm.all_reduce(left).wait()
            if not left.item():  # sync point
                return
            yield batch


def _describe(loader: Iterable[Any], device: torch.device) -> tuple[int, ...] | None:
    """Returns seed, settings and a fingerprint of some samples of a plain ``DataLoader``; None for others."""
    sampler = loader.sampler if isinstance(loader, DataLoader) else None
    is_shuffled = isinstance(sampler, RandomSampler) and not sampler.replacement
    if not isinstance(loader, DataLoader) or loader.batch_size is None:
        return None
    dataset: Any = loader.dataset
    if not (is_shuffled or isinstance(sampler, SequentialSampler)) or not len(dataset):
        return None
    before = capture_random_states(device)
    seed_everything(0)
    try:
        length = len(dataset)
        samples = loader.collate_fn([dataset[place] for place in sorted({0, length // 2, length - 1})])
    finally:
        restore_random_states(before, device)
    seed = torch.initial_seed() if loader.generator is None else loader.generator.initial_seed()
    return seed % 2**63, length, loader.batch_size, is_shuffled, loader.drop_last, fingerprint(samples)


def _weighed(name: str, metric: Metric) -> Callable[[Callable[..., Any], Any], Any]:
    """Returns a metric of outputs and targets as one of a model and a batch, which gives sum and count."""

    def weigh(model: Callable[..., Any], batch: Any) -> tuple[Any, Any]:
        value, samples = metric(model(batch[0]), batch[1]), count_samples(batch)
        if isinstance(value, tuple) and len(value) == 2:
            return value
        if isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1):
            return value * samples, samples
        raise UsageError(
            f"the metric {name} returned {type(value).__name__}\n  it is (sum, count), or the mean over the batch\n"
            "  return correct.sum(), correct.numel()"
        )

    return weigh


EnhancedDistributedTrainer = DistributedTrainer
