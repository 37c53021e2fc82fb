"""A pipeline schedule as data: for each rank a row of actions, how rows are walked, and where messages go in them.

An action is one thing that a rank does with one microbatch in one stage. Written down it is its kind, its stage and its
microbatch: ``F2.5`` is the forward of microbatch 5 in stage 2.

    F   forward                           needs F of the stage before
    B   backward, whole                   needs F of this stage, and B or I of the stage after
    I   backward, to the stage's input    needs the same, and is all that the stage before waits for
    W   backward, to the stage's weights  needs I of this stage; nobody waits for it
    SF  sends the output to the next stage            RF  receives the input from the stage before
    SB  sends its input's gradient to the stage before    RB  receives its output's gradient from the next stage
    R   reduces the stage's gradients over its data-parallel ranks, once (``R2``: no microbatch)

The order within a row is what a rank does; the slots of a row show about when, and an empty cell is idleness.

``lower`` makes the program of each rank. A rank sends right after it has made something. It posts a receive before the
compute action that precedes the use, so that the message travels while that action runs; the gradient of an output not
before the output is there, which says how large the gradient will be. Only a use waits: a program gets stuck only where
its compute actions alone would. The messages of one way across one boundary are received in the order in which they are
sent, so that they need no numbers. Cost: O(actions), once a run.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from paceline.errors import UsageError
from paceline.schedule.clock import StreamClock

Kind = Literal["F", "B", "I", "W", "SF", "RF", "SB", "RB", "R"]
Times = dict["Action", tuple[float, float]]

COMPUTE_KINDS: tuple[Kind, ...] = ("F", "B", "I", "W")
MESSAGE_KINDS: tuple[Kind, ...] = ("SF", "RF", "SB", "RB")
_FORM = re.compile(rf"({'|'.join(sorted(get_args(Kind), key=len, reverse=True))})([0-9]{{1,9}})(?:\.([0-9]{{1,9}}))?")


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that a rank does. ``microbatch`` is -1 for R, which is of the whole step."""

    kind: Kind
    stage: int
    microbatch: int = -1

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}" if self.kind == "R" else f"{self.kind}{self.stage}.{self.microbatch}"

    @property
    def is_compute(self) -> bool:
        return self.kind in COMPUTE_KINDS


def parse_action(text: str) -> Action:
    """Reads the text form, such as ``F0.3`` or ``R0``; raises UsageError for anything else."""
    found = _FORM.fullmatch(text.strip())
    if found is None or (found[1] == "R") != (found[3] is None):
        raise UsageError(
            f"{text.strip()[:80]!r} is not an action\n"
            f"  an action is its kind ({', '.join(get_args(Kind))}), its stage, a dot and its microbatch\n"
            "  write F0.3 for the forward of microbatch 3 in stage 0, R0 for the reduce of stage 0"
        )
    return Action(found[1], int(found[2]), -1 if found[3] is None else int(found[3]))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """What every rank of a pipeline does, in order: one row a rank, one cell a slot, None where it is idle."""

    name: str
    rows: tuple[tuple[Action | None, ...], ...]
    placement: tuple[int, ...]  # the rank of each stage
    microbatches: int

    def __str__(self) -> str:
        return self.name

    @property
    def ranks(self) -> int:
        return len(self.rows)

    @property
    def stages(self) -> int:
        return len(self.placement)

    @property
    def splits_backward(self) -> bool:
        return any(action.kind in ("I", "W") for row in self.rows for action in row if action)

    @property
    def has_messages(self) -> bool:
        """Whether the rows say when to send and receive; otherwise ``lower`` decides it."""
        return any(action.kind in MESSAGE_KINDS for row in self.rows for action in row if action)

    def orders(self) -> tuple[tuple[Action, ...], ...]:
        """Returns each rank's actions, without the idle cells."""
        return tuple(tuple(action for action in row if action) for row in self.rows)

    def compute_orders(self) -> tuple[tuple[Action, ...], ...]:
        """Returns each rank's F, B, I and W, without idle cells, messages and reduces."""
        return tuple(tuple(action for action in row if action and action.is_compute) for row in self.rows)


Needs = Callable[[Action], tuple[Action, ...]]


def compute_needs(orders: Iterable[Iterable[Action]], stages: int) -> Needs:
    """Returns the function that says which compute actions an action of these waits for."""
    present = {action for order in orders for action in order}

    def needs(action: Action) -> tuple[Action, ...]:
        stage, microbatch = action.stage, action.microbatch
        match action.kind:
            case "F":
                return (Action("F", stage - 1, microbatch),) if stage else ()
            case "B" | "I":
                own, part = Action("F", stage, microbatch), Action("I", stage + 1, microbatch)
                after = part if part in present else Action("B", stage + 1, microbatch)
                return (own,) if stage == stages - 1 else (own, after)
            case "W":
                return (Action("I", stage, microbatch),)
            case _:
                return ()

    return needs


def walk(
    orders: Sequence[Sequence[Action]],
    needs: Needs,
    duration: Callable[[Action], float] = lambda _: 1.0,
    delay: Callable[[Action, Action], float] = lambda _before, _after: 0.0,
) -> tuple[Times, tuple[Action, ...]]:
    """Runs each rank's actions in order, each as soon as its rank is free and what it needs is there.

    ``delay`` is what lies between the end of an action and the start of one that needs it. Returns when each action
    ran, and the next action of each rank that is stuck. Time is O(actions).
    """
    times: Times = {}
    positions = [0] * len(orders)
    clock = StreamClock()
    waiting: dict[Action, list[int]] = {}
    ready = list(range(len(orders)))[::-1]
    while ready:
        rank = ready.pop()
        while positions[rank] < len(orders[rank]):
            action = orders[rank][positions[rank]]
            before = needs(action)
            if missing := next((each for each in before if each not in times), None):
                waiting.setdefault(missing, []).append(rank)
                break
            ends = (times[each][1] + delay(each, action) for each in before)
            times[action] = clock.run(rank, duration(action), ends)
            positions[rank] += 1
            ready += waiting.pop(action, [])
    stuck = (order[position] for order, position in zip(orders, positions, strict=True) if position < len(order))
    return times, tuple(stuck)


def align(name: str, orders: Sequence[Sequence[Action]], placement: Sequence[int], microbatches: int) -> Schedule:
    """Makes a schedule of each rank's order: an action stands in the first slot after all that it needs."""
    times, _ = walk(orders, compute_needs(orders, len(placement)))
    slots = max((round(end) for _, end in times.values()), default=0)
    rows: list[list[Action | None]] = [[None] * slots for _ in orders]
    for row, order in zip(rows, orders, strict=True):
        for action in order:
            row[round(times[action][0])] = action
    return Schedule(name=name, rows=tuple(map(tuple, rows)), placement=tuple(placement), microbatches=microbatches)


@dataclass(frozen=True, slots=True)
class RankProgram:
    """A rank's row of a schedule, with what follows from the rows of the others."""

    actions: tuple[Action, ...]
    reducing: Mapping[int, int]  # by stage, the microbatch whose backward comes last
    released: Mapping[Action, tuple[Action, ...]]  # sends that have arrived, by the receive that tells so


def lower(schedule: Schedule) -> tuple[tuple[Action, ...], ...]:
    """Returns each rank's program: its compute actions, with messages (SF, RF, SB, RB) and reduces (R) between them.

    Between two stages on one rank there is no message. R of a stage follows its last backward (B or W), after the
    message of that. Messages and reduces of the schedule's own stay as they are. ``check_schedule`` says whether it is
    valid.
    """
    if schedule.has_messages:
        return tuple(tuple(_with_reduces(order)) for order in schedule.orders())
    orders = schedule.compute_orders()
    received = _receives(schedule, orders)
    programs = []
    for rank, order in enumerate(orders):
        program: list[Action] = []
        for index, action in enumerate(order):
            program += [*received.get((rank, index), []), action]
            if messages := messages_of(action, schedule.placement):
                program.append(messages[0])
        programs.append(tuple(_with_reduces(program)))
    return tuple(programs)


def messages_of(action: Action, placement: Sequence[int]) -> tuple[Action, Action] | None:
    """Returns the send and the receive of what a compute action makes, or None where no other rank needs it."""
    stage, is_forward = action.stage, action.kind == "F"
    peer = stage + (1 if is_forward else -1)
    if action.kind not in ("F", "B", "I") or not 0 <= peer < len(placement) or placement[peer] == placement[stage]:
        return None
    kinds: tuple[Kind, Kind] = ("SF", "RF") if is_forward else ("SB", "RB")
    return Action(kinds[0], stage, action.microbatch), Action(kinds[1], peer, action.microbatch)


def user_of(receive: Action, cells: dict[Action, tuple[int, int]]) -> Action:
    """Returns the compute action, of those given, that uses what is received."""
    kinds: tuple[Kind, ...] = ("F",) if receive.kind == "RF" else ("B", "I")
    users = (Action(kind, receive.stage, receive.microbatch) for kind in kinds)
    return next(user for user in users if user in cells)


def _receives(schedule: Schedule, orders: Sequence[Sequence[Action]]) -> dict[tuple[int, int], list[Action]]:
    """Returns the receives by rank and index of the compute action before which they are posted: early, in order."""
    places = {action: (rank, index) for rank, order in enumerate(orders) for index, action in enumerate(order)}
    channels: dict[tuple[Kind, int], list[Action]] = {}  # receives, in the order in which their messages are sent
    for action in itertools.chain.from_iterable(orders):
        if messages := messages_of(action, schedule.placement):
            channels.setdefault((messages[1].kind, messages[1].stage), []).append(messages[1])
    posted: dict[tuple[int, int], list[Action]] = {}
    for (kind, stage), receives in channels.items():
        wanted = [max(0, places[user_of(each, places)][1] - 1) for each in receives]
        outputs = [Action("F", stage, each.microbatch) for each in receives]
        earliest = [places[output][1] + 1 if kind == "RB" else 0 for output in outputs]
        no_later_than_the_next = list(itertools.accumulate(reversed(wanted), min))[::-1]
        no_earlier_than_the_last = itertools.accumulate(earliest, max)
        for receive, *bounds in zip(receives, no_later_than_the_next, no_earlier_than_the_last, strict=True):
            posted.setdefault((schedule.placement[stage], max(bounds)), []).append(receive)
    return posted


def _with_reduces(order: Sequence[Action]) -> list[Action]:
    """Adds R where a stage has none: after its last backward, once that backward's gradient is on its way."""
    own = {action.stage for action in order if action.kind == "R"}
    last = {action.stage: action for action in order if action.kind in ("B", "W") and action.stage not in own}
    program: list[Action] = []
    due: list[Action] = []
    for action in order:
        if action.kind != "SB":
            program += due
            due = []
        program.append(action)
        if last.get(action.stage) == action:
            due.append(Action("R", action.stage))
    return program + due
