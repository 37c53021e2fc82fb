"""What the ranks sent one another, by collective and group, and what that should take.

    achieved bandwidth   bytes / seconds, as the rank saw it that waited least: the others waited for it as well
    bus bandwidth        achieved x 2 (N-1)/N for an all-reduce, x (N-1)/N for a gather, a scatter or an exchange:
                         what each link carried, whatever the number of ranks

Without records of operations, what a step sends follows from the strategy (``plan/layout.py``) and the parameters, in
fp32.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from paceline.cluster.wires import WireCost
from paceline.plan.layout import SHARING
from paceline.records.bandwidth import bus_factor
from paceline.records.records import CommRecord, RunRecord
from paceline.records.summary import RankAttempt

_BUCKET_BYTES = 25 * 2**20
_ELEMENT_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficRow:
    """All operations of one kind within groups of one name: bytes and seconds of a rank, over the whole run."""

    kind: str
    group: str
    ranks: int
    calls: int
    bytes: int
    seconds: float

    @property
    def bandwidth(self) -> float:
        """Bytes per second that were achieved; 0 where no time was recorded."""
        return self.bytes / self.seconds if self.seconds > 0 else 0.0

    @property
    def bus_bandwidth(self) -> float:
        """Bytes per second that each link carried."""
        return self.bandwidth * bus_factor(self.kind, self.ranks)

    def to_json(self) -> dict[str, Any]:
        """Returns plain values, with the bandwidths."""
        return asdict(self) | {"bandwidth": self.bandwidth, "bus_bandwidth": self.bus_bandwidth}


def find_traffic(attempts: Mapping[int, Sequence[RankAttempt]]) -> tuple[TrafficRow, ...]:
    """Adds up what ranks recorded of their operations, most bytes first; nothing where no rank recorded any."""
    found: dict[tuple[str, str, int], list[TrafficRow]] = {}
    for own in attempts.values():
        records = [each for attempt in own for each in attempt.records if isinstance(each, CommRecord)]
        for key, row in _of_rank(records).items():
            found.setdefault(key, []).append(row)
    rows = [min(own, key=lambda row: row.seconds / max(row.bytes, 1)) for own in found.values()]
    return tuple(sorted(rows, key=lambda row: (-row.bytes, row.kind, row.group)))


def _of_rank(records: Iterable[CommRecord]) -> dict[tuple[str, str, int], TrafficRow]:
    sums: dict[tuple[str, str, int], list[float]] = {}
    for each in records:
        total = sums.setdefault((each.kind, each.group, each.ranks), [0, 0, 0.0])
        for place, number in enumerate((each.calls, each.bytes, each.seconds)):
            total[place] += number
    return {
        (kind, group, ranks): TrafficRow(
            kind=kind, group=group, ranks=ranks, calls=int(calls), bytes=int(num_bytes), seconds=seconds
        )
        for (kind, group, ranks), (calls, num_bytes, seconds) in sums.items()
    }


def priced_step_s(run: RunRecord, traffic: Sequence[TrafficRow], steps: int, cost: WireCost) -> float | None:
    """Returns what the operations of a step should take, one after another; None where they are not known."""
    if traffic and steps > 0:
        return sum(
            row.calls * cost(row.kind, row.bytes // max(row.calls, 1), tuple(range(row.ranks))) for row in traffic
        ) / (steps)
    sharing, world = SHARING.get(run.strategy), tuple(range(run.world_size))
    if sharing is None or run.strategy == "hybrid" or run.num_parameters <= 0 or run.world_size < 2:
        return None
    total = _ELEMENT_BYTES * run.num_parameters
    calls = max(1, -(-total // _BUCKET_BYTES))
    # Beside the gradients a step exchanges a few numbers: how many samples count, and the norm.
    small = 2 * cost("all_reduce", _ELEMENT_BYTES, world)
    return small + sum(calls * cost(kind, total // calls, world) for kind in sharing.collectives)
