"""What is measured exactly, over all ranks and under every strategy: evaluations, and how parameters are distributed.

An evaluation takes every sample once; sums and counts are added over ranks, and divided once at the end. Where rank 0's
buffers are everyone's, the others take them over first: each rank has moved its own (batch-norm statistics, say).

A metric is a function ``metric(model, batch) -> (sum, count)``, as a loss is. The loss and all metrics of a batch share
one forward pass, where they call the model with the same arguments.

Histograms of weights and gradients have the same bins for all tensors, steps and ranks, so counts add up: their edges
are 0 and plus and minus 2^(k/2), from 2^-40 to 2^16, two in each octave. A rank counts the elements of which it holds a
copy that nobody else counts; one sum and one minimum over all ranks make the counts of the whole tensors.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch.utils._pytree import tree_flatten

from paceline.checkpoint.find import best_mode
from paceline.clock import on_device
from paceline.config.schema import EarlyStopConfig
from paceline.data.loader import EvalLoader
from paceline.engines.engine import Engine
from paceline.errors import UsageError
from paceline.imports import import_from_path
from paceline.train.loss import Loss, LossValue, OnNormalised
from paceline.train.shown import ShownSamples
from paceline.train.step import place

Metric: TypeAlias = Callable[[Callable[..., Any], Any], Any]
_EXPONENTS = range(-80, 33)  # halves
_SIZES = [2.0 ** (exponent / 2) for exponent in _EXPONENTS]
EDGES = [*(-size for size in reversed(_SIZES)), 0.0, *_SIZES]  # each bin ends with its edge; one more is behind them
_AT_ONCE = 2**22  # elements: each takes about 40 bytes while it is counted
_NOT_FINITE, _SUM, _SQUARES, _COUNTS = 0, 1, 2, 3  # where they are in a row
_KINDS = ("weights", "gradients")


def load_metrics(paths: Mapping[str, str]) -> dict[str, Metric]:
    return {name: import_from_path(path, f"train.metrics.{name}") for name, path in paths.items()}


def load_hooks(paths: tuple[str, ...]) -> dict[str, Any]:
    """Imports the hooks of ``train.hooks``; a class is called without arguments."""
    found = {path: import_from_path(path, "train.hooks") for path in paths}
    return {path: hook() if isinstance(hook, type) else hook for path, hook in found.items()}


def score_all(loss: Loss, metrics: Mapping[str, Metric]) -> Callable[..., tuple[LossValue, list[Any]]]:
    """Returns what scores a batch: the loss, and sum and count of each metric, in one forward pass."""

    def score(model: Callable[..., Any], batch: Any) -> tuple[LossValue, list[Any]]:
        last: tuple[list[Any], Any, Any] | None = None

        def once(*args: Any, **kwargs: Any) -> Any:
            """Gives the same output again when it is called with the same arguments as before."""
            nonlocal last
            called, kind = tree_flatten((args, kwargs))
            if last is None or last[1] != kind or any(a is not b for a, b in zip(last[0], called, strict=True)):
                last = called, kind, model(*args, **kwargs)
            return last[2]

        value = loss.score(once, batch)
        seen = loss.prepare(batch) if isinstance(loss, OnNormalised) else batch
        return value, [number for name, metric in metrics.items() for number in _checked(name, metric(once, seen))]

    return score


def _checked(name: str, value: Any) -> list[Any]:
    pair = value if isinstance(value, tuple) and len(value) == 2 else (None,)
    if not all(isinstance(x, int | float) or (isinstance(x, torch.Tensor) and x.numel() == 1) for x in pair):
        what = f"train.metrics.{name} returned {type(value).__name__}"
        rule = "a metric returns (sum over its elements, their number): a mean would weigh ragged batches wrongly"
        raise UsageError(f"{what}\n  {rule}\n  return correct.sum(), correct.numel()")
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
        best = "" if self.best is None else f"has not become better than {self.best:g} in {self.num_bad} evaluations"
        return f"stopped early: {self._config.metric} {best or 'was never a number'}"

    def note(self, metrics: Mapping[str, float]) -> None:
        """Takes the metrics of an evaluation. Raises UsageError where the one that is asked for is not among them."""
        if self._config.patience is None:
            return
        value = metrics.get(self._config.metric)
        if value is None:
            known = ", ".join(name for name in metrics if name != "step")
            what = f"train.early_stop.metric = {self._config.metric}, which this run does not evaluate"
            raise UsageError(f"{what}\n  it evaluates {known}")
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
    engine: Engine,
    loader: EvalLoader | Iterable[tuple[Any, int]],
    loss: Loss,
    dtype: torch.dtype | None,
    metrics: Mapping[str, Metric] | None = None,
    shown: ShownSamples | None = None,
) -> Evaluation:
    """Evaluates the engine over all ranks. One all-reduce of a few numbers, and one wait for the device.

    ``loader`` may have this rank's batches with their samples. ``shown`` keeps some of these with the model's answers.
    """
    device, names = engine.device, list(metrics or {})
    batches = zip(loader, loader.local_samples(), strict=True) if isinstance(loader, EvalLoader) else loader
    # Summed loss, elements, right answers, samples, batches without a count of right answers; of metrics sum and count.
    sums = torch.zeros(5 + 2 * len(names), dtype=torch.float64, device=device)
    counts_samples = engine.groups.context.rank == 0  # all ranks that share a sequence score it, each a part
    score = score_all(loss, metrics or {})

    def score_and_show(model: Callable[..., Any], batch: Any) -> tuple[LossValue, list[Any]]:
        found = score(model, batch)
        if shown is not None:
            shown.see(engine, batch, found[0])
        return found

    for scored, samples in apply_to_each(engine, batches, score_and_show, dtype):
        if scored is None:  # another stage of the pipeline has it
            continue
        value, rest = scored
        correct, unscored = (0.0, 1.0) if value.correct is None else (value.correct, 0.0)
        row = [value.total, value.count, correct, float(samples) * counts_samples, unscored, *rest]
        sums += torch.stack([on_device(number, device) for number in row])
    engine.add_up(sums)
    total, count, correct_sum, num_samples, num_unscored, *rest = sums.tolist()  # sync point
    return Evaluation(
        loss=total / max(count, 1.0),
        accuracy=correct_sum / max(count, 1.0) if num_unscored == 0 else None,
        samples=int(num_samples),
        metrics={name: rest[2 * i] / rest[2 * i + 1] if rest[2 * i + 1] else math.nan for i, name in enumerate(names)},
    )


def apply_to_each(
    engine: Engine, batches: Iterable[tuple[Any, int]], function: Metric, dtype: torch.dtype | None
) -> Iterator[tuple[Any, int]]:
    """Yields what a function of model and batch gives, with the samples; a batch of None is of other ranks alone."""
    engine.share_buffers()
    modes = [(module, module.training) for module in engine.module.modules()]
    engine.eval()
    try:
        for given, samples in batches:
            (batch,) = engine.groups.filled([given])
            if batch is None:
                engine.join_pass()
                continue
            with engine.precision.context(engine.device):
                found = engine.apply_loss(function, place(batch, engine.device, dtype))
            yield found, samples
    finally:
        for module, was_training in modes:  # one by one: a frozen part may have been in evaluation mode all along
            module.training = was_training


@torch.no_grad()
def measure_histograms(engine: Engine, weight: torch.Tensor | None = None) -> list[dict[str, Any]]:
    """Returns the histograms of all parameters, in JSON values, the same on all ranks. Waits for the device."""
    engine.gradients()  # brings them to the parameters that are updated
    rows = {name: row for row, name in enumerate(sorted(engine.state_names()))}
    device = engine.device
    sums = torch.zeros(len(rows), len(_KINDS), _COUNTS + len(EDGES) + 1, dtype=torch.float64, device=device)
    limits = torch.full((len(rows), len(_KINDS), 2), math.inf, dtype=torch.float64, device=device)
    for shard in engine.shards():
        row, parameter = rows[shard.name], shard.tensor if shard.parameter is None else shard.parameter
        is_counted = shard.copy == row % shard.copies  # copies share the work
        if not is_counted or not isinstance(parameter, torch.nn.Parameter):
            continue
        _count(shard.tensor.detach(), None, sums[row, 0], limits[row, 0])
        if parameter.grad is not None:
            _count(parameter.grad, weight, sums[row, 1], limits[row, 1])
    engine.world.all_reduce(sums).wait()
    engine.world.all_reduce(limits, "min").wait()
    found, ends = sums.cpu(), limits.cpu()  # sync point
    made: list[dict[str, Any]] = []
    for name, row in rows.items():
        kinds = {kind: _describe(found[row, i], ends[row, i]) for i, kind in enumerate(_KINDS)}
        made += [] if kinds["weights"] is None else [{"parameter": name, **kinds}]  # else a buffer
    return made


def _count(values: torch.Tensor, weight: torch.Tensor | None, sums: torch.Tensor, limits: torch.Tensor) -> None:
    for part in torch.split(values.reshape(-1), _AT_ONCE):
        each = part if part.dtype == torch.float64 else part.float()
        if weight is not None:
            each = each * weight.to(each)
        finite = each[each.isfinite()]
        places = torch.bucketize(finite, _edges(finite.device, finite.dtype), out_int32=True)
        exact = finite.double()
        head = torch.stack([exact.new_tensor(float(each.numel() - finite.numel())), exact.sum(), exact.square().sum()])
        sums += torch.cat([head, torch.bincount(places, minlength=len(EDGES) + 1).double()]).to(sums.device)
        if finite.numel():
            limits.copy_(torch.minimum(limits, torch.stack([exact.min(), -exact.max()]).to(limits.device)))


@functools.cache
def _edges(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(EDGES, dtype=dtype, device=device)


def _describe(row: torch.Tensor, limits: torch.Tensor) -> dict[str, Any] | None:
    """Returns a row as JSON values, from the first to the last bin that is not empty; None of no elements."""
    counts = [int(value) for value in row[_COUNTS:].tolist()]
    number, not_finite = sum(counts), int(row[_NOT_FINITE].item())
    if not number + not_finite:
        return None
    low, high = (limits[0].item(), -limits[1].item()) if number else (0.0, 0.0)
    starts, ends = [low, *EDGES], [*EDGES, high]  # what is behind the outermost edges goes as far as the values do
    kept: list[int] = []
    edges: list[float] = []
    for count, start, end in zip(counts, starts, ends, strict=True):
        if not count:
            continue
        if edges and edges[-1] != start:
            kept.append(0)
            edges.append(start)
        edges += [end] if edges else [start, end]
        kept.append(count)
    norm, mean = math.sqrt(row[_SQUARES].item()), row[_SUM].item() / max(number, 1)
    numbers = {"count": number, "not_finite": not_finite, "norm": norm, "min": low, "max": high, "mean": mean}
    return {**numbers, "edges": edges, "counts": kept}
