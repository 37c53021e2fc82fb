"""Optimizers that look at whole parameters, under strategies that cut them: as in one process, state and all."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from covering import covering
from torch import nn

from paceline import checkpoint
from paceline.comm.base import Communicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.engines.apply import parallelize
from paceline.errors import UsageError
from paceline.models.gpt import GPT, gpt_config

STEPS = 4
State = dict[str, torch.Tensor]


class Lars(torch.optim.Optimizer):
    """Scales a tensor's update by the norms of the tensor and its gradient, and has a momentum."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                momentum.mul_(0.9).add_(p.grad * p.norm() / (p.grad.norm() + 1e-9))
                p.sub_(momentum, alpha=group["lr"])
        return loss


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.05, weight_decay=0.1),
    "Lars": Lars,
}
STRATEGIES: dict[str, dict[str, Any]] = {
    "zero1": {"strategy": "zero1"},
    "zero2": {"strategy": "zero2", "bucket_mb": 1e-4},
    "fsdp": {"strategy": "fsdp"},
    "hybrid": {"strategy": "hybrid", "shard_ranks": 2},
}


class Net(nn.Module):
    """Matrices and vectors that no number of ranks divides, a convolution, a scalar, and a layer that is not used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table = nn.Embedding(11, 7)
        self.up, self.down = nn.Linear(7, 13), nn.Linear(13, 3)
        self.filter = nn.Conv2d(3, 2, 2)
        self.filter.weight.data = self.filter.weight.data.to(memory_format=torch.channels_last)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Linear(5, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.down(torch.tanh(self.up(self.table(tokens))))
        image = hidden.view(-1, 2, 2, 3).permute(0, 3, 1, 2)
        return self.filter(image).square().mean() * self.scale


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randint(11, (8,), generator=torch.Generator().manual_seed(10 * step + rank))


def train_alone(name: str, ranks: int, steps: int = STEPS) -> tuple[State, dict[str, Any]]:
    model = Net().double()
    optimizer = OPTIMIZERS[name](model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(ranks):
            (model(batch(step, rank)) / ranks).backward()
        optimizer.step()
    return {key: value.detach() for key, value in model.state_dict().items()}, optimizer.state_dict()


def train(engine: Any, optimizer: torch.optim.Optimizer, steps: range, ranks: int) -> None:
    """Steps on the batches of so many ranks, each of which has its share."""
    comm = engine.gradient_comm
    for step in steps:
        optimizer.zero_grad()
        own = [rank for rank in range(ranks) if rank % comm.size == comm.rank]
        loss = sum((engine(batch(step, rank)) for rank in own), start=torch.zeros((), dtype=torch.float64))
        (loss * comm.size / ranks).backward()
        optimizer.step()


def assert_close(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-11)


@covering(name=tuple(OPTIMIZERS), way=tuple(STRATEGIES), ranks=(2, 4))
def test_updates_and_states_are_those_of_one_process(name: str, way: str, ranks: int) -> None:
    def work(comm: Communicator) -> tuple[State, dict[str, Any], int]:
        model = Net().double()
        optimizer = OPTIMIZERS[name](model.parameters())
        engine = parallelize(model, comm, **STRATEGIES[way], optimizer=optimizer)
        train(engine, optimizer, range(STEPS), ranks)
        held = sum(each.numel() for values in optimizer.state.values() for each in values.values() if each.ndim)
        return dict(engine.state_dict()), optimizer.state_dict(), held

    weights, state = train_alone(name, ranks)
    found = run_virtual(work, ranks)
    for values, whole, _ in found:
        assert_close(values, weights)
        assert_close(whole["state"], state["state"])
    total = sum(each.numel() for values in state["state"].values() for each in values.values() if each.ndim)
    copies = ranks // 2 if way == "hybrid" else 1
    assert sum(held for _, _, held in found) == total * copies  # each state on its owner alone


@covering(before=("zero1", "fsdp"), now=("ddp", "zero2", "fsdp"), how=("checkpoint", "state_dict"))
def test_a_run_goes_on_under_another_strategy_and_number_of_ranks(
    before: str, now: str, how: str, tmp_path: Path
) -> None:
    def first(comm: Communicator) -> tuple[State, dict[str, Any]]:
        engine = parallelize(Net().double(), comm, before)
        optimizer = OPTIMIZERS["Adafactor"](engine.parameters())
        train(engine, optimizer, range(2), 6)
        checkpoint.save(tmp_path, engine, optimizer, step=2)
        return dict(engine.state_dict()), optimizer.state_dict()

    saved = run_virtual(first, 3)[0]

    def second(comm: Communicator) -> State:
        engine = parallelize(Net().double(), comm, now)
        optimizer = OPTIMIZERS["Adafactor"](engine.parameters())
        if how == "checkpoint":
            checkpoint.load(tmp_path, engine, optimizer)
        else:
            weights, state = copy.deepcopy(saved)  # torch's own loading keeps the tensors, which ranks here would share
            engine.load_state_dict(weights)
            optimizer.load_state_dict(state)
        train(engine, optimizer, range(2, STEPS), 6)
        return dict(engine.state_dict())

    weights, _ = train_alone("Adafactor", 6)
    for values in run_virtual(second, 2):
        assert_close(values, weights)


def test_a_closure_is_called_once_before_anything_is_handed_over() -> None:
    def work(comm: Communicator) -> State:
        engine = parallelize(Net().double(), comm, "zero1")
        optimizer = OPTIMIZERS["Lars"](engine.parameters())
        calls = []

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            calls.append(engine(batch(0, comm.rank)))
            calls[-1].backward()
            return calls[-1]

        assert optimizer.step(closure) is calls[0]
        assert len(calls) == 1
        return dict(engine.state_dict())

    weights, _ = train_alone("Lars", 3, steps=1)
    for values in run_virtual(work, 3):
        assert_close(values, weights)


@pytest.mark.parametrize("strategy", ["zero1", "ddp"])
def test_parts_of_tensor_ranks_are_no_wholes(strategy: str) -> None:
    def work(comm: Communicator) -> None:
        model = GPT(gpt_config(layers=1, heads=2, width=8, context=4, vocab_size=10))
        engine = parallelize(model, comm, strategy, tensor=2)
        with pytest.raises(UsageError, match="Adafactor cannot update sharded parameters: it looks at whole matrices"):
            engine.check_optimizer(torch.optim.Adafactor(engine.parameters()))

    run_virtual(work, 4)
