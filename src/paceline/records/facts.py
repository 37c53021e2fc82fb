"""What a run is judged by, as plain data: see limits.py and gains.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from paceline.health.straggler import Straggler
from paceline.records.goodput import Goodput
from paceline.records.records import RunRecord
from paceline.records.summary import StepTable
from paceline.records.traffic import TrafficRow


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """What is known of a run's memory: the peak of the rank that holds most, and what its device has.

    ``cuts`` are the microbatches that ranks went on with after memory ran out, by step; ``by_category`` is the plan's
    estimate.
    """

    peak_bytes: int = 0
    capacity_bytes: int | None = None
    cuts: Mapping[int, int] = field(default_factory=dict)
    by_category: Mapping[str, int] = field(default_factory=dict)

    @property
    def filled(self) -> float:
        """The share of the device's memory that is in use at the peak; 0 where its size is not known."""
        return self.peak_bytes / self.capacity_bytes if self.capacity_bytes else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What a run is judged by. ``priced_comm_s`` is what a step's traffic should take on the links; None: not known."""

    run: RunRecord
    steps: StepTable
    goodput: Goodput
    straggler: Straggler | None = None
    memory: MemoryUse = field(default_factory=MemoryUse)
    priced_comm_s: float | None = None
    num_hosts: int = 1
    traffic: tuple[TrafficRow, ...] = ()  # most bytes first

    @property
    def is_inside_a_host(self) -> bool:
        """Whether real ranks exchange with others of their host alone; simulated ones have links of their own."""
        return self.num_hosts == 1 and self.run.backend != "virtual"
