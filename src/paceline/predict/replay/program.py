"""What one rank does in one step, as data: kernels, communication and memory in the order in which the host issues it.

    Run     a kernel                  Issue   an operation of the communicator starts
    Hold    memory is taken           Wait    what follows needs it
    Drop    memory is given back      EventMark    an action of a pipeline's schedule begins
    OnHost  the host works itself     Turn    an action is done once more, for another microbatch

A dry run writes it down (dryrun/), ``replay`` prices it for any cluster. A step of many microbatches is recorded with
few, and events are repeated: so kernels of a pipeline are priced, and fused, as often as they were recorded.

``repeat``, without a pipeline. Three microbatches are recorded. The first makes what the others find, the last one
synchronises, and the second stands for all between. Every copy has tensors, memory and operations of its own; what
crosses from one microbatch into the next does so from copy to copy.

``Player``, in a pipeline: actions are done again in the order of the whole schedule. An action of one microbatch (its
forward at a stage, a send, ...) is like that of any other, but for the first, which makes what the others find, and the
last, which reduces. So three are recorded, each action under an ``EventMark``, and the second stands for all between.
In every copy

    what the same microbatch made      is the copy's own: operations, and memory that a later action gives back
    what the first one made            is there once, as are gradients
    sends                              are waited for where this schedule tells that they have arrived
    what lives on                      does so once
    kernels                            are the very same objects, so that they are priced once
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Literal, TypeAlias

from paceline.cluster.kernels import Operation

LOSS = "loss"  # the block of a compiled loss: its kernels are fused, softmax and all


@dataclass(frozen=True, slots=True)
class Run:
    """A kernel, and the block of the model that it belongs to; no block: the ends, the engine or the optimizer."""

    operation: Operation
    block: str = ""


@dataclass(frozen=True, slots=True)
class Issue:
    """A collective, or one side of a message, starts. What is on one lane is done in the order of its issue.

    ``ranks``: of a message, its sender and its receiver. A collective that is made of messages has an ``algorithm``,
    ``share`` is the part of its rounds that starts here, ``messages`` are this rank's: kind, number and bytes.
    """

    number: int
    kind: str
    num_bytes: int
    ranks: tuple[int, ...]
    lane: str
    tag: int = 0
    phase: str = "forward"
    algorithm: str = ""
    share: float = 1.0
    messages: tuple[tuple[str, int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Wait:
    number: int
    phase: str = "forward"


@dataclass(frozen=True, slots=True)
class OnHost:
    """The host works itself, and launches nothing; before, it waits, if it ``reads`` for all compute."""

    name: str
    num_bytes: int
    waits: tuple[int, ...] = ()
    reads: bool = False
    phase: str = "optimizer"


@dataclass(frozen=True, slots=True)
class Hold:
    """Memory is taken. ``tensors`` are those of kernels that lie in it."""

    number: int
    num_bytes: int
    category: str
    tensors: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Drop:
    number: int


@dataclass(frozen=True, slots=True)
class EventMark:
    """What follows, up to the next mark, is one action of a schedule; after all actions, of the ``END``."""

    kind: str
    stage: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class Turn:
    """An action of the whole step, ``like`` a recorded microbatch's; ``arrived``: sends that it learns have arrived."""

    kind: str
    stage: int
    microbatch: int
    like: int
    arrived: tuple[tuple[str, int, int], ...] = ()


Event: TypeAlias = Run | Issue | Wait | Hold | Drop | EventMark | OnHost
END = "end"
COPIES = TO_HOST, TO_DEVICE = "to_host", "to_device"  # kinds of copies over a device's bus: issued, and waited for
CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "buffers", "temporary")


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One step of one rank.

    ``resident``: bytes by category that are there before the step and after it. ``elements``: what the samples of the
    global batch count as. ``model_flops``: of this rank's part, three times its forward.
    ``graphs``: whether the step is replayed from a CUDA graph; auto: where the host would be what limits it.
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

    def peak_memory(self) -> dict[str, int]:
        now: Counter[str] = Counter(self.resident)
        total = most = sum(now.values())
        peak, held = dict(now), dict[int, Hold]()
        for event in Player(memory_alone(self.events), self.order).run() if self.order else self.events:
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


_Key: TypeAlias = tuple[str, int, int]  # kind, stage and microbatch of an action


def counted(events: Sequence[Event], order: Sequence[Turn]) -> Iterator[tuple[Event, int]]:
    """Iterates over recorded events, and how often the actions that they belong to are done in the whole step."""
    turns = Counter((turn.kind, turn.stage, turn.like) for turn in order)
    for key, piece in _pieces(events).items():
        times = 1 if key in (_BEFORE, _BEHIND) else turns[key]
        yield from ((event, times) for event in piece)


def is_playable(events: Sequence[Event], order: Sequence[Turn]) -> bool:
    """Whether all actions were recorded, and none waits for an operation of another microbatch than its own."""
    pieces = _pieces(events)
    if any((turn.kind, turn.stage, turn.like) not in pieces for turn in order):
        return False
    issued = {e.number: (key, e.kind) for key, piece in pieces.items() for e in piece if isinstance(e, Issue)}
    for key, piece in pieces.items():
        for event in piece if key[0] != END else ():
            if isinstance(event, Wait) and event.number in issued:
                source, kind = issued[event.number]
                if kind != "send" and source[2] != key[2]:
                    return False
    return True


def memory_alone(events: Sequence[Event]) -> list[Event]:
    """Leaves out all but memory, and of what an action takes and gives back itself all but its worst moment."""
    found: list[Event] = []
    piece: list[Hold | Drop] = []
    sizes = {event.number: event.num_bytes for event in events if isinstance(event, Hold)}
    for event in events:
        if isinstance(event, EventMark):
            found += (*_worst(piece, sizes), event)
            piece = []
        elif isinstance(event, Hold | Drop):
            piece.append(event)
    return [*found, *_worst(piece, sizes)]


def _worst(piece: Sequence[Hold | Drop], sizes: Mapping[int, int]) -> list[Event]:
    now = most = best = 0
    for place, event in enumerate(piece):
        now += event.num_bytes if isinstance(event, Hold) else -sizes.get(event.number, 0)
        if now > most:
            most, best = now, place + 1
    held = {event.number for event in piece if isinstance(event, Hold)}
    dropped = {event.number for event in piece if isinstance(event, Drop)}
    first = piece[:best]
    there = {e.number for e in first if isinstance(e, Hold)} - {e.number for e in first if isinstance(e, Drop)}
    left_out = (held & dropped) - there
    return [event for event in piece if event.number not in left_out]


class Player:
    """The events of the whole step, of which some were recorded."""

    def __init__(self, events: Sequence[Event], order: Sequence[Turn]) -> None:
        self._order, self._pieces = order, _pieces(events)
        self._last = {turn.like: turn.microbatch for turn in order}  # whose turn it is last
        self._first = {turn.like: turn.microbatch for turn in reversed(order)}
        self._is_send: set[int] = set()
        self._issuers: dict[int, int] = {}  # microbatches, by what they made
        self._holders: dict[int, int] = {}
        self._droppers: dict[int, int] = {}
        self._makers: dict[int, int] = {}
        for (kind, _, microbatch), piece in self._pieces.items():
            for event in piece if kind != END else ():
                if isinstance(event, Issue):
                    self._issuers[event.number] = microbatch
                    if event.kind == "send":
                        self._is_send.add(event.number)
                elif isinstance(event, Hold):
                    self._holders[event.number] = microbatch
                elif isinstance(event, Drop):
                    self._droppers[event.number] = microbatch
                elif isinstance(event, Run) and kind == "F":
                    for tensor, _ in event.operation.writes:
                        self._makers.setdefault(tensor, microbatch)
        numbers = [e.number for e in events if isinstance(e, Issue | Wait | Hold | Drop)]
        self._fresh = count(max(numbers, default=0) + 1)
        self._numbers: dict[tuple[str, int, int], int] = {}  # of operations ("") and memory ("held"), by microbatch
        self._sent: dict[_Key, list[int]] = {}

    def run(self) -> Iterator[Event]:
        yield from self._pieces.get(_BEFORE, ())
        for turn in self._order:
            yield from self._take(turn)
        for sends in self._sent.values():
            yield from (Wait(number, "optimizer") for number in sends)
        yield from self._end(self._pieces.get(_BEHIND, ()))

    def _take(self, turn: Turn) -> Iterator[Event]:
        arrived = list(turn.arrived)
        for event in self._pieces[turn.kind, turn.stage, turn.like]:
            if isinstance(event, Issue):
                number = self._number("", event.number, turn.microbatch)
                if event.kind == "send":
                    self._sent.setdefault((turn.kind, turn.stage, turn.microbatch), []).append(number)
                yield replace(event, number=number)
            elif isinstance(event, Wait):
                if event.number in self._is_send:
                    continue
                if event.number in self._issuers:  # else it was issued before the step
                    event = replace(event, number=self._number("", event.number, turn.microbatch))
                yield event
                for key in arrived:  # what has come tells so
                    yield from (Wait(number, event.phase) for number in self._sent.pop(key, ()))
                arrived = []
            elif isinstance(event, Hold | Drop):
                yield from self._memory(event, turn)
            else:
                yield event

    def _memory(self, event: Hold | Drop, turn: Turn) -> Iterator[Event]:
        holder = self._holders.get(event.number)
        if holder != turn.like:
            if turn.microbatch == self._first[turn.like]:
                yield event if holder is None else self._of_last(event, holder)  # None: there before the step
        elif self._droppers.get(event.number) == holder or turn.microbatch == self._last[turn.like]:
            yield replace(event, number=self._number("held", event.number, turn.microbatch))

    def _end(self, piece: Sequence[Event]) -> Iterator[Event]:
        """What follows the actions: kernels that read what one microbatch's forward made run for each of them."""
        microbatches: dict[int, set[int]] = {}
        for turn in self._order:
            microbatches.setdefault(turn.like, set()).add(turn.microbatch)
        place = 0
        for maker, begin, end in _readings(piece, self._makers):
            yield from self._once(piece[place:begin])
            copies = len(microbatches.get(maker, ()))  # none: a copy stands for it
            yield from (event for event in piece[begin:end] if isinstance(event, Hold | Drop))
            yield from [event for event in piece[begin:end] if not isinstance(event, Hold | Drop)] * copies
            place = end
        yield from self._once(piece[place:])

    def _once(self, events: Sequence[Event]) -> Iterator[Event]:
        for event in events:
            if isinstance(event, Drop) and event.number in self._holders:
                yield self._of_last(event, self._holders[event.number])
            elif not (isinstance(event, Wait) and event.number in self._is_send):
                yield event

    def _of_last(self, event: Hold | Drop, holder: int) -> Event:
        """Returns the event for the memory of the last microbatch that is like its holder."""
        return replace(event, number=self._number("held", event.number, self._last.get(holder, holder)))

    def _number(self, kind: str, number: int, microbatch: int) -> int:
        key = (kind, number, microbatch)
        if key not in self._numbers:
            self._numbers[key] = next(self._fresh)
        return self._numbers[key]


_BEFORE: _Key = ("", 0, 0)
_BEHIND: _Key = (END, 0, 0)


def _pieces(events: Sequence[Event]) -> dict[_Key, list[Event]]:
    found: dict[_Key, list[Event]] = {}
    piece = found.setdefault(_BEFORE, [])
    for event in events:
        if isinstance(event, EventMark):
            piece = found.setdefault((event.kind, event.stage, event.microbatch), [])
        else:
            piece.append(event)
    return found


def _readings(piece: Sequence[Event], makers: Mapping[int, int]) -> list[tuple[int, int, int]]:
    """Returns which stretches of events read what one microbatch alone has made: microbatch, begin and end."""
    makers = dict(makers)
    found: dict[int, tuple[int, int, int]] = {}
    for place, event in enumerate(piece):
        if not isinstance(event, Run):
            continue
        sources = {makers[tensor] for tensor, _ in event.operation.reads if tensor in makers}
        if len(sources) == 1:  # what the kernel writes is then that microbatch's too
            maker = sources.pop()
            makers |= {tensor: maker for tensor, _ in event.operation.writes}
            found[maker] = (maker, found[maker][1] if maker in found else place, place + 1)
    return sorted(found.values(), key=lambda each: each[1])


def repeat(events: Sequence[Event], start: int, stop: int, times: int) -> tuple[Event, ...]:
    """Returns the events with those from ``start`` up to ``stop``, which are alike in every copy, that many times."""
    if times <= 1 or stop <= start:
        return tuple(events)
    middle = _Middle(events, start, stop)
    copies = (event for copy in range(times) for event in middle.copy(copy, is_last=copy == times - 1))
    return (*events[:start], *copies, *middle.follow(events[stop:], times - 1))


class _Middle:
    def __init__(self, events: Sequence[Event], start: int, stop: int) -> None:
        self._events = events[start:stop]
        issued = [event.number for event in self._events if isinstance(event, Issue)]
        self._first_issue = min(issued, default=0)
        self._num_issues = max(issued, default=-1) + 1 - self._first_issue
        self._held = {event.number for event in self._events if isinstance(event, Hold)}
        self._dropped = {event.number for event in self._events if isinstance(event, Drop)}
        self._fresh = set(_tensors(self._events)) - set(_tensors(events[:start]))
        # Room for the numbers of all copies, past any number that there is.
        self._memory_step = max((event.number for event in events if isinstance(event, Hold | Drop)), default=0) + 1
        self._tensor_step = max(_tensors(events), default=0) + 1

    def copy(self, number: int, *, is_last: bool) -> Iterator[Event]:
        for event in self._events:
            if isinstance(event, Hold):
                if event.number in self._dropped or is_last:  # what lives on does so once
                    further = self._tensor_step * number
                    tensors = tuple(each + further if each in self._fresh else each for each in event.tensors)
                    yield replace(event, number=self._memory(event.number, number), tensors=tensors)
            elif isinstance(event, Drop):
                if event.number in self._held or number == 0:
                    yield Drop(self._memory(event.number, number))
            elif not isinstance(event, EventMark):
                yield self._moved(event, number, first=0)

    def follow(self, events: Sequence[Event], last: int) -> Iterator[Event]:
        for event in events:
            if isinstance(event, Drop):
                is_own = event.number in self._held and event.number not in self._dropped
                yield Drop(self._memory(event.number, last)) if is_own else event
            elif isinstance(event, Hold | EventMark):
                yield event
            else:
                yield self._moved(event, last, first=self._first_issue)

    def _moved(self, event: Run | Issue | Wait | OnHost, copy: int, *, first: int) -> Event:
        """Gives an event the numbers of a copy; operations before ``first`` keep theirs.

        What a copy waits for was issued by itself or, as long before its beginning, by the one before.
        """
        if copy == 0:
            return event
        if isinstance(event, Run):
            kernel, fresh, further = event.operation, self._fresh, self._tensor_step * copy  # of tens of thousands
            reads = tuple([(each + further if each in fresh else each, size) for each, size in kernel.reads])
            writes = tuple([(each + further if each in fresh else each, size) for each, size in kernel.writes])
            return Run(replace(kernel, reads=reads, writes=writes), event.block)
        further = self._num_issues * copy
        if isinstance(event, OnHost):
            return replace(event, waits=tuple(each + further if each >= first else each for each in event.waits))
        return replace(event, number=event.number + further) if event.number >= first else event

    def _memory(self, number: int, copy: int) -> int:
        return number + self._memory_step * copy if number in self._held else number


def _tensors(events: Sequence[Event]) -> Iterator[int]:
    runs = (event.operation for event in events if isinstance(event, Run))
    return (tensor for kernel in runs for tensor, _ in (*kernel.reads, *kernel.writes))
