"""What a profiled rank saw: spans on its own clock, as plain data that passes through files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

ANCHOR = "paceline.anchor"  # the event of torch by which its clock and ours are compared


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSpan:
    """Something that lasted, in seconds of its rank's clock. Collectives have bytes, and the ranks of their group."""

    name: str
    start_s: float
    end_s: float
    num_bytes: int = 0
    ranks: tuple[int, ...] = ()

    @property
    def seconds(self) -> float:
        """How long it lasted."""
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """An operator of torch: its calls, and the time of its own without that of operators inside it."""

    name: str
    calls: int
    host_s: float
    device_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpans:
    """All of one rank. Its clock is ``ahead_s`` before that of rank 0, and read ``anchor_s`` at the anchor event."""

    rank: int
    device: str
    ahead_s: float
    clock_error_s: float
    anchor_s: float
    tracks: Mapping[str, list[TraceSpan]] = field(default_factory=dict)
    operators: tuple[Operator, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Returns plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Reads what ``to_json`` returned."""
        tracks = {
            name: [TraceSpan(**{**each, "ranks": tuple(each["ranks"])}) for each in spans]
            for name, spans in values["tracks"].items()
        }
        operators = tuple(Operator(**each) for each in values["operators"])
        return cls(**{**values, "tracks": tracks, "operators": operators})

    def corrected(self, name: str) -> list[TraceSpan]:
        """Returns the spans of a track on the clock of rank 0."""
        ahead = self.ahead_s
        spans = self.tracks.get(name, ())
        return [replace(each, start_s=each.start_s - ahead, end_s=each.end_s - ahead) for each in spans]
