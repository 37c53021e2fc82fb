"""Whether a schedule can run: all of the work, each piece once, on its rank, in an order that never gets stuck.

Every message points at the cell: the rank (a row), the slot (a column) and the action there. The checks go from cells
to the whole, so that the first thing wrong is the one that is named. Cost: O(actions).
"""

from __future__ import annotations

from typing import NoReturn

from paceline.errors import UsageError
from paceline.schedule.grid import Action, Kind, Schedule, compute_needs, messages_of, user_of, walk

_Cells = dict[Action, tuple[int, int]]


def check_schedule(schedule: Schedule) -> None:
    """Raises UsageError, which names the cell, unless the schedule is complete, in order and free of deadlock."""
    if not schedule.rows or not schedule.placement or schedule.microbatches < 1:
        raise UsageError(
            f"schedule {schedule.name!r} has {schedule.ranks} ranks, {schedule.stages} stages and "
            f"{schedule.microbatches} microbatches\n  there must be at least one of each"
        )
    for stage, rank in enumerate(schedule.placement):
        if not 0 <= rank < schedule.ranks:
            raise UsageError(
                f"schedule {schedule.name!r} places stage {stage} on rank {rank}, and has {schedule.ranks} ranks\n"
                "  placement is the rank of each stage"
            )
    cells = _check_cells(schedule)
    _check_complete(schedule, cells)
    _check_order(schedule, cells)
    if schedule.has_messages:
        _check_messages(schedule, cells)
    _check_deadlock(schedule, cells)


def _refuse(schedule: Schedule, cell: tuple[int, int], action: Action, what: str, rule: str) -> NoReturn:
    rank, slot = cell
    raise UsageError(f"schedule {schedule.name!r}, rank {rank}, slot {slot}: {action} {what}\n  {rule}")


def _refuse_order(schedule: Schedule, cells: _Cells, action: Action, before: Action, rule: str) -> NoReturn:
    _refuse(schedule, cells[action], action, f"comes before {before}, which is in slot {cells[before][1]}", rule)


def _check_cells(schedule: Schedule) -> _Cells:
    cells: _Cells = {}
    filled = (((rank, slot), each) for rank, row in enumerate(schedule.rows) for slot, each in enumerate(row) if each)
    for cell, action in filled:
        stage, microbatch, last = action.stage, action.microbatch, schedule.microbatches - 1
        if not 0 <= stage < schedule.stages:
            what = f"is of stage {stage}, and there are stages 0 to {schedule.stages - 1}"
            _refuse(schedule, cell, action, what, "each stage has a rank in the placement")
        if action.kind != "R" and not 0 <= microbatch <= last:
            what = f"is of microbatch {microbatch}, and there are microbatches 0 to {last}"
            _refuse(schedule, cell, action, what, "remove it, or give the schedule more microbatches")
        right = schedule.placement[stage]
        if right != cell[0]:
            what = f"is on the wrong rank: stage {stage} is on rank {right}"
            _refuse(schedule, cell, action, what, f"move it to row {right}")
        if action in cells:
            _refuse(schedule, cell, action, f"is there twice: first in slot {cells[action][1]}", "remove one of them")
        cells[action] = cell
    return cells


def _check_complete(schedule: Schedule, cells: _Cells) -> None:
    for stage, rank in enumerate(schedule.placement):
        for microbatch in range(schedule.microbatches):
            forward, whole, inputs, weights = (Action(kind, stage, microbatch) for kind in ("F", "B", "I", "W"))
            if whole in cells and (both := next((each for each in (inputs, weights) if each in cells), None)):
                what = f"is part of {whole}, which is in slot {cells[whole][1]}"
                _refuse(schedule, cells[both], both, what, "a backward is either whole (B) or in two parts (I and W)")
            is_split = whole not in cells and (inputs in cells or weights in cells)
            wanted = (forward, inputs, weights) if is_split else (forward, whole)
            if missing := next((each for each in wanted if each not in cells), None):
                raise UsageError(
                    f"schedule {schedule.name!r}, rank {rank}: {missing} is missing\n"
                    "  every stage runs every microbatch forward, and backward: B, or I and W\n"
                    f"  add {missing} to row {rank}"
                )


def _check_order(schedule: Schedule, cells: _Cells) -> None:
    """Checks the order on each rank, which is that of its slots; across ranks the deadlock check decides."""
    needs = compute_needs((cells,), schedule.stages)
    for action, cell in cells.items():
        for before in needs(action):
            if cells[before][0] == cell[0] and cells[before][1] > cell[1]:
                rule = f"{action} needs what {before} makes: move {before} to an earlier slot"
                _refuse_order(schedule, cells, action, before, rule)
    for action, cell in cells.items():
        if action.kind == "R":
            ends = (each for each in cells if each.stage == action.stage and each.kind in ("B", "W"))
            last = max(ends, key=lambda each: cells[each][1])
            if cells[last][1] > cell[1]:
                rule = f"gradients are reduced when all are there: move it behind {last}, or leave it out"
                _refuse_order(schedule, cells, action, last, rule)


def _check_messages(schedule: Schedule, cells: _Cells) -> None:
    other_side: dict[Action, Action] = {}
    for action in [each for each in cells if each.is_compute]:
        if messages := messages_of(action, schedule.placement):
            _check_message(schedule, cells, action, *messages)
            other_side[messages[0]], other_side[messages[1]] = messages[1], messages[0]
    sent: dict[tuple[Kind, int], list[Action]] = {}
    for action, cell in cells.items():  # row by row, in the order of the slots
        if not action.is_compute and action.kind != "R" and action not in other_side:
            rule = "there is a message only between neighbouring stages on two ranks: remove it"
            _refuse(schedule, cell, action, "has no other side on another rank", rule)
        if action.kind in ("SF", "SB"):
            sent.setdefault((action.kind, action.stage), []).append(action)
    for sends in sent.values():
        receives = sorted((other_side[send] for send in sends), key=lambda each: cells[each][1])
        for send, receive in zip(sends, receives, strict=True):
            if other_side[send] != receive:
                what = f"comes before {other_side[send]}, and {send} is sent before {other_side[receive]}"
                rule = "from one stage to another, messages are received in the order in which they are sent"
                _refuse(schedule, cells[receive], receive, what, rule)


def _check_message(schedule: Schedule, cells: _Cells, maker: Action, send: Action, receive: Action) -> None:
    for each in (send, receive):
        if each not in cells:
            raise UsageError(
                f"schedule {schedule.name!r}, rank {schedule.placement[each.stage]}: {each} is missing\n"
                f"  {send} carries what {maker} makes, and {receive} takes it\n"
                f"  add {each}, or leave all messages out: they are then placed for you"
            )
    pairs = [(maker, send), (receive, user_of(receive, cells))]
    if receive.kind == "RB":  # the output says how large its gradient will be
        pairs.append((Action("F", receive.stage, receive.microbatch), receive))
    for first, then in pairs:
        if cells[first][1] > cells[then][1]:
            _refuse_order(schedule, cells, then, first, f"move {first} to an earlier slot")


def _check_deadlock(schedule: Schedule, cells: _Cells) -> None:
    orders = schedule.orders() if schedule.has_messages else schedule.compute_orders()
    compute = compute_needs(orders, schedule.stages)

    def needs(action: Action) -> tuple[Action, ...]:
        found = []
        for each in compute(action):
            messages = messages_of(each, schedule.placement) if schedule.has_messages else None
            comes_here = messages is not None and messages[1].stage == action.stage
            found.append(messages[0] if messages and comes_here else each)
        return tuple(found)

    times, stuck = walk(orders, needs)
    if not stuck:
        return
    lines = []
    for action in stuck:
        missing = next(each for each in needs(action) if each not in times)
        lines.append(
            f"rank {cells[action][0]}, slot {cells[action][1]}: {action} waits for {missing} "
            f"(rank {cells[missing][0]}, slot {cells[missing][1]})"
        )
    lines.append("ranks that wait in a circle wait for ever: move one of these actions to a later slot")
    raise UsageError(f"schedule {schedule.name!r} deadlocks: " + "\n  ".join(lines))
