"""The communicators of a rank, one for each question: see ``plan/layout.py``, which says who is in which group.

A parameter knows its own groups. Most are *dense*: every rank that shares the batch has the same one, in slices or
whole. Of a parameter that ``mark_expert`` has marked, the ranks of ``expert`` hold different parts along one dim. Its
gradient is summed over the ranks that hold the same part, and divided by all that share the batch, as the gradient of
the mean loss is in one process.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from paceline.comm.base import Communicator, ReduceOp
from paceline.plan.layout import GROUP_NAMES, Layout, groups_of


@dataclass(frozen=True, slots=True)
class ParameterGroups:
    """Who shares a parameter: averages its gradient, holds other slices of it, holds the same slice."""

    gradients: Communicator
    shard: Communicator
    replicate: Communicator
    averaged_over: int  # by how many ranks the sum of gradients is divided

    @property
    def scale(self) -> float:
        """The factor of a gradient as it is brought into a buffer; ``reduction`` makes the mean with it."""
        if self.gradients.device_kind == "cpu":
            return 1.0 / self.averaged_over
        return self.gradients.size / self.averaged_over


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
    expert_shard: Communicator
    expert_replicate: Communicator
    regather: Communicator | None = None  # the part of ``shard`` that keeps a unit between forward and backward

    def of(self, parameter: nn.Parameter) -> ParameterGroups:
        if expert_dim(parameter) is None or self.expert.size == 1:
            gradients, shard, replicate = self.gradients, self.shard, self.replicate
        else:
            gradients, shard, replicate = self.expert_gradients, self.expert_shard, self.expert_replicate
        return ParameterGroups(gradients, shard, replicate, averaged_over=self.gradients.size)


def mark_expert(parameter: nn.Parameter, dim: int = 0) -> None:
    """Says that a rank has a part of a parameter along ``dim``, as one of the ranks that hold different experts."""
    parameter._paceline_expert_dim = dim  # type: ignore[attr-defined]


def expert_dim(parameter: nn.Parameter) -> int | None:
    """Returns along which dim a parameter is spread over experts' ranks; None: it is dense."""
    return getattr(parameter, "_paceline_expert_dim", None)


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
    regather, shard, reshard = None, found["shard"], layout.reshard_after_forward
    if not isinstance(reshard, bool):  # a number of ranks
        first = shard.rank - shard.rank % reshard
        regather = shard.split(range(first, first + reshard))
    return Groups(**found, regather=regather)


def reduction(comm: Communicator) -> ReduceOp:
    """Returns how gradients are reduced: NCCL averages as it adds; for Gloo the division is part of a copy before."""
    return "sum" if comm.device_kind == "cpu" else "avg"
