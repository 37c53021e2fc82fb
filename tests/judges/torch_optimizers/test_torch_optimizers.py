"""torch's own catalogue of optimizers: every configuration, three steps under zero and fsdp, against one process.

Each rank has batches of its own, and the oracle steps with the mean of the gradients. An optimizer whose update of one
number depends on numbers that lie on other ranks is refused with the reason.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from judging import outcome_of
from torch import nn

from paceline.comm.base import Communicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.engines.apply import parallelize

common_optimizers = pytest.importorskip(
    "torch.testing._internal.common_optimizers", reason="torch's catalogue needs expecttest"
)
pytestmark = [pytest.mark.judge, pytest.mark.filterwarnings("ignore")]

STRATEGIES = ("ddp", "zero1", "zero2", "fsdp")
STEPS = 3


def configurations() -> dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]]:
    found = {}
    for info in common_optimizers.optim_db:
        for number, given in enumerate(info.optim_inputs_func(device="cpu")):
            found[f"{info.optim_cls.__name__}-{given.desc or number}"] = (info.optim_cls, given.kwargs)
    return found


CONFIGURATIONS = configurations()


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


def net(kind: type[torch.optim.Optimizer]) -> nn.Module:
    is_sparse = kind is torch.optim.SparseAdam
    model = Net(is_sparse).double()
    if is_sparse:
        for layer in (model.hidden, model.last):
            layer.weight.requires_grad_(False)
    return model


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randint(6, (4,), generator=torch.Generator().manual_seed(10 * step + rank))


def wanted(model: nn.Module) -> list[nn.Parameter]:
    return [each for each in model.parameters() if each.requires_grad]


def alone(kind: type[torch.optim.Optimizer], settings: dict[str, Any], ranks: int) -> dict[str, torch.Tensor]:
    model = net(kind)
    optimizer = kind(wanted(model), **settings)
    for step in range(STEPS):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            losses = [model(batch(step, rank)).square().mean() / ranks for rank in range(ranks)]
            for loss in losses:
                loss.backward()
            return torch.stack(losses).sum().detach()

        optimizer.step(closure)
    return {key: value.detach() for key, value in model.state_dict().items()}


def on_a_rank(
    comm: Communicator, kind: type[torch.optim.Optimizer], settings: dict[str, Any], strategy: str, is_built_first: bool
) -> dict[str, torch.Tensor]:
    model = net(kind)
    if is_built_first:
        optimizer = kind(wanted(model), **settings)
        engine = parallelize(model, comm, strategy, optimizer=optimizer)
    else:
        engine = parallelize(model, comm, strategy)
        optimizer = kind(wanted(engine), **settings)
    for step in range(STEPS):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = engine(batch(step, comm.rank)).square().mean()
            loss.backward()
            mean = loss.detach() / comm.size  # a line search goes by it: every rank the same way
            comm.all_reduce(mean).wait()
            return mean

        optimizer.step(closure)
    return dict(engine.state_dict())


@pytest.mark.parametrize("is_built_first", [False, True], ids=["of-the-engine", "of-the-model"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_an_optimizer_updates_as_in_one_process(name: str, strategy: str, is_built_first: bool) -> None:
    kind, settings = CONFIGURATIONS[name]
    if kind is torch.optim.Muon and strategy != "ddp" and not is_built_first:
        pytest.skip("torch's Muon refuses flat pieces itself, in its constructor; optim.kind = muon is ours, sharded")
    given = {"kind": kind, "settings": settings, "strategy": strategy, "is_built_first": is_built_first}
    work = functools.partial(on_a_rank, **given)
    found = outcome_of(lambda: run_virtual(work, 2))
    expected = alone(kind, settings, 2)
    for state in found:
        torch.testing.assert_close(state, expected, rtol=1e-10, atol=1e-12)
