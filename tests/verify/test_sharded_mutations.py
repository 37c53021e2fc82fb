"""The mutation check for sharding and mixed precision: their classic bugs, planted one by one, are all found.

The bugs of plain data parallelism, and of the step, are in ``test_mutations.py``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from planted_bugs import (
    SETTINGS,
    Branches,
    Bug,
    DiffersByRank,
    Plain,
    Plant,
    Quiet,
    Remembers,
    Tied,
    accumulating,
    accumulation_lost,
    also,
    check_found,
    gradients_kept,
    known,
    make_short_batch,
    mean_of_means,
    misplaced,
    never_synchronised,
    plain_backward,
    replacing,
    synchronised_first,
    untied,
)
from torch import nn

from paceline.comm.base import DONE, Call
from paceline.comm.virtual.communicator import VirtualCommunicator
from paceline.engines.apply import parallelize
from paceline.engines.blocks import Replay
from paceline.engines.flat.flat import FlatGroup
from paceline.engines.flat.gathering import Gathering, Leg, Route
from paceline.engines.flat.shard import ShardGradients, clip_pieces
from paceline.engines.flat.unit import Unit
from paceline.engines.fsdp import FullySharded, UsedFlags
from paceline.engines.groups import ParameterGroups
from paceline.engines.module_engine import ModuleEngine
from paceline.engines.zero import ZeroParallel
from paceline.errors import CommunicationError
from paceline.shards import flat_layout
from paceline.train import step as steps
from paceline.verify.case import Settings
from paceline.verify.certificate import certify

PLAIN = known(functools.partial(Plain, 2))
SHORT = known(functools.partial(Plain, 2), make_short_batch)
DIFFERS = known(functools.partial(DiffersByRank, 2))
REMEMBERS = known(functools.partial(Remembers, 2))
FSDP = SETTINGS.with_layout(strategy="fsdp")
ZERO1 = SETTINGS.with_layout(strategy="zero1")
ZERO2 = SETTINGS.with_layout(strategy="zero2")
HYBRID = dataclasses.replace(SETTINGS, ranks=4).with_layout(strategy="hybrid", shard_ranks=2)
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


def in_each(
    name: str,
    plant: Plant,
    shows: str,
    only: str = "fsdp zero1 zero2 hybrid",
    changes: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, Bug]:
    """The same bug under several strategies, with ``changes`` of their settings."""
    fields = {"plant": plant, "case": PLAIN, "shows": shows, **options}
    clip = {key: value for key, value in (changes or {}).items() if key == "clip"}
    layout = {key: value for key, value in (changes or {}).items() if key != "clip"}
    settings = {
        strategy: dataclasses.replace(SHARDED[strategy], **clip).with_layout(**layout) for strategy in only.split()
    }
    return {f"{name}, {strategy}": Bug(**fields, settings=chosen) for strategy, chosen in settings.items()}


def nothing(_: Any) -> Any:
    return lambda *_, **__: None


# Clipping.


def norm_over(choose: Callable[[Any], Any]) -> Any:
    """The norm is added up over other ranks than those that share the pieces."""

    def make(_: Any) -> Any:
        def clip_grad_norm_(self: Any, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
            return clip_pieces(list(self.parameters()), choose(self), max_norm, norm_type)

        return clip_grad_norm_

    return also(replacing(FullySharded, "clip_grad_norm_", make), replacing(ZeroParallel, "clip_grad_norm_", make))


# Parameters.


def wrong_slice(original: Any) -> Any:
    """Every rank's slice lands in the place of the next one's."""

    def gather(self: FlatGroup) -> Any:
        original(self).wait()
        full = self.full.data
        full.copy_(full.roll(self.layout.shard_length))
        return DONE

    return gather


def own_slice_alone(original: Any) -> Any:
    """A rank does not wait for the others' slices: it computes with what was in memory."""

    def gather(self: FlatGroup) -> Any:
        before = (
            self.full.data.clone()
            if self.full.untyped_storage().size()
            else torch.zeros_like(self.master).repeat(self.comm.size)
        )
        original(self).wait()
        mine = self.full.data[self.layout.start : self.layout.stop].clone()
        self.full.data.copy_(before)
        self.full.data[self.layout.start : self.layout.stop] = mine
        return DONE

    return gather


def stale(original: Any) -> Any:
    """What was gathered first is what is gathered ever after."""

    def gather(self: FlatGroup) -> Any:
        original(self).wait()
        if not hasattr(self, "_planted"):
            self._planted = self.full.data.clone()  # type: ignore[attr-defined]
        self.full.data.copy_(self._planted)  # type: ignore[attr-defined]
        return DONE

    return gather


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


def first_values_differ(original: Any) -> Any:
    """Every rank keeps its slice of its own values."""

    def issue(self: VirtualCommunicator, call: Call) -> Any:
        kept, work = call.tensor.clone(), original(self, call)
        if call.kind != "broadcast":
            return work
        work.wait()
        call.tensor.data.copy_(kept)
        return DONE

    return issue


# Gradients.


def not_scaled(_: Any) -> Any:
    return property(lambda _: 1.0)


def not_reduced(original: Any) -> Any:
    """A rank keeps its own gradient of its slice."""

    def reduce_scatter(self: ShardGradients, gradient: torch.Tensor, output: torch.Tensor | None = None) -> Any:
        own = gradient[self.layout.start : self.layout.stop].clone()
        mine, work = original(self, gradient, output)
        work.wait()
        return mine.copy_(own), DONE

    return reduce_scatter


def reduced_twice(original: Any) -> Any:
    def reduce_scatter(self: ShardGradients, gradient: torch.Tensor, output: torch.Tensor | None = None) -> Any:
        mine, work = original(self, gradient, output)
        work.wait()
        return mine.mul_(2.0), DONE

    return reduce_scatter


def slice_of_another(original: Any) -> Any:
    """A rank gets the gradient of its neighbour's slice."""

    def reduce_scatter(self: ShardGradients, gradient: torch.Tensor, output: torch.Tensor | None = None) -> Any:
        return original(self, gradient.copy_(gradient.roll(self.layout.shard_length)), output)

    return reduce_scatter


def travels_in(dtype: torch.dtype) -> Any:
    """Gradients are rounded on their way."""

    def make(original: Any) -> Any:
        def reduce_scatter(self: ShardGradients, gradient: torch.Tensor, output: torch.Tensor | None = None) -> Any:
            return original(self, gradient.copy_(gradient.to(dtype)), output)

        return reduce_scatter

    return make


def replaced_not_added(original: Any) -> Any:
    """A microbatch's slice takes the place of that of the one before."""

    def add(self: ShardGradients, *args: Any, **kwargs: Any) -> None:
        for piece in self.pieces:
            piece.grad = None
        original(self, *args, **kwargs)

    return add


def tied_counted_twice(original: Any) -> Any:
    """Each layer that uses a tied weight hands in its gradient."""

    def clip_grad_norm_(self: Any, *args: Any) -> torch.Tensor:
        names = [name for name, _ in self.module.named_parameters(remove_duplicate=False)]
        known_names = {name for name, _ in self.named_parameters()}
        if len(names) > len(known_names):
            dict(self.named_parameters())["embed.weight"].grad.mul_(2.0)
        return original(self, *args)

    return clip_grad_norm_


def replicas_added(original: Any) -> Any:
    """The exchange of a hybrid mesh is made with every microbatch, and so of sums that were exchanged before."""

    def finish(self: FullySharded) -> None:
        original(self)
        if not self._is_syncing:
            for unit in self._units:
                unit.start_replicate()
                unit.finish_replicate()

    return finish


# Used or not.


def all_used(_: Any) -> Any:
    """Every parameter counts as used somewhere: one that is used nowhere gets a gradient of zeros, and decays."""
    return lambda *_: []


def own_opinion(_: Any) -> Any:
    """A rank takes what it has not used itself for unused."""
    return lambda *arguments: arguments[-1]


# Ranks that wait for one another.


def order_not_agreed(_: Any) -> Any:
    """A rank issues what it wants next, whatever the others want."""

    def agree(self: Route, want: Leg | None) -> Leg | None:
        if want is not None:
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
    return lambda _, compute: compute()


def every(name: str) -> Plant:
    """Replaces the method of both sharded engines by one that does nothing."""
    return also(replacing(FullySharded, name, nothing), replacing(ZeroParallel, name, nothing))


def at(path: str, make: Callable[[Any], Any], original: Any) -> Plant:
    module, _, name = path.rpartition(".")
    return lambda monkeypatch: monkeypatch.setattr(import_module(module), name, make(original))


def mean_of_means_in(precision: str) -> dict[str, Bug]:
    """Found by the bound of equal pieces, and by that of batch norm."""
    plant, name, changes = accumulating(mean_of_means), f"mean of means in {precision}", {"precision": precision}
    return {
        **in_each(name, plant, "gradient", "fsdp zero1" if precision == "bf16" else "fsdp", changes),
        **in_each(f"{name} with batch norm", plant, "gradient", "zero2", changes, case=known(Normed)),
    }


REDUCING = (ShardGradients, "reduce_scatter")
# A model, and the module of it in which the bug shows.
TIED = {"case": known(Tied), "module": "embed"}
UNUSED = {"case": known(Branches), "module": "never"}

BUGS: dict[str, Bug] = {
    # The step.
    **in_each("mean of means", accumulating(mean_of_means), "gradient"),
    **in_each("accumulation lost", accumulating(accumulation_lost), "gradient", "fsdp zero2"),
    **in_each("no last synchronisation", accumulating(never_synchronised), "gradient", "zero1 hybrid"),
    **in_each("first microbatch synchronised", accumulating(synchronised_first), "gradient", "zero1 hybrid"),
    **in_each(
        "gradients not cleared",
        replacing(torch.optim.Optimizer, "zero_grad", gradients_kept),
        "gradient",
        "fsdp zero1",
        step=1,
    ),
    **in_each(
        "a rank without samples does not join",
        every("join_pass"),
        "",
        "fsdp zero1",
        case=SHORT,
        verdict=CommunicationError,
    ),
    # Clipping.
    **in_each("norm of a rank's pieces", norm_over(lambda engine: Quiet(engine.comm)), "gradient", "fsdp zero2"),
    **in_each(
        "norm of a rank's pieces, nothing to clip",
        norm_over(lambda engine: Quiet(engine.comm)),
        "norm",
        "fsdp zero1",
        changes={"clip": 1e9},
    ),
    **in_each("norm over the replicas too", norm_over(lambda engine: engine.comm), "norm", "hybrid"),
    # Parameters.
    **in_each("wrong slice gathered", replacing(FlatGroup, "gather", wrong_slice), "forward", "fsdp"),
    **in_each("wrong slice gathered", replacing(FlatGroup, "gather", wrong_slice), "forward", "zero1", step=1),
    **in_each("others not awaited", replacing(FlatGroup, "gather", own_slice_alone), "forward", "hybrid"),
    **in_each("others not awaited", replacing(FlatGroup, "gather", own_slice_alone), "forward", "zero2", step=1),
    **in_each("stale parameters", replacing(FlatGroup, "gather", stale), "forward", "fsdp hybrid", step=1),
    **in_each("stale parameters", replacing(FlatGroup, "gather", stale), "forward", "zero1", step=2),
    **in_each(
        "no gather after an update", replacing(Gathering, "_start", never_gathered), "forward", "zero1 zero2", step=1
    ),
    **in_each(
        "nothing gathered for backward", replacing(Unit, "start_gather", gathered_once), "gradient", "fsdp hybrid"
    ),
    **in_each(
        "slots overlap", at("paceline.engines.flat.shard.flat_layout", misplaced, flat_layout), "forward", "fsdp zero1"
    ),
    **in_each(
        "tie lost", at("paceline.verify.runs.parallelize", untied, parallelize), "gradient", "fsdp zero1", **TIED
    ),
    **in_each(
        "first values not sent",
        replacing(VirtualCommunicator, "issue", first_values_differ),
        "forward",
        "fsdp zero1 hybrid",
        case=DIFFERS,
    ),
    **in_each(
        "buffers not sent",
        replacing(ModuleEngine, "share_buffers", nothing),
        "buffer",
        "fsdp zero1",
        case=REMEMBERS,
        changes={"accumulate": 1},
    ),
    # Gradients.
    **in_each("scale forgotten", replacing(ParameterGroups, "scale", not_scaled), "gradient"),
    **in_each("gradients not reduced", replacing(*REDUCING, not_reduced), "gradient", "fsdp zero1 zero2"),
    **in_each("reduced twice", replacing(*REDUCING, reduced_twice), "gradient", "fsdp zero1"),
    **in_each("gradient of another slice", replacing(*REDUCING, slice_of_another), "gradient", "fsdp zero1"),
    **in_each("gradients travel in float32", replacing(*REDUCING, travels_in(torch.float32)), "gradient", "fsdp zero2"),
    **in_each("replaced, not added", replacing(ShardGradients, "add", replaced_not_added), "gradient", "fsdp zero2"),
    **in_each(
        "tied weight counted twice",
        also(*(replacing(engine, "clip_grad_norm_", tied_counted_twice) for engine in (FullySharded, ZeroParallel))),
        "gradient",
        "fsdp zero1",
        **TIED,
    ),
    **in_each("replicas apart", replacing(Unit, "start_replicate", nothing), "gradient", "hybrid"),
    **in_each("replicas exchanged too often", replacing(FullySharded, "_finish", replicas_added), "gradient", "hybrid"),
    # Used or not.
    **in_each(
        "unused parameter decays", replacing(UsedFlags, "ask_others", all_used), "gradient", "fsdp hybrid", **UNUSED
    ),
    **in_each(
        "unused parameter decays", replacing(ZeroParallel, "_drop_unused", nothing), "gradient", "zero1 zero2", **UNUSED
    ),
    **in_each(
        "use decided by each rank",
        replacing(UsedFlags, "ask_others", own_opinion),
        "gradient",
        "fsdp hybrid",
        case=known(Branches),
    ),
    **in_each(
        "order not agreed",
        replacing(Route, "_agree", order_not_agreed),
        "",
        "fsdp",
        case=known(Branches),
        verdict=CommunicationError,
    ),
    # Checkpointing.
    **in_each(
        "statistics moved twice",
        replacing(Replay, "once", never_replayed),
        "buffer",
        "fsdp zero2",
        case=known(Normed),
        changes={"checkpoint_activations": "full"},
        module="blocks.0.1",
    ),
    # Mixed precision: the looser bounds find them too.
    **mean_of_means_in("bf16"),
    **mean_of_means_in("bf16_master"),
    **mean_of_means_in("fp16"),
    **in_each(
        "gradients travel in half precision",
        replacing(*REDUCING, travels_in(torch.bfloat16)),
        "gradient",
        "fsdp zero1 zero2",  # by a fourth nothing is rounded
        changes={"precision": "bf16"},
    ),
    **in_each(
        "masters in half precision",
        replacing(FlatGroup, "gather", masters_rounded),
        "update",
        "fsdp",
        changes={"precision": "bf16_master"},
    ),
    **in_each(
        "scale of the loss stays",
        replacing(steps, "scale_gradients", nothing),
        "gradient",
        "fsdp",
        changes={"precision": "fp16", "clip": None},
    ),
    **in_each(
        "replicas apart in bf16",
        replacing(Unit, "start_replicate", nothing),
        "gradient",
        "hybrid",
        changes={"precision": "bf16"},
    ),
}


def as_parameters() -> list[Any]:
    """Every bug under one strategy in the default run; the same bug under the others is for the exhaustive one."""
    seen: set[str] = set()
    found = []
    for name, bug in BUGS.items():
        kind = name.rsplit(", ", 1)[0]
        found.append(pytest.param(bug, id=name, marks=pytest.mark.exhaustive if kind in seen else ()))
        seen.add(kind)
    return found


@pytest.mark.some(16)
@pytest.mark.parametrize("bug", as_parameters())
def test_a_planted_bug_is_found(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    check_found(bug, monkeypatch)


@pytest.mark.some(2)
@pytest.mark.parametrize("settings", SHARDED.values(), ids=SHARDED.keys())
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_replaced_loop_is_right_without_a_bug(
    settings: Settings, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    accumulating(plain_backward)(monkeypatch)
    assert certify(PLAIN, settings.with_layout(precision=precision)).passed
