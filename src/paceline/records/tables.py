"""The tables below a run's headline: phases, communication, memory by category, goodput and lost work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from paceline.records.facts import MemoryUse
from paceline.records.goodput import Goodput
from paceline.records.summary import PHASES, RankSummary
from paceline.records.traffic import TrafficRow
from paceline.units import format_bytes, format_count, format_seconds

_NAMES = {"comm_s": "communication", "optimizer_s": "update"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainTable:
    """A table as text: the terminal and the page show the same. The first column is words, the others are numbers."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def plain_tables(
    ranks: Sequence[RankSummary], traffic: Sequence[TrafficRow], goodput: Goodput | None, memory: MemoryUse
) -> list[PlainTable]:
    """Returns the tables that there is something to say in."""
    tables = (_phase_table(ranks), _traffic_table(traffic), _memory_table(memory), _goodput_table(goodput))
    return [table for table in tables if table is not None]


def draw_tables(tables: Sequence[PlainTable]) -> list[RenderableType]:
    """Returns the tables for a terminal, with an empty line before each."""
    drawn: list[RenderableType] = []
    for plain in tables:
        table = new_table(plain.title, *plain.columns)
        for row in plain.rows:
            table.add_row(*row)
        drawn += [Text(), table]
    return drawn


def new_table(title: str, *columns: str) -> Table:
    """Makes a table as all of a report look; the first column is text, the others are numbers."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    table.title, table.title_justify, table.title_style = title, "left", "bold"
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number else "left", no_wrap=bool(number))
    return table


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


def _traffic_table(traffic: Sequence[TrafficRow]) -> PlainTable | None:
    if not traffic:
        return None
    rows = [
        (
            row.kind,
            *(row.group, str(row.ranks), format_count(row.calls), format_bytes(row.bytes), format_seconds(row.seconds)),
            *(f"{rate / 1e9:.2f}" if rate > 0 else "-" for rate in (row.bandwidth, row.bus_bandwidth)),
        )
        for row in traffic
    ]
    columns = ("operation", "group", "ranks", "calls", "bytes", "time", "GB/s", "bus GB/s")
    return PlainTable(title="communication of a rank", columns=columns, rows=tuple(rows))


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
