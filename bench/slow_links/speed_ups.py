"""What an algorithm, a compression or a bucket gains on a link, beside the most that it could."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slow_links.arms import ALPHA, BUCKETED, COMPUTE, ONE_BY_ONE, PLAIN, make_model, name_of
from slow_links.suite import TOP_1
from slow_links.theory import latency_bound

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """An arm beside the one that it should be faster than."""

    part: str
    arm: str
    baseline: str


COMPARISONS = (
    Comparison(part="all_reduce", arm="hierarchical", baseline="ring"),
    Comparison(part="bucketing", arm=BUCKETED, baseline=ONE_BY_ONE),
    Comparison(part="compression", arm=name_of(TOP_1), baseline=PLAIN),
    Comparison(part="training", arm="hierarchical", baseline="ring"),
    Comparison(part="training", arm=name_of(TOP_1), baseline="native"),
    Comparison(part="training", arm="native", baseline=ONE_BY_ONE),
    Comparison(part="training", arm="native", baseline="torch DDP"),
)


def speed_ups(rows: Sequence[Row]) -> list[Row]:
    """Returns a row for every comparison that the rows allow; of all-reduces, for the largest size.

    The bound of collectives is that of their bytes, or of a latency and bytes where these are the same; the bound of a
    training step is the baseline's time over what the arm cannot fall below: its compute, and its bytes on the link.
    """
    places = dict.fromkeys((row["hosts"], row["ranks"], row["bits_per_second"]) for row in rows)
    found = []
    for hosts, ranks, speed in places:
        here = [row for row in rows if (row["hosts"], row["ranks"], row["bits_per_second"]) == (hosts, ranks, speed)]
        for each in COMPARISONS:
            arms = _largest(here, each.part)
            if each.arm in arms and each.baseline in arms:
                place = {"part": "speed_up", "of": each.part, "hosts": hosts, "ranks": ranks, "bits_per_second": speed}
                found.append(place | _compare(each, arms))
    return found


def _largest(rows: Sequence[Row], part: str) -> dict[str, Row]:
    """Returns the rows of a part by arm; of several sizes, those of the largest."""
    ordered = sorted((row for row in rows if row["part"] == part), key=lambda row: row["size_bytes"] or 0)
    return {row["arm"]: row for row in ordered}


def _compare(each: Comparison, arms: dict[str, Row]) -> Row:
    ours, theirs = arms[each.arm], arms[each.baseline]
    if each.part == "training":
        floor = max(arms[COMPUTE]["median_ms"], ours["bound_ms"])
        bound = theirs["median_ms"] / floor
    elif each.baseline == ONE_BY_ONE:
        num_tensors = len(list(make_model().parameters()))
        bound = latency_bound(num_tensors, arms[ALPHA]["median_ms"], ours["bound_ms"])
    else:
        bound = theirs["theory_bytes"] / ours["theory_bytes"]
    return {
        "arm": each.arm,
        "baseline": each.baseline,
        "speed_up": theirs["median_ms"] / ours["median_ms"],
        "bound": bound,
        "bytes_fewer": theirs["link_bytes"] / ours["link_bytes"],
    }
