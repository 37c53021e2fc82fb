"""Pipeline schedules: which rank runs which stage on which microbatch, and when.

p ranks hold the stages of a model, k microbatches pass through them; with equal stages a forward takes 1 and a backward
2 (its two parts 1 each). A rank is idle while the pipeline fills and drains.

    schedule      stages   idle time over work    in flight on a rank, at most
    gpipe         p        (p-1) / k              k microbatches
    1f1b          p        (p-1) / k              p - rank
    interleaved   v p      (p-1) / (v k)          ((v+1) p - 2 rank - 1) / v, where p divides k
    zb-h1         p        (p-1) / (3 k)          p
    zb-v          2 p      (p-1) / (6 k)          p

gpipe and 1f1b for any k, the others for k >= p (zb-v: 1.5 p); with fewer microbatches those fill and drain longer.
``measure.py`` says what a schedule comes to with the costs of real stages.

The zero-bubble schedules run backward in two parts: the next rank waits only for the gradient of the stage's input (I);
that of the weights (W) fills the gaps, and until then its activations stay. zb-h1 is the order of 1f1b with W moved:
rank r runs its first r backwards without W, and from then on each W that many microbatches later. zb-v gives each rank
two chunks: stage r on the way there, stage 2p-1-r on the way back; slot by slot, each rank takes the most urgent action
that can run, with a limit on what is in flight.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

from paceline.errors import UsageError, did_you_mean
from paceline.schedule.grid import Action, Kind, Schedule, align


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """Makes a schedule of all forwards, then all backwards: the simplest, and every microbatch is in flight at once."""
    orders = [_all("F", rank, microbatches) + _all("B", rank, microbatches) for rank in range(ranks)]
    return align("gpipe", orders, range(ranks), microbatches)


def _all(kind: Kind, stage: int, microbatches: int) -> list[Action]:
    return [Action(kind, stage, microbatch) for microbatch in range(microbatches)]


def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """Makes a schedule that runs a backward as soon as it can, so that few microbatches are in flight."""
    orders = [
        _alternate(_all("F", rank, microbatches), _all("B", rank, microbatches), warm_up=ranks - 1 - rank)
        for rank in range(ranks)
    ]
    return align("1f1b", orders, range(ranks), microbatches)


def interleaved(ranks: int, microbatches: int, chunks: int) -> Schedule:
    """Makes a 1f1b schedule in which each rank holds several chunks of the model, so that the pipeline fills faster.

    Stage s is on rank s mod p. Microbatches go through the chunks in groups of p or a few more: a group is through one
    chunk of all ranks just when the first rank is ready to take it through the next.
    """
    num_groups = max(1, microbatches // ranks)
    size, larger = divmod(microbatches, num_groups)
    starts = [index * size + min(index, larger) for index in range(num_groups + 1)]
    groups = [range(start, end) for start, end in itertools.pairwise(starts)]
    orders = []
    for rank in range(ranks):
        here = [chunk * ranks + rank for chunk in range(chunks)]
        forwards = [Action("F", stage, m) for group in groups for stage in here for m in group]
        backwards = [Action("B", stage, m) for group in groups for stage in reversed(here) for m in group]
        warm_up = (chunks - 1) * len(groups[0]) + 2 * (ranks - 1 - rank)
        orders.append(_alternate(forwards, backwards, warm_up))
    return align("interleaved", orders, [stage % ranks for stage in range(ranks * chunks)], microbatches)


def _alternate(forwards: list[Action], backwards: list[Action], warm_up: int) -> list[Action]:
    """Returns some forwards first, then one of each in turn, then the backwards that are left."""
    warm_up = min(warm_up, len(forwards))
    order = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        order += [forward, backward]
    return order + backwards[len(forwards) - warm_up :]


def zb_h1(ranks: int, microbatches: int) -> Schedule:
    """Makes a schedule with the memory of 1f1b and a third of its idle time."""
    orders = []
    for rank in range(ranks):
        forwards, weights = _all("F", rank, microbatches), _all("W", rank, microbatches)
        warm_up = min(ranks - 1 - rank, microbatches)
        order = forwards[:warm_up]
        for microbatch in range(microbatches):
            order += forwards[warm_up + microbatch : warm_up + microbatch + 1]
            order.append(Action("I", rank, microbatch))
            if microbatch >= rank:
                order.append(weights[microbatch - rank])
        orders.append(order + weights[max(microbatches - rank, 0) :])
    return align("zb-h1", orders, range(ranks), microbatches)


def zb_v(ranks: int, microbatches: int) -> Schedule:
    """Makes a schedule of two chunks a rank along a V: the first and the last stage are on rank 0."""
    placement = (*range(ranks), *reversed(range(ranks)))

    def urgency(action: Action) -> tuple[int, int]:
        # Forwards are held back by the limit alone, so that backwards never run out of work. Of two forwards, and of
        # two backwards, the one with less of its way left goes first: it frees its activations sooner.
        order = {"F": -action.stage, "I": action.stage, "W": -action.stage}
        return "FIW".index(action.kind), order[action.kind]

    # Slot after slot, each rank takes the most urgent action; each of F, I and W takes one slot. A rank has at most
    # 2 x ranks forwards in flight, until their W is done: a microbatch on its way finds room on every rank.
    orders: list[list[Action]] = [[] for _ in range(ranks)]
    done: _Progress = {(kind, stage): 0 for kind in ("F", "I", "W") for stage in range(len(placement))}
    while taken := [
        min(ready, key=urgency)
        for rank in range(ranks)
        if (ready := list(_ready(rank, placement, microbatches, done, limit=2 * ranks)))
    ]:
        for action in taken:  # only now: what is made in a slot can be used in the next
            orders[placement[action.stage]].append(action)
            done[action.kind, action.stage] += 1
    return align("zb-v", orders, placement, microbatches)


_Progress = dict[tuple[Kind, int], int]  # how many microbatches a stage is through with; each kind takes them in order


def _ready(rank: int, placement: Sequence[int], microbatches: int, done: _Progress, limit: int) -> Iterator[Action]:
    """Gives, of each stage on this rank, the next F, I and W if what they need is done."""
    stages = [stage for stage, home in enumerate(placement) if home == rank]
    has_room = sum(done["F", stage] - done["W", stage] for stage in stages) < limit
    for stage in stages:
        forwards, inputs, weights = done["F", stage], done["I", stage], done["W", stage]
        arrived = done["F", stage - 1] if stage else microbatches
        if has_room and forwards < arrived:
            yield Action("F", stage, forwards)
        if inputs < (done["I", stage + 1] if stage + 1 < len(placement) else forwards):
            yield Action("I", stage, inputs)
        if weights < inputs:
            yield Action("W", stage, weights)


_MAKERS: dict[str, Callable[[int, int, int], Schedule]] = {
    "gpipe": lambda p, m, _: gpipe(p, m),
    "1f1b": lambda p, m, _: one_f_one_b(p, m),
    "interleaved": interleaved,
    "zb-h1": lambda p, m, _: zb_h1(p, m),
    "zb-v": lambda p, m, _: zb_v(p, m),
}
SCHEDULE_NAMES = tuple(_MAKERS)
# The fewest and the most stages of a rank, by schedule; None: as many as one likes.
CHUNKS: dict[str, tuple[int, int | None]] = dict.fromkeys(_MAKERS, (1, 1)) | {"interleaved": (2, None), "zb-v": (2, 2)}


def make_schedule(name: str, ranks: int, microbatches: int, chunks: int | None = None) -> Schedule:
    """Returns the schedule of that name, of ``chunks`` stages a rank (None: the fewest). Raises UsageError."""
    if name not in _MAKERS:
        fix = did_you_mean(name, _MAKERS, cutoff=0.4)
        raise UsageError(f"there is no schedule {name!r}\n  known are {', '.join(_MAKERS)}\n  {fix}".rstrip())
    for what, number in (("ranks", ranks), ("microbatches", microbatches)):
        if number < 1:
            raise UsageError(f"schedule {name!r} with {what} = {number}\n  there must be at least one")
    fewest, most = CHUNKS[name]
    chunks = fewest if chunks is None else chunks
    if chunks < fewest or (most is not None and chunks > most):
        rule = f"exactly {fewest}" if fewest == most else f"at least {fewest}"
        raise UsageError(
            f"schedule {name!r} with chunks = {chunks}\n  it takes {rule} a rank\n"
            "  for several chunks take interleaved (2 or more) or zb-v (2), for one any other"
        )
    return _MAKERS[name](ranks, microbatches, chunks)
