"""Routes: the collectives of a pass, in the one order in which all ranks issue them.

Sharded ranks wait for one another in every collective, so all must issue the same ones in the same order, whatever
branch of the model each of them takes. A route is that order. The first pass *learns* it: before each collective the
ranks tell one another what they want next, and all do the same one of these. Later passes *follow* it without
asking: a rank that needs a leg first does those before it that it did not need itself (it gathers for the others, and
gives zeros to a reduction). So a rank may skip units, and none ever waits for a collective that another never issues.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch

from paceline.comm.base import Communicator, control_device
from paceline.errors import UsageError

_END = -1


class Leg(NamedTuple):
    """One collective of a pass: a unit is gathered, or its gradients are reduced."""

    unit: int
    kind: Literal["gather", "reduce"]

    @property
    def is_gather(self) -> bool:
        return self.kind == "gather"


def complete(learned: Sequence[Leg], order: Sequence[Leg]) -> list[Leg]:
    """Inserts the legs of ``order`` that were not learned, each before the first that follows it there."""
    legs = list(dict.fromkeys(learned))
    for place in reversed(range(len(order))):
        if order[place] in legs:
            continue
        later = set(order[place + 1 :])
        behind = next((i for i, leg in enumerate(legs) if leg in later), len(legs))
        legs.insert(behind, order[place])
    return legs


def issue_plan(legs: Sequence[Leg], prefetch: int) -> list[list[Leg]]:
    """Returns what is issued when the pass begins, and when each leg is reached: the leg itself, unless that is done,
    and the next gathers ahead of use.

    The same on every rank. A unit is gathered at most ``prefetch`` gathers early, which bounds the memory.
    """
    issued: set[int] = set()  # places in ``legs``

    def next_gathers(start: int) -> list[Leg]:
        ahead = [i for i in range(start, len(legs)) if legs[i].is_gather][:prefetch]
        fresh = [i for i in ahead if i not in issued]
        issued.update(fresh)
        return [legs[i] for i in fresh]

    plan = [next_gathers(0)]
    for place, leg in enumerate(legs):
        now = [] if place in issued else [leg]
        issued.add(place)
        plan.append(now + (next_gathers(place + 1) if leg.is_gather else []))
    return plan


@dataclass(slots=True, eq=False)
class Route:
    """One pass's legs, and how far this rank has come."""

    comm: Communicator
    order: Sequence[Leg]
    names: Sequence[str]  # of the units
    issue: Callable[[Leg], None]  # starts a leg's collective
    release: Callable[[Leg], None]  # is called for a gather that this rank has passed by without use
    prefetch: int
    legs: list[Leg] | None = None
    repeated: set[Leg] = field(default_factory=set)  # what the first pass did more than once
    read: set[Leg] = field(default_factory=set)  # units that some rank read beside their calls; the same on all ranks
    _learned: list[Leg] = field(default_factory=list)
    _position: int = 0
    _place_of: dict[Leg, int] = field(default_factory=dict)
    _is_ahead: bool = False
    _plan: list[list[Leg]] = field(default_factory=lambda: [[]])  # what is issued at first, and at each leg

    @property
    def is_learning(self) -> bool:
        """Whether the ranks still ask one another."""
        return self.legs is None

    def begin(self) -> None:
        self._position = 0
        self._learned = []
        self._is_ahead = False

    def look_ahead(self) -> None:
        """Issues the first gathers, ahead of use. Once in a pass, at the same place on all ranks: before any leg."""
        if not self._is_ahead:
            self._is_ahead = True
            for leg in self._plan[0]:
                self.issue(leg)

    def reach(self, leg: Leg, *, is_read: bool = False) -> None:
        """Issues ``leg``, and those passed by before it. ``is_read``: of a parameter, beside calls, which all learn."""
        if self.legs is None:
            while self._agree(leg, is_read=is_read) != leg:
                pass
            return
        self.look_ahead()
        place = self._place_of[leg]
        if place < self._position:
            raise UsageError(
                f"rank {self.comm.rank} needs unit {self.names[leg.unit]} again, after the ranks had passed it\n"
                "  the first pass has settled the order in which all ranks gather and reduce their units\n"
                "  call every unit as often and in the same order as in the first step, keep units gathered\n"
                "  (reshard_after_forward=False), or make one unit of those whose order changes"
            )
        while self._position <= place:
            self._go_on(is_used=self._position == place)

    def reach_ready(self, is_ready: Callable[[Leg], bool]) -> None:
        """Issues the reductions that come next, as far as ``is_ready`` says so of each."""
        while self.legs is not None and self._position < len(self.legs):
            leg = self.legs[self._position]
            if leg.is_gather or not is_ready(leg):
                return
            self.look_ahead()
            self._go_on(is_used=True)

    def finish(self, drop: Callable[[Leg], bool] = lambda _leg: False) -> None:
        """Ends the pass: does what the other ranks may still need. A first pass leaves ``drop`` out of later ones."""
        if self.legs is None:
            while self._agree(None) is not None:
                pass
            for leg in self.order:  # reductions that nobody asked for: of units without inputs that want gradients
                if not leg.is_gather and leg not in self._learned:
                    self._learned.append(leg)
                    self.issue(leg)
            self.repeated = {leg for leg in self._learned if self._learned.count(leg) > 1}
            self.order = tuple(leg for leg in self.order if not drop(leg))
            self.legs = complete([leg for leg in self._learned if not drop(leg)], self.order)
            self._place_of = {leg: place for place, leg in enumerate(self.legs)}
            self._plan = issue_plan(self.legs, self.prefetch)
            self._position = len(self.legs)
            return
        self.look_ahead()
        while self._position < len(self.legs):
            self._go_on(is_used=False)

    def _go_on(self, *, is_used: bool) -> None:
        leg = (self.legs or ())[self._position]
        self._position += 1
        for each in self._plan[self._position]:
            self.issue(each)
        if leg.is_gather and not is_used:
            self.release(leg)

    def _agree(self, want: Leg | None, *, is_read: bool = False) -> Leg | None:
        """Asks all ranks what they want (None: nothing more), does the leg furthest behind, and returns it. Syncs."""
        device = control_device(self.comm)
        number = _END if want is None else 2 * self.order.index(want) + is_read
        mine = torch.tensor([number], dtype=torch.int64, device=device)
        wants = torch.empty(self.comm.size, dtype=torch.int64, device=device)
        self.comm.all_gather(wants, mine).wait()
        asked: list[int] = [number for number in wants.tolist() if number != _END]
        if not asked:
            return None
        leg = self.order[min(asked) // 2]
        if 2 * self.order.index(leg) + 1 in asked:
            self.read.add(leg)
        self._learned.append(leg)
        self.issue(leg)
        if leg != want and leg.is_gather:
            self.release(leg)
        return leg
