"""The FLOPs of a model: what one sample takes, forward and backward.

GPTs, by the formula of predictions, for N weights that a token is multiplied with, L layers of width W, T tokens:

    T (6 N + 12 L W T)        attention in full, although half of it is masked: as papers count model FLOPs

Residual networks and MLPs of ours: three times the forward pass. Any other model is counted once, on tensors without
values: a copy of it on the meta device runs forward and backward on two samples, in milliseconds and without memory.
Activations that are computed again in backward do not count: they are work of the run, and not of the model.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import FlopCounterMode

from paceline.config import Config
from paceline.config.data_sections import may_ignore
from paceline.data.fetch import fetch_batch
from paceline.data.registry import DataSplits
from paceline.models.gpt import GPT
from paceline.models.known_values import KnownValues, answering
from paceline.predict.formulas.step import transformer_flops
from paceline.predict.memory.activations import describe_model
from paceline.train.loss import Loss, build_loss
from paceline.train.randomness import capture_random_states, restore_random_states

_SAMPLES = 2  # batch norms refuse a single one
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleCost:
    """What one sample of a run counts as, and the model FLOPs that it takes; None: nobody knows."""

    unit: Literal["tokens", "images", "samples"] = "samples"
    units: float = 1.0
    flops: float | None = None


def cost_of_sample(config: Config, data: DataSplits, model: nn.Module) -> SampleCost:
    """Returns what a sample of a run is; the model is as it was built, and stays so."""
    flops, shape = sample_flops(config, data, model), data.shape
    if shape.kind == "tokens" and shape.context is not None:
        return SampleCost(unit="tokens", units=float(shape.context), flops=flops)
    return SampleCost(unit="samples" if shape.channels is None else "images", flops=flops)


def sample_flops(config: Config, data: DataSplits, model: nn.Module) -> float | None:
    """Returns what one sample takes, forward and backward; None for a model that cannot run without values.

    The model is as it was built, before any engine has it, and stays as it is; so do random states.
    """
    if isinstance(model, GPT):
        return transformer_flops(model.config, data.shape.context or model.config.context)
    known = describe_model(config, "cpu")
    if known is not None and known.work is not None:
        return 3 * known.work.flops
    states = capture_random_states(_CPU)
    loss = build_loss(config.train.loss, data.shape, may_ignore=may_ignore(config.data))
    try:
        batch = fetch_batch(data.train, np.arange(_SAMPLES, dtype=np.int64) % len(data.train))
        return count_flops(model, loss, batch) / _SAMPLES
    except Exception:  # whatever code of the user's raises on tensors without values: then nobody knows
        return None
    finally:
        restore_random_states(states, _CPU)


def count_flops(model: nn.Module, loss: Loss, batch: Any) -> float:
    """Counts the FLOPs of forward and backward over a batch, without values. Raises what the model's code raises."""
    shadow, values = on_meta(model), KnownValues()

    def place(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        placed = value.to("meta")
        if not value.is_floating_point():  # token ids, which a model may look for padding in
            values.tell(placed, lambda: value)
        return placed

    with FlopCounterMode(display=False) as counter, answering(values):
        total = loss(shadow, tree_map(place, batch)).total
        if total.requires_grad:
            total.backward()  # type: ignore[no-untyped-call]
    return float(counter.get_total_flops())


def on_meta(model: nn.Module) -> nn.Module:
    """Returns a copy of a model whose parameters and buffers have no values; shared ones stay shared."""
    memo: dict[int, Any] = {
        id(each): nn.Parameter(each.to("meta"), requires_grad=each.requires_grad) for each in model.parameters()
    }
    memo |= {id(each): each.to("meta") for each in model.buffers()}
    return copy.deepcopy(model, memo)
