"""What the layers of a model cost: measured on this device, or estimated from shapes without computing anything.

Estimated: layers run on meta tensors, which have shapes and no values. For F floating-point operations of matrix
products and convolutions, and B bytes that all operations write, a layer's

    forward = F + 16 B        backward = 2 forward

as a device computes some ten operations in the time in which it writes a byte, and backward computes the gradients of
inputs and of weights. Only the proportions count. A model without ``example_inputs()`` is judged by its parameters.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

from paceline.clock import DeviceClock, seconds_between
from paceline.engines.stages.stages import Layers, drop_values
from paceline.errors import UsageError
from paceline.models.layers import PipelineLayer, model_layers
from paceline.models.measured import measure_activations
from paceline.predict.memory.facts import LayerCost

_OPERATIONS_PER_BYTE = 16.0
_PLAIN = (bool, int, float, str, torch.dtype, NoneType)
_LISTED = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
_STATES = 4  # of each parameter: itself, its gradient, and two moments of Adam


def estimate_layers(
    model: nn.Module, layers: Layers | None = None, inputs: Sequence[Any] | None = None
) -> tuple[LayerCost, ...]:
    """Estimates each layer's cost; the model may be on any device, the meta device too, and stays as it is.

    ``inputs`` are arguments of the model's forward, of which shapes and dtypes count. Raises UsageError for inputs on
    which the layers cannot run without values.
    """
    layers = model_layers(model) if layers is None else tuple(layers)
    given = _example_inputs(model) if inputs is None else tuple(inputs)
    if given is not None:
        try:
            return _estimate_from_shapes(model, layers, given)
        except Exception as error:  # whatever a user's layer raises on tensors without values
            if inputs is not None:
                said = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
                raise UsageError(
                    f"the layers cannot be run without values: {said}\n"
                    "  estimates run them on meta tensors, which have shapes and no values\n"
                    "  measure them instead (measure_layers), or give stage_layers"
                ) from error
    return _estimate_from_parameters(layers)


def measure_layers(
    model: nn.Module, inputs: Sequence[Any], layers: Layers | None = None, *, repeats: int = 5, warmup: int = 1
) -> tuple[LayerCost, ...]:
    """Times each layer on ``inputs``. Gradients, buffers and random states are as before when it returns."""
    layers = model_layers(model) if layers is None else tuple(layers)
    if any(parameter.is_meta for parameter in model.parameters()):
        raise UsageError(
            "the model is on the meta device, and its layers cannot be timed\n  there is nothing to compute\n"
            "  build it on a real device, or estimate its layers (estimate_layers)"
        )
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    clock = DeviceClock(device)
    rounds: list[list[tuple[float, float]]] = []
    with _unchanged(model):
        for number in range(warmup + repeats):
            times, args = [], tuple(inputs)
            for layer in layers:
                output, spent = _time_layer(layer, args, clock, device)
                times.append(spent)
                args = (output,)
            if number >= warmup:
                rounds.append(times)
    found = []
    for layer, pairs in zip(layers, zip(*rounds, strict=True), strict=True):
        forward, backward = (statistics.median(each) for each in zip(*pairs, strict=True))
        found.append(LayerCost(name=layer.name, forward=forward, backward=backward, state_bytes=_state_bytes(layer)))
    return tuple(found)


def _time_layer(
    layer: PipelineLayer, args: tuple[Any, ...], clock: DeviceClock, device: torch.device
) -> tuple[Any, tuple[float, float]]:
    args = tree_map_only(Tensor, _leaf, args)
    begin = clock.mark()
    output = layer.run(*args)
    middle = clock.mark()
    ends = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
    if ends:
        torch.autograd.backward(ends, [torch.ones_like(end) for end in ends])
    end = clock.mark()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    times = seconds_between(begin, middle), seconds_between(middle, end) if ends else 0.0
    return tree_map_only(Tensor, _leaf, output), times


def _leaf(tensor: Tensor) -> Tensor:
    """Cuts a tensor off its graph; a layer's input gets a gradient, as in a stage that is not the first."""
    return tensor.detach().requires_grad_(tensor.is_floating_point())


@contextlib.contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    devices = {parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"}
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        with torch.random.fork_rng(devices=[device.index or 0 for device in devices]), torch.enable_grad():
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)


@torch.enable_grad()
def _estimate_from_shapes(model: nn.Module, layers: Layers, inputs: Sequence[Any]) -> tuple[LayerCost, ...]:
    found: list[LayerCost] = []
    counted: dict[Any, tuple[Any, float, int]] = {}  # by likeness: the blocks of a deep model are one
    args = tree_map_only(Tensor, partial(torch.empty_like, device="meta"), tuple(inputs))
    before = [(module, {**module._parameters}, {**module._buffers}) for module in model.modules()]
    try:
        drop_values(model, renews_meta=True)
        for layer in layers:
            args = tree_map_only(Tensor, _leaf, args)
            likeness = _likeness(layer, args)
            if likeness not in counted:
                counted[likeness] = _count(nn.ModuleList(layer.modules), layer.run, args)
            output, forward, kept = counted[likeness]
            held = _state_bytes(layer)
            cost = LayerCost(name=layer.name, forward=forward, backward=2 * forward, state_bytes=held)
            found.append(replace(cost, activation_bytes=kept))
            args = (output,)
    finally:
        for module, parameters, buffers in before:
            module._parameters.update(parameters)
            module._buffers.update(buffers)
    return tuple(found)


def _likeness(layer: PipelineLayer, args: tuple[Any, ...]) -> Any:
    """Returns what a layer's cost follows from: equal for modules alike in parts, shapes and plain attributes."""
    if layer.modules != (layer.run,):
        return object()
    leaves, structure = tree_flatten(args)
    tensors = tuple((leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else id(leaf) for leaf in leaves)
    return repr(structure), tensors, tuple(map(_module_facts, layer.modules[0].modules()))


def _module_facts(module: nn.Module) -> tuple[Any, ...]:
    tensors = tuple(
        (name, tensor if tensor is None else (tensor.shape, tensor.dtype, tensor.requires_grad))
        for name, tensor in (*module._parameters.items(), *module._buffers.items())
    )
    attributes = tuple(
        (name, value if _is_plain(value) else id(value))
        for name, value in vars(module).items()
        if name not in _LISTED and not (isinstance(value, dict | set) and not value)
    )
    return type(module), tuple(module._modules), frozenset(module._non_persistent_buffers_set), tensors, attributes


def _is_plain(value: Any) -> bool:
    return all(map(_is_plain, value)) if isinstance(value, tuple) else isinstance(value, _PLAIN)


def _count(used: nn.Module, run: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, float, int]:
    outputs: list[Any] = []

    def keep(_: nn.Module, given: Any) -> Tensor:
        outputs.append(run(*given))
        return torch.empty(())

    kept = measure_activations(used, keep, args)
    return outputs[0], kept.work.flops + _OPERATIONS_PER_BYTE * kept.written_bytes, kept.total


def _example_inputs(model: nn.Module) -> tuple[Any, ...] | None:
    """Returns what a model says its inputs look like; a Sequential that begins with a linear layer says so by that."""
    say: object = getattr(model, "example_inputs", None)
    if callable(say) and not isinstance(say, nn.Module):
        return tuple(say())
    first = next(iter(model.children()), None) if isinstance(model, nn.Sequential) else None
    return (torch.empty(1, first.in_features, device="meta"),) if isinstance(first, nn.Linear) else None


def _estimate_from_parameters(layers: Layers) -> tuple[LayerCost, ...]:
    """Charges two operations for each parameter that a layer uses; those of an embedding are looked up at first."""
    looked_up: set[int] = set()
    found: list[LayerCost] = []
    for layer in layers:
        forward, seen = 0.0, set[int]()
        for module in (inner for each in layer.modules for inner in each.modules()):
            is_lookup = isinstance(module, nn.Embedding | nn.EmbeddingBag) and id(module) not in looked_up
            looked_up.add(id(module))
            for parameter in module._parameters.values():
                if parameter is not None and id(parameter) not in seen:
                    seen.add(id(parameter))
                    forward += 2.0 * (parameter.shape[-1] if is_lookup else parameter.numel())
        found.append(LayerCost(name=layer.name, forward=forward, backward=2 * forward, state_bytes=_state_bytes(layer)))
    return tuple(found)


def _state_bytes(layer: PipelineLayer) -> int:
    parameters = {id(p): p for module in layer.modules for p in module.parameters()}
    return _STATES * sum(parameter.numel() * parameter.element_size() for parameter in parameters.values())
