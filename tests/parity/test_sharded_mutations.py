"""The mutation check for sharding and mixed precision: their classic bugs, planted one by one, are all found.

The bugs of plain data parallelism, and of the step, are in ``test_mutations.py``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from planted_bugs import (
    CLIP,
    SETTINGS,
    Branches,
    Bug,
    DiffersByRank,
    Plain,
    Quiet,
    Remembers,
    Tied,
    accumulating,
    accumulation_lost,
    also,
    check_found,
    current_rank,
    gradients_kept,
    known,
    make_batch,
    make_short_batch,
    mean_of_means,
    never_synchronised,
    plain_backward,
    replacing,
    synchronised_first,
)
from torch import nn

from paceline.comm.base import DONE, Communicator
from paceline.comm.virtual import VirtualCommunicator
from paceline.errors import CommunicationError, RankFailedError
from paceline.layout import flat_layout
from paceline.memory.checkpointing import Replay
from paceline.parallel.apply import parallelize
from paceline.parallel.buffers import SharedBuffers
from paceline.parallel.flat import FlatGroup
from paceline.parallel.fsdp import FullySharded, ShardingPolicy
from paceline.parallel.gathering import Gathering
from paceline.parallel.route import Route
from paceline.parallel.sharded import clip_pieces
from paceline.parallel.unit import Unit
from paceline.parallel.zero import ZeroParallel
from paceline.parity.case import FunctionCase
from paceline.parity.certificate import certify
from paceline.parity.settings import Settings
from paceline.train import step as steps

PLAIN = known(Plain)
FSDP = dataclasses.replace(SETTINGS, strategy="fsdp")
ZERO1 = dataclasses.replace(SETTINGS, strategy="zero1")
ZERO2 = dataclasses.replace(SETTINGS, strategy="zero2")
HYBRID = dataclasses.replace(SETTINGS, strategy="hybrid", ranks=4, sharding=ShardingPolicy(shard_ranks=2))
SHARDED = {"fsdp": FSDP, "zero1": ZERO1, "zero2": ZERO2, "hybrid": HYBRID}


class Normed(nn.Module):
    """Blocks with batch norm: one process rounds other numbers in mixed precision, and statistics move."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6, bias=False), nn.BatchNorm1d(6), nn.Tanh()) for _ in range(2)
        )
        self.last = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def fused(parameters: Any) -> torch.optim.Optimizer:
    """An optimizer that leaves no trace in the version of what it updates."""
    return torch.optim.AdamW(parameters, lr=1e-2, fused=True)


def in_each(name: str, plant: Any, shows: str, only: str = "fsdp zero1 zero2 hybrid", **options: Any) -> dict[str, Bug]:
    """The same bug under several strategies."""
    return {
        f"{name}, {strategy}": Bug(**{"plant": plant, "case": PLAIN, "shows": shows, **options, "settings": SHARDED[strategy]})
        for strategy in only.split()
    }


def in_precision(precision: str, settings: Settings) -> Settings:
    return dataclasses.replace(settings, precision=precision)


# Clipping.


def norm_over(choose: Callable[[Any], Any]) -> Any:
    """The norm is added up over other ranks than those that share the pieces."""

    def make(_: Any) -> Any:
        def clip_grad_norm_(self: Any, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
            return clip_pieces(list(self.parameters()), choose(self), max_norm, norm_type)

        return clip_grad_norm_

    return also(
        replacing(FullySharded, "clip_grad_norm_", make),
        replacing(ZeroParallel, "clip_grad_norm_", make),
    )


# Parameters.


def wrong_slice(original: Any) -> Any:
    """Every rank's slice lands in the place of the next one's."""

    def gather(self: FlatGroup) -> Any:
        original(self).wait()
        full = self.full.data
        full.copy_(full.roll(self.stop - self.start))
        return DONE

    return gather


def own_slice_alone(original: Any) -> Any:
    """A rank does not wait for the others' slices: it computes with what was in memory."""

    def gather(self: FlatGroup) -> Any:
        before = self.full.data.clone() if self.is_allocated else torch.zeros_like(self.master).repeat(self.comm.size)
        original(self).wait()
        mine = self.full.data[self.start : self.stop].clone()
        self.full.data.copy_(before)
        self.full.data[self.start : self.stop] = mine
        return DONE

    return gather


def stale_source(original: Any) -> Any:
    """What is gathered is what the slice was when the engine was built."""

    def source(self: FlatGroup) -> torch.Tensor:
        if not hasattr(self, "_planted"):
            self._planted = original(self).clone()  # type: ignore[attr-defined]
        return self._planted  # type: ignore[attr-defined, no-any-return]

    return source


def never_gathered(_: Any) -> Any:
    """Parameters count as unchanged after an update."""

    def start(self: Gathering) -> None:
        self._seen_version = self.version

    return start


def gathered_once(original: Any) -> Any:
    """A unit that is gathered again for backward gets memory, and no values."""

    def start_gather(self: Unit) -> None:
        original(self)
        if torch._C._current_graph_task_id() != -1:
            self.wait()
            for group in self.groups:
                group.full.data.zero_()

    return start_gather


def freed_too_early(original: Any) -> Any:
    """The root is freed with the first unit."""

    def leave(self: FullySharded, unit: Unit, output: Any) -> None:
        original(self, unit, output)
        self._root.free()

    return leave


def untied(original: Any) -> Any:
    """Sharding gives each layer a weight of its own."""

    def wrap(model: Tied, *args: Any, **kwargs: Any) -> Any:
        model.head.weight = nn.Parameter(model.embed.weight.detach().clone())
        return original(model, *args, **kwargs)

    return wrap


def first_values_differ(original: Any) -> Any:
    """Every rank keeps its slice of its own values."""

    def broadcast(self: VirtualCommunicator, tensor: torch.Tensor, *args: Any) -> Any:
        kept = tensor.clone()
        original(self, tensor, *args).wait()
        tensor.data.copy_(kept)
        return DONE

    return broadcast


# Gradients.


def not_scaled(_: Any) -> Any:
    return lambda *_: 1.0


def scaled_for_shards_alone(original: Any) -> Any:
    return lambda shards, replicas: original(shards, shards) ** 0.5 if replicas.size else 1.0


def not_reduced(original: Any) -> Any:
    """A rank keeps its own gradient of its slice."""

    def reduce_scatter(self: FlatGroup, gradient: torch.Tensor, output: torch.Tensor | None = None) -> Any:
        own = gradient[self.start : self.stop].clone()
        mine, work = original(self, gradient, output)
        work.wait()
        return mine.copy_(own), DONE

    return reduce_scatter


def reduced_twice(original: Any) -> Any:
    def reduce_scatter(self: FlatGroup, gradient: torch.Tensor, output: torch.Tensor | None = None) -> Any:
        mine, work = original(self, gradient, output)
        work.wait()
        return mine.mul_(2.0), DONE

    return reduce_scatter


def slice_of_another(original: Any) -> Any:
    """A rank gets the gradient of its neighbour's slice."""

    def reduce_scatter(self: FlatGroup, gradient: torch.Tensor, output: torch.Tensor | None = None) -> Any:
        return original(self, gradient.copy_(gradient.roll(self.stop - self.start)), output)

    return reduce_scatter


def travels_in(dtype: torch.dtype) -> Any:
    """Gradients are rounded on their way."""

    def make(original: Any) -> Any:
        def reduce_scatter(self: FlatGroup, gradient: torch.Tensor, output: torch.Tensor | None = None) -> Any:
            return original(self, gradient.copy_(gradient.to(dtype)), output)

        return reduce_scatter

    return make


def replaced_not_added(original: Any) -> Any:
    """A microbatch's slice takes the place of that of the one before."""

    def add_gradient(self: FlatGroup, *args: Any, **kwargs: Any) -> None:
        for piece in self.pieces:
            piece.grad = None
        original(self, *args, **kwargs)

    return add_gradient


def tied_counted_twice(original: Any) -> Any:
    """Each layer that uses a tied weight hands in its gradient."""

    def clip_grad_norm_(self: Any, *args: Any) -> torch.Tensor:
        names = [name for name, _ in self.module.named_parameters(remove_duplicate=False)]
        known_names = {name for name, _ in self.named_parameters()}
        if len(names) > len(known_names):
            dict(self.named_parameters())["embed.weight"].grad.mul_(2.0)
        return original(self, *args)

    return clip_grad_norm_


def replicas_apart(_: Any) -> Any:
    """The groups of a hybrid mesh never exchange their gradients."""
    return lambda *_: None


def replicas_added(original: Any) -> Any:
    """The exchange of a hybrid mesh is made with every microbatch, and so of sums that were exchanged before."""

    def finish(self: FullySharded) -> None:
        original(self)
        if not self._is_syncing:
            for unit in self._units:
                unit.start_replicate(self._groups.replicas)
                unit.finish_replicate()

    return finish


# Used or not.


def all_used(_: Any) -> Any:
    """Every parameter counts as used somewhere: one that is used nowhere gets a gradient of zeros, and decays."""
    return lambda *_: []


def own_opinion(_: Any) -> Any:
    """A rank takes what it has not used itself for unused."""
    return lambda self, missing: missing


def nothing_settled(_: Any) -> Any:
    return lambda *_: None


# Ranks that wait for one another.


def nobody_joins(_: Any) -> Any:
    return lambda *_: None


def order_not_agreed(_: Any) -> Any:
    """A rank issues what it wants next, whatever the others want."""

    def agree(self: Route, want: int) -> int:
        if want >= 0:
            self._learned.append(want)
            self._issue(want)
        return want

    return agree


# Precision.


def masters_rounded(original: Any) -> Any:
    """Masters are kept in the dtype of the parameters: small updates are lost."""

    def gather(self: FlatGroup) -> Any:
        self.master.data.copy_(self.master.data.to(torch.bfloat16))
        return original(self)

    return gather


def never_replayed(_: Any) -> Any:
    """A checkpointed batch norm moves its statistics once more when it runs again."""
    return lambda self, compute: compute()


BUGS: dict[str, Bug] = {
    **in_each("mean of means", accumulating(mean_of_means), "gradient"),
    **in_each("accumulation lost", accumulating(accumulation_lost), "gradient", "fsdp zero2 hybrid"),
    **in_each("no synchronisation with the last microbatch", accumulating(never_synchronised), "gradient", "zero1 hybrid"),
    **in_each("synchronisation with the first microbatch", accumulating(synchronised_first), "gradient", "zero1 hybrid"),
    **in_each("gradients not cleared", replacing(torch.optim.Optimizer, "zero_grad", gradients_kept), "gradient", step=1),
    **in_each("norm of a rank's pieces", norm_over(lambda engine: Quiet(engine.comm)), "norm"),
    **in_each("norm over the replicas too", norm_over(lambda engine: engine.comm), "norm", "hybrid"),
    **in_each("wrong slice gathered", replacing(FlatGroup, "gather", wrong_slice), "forward", "fsdp hybrid"),
    **in_each("wrong slice gathered after an update", replacing(FlatGroup, "gather", wrong_slice), "forward", "zero1", step=1),
    **in_each("others' slices not awaited", replacing(FlatGroup, "gather", own_slice_alone), "forward", "fsdp hybrid"),
    **in_each("stale slice gathered", replacing(FlatGroup, "_source", stale_source), "forward", "fsdp hybrid", step=1),
    **in_each("no gather after an update", replacing(Gathering, "_start", never_gathered), "forward", "zero1 zero2", step=1),
    **in_each("nothing gathered for backward", replacing(Unit, "start_gather", gathered_once), "gradient", "fsdp hybrid"),
    **in_each("slots overlap", lambda m: m.setattr("paceline.parallel.flat.flat_layout", misplaced(flat_layout)), "forward"),
    **in_each("tie lost", lambda m: m.setattr("paceline.parity.runs.parallelize", untied(parallelize)), "gradient",
              case=known(Tied), module="embed"),
    **in_each("first values not sent", replacing(VirtualCommunicator, "broadcast", first_values_differ), "forward",
              case=known(DiffersByRank)),
    **in_each("buffers not sent", replacing(SharedBuffers, "share", nothing_settled), "gradient", case=known(Remembers), step=1),
    **in_each("gradients not reduced", replacing(FlatGroup, "reduce_scatter", not_reduced), "gradient"),
    **in_each("reduced twice", replacing(FlatGroup, "reduce_scatter", reduced_twice), "gradient"),
    **in_each("gradient of another slice", replacing(FlatGroup, "reduce_scatter", slice_of_another), "gradient"),
    **in_each("gradients travel in single precision", replacing(FlatGroup, "reduce_scatter", travels_in(torch.float32)), "gradient"),
}
