"""Exact evaluation: every sample once, sums and counts added over ranks, divided once at the end.

One model is evaluated: where rank 0's buffers are everyone's, the others take them over first, because each rank has
moved its own (batch-norm statistics, say) since the last step began.

A metric is a function ``metric(model, batch) -> (sum, count)``, as a loss is. The loss and all metrics of a batch share
one forward pass, where they call the model with the same arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from paceline.checkpoint.retention import best_mode
from paceline.clock import on_device
from paceline.config.schema import EarlyStopConfig
from paceline.data.loader import EvalLoader
from paceline.engines.engine import Engine
from paceline.errors import UsageError
from paceline.imports import import_from_path
from paceline.train.loss import Loss, LossValue, OnNormalised
from paceline.train.step import place

Metric: TypeAlias = Callable[[Callable[..., Any], Any], Any]


def load_metrics(paths: Mapping[str, str]) -> dict[str, Metric]:
    return {name: import_from_path(path, f"train.metrics.{name}") for name, path in paths.items()}


def load_hooks(paths: tuple[str, ...]) -> dict[str, Any]:
    """Imports the hooks of ``train.hooks``; a class is called without arguments."""
    found = {path: import_from_path(path, "train.hooks") for path in paths}
    return {path: hook() if isinstance(hook, type) else hook for path, hook in found.items()}


def score_all(loss: Loss, metrics: Mapping[str, Metric]) -> Callable[..., tuple[LossValue, list[Any]]]:
    """Returns what scores a batch: the loss, and sum and count of each metric, in one forward pass."""

    def score(model: Callable[..., Any], batch: Any) -> tuple[LossValue, list[Any]]:
        last: tuple[Any, Any] | None = None

        def once(*args: Any, **kwargs: Any) -> Any:
            """Gives the same output again when it is called with the same arguments as before."""
            nonlocal last
            called = (*args, *sorted(kwargs.items()))
            if last is None or not _are_same(last[0], called):
                last = called, model(*args, **kwargs)
            return last[1]

        value = loss.score(once, batch)
        seen = loss.prepare(batch) if isinstance(loss, OnNormalised) else batch
        return value, [number for name, metric in metrics.items() for number in _checked(name, metric(once, seen))]

    return score


def _are_same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    pairs = zip(one, other, strict=False)
    return len(one) == len(other) and all(
        a is b or (isinstance(a, tuple) and isinstance(b, tuple) and _are_same(a, b)) for a, b in pairs
    )


def _checked(name: str, value: Any) -> list[Any]:
    """Returns sum and count of a metric. Raises UsageError where it returned something else."""
    is_pair = isinstance(value, tuple) and len(value) == 2
    if not is_pair or not all(
        isinstance(each, int | float) or (isinstance(each, torch.Tensor) and each.numel() == 1) for each in value
    ):
        raise UsageError(
            f"train.metrics.{name} returned {type(value).__name__}\n"
            "  a metric returns (sum over its elements, their number): a mean would weigh ragged batches wrongly\n"
            "  return correct.sum(), correct.numel()"
        )
    return [each.detach().reshape(()) if isinstance(each, torch.Tensor) else each for each in value]


class EarlyStop:
    """Counts evaluations without a better one. A pure function of metrics that all ranks share; saved with the run."""

    def __init__(self, config: EarlyStopConfig) -> None:
        self._config = config
        self._sign = 1.0 if (config.mode or best_mode(config.metric)) == "min" else -1.0
        self.best: float | None = None
        self.num_bad = 0

    @property
    def is_over(self) -> bool:
        return self._config.patience is not None and self.num_bad >= self._config.patience

    @property
    def reason(self) -> str:
        if self.best is None:
            return f"stopped early: {self._config.metric} was never a number"
        since = f"has not become better than {self.best:g} in {self.num_bad} evaluations"
        return f"stopped early: {self._config.metric} {since}"

    def note(self, metrics: Mapping[str, float]) -> None:
        """Takes the metrics of an evaluation. Raises UsageError where the one that is asked for is not among them."""
        if self._config.patience is None:
            return
        value = metrics.get(self._config.metric)
        if value is None:
            raise UsageError(
                f"train.early_stop.metric = {self._config.metric}, which this run does not evaluate\n"
                f"  it evaluates {', '.join(name for name in metrics if name != 'step')}"
            )
        limit = None if self.best is None else self._sign * self.best - self._config.min_delta
        if value == value and (limit is None or self._sign * value < limit):
            self.best, self.num_bad = value, 0
        else:
            self.num_bad += 1

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "num_bad": self.num_bad}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.best, self.num_bad = state.get("best"), int(state.get("num_bad", 0))


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
