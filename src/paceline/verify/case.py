"""What is verified: a model, batches and a loss, the same on every rank and in the single process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from paceline.config import Config
from paceline.config.data_sections import may_ignore
from paceline.data.fetch import fetch_batch
from paceline.data.order import DataOrder, share
from paceline.engines.engine import Engine
from paceline.errors import UsageError
from paceline.models.registry import model_blocks
from paceline.train.assemble import DataAndModel, build_workload
from paceline.train.loss import Loss, Normalise, OutputLoss, build_loss
from paceline.train.optim import build_optimizer


class Case(Protocol):
    """Everything that a run needs, made anew wherever it is asked for. Picklable for real processes."""

    def make_model(self) -> nn.Module:
        """Builds the model: the same values each time."""

    def make_batch(self, step: int) -> Any:
        """Returns the global batch of a step as (inputs, targets) or a tree of tensors with samples along dim 0."""

    def make_loss(self) -> Loss:
        """Returns the loss."""

    def make_optimizer(self, named: Any, engine: Engine | None = None) -> torch.optim.Optimizer:
        """Makes the optimizer over (name, parameter) pairs; ``engine`` is whose they are, unless one process's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionCase:
    """A case from the user's own functions."""

    model: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    loss: Callable[..., Any]
    optimizer: Callable[..., torch.optim.Optimizer] | None = None

    def make_model(self) -> nn.Module:
        """Builds the model from a fixed seed, so that a function without one of its own gives the same each time."""
        torch.manual_seed(0)
        return self.model()

    def make_batch(self, step: int) -> Any:
        return self.batch(step)

    def make_loss(self) -> Loss:
        return OutputLoss(self.loss, "loss_fn", may_count=True)

    def make_optimizer(self, named: Any, engine: Engine | None = None) -> torch.optim.Optimizer:
        del engine
        parameters = [parameter for _, parameter in named]
        make = self.optimizer or (lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1))
        return make(parameters)


class ConfigCase:
    """A case from a config: its model without dropout, its data in its order, its loss and optimizer.

    With ``layers_as_blocks`` a model that has no repeated blocks is checkpointed and sharded by its linear layers.
    """

    def __init__(self, config: Config, *, batch: int, layers_as_blocks: bool = False) -> None:
        plain = {"dropout": 0.0} if "dropout" in type(config.model).model_fields else {}
        self._config = config.with_values("model", compile=False, **plain)
        self._batch = batch
        self._layers_as_blocks = layers_as_blocks
        self._work: DataAndModel | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_work": None}

    def make_model(self) -> nn.Module:
        model = build_workload(self._config).model
        if self._layers_as_blocks and not model_blocks(model):
            layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
            object.__setattr__(model, "blocks", lambda: layers)
        return model

    def make_batch(self, step: int) -> Any:
        train = self._workload().data.train
        seed = self._config.train.seed if self._config.data.seed is None else self._config.data.seed
        order = DataOrder(length=len(train), global_batch=self._batch, seed=seed, shuffle=self._config.data.shuffle)
        at = order.batch_at(order.position_of_step(step))
        batch = fetch_batch(train, at.indices, at.epoch)
        shape = self._workload().data.shape
        if shape.mean is None or shape.std is None:
            return batch
        return Normalise(shape.mean, shape.std)(batch, torch.float64)  # of which every dtype is made

    def make_loss(self) -> Loss:
        config, shape = self._config, replace(self._workload().data.shape, mean=None, std=None)
        return build_loss(config.train.loss, shape, may_ignore=may_ignore(config.data))

    def make_optimizer(self, named: Any, engine: Engine | None = None) -> torch.optim.Optimizer:
        return build_optimizer(self._config.optim, named, engine)

    def _workload(self) -> DataAndModel:
        if self._work is None:
            self._work = build_workload(self._config)
        return self._work


def num_samples(batch: Any) -> int:
    """Returns the length of dim 0 of a batch's tensors."""
    sizes = {leaf.shape[0] for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.ndim}
    if len(sizes) != 1:
        raise UsageError(f"a batch's tensors must have the same number of samples along dim 0; got {sorted(sizes)}")
    return int(sizes.pop())


def cut(batch: Any, part: int, parts: int) -> Any:
    """Returns one of ``parts`` contiguous pieces of a batch, or None if it has no samples."""
    rows = share(torch.arange(num_samples(batch)).numpy(), part, parts)
    if not len(rows):
        return None
    start, stop = int(rows[0]), int(rows[-1]) + 1
    return tree_map(lambda v: v[start:stop] if isinstance(v, torch.Tensor) and v.ndim else v, batch)
