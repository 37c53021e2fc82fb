"""What a recorded program communicates, counted by kind."""

from __future__ import annotations

from collections import Counter

from paceline.predict.replay.program import Issue, Program


def count_operations(program: Program) -> Counter[str]:
    """Counts what is handed to the backend by kind: messages, of a collective that is made of them."""
    return _count_travels(program, 1)


def count_bytes(program: Program) -> Counter[str]:
    """Adds up what is communicated by kind."""
    return _count_travels(program, 2)


def _count_travels(program: Program, place: int) -> Counter[str]:
    found: Counter[str] = Counter()
    for event in program.all_events:
        if isinstance(event, Issue):
            own = (event.kind, 1, event.num_bytes)
            for travel in event.messages if event.algorithm else (own,):
                found[travel[0]] += int(travel[place])
    return found
