"""From a plain model to stages and tensor-parallel layers on a mesh of ranks, each stage with an engine of its own.

The order of application: layers are split, the model is cut into stages, and each stage of this rank goes to a
data-parallel engine. ``Layout.mesh`` says where ranks stand.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from paceline.comm.base import Communicator
from paceline.comm.objects import broadcast_object
from paceline.engines.agree import check_same_model
from paceline.engines.combined import CombinedParallel
from paceline.engines.flat.flat import mark_alone
from paceline.engines.groups import Groups, expert_dim, make_groups
from paceline.engines.module_engine import ModuleEngine
from paceline.engines.pipeline import Pipeline
from paceline.engines.stages.costs import estimate_layers, measure_layers
from paceline.engines.stages.stages import bounds_from_layers, bounds_from_names, split_model, tied_names
from paceline.engines.tensor.apply import apply_tensor_parallel
from paceline.engines.tensor.layout import TensorLayout
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


def combine(
    model: nn.Module, comm: Communicator, asked: Layout, share: Callable[[nn.Module, Groups], ModuleEngine]
) -> CombinedParallel:
    """Spreads a model over the ranks of ``comm``; ``share`` makes the engine of a stage."""
    groups = make_groups(comm, asked)
    schedule = _schedule(asked, 1)
    check_same_model(model, comm)
    _take_first_values(model, comm)
    names = tuple(model.state_dict())
    numbers = {p: p.numel() * (1 if expert_dim(p) is None else asked.expert) for p in model.parameters()}
    sizes = sum(numbers.values()), sum(number for p, number in numbers.items() if p.requires_grad)
    layers = model_layers(model) if schedule.stages > 1 else ()
    bounds = _bounds(model, layers, asked, schedule.stages, groups) if layers else (0, 1)
    layout: TensorLayout | None = None
    if asked.tensor > 1:
        sequence, gathers = asked.sequence_parallel, asked.gathers_logits
        layout = apply_tensor_parallel(model, groups.tensor, sequence=sequence, gathers_logits=gathers)
        layers = model_layers(model) if layers else ()
    mine = [stage for stage, rank in enumerate(schedule.placement) if rank == groups.pipeline.rank]
    tied = tied_names(model, bounds, layers=layers) if layers else {}
    mark_alone(dict(model.named_parameters())[name] for name in tied)
    parts = split_model(model, bounds, mine, layers=layers) if layers else {0: model}
    allocate_unfilled(parts.values(), comm.device)
    engines = {stage: share(part, groups) for stage, part in parts.items()}
    pipeline = Pipeline(engines, groups.pipeline, schedule, lambda microbatches: _schedule(asked, microbatches))
    return CombinedParallel(groups, pipeline, names, tied, layout, sizes)


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


@torch.no_grad()
def _take_first_values(model: nn.Module, comm: Communicator) -> None:
    """Gives every rank the values of rank 0, one tensor at a time; experts get theirs with the engine of a stage."""
    dense = [parameter for parameter in model.parameters() if expert_dim(parameter) is None]
    for tensor in (*dense, *model.buffers()):
        if comm.size > 1 and not tensor.is_meta and tensor.numel():
            value = tensor.detach().to(comm.device).contiguous()
            comm.broadcast(value, 0).wait()
            if value.data_ptr() != tensor.data_ptr():
                tensor.copy_(value)
