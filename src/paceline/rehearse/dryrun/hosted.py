"""What an engine that offloads does on the host, kept apart from what its device does.

In a dry run all tensors are alike; those in pinned memory are the host's. A kernel that was noted is then

    on host tensors alone              work of the host, and what it makes is the host's too
    from the device to the host        a copy over the bus, which the host waits for when it reads the result
    from the host to the device        a copy over the bus, which the device waits for when it reads the result; or
                                       before the next collective, as engines have it
    on tensors of both                 the copy, and the work where its result lies

Operations get new numbers, in order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from paceline.cluster.kernels import Operation
from paceline.predict.replay.program import TO_DEVICE, TO_HOST, Event, Issue, OnHost, Run, Wait

_COPIES = ("copy_", "_foreach_copy_")


def mark_host_work(
    events: Sequence[Event], host: set[int], places: Mapping[int, int], rank: int
) -> tuple[tuple[Event, ...], tuple[int, ...]]:
    """Returns the events with what the host does, and where each of those that were given now is.

    ``host`` are the host's storages, ``places`` the storages in which tensors lie.
    """
    hosting = _Hosting(events, host, places, rank)
    found: list[Event] = []
    starts = []
    for event in events:
        starts.append(len(found))
        found += hosting.place(event)
    return tuple(found), (*starts, len(found))


class _Hosting:
    """What is on its way over the bus, and how operations are numbered."""

    def __init__(self, events: Sequence[Event], host: set[int], places: Mapping[int, int], rank: int) -> None:
        self._host = set(host)
        self._places = places
        self._rank = rank
        self._next = min((event.number for event in events if isinstance(event, Issue)), default=0)
        self._numbers: dict[int, int] = {}  # of operations, by those that they had
        self._coming: dict[int, int] = {}  # copies to the device, by storage
        self._leaving: dict[int, list[int]] = {}  # copies to the host, by storage

    def place(self, event: Event) -> Iterator[Event]:
        if isinstance(event, Run):
            yield from self._run(event)
        elif isinstance(event, Issue):
            yield from self._arrived(list(self._coming), event.phase)
            self._numbers[event.number] = self._next
            yield replace(event, number=self._take_number())
        elif isinstance(event, Wait):
            yield replace(event, number=self._numbers.get(event.number, event.number))
        else:
            yield event

    def _run(self, event: Run) -> Iterator[Event]:
        kernel = event.operation
        reads, writes = self._storages(kernel.reads), self._storages(kernel.writes)
        from_host, to_host = self._host & reads.keys(), self._host & writes.keys()
        is_copy = kernel.name in _COPIES
        if not from_host and not to_host:
            yield from self._arrived([*reads, *writes], kernel.phase)
            yield event
        elif not reads.keys() - from_host and (to_host or not is_copy):
            self._host |= writes.keys()
            yield self._work(kernel, (*reads, *writes))
        elif to_host:
            yield from self._out(kernel, {each: size for each, size in reads.items() if each not in from_host}, writes)
        else:
            size = sum(size for each, size in reads.items() if each in from_host)
            copy = self._copy(TO_DEVICE, size, kernel.phase)
            yield from self._finished(list(from_host), kernel.phase)
            yield copy
            self._coming |= dict.fromkeys(writes, copy.number)
            if not is_copy:
                yield from self._arrived([*reads, *writes], kernel.phase)
                yield event

    def _out(self, kernel: Operation, sources: Mapping[int, int], writes: Mapping[int, int]) -> Iterator[Event]:
        yield from self._arrived(list(sources), kernel.phase)
        copy = self._copy(TO_HOST, sum(sources.values()), kernel.phase)
        yield copy
        for each in writes:
            self._leaving.setdefault(each, []).append(copy.number)
        if kernel.name not in _COPIES:
            yield self._work(kernel, tuple(writes))

    def _work(self, kernel: Operation, storages: Sequence[int]) -> OnHost:
        """Returns work of the host, which waits for what it reads."""
        return OnHost(kernel.name, _touched(kernel), self._left(storages), phase=kernel.phase)

    def _finished(self, storages: Sequence[int], phase: str) -> Iterator[OnHost]:
        """Yields that the host waits until what it sends has come."""
        waits = self._left(storages)
        if waits:
            yield OnHost("copy", 0, waits, phase=phase)

    def _left(self, storages: Sequence[int]) -> tuple[int, ...]:
        """Returns the copies that the host waits for before it touches storages."""
        return tuple(sorted({number for each in storages for number in self._leaving.pop(each, ())}))

    def _arrived(self, storages: Sequence[int], phase: str) -> Iterator[Wait]:
        """Yields what the device waits for before it touches storages."""
        numbers = {self._coming.pop(each) for each in storages if each in self._coming}
        yield from (Wait(number, phase) for number in sorted(numbers))

    def _copy(self, kind: str, num_bytes: int, phase: str) -> Issue:
        return Issue(self._take_number(), kind, num_bytes, (self._rank,), kind, phase=phase)

    def _take_number(self) -> int:
        self._next += 1
        return self._next - 1

    def _storages(self, pairs: Sequence[tuple[int, int]]) -> dict[int, int]:
        found: dict[int, int] = {}
        for tensor, size in pairs:
            place = self._places[tensor]
            found[place] = found.get(place, 0) + size
        return found


def _touched(kernel: Operation) -> int:
    """Returns the bytes that a host reads and writes: a fused update writes all that it reads but the gradients."""
    if not kernel.name.startswith("_fused_"):
        return kernel.num_bytes
    gradients = sum(size for _, size in kernel.writes)  # as large as the parameters, which are named as written
    return 2 * sum(size for _, size in kernel.reads) - gradients
