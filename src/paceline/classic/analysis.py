"""What a run's metrics say: curves, a picture, and a report that names the bottleneck.

    analyzer = DistributedTrainingAnalyzer(metrics)            # of SimulatedTrainer.train(), or a run's folder
    analyzer = DistributedTrainingAnalyzer("runs/four", baseline="runs/one")      # the same on one rank
    analyzer.plot_training_metrics("run.png")
    print(analyzer.generate_performance_report())

Everything comes from records, which look the same for a real run and a simulated one. For N ranks and an epoch:

    throughput           samples of all ranks / time of the steps, of which the slowest rank sets the pace
    communication_time   what a rank waited for others and for the network, mean of the ranks
    gpu_utilization      % as the driver says it, or of modelled kernels; absent where nobody knows it
    compute_share        % of its steps in which a rank did not wait for others, mean of the ranks
    speed_up             throughput / that of one rank, of a baseline run or of a simulation's own few steps
    scaling_efficiency   speed_up / N; ``scaling`` is strong or weak, by what the baseline keeps
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.charts import Line, draw_lines, save_picture
from paceline.errors import UsageError
from paceline.notebook import Shown, curve, is_notebook, new_figure, table
from paceline.records.comparison import scaling_between
from paceline.records.facts import RunFacts
from paceline.records.limits import judge_run
from paceline.records.records import EvalRecord, HostRecord, StepRecord, strict_json
from paceline.records.summary import PHASES, RunRecords, StepTable, open_run
from paceline.terminal import echo
from paceline.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_Curve = list[float | None]
_SHOWN_EPOCHS = 20
_POINTS = {"marker": "o"}


class TrainingMetrics(dict[str, _Curve]):
    """Metrics by name, a value for each epoch; ``None`` where an epoch has none, such as accuracy without evaluation.

    Names: epoch, train_loss, test_loss, accuracy, throughput, epoch_time, compute_time, communication_time,
    compute_share, gpu_utilization, memory_bytes. ``phases`` has the seconds of each phase by rank, ``limits`` the
    verdict on what limited the run, ``alone`` the same on one rank, where a simulation has tried it.
    """

    def __init__(self, records: RunRecords, alone: TrainingMetrics | None = None) -> None:
        """Takes what the ranks and hosts of a run wrote. Raises UsageError where there is no step."""
        if not records.attempts:
            raise UsageError("there are no steps in these records\n  metrics are made of them\n  train first")
        evaluations = [each for attempt in records.lead for each in attempt.evaluations]
        epochs: dict[int, list[Mapping[int, StepRecord]]] = {}
        for row in records.steps.rows:
            epoch = next(iter(row.values())).epoch
            epochs.setdefault(max(1, math.ceil(epoch - 1e-9)), []).append(row)
        rows = [_epoch_row(epoch, StepTable(own), evaluations, records.hosts) for epoch, own in epochs.items()]
        super().__init__({name: [row[name] for row in rows] for name in rows[0]})
        ranks, took_s = list(map(records.of_rank, records.ranks)), records.steps.took_s
        self.totals, self.run, self.alone = records.steps.totals(), records.run, alone
        self.samples_per_s = (
            self.totals.samples / took_s if took_s else 0.0
        )  # of all epochs, by the time of their steps
        self.ranks, self.strategy, self.total_steps = len(ranks), records.run.strategy, len(records.steps)
        self.phases = {phase: [getattr(each, phase) for each in ranks] for phase in PHASES}
        self.limits = judge_run(RunFacts.of(records))

    @property
    def is_simulated(self) -> bool:
        """Whether the times are those of virtual ranks."""
        return self.run.backend == "virtual"

    def __missing__(self, name: str) -> _Curve:
        raise KeyError(f"{name!r} is not a metric; they are {', '.join(self)}")

    def __repr__(self) -> str:
        return f"TrainingMetrics({len(self['epoch'])} epochs, {self.ranks} ranks, {self.strategy})"

    def _repr_html_(self) -> str:
        names = ("epoch", "train_loss", "test_loss", "accuracy", "throughput", "epoch_time")
        rows = list(zip(*(self[name] for name in names), strict=True))
        charts = "".join(curve(name, self[name]) for name in ("train_loss", "accuracy", "throughput"))
        return f"<b>{self!r}</b>{table(names, rows[-_SHOWN_EPOCHS:])}{charts}"

    def to_json(self) -> dict[str, Any]:
        """Returns all curves as values of strict JSON."""
        return dict(strict_json(dict(self)))


def _epoch_row(
    epoch: int, table: StepTable, evaluations: Sequence[EvalRecord], hosts: Sequence[HostRecord]
) -> dict[str, float | None]:
    totals, ranks, took_s = table.totals(), len(table.rows[0]), table.took_s
    first, last = (next(iter(table.rows[place].values())) for place in (0, -1))
    begin_s, end_s = first.time - first.step_s, last.time
    used = [  # what the drivers of all GPUs said
        value
        for each in hosts
        for name, value in each.values.items()
        if begin_s <= each.time <= end_s and name.partition("/")[0] == "hw.gpu.utilization"
    ]
    evaluation = next((each for each in reversed(evaluations) if first.step <= each.step <= last.step), None)
    return {
        "epoch": epoch,
        "train_loss": totals.loss,
        "test_loss": None if evaluation is None else evaluation.loss,
        "accuracy": None if evaluation is None else evaluation.accuracy,
        "throughput": totals.samples / took_s if took_s else 0.0,
        "epoch_time": took_s,
        "compute_time": totals.compute_s / ranks,
        "communication_time": totals.comm_s / ranks,
        "compute_share": 100 * totals.compute_s / totals.total_s if totals.total_s else 0.0,
        "gpu_utilization": 100 * sum(used) / len(used) if used else None,
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
    compute_percent: float
    gpu_utilization_percent: float | None
    speed_up: float | None
    scaling_efficiency: float | None
    scaling: str
    memory_bytes: float
    bottleneck: str
    is_simulated: bool = False

    def to_json(self) -> dict[str, Any]:
        return dict(strict_json(asdict(self)))

    def facts(self) -> Mapping[str, object]:
        told: dict[str, object] = {}
        if self.final_train_loss is not None:
            told["training loss"] = f"{self.final_train_loss:.4f}"
        if self.final_accuracy is not None:
            told["test accuracy"] = f"{100 * self.final_accuracy:.1f} %"
        told["throughput"] = f"{self.samples_per_s:,.0f} samples/s"
        told["time of the steps"] = format_seconds(self.training_s)
        exposed = f"{self.communication_percent:.1f} % exposed"
        told["communication"] = f"{format_seconds(self.communication_s)}, {exposed}"
        told["ranks compute"] = f"{self.compute_percent:.1f} % of the time"
        if self.gpu_utilization_percent is not None:
            source = "modelled" if self.is_simulated else "measured"
            told["GPU utilization"] = f"{self.gpu_utilization_percent:.1f} %, {source}"
        if self.scaling_efficiency is None or self.speed_up is None:
            told["scaling efficiency"] = "not known: give the run on one rank as baseline=..."
        else:
            told["speed-up"] = f"{self.speed_up:.2f} x of one rank, ideal {self.ranks} x"
            kept = f"; {self.scaling}" if self.scaling else ""
            told["scaling efficiency"] = f"{100 * self.scaling_efficiency:.1f} %, speed-up / ranks{kept}"
        if self.memory_bytes:
            told["memory of a rank"] = format_bytes(self.memory_bytes)
        return told | {"bottleneck": self.bottleneck}

    def __str__(self) -> str:
        first = f"{self.strategy} on {self.ranks} ranks: {self.epochs} epochs, {self.steps} steps"
        return "\n".join([first, *(f"  {name:<20} {text}" for name, text in self.facts().items())])


# The charts: title, unit, factor, and the curves with their labels.
_CHARTS: tuple[tuple[str, str, float, dict[str, str]], ...] = (
    ("loss", "", 1.0, {"train_loss": "training", "test_loss": "test"}),
    ("test accuracy", "%", 100.0, {"accuracy": ""}),
    ("throughput", "samples/s", 1.0, {"throughput": ""}),
    (
        *("seconds of an epoch, mean of the ranks", "s", 1.0),
        {"compute_time": "compute", "communication_time": "communication"},
    ),
    ("utilisation", "%", 1.0, {"compute_share": "ranks compute", "gpu_utilization": "GPU"}),
    ("memory of a rank", "MiB", 2.0**-20, {"memory_bytes": ""}),
)


class DistributedTrainingAnalyzer:
    """Looks at the metrics of a run: those that a trainer returned, or those of a run's folder."""

    def __init__(
        self, metrics: TrainingMetrics | str | Path, baseline: TrainingMetrics | str | Path | None = None
    ) -> None:
        """Takes metrics, or the folder of a run, real or simulated. Raises RunFolderError if it has no records.

        ``baseline`` is the same training on one rank, or on fewer: speed-up and efficiency are against it. Raises
        UsageError for one that differs in more: another model, or another global batch and another batch of a rank.
        """
        self.metrics = _metrics_of(metrics)
        self.baseline = self.metrics.alone if baseline is None else _metrics_of(baseline)
        self._scaling = "" if self.baseline is None else scaling_between(self.metrics.run, self.baseline.run)

    def plot_training_metrics(self, path: str | Path | None = None, *, show: bool = False) -> Figure:
        """Draws eight charts into ``path``, or a window (``show``); returns the figure, for a notebook.

        A script that asks for neither finds them in ``training_metrics.png``, which is said.
        """
        if show:  # matplotlib's own windows, outside of notebooks too
            from matplotlib import pyplot

            figure = pyplot.figure(figsize=(18, 7), layout="constrained")
        else:
            figure = new_figure(figsize=(18, 7), layout="constrained")
        axes, epochs = list(figure.subplots(2, 4).flat), _scaled(self.metrics["epoch"], 1.0)
        for own, (title, unit, factor, curves) in zip(axes, _CHARTS, strict=False):
            known = {
                name: label for name, label in curves.items() if not label or _last(self.metrics[name]) is not None
            }
            lines = [Line(epochs, _scaled(self.metrics[name], factor), label, _POINTS) for name, label in known.items()]
            draw_lines(own, lines, title=title, xlabel="epoch", ylabel=unit)
        axes[4].set_ylim(0, 105)
        self._draw_phases(axes[6], axes[7])
        figure.suptitle(f"{self.metrics.strategy} on {self.metrics.ranks} ranks")
        is_unseen = path is None and not show and not is_notebook()
        path = Path("training_metrics.png") if is_unseen else path
        if path is not None:
            save_picture(figure, Path(path))
        if is_unseen:
            echo(f"the charts of the training are in {Path('training_metrics.png').resolve()}")
        if show:
            figure.show()
        return figure

    def _draw_phases(self, balance: Axes, shares: Axes) -> None:
        """Draws the phases of each rank, which are in balance where bars are of one height, and their shares."""
        phases = {phase.removesuffix("_s"): seconds for phase, seconds in self.metrics.phases.items()}
        ranks = list(range(len(next(iter(phases.values()), ()))))
        below = [0.0 for _ in ranks]
        for phase, seconds in phases.items():
            balance.bar(ranks, list(seconds), bottom=below, label=phase)
            below = [low + each for low, each in zip(below, seconds, strict=True)]
        balance.set(title="balance of the ranks", xlabel="rank", ylabel="s")
        balance.set_xticks(ranks)
        if phases:
            balance.legend(fontsize="small")
        shares.barh(list(phases), [100 * sum(seconds) / (sum(below) or 1.0) for seconds in phases.values()])
        shares.invert_yaxis()
        limited = self.metrics.limits.what
        shares.set(title=f"bottleneck: {limited}" if limited != "unknown" else "where steps spend time", xlabel="%")

    def generate_performance_report(self) -> PerformanceReport:
        """Adds up all epochs, and says what to look at first."""
        metrics = self.metrics
        share, rate = metrics.totals.comm_share, metrics.samples_per_s
        speed_up, scaling, base = (1.0 if metrics.ranks == 1 else None), "", self.baseline
        if base is not None and base.samples_per_s:
            where = "one rank" if base.ranks == 1 else f"a rank of {base.ranks}"
            kept = "global batch" if self._scaling == "strong" else "batch of a rank"
            speed_up = rate / (base.samples_per_s / base.ranks)
            scaling = f"{self._scaling} scaling: {where} with the same {kept}"
        measured = [value for value in metrics["gpu_utilization"] if value is not None]
        found = metrics.limits.sentence.removeprefix("limited by ") if metrics.limits.found else ""
        return PerformanceReport(
            strategy=metrics.strategy,
            ranks=metrics.ranks,
            epochs=len(metrics["epoch"]),
            steps=metrics.total_steps,
            final_train_loss=_last(metrics["train_loss"]),
            final_test_loss=_last(metrics["test_loss"]),
            final_accuracy=_last(metrics["accuracy"]),
            samples_per_s=rate,
            training_s=sum(value or 0.0 for value in metrics["epoch_time"]),
            communication_s=sum(value or 0.0 for value in metrics["communication_time"]),
            communication_percent=100 * share,
            compute_percent=100 * (1 - share),
            gpu_utilization_percent=sum(measured) / len(measured) if measured else None,
            speed_up=speed_up,
            scaling_efficiency=None if speed_up is None else speed_up / metrics.ranks,
            scaling=scaling,
            memory_bytes=max(value or 0.0 for value in metrics["memory_bytes"]),
            bottleneck=found or (_bottleneck(share) if metrics.ranks > 1 else "one rank: nothing to wait for"),
            is_simulated=metrics.is_simulated,
        )


def _bottleneck(share: float) -> str:
    if share < 0.1:
        return "compute: ranks hardly wait; a faster device, lower precision or compilation pays"
    if share < 0.35:
        return "communication shows: larger batches a rank, more overlap, or fewer bytes (compression) pay"
    return "communication binds: larger batches a rank, fewer ranks or a faster network pay"


def _metrics_of(metrics: TrainingMetrics | str | Path) -> TrainingMetrics:
    if not isinstance(metrics, TrainingMetrics | str | Path):
        raise UsageError(
            f"metrics is of type {type(metrics).__name__}\n  it is what train() returned, or a run's folder"
        )
    if isinstance(metrics, TrainingMetrics):
        return metrics
    return TrainingMetrics(open_run(Path(metrics), with_hosts=True))


def _scaled(values: _Curve, factor: float) -> list[float]:
    return [math.nan if value is None else factor * value for value in values]


def _last(values: _Curve) -> float | None:
    return next((value for value in reversed(values) if value is not None), None)
