"""Runs side by side: how speed grows with ranks, and what changed from one run to the next.

    speed-up     rate / (rate of the run with the fewest ranks / its ranks)
    efficiency   speed-up / ranks: 1 where every rank brings as much as a rank of that run

The rate is samples a second of all ranks, in the median step. Both say something where ranks are what differs: the
model is the same, and so is the global batch (strong scaling) or the batch of a rank (weak scaling). Larger batches
alone make a device faster, whatever the ranks do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from paceline.errors import UsageError
from paceline.records.console import format_loss
from paceline.records.limits import settings_of
from paceline.records.records import RunRecord, strict_json
from paceline.records.report import RunSummary, new_table
from paceline.units import format_bytes, format_percent, format_seconds

_SAME = 0.03  # figures that differ by less are marked as equal: two runs of one config do
_HIGHER = ("samples_per_s", "mfu", "test_accuracy", "goodput")  # figures of which more is better
_UNIMPORTANT = ("name", "monitor.folder")  # where a run is kept


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingPoint:
    """A run among those of one strategy: ``ideal`` is its ranks; ``scaling``, strong or weak, is against the first."""

    name: str
    strategy: str
    ranks: int
    samples_per_s: float
    ideal: float
    speed_up: float
    efficiency: float
    scaling: str = ""


def scaling_between(run: RunRecord | RunSummary, base: RunRecord | RunSummary) -> str:
    """Says how a run scales one on at most as many ranks: ``strong`` or ``weak``. Raises UsageError if it does not."""
    pairs = {
        "parameters": [f"{each.num_parameters:,}" for each in (run, base)],
        "compute": [each.compute for each in (run, base) if each.compute],
        "device peak": [f"{each.peak_flops:.3g} FLOP/s" for each in (run, base) if each.peak_flops is not None],
        "ranks": ["simulated" if each.backend == "virtual" else "real" for each in (run, base)],
    }
    others = [f"{name}: {both[0]} against {both[1]}" for name, both in pairs.items() if len(set(both)) > 1]
    ours, theirs = run.global_batch, base.global_batch
    weak = theirs / base.world_size * run.world_size
    if run.world_size < base.world_size:
        others.append(f"ranks: {run.world_size} against {base.world_size}, which are more")
    elif ours != theirs and ours * base.world_size != theirs * run.world_size:
        others.append(f"global batch: {ours} on {run.world_size} ranks against {theirs} on {base.world_size}")
    if others:
        what = f"these runs differ in more than their ranks: {'; '.join(others)}"
        rule = (
            "speed-up compares one model on one kind of device, with the same global batch or the same batch of a rank"
        )
        fix = f"run it once more on fewer ranks with train.global_batch={ours}, or this one with"
        raise UsageError(f"{what}\n  {rule}\n  {fix} train.global_batch={theirs} or {weak:g}")
    return "strong" if ours == theirs else "weak"


def scaling_of(runs: Sequence[RunSummary]) -> tuple[ScalingPoint, ...]:
    """Puts each run of a strategy, by its ranks, to the first that it scales; nothing where no two are such runs."""
    found: list[ScalingPoint] = []
    for strategy in dict.fromkeys(run.strategy for run in runs):
        rows: list[list[tuple[RunSummary, str]]] = []
        known = [run for run in runs if run.strategy == strategy and run.samples_per_s]
        for run in sorted(known, key=lambda run: run.world_size):
            for row in rows:
                with contextlib.suppress(UsageError):
                    row.append((run, scaling_between(run, row[0][0])))
                    break
            else:
                rows.append([(run, "")])
        for row in rows:
            base = row[0][0]
            if any(run.world_size != base.world_size for run, _ in row):
                for run, scaling in row:
                    rate, ranks = run.samples_per_s or 0.0, run.world_size
                    speed_up = rate / ((base.samples_per_s or 0.0) / base.world_size)
                    about: dict[str, Any] = {"name": run.name, "strategy": strategy, "ranks": ranks, "scaling": scaling}
                    about |= {"ideal": float(ranks), "speed_up": speed_up, "efficiency": speed_up / ranks}
                    found.append(ScalingPoint(samples_per_s=rate, **about))
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigChange:
    """A key whose value differs between two runs; None where a run has no such key."""

    key: str
    before: Any
    after: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureChange:
    """A figure of two runs. ``mark``: ``better``, ``worse``, or ``same`` where they differ by a few percent at most."""

    name: str
    before: float
    after: float
    mark: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    before: str
    after: str
    config: tuple[ConfigChange, ...]
    figures: tuple[FigureChange, ...]
    limited: tuple[str, str]

    def to_json(self) -> dict[str, Any]:
        return dict(strict_json(asdict(self)))


def compare_runs(before: RunSummary, after: RunSummary) -> Comparison:
    """Sets two runs side by side. Reads their configs; a run without one has no keys to compare."""
    first, second = (settings_of(run.folder)[1] for run in (before, after))
    keys = [key for key in dict.fromkeys([*first, *second]) if key not in _UNIMPORTANT]
    pairs = [(key, first.get(key), second.get(key)) for key in keys]
    changed = tuple(ConfigChange(key=key, before=old, after=new) for key, old, new in pairs if old != new)
    figures, limited = tuple(_figures(before, after)), (before.limits.sentence, after.limits.sentence)
    return Comparison(before=before.name, after=after.name, config=changed, figures=figures, limited=limited)


def _figures(before: RunSummary, after: RunSummary) -> Iterator[FigureChange]:
    """Yields what both runs know; of a loss, a time or memory the lower one is better."""
    names = ["samples_per_s", "mfu", "test_accuracy", "final_loss", "test_loss", "comm_share"]
    names += ["seconds"] if before.steps == after.steps else []  # fewer of them for fewer steps are no better
    pairs = [(name, getattr(before, name), getattr(after, name)) for name in names]
    pairs.append(("memory_bytes", before.memory.peak_bytes, after.memory.peak_bytes))
    if before.goodput is not None and after.goodput is not None:
        pairs.append(("goodput", before.goodput.share, after.goodput.share))
    for name, first, second in pairs:
        if first is not None and second is not None:
            # What is not finite is worse than anything that is.
            is_same = first == second or abs(second - first) <= _SAME * max(abs(first), abs(second))
            is_better = (second > first) == (name in _HIGHER) and second == second
            mark = "same" if is_same else "better" if is_better else "worse"
            yield FigureChange(name=name, before=float(first), after=float(second), mark=mark)


def draw_scaling(points: Sequence[ScalingPoint]) -> list[RenderableType]:
    """Draws how speed grows with ranks; nothing without points."""
    table = new_table("scaling", "run", "strategy", "ranks", "samples/s", "ideal", "speed-up", "efficiency", "")
    for point in points:
        run = (point.name, point.strategy, str(point.ranks), f"{point.samples_per_s:,.1f}")
        speed = (f"{point.ideal:g} x", f"{point.speed_up:.2f} x", format_percent(point.efficiency))
        table.add_row(*run, *speed, point.scaling)
    return [table] if points else []


def draw_comparison(found: Comparison) -> RenderableType:
    """Draws what changed, with a mark at each figure that did: better or worse."""
    figures = new_table(f"{found.before} -> {found.after}", "figure", found.before, found.after, "change", "")
    for each in found.figures:
        change = f"{100 * (each.after / each.before - 1):+.1f} %" if each.before and each.mark != "same" else ""
        style = {"better": "green", "worse": "red"}.get(each.mark, "dim")
        shown = map(_FORMATS.get(each.name, "{:,.1f}".format), (each.before, each.after))
        figures.add_row(each.name.replace("_", " "), *shown, change, Text(each.mark, style=style))
    limits = [Text(f"{name}: {why}") for name, why in zip((found.before, found.after), found.limited, strict=True)]
    if not found.config:
        return Group(figures, *limits, Text("no key of the config changed", style="dim"))
    keys = new_table("keys of the config that changed", "key", found.before, found.after)
    for key in found.config:
        keys.add_row(key.key, *(Text("-" if value is None else str(value)) for value in (key.before, key.after)))
    return Group(figures, *limits, Text(), keys)


# Of figures that are no plain numbers.
_FORMATS: dict[str, Callable[[float], str]] = {"memory_bytes": format_bytes, "seconds": format_seconds}
_FORMATS |= dict.fromkeys(("final_loss", "test_loss"), format_loss)
_FORMATS |= dict.fromkeys(("comm_share", "mfu", "goodput", "test_accuracy"), format_percent)
