"""Are virtual ranks in the same step at each update of what they train? See ``health/pairing.py``.

Each rank compares with its neighbours, of which the later one finds a difference, and raises it.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from paceline.comm.ledger.call_sites import USER, kind_of_file
from paceline.comm.ledger.updates import TrainedParameters, UpdateNotes
from paceline.comm.virtual.group import VirtualGroup
from paceline.errors import CollectiveMismatchError
from paceline.health.ledger_view import GroupName, LedgerCall, LedgerEntry
from paceline.health.pairing import PairedRanks, Update, pairing_verdict

_MOST_KEPT = 32  # updates of a rank: neighbours are never further apart


class VirtualPairing:
    """Compares the updates of virtual ranks; ``group`` is all of them."""

    def __init__(self, group: VirtualGroup) -> None:
        self.trained = [TrainedParameters() for _ in group.ranks]
        self._group = group
        self._notes = [UpdateNotes(seldom_s=0.0) for _ in group.ranks]
        self._made: list[dict[int, tuple[Update, LedgerEntry]]] = [{} for _ in group.ranks]  # by collectives
        self._pairs = [PairedRanks() for _ in group.ranks[1:]]  # each rank with the one after it
        self._thread = threading.local()

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        """Compares for as long as the block runs."""
        hook = register_optimizer_step_post_hook(self._end_update)
        try:
            yield
        finally:
            hook.remove()

    def enter(self, rank: int) -> None:
        """Notes that the calling thread is a rank's."""
        self._thread.rank = rank

    def _end_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        rank = getattr(self._thread, "rank", None)
        if rank is not None and self.trained[rank].are_updated_by(optimizer):
            with self._group.world.paused(rank):
                self._compare(rank, sys._getframe(1))

    def _compare(self, rank: int, frame: FrameType) -> None:
        if not self._notes[rank].count(self._group.issued[rank]):
            return
        own = self._notes[rank].note(0, frame)
        made = self._made[rank]
        made[own.collectives] = own, self._collective(rank, frame)
        if len(made) > _MOST_KEPT:
            del made[next(iter(made))]
        for low, high in ((rank - 1, rank), (rank, rank + 1)):
            if low < 0 or high == len(self._made):
                continue
            both = self._made[low].get(own.collectives), self._made[high].get(own.collectives)
            if both[0] is None or both[1] is None:
                continue
            found = self._pairs[low].compare(both[0][0], both[1][0])
            if found is not None:
                name = self._notes[rank].name_of(found.counter)
                verdict = pairing_verdict(found, (low, high), (both[0][1], both[1][1]), name)
                raise CollectiveMismatchError(verdict.sentence)

    def _collective(self, rank: int, frame: FrameType) -> LedgerEntry:
        """Returns the last collective of a rank, with its line and that of the update."""
        called = self._group.last_calls[rank]
        assert called is not None
        return LedgerEntry(
            number=0,
            group=GroupName(self._group.ranks),
            sequence=self._group.issued[rank] - 1,
            call=LedgerCall(kind=called.kind, op=called.detail),
            site=f"{called.where}, before the update at {_user_line(frame)}",
        )


def _user_line(frame: FrameType) -> str:
    current: FrameType | None = frame
    while current is not None:
        if kind_of_file(current.f_code.co_filename) == USER:
            return f"{current.f_code.co_filename}:{current.f_lineno} in {current.f_code.co_name}"
        current = current.f_back
    return "an unknown line"
