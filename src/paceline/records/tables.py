"""A report as text: what limited the run, figures, and tables. The terminal and the page show the same.

First the headline, then the tables: ranks, phases, communication, memory by category, goodput and lost work.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from paceline.records.console import format_loss, format_percent, parameters_text
from paceline.records.facts import Goodput, MemoryUse
from paceline.records.records import CommRecord
from paceline.records.report import STARTING, RunSummary
from paceline.records.summary import FINAL_STEPS, PHASES, RankSummary
from paceline.units import format_bytes, format_count, format_flops, format_seconds

COMMUNICATION = "communication of a rank"
_NAMES = {"comm_s": "communication", "optimizer_s": "update"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainTable:
    """A table as text. The first column is words, the others are numbers."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


def render(summary: RunSummary) -> RenderableType:
    """Draws the summary for a console of 80 columns or more: what limited the run, the headline, then the tables."""
    parts: list[RenderableType] = [_title(summary), ""]
    if told := summary.limits.lines() if summary.limits.found else []:
        parts += [Text(told[0], style="bold"), *map(Text, told[1:]), ""]
    figures = Table.grid("", Column(style="bold", no_wrap=True), Column(style="dim"), padding=(0, 3, 0, 0))
    for row in headline(summary):
        figures.add_row(*row)
    parts += [figures, *draw_tables(plain_tables(summary))]
    if summary.prediction is not None and (told := summary.prediction.lines()):
        parts += ["", *map(Text, told)]
    if summary.straggler is None:  # for a part of the run
        parts += [Text(line, style="yellow") for line in summary.late]
    elif summary.limits.what != "rank":  # else the verdict has said so
        parts.append(Text(str(summary.straggler), style="yellow"))
    parts += [Text(line, style="yellow") for line in _doubts(summary)]
    return Group(*parts)


def headline(summary: RunSummary) -> Iterator[tuple[str, str, str]]:
    """Yields the figures of a run that come first: name, value, and what there is to know about it."""
    if summary.test_accuracy is not None:
        yield "test accuracy", format_percent(summary.test_accuracy), ""
    if summary.test_loss is not None:
        yield "test loss", format_loss(summary.test_loss), ""
    yield from ((f"test {name}", format_loss(value), "") for name, value in summary.test_metrics.items())
    if summary.final_loss is not None:
        last = "the last step" if summary.steps == 1 else f"the last {min(FINAL_STEPS, summary.steps)} steps"
        yield "training loss", format_loss(summary.final_loss), f"all samples of {last}"
    if summary.samples_per_s is not None:
        yield from _speed(summary, summary.samples_per_s)
        share = f"{format_percent(summary.comm_share)} of step time, mean of the ranks"
        yield "time in communication", format_seconds(summary.comm_s), share
    if summary.memory.peak_bytes:
        yield "memory", format_bytes(summary.memory.peak_bytes), "of the rank that needs most"
    yield "steps", f"{summary.steps:,}", ""
    yield "duration", format_seconds(summary.seconds), ""
    if summary.start:  # parts that took next to nothing are left out
        parts = {STARTING[name]: summary.start[name] for name in STARTING if summary.start.get(name, 0.0) >= 0.05}
        told = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in parts.items())
        yield "first step after", format_seconds(summary.start["seconds"]), told


def _speed(summary: RunSummary, samples_per_s: float) -> Iterator[tuple[str, str, str]]:
    """Yields throughput, the model's FLOPs in it, and their share of what the devices could do."""
    rate = samples_per_s if summary.units_per_s is None else summary.units_per_s
    note = "all ranks, median step after warm-up"
    if rate != samples_per_s:
        note = f"median step after warm-up, {samples_per_s:,.1f} samples/s"
    yield f"{summary.unit}/s", f"{rate:,.0f}", note
    if summary.flops_per_s is not None:
        yield "model FLOP/s", format_flops(summary.flops_per_s), "forward and backward of the model alone"
    if summary.mfu is not None and summary.peak_flops is not None:
        told = f"of {format_flops(summary.peak_flops)} ({summary.compute}, data sheet)"
        if summary.mfu_measured is not None and summary.measured_peak_flops is not None:
            measured = f"{format_flops(summary.measured_peak_flops)} (measured)"
            told += f", {format_percent(summary.mfu_measured)} of {measured}"
        yield "MFU", format_percent(summary.mfu), told


def plain_tables(summary: RunSummary) -> list[PlainTable]:
    """Returns the tables that there is something to say in."""
    tables = (
        _rank_table(summary.ranks) if summary.steps else None,
        _phase_table(summary.ranks),
        _traffic_table(summary.traffic),
        _memory_table(summary.memory),
        _goodput_table(summary.goodput),
    )
    return [table for table in tables if table is not None]


def draw_tables(tables: Sequence[PlainTable]) -> list[RenderableType]:
    """Returns the tables for a terminal, with an empty line before each."""
    drawn: list[RenderableType] = []
    for plain in tables:
        table = new_table(plain.title, *plain.columns)
        for row in plain.rows:
            table.add_row(*row)
        drawn += [Text(), table, *([Text(plain.note, style="dim")] if plain.note else [])]
    return drawn


def new_table(title: str, *columns: str) -> Table:
    """Makes a table as all of a report look; on a narrow terminal the first column is broken, and no number is cut."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    table.title, table.title_justify, table.title_style = title, "left", "bold"
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number else "left", no_wrap=bool(number))
    return table


def _rank_table(ranks: Sequence[RankSummary]) -> PlainTable:
    """Shows the ranks, with parts of the step as shares, so that a rank that others wait for stands out."""
    width = max(len(str(rank.rank)) for rank in ranks)
    rows = tuple(
        (
            f"{rank.rank:>{width}} {rank.device.removeprefix('NVIDIA ')}",
            format_count(rank.samples),
            format_seconds(rank.step_s),
            *(f"{100 * getattr(rank, name) / rank.total_s:.1f}" if rank.total_s > 0 else "-" for name in PHASES),
            format_bytes(rank.memory_bytes),
        )
        for rank in ranks
    )
    hosts: dict[str, list[str]] = {}
    parts: dict[tuple[int, int], list[str]] = {}  # ranks that were not there all the time
    for rank in ranks:
        hosts.setdefault(rank.host, []).append(str(rank.rank))
        if rank.absent_steps and rank.steps:
            parts.setdefault((rank.steps, rank.steps + rank.absent_steps), []).append(str(rank.rank))
    where = ", ".join(f"{host} (rank {' '.join(own)})" for host, own in hosts.items())
    note = f"step: median   data to update: % of step time   comm: waiting for others\non {where}"
    there = (f"\nrank {' '.join(own)}: there in {steps:,} of {of:,} steps" for (steps, of), own in parts.items())
    columns = ("rank", "samples", "step", "data", "forward", "backward", "comm", "update", "memory")
    return PlainTable(title="what each rank did", columns=columns, rows=rows, note=note + "".join(there))


def _phase_table(ranks: Sequence[RankSummary]) -> PlainTable | None:
    """Shows how phases differ between ranks: the mean, and who takes least and most."""
    known = [rank for rank in ranks if rank.steps and rank.total_s > 0]
    if len(known) < 2:
        return None
    rows, total = [], sum(rank.total_s for rank in known)
    for phase in PHASES:
        seconds = {rank.rank: float(getattr(rank, phase)) / rank.steps for rank in known}
        least, most = min(seconds, key=lambda rank: seconds[rank]), max(seconds, key=lambda rank: seconds[rank])
        share = sum(float(getattr(rank, phase)) for rank in known) / total
        ends = (format_seconds(seconds[least]), str(least), format_seconds(seconds[most]), str(most))
        mean = format_seconds(sum(seconds.values()) / len(seconds))
        rows.append((_NAMES.get(phase, phase.removesuffix("_s")), mean, f"{100 * share:.1f} %", *ends))
    columns = ("phase", "mean", "share", "least", "rank", "most", "rank")
    return PlainTable(title="phases, seconds of a step", columns=columns, rows=tuple(rows))


def _traffic_table(traffic: Sequence[CommRecord]) -> PlainTable | None:
    if not traffic:
        return None
    rows = [
        (
            *(row.kind, row.group, str(row.ranks), format_count(row.calls), format_bytes(row.bytes)),
            format_seconds(row.seconds),
            *(f"{rate / 1e9:.2f}" if rate > 0 else "-" for rate in (row.bandwidth, row.bus_bandwidth)),
        )
        for row in traffic
    ]
    columns = ("operation", "group", "ranks", "calls", "bytes", "time", "GB/s", "bus GB/s")
    return PlainTable(title=COMMUNICATION, columns=columns, rows=tuple(rows))


def _memory_table(memory: MemoryUse) -> PlainTable | None:
    if not memory.by_category:
        return None
    total = sum(memory.by_category.values())
    rows = [
        (name, format_bytes(size), f"{100 * size / total:.1f} %")
        for name, size in sorted(memory.by_category.items(), key=lambda each: -each[1])
    ]
    rows.append(("planned", format_bytes(total), ""))
    if memory.peak_bytes:
        rows.append(("measured peak", format_bytes(memory.peak_bytes), f"{100 * memory.peak_bytes / total:.1f} %"))
    return PlainTable(title="memory of a rank, as planned", columns=("category", "bytes", "share"), rows=tuple(rows))


def _goodput_table(goodput: Goodput | None) -> PlainTable | None:
    """Shows lost work, where there was any."""
    if goodput is None or not (goodput.restarts or goodput.repeated_steps or goodput.skipped_steps):
        return None
    rows = [
        ("steps that count", format_seconds(goodput.useful_s), f"{100 * goodput.share:.1f} % of the run: goodput"),
        ("steps made again", format_seconds(goodput.repeated_s), f"{goodput.repeated_steps:,} steps"),
        ("down", format_seconds(goodput.down_s), f"{goodput.restarts} restarts, {goodput.roll_backs} roll-backs"),
    ]
    if goodput.skipped_steps:
        rows.append(("updates left out", "", f"{goodput.skipped_steps:,} steps were not finite"))
    return PlainTable(title="goodput and lost work", columns=("", "time", ""), rows=tuple(rows))


def _title(summary: RunSummary) -> Text:
    styles = {"done": "green", "failed": "bold red", "stopped": "yellow", "unfinished": "yellow"}
    ranks = "1 rank" if summary.world_size == 1 else f"{summary.world_size} ranks"
    size = parameters_text(summary.num_parameters, summary.num_trained)
    title = Text().append(summary.name, style="bold").append("  ").append(summary.status, style=styles[summary.status])
    title.append(f"  {summary.message}" if summary.message else "")
    return title.append(
        f"\n{summary.strategy} on {ranks} ({summary.backend}), {size}, global batch {summary.global_batch}", style="dim"
    )


def _doubts(summary: RunSummary) -> list[str]:
    """Returns what a reader must know before trusting the figures."""
    there = {rank.rank for rank in summary.ranks if 0 <= rank.rank < summary.world_size}
    num_missing = summary.world_size - len(there)
    missing = itertools.islice((rank for rank in itertools.count() if rank not in there), max(min(num_missing, 8), 0))
    doubts = [f"rank {rank} left no records: the figures are of the other ranks" for rank in missing]
    if num_missing > len(doubts):
        doubts.append(f"and so did {num_missing - len(doubts):,} more ranks")
    most = max(rank.steps + rank.absent_steps for rank in summary.ranks)
    return doubts + [
        f"rank {rank.rank} recorded {rank.steps} of the {most - rank.absent_steps} steps in which it was there"
        if rank.absent_steps
        else f"rank {rank.rank} recorded {rank.steps} steps, others {most}"
        for rank in summary.ranks
        if rank.steps + rank.absent_steps < most
    ]
