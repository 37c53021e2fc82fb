"""What a run's metrics say: curves, a picture, and a report that names the bottleneck.

    analyzer = DistributedTrainingAnalyzer(metrics)            # of SimulatedTrainer.train(), or a run's folder
    analyzer.plot_training_metrics("run.png")
    print(analyzer.generate_performance_report())

Everything comes from records, which look the same for a real run and a simulated one. For N ranks and an epoch:

    throughput           samples of all ranks / time of the steps, of which the slowest rank sets the pace
    communication_time   what a rank waited for others and for the network, mean of the ranks
    gpu_utilization      % of its steps in which a rank computed, mean of the ranks
    scaling_efficiency   compute of all ranks / (N x time of the steps): the share of N times one rank's speed
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import RunFolderError, UsageError
from paceline.notebook import Shown, curve, new_figure, table
from paceline.records.records import EvalRecord, Record, RunRecord, StepRecord, strict_json
from paceline.records.summary import StepTable, read_run
from paceline.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_Curve = list[float | None]
_SHOWN_EPOCHS = 20


class TrainingMetrics(Mapping[str, _Curve]):
    """Metrics by name, a value for each epoch; ``None`` where an epoch has none, such as accuracy without evaluation.

    Names: epoch, train_loss, test_loss, accuracy, throughput, epoch_time, compute_time, communication_time,
    gpu_utilization, scaling_efficiency, memory_bytes.
    """

    def __init__(self, curves: Mapping[str, _Curve], *, ranks: int, strategy: str, total_steps: int) -> None:
        self._curves = dict(curves)
        self.ranks = ranks
        self.strategy = strategy
        self.total_steps = total_steps

    @classmethod
    def from_records(cls, records: Sequence[Sequence[Record]]) -> TrainingMetrics:
        """Reads them from the records of each rank. Raises UsageError where there is no step."""
        steps = [{each.step: each for each in own if isinstance(each, StepRecord)} for own in records]
        known = sorted(set.intersection(*(set(own) for own in steps))) if steps else []
        if not known:
            raise UsageError("there are no steps in these records\n  metrics are made of them\n  train first")
        evaluations = [each for each in records[0] if isinstance(each, EvalRecord)]
        epochs: dict[int, list[int]] = {}
        for step in known:
            epochs.setdefault(max(1, math.ceil(steps[0][step].epoch - 1e-9)), []).append(step)
        rows = [
            _epoch_row(epoch, StepTable.of_numbers(numbers, steps), evaluations) for epoch, numbers in epochs.items()
        ]
        run = next(each for each in records[0] if isinstance(each, RunRecord))
        curves = {name: [row[name] for row in rows] for name in rows[0]}
        return cls(curves, ranks=len(records), strategy=run.strategy, total_steps=len(known))

    def __getitem__(self, name: str) -> _Curve:
        if name not in self._curves:
            raise KeyError(f"{name!r} is not a metric; they are {', '.join(self._curves)}")
        return self._curves[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._curves)

    def __len__(self) -> int:
        return len(self._curves)

    def __repr__(self) -> str:
        return f"TrainingMetrics({len(self['epoch'])} epochs, {self.ranks} ranks, {self.strategy})"

    def _repr_html_(self) -> str:
        names = ("epoch", "train_loss", "test_loss", "accuracy", "throughput", "epoch_time")
        rows = list(zip(*(self[name] for name in names), strict=True))
        charts = "".join(curve(name, self[name]) for name in ("train_loss", "accuracy", "throughput"))
        return f"<b>{self!r}</b>{table(names, rows[-_SHOWN_EPOCHS:])}{charts}"

    def to_json(self) -> dict[str, Any]:
        """Returns all curves as values of strict JSON."""
        return dict(strict_json(self._curves))


def _epoch_row(epoch: int, table: StepTable, evaluations: Sequence[EvalRecord]) -> dict[str, float | None]:
    totals, ranks, took_s = table.totals(), len(table.rows[0]), table.took_s
    first, last = table.rows[0][0].step, table.rows[-1][0].step
    evaluation = next((each for each in reversed(evaluations) if first <= each.step <= last), None)
    return {
        "epoch": epoch,
        "train_loss": totals.loss,
        "test_loss": None if evaluation is None else evaluation.loss,
        "accuracy": None if evaluation is None else evaluation.accuracy,
        "throughput": totals.samples / took_s if took_s else 0.0,
        "epoch_time": took_s,
        "compute_time": totals.compute_s / ranks,
        "communication_time": totals.comm_s / ranks,
        "gpu_utilization": 100 * totals.compute_s / totals.step_s if totals.step_s else 0.0,
        "scaling_efficiency": totals.efficiency(ranks, took_s),
        "memory_bytes": float(totals.memory_bytes),
    }


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class PerformanceReport(Shown):
    """A run in numbers, and what held it up. As text it is a few lines."""

    strategy: str
    ranks: int
    epochs: int
    steps: int
    final_train_loss: float | None
    final_test_loss: float | None
    final_accuracy: float | None
    samples_per_s: float
    training_s: float
    communication_s: float
    communication_percent: float
    utilization_percent: float
    scaling_efficiency: float
    memory_bytes: float
    bottleneck: str

    def to_json(self) -> dict[str, Any]:
        return dict(strict_json(asdict(self)))

    def facts(self) -> Mapping[str, object]:
        return dict(line.strip().split("  ", 1) for line in str(self).splitlines()[1:])

    def __str__(self) -> str:
        lines = [f"{self.strategy} on {self.ranks} ranks: {self.epochs} epochs, {self.steps} steps"]
        if self.final_train_loss is not None:
            lines.append(f"  training loss        {self.final_train_loss:.4f}")
        if self.final_accuracy is not None:
            lines.append(f"  test accuracy        {100 * self.final_accuracy:.1f} %")
        exposed = f"{self.communication_percent:.1f} % exposed"
        lines += [
            f"  throughput           {self.samples_per_s:,.0f} samples/s",
            f"  time of the steps    {format_seconds(self.training_s)}",
            f"  communication        {format_seconds(self.communication_s)}, {exposed}",
            f"  ranks compute        {self.utilization_percent:.1f} % of the time",
            f"  scaling efficiency   {100 * self.scaling_efficiency:.1f} %",
        ]
        if self.memory_bytes:
            lines.append(f"  memory of a rank     {format_bytes(self.memory_bytes)}")
        return "\n".join([*lines, f"  bottleneck           {self.bottleneck}"])


class DistributedTrainingAnalyzer:
    """Looks at the metrics of a run: those that a trainer returned, or those of a run's folder."""

    def __init__(self, metrics: TrainingMetrics | str | Path) -> None:
        """Takes metrics, or the folder of a run, real or simulated. Raises RunFolderError if it has no records."""
        if not isinstance(metrics, TrainingMetrics | str | Path):
            raise UsageError(
                f"metrics is of type {type(metrics).__name__}\n  it is what SimulatedTrainer.train() returned, or the "
                "folder of a run\n  pass one of them"
            )
        self.metrics = metrics if isinstance(metrics, TrainingMetrics) else _read_folder(Path(metrics))

    def plot_training_metrics(self, path: str | Path | None = None) -> Figure:
        """Draws loss, accuracy, throughput and where the time went, by epoch; saved if there is a ``path``.

        Returns the figure, which a notebook shows.
        """
        figure = new_figure(figsize=(10, 7), layout="constrained")
        axes = figure.subplots(2, 2)
        self._draw(axes[0][0], "loss", "train_loss", label="training")
        if _last(self.metrics["test_loss"]) is not None:
            self._draw(axes[0][0], "loss", "test_loss", label="test")
        self._draw(axes[0][1], "test accuracy", "accuracy", scale=100.0, unit="%")
        self._draw(axes[1][0], "throughput", "throughput", unit="samples/s")
        for name in ("compute_time", "communication_time"):
            title, label = "seconds of an epoch, mean of the ranks", name.partition("_")[0]
            self._draw(axes[1][1], title, name, unit="s", label=label)
        axes[0][0].legend()
        axes[1][1].legend()
        figure.suptitle(f"{self.metrics.strategy} on {self.metrics.ranks} ranks")
        if path is not None:
            try:
                figure.savefig(path)
            except (OSError, ValueError) as error:
                raise UsageError(
                    f"cannot write the picture {path}: {error}\n  its ending says the format\n  name it run.png"
                ) from error
        return figure

    def generate_performance_report(self) -> PerformanceReport:
        """Adds up all epochs, and says what to look at first."""
        metrics = self.metrics
        took_s, waited_s = _sum(metrics["epoch_time"]), _sum(metrics["communication_time"])
        compute_s = _sum(metrics["compute_time"])
        samples = sum(
            (rate or 0.0) * (seconds or 0.0)
            for rate, seconds in zip(metrics["throughput"], metrics["epoch_time"], strict=True)
        )
        share = waited_s / (compute_s + waited_s) if compute_s + waited_s else 0.0
        return PerformanceReport(
            strategy=metrics.strategy,
            ranks=metrics.ranks,
            epochs=len(metrics["epoch"]),
            steps=metrics.total_steps,
            final_train_loss=_last(metrics["train_loss"]),
            final_test_loss=_last(metrics["test_loss"]),
            final_accuracy=_last(metrics["accuracy"]),
            samples_per_s=samples / took_s if took_s else 0.0,
            training_s=took_s,
            communication_s=waited_s,
            communication_percent=100 * share,
            utilization_percent=100 * (1 - share),
            scaling_efficiency=compute_s / took_s if took_s else 0.0,
            memory_bytes=max(value or 0.0 for value in metrics["memory_bytes"]),
            bottleneck=_bottleneck(share, metrics.ranks),
        )

    def _draw(
        self, axes: Axes, title: str, name: str, *, scale: float = 1.0, unit: str = "", label: str | None = None
    ) -> None:
        values = [math.nan if value is None else scale * value for value in self.metrics[name]]
        axes.plot([epoch or 0 for epoch in self.metrics["epoch"]], values, marker="o", label=label)
        axes.set(title=title, xlabel="epoch", ylabel=unit)


def _bottleneck(share: float, ranks: int) -> str:
    if ranks == 1:
        return "one rank: nothing to wait for"
    if share < 0.1:
        return "compute: ranks hardly wait; a faster device, lower precision or compilation pays"
    if share < 0.35:
        return "communication shows: larger batches a rank, more overlap, or fewer bytes (compression) pay"
    return "communication binds: larger batches a rank, fewer ranks or a faster network pay"


def _read_folder(folder: Path) -> TrainingMetrics:
    attempts = read_run(folder)
    if not attempts:
        raise RunFolderError(
            f"no run in {folder}: it has no records/rank-<r>.jsonl\n  metrics are made of records\n"
            "  give the folder of a run, such as runs/<name>"
        )
    return TrainingMetrics.from_records(
        [[record for each in own for record in (each.run, *each.records)] for own in attempts.values()]
    )


def _sum(values: _Curve) -> float:
    return sum(value or 0.0 for value in values)


def _last(values: _Curve) -> float | None:
    return next((value for value in reversed(values) if value is not None), None)
