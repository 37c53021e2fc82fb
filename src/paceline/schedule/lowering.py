"""From a grid of compute actions to the program of each rank: when it sends, receives and reduces.

A rank sends right after it has made something. It posts a receive before the compute action that precedes the use, so
that the message travels while that action runs; the gradient of an output not before the output is there, since that
says how large the gradient will be. Only a use waits: a program gets stuck only where its compute actions alone would.

The messages of one way across one boundary (forward from stage s to s + 1, or backward) are received in the order in
which they are sent, so that they need no numbers; different ways and boundaries need channels of their own.

Cost: O(actions), once a run. One message goes over each boundary, a microbatch and way; a receiver holds one or two
that it does not use yet.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.schedule.grid import Action, Kind, Schedule

_Places = dict[Action, tuple[int, int]]  # rank, and index among its compute actions


@dataclass(frozen=True, slots=True)
class RankProgram:
    """A rank's row of a schedule, with what follows from the rows of the others."""

    actions: tuple[Action, ...]
    reducing: Mapping[int, int]  # by stage, the microbatch whose backward comes last
    released: Mapping[Action, tuple[Action, ...]]  # sends that have arrived, by the receive that tells so


def lower(schedule: Schedule) -> tuple[tuple[Action, ...], ...]:
    """Returns each rank's program: its compute actions, with messages (SF, RF, SB, RB) and reduces (R) between them.

    Between two stages on one rank there is no message. R of a stage follows its last backward (B or W), after the
    message of that. Where the schedule has messages of its own they stay as they are, and so do its reduces. The
    schedule must be a valid one: ``check_schedule`` says so.
    """
    orders = schedule.orders() if schedule.has_messages else _with_messages(schedule)
    return tuple(tuple(_with_reduces(order)) for order in orders)


def messages_of(action: Action, placement: Sequence[int]) -> tuple[Action, Action] | None:
    """Returns the send and the receive of what a compute action makes, or None where no other rank needs it."""
    is_forward = action.kind == "F"
    peer = action.stage + (1 if is_forward else -1)
    if action.kind not in ("F", "B", "I") or not 0 <= peer < len(placement):
        return None
    if placement[peer] == placement[action.stage]:
        return None
    kinds: tuple[Kind, Kind] = ("SF", "RF") if is_forward else ("SB", "RB")
    return Action(kinds[0], action.stage, action.microbatch), Action(kinds[1], peer, action.microbatch)


def user_of(receive: Action, cells: dict[Action, tuple[int, int]]) -> Action:
    """Returns the compute action, of those given, that uses what is received."""
    kinds: tuple[Kind, ...] = ("F",) if receive.kind == "RF" else ("B", "I")
    users = (Action(kind, receive.stage, receive.microbatch) for kind in kinds)
    return next(user for user in users if user in cells)


def _with_messages(schedule: Schedule) -> list[list[Action]]:
    orders = schedule.compute_orders()
    places = {action: (rank, index) for rank, order in enumerate(orders) for index, action in enumerate(order)}
    received = _receives(schedule, orders, places)
    programs: list[list[Action]] = []
    for rank, order in enumerate(orders):
        program: list[Action] = []
        for index, action in enumerate(order):
            program += [*received.get((rank, index), []), action]
            if messages := messages_of(action, schedule.placement):
                program.append(messages[0])
        programs.append(program)
    return programs


def _receives(
    schedule: Schedule, orders: Sequence[Sequence[Action]], places: _Places
) -> dict[tuple[int, int], list[Action]]:
    """Returns the receives by the rank and the index of the compute action that they are posted before."""
    channels: dict[tuple[Kind, int], list[Action]] = {}  # receives, in the order in which their messages are sent
    for action in itertools.chain.from_iterable(orders):
        if messages := messages_of(action, schedule.placement):
            channels.setdefault((messages[1].kind, messages[1].stage), []).append(messages[1])
    posted: dict[tuple[int, int], list[Action]] = {}
    for (_, stage), receives in channels.items():
        for receive, index in zip(receives, _indices(receives, places), strict=True):
            posted.setdefault((schedule.placement[stage], index), []).append(receive)
    return posted


def _indices(receives: Sequence[Action], places: _Places) -> list[int]:
    """Returns where the receives of one channel are posted: early enough for each, and never out of order."""
    wanted = [max(0, places[user_of(receive, places)][1] - 1) for receive in receives]
    earliest = [
        places[Action("F", receive.stage, receive.microbatch)][1] + 1 if receive.kind == "RB" else 0
        for receive in receives
    ]
    no_later_than_the_next = list(itertools.accumulate(reversed(wanted), min))[::-1]
    no_earlier_than_the_last = itertools.accumulate(earliest, max)
    return [max(pair) for pair in zip(no_later_than_the_next, no_earlier_than_the_last, strict=True)]


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
