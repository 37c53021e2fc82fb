"""torch's catalogue of optimizers, as cases: three steps in float64, alone and on ranks.

Each rank has batches of its own, and the oracle steps with the mean of the gradients.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from paceline.comm.base import Communicator
from paceline.engines.apply import parallelize

common_optimizers = pytest.importorskip(
    "torch.testing._internal.common_optimizers", reason="torch's catalogue needs expecttest"
)
STEPS = 3


def configurations(device: str) -> dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]]:
    """The catalogue's settings for a device; on a GPU with each implementation that torch has for it there."""
    found = {}
    for info in common_optimizers.optim_db:
        for number, given in enumerate(info.optim_inputs_func(device=device)):
            name = f"{info.optim_cls.__name__}-{given.desc or number}"
            found[name] = (info.optim_cls, given.kwargs)
            for way in ("foreach", "fused") if device != "cpu" else ():
                is_fused_there = way != "fused" or device in info.supports_fused_on
                if way in info.supported_impls and is_fused_there and way not in given.kwargs:
                    found[f"{name}-{way}"] = (info.optim_cls, {**given.kwargs, way: True})
    return found


class Net(nn.Module):
    """Matrices alone between its layers, so that optimizers of matrices have what they ask for."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.table = nn.Embedding(6, 4, sparse=sparse)
        self.hidden = nn.Linear(4, 5, bias=False)
        self.last = nn.Linear(5, 3, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        rows = self.table(tokens)
        return rows if self.table.sparse else self.last(torch.tanh(self.hidden(rows)))


def net(kind: type[torch.optim.Optimizer], device: str) -> nn.Module:
    is_sparse = kind is torch.optim.SparseAdam
    model = Net(is_sparse).to(device, torch.float64)
    if is_sparse:
        for layer in (model.hidden, model.last):
            layer.weight.requires_grad_(False)
    return model


def batch(step: int, rank: int, device: str) -> torch.Tensor:
    return torch.randint(6, (4,), generator=torch.Generator().manual_seed(10 * step + rank)).to(device)


def wanted(model: nn.Module) -> list[nn.Parameter]:
    return [each for each in model.parameters() if each.requires_grad]


def alone(
    kind: type[torch.optim.Optimizer], settings: dict[str, Any], ranks: int, device: str = "cpu"
) -> dict[str, torch.Tensor]:
    model = net(kind, device)
    optimizer = kind(wanted(model), **settings)
    for step in range(STEPS):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            losses = [model(batch(step, rank, device)).square().mean() / ranks for rank in range(ranks)]
            for loss in losses:
                loss.backward()
            return torch.stack(losses).sum().detach()

        optimizer.step(closure)
    return {key: value.detach() for key, value in model.state_dict().items()}


def on_a_rank(
    comm: Communicator, kind: type[torch.optim.Optimizer], settings: dict[str, Any], strategy: str, is_built_first: bool
) -> dict[str, torch.Tensor]:
    device = str(comm.device)
    model = net(kind, device)
    if is_built_first:
        optimizer = kind(wanted(model), **settings)
        engine = parallelize(model, comm, strategy, optimizer=optimizer)
    else:
        engine = parallelize(model, comm, strategy)
        optimizer = kind(wanted(engine), **settings)
    for step in range(STEPS):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = engine(batch(step, comm.rank, device)).square().mean()
            loss.backward()
            mean = loss.detach() / comm.size  # a line search goes by it: every rank the same way
            comm.all_reduce(mean).wait()
            return mean

        optimizer.step(closure)
    return dict(engine.state_dict())
