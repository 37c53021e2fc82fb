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
_PICTURE = "training_metrics.png"


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
        self.run, self.alone = records.run, alone
        epochs: dict[int, list[Mapping[int, StepRecord]]] = {}
        for row in records.steps.rows:
            epoch = next(iter(row.values())).epoch
            epochs.setdefault(max(1, math.ceil(epoch - 1e-9)), []).append(row)
        evaluations = [each for attempt in records.lead for each in attempt.evaluations]
        rows = [_epoch_row(epoch, StepTable(own), evaluations, records.hosts) for epoch, own in epochs.items()]
        super().__init__({name: [row[name] for row in rows] for name in rows[0]})
        self.totals, took_s = records.steps.totals(), records.steps.took_s
        self.samples_per_s = self.totals.samples / took_s if took_s else 0.0  # of all epochs
        self.ranks, self.strategy, self.total_steps = len(records.ranks), records.run.strategy, len(records.steps)
        ranks = list(map(records.of_rank, records.ranks))
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
    used = [  # what the drivers of all GPUs said
        value
        for each in hosts
        for name, value in each.values.items()
        if first.time - first.step_s <= each.time <= last.time and name.partition("/")[0] == "hw.gpu.utilization"
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


class PerformanceReport(Shown):
    """A run in numbers, and what held it up. As text it is a few lines."""

    def __init__(self, metrics: TrainingMetrics, base: TrainingMetrics | None, scaling: str) -> None:
        """Adds up all epochs; speed-up and efficiency, where they are known, are against ``base``."""
        used = [value for value in metrics["gpu_utilization"] if value is not None]
        share = metrics.totals.comm_share
        self.strategy, self.ranks = metrics.strategy, metrics.ranks
        self.epochs, self.steps = len(metrics["epoch"]), metrics.total_steps
        self.final_train_loss = _last(metrics["train_loss"])
        self.final_test_loss = _last(metrics["test_loss"])
        self.final_accuracy = _last(metrics["accuracy"])
        self.samples_per_s = metrics.samples_per_s
        self.training_s = sum(value or 0.0 for value in metrics["epoch_time"])
        self.communication_s = sum(value or 0.0 for value in metrics["communication_time"])
        self.communication_percent, self.compute_percent = 100 * share, 100 * (1 - share)
        self.gpu_utilization_percent = sum(used) / len(used) if used else None
        self.memory_bytes = max(value or 0.0 for value in metrics["memory_bytes"])
        self.is_simulated = metrics.is_simulated
        self.speed_up, self.scaling = (1.0 if metrics.ranks == 1 else None), ""
        if base is not None and base.samples_per_s:
            where = "one rank" if base.ranks == 1 else f"a rank of {base.ranks}"
            kept = "global batch" if scaling == "strong" else "batch of a rank"
            self.speed_up = metrics.samples_per_s / (base.samples_per_s / base.ranks)
            self.scaling = f"{scaling} scaling: {where} with the same {kept}"
        self.scaling_efficiency = None if self.speed_up is None else self.speed_up / metrics.ranks
        self.bottleneck = metrics.limits.sentence.removeprefix("limited by ")

    def to_json(self) -> dict[str, Any]:
        return dict(strict_json(vars(self)))

    def facts(self) -> Mapping[str, object]:
        loss, accuracy, used = self.final_train_loss, self.final_accuracy, self.gpu_utilization_percent
        speed = "" if self.speed_up is None else f"{self.speed_up:.2f} x of one rank, ideal {self.ranks} x"
        efficiency = "not known: give the run on one rank as baseline=..."
        if self.scaling_efficiency is not None:
            kept = f"; {self.scaling}" if self.scaling else ""
            efficiency = f"{100 * self.scaling_efficiency:.1f} %, speed-up / ranks{kept}"
        source = "modelled" if self.is_simulated else "measured"
        told = {
            "training loss": "" if loss is None else f"{loss:.4f}",
            "test accuracy": "" if accuracy is None else f"{100 * accuracy:.1f} %",
            "throughput": f"{self.samples_per_s:,.0f} samples/s",
            "time of the steps": format_seconds(self.training_s),
            "communication": f"{format_seconds(self.communication_s)}, {self.communication_percent:.1f} % exposed",
            "ranks compute": f"{self.compute_percent:.1f} % of the time",
            "GPU utilization": "" if used is None else f"{used:.1f} %, {source}",
            "speed-up": speed,
            "scaling efficiency": efficiency,
            "memory of a rank": format_bytes(self.memory_bytes) if self.memory_bytes else "",
            "bottleneck": self.bottleneck,
        }
        return {name: text for name, text in told.items() if text}

    def __str__(self) -> str:
        first = f"{self.strategy} on {self.ranks} ranks: {self.epochs} epochs, {self.steps} steps"
        return "\n".join([first, *(f"  {name:<20} {text}" for name, text in self.facts().items())])


# The charts: title, unit, factor, and the curves with their labels.
_CHARTS: tuple[tuple[str, str, float, dict[str, str]], ...] = (
    ("loss", "", 1.0, {"train_loss": "training", "test_loss": "test"}),
    ("test accuracy", "%", 100.0, {"accuracy": ""}),
    ("throughput", "samples/s", 1.0, {"throughput": ""}),
    ("seconds of an epoch, mean of the ranks", "s", 1.0, {f"{x}_time": x for x in ("compute", "communication")}),
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
        options: dict[str, Any] = {"figsize": (18, 7), "layout": "constrained"}
        if show:  # matplotlib's own windows, outside of notebooks too
            from matplotlib import pyplot

            figure = pyplot.figure(**options)
        else:
            figure = new_figure(**options)
        axes, epochs = list(figure.subplots(2, 4).flat), _scaled(self.metrics["epoch"], 1.0)
        for own, (title, unit, factor, curves) in zip(axes, _CHARTS, strict=False):
            lines = [
                Line(epochs, _scaled(self.metrics[name], factor), label, _POINTS)
                for name, label in curves.items()
                if not label or _last(self.metrics[name]) is not None
            ]
            draw_lines(own, lines, title=title, xlabel="epoch", ylabel=unit)
        axes[4].set_ylim(0, 105)
        self._draw_phases(axes[6], axes[7])
        figure.suptitle(f"{self.metrics.strategy} on {self.metrics.ranks} ranks")
        is_unseen = path is None and not show and not is_notebook()
        if is_unseen or path is not None:
            save_picture(figure, Path(path or _PICTURE))
        if is_unseen:
            echo(f"the charts of the training are in {Path(_PICTURE).resolve()}")
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
        return PerformanceReport(self.metrics, self.baseline, self._scaling)


def _metrics_of(metrics: TrainingMetrics | str | Path) -> TrainingMetrics:
    if isinstance(metrics, str | Path):
        return TrainingMetrics(open_run(Path(metrics), with_hosts=True))
    if not isinstance(metrics, TrainingMetrics):
        raise UsageError(
            f"metrics is of type {type(metrics).__name__}\n  it is what train() returned, or a run's folder"
        )
    return metrics


def _scaled(values: _Curve, factor: float) -> list[float]:
    return [math.nan if value is None else factor * value for value in values]


def _last(values: _Curve) -> float | None:
    return next((value for value in reversed(values) if value is not None), None)
