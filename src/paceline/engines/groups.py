"""The communicators of a rank, one for each question: see ``plan/groups.py``, which says who is in which group."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.comm.base import Communicator
from paceline.plan.groups import GROUP_NAMES, groups_of
from paceline.plan.layout import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """Who a rank talks to. Groups of the same ranks are one communicator."""

    world: Communicator
    batch: Communicator
    gradients: Communicator
    shard: Communicator
    replicate: Communicator
    context: Communicator
    pipeline: Communicator
    tensor: Communicator
    expert: Communicator
    expert_gradients: Communicator
    regather: Communicator | None = None  # the part of ``shard`` that keeps a unit between forward and backward


def make_groups(comm: Communicator, layout: Layout | None = None) -> Groups:
    """Splits the ranks of ``comm`` as the layout says; without one, each holds the whole model. All ranks call it."""
    layout = (layout or Layout()).for_ranks(comm.size)
    wanted = groups_of(layout, comm.rank)
    made = {wanted.world: comm}
    for name in ("pipeline", "gradients", "tensor", *GROUP_NAMES):  # those of a split model first
        ranks = getattr(wanted, name)
        if ranks not in made:
            made[ranks] = comm.split(ranks)
    found = {name: made[getattr(wanted, name)] for name in GROUP_NAMES}
    return Groups(**found, regather=_regather_group(found["shard"], layout.reshard_after_forward))


def _regather_group(shard: Communicator, reshard: bool | int) -> Communicator | None:
    if isinstance(reshard, bool):
        return None
    first = shard.rank - shard.rank % reshard
    return shard.split(range(first, first + reshard))
