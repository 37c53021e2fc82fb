"""Which actions of a pipeline are recorded, and which of them stand for those of the whole step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from paceline.engines.pipeline import Pipeline, RankProgram
from paceline.errors import UsageError
from paceline.predict.replay.events import END, Event, Mark, Turn
from paceline.schedule.schedules import Action

FEW = 3  # microbatches: the first, one that stands for all between, and the last


def enough_microbatches(pipeline: Pipeline, wanted: int) -> int:
    """Returns how many microbatches are run where so many are wanted: all, if few do not tell of the others."""
    ranks = pipeline.pipe.size
    if pipeline.splits_backward and len(pipeline.placement) > ranks:  # what zb-v gathers differs by microbatch
        return wanted
    for few in (FEW, -(-FEW // ranks) * ranks):  # interleaved schedules take whole rounds
        if few < wanted and _is_plain(pipeline, few) and _is_plain(pipeline, wanted):
            return few
    return wanted


def order_of(program: RankProgram, few: int) -> tuple[Turn, ...]:
    """Returns the actions of a whole step, by those of one with few microbatches."""
    most = max(action.microbatch for action in program.actions)
    arrived: Mapping[Action, Sequence[Action]] = program.released
    found = []
    for action in program.actions:
        number = action.microbatch
        if action.kind == "R":  # the engine reduced with the backward before it
            continue
        like = 0 if number == 0 else few - 1 if number == most else 1
        receive = _RECEIVES.get(action.kind)
        sends = () if receive is None else arrived.get(Action(receive, action.stage, number), ())  # type: ignore[arg-type]
        told = tuple((send.kind, send.stage, send.microbatch) for send in sends)
        found.append(Turn(action.kind, action.stage, number, like, told))
    return tuple(found)


def with_marks(events: Sequence[Event], acts: Sequence[int], actions: Sequence[Action]) -> tuple[Event, ...]:
    """Returns the events with a mark before those of each action; ``acts`` are the places where these begin."""
    found: list[Event] = []
    for number, (begin, end) in enumerate(pairwise((*acts, len(events)))):
        action = actions[number] if number < len(actions) else None
        mark = Mark(END, 0, 0) if action is None else Mark(action.kind, action.stage, action.microbatch)
        found += (mark, *events[begin:end])
    return tuple(found)


_RECEIVES = {"F": "RF", "B": "RB", "I": "RB"}


def _is_plain(pipeline: Pipeline, microbatches: int) -> bool:
    """Whether the first microbatch is the first in every pass of a schedule, and the last one the last to go back."""
    try:
        program = pipeline.program(microbatches)
    except UsageError:  # a schedule of the user's own is for one number of them
        return False
    first: dict[tuple[str, int], int] = {}
    for action in program.actions:
        if action.kind != "R":
            first.setdefault((action.kind, action.stage), action.microbatch)
    return not any(first.values()) and all(each == microbatches - 1 for each in program.reducing.values())
