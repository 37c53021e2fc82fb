"""Stages: a model cut into parts that run one after another, each under the whole model's names.

    bounds = (0, 3, 6)        two stages: the first runs layers 0, 1, 2, the second 3, 4, 5 (see models/layers.py)

A stage is a module of its own. It holds the model's own submodules, not copies, at the paths they have in the model,
with empty modules in between. So the state dicts of all stages together are that of the model, under its names. A rank
holds P / p of P parameters on p ranks, more where layers differ.

Tied weights. A parameter that several stages use is in each of them that is on another rank, under its first name in
the model; the gradients of its copies add up to that of the one parameter, and whoever runs the stages sums them
(``tied_names``). Of a rank's own stages only the first owns it, and the others read it there.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

import torch
from torch import nn

from paceline.errors import UsageError
from paceline.models.layers import Chain, PipelineLayer, model_layers
from paceline.models.registry import model_apart, model_blocks, model_ends
from paceline.plan.workload import stage_layers

Layers = Sequence[PipelineLayer]
Places = Sequence[tuple[nn.Module, str]]  # where parameters hang: a module and its attribute
Held = tuple[str, nn.Module | nn.Parameter]  # by its name in the model


class Stage(nn.Module):
    """Some consecutive layers of a model; ``forward`` takes the model's inputs, or what the stage before returned."""

    def __init__(
        self, index: int, total: int, layers: Layers, held: Sequence[Held], roles: Mapping[str, Sequence[nn.Module]]
    ) -> None:
        """Takes what it holds, by its names in the model.

        ``roles``: which modules are its blocks, ends and apart (see models/registry.py), and around it, in no layer.
        """
        super().__init__()
        self.index = index
        self.num_stages = total
        self.layers = tuple(layers)
        self._chain = Chain(tuple(layer.run for layer in layers))
        self._roles = roles
        self._borrowed: Places = ()
        for name, each in held:
            path, _, last = name.rpartition(".")
            # Not by setattr: a model may have a child called ``layers`` or ``index``, and so has a stage.
            if isinstance(each, nn.Module):
                self._container(path)._modules[last] = each
            else:
                self._container(path)._parameters[last] = each

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._chain(*args, **kwargs)

    # What models/registry.py asks of a model: its repeated blocks, the layers around them, and what is read apart.

    def blocks(self) -> list[nn.Module]:
        return list(self._roles["blocks"])

    def ends(self) -> list[nn.Module]:
        return list(self._roles["ends"])

    def apart(self) -> list[nn.Module]:
        return list(self._roles["apart"])

    def train(self, mode: bool = True) -> Self:
        """Sets the mode of this stage, and of the modules around it that layers may ask (``self.training``)."""
        for module in self._roles["around"]:
            module.training = mode
        return super().train(mode)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Iterates over the parameters that this stage owns, in the model's order."""
        borrowed = self.borrowed_ids()
        for name, parameter in super().named_parameters(prefix, recurse, remove_duplicate):
            if id(parameter) not in borrowed:
                yield name, parameter

    def borrowed_ids(self) -> set[int]:
        """Returns the parameters, by id, that it uses and another stage of this rank owns."""
        return {id(module._parameters[name]) for module, name in self._borrowed}

    def get_submodule(self, target: str) -> nn.Module:
        """Returns the module of this name, also where the stage has an attribute of the same."""
        module: nn.Module | None = self
        for part in target.split(".") if target else ():
            module = None if module is None else module._modules.get(part)
        if module is None:
            raise AttributeError(f"stage {self.index} has no module {target!r}")
        return module

    def _container(self, path: str) -> nn.Module:
        """Returns the module at ``path``, and makes empty ones where there is none."""
        module: nn.Module = self
        for part in path.split(".") if path else ():
            inner = module._modules.get(part)
            if inner is None:
                inner = module._modules[part] = nn.Module()
            module = inner
        return module

    def extra_repr(self) -> str:
        return f"stage {self.index} of {self.num_stages}: {', '.join(layer.name for layer in self.layers)}"


def split_model(
    model: nn.Module, bounds: Sequence[int], keep: Collection[int], *, layers: Layers | None = None
) -> dict[int, Stage]:
    """Cuts a model: stage s runs layers ``bounds[s]`` to ``bounds[s + 1]``. Returns the stages in ``keep``, by number.

    The stages share the model's modules. What no kept stage uses is replaced by meta tensors, which frees its memory,
    and the model is of no use any more. Raises UsageError for a model that cannot be cut, or not so.
    """
    layers = model_layers(model) if layers is None else tuple(layers)
    _check_bounds(layers, bounds)
    num_stages = len(bounds) - 1
    wrong = sorted(index for index in keep if not 0 <= index < num_stages)
    if wrong:
        raise UsageError(f"stage {wrong[0]} of {num_stages}\n  stages are counted from 0 to {num_stages - 1}")
    used = {id(module) for module in _modules_of(layers)}
    around = [module for module in model.modules() if id(module) not in used]
    roles = {"blocks": model_blocks(model), "ends": model_ends(model), "apart": model_apart(model)}
    owned: set[int] = set()  # tensors of the stages so far
    stages: dict[int, Stage] = {}
    for index in sorted(set(keep)):
        own = layers[bounds[index] : bounds[index + 1]]
        inside = {id(module) for module in _modules_of(own)}
        mine = {role: [module for module in found if id(module) in inside] for role, found in roles.items()}
        stage = Stage(index, num_stages, own, list(_held(model, own, owned)), {**mine, "around": around})
        stage._borrowed = [place for place in _places(own) if id(place[0]._parameters[place[1]]) in owned]
        owned |= {id(tensor) for tensor in (*stage.parameters(), *stage.buffers())}
        stages[index] = stage
    drop_values(model, {module for stage in stages.values() for module in _modules_of(stage.layers)})
    for stage in stages.values():
        stage.train(model.training)
    return stages


def tied_names(model: nn.Module, bounds: Sequence[int], *, layers: Layers | None = None) -> dict[str, tuple[int, ...]]:
    """Returns the parameters that several stages use, by their first name in the model, with those stages in order."""
    layers = model_layers(model) if layers is None else tuple(layers)
    _check_bounds(layers, bounds)
    users: dict[int, list[int]] = {}
    for index in range(len(bounds) - 1):
        own = layers[bounds[index] : bounds[index + 1]]
        for key in {id(module._parameters[name]) for module, name in _places(own)}:
            users.setdefault(key, []).append(index)
    return {
        name: tuple(users[id(parameter)])
        for name, parameter in model.named_parameters()
        if len(users.get(id(parameter), ())) > 1
    }


def _modules_of(layers: Layers) -> Iterable[nn.Module]:
    return dict.fromkeys(inner for layer in layers for module in layer.modules for inner in module.modules())


def _places(layers: Layers) -> Places:
    return [
        (module, name)
        for module in _modules_of(layers)
        for name, parameter in module._parameters.items()
        if parameter is not None
    ]


def _held(model: nn.Module, layers: Layers, owned: Collection[int]) -> Iterator[Held]:
    """Iterates over what a stage holds, by its names in the model and in the model's order.

    That is the outermost modules that its layers use, except those whose tensors an earlier stage of this rank owns;
    and a tied parameter under its first name, where the module of that name is not among them.
    """
    tops = {id(module) for layer in layers for module in layer.modules}
    used = {id(module._parameters[name]) for module, name in _places(layers)} - set(owned)
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    inside = "."  # no module is below it
    for path, module in model.named_modules(remove_duplicate=False):
        if path.startswith(f"{inside}."):
            continue
        if id(module) not in tops:
            for name, parameter in module._parameters.items():
                full = f"{path}.{name}" if path else name
                if parameter is not None and id(parameter) in used and first[id(parameter)] == full:
                    yield full, parameter
            continue
        inside = path
        tensors = [*module.parameters(), *module.buffers()]
        if not tensors or any(id(tensor) not in owned for tensor in tensors):
            yield path, module


def drop_values(model: nn.Module, kept: Collection[nn.Module] = (), *, renews_meta: bool = False) -> None:
    """Replaces tensors by meta tensors, tied ones by tied ones, except those that a module in ``kept`` has itself."""
    tensors = [t for module in kept for t in (*module._parameters.values(), *module._buffers.values())]
    used = {id(tensor) for tensor in tensors if tensor is not None}
    empty: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in used and (renews_meta or not parameter.is_meta):
                if parameter not in empty:
                    values = torch.empty_like(parameter, device="meta")
                    empty[parameter] = nn.Parameter(values, requires_grad=parameter.requires_grad)
                module._parameters[name] = empty[parameter]
        for name, buffer in module._buffers.items():
            if buffer is not None and id(buffer) not in used:
                module._buffers[name] = torch.empty_like(buffer, device="meta")


def _check_bounds(layers: Layers, bounds: Sequence[int]) -> None:
    rises = all(begin < end for begin, end in itertools.pairwise(bounds))
    if len(bounds) > 1 and bounds[0] == 0 and bounds[-1] == len(layers) and rises:
        return
    raise UsageError(
        f"bounds {tuple(bounds)} of {len(layers)} layers\n"
        "  stage s runs the layers from bounds[s] to bounds[s + 1], at least one, and together they run all\n"
        f"  begin with 0, end with {len(layers)}, and let them rise"
    )


def bounds_from_layers(
    layers: Layers, counts: Sequence[int], blocks: Sequence[nn.Module] = (), *, stages: int | None = None
) -> tuple[int, ...]:
    """Returns the cut with so many blocks in each stage; layers before the first block join it, others the one before.

    Where the layers have none of the model's ``blocks``, every layer counts. The first stage may have 0 blocks and the
    embedding alone, the last one the head. Raises UsageError for counts that do not add up, or not to ``stages``.
    """
    known = {id(block) for block in blocks}
    places = [i for i, layer in enumerate(layers) if any(id(module) in known for module in layer.modules)]
    places, noun = (places, "blocks") if places else (list(range(len(layers))), "layers")
    stages = len(counts) if stages is None else stages
    negative = [count for count in counts if count < 0]
    if negative or len(counts) != stages or sum(counts) != len(places):
        what = f"adds up to {sum(counts)}, and the model has {len(places)} {noun}"
        if negative or len(counts) != stages:
            what = f"has {negative[0]}" if negative else f"is for {len(counts)} stages, and there are {stages}"
        raise UsageError(
            f"stage_layers = {list(counts)} {what}\n"
            f"  it says how many {noun} each stage runs, and together they run all\n"
            f"  try {stage_layers(len(places), stages)}"
        )
    # No block yet: what comes before the first one is a stage. All blocks: what comes behind the last one is.
    begins = [*places, places[-1] + 1]
    bounds = [0, *(begins[done] for done in list(itertools.accumulate(counts))[:-1]), len(layers)]
    empty = [stage for stage, (begin, end) in enumerate(itertools.pairwise(bounds)) if begin >= end]
    if empty:
        raise UsageError(
            f"stage_layers = {list(counts)} leaves nothing for stage {empty[0]}\n"
            "  every stage runs at least one layer; 0 is for a first or last stage with the embedding or head alone\n"
            f"  try {stage_layers(len(places), len(counts))}"
        )
    return tuple(bounds)


def bounds_from_names(layers: Layers, names: Sequence[str], *, stages: int | None = None) -> tuple[int, ...]:
    """Returns the cut before each named layer, in any order. Raises UsageError for wrong names, or too many or few."""
    known = {layer.name: index for index, layer in enumerate(layers)}
    wrong = [name for name in names if not known.get(name) or list(names).count(name) > 1]
    if not wrong and stages in (None, len(names) + 1):
        return (0, *sorted(known[name] for name in names), len(layers))
    what = f"{len(names)} split points for {stages} stages"
    if wrong:
        what = f"{wrong[0]!r} " + ("is named twice" if known.get(wrong[0]) else "is no layer to cut before")
    raise UsageError(
        f"stages = {list(names)}: {what}\n"
        "  a new stage begins at each of the layers named, so that there is one more stage than names\n"
        f"  the layers are {', '.join(list(known)[1:])}"
    )
