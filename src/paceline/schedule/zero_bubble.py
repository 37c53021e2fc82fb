"""Zero-bubble schedules: backward in two parts, and the part that nobody waits for fills the gaps.

Of a backward, the next rank waits only for the gradient of the stage's input (I). The gradient of the weights (W) can
be made whenever there is time, and until then its activations stay. With equal stages (F = I = W = 1 for a p-th of the
model), p ranks and m >= p microbatches:

    1f1b    idle 3 (p-1) a rank    p microbatches in flight at most, over the ranks
    zb-h1   idle   (p-1)           the same
    zb-v    idle   (p-1) / 2       2p chunks of half the size: the same; a little more idle for p < m < 1.5 p

zb-h1 is the order of 1f1b with W moved: rank r runs its first r backwards without W, and from then on each W that many
microbatches later. So early gradients come through sooner, and what was put off fills the end, where 1f1b is idle.

zb-v gives each rank two chunks: stage r on the way there, stage 2p-1-r on the way back. Its order comes from a list
scheduler: slot by slot, each rank takes the most urgent action that can run, with a limit on what is in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from paceline.schedule.grid import Action, Kind, Schedule, align


def zb_h1(ranks: int, microbatches: int) -> Schedule:
    """Makes a schedule with the memory of 1f1b and a third of its idle time."""
    orders = [list(_h1_order(rank, ranks, microbatches)) for rank in range(ranks)]
    return align("zb-h1", orders, range(ranks), microbatches)


def _h1_order(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    warm_up = min(ranks - 1 - rank, microbatches)
    for microbatch in range(warm_up):
        yield Action("F", rank, microbatch)
    for microbatch in range(microbatches):
        if warm_up + microbatch < microbatches:
            yield Action("F", rank, warm_up + microbatch)
        yield Action("I", rank, microbatch)
        if microbatch >= rank:
            yield Action("W", rank, microbatch - rank)
    for microbatch in range(max(microbatches - rank, 0), microbatches):
        yield Action("W", rank, microbatch)


def zb_v(ranks: int, microbatches: int) -> Schedule:
    """Makes a schedule of two chunks a rank along a V: the first and the last stage are on rank 0."""
    placement = (*range(ranks), *reversed(range(ranks)))

    def urgency(action: Action) -> tuple[int, int]:
        # Forwards are held back by the limit alone, so that backwards never run out of work. Of two forwards, and of
        # two backwards, the one with less of its way left goes first: it frees its activations sooner.
        order = {"F": -action.stage, "I": action.stage, "W": -action.stage}
        return "FIW".index(action.kind), order[action.kind]

    orders = list_schedule(placement, microbatches, limit=2 * ranks, urgency=urgency)
    return align("zb-v", orders, placement, microbatches)


def list_schedule(
    placement: Sequence[int], microbatches: int, *, limit: int, urgency: Callable[[Action], tuple[int, int]]
) -> list[list[Action]]:
    """Fills slot after slot: each rank takes, of what can run, the action with the lowest urgency value.

    Each of F, I and W takes one slot. A rank has at most ``limit`` forwards in flight, until their W is done. With two
    chunks on a V, 2 x ranks never get stuck: a microbatch that is on its way finds room on every rank.
    """
    orders: list[list[Action]] = [[] for _ in range(max(placement) + 1)]
    done: _Progress = {(kind, stage): 0 for kind in ("F", "I", "W") for stage in range(len(placement))}
    while taken := [
        min(ready, key=urgency)
        for rank in range(len(orders))
        if (ready := list(_ready(rank, placement, microbatches, done, limit)))
    ]:
        for action in taken:  # only now: what is made in a slot can be used in the next
            orders[placement[action.stage]].append(action)
            done[action.kind, action.stage] += 1
    return orders


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
