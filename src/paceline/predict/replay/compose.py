"""A long step from a short one: the events of a microbatch in the middle, repeated.

A step of many microbatches is recorded with three. The first makes what the others find, the last one synchronises, and
all between them are alike: the second stands for each of these. Every copy has tensors, memory and operations of its
own; what crosses from one microbatch into the next does so from copy to copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from paceline.predict.replay.events import Drop, Event, Hold, Issue, Mark, OnHost, Run, Wait


def repeat(events: Sequence[Event], start: int, stop: int, times: int) -> tuple[Event, ...]:
    """Returns the events with those from ``start`` up to ``stop`` that many times; once: as they are.

    What lies between must be alike in every copy: begun in the state in which the one before ends.
    """
    if times <= 1 or stop <= start:
        return tuple(events)
    middle = _Middle(events, start, stop)
    found = list(events[:start])
    for copy in range(times):
        found += middle.copy(copy, is_last=copy == times - 1)
    found += middle.follow(events[stop:], times - 1)
    return tuple(found)


class _Middle:
    """What is repeated, and how numbers go on from copy to copy."""

    def __init__(self, events: Sequence[Event], start: int, stop: int) -> None:
        self._events = events[start:stop]
        issued = [event.number for event in self._events if isinstance(event, Issue)]
        self._first_issue = min(issued, default=0)
        self._end_issue = max(issued, default=-1) + 1
        self._held = {event.number for event in self._events if isinstance(event, Hold)}
        self._dropped = {event.number for event in self._events if isinstance(event, Drop)}
        before = {tensor for event in events[:start] if isinstance(event, Run) for tensor in _tensors(event)}
        inside = {tensor for event in self._events if isinstance(event, Run) for tensor in _tensors(event)}
        self._fresh = inside - before
        # Room for the numbers of all copies, past any number that there is.
        numbers = [event.number for event in events if isinstance(event, Hold | Drop)]
        tensors = [tensor for event in events if isinstance(event, Run) for tensor in _tensors(event)]
        self._memory_step = max(numbers, default=0) + 1
        self._tensor_step = max(tensors, default=0) + 1

    def copy(self, number: int, *, is_last: bool) -> list[Event]:
        """Returns one of the copies; the first is what was recorded."""
        found: list[Event] = []
        for event in self._events:
            if isinstance(event, Hold):
                if event.number in self._dropped or is_last:  # what lives on does so once
                    tensors = tuple(self._tensor(tensor, number) for tensor in event.tensors)
                    found.append(replace(event, number=self._memory(event.number, number), tensors=tensors))
            elif isinstance(event, Drop):
                if event.number in self._held or number == 0:
                    found.append(Drop(self._memory(event.number, number)))
            elif not isinstance(event, Mark):
                found.append(self._moved(event, number))
        return found

    def follow(self, events: Sequence[Event], last: int) -> list[Event]:
        """Returns what comes behind: it refers to the last copy."""
        found: list[Event] = []
        for event in events:
            if isinstance(event, Drop):
                is_own = event.number in self._held and event.number not in self._dropped
                found.append(Drop(self._memory(event.number, last)) if is_own else event)
            elif isinstance(event, Hold | Mark):
                found.append(event)
            elif isinstance(event, Run):
                found.append(self._renamed(event, last))
            elif isinstance(event, OnHost):
                found.append(self._waiting(event, last))
            else:
                is_before = event.number < self._first_issue
                found.append(event if is_before else replace(event, number=event.number + self._issues * last))
        return found

    @property
    def _issues(self) -> int:
        return max(0, self._end_issue - self._first_issue)

    def _waiting(self, event: OnHost, copy: int) -> OnHost:
        if not event.waits:
            return event
        moved = (each + self._issues * copy if each >= self._first_issue else each for each in event.waits)
        return replace(event, waits=tuple(moved))

    def _moved(self, event: Run | Issue | Wait | OnHost, copy: int) -> Event:
        if isinstance(event, Run):
            return self._renamed(event, copy)
        if isinstance(event, OnHost):
            return replace(event, waits=tuple(each + self._issues * copy for each in event.waits))
        # What a copy waits for was issued by itself or, as long before its beginning, by the one before.
        return replace(event, number=event.number + self._issues * copy)

    def _renamed(self, event: Run, copy: int) -> Run:
        if copy == 0:
            return event
        kernel, fresh, further = event.operation, self._fresh, self._tensor_step * copy  # of tens of thousands
        reads = tuple([(each + further if each in fresh else each, size) for each, size in kernel.reads])
        writes = tuple([(each + further if each in fresh else each, size) for each, size in kernel.writes])
        return Run(replace(kernel, reads=reads, writes=writes), event.block)

    def _tensor(self, tensor: int, copy: int) -> int:
        return tensor + self._tensor_step * copy if tensor in self._fresh else tensor

    def _memory(self, number: int, copy: int) -> int:
        return number + self._memory_step * copy if number in self._held else number


def _tensors(event: Run) -> list[int]:
    return [tensor for tensor, _ in (*event.operation.reads, *event.operation.writes)]
