"""Scores the predictions on a table of published measurements.

First every row is predicted from its inputs; only then is what it measured read. A row that has no prediction, or no
number that was measured, is listed with its reason. A measured value "OOM" says that the run did not fit.

error        predicted / measured - 1, in the row's own metric; mean of absolute values, median, p90, and bias
held out     the same by constants that were fitted without any row of the family (held_out.py); a family that no
             constant was fitted on is held out as it is
coverage     the share of rows whose time lies in the band of their prediction
overall      the mean over families, so that a long table does not drown a short one
Spearman     of predicted and measured ranks within groups of 4 and more alternatives (same model, batch and devices)
regret       what the alternative predicted best takes over the best one, less 1
efficiency   throughput per device over that on the fewest devices of a group; its error is in points
"""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from paceline.plan.workload import Shown
from paceline.predict.formulas.step import model_flops
from paceline_bench.scored.held_out import held_out
from paceline_bench.scored.measured_table import Row, RowError, Table
from paceline_bench.scored.published import in_metric, predict_case, read_case

MEMORY = "mem_gib"
_SHAPE = ("model_family", "params_b", "layers", "hidden", "seq_len", "gpu", "precision")
_ALTERNATIVES = (*_SHAPE, "global_batch", "n_gpus")
_SCALED = (*_SHAPE, "micro_batch", "tp", "pp", "cp", "zero_stage_or_fsdp", "activation_recompute", "compile")
LEAST_ALTERNATIVES = 4
_SCORES = ("held_out", "time", "memory", "ranking", "scaling")


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorScores:
    rows: int
    mean: float
    median: float
    p90: float
    bias: float


def errors_of(pairs: Sequence[tuple[float, float]]) -> ErrorScores | None:
    """Scores pairs of (measured, predicted); None where there are none."""
    if not pairs:
        return None
    signed = [predicted / measured - 1 for measured, predicted in pairs]
    sizes = sorted(abs(each) for each in signed)
    return ErrorScores(
        rows=len(pairs),
        mean=statistics.fmean(sizes),
        median=statistics.median(sizes),
        p90=sizes[math.ceil(0.9 * len(sizes)) - 1],
        bias=statistics.fmean(signed),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    groups: int
    alternatives: int
    spearman: float
    mean_regret: float
    worst_regret: float
    top_three: float


def ranking_of(groups: Sequence[Sequence[tuple[float, float]]]) -> Ranking | None:
    """Scores groups of (measured, predicted) times, less being better; None where none is large enough."""
    kept = [group for group in groups if len(group) >= LEAST_ALTERNATIVES]
    if not kept:
        return None
    best = [min(measured for measured, _ in group) for group in kept]
    by_prediction = [[measured for measured, _ in sorted(group, key=lambda pair: pair[1])] for group in kept]
    regrets = [order[0] / least - 1 for order, least in zip(by_prediction, best, strict=True)]
    return Ranking(
        groups=len(kept),
        alternatives=sum(map(len, kept)),
        spearman=statistics.fmean(spearman(group) for group in kept),
        mean_regret=statistics.fmean(regrets),
        worst_regret=max(regrets),
        top_three=statistics.fmean(least in order[:3] for order, least in zip(by_prediction, best, strict=True)),
    )


def spearman(group: Sequence[tuple[float, float]]) -> float:
    """Returns the rank correlation; equal values share their mean rank. 0 where one side does not vary."""
    left, right = (
        [order.index(value) + (order.count(value) - 1) / 2 for value in values]
        for values, order in ((side, sorted(side)) for side in zip(*group, strict=True))
    )
    return 0.0 if len(set(left)) == 1 or len(set(right)) == 1 else statistics.correlation(left, right)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingScore:
    """Efficiency on more devices: its mean absolute error in points, and errors of throughput given the first row."""

    groups: int
    rows: int
    points: float
    given_first: ErrorScores


def scaling_of(groups: Sequence[Sequence[tuple[int, float, float]]]) -> ScalingScore | None:
    """Scores groups of (devices, measured, predicted) throughput per device; None where no group has two counts."""
    points, pairs, used = [], [], 0
    for group in groups:
        first = min(devices for devices, _, _ in group)
        bases = [(measured, predicted) for devices, measured, predicted in group if devices == first]
        measured_base, predicted_base = (statistics.fmean(side) for side in zip(*bases, strict=True))
        more = [each for each in group if each[0] > first]
        used += bool(more)
        for _, measured, predicted in more:
            points.append(100 * abs(predicted / predicted_base - measured / measured_base))
            pairs.append((measured, predicted / predicted_base * measured_base))
    found = errors_of(pairs)
    if found is None:
        return None
    return ScalingScore(groups=used, rows=len(pairs), points=statistics.fmean(points), given_first=found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A row with its prediction and what was measured, both in the row's metric; ``skipped`` says why not."""

    row: Row
    predicted: float | None = None
    fits: bool = True
    outside: tuple[str, ...] = ()
    flops: float = 0.0
    held_out: float | None = None
    bands: tuple[float, float] = (0.0, 0.0)  # of the prediction and of the one held out, as shares of them
    measured: float | None = None
    ran_out: bool = False
    skipped: str = ""

    @property
    def pair(self) -> tuple[float, float] | None:
        return None if self.measured is None or self.predicted is None else (self.measured, self.predicted)

    @property
    def times(self) -> tuple[float, float]:
        """The same as times, less being better, of a row that has both."""
        assert self.pair is not None
        measured, predicted = self.pair
        return self.pair if self.row.metric == "step_time_s" else (1 / measured, 1 / predicted)

    @property
    def in_bands(self) -> tuple[bool, bool]:
        """Whether the measured time lies in the band of the prediction, and of the one held out."""
        assert self.measured
        assert self.predicted
        assert self.held_out
        sides = (
            (predicted / self.measured, band)
            for predicted, band in zip((self.predicted, self.held_out), self.bands, strict=True)
        )
        slower = self.row.metric == "step_time_s"
        first, second = (abs((1 / ratio if slower else ratio) - 1) <= band for ratio, band in sides)
        return first, second

    @property
    def is_memory(self) -> bool:
        return self.row.metric == MEMORY


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyScores:
    """What is scored of each family, and of all rows alike; None where no row tells it.

    ``baseline``: one rate of FLOPs for each kind of device, fitted on these very rows. ``held_out``: step time by
    constants that were fitted without the family.
    """

    family: str = ""
    baseline: float | None = None
    held_out: ErrorScores | None
    coverage: float | None
    held_out_coverage: float | None
    time: ErrorScores | None
    memory: ErrorScores | None
    ranking: Ranking | None
    scaling: ScalingScore | None

    def scores_json(self) -> dict[str, Any]:
        scores = {name: getattr(self, name) and asdict(getattr(self, name)) for name in _SCORES}
        return scores | {"coverage": self.coverage, "held_out_coverage": self.held_out_coverage}


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation(FamilyScores):
    """All scores of a table. ``inside``, ``outside``: those of step time where constants were fitted, and elsewhere."""

    source: str
    split: str | None
    rows: tuple[Scored, ...]
    families: tuple[FamilyScores, ...]
    inside: ErrorScores | None
    outside: ErrorScores | None
    mean_over_families: float | None
    held_out_mean_over_families: float | None
    ran_out: int
    false_fits: int  # ran out of memory, and were said to fit
    false_misfits: int  # ran, and were not

    @property
    def skipped(self) -> tuple[Scored, ...]:
        return tuple(each for each in self.rows if each.skipped)

    @property
    def has_scores(self) -> bool:
        """Whether anything was scored: a time, memory, or the question whether a run fits."""
        return any(each.predicted is not None and (each.measured is not None or each.ran_out) for each in self.rows)


def validate(table: Table, split: str | None = None) -> Validation:
    """Predicts the rows of a table, then scores them. Raises UsageError for a split that it does not have."""
    chosen = table.of_split(split)
    predicted = [_predict(row, shown) for row, shown in zip(chosen.rows, _shown(chosen.rows), strict=True)]
    rows = tuple(_with_result(each, text) for each, text in zip(predicted, chosen.measured, strict=True))
    # Rows of other splits on fewer devices that a row's scaling is told from: "given the 1-GPU row".
    have, wanted = {each.row.id for each in rows}, {_key(each, _SCALED) for each in rows}
    references = [
        _with_result(_predict(row, "all"), text)
        for row, text in zip(table.rows, table.measured, strict=True)
        if row.id not in have and row.metric != MEMORY and _key(Scored(row=row), _SCALED) in wanted
    ]
    families = tuple(
        FamilyScores(
            family=name,
            baseline=_baseline(group),
            **_scores(group, [each for each in references if each.row.family == name]),
        )
        for name, group in _grouped(rows, lambda each: each.row.family)
    )
    told = [each for each in rows if each.predicted is not None]
    return Validation(
        source=table.source,
        split=split,
        rows=rows,
        families=families,
        inside=errors_of(_pairs((each for each in rows if not each.outside), memory=False)),
        outside=errors_of(_pairs((each for each in rows if each.outside), memory=False)),
        mean_over_families=_mean(each.time.mean for each in families if each.time),
        held_out_mean_over_families=_mean(each.held_out.mean for each in families if each.held_out),
        ran_out=sum(each.ran_out for each in told),
        false_fits=sum(each.ran_out and each.fits for each in told),
        false_misfits=sum(not each.fits and each.measured is not None and not each.is_memory for each in rows),
        **_scores(rows, references),
    )


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return statistics.fmean(found) if found else None


def _scores(rows: Sequence[Scored], references: Sequence[Scored]) -> dict[str, Any]:
    timed = _timed(rows)
    alternatives = _grouped(timed, lambda each: _key(each, _ALTERNATIVES))
    return {
        "held_out": errors_of([(each.measured, each.held_out) for each in timed if each.measured and each.held_out]),
        "coverage": _mean(each.in_bands[0] for each in timed),
        "held_out_coverage": _mean(each.in_bands[1] for each in timed),
        "time": errors_of(_pairs(rows, memory=False)),
        "memory": errors_of(_pairs(rows, memory=True)),
        "ranking": ranking_of([[each.times for each in group] for _, group in alternatives]),
        "scaling": scaling_of(_scaled(rows, references)),
    }


def _shown(rows: Sequence[Row]) -> list[Shown]:
    """What a row of memory counts. Where a table lists states apart, whatever is recomputed ("any"), its other rows of
    such runs count activations alone."""
    keys = ("model_family", "zero_stage_or_fsdp", "precision", "gpu")
    runs = [tuple(row.text[key] for key in keys) if row.metric == MEMORY else () for row in rows]
    is_any = [row.text["activation_recompute"].lower() == "any" for row in rows]
    apart = {run for run, of_any in zip(runs, is_any, strict=True) if run and of_any}
    return [
        "all" if run not in apart else "states" if of_any else "activations"
        for run, of_any in zip(runs, is_any, strict=True)
    ]


def _predict(row: Row, shown: Shown) -> Scored:
    try:
        case = read_case(row)
    except RowError as error:
        return Scored(row=row, skipped=f"line {row.line}, {error}")
    case = replace(case, workload=replace(case.workload, run=replace(case.workload.run, shown=shown)))
    prediction = predict_case(case)
    without = held_out().get(row.family)
    apart = prediction if without is None or row.metric == MEMORY else predict_case(case, without)
    workload = prediction.workload
    # Model FLOPs on one device behind one unit of throughput, or behind a step where the metric is its time.
    tokens = 1 if workload.model.is_sampled else workload.run.seq_len
    ranks, metric = workload.layout.ranks, case.metric
    many = {"step_time_s": workload.global_batch, "tflops_per_gpu": 0, "mfu_pct": 0, MEMORY: 0}.get(metric, 1)
    devices = tokens if metric == "tokens_per_s_per_gpu" else ranks
    return Scored(
        row=row,
        predicted=in_metric(case, prediction),
        fits=prediction.fits,
        outside=prediction.outside,
        held_out=in_metric(case, apart),
        bands=(prediction.error, apart.error),
        flops=model_flops(workload, in_full=True) * many / devices or 1.0,
    )


def _with_result(scored: Scored, text: str) -> Scored:
    if text.strip().lower() in ("oom", "out of memory"):
        return replace(scored, ran_out=True, skipped=scored.skipped or "ran out of memory: nothing was measured")
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not 0 < value < float("inf"):
        why = f"line {scored.row.line}, column value: {text!r} is not a number above 0"
        return replace(scored, skipped=scored.skipped or why)
    return replace(scored, measured=value)


def _pairs(rows: Iterable[Scored], *, memory: bool) -> list[tuple[float, float]]:
    return [each.pair for each in rows if each.is_memory is memory and each.pair is not None]


def _grouped(rows: Iterable[Scored], key: Any) -> list[tuple[Any, list[Scored]]]:
    found: dict[Hashable, list[Scored]] = defaultdict(list)
    for row in rows:
        found[key(row)].append(row)
    return list(found.items())


def _timed(rows: Iterable[Scored]) -> list[Scored]:
    return [each for each in rows if not each.is_memory and each.pair is not None]


def _baseline(rows: Sequence[Scored]) -> float | None:
    """The mean absolute error of "so many FLOP/s for this device", the median of these rows."""
    errors = []
    for _, group in _grouped(_timed(rows), lambda each: _key(each, ("gpu", "precision"))):
        slower = group[0].row.metric == "step_time_s"
        pairs = [(each.measured, each.flops) for each in group if each.measured]
        rates = [flops / measured if slower else measured * flops for measured, flops in pairs]
        rate = statistics.median(rates)
        errors += [abs((own / rate if slower else rate / own) - 1) for own in rates]
    return statistics.fmean(errors) if errors else None


def _scaled(rows: Iterable[Scored], references: Iterable[Scored]) -> list[list[tuple[int, float, float]]]:
    """Groups that differ in the number of devices. Of rows that are not scored, those on the fewest devices count."""
    apart = dict(_grouped(_timed(references), lambda each: _key(each, _SCALED)))
    found = []
    for key, group in _grouped(_timed(rows), lambda each: _key(each, _SCALED)):
        own = [_per_device(each) for each in group]
        others = [_per_device(each) for each in apart.get(key, ())]
        first = min(devices for devices, _, _ in (*own, *others))
        found.append([*own, *(each for each in others if each[0] == first)])
    return found


def _key(each: Scored, columns: Sequence[str]) -> Hashable:
    return (each.row.family, each.row.metric, *(each.row.text.get(column, "") for column in columns))


def _per_device(each: Scored) -> tuple[int, float, float]:
    """Devices, and throughput per device: measured and predicted, in one unit for all rows of a group."""
    assert each.pair is not None
    devices = each.row.whole("n_gpus")
    measured, predicted = each.pair
    if each.row.metric in ("img_per_s", "seq_per_s"):
        return devices, measured / devices, predicted / devices
    if each.row.metric == "step_time_s":
        batch = each.row.number("global_batch") or 1.0
        return devices, batch / measured / devices, batch / predicted / devices
    return devices, measured, predicted


def rows_csv(validation: Validation) -> str:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(("id", "metric_name", "measured", "predicted", "skipped"))
    for each in validation.rows:
        measured = "OOM" if each.ran_out else "" if each.measured is None else f"{each.measured:.9g}"
        predicted = "" if each.predicted is None else f"{each.predicted:.6g}"
        writer.writerow((each.row.id, each.row.metric, measured, predicted, each.skipped))
    return file.getvalue()


def to_json(validation: Validation) -> dict[str, Any]:
    return {
        "source": validation.source,
        "split": validation.split,
        "rows": len(validation.rows),
        "overall": {
            "held_out_mean_over_families": validation.held_out_mean_over_families,
            "mean_over_families": validation.mean_over_families,
            **validation.scores_json(),
            "inside_calibrated_domain": validation.inside and asdict(validation.inside),
            "outside_calibrated_domain": validation.outside and asdict(validation.outside),
            "ran_out_of_memory": validation.ran_out,
            "false_fits": validation.false_fits,
            "false_misfits": validation.false_misfits,
        },
        "families": {each.family: each.scores_json() | {"baseline": each.baseline} for each in validation.families},
        "skipped": [{"id": each.row.id, "reason": each.skipped} for each in validation.skipped],
    }
