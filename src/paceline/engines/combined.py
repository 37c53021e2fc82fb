"""Model parallelism and data parallelism together: one engine over this rank's stages, each with an engine of its own.

    world = pipeline x data x context x tensor    data: ranks that hold the same part of the model and share the batch

What is left to do here is what concerns the whole model: the global norm, tied weights, losses that one rank knows, and
states under the whole model's names. Per step that is one all-reduce of one number over the world for the norm, one
broadcast of two along the pipeline, and an all-reduce of each tied gradient between the ranks that use it.

``combine`` makes it: layers are split, the model is cut into stages, and each stage of this rank goes to a
data-parallel engine. ``Layout.mesh`` says where ranks stand.

- Of a gradient that several ranks hold (replicas; layers that tensor parallelism does not split; a tied weight) the
  norm counts one copy.
- A tied weight is a flat group by itself in sharded engines, so that its stages hold the same slices of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.comm.base import Communicator
from paceline.comm.objects import broadcast_object
from paceline.engines.engine import Engine, LossFunction, OnPhase, Scale
from paceline.engines.flat import optimizer_state
from paceline.engines.flat.flat import mark_alone
from paceline.engines.flat.shard import add_powers, reduce_norm, scale_to
from paceline.engines.groups import Groups, check_same_model, expert_dim
from paceline.engines.loss_sums import LossSum
from paceline.engines.module_engine import ModuleEngine, check_fits
from paceline.engines.pipeline import Pipeline
from paceline.engines.stages.costs import estimate_layers, measure_layers
from paceline.engines.stages.stages import bounds_from_layers, bounds_from_names, split_model, tied_names
from paceline.engines.tensor.apply import apply_tensor_parallel
from paceline.engines.tensor.layout import Split, SplitParts
from paceline.errors import UsageError
from paceline.free_memory import measure_machine
from paceline.models.hugging_face import allocate_unfilled
from paceline.models.layers import PipelineLayer, model_layers
from paceline.models.registry import model_blocks
from paceline.plan.layout import Layout
from paceline.predict.memory.facts import LayerCost, choose_bounds
from paceline.schedule.check import check_schedule
from paceline.schedule.grid import Schedule
from paceline.schedule.schedules import make_schedule
from paceline.shards import Shard

T = TypeVar("T")


class CombinedParallel(Engine):
    """Trains a model whose layers, or parts of layers, lie on several ranks."""

    def __init__(
        self,
        groups: Groups,
        pipeline: Pipeline,
        names: Sequence[str],
        tied: Mapping[str, Sequence[int]],
        splits: Mapping[str, Split],
        sizes: tuple[int, int],
    ) -> None:
        """Takes the names of the whole state, the stages of tied ones, and how many parameters there are and train."""
        self.groups = groups
        self.stages = pipeline.stages
        self.pipeline: Pipeline | None = pipeline if pipeline.num_stages > 1 else None
        engines = list(self.stages.values())
        self.precision = engines[0].precision
        self.float8 = engines[0].float8
        self.flat_groups = [group for engine in engines for group in engine.flat_groups]
        self.module = engines[0].module if len(engines) == 1 else nn.ModuleList(e.module for e in engines)
        self._numbers = sizes
        self._names = tuple(names)
        self._tied = dict(tied)
        self._parts = SplitParts(splits, groups.tensor)
        self._split = (*(engine.experts for engine in engines), self._parts)  # of a parameter: joined by each in turn
        self._counted = {
            (stage, name)
            for stage, engine in self.stages.items()
            for name, same in engine.holders().items()
            if same.rank == 0 and self._is_first(stage, name)
        }
        self._tie_comms: dict[str, Communicator] = {}  # the ranks of each tied parameter, made in one order on all
        made: dict[tuple[int, ...], Communicator] = {}
        for name, stages in self._tied.items():
            ranks = tuple(sorted({pipeline.placement[stage] for stage in stages}))
            if len(ranks) > 1 and groups.pipeline.rank in ranks:
                if ranks not in made:
                    made[ranks] = groups.pipeline.split(ranks)
                self._tie_comms[name] = made[ranks]

    @property
    def _totals(self) -> tuple[int, int]:
        return self._numbers

    @property
    def holds_parts(self) -> bool:
        return True

    @property
    def _spread(self) -> str:
        pipeline, context, tensor = (getattr(self.groups, name).size for name in ("pipeline", "context", "tensor"))
        shared = f"context {context} x " if context > 1 else ""
        axes = f"pipeline {pipeline} x {shared}tensor {tensor} x data {self.batch_comm.size}"
        return f"{axes}, {next(iter(self.stages.values()))._spread}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module; through a pipeline without gradients, where each rank gives inputs and gets the output."""
        if self.pipeline is None:
            return self.stages[0](*args, **kwargs)
        if torch.is_grad_enabled():
            raise UsageError(
                "engine(...) with gradients on a pipeline\n"
                "  its forward and backward passes are interleaved by a schedule, over all microbatches of a step\n"
                "  call engine.run_microbatches(microbatches, loss, scale), or train through the trainer"
            )
        with self.inside((args, kwargs)) as given:
            output = self.pipeline.evaluate(lambda model, batch: model(*batch[0], **batch[1]), given)
        return optimizer_state.merge_over(self.groups.pipeline, {} if output is None else {"output": output})["output"]

    def _run_microbatches(
        self, microbatches: Sequence[Any], loss: LossFunction, scale: Scale, on_phase: OnPhase
    ) -> Sequence[LossSum]:
        """Runs the passes of a step; through a pipeline the result is one sum and count, the same on all its ranks."""
        if self.pipeline is None:
            return super()._run_microbatches(microbatches, loss, scale, on_phase)
        microbatches = self.groups.filled(microbatches)
        with self.inside(None):  # each action sets the part of its microbatch
            values = self.pipeline.run([self.cut(each) for each in microbatches], loss, scale, on_phase)
        self._sum_tied()
        return [self.pipeline.share_values(values)]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return (pair for engine in self.stages.values() for pair in engine.named_parameters())

    def train(self, mode: bool = True) -> Self:
        for engine in self.stages.values():
            engine.train(mode)
        return self

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for engine in self.stages.values():
                stack.enter_context(engine.no_sync())
            yield

    def apply_loss(self, compute: Callable[..., T], batch: Any) -> T | None:
        with self.inside(batch) as own:
            return compute(self, own) if self.pipeline is None else self.pipeline.evaluate(compute, own)

    def add_up(self, sums: Tensor) -> None:
        """Adds numbers of the last stages over the ranks that share the batch; every rank gets the result."""
        self.gradient_comm.all_reduce(sums).wait()
        if self.pipeline is not None and self.groups.pipeline.size > 1:
            self.groups.pipeline.broadcast(sums, self.pipeline.placement[-1]).wait()

    def join_pass(self) -> None:
        for engine in self.stages.values():
            engine.join_pass()

    def forget_pass(self) -> None:
        for engine in self.stages.values():
            engine.forget_pass()

    def share_buffers(self) -> None:
        for engine in self.stages.values():
            engine.share_buffers()

    def check_optimizer(self, optimizer: Optimizer) -> None:
        super().check_optimizer(optimizer)
        are_whole = not self.splits_matrices and self.groups.expert.size == 1
        if self.flat_groups or not are_whole:
            optimizer_state.check_updates(optimizer, self.flat_groups, are_whole=are_whole)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        counted = [  # the gradients of which this rank holds the copy that counts
            parameter.grad
            for stage, engine in self.stages.items()
            for name, parameter in engine.named_parameters()
            if (stage, name) in self._counted and parameter.grad is not None and parameter.grad.numel()
        ]
        total = torch.zeros((), dtype=next(self.parameters()).dtype, device=self.device)
        if counted:
            norms = [norm.to(self.device) for norm in torch._foreach_norm(counted, norm_type)]
            total = add_powers(torch.stack(norms), norm_type)
        norm = reduce_norm(total, self.world, norm_type)
        scale_to(max_norm, norm, self.gradients())
        return norm

    def _is_first(self, stage: int, name: str) -> bool:
        """Whether this rank's copy of a parameter is the first among tensor ranks and tied stages."""
        is_copy = self.groups.tensor.rank > 0 and name not in self._parts
        return not is_copy and self._tied.get(name, (stage,))[0] == stage

    @torch.no_grad()
    def _sum_tied(self) -> None:
        for name, parameter in self.named_parameters():
            if name in self._tie_comms and parameter.requires_grad:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                gradient = parameter.grad
                if gradient.numel():
                    whole = gradient.contiguous()
                    self._tie_comms[name].all_reduce(whole).wait()
                    if whole is not gradient:
                        gradient.copy_(whole)

    def full_state_dict(self, *, rank0_only: bool = False) -> dict[str, Tensor]:
        states = (engine.full_state_dict(rank0_only=rank0_only) for engine in self.stages.values())
        return self._merged(states, rank0_only=rank0_only)

    def load_full_state_dict(self, state: dict[str, Tensor]) -> None:
        splits = self._parts.splits
        check_fits({name: splits[name].shape if name in splits else None for name in self._names}, state)
        for engine in self.stages.values():
            mine = engine.module.state_dict(keep_vars=True)
            engine.load_full_state_dict({name: self._parts.part(name, state[name]) for name in mine})

    def full_gradients(self) -> dict[str, Tensor | None]:
        return self._merged((engine.full_gradients() for engine in self.stages.values()), rank0_only=False)

    def shards(self) -> Iterator[Shard]:
        """Yields what this rank holds of the whole model; of what several ranks hold alike, the first one writes it."""
        for stage, engine in self.stages.items():
            for shard in engine.shards():
                copy = shard.copy if self._is_first(stage, shard.name) else None
                yield replace(shard, region=self._parts.region(shard.name, shard.region), copy=copy)

    def state_names(self) -> Collection[str]:
        return self._names

    def mark_loaded(self) -> None:
        for engine in self.stages.values():
            engine.mark_loaded()

    def full_optimizer_state(self, optimizer: Optimizer, *, rank0_only: bool = False) -> dict[str, Any]:
        packed = optimizer_state.gather_optimizer_state(
            optimizer, self.flat_groups, comm=self.gradient_comm, rank0_only=rank0_only
        )
        groups = optimizer_state.global_groups(self.groups.pipeline, optimizer, self._names_by_id(), self._names)
        mine = optimizer_state.named_states(optimizer, packed, self._names_by_id()) if packed else {}
        for name, values in mine.items():
            for split in self._split:
                mine[name] = values = {key: split.whole(name, value) for key, value in values.items()}
        found = self._merged([mine], rank0_only=rank0_only)
        return {} if rank0_only and self.world.rank else optimizer_state.numbered_states(groups, found)

    def load_full_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        def part(name: str, values: Mapping[str, Any]) -> dict[str, Any]:
            for split in reversed(self._split):
                values = {key: split.part(name, value) for key, value in values.items()}
            return dict(values)

        self.check_optimizer(optimizer)  # which settles whether it has parts of states, or whole ones
        groups = optimizer_state.global_groups(self.groups.pipeline, optimizer, self._names_by_id(), self._names)
        optimizer_state.load_by_name(optimizer, self.flat_groups, groups, state, self._names_by_id(), part)

    def _merged(self, states: Iterable[dict[str, T]], *, rank0_only: bool) -> dict[str, T]:
        """Collects what stages have, whole and in the model's order; by request on world rank 0 alone."""
        mine: dict[str, T] = {}
        for name, value in (pair for state in states for pair in state.items()):
            mine.setdefault(name, self._parts.whole(name, value))
        if rank0_only and (self.gradient_comm.rank or self.groups.tensor.rank):
            return {}
        found = optimizer_state.merge_over(self.groups.pipeline, mine, rank0_only=rank0_only)
        return {name: found[name] for name in self._names if name in found}


def combine(
    model: nn.Module, groups: Groups, asked: Layout, share: Callable[[nn.Module], ModuleEngine]
) -> CombinedParallel:
    """Spreads a model over the ranks of ``groups.world``; ``share`` makes the engine of a stage."""
    comm = groups.world
    schedule = _schedule(asked, 1)
    check_same_model(model, comm)
    with torch.no_grad():
        # Every rank takes the values of rank 0, one tensor at a time; experts get theirs with the engine of a stage.
        dense = [parameter for parameter in model.parameters() if expert_dim(parameter) is None]
        for tensor in (*dense, *model.buffers()):
            if comm.size > 1 and not tensor.is_meta and tensor.numel():
                value = tensor.detach().to(comm.device).contiguous()
                comm.broadcast(value, 0).wait()
                if value.data_ptr() != tensor.data_ptr():
                    tensor.copy_(value)
    names = tuple(model.state_dict())
    numbers = {p: p.numel() * (1 if expert_dim(p) is None else asked.expert) for p in model.parameters()}
    sizes = sum(numbers.values()), sum(number for p, number in numbers.items() if p.requires_grad)
    layers = model_layers(model) if schedule.stages > 1 else ()
    bounds = _bounds(model, layers, asked, schedule.stages, groups) if layers else (0, 1)
    splits: Mapping[str, Split] = {}
    if asked.tensor > 1:
        sequence, gathers = asked.sequence_parallel, asked.gathers_logits
        splits = apply_tensor_parallel(model, groups.tensor, sequence=sequence, gathers_logits=gathers).splits
        layers = model_layers(model) if layers else ()
    mine = [stage for stage, rank in enumerate(schedule.placement) if rank == groups.pipeline.rank]
    tied = tied_names(model, bounds, layers=layers) if layers else {}
    mark_alone(dict(model.named_parameters())[name] for name in tied)
    parts = split_model(model, bounds, mine, layers=layers) if layers else {0: model}
    allocate_unfilled(parts.values(), comm.device)
    engines = {stage: share(part) for stage, part in parts.items()}
    pipeline = Pipeline(engines, groups.pipeline, partial(_schedule, asked))
    return CombinedParallel(groups, pipeline, names, tied, splits, sizes)


def _schedule(asked: Layout, microbatches: int) -> Schedule:
    """Returns the schedule for a number of microbatches; one of the user's own is for the number that it has."""
    if isinstance(asked.schedule, str):
        return make_schedule(asked.schedule, asked.pipeline, microbatches, asked.chunks)
    own = asked.schedule
    if microbatches not in (1, own.microbatches):
        raise UsageError(
            f"{microbatches} microbatches with a schedule of {own.microbatches}\n"
            f"  a schedule says what to do with each of them\n  set train.accumulate = {own.microbatches}"
        )
    check_schedule(own)
    return own


def _bounds(
    model: nn.Module, layers: tuple[PipelineLayer, ...], asked: Layout, stages: int, groups: Groups
) -> tuple[int, ...]:
    """Returns where the model is cut: as asked, or by cost so that every stage fits into a rank's memory."""
    if asked.stage_layers is not None:
        return bounds_from_layers(layers, asked.stage_layers, model_blocks(model), stages=stages)
    if isinstance(asked.stages, tuple):
        return bounds_from_names(layers, asked.stages, stages=stages)
    # Times and free memory differ between ranks: rank 0 decides.
    comm, costs, free_bytes = groups.world, tuple[LayerCost, ...](), 0
    if comm.rank == 0:
        is_measured = asked.stages == "measured"
        costs = _measure(model, layers, comm) if is_measured else estimate_layers(model, layers)
        free_bytes = measure_machine(comm.device.type, comm.size, comm.size).device_bytes
    costs, free_bytes = broadcast_object(comm, (costs, free_bytes))
    share_of_states = asked.sharing.share_of_states(groups.gradients.size) / asked.tensor
    held = [replace(cost, state_bytes=int(cost.state_bytes * share_of_states)) for cost in costs]
    return choose_bounds(held, stages, memory_bytes=free_bytes * asked.pipeline / stages)


def _measure(model: nn.Module, layers: tuple[PipelineLayer, ...], comm: Communicator) -> tuple[LayerCost, ...]:
    """Times the layers on this rank's device, where the whole model must fit for that long."""
    say = getattr(model, "example_inputs", None)
    if say is None:
        raise UsageError(
            f"stages = 'measured', and {type(model).__name__} has no method example_inputs()\n"
            "  its layers are timed on what that returns: the arguments of forward, as a tuple\n"
            "  add it, or take stages = 'auto', which estimates"
        )
    before, dtype = next(model.parameters()).device, next(model.parameters()).dtype
    inputs = [  # whatever their values: zeros are tokens, too
        torch.zeros(value.shape, dtype=dtype if value.is_floating_point() else value.dtype, device=comm.device)
        for value in say()
    ]
    try:
        return measure_layers(model.to(comm.device), inputs, layers)
    finally:
        model.to(before)
