"""One layer of a model that a pipeline may cut: see ``models/layers.py``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineLayer:
    """One layer: a function of the layer's before, and the modules that it uses.

    ``name`` is that of its first module, as ``named_modules()`` has it: split points are given by it. ``run`` takes one
    argument, what the layer before returned, or for the first layer the model's inputs.
    """

    name: str
    run: Callable[..., Any]
    modules: tuple[nn.Module, ...]
