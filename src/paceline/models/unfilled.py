"""Parameters whose values come after the model is spread over ranks: a model that no rank ever holds whole.

Inside ``parameters_on_meta()`` a model is built as always, but its parameters have shapes and no memory. Buffers have
values: what a constructor computes for them is written in no file. ``mark_unfilled`` says that somebody will fill the
parameters later, so that engines give them memory, and neither draw values nor exchange them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

_MARK = "_paceline_unfilled"


@contextlib.contextmanager
def parameters_on_meta(**marks: Any) -> Iterator[None]:
    """Lets modules that are built inside keep their parameters on the meta device, with ``marks`` as attributes."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
            vars(param).update(marks)
        register(module, name, param)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def mark_unfilled(parameters: Iterable[nn.Parameter]) -> None:
    """Says that these parameters, of the meta device, get their values when an engine has them."""
    for parameter in parameters:
        setattr(parameter, _MARK, True)


def is_unfilled(parameter: torch.Tensor) -> bool:
    """Says whether somebody fills a parameter later."""
    return getattr(parameter, _MARK, False)


def allocate_unfilled(models: Iterable[nn.Module], device: torch.device) -> None:
    """Gives unfilled parameters memory on a device, and keeps what is tied tied, also between the models."""
    made: dict[int, tuple[Any, nn.Parameter]] = {}  # with the old one: the id of what is gone is used again
    for module in (inner for model in models for inner in model.modules()):
        for name, parameter in module._parameters.items():
            if parameter is None or not (parameter.is_meta and is_unfilled(parameter)):
                continue
            if id(parameter) not in made:
                values = torch.empty_like(parameter, device=device)
                new = nn.Parameter(values, requires_grad=parameter.requires_grad)
                vars(new).update(vars(parameter))  # marks
                made[id(parameter)] = parameter, new
            module._parameters[name] = made[id(parameter)][1]
