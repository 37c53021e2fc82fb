"""Models that are ordinary PyTorch and hard to shard: each strategy trains them as one process would."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from covering import covering
from torch import nn

import paceline


def make_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(11, 6, generator=generator), torch.randint(3, (11,), generator=generator)


class Net(nn.Module):
    """A row of blocks and a head; what differs is how the blocks are called."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = self.make_layers()
        self.out = nn.Linear(6, 3)

    def make_layers(self) -> nn.ModuleList:
        return nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.out(x)


class Frozen(Net):
    """The first block is frozen, and one bias."""

    def make_layers(self) -> nn.ModuleList:
        layers = super().make_layers()
        layers[0].requires_grad_(False)
        layers[2].bias.requires_grad_(False)
        return layers


class Reused(Net):
    """Every block is called twice."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in [*self.layers, *self.layers]:
            x = torch.tanh(layer(x))
        return self.out(x)


class Tied(Net):
    """Two blocks have one weight, and one block stands in two places."""

    def make_layers(self) -> nn.ModuleList:
        first, second, third, _ = super().make_layers()
        third.weight = first.weight
        return nn.ModuleList([first, second, third, second])


class HandsOn(nn.Module):
    """Takes and returns a dict, in which its own input goes on to the next block."""

    def __init__(self) -> None:
        super().__init__()
        self.main, self.side = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, state: dict[str, Any], *, extra: torch.Tensor | None = None) -> dict[str, Any]:
        hidden = torch.tanh(self.main(state["hidden"]))
        sides = (state["hidden"], self.side(hidden))
        return {"hidden": hidden if extra is None else hidden + extra, "sides": sides}


class Trees(Net):
    """Blocks whose inputs and outputs are trees, with tensors that pass through them."""

    def make_layers(self) -> nn.ModuleList:
        return nn.ModuleList(HandsOn() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state: dict[str, Any] = {"hidden": x}
        total = torch.zeros_like(x)
        for number, layer in enumerate(self.layers):
            state = layer(state, extra=x if number == 1 else None)
            total = total + state["sides"][0] + state["sides"][1]
        return self.out(state["hidden"] + total)


class Branches(Net):
    """Samples choose their blocks, so that ranks call different ones, and others in the next step."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            rows = (x[:, number] > 0.8).nonzero().squeeze(1)
            if len(rows):
                x = x.index_add(0, rows, torch.tanh(layer(x[rows])))
        return self.out(x)


class Blind(Net):
    """One block runs without a graph."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.layers[0](x))
        with torch.no_grad():
            y = torch.tanh(self.layers[1](x))
        return self.out(torch.tanh(self.layers[2](x)) + y)


class Recurrent(nn.Module):
    """Its layer keeps a list of its own weights."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(6, 5, num_layers=2, batch_first=True)
        self.out = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.rnn(x[:, None].repeat(1, 3, 1))[0][:, -1])


class Tiny(Net):
    """Parameters with fewer elements than ranks, one of them with none."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift, self.empty = (nn.Parameter(torch.ones(s)) for s in ((1,), (), (0,)))
        self.norm = nn.LayerNorm(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.norm(x[..., None])[..., 0] * self.scale + self.shift + self.empty.sum() + x)


@covering(
    model=[Frozen, Reused, Tied, Trees, Branches, Blind, Recurrent, Tiny],
    strategy=["ddp", "zero1", "zero2", "fsdp", "hybrid"],
)
def test_odd_models_pass(model: type[nn.Module], strategy: str) -> None:
    # Four ranks are the least in which hybrid both shards and replicates; a third step has other branches again.
    ranks, steps = 4 if strategy == "hybrid" else 3, 3 if model is Branches else 2
    options: dict[str, Any] = {"strategy": strategy, "ranks": ranks, "steps": steps, "accumulate": 2}
    found = paceline.verify(model, make_batch, F.cross_entropy, **options)
    assert found.passed, found.divergence


@pytest.mark.some(2)
@covering(model=[Frozen, Reused, Tied, Trees, Branches, Blind], strategy=["fsdp", "zero2"])
def test_odd_models_pass_when_they_are_checkpointed(model: type[nn.Module], strategy: str) -> None:
    options: dict[str, Any] = {"strategy": strategy, "ranks": 3, "steps": 2, "checkpoint_activations": "full"}
    found = paceline.verify(model, make_batch, F.cross_entropy, **options)
    assert found.passed, found.divergence


@pytest.mark.some(2)
@covering(model=[Frozen, Reused, Tied, Trees, Tiny], strategy=["fsdp", "ddp"])
def test_odd_models_pass_with_masters(model: type[nn.Module], strategy: str) -> None:
    options: dict[str, Any] = {"strategy": strategy, "ranks": 2, "precision": "bf16_master", "steps": 2}
    found = paceline.verify(model, make_batch, F.cross_entropy, **options)
    assert found.passed, found.divergence
