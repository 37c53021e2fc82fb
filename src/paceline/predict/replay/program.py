"""What one rank does in one step, as data: kernels, communication and memory in the order in which the host issues it.

A dry run writes it down (dryrun/), ``replay`` prices it for a cluster. It knows no torch and no cluster; the same
program may be replayed on any.

A step of a pipeline with many microbatches is kept as one with few, and the order in which its actions are done again
(``order``): kernels are priced, and fused, as often as they were recorded. ``all_events`` are those of the whole step.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from paceline.cluster.operations import Operation
from paceline.errors import UsageError
from paceline.predict.replay.events import Drop, Event, EventMark, Hold, Issue, OnHost, Run, Turn, Wait
from paceline.predict.replay.repeat import memory_alone, play
from paceline.untrusted import parse_json

CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "buffers", "temporary")
_KINDS: dict[str, type[Any]] = {each.__name__: each for each in (Run, Issue, Wait, Hold, Drop, EventMark, OnHost)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One step of one rank.

    ``resident``: bytes by category that are there before the step and after it. ``samples`` are those of the global
    batch, and ``elements`` what these count as: tokens, or samples. ``model_flops`` are what this rank's part of the
    model takes by the usual count: three times its forward, attention in full, nothing twice. ``graphs``: whether the
    step is replayed from a CUDA graph; auto: where the host would be what limits it.
    """

    name: str
    rank: int
    ranks: int
    strategy: str
    events: tuple[Event, ...]
    resident: dict[str, int]
    samples: int
    elements: float
    element: str = "samples"
    model_flops: float = 0.0
    dtype: str = "fp32"
    is_compiled: bool = False
    graphs: Literal["off", "auto", "on"] = "off"
    stage: int = 0
    stages: int = 1
    order: tuple[Turn, ...] = ()

    @property
    def all_events(self) -> Iterator[Event]:
        """Iterates over the events of the whole step."""
        return play(self.events, self.order) if self.order else iter(self.events)

    @property
    def kernels(self) -> Iterator[Operation]:
        return (event.operation for event in self.all_events if isinstance(event, Run))

    def peak_memory(self) -> dict[str, int]:
        """Returns bytes by category at the moment when they are most together."""
        now: Counter[str] = Counter(self.resident)
        total = most = sum(now.values())
        peak, held = dict(now), dict[int, Hold]()
        for event in play(memory_alone(self.events), self.order) if self.order else self.events:
            if isinstance(event, Hold):
                held[event.number] = event
                now[event.category] += event.num_bytes
                total += event.num_bytes
                if total > most:
                    most, peak = total, dict(now)
            elif isinstance(event, Drop) and event.number in held:
                gone = held.pop(event.number)
                now[gone.category] -= gone.num_bytes
                total -= gone.num_bytes
        return {category: peak.get(category, 0) for category in CATEGORIES}

    def to_text(self) -> str:
        """Returns the program as JSON: the same program, the same bytes."""
        values = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in ("events", "order")}
        rows = [[type(event).__name__, *asdict(event).values()] for event in self.events]
        turns = [list(asdict(turn).values()) for turn in self.order]
        return json.dumps({**values, "events": rows, "order": turns}, separators=(",", ":"), sort_keys=True) + "\n"

    @classmethod
    def of_text(cls, text: str) -> Program:
        """Reads what ``to_text`` wrote. Raises UsageError for anything else."""
        try:
            values: Any = parse_json(text)
            events = tuple(_event(row) for row in values.pop("events"))
            order = tuple(Turn(*_frozen(turn)) for turn in values.pop("order"))
            return cls(**values, events=events, order=order)
        except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
            raise UsageError(f"this is not a program of a dry run: {error}") from error


def _event(row: list[Any]) -> Event:
    kind, *values = row
    if kind == "Run":
        operation, block = values
        return Run(Operation(**{name: _frozen(value) for name, value in operation.items()}), block)
    event: Event = _KINDS[kind](*_frozen(values))
    return event


def _frozen(value: Any) -> Any:
    """JSON has lists where events have tuples."""
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
