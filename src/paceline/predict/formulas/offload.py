"""What offload adds to a step: a walk through it in the order in which the engines issue things.

For a rank's slice of p parameters, of w bytes each on the device and 4 on the host:

    before a gather     the host casts the slice (4 + w bytes, where w < 4), and w bytes cross the bus, which compute
                        waits for: fully sharded, in every gather once there are gradients; else once a step
    parameters too      nothing stays between gathers: w bytes in each of them; one rank alone is a unit ahead
    behind a reduction  4 bytes to the host, beside what is computed; from the second microbatch on the host waits for
                        them and adds them up (12 bytes), and launches nothing meanwhile. zero1 reduces once a step.
    gradients alone     the same for all microbatches but the last, in which 4 bytes come back
    hybrid              4 bytes of the sums go to the device and back, once a step
    the update          the norm reads 4 bytes, Adam reads 16 and writes 12, on the host, which nothing hides

What a step takes longer with offload than without is what it costs. Of many microbatches four are walked: the third is
like all others.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

from paceline.plan.layout import Layout, Offload
from paceline.schedule.clock import RankClock

_WIDE, _SUM, _UPDATE = 4, 12, 32  # bytes a parameter: gradients and masters, adding up, the norm and the update
_WALKED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadedUnit:
    """What is gathered, computed and reduced together: seconds, and the parameters of a rank's slice of it."""

    params: float
    forward: float
    backward: float
    gather: float
    reduce: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Offloaded:
    """A step of pieces, in the order of forward; under full sharding the first is the ends, which stay gathered."""

    layout: Layout
    pieces: tuple[OffloadedUnit, ...]
    width: int  # of a parameter on the device
    bus: float
    host: float

    @property
    def params(self) -> float:
        return sum(piece.params for piece in self.pieces)

    def added(self) -> tuple[float, float]:
        """Returns the seconds that copies over the bus add to a step, and those that the host's work adds."""
        usual = _walk(replace(self, layout=replace(self.layout, offload=Offload())))
        copied = _walk(replace(self, host=float("inf")))
        update = _UPDATE * self.params / self.host if self.layout.offload.optimizer else 0.0
        return max(0.0, copied - usual), max(0.0, _walk(self) - copied) + update


def _walk(step: Offloaded) -> float:
    walker = _Walker(step)
    microbatches = step.layout.accumulate
    walked = min(microbatches, _WALKED)
    ends = [walker.microbatch(number, is_last=number == walked - 1) for number in range(walked)]
    return ends[-1] + (microbatches - walked) * (ends[2] - ends[1] if walked == _WALKED else 0.0)


class _Walker:
    def __init__(self, step: Offloaded) -> None:
        self._step = step
        self._clock = RankClock()
        self._layout, self._offload = step.layout, step.layout.offload
        self._is_hosted = self._offload.updates_on_host
        self._leaving: deque[float] = deque()  # ends of copies to the host, in the order in which pieces land

    def microbatch(self, number: int, *, is_last: bool) -> float:
        clock = self._clock
        if self._layout.is_fully_sharded:
            self._forward_of_units()
            self._backward_of_units(number, is_last=is_last)
        else:
            self._forward(number)
            self._backward(number, is_last=is_last)
        if is_last:
            if self._layout.strategy == "hybrid" and self._is_hosted:
                # The sums go to the device, where groups average them, and back.
                seconds = _WIDE * self._step.params / self._step.bus
                clock.work_on_host(0.0, self._leaving)
                clock.wait(clock.issue("to_device", seconds))
                clock.work_on_host(0.0, (clock.issue("to_host", seconds),))
            clock.work_on_host(0.0, self._leaving)
        return clock.now

    def _forward(self, number: int) -> None:
        pieces = self._step.pieces
        ends = [self._fetch(piece, has_changed=True) for piece in pieces] if number == 0 else [0.0] * len(pieces)
        for piece, end in zip(pieces, ends, strict=True):
            self._clock.wait(end)
            self._clock.compute_for(piece.forward)

    def _backward(self, number: int, *, is_last: bool) -> None:
        clock, is_each = self._clock, self._layout.strategy == "zero2"
        ends: list[tuple[OffloadedUnit, float]] = []
        landed = 0
        for piece in reversed(self._step.pieces):
            clock.compute_for(piece.backward)
            if is_each or is_last:
                if is_each and len(ends) > 1:  # two buckets at most are on their way
                    self._land(*ends[landed], number, is_last=is_last)
                    landed += 1
                ends.append((piece, clock.issue("link", piece.reduce)))
        for piece, end in ends[landed:]:
            self._land(piece, end, number if is_each else 0, is_last=is_last)

    # Full sharding: a unit is gathered one ahead of its use, and lands behind the next one's backward.

    def _forward_of_units(self) -> None:
        clock, units = self._clock, self._step.pieces
        ahead = self._fetch(units[0], has_changed=True)
        for place, unit in enumerate(units):
            here = ahead
            if place + 1 < len(units):
                ahead = self._fetch(units[place + 1], has_changed=True)
            clock.wait(here)
            clock.compute_for(unit.forward)

    def _backward_of_units(self, number: int, *, is_last: bool) -> None:
        clock, root, units = self._clock, self._step.pieces[0], self._step.pieces[1:]
        ahead, behind = 0.0, None
        for place in reversed(range(len(units))):
            here = ahead
            if place:
                ahead = self._fetch(units[place - 1], has_changed=number > 0)
            clock.wait(here)
            clock.compute_for(units[place].backward)
            if behind is not None:
                self._land(*behind, number, is_last=is_last)
            behind = (units[place], clock.issue("link", units[place].reduce))
        clock.compute_for(root.backward)
        assert behind is not None
        self._land(*behind, number, is_last=is_last)
        self._land(root, clock.issue("link", root.reduce), number, is_last=is_last)

    def _fetch(self, piece: OffloadedUnit, *, has_changed: bool) -> float:
        """Brings a slice to the device, where it is not there, and gathers; returns when the piece is there."""
        step, clock = self._step, self._clock
        is_moved = self._offload.parameters
        if self._is_hosted and has_changed and step.width < _WIDE:
            clock.work_on_host((_WIDE + step.width) * piece.params / step.host)
        if self._is_hosted and (has_changed or is_moved):
            end = clock.issue("to_device", step.width * piece.params / step.bus)
            if is_moved and self._layout.shards == 1:
                return end
            clock.wait(end)
        return clock.issue("link", piece.gather)

    def _land(self, piece: OffloadedUnit, end: float, number: int, *, is_last: bool) -> None:
        """Waits for a slice of gradients, and sends it to where it is added up."""
        step, clock = self._step, self._clock
        clock.wait(end)
        if not self._offload.is_any:
            return
        seconds = _WIDE * piece.params / step.bus
        before = (self._leaving.popleft(),) if number and self._leaving else ()
        if not self._is_hosted and is_last:
            if number:
                clock.work_on_host(0.0, before)
                clock.wait(clock.issue("to_device", seconds))
            return
        copied = clock.issue("to_host", seconds)
        if number:
            clock.work_on_host(_SUM * piece.params / step.host, (*before, copied))
        else:
            self._leaving.append(copied)
