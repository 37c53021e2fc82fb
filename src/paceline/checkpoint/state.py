"""What is saved: this rank's shards, and plain values. The seam between those who have a state and this package."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from paceline.checkpoint.line import Line
from paceline.shards import Shard

MODEL = "model/"
OPTIMIZER = "optimizer/"
COMPRESSION = "compression/"
AVERAGE = "average/"


class HasShards(Protocol):
    """Whoever holds parameters and buffers, such as an engine."""

    def shards(self) -> Iterator[Shard]:
        """Yields what this rank holds."""

    def state_names(self) -> Collection[str]:
        """Returns the names of all that ranks together hold."""

    def mark_loaded(self) -> None:
        """Tells the holder that the shards have new values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """This rank's part of a state. No tensor is copied: it is that of the step as long as nobody trains on.

    ``values`` are the same on every rank, and those of rank 0 are kept. ``own`` are this rank's. ``found`` are known to
    some ranks and needed by all: those of all ranks are kept, by their names. ``line`` is how the run came to
    this step, as rank 0 knows it; None: it is told from what lies where it is saved.
    """

    step: int
    position: int
    shards: Sequence[Shard]
    values: Mapping[str, Any] = field(default_factory=dict)
    own: Mapping[str, Any] = field(default_factory=dict)
    found: Mapping[str, Any] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)
    line: Line | None = None


def prefixed(prefix: str, shards: Iterable[Shard]) -> list[Shard]:
    """Returns shards under longer names."""
    return [replace(shard, name=f"{prefix}{shard.name}") for shard in shards]
