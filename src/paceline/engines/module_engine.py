"""What engines of one module have in common: passes, who holds what, buffers, and states of the whole model."""

from __future__ import annotations

import contextlib
import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.comm.base import Communicator
from paceline.engines.batchnorm import standing_in
from paceline.engines.engine import Engine
from paceline.engines.flat.flat import piece_places
from paceline.engines.flat.optimizer_state import check_updates, gather_optimizer_state, load_optimizer_state, on_cpu
from paceline.engines.flat.shard import dense_stride, full_shape
from paceline.engines.groups import (
    NO_BLANK,
    Groups,
    ReplicaWatch,
    broadcast_tensors,
    differentiable_in,
    without_samples,
)
from paceline.engines.precision import Precision
from paceline.engines.tensor.layout import ExpertParts
from paceline.errors import UsageError
from paceline.health.ledger_view import BACKWARD, EVALUATION, FORWARD
from paceline.plan.layout import Layout
from paceline.shards import Region, Shard, memory_order, whole_region


class ModuleEngine(Engine):
    """An engine of one module over the ranks that share the batch: no rank computes with a part of the model alone."""

    replica_watch: ReplicaWatch | None = None  # compares ranks, in a loop of the user's own
    _updated: dict[str, nn.Parameter]  # by name: parameters, or this rank's flat pieces of them, some of them empty

    def __init__(self, module: nn.Module, groups: Groups, layout: Layout, precision: Precision) -> None:
        self.module = module
        self.groups = groups
        self.layout = layout
        self.experts = ExpertParts(module, groups.expert)
        self.precision = precision
        self._is_syncing = True  # whether a backward pass completes the gradients, or only accumulates
        is_shared = layout.buffers == "broadcast" and groups.gradients.size > 1
        persistent = module.state_dict(keep_vars=True) if is_shared else {}
        paths = [name.rpartition(".") for name, _ in module.named_buffers() if name in persistent]
        # What all take from rank 0, by owner and name: a module may put another tensor in a buffer's place.
        self._shared_buffers = [(module.get_submodule(owner), name) for owner, _, name in paths]
        self._are_buffers_shared = False  # in this pass

    @property
    def _is_plain(self) -> bool:
        """Whether parameters are updated as they are: under data parallelism, and on one rank that keeps no copies."""
        return not self.flat_groups

    @property
    def holds_parts(self) -> bool:
        return not self._is_plain and self.gradient_comm.size > 1

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return iter(self._updated.items())

    def check_optimizer(self, optimizer: Optimizer) -> None:
        super().check_optimizer(optimizer)
        if not self._is_plain or self.experts:
            check_updates(optimizer, self.flat_groups, are_whole=not self.experts)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        before, self._is_syncing = self._is_syncing, False
        try:
            yield
        finally:
            self._is_syncing = before

    def join_pass(self) -> None:
        if self.groups.blanks is not None:
            args, kwargs = self._blank_inputs(self.groups.blanks.inputs)
            outputs = differentiable_in(self(*args, **kwargs))
            if outputs:
                torch.autograd.backward(outputs, [torch.zeros_like(each) for each in outputs])
            return
        with standing_in(self.module):
            self.join_forward()
            if torch.is_grad_enabled():
                self.join_backward()

    def _blank_inputs(self, known: dict[nn.Module, Any]) -> Any:
        """Returns arguments of zero rows: as the module was called last, or as it says that it may be."""
        if self.module not in known and callable(say := getattr(self.module, "example_inputs", None)):
            args = tuple(torch.zeros_like(each, device=self.device) for each in say())
            known[self.module] = without_samples((args, {}))
        if self.module not in known:
            raise UsageError(NO_BLANK)
        return known[self.module]

    def forget_pass(self) -> None:
        """Takes back what the last pass taught the engine: nothing."""

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self.precision.cast_inputs((args, kwargs))
        with self.precision.context(self.device):
            return self._run_module(*args, **kwargs)

    def watch_replicas(self) -> None:
        """Lets this rank compare its inputs and its replica with those of the others, now and then."""
        if self.gradient_comm.size > 1:
            self.replica_watch = ReplicaWatch(self.gradient_comm)

    def _end_pass(self) -> None:
        if self.replica_watch is not None:
            alike = (pair for pair in self.named_parameters() if pair[0] not in self.experts)
            self.replica_watch.end_pass(() if self.holds_parts else alike)

    def _run_module(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module; in a loop of the user's own, the ledger notes the phase before and after it."""
        if self.groups.blanks is not None:
            self.groups.blanks.inputs[self.module] = without_samples((args, kwargs))
        with contextlib.nullcontext() if self.groups.sequences is None else self.groups.sequences.call(args, kwargs):
            if self.replica_watch is not None and torch.is_grad_enabled():
                self.replica_watch.see((args, kwargs))
            ledger = self.gradient_comm.ledger
            if ledger is None or not ledger.is_own_loop:
                return self.module(*args, **kwargs)
            is_training = torch.is_grad_enabled()
            ledger.enter(FORWARD if is_training else EVALUATION)
            output = self.module(*args, **kwargs)
            if is_training:
                ledger.enter(BACKWARD)
            return output

    @property
    def _totals(self) -> tuple[int, int]:
        splits, named = self.experts.splits, self._updated
        sizes = {p: math.prod(splits[n].shape if n in splits else full_shape(p)) for n, p in named.items()}
        return sum(sizes.values()), sum(size for parameter, size in sizes.items() if parameter.requires_grad)

    def holders(self) -> dict[str, Communicator]:
        """Returns, by name, the ranks that hold the same of a parameter as this one, and have the same gradient."""
        groups = self.groups
        whole = {n: groups.expert_gradients if n in self.experts else groups.gradients for n in self._updated}
        return whole | {name: group.shared.replicate for group in self.flat_groups for name in group.layout.names}

    # What a pipeline asks of the engine of a stage.

    def interleave(self) -> None:
        """Prepares for passes that alternate: forwards of later microbatches come before the backward of one."""

    def join_forward(self) -> None:
        """Joins a forward for which this rank has no samples; ``join_backward`` follows, later."""

    @abstractmethod
    def join_backward(self) -> None:
        """Joins the backward of a forward that was joined."""

    # States: each engine's own, and around them what ranks with other experts hold.

    def full_state_dict(self, *, rank0_only: bool = False) -> dict[str, Tensor]:
        state = self._gather_state(rank0_only=rank0_only and not self.experts)
        whole = {name: self.experts.whole(name, value) for name, value in state.items()}
        return {} if rank0_only and self.gradient_comm.rank else whole

    def load_full_state_dict(self, state: dict[str, Tensor]) -> None:
        self._load_state({name: self.experts.part(name, value) for name, value in state.items()})

    def full_gradients(self) -> dict[str, Tensor | None]:
        return {name: self.experts.whole(name, value) for name, value in self._gather_gradients().items()}

    def full_optimizer_state(self, optimizer: Optimizer, *, rank0_only: bool = False) -> dict[str, Any]:
        packed = self._gather_optimizer_state(optimizer, rank0_only=rank0_only and not self.experts)
        whole = self.experts.change_states(optimizer, packed, self._names_by_id(), self.experts.whole)
        return {} if rank0_only and self.gradient_comm.rank else whole

    def load_full_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        self.check_optimizer(optimizer)  # which settles whether it has parts of states, or whole ones
        mine = self.experts.change_states(optimizer, state, self._names_by_id(), self.experts.part)
        load_optimizer_state(optimizer, self.flat_groups, mine)  # a copy: torch's own would keep the tensors

    def _gather_gradients(self) -> dict[str, Tensor | None]:
        named = dict(self.named_parameters())
        found = {name: None if p.grad is None else p.grad.to("cpu", copy=True) for name, p in named.items()}
        for group in () if self._is_plain else self.flat_groups:
            parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in group.pieces]
            for name, piece, whole in zip(group.layout.names, group.pieces, group.gather_whole(parts), strict=True):
                found[name] = None if piece.grad is None else whole.to("cpu", copy=True)
        return found

    @torch.no_grad()
    def _gather_state(self, *, rank0_only: bool) -> dict[str, Tensor]:
        """Returns all parameters and buffers on the CPU, gathered one group at a time."""
        is_kept = self.gradient_comm.rank == 0 or not rank0_only
        whole: dict[int, Tensor] = {}
        for group in self.flat_groups:
            tensors = group.gather_whole(group.pieces)
            if is_kept:
                for parameter, piece, tensor in zip(group.parameters, group.pieces, tensors, strict=True):
                    whole[id(parameter)] = whole[id(piece)] = on_cpu(tensor)
            del tensors
        state = self.module.state_dict(keep_vars=True) if is_kept else {}
        return {name: whole[id(value)] if id(value) in whole else on_cpu(value) for name, value in state.items()}

    @torch.no_grad()
    def _load_state(self, state: dict[str, Tensor]) -> None:
        """Loads what ``_gather_state`` gave, each rank its pieces. Raises RuntimeError before anything has changed."""
        mine = self.module.state_dict(keep_vars=True)
        places = piece_places(self.flat_groups)
        for group in self.flat_groups:
            places |= {id(p): (group, place) for place, p in enumerate(group.parameters)}
        slots = {key: group.layout.slots[place] for key, (group, place) in places.items()}
        check_fits({name: tuple(slots.get(id(value), value).shape) for name, value in mine.items()}, state)
        for name, value in mine.items():
            if id(value) not in places:
                value.copy_(state[name])
                continue
            group, place = places[id(value)]
            group.pieces[place].copy_(group.layout.cut_piece(place, state[name]))

    def _gather_optimizer_state(self, optimizer: Optimizer, *, rank0_only: bool) -> dict[str, Any]:
        return gather_optimizer_state(optimizer, self.flat_groups, comm=self.gradient_comm, rank0_only=rank0_only)

    def share_buffers(self) -> None:
        """Gives every rank the buffers of rank 0: each moves its own (batch-norm statistics, say) in every forward."""
        found = [owner._buffers[name] for owner, name in self._shared_buffers]
        if found:
            broadcast_tensors(self.gradient_comm, [buffer for buffer in found if buffer is not None])

    def _share_buffers(self) -> None:
        """Shares the buffers as a part of a pass, and notes that it did."""
        self._are_buffers_shared = True
        self.share_buffers()

    def shards(self) -> Iterator[Shard]:
        named, holders = dict(self.named_parameters()), self.holders()
        places = piece_places(self.flat_groups)
        for name, parameter in named.items():
            found = places.get(id(parameter))
            own = own_region(parameter) if found is None else found[0].layout.region(found[1])
            region, same = self.experts.region(name, own), holders[name]
            yield Shard(name=name, region=region, tensor=parameter, copy=same.rank, copies=same.size)
        for name, value in self.module.state_dict(keep_vars=True).items():
            is_buffer = isinstance(value, Tensor) and not isinstance(value, nn.Parameter)
            if is_buffer and name not in named:
                copy = None if self.gradient_comm.rank else 0
                yield Shard(name=name, region=own_region(value), tensor=value, copy=copy)


def own_region(tensor: Tensor) -> Region:
    """Returns the region of a tensor that is whole, in the order of its memory."""
    return whole_region(tuple(tensor.shape), memory_order(tensor.shape, dense_stride(tensor)))


def check_fits(shapes: Mapping[str, tuple[int, ...] | None], state: Mapping[str, Tensor]) -> None:
    """Raises RuntimeError for a state with other names than a model has, or with other shapes where these are known."""
    problems = [f"missing {name}" for name in shapes if name not in state]
    problems += [f"unexpected {name}" for name in state if name not in shapes]
    for name, shape in shapes.items():
        if shape is not None and name in state and tuple(state[name].shape) != shape:
            problems.append(f"{name} has shape {tuple(state[name].shape)}, the model's is {shape}")
    if problems:
        raise RuntimeError("the state does not fit the model: " + "; ".join(problems))
