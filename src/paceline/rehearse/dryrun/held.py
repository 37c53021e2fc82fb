"""Memory of a rank that computes nothing: which storages are alive, of what size, and what they are for.

A storage is noted when an operator first returns a tensor in it, and gone when nothing holds it any more; those whose
memory comes and goes (the full parameters of sharded units) are looked at again and again. What a storage was for is
known when the step is over:

    given      parameters, optimizer states, gradients, buffers: by those who own them
    others     activations, if they were made in forward (or while it is computed again) and lived on into backward;
               else temporary
    left out   what a device never has, such as the stages of other ranks, and what lies on the host: not counted

``mark_host_work`` keeps what an engine that offloads does on the host apart from what its device does. In a dry run all
tensors are alike; those in pinned memory are the host's. A kernel that was noted is then

    on host tensors alone              work of the host, and what it makes is the host's too
    from the device to the host        a copy over the bus, which the host waits for when it reads the result
    from the host to the device        a copy over the bus, which the device waits for when it reads the result; or
                                       before the next collective, as engines have it
    on tensors of both                 the copy, and the work where its result lies

Operations get new numbers, in order.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, count

import torch

from paceline.cluster.kernels import Operation
from paceline.predict.replay.program import TO_DEVICE, TO_HOST, Drop, Event, Hold, Issue, OnHost, Run, Wait

HOST = "host"
_LEFT_OUT = "left out"


@dataclass(slots=True)
class _HeldStorage:
    number: int
    size: int
    begin: int
    begin_act: int
    end: int | None = None
    end_act: int = 0


class HeldMemory:
    """Follows storages. Times are places in a list of events that somebody else keeps."""

    def __init__(self) -> None:
        self.place = 0  # where the list of events stands
        self.act: Callable[[], int] = lambda: 0  # which action of a schedule is being done
        self._alive: dict[int, _HeldStorage] = {}  # by the address of the storage
        self._watches: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._elastic: dict[int, tuple[torch.UntypedStorage, str]] = {}
        self._ended: list[_HeldStorage] = []
        self._categories: dict[int, str] = {}  # by number
        self._next = 0
        self.has_host = False  # whether there is memory of the host

    def note(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            if tensor.is_meta:
                storage = tensor.untyped_storage()
                if storage._cdata not in self._alive:
                    self._add(storage)

    def number(self, tensor: torch.Tensor) -> int:
        """Returns the number of a tensor's storage; those that were not noted yet are now."""
        storage = tensor.untyped_storage()
        return (self._alive.get(storage._cdata) or self._add(storage)).number

    def follow(self, tensor: torch.Tensor, category: str) -> None:
        storage = tensor.untyped_storage()
        self.number(tensor)
        self._elastic[storage._cdata] = (storage, category)
        self.claim([tensor], category)

    def claim(self, tensors: Iterable[torch.Tensor], category: str) -> None:
        """Says what tensors are for, now and until they are gone; who says it first is right."""
        self.has_host |= category == HOST
        with torch._C.DisableTorchFunction():  # modes would be asked about each attribute of each tensor
            for tensor in tensors:
                if tensor.is_meta:
                    self._categories.setdefault(self.number(tensor), category)

    def is_on_host(self, tensor: torch.Tensor) -> bool:
        return self._categories.get(self.number(tensor)) == HOST

    @property
    def host_storages(self) -> set[int]:
        return {number for number, category in self._categories.items() if category == HOST}

    def leave_out(self) -> None:
        for storage in self._alive.values():
            self._categories.setdefault(storage.number, _LEFT_OUT)

    def look(self) -> None:
        for address, (storage, category) in self._elastic.items():
            known = self._alive[address]
            size = storage.nbytes()
            if size != known.size:
                self._end(known)
                self._alive[address] = fresh = self._fresh(size)
                self._categories[fresh.number] = category

    def start(self) -> None:
        """Begins a step: what is there stays, unless it goes during the step; what has gone is forgotten."""
        self._ended = []
        self.place = 0
        for storage in self._alive.values():
            storage.begin, storage.begin_act = -1, 0

    def events(
        self, phases: Sequence[str], again: set[int], tensors: Mapping[int, Sequence[int]]
    ) -> tuple[list[tuple[int, int, Hold | Drop]], dict[str, int]]:
        """Returns what was taken and given back, in which action and before which place, and resident bytes."""
        found: list[tuple[int, int, Hold | Drop]] = []
        resident: dict[str, int] = {}
        backward, following = [0] * len(phases), len(phases) + 1  # for each place the next one in a backward
        for place in reversed(range(len(phases))):
            following = place if phases[place] == "backward" else following
            backward[place] = following

        def purpose(storage: _HeldStorage) -> str:
            if storage.begin < 0 or storage.begin >= len(phases):
                return "temporary"
            end = len(phases) if storage.end is None else storage.end
            lives_on = phases[storage.begin] == "forward" and backward[storage.begin] < end
            return "activations" if storage.begin in again or lives_on else "temporary"

        for storage in sorted([*self._ended, *self._alive.values()], key=lambda each: each.number):
            category = self._categories.get(storage.number) or purpose(storage)
            if category in (_LEFT_OUT, HOST):
                continue
            if storage.begin < 0 and storage.end is None:
                resident[category] = resident.get(category, 0) + storage.size
            elif storage.size:
                taken = Hold(storage.number, storage.size, category, tuple(tensors.get(storage.number, ())))
                found.append((storage.begin_act, max(storage.begin, 0), taken))
                if storage.end is not None:
                    found.append((storage.end_act, storage.end, Drop(storage.number)))
        return found, resident

    def _add(self, storage: torch.UntypedStorage) -> _HeldStorage:
        made = self._fresh(storage.nbytes())
        address = storage._cdata
        self._alive[address] = made
        self._watches[address] = weakref.ref(storage, functools.partial(self._gone, address))
        return made

    def _fresh(self, size: int) -> _HeldStorage:
        self._next += 1
        return _HeldStorage(number=self._next, size=size, begin=self.place, begin_act=self.act())

    def _gone(self, address: int, watch: weakref.ref[torch.UntypedStorage]) -> None:
        del watch, self._watches[address]
        self._end(self._alive.pop(address))

    def _end(self, storage: _HeldStorage) -> None:
        storage.end, storage.end_act = self.place, self.act()
        self._ended.append(storage)


_COPIES = ("copy_", "_foreach_copy_")


def mark_host_work(
    events: Sequence[Event], host: set[int], places: Mapping[int, int], rank: int
) -> tuple[tuple[Event, ...], tuple[int, ...]]:
    """Returns the events with what the host does, whose storages ``host`` are, and where each of those given is."""
    hosting = _Hosting(events, host, places, rank)
    found = [list(hosting.place(event)) for event in events]
    return tuple(chain.from_iterable(found)), tuple(accumulate(map(len, found), initial=0))


class _Hosting:
    """What is on its way over the bus, and how operations are numbered."""

    def __init__(self, events: Sequence[Event], host: set[int], places: Mapping[int, int], rank: int) -> None:
        self._host, self._places, self._rank = set(host), places, rank
        self._next = count(min((event.number for event in events if isinstance(event, Issue)), default=0))
        self._numbers: dict[int, int] = {}  # of operations, by those that they had
        self._coming: dict[int, int] = {}  # copies to the device, by storage
        self._leaving: dict[int, list[int]] = {}  # copies to the host, by storage

    def place(self, event: Event) -> Iterator[Event]:
        if isinstance(event, Run):
            yield from self._run(event)
        elif isinstance(event, Issue):
            yield from self._arrived(list(self._coming), event.phase)
            number = self._numbers[event.number] = next(self._next)
            yield replace(event, number=number)
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
            sources = {each: size for each, size in reads.items() if each not in from_host}
            yield from self._arrived(list(sources), kernel.phase)
            copy = self._copy(TO_HOST, sum(sources.values()), kernel.phase)
            yield copy
            for each in writes:
                self._leaving.setdefault(each, []).append(copy.number)
            if not is_copy:
                yield self._work(kernel, tuple(writes))
        else:
            size = sum(size for each, size in reads.items() if each in from_host)
            copy = self._copy(TO_DEVICE, size, kernel.phase)
            if waits := self._left(list(from_host)):  # the host waits until what it sends has come
                yield OnHost("copy", 0, waits, phase=kernel.phase)
            yield copy
            self._coming |= dict.fromkeys(writes, copy.number)
            if not is_copy:
                yield from self._arrived([*reads, *writes], kernel.phase)
                yield event

    def _work(self, kernel: Operation, storages: Sequence[int]) -> OnHost:
        """Returns work of the host, which waits for what it reads."""
        touched = kernel.num_bytes
        if kernel.name.startswith("_fused_"):  # an update writes all that it reads but the gradients
            gradients = sum(size for _, size in kernel.writes)  # as large as the parameters, which are named as written
            touched = 2 * sum(size for _, size in kernel.reads) - gradients
        return OnHost(kernel.name, touched, self._left(storages), phase=kernel.phase)

    def _left(self, storages: Sequence[int]) -> tuple[int, ...]:
        """Returns the copies that the host waits for before it touches storages."""
        return tuple(sorted({number for each in storages for number in self._leaving.pop(each, ())}))

    def _arrived(self, storages: Sequence[int], phase: str) -> Iterator[Wait]:
        """Yields what the device waits for before it touches storages."""
        numbers = {self._coming.pop(each) for each in storages if each in self._coming}
        yield from (Wait(number, phase) for number in sorted(numbers))

    def _copy(self, kind: str, num_bytes: int, phase: str) -> Issue:
        return Issue(next(self._next), kind, num_bytes, (self._rank,), kind, phase=phase)

    def _storages(self, pairs: Sequence[tuple[int, int]]) -> dict[int, int]:
        found: dict[int, int] = {}
        for tensor, size in pairs:
            place = self._places[tensor]
            found[place] = found.get(place, 0) + size
        return found
