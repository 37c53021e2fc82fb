"""A record of the links as text: the measurements, and what was gained beside what could be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]

_HEAD = (
    f"{'place':8}{'Mbit/s':>7}  {'part':12}{'MiB':>7}  {'arm':30}{'ms':>9}{'bound':>9}{'reached':>9}"
    f"{'MB on link':>12}{'/ theory':>10}"
)


def show(rows: Sequence[Row]) -> str:
    """Returns the rows as a table, speed-ups below the measurements."""
    measured = [_line(row) for row in rows if row["part"] != "speed_up"]
    gained = [_gain(row) for row in rows if row["part"] == "speed_up"]
    return "\n".join([_HEAD, *measured, "", "speed-up, and the most that there could be", *gained])


def place_of(row: Row) -> str:
    """Names where the ranks are: hosts x ranks on each."""
    return f"{row['hosts']} x {row['ranks'] // row['hosts']}"


def _line(row: Row) -> str:
    size = "" if row["size_bytes"] is None else f"{row['size_bytes'] / 2**20:g}"
    bound = "" if row["bound_ms"] is None else f"{row['bound_ms']:.1f}"
    reached = "" if row["fraction"] is None else f"{row['fraction']:.1%}"
    ratio = "" if row["bytes_ratio"] is None else f"{row['bytes_ratio']:.3f}"
    return (
        f"{place_of(row):8}{row['bits_per_second'] / 1e6:>7g}  {row['part']:12}{size:>7}  {row['arm']:30}"
        f"{row['median_ms']:>9.1f}{bound:>9}{reached:>9}{row['link_bytes'] / 1e6:>12.3f}{ratio:>10}"
    )


def _gain(row: Row) -> str:
    return (
        f"{place_of(row):8}{row['bits_per_second'] / 1e6:>7g}  {row['of']:12} {row['arm']} against {row['baseline']}: "
        f"{row['speed_up']:.2f} (at most {row['bound']:.2f}; {row['bytes_fewer']:.2f} x fewer bytes)"
    )
