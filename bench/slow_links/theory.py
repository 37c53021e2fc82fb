"""What theory puts on the busiest cable, in one direction, and the least time that follows.

For N ranks, L of them on each of H hosts, and B bytes:

    all-reduce     by its algorithm (``cluster/costs.py``); Gloo's own is a ring: 2 B (N-1)/N
    all-gather     every rank sends its piece to each of the others: L (N-L) B / N, of B bytes gathered
    all-to-all     and here to each another piece: as much, of B bytes that a rank hands in

A cable carries both directions at once, so that the bound is the bytes of one direction over its rate. Headers are not
part of it: a packet of 1,448 bytes takes 1,514 on the wire, so that 95.6 % of the bound is the most that TCP reaches.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias

from paceline.cluster.costs import Algorithm, Placement, host_link_bytes
from paceline.errors import UsageError

Way: TypeAlias = Literal["native"] | Algorithm


def link_bytes(num_bytes: Mapping[str, float], way: Way, where: Placement) -> float:
    """Returns what leaves the busiest host for collectives of so many bytes by kind, as a trace counts them.

    Raises UsageError for a kind whose pattern is not known here.
    """
    found = 0.0
    for kind, size in num_bytes.items():
        if kind == "all_reduce":
            found += host_link_bytes("ring" if way == "native" else way, size, where)
        elif kind in ("all_gather", "all_to_all"):
            found += where.node_ranks * (where.ranks - where.node_ranks) * size / where.ranks
        elif size:
            raise UsageError(f"{size:.0f} bytes of {kind}: no formula says what they put on a link")
    return found


def least_seconds(num_bytes: float, bits_per_second: float) -> float:
    """Returns how long a cable needs for so many bytes in one direction."""
    return 8 * num_bytes / bits_per_second


def latency_bound(tensors: int, seconds_each: float, seconds_of_bytes: float) -> float:
    """Returns how much faster one message is than ``tensors`` of them one after another, by the model a + b B."""
    return (tensors * seconds_each + seconds_of_bytes) / (seconds_each + seconds_of_bytes)
