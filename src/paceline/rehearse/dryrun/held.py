"""Memory of a rank that computes nothing: which storages are alive, of what size, and what they are for.

A storage is noted when an operator first returns a tensor in it, and gone when nothing holds it any more; those whose
memory comes and goes (the full parameters of sharded units) are looked at again and again. What a storage was for is
known when the step is over:

    given      parameters, optimizer states, gradients, buffers: by those who own them
    others     activations, if they were made in forward (or while it is computed again) and lived on into backward;
               else temporary
    left out   what a device never has, such as the stages of other ranks, and what lies on the host: not counted
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from paceline.predict.replay.program import Drop, Hold

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
        found = self._alive.get(storage._cdata)
        return (found or self._add(storage)).number

    def follow(self, tensor: torch.Tensor, category: str) -> None:
        """Looks at the size of a storage from now on, which comes and goes."""
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
        """Says of all that nobody has claimed yet that a device does not have it."""
        for storage in self._alive.values():
            self._categories.setdefault(storage.number, _LEFT_OUT)

    def look(self) -> None:
        """Notes which of the followed storages have other sizes than before."""
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
        """Returns what was taken and given back, in which action and before which place, and resident bytes.

        ``phases`` are those of the places; ``again`` the places where forward is computed once more; ``tensors`` what
        lies in storages.
        """
        found: list[tuple[int, int, Hold | Drop]] = []
        resident: dict[str, int] = {}
        backward = _next_backward(phases)
        for storage in sorted([*self._ended, *self._alive.values()], key=lambda each: each.number):
            category = self._categories.get(storage.number) or _purpose(storage, phases, again, backward)
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


def _purpose(storage: _HeldStorage, phases: Sequence[str], again: set[int], backward: Sequence[int]) -> str:
    if storage.begin < 0 or storage.begin >= len(phases):
        return "temporary"
    if storage.begin in again:
        return "activations"
    end = len(phases) if storage.end is None else storage.end
    return "activations" if phases[storage.begin] == "forward" and backward[storage.begin] < end else "temporary"


def _next_backward(phases: Sequence[str]) -> list[int]:
    """Returns for each place the next one in a backward; past the end where there is none."""
    found, following = [0] * len(phases), len(phases) + 1
    for place in reversed(range(len(phases))):
        if phases[place] == "backward":
            following = place
        found[place] = following
    return found
