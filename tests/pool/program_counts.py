"""What a recorded program communicates, counted by kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from paceline.cluster.kernels import Operation
from paceline.predict.replay.program import Event, Issue, Player, Program, Run


def events_of(program: Program) -> Iterator[Event]:
    """Iterates over the events of the whole step."""
    return Player(program.events, program.order).run() if program.order else iter(program.events)


def kernels_of(program: Program) -> Iterator[Operation]:
    return (event.operation for event in events_of(program) if isinstance(event, Run))


def count_operations(program: Program) -> Counter[str]:
    """Counts what is handed to the backend by kind: messages, of a collective that is made of them."""
    return _count_travels(program, 1)


def count_bytes(program: Program) -> Counter[str]:
    """Adds up what is communicated by kind."""
    return _count_travels(program, 2)


def _count_travels(program: Program, place: int) -> Counter[str]:
    found: Counter[str] = Counter()
    for event in events_of(program):
        if isinstance(event, Issue):
            own = (event.kind, 1, event.num_bytes)
            for travel in event.messages if event.algorithm else (own,):
                found[travel[0]] += int(travel[place])
    return found
