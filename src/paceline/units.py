"""Numbers with units, as people read them."""

from __future__ import annotations

KIB, MIB, GIB = 2**10, 2**20, 2**30


def format_bytes(num_bytes: float) -> str:
    """Writes a size with a binary unit: ``format_bytes(1536) == '1.5 KiB'``."""
    for unit, scale in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(num_bytes) >= scale:
            return f"{num_bytes / scale:.1f} {unit}"
    return f"{num_bytes:.0f} B"


def format_count(count: float) -> str:
    """Writes a count with a decimal suffix: ``format_count(11_200_000) == '11.2M'``."""
    for suffix, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(count) >= scale:
            return f"{count / scale:.1f}{suffix}"
    return f"{count:.0f}" if float(count).is_integer() else f"{count:.1f}"


def format_flops(rate: float) -> str:
    """Writes FLOP per second with a decimal prefix: ``format_flops(4.12e14) == '412.0 TFLOP/s'``."""
    for prefix, scale in (("P", 1e15), ("T", 1e12), ("G", 1e9)):
        if rate >= scale:
            return f"{rate / scale:.1f} {prefix}FLOP/s"
    return f"{rate / 1e6:.1f} MFLOP/s"


def format_percent(share: float | None) -> str:
    """Writes a share of one: ``format_percent(0.972) == '97.2 %'``."""
    return "-" if share is None else f"{100 * share:.1f} %"


def format_seconds(seconds: float) -> str:
    """Writes a duration in the unit that keeps it readable: ``format_seconds(0.0042) == '4.2 ms'``."""
    if seconds <= 0:  # clocks that were set back
        return "0 s"
    if seconds >= 3600:
        return f"{seconds / 3600:.1f} h"
    if seconds >= 60:
        return f"{int(seconds // 60)} min {int(seconds % 60)} s"
    if seconds >= 1:
        return f"{seconds:.1f} s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds * 1e6:.0f} us"
