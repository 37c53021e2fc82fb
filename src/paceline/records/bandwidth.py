"""How fast collectives moved: bandwidths of a ``CommRecord``, as pure functions.

The *achieved* bandwidth is the bytes of the tensors over the seconds. An all-reduce of n ranks sends 2 (n - 1) / n of
its bytes over each link, so its *bus* bandwidth is that many times the achieved one: this can be compared with what a
link can do, and with other kinds and sizes of groups.

An operation counts until the compute takes its result. Where communication hides behind compute, both bandwidths are
lower bounds.
"""

from __future__ import annotations

from paceline.records.records import CommRecord


def bus_factor(kind: str, ranks: int) -> float:
    """Returns the share of a collective's bytes that the slowest link carries, of a group of ``ranks``."""
    if ranks < 2:
        return 0.0
    if kind == "all_reduce":
        return 2 * (ranks - 1) / ranks
    return (ranks - 1) / ranks if kind in ("all_gather", "reduce_scatter", "all_to_all") else 1.0


def achieved_bytes_per_s(record: CommRecord) -> float:
    """Returns the bytes of the tensors over the seconds; 0 where none passed."""
    return record.bytes / record.seconds if record.seconds > 0 else 0.0


def bus_bytes_per_s(record: CommRecord) -> float:
    """Returns the bytes that went over a link a second."""
    return achieved_bytes_per_s(record) * bus_factor(record.kind, record.ranks)
