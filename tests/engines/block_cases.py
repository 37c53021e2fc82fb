"""Models of blocks, small enough to know all that they save, and what watches their memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from paceline.engines.blocks import checkpoint_blocks
from paceline.models.gpt import GPT, gpt_config
from paceline.models.registry import model_blocks
from paceline.models.resnet import ResNet
from paceline.plan.layout import CHECKPOINTS

BATCH, WIDTH, HIDDEN, LAYERS = 6, 8, 32, 4
ACTIVE = [policy for policy in CHECKPOINTS if policy != "none"]


class Block(nn.Module):
    """Two products, a norm, a dropout and a residual: small enough to know all that it saves."""

    def __init__(self, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return x + scale * self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Stack(nn.Module):
    def __init__(self, layers: int = LAYERS, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(dropout=dropout) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, scale=0.5)
        return x


class ConvBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.relu(self.norm(self.conv(x)))


class ConvStack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(ConvBlock(3), ConvBlock(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def make(factory: Callable[[], nn.Module], policy: str = "none") -> nn.Module:
    torch.manual_seed(4)
    model = factory()
    checkpoint_blocks(model_blocks(model), policy)
    return model


def gpt(dropout: float = 0.1) -> nn.Module:
    return GPT(gpt_config(layers=4, heads=2, width=16, context=8, vocab_size=11, dropout=dropout))


def resnet() -> nn.Module:
    return ResNet(18, num_classes=3, in_channels=1, width=4, norm="batch", stem="small")


def inputs_of(factory: Callable[[], nn.Module]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(9)
    if factory is gpt:
        return torch.randint(0, 11, (2, 8), generator=generator)
    if factory is resnet:
        return torch.randn(4, 1, 8, 8, generator=generator)
    if factory is ConvStack:
        return torch.randn(5, 3, 4, 4, generator=generator)
    return torch.randn(BATCH, WIDTH, generator=generator)


def train(model: nn.Module, x: torch.Tensor, *, autocast: bool = False, passes: int = 2) -> dict[str, torch.Tensor]:
    """Returns gradients, buffers and the last loss."""
    torch.manual_seed(17)
    for _ in range(passes):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(x).float().pow(2).mean()
        loss.backward()
    found = {f"{name}.grad": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {**found, **dict(model.named_buffers()), "loss": loss.detach(), "random": torch.rand(1)}


def check_bits(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    different = [name for name in expected if not torch.equal(found[name], expected[name])]
    assert not different


class LiveBytes(TorchDispatchMode):
    """Knows every storage that was made, as long as somebody holds it; counts operators by name."""

    def __init__(self, model: nn.Module | None = None) -> None:
        super().__init__()
        tensors = [] if model is None else [*model.parameters(), *model.buffers()]
        self._there_anyway = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        self._made: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self.calls: Counter[str] = Counter()
        self.largest: Counter[int] = Counter()  # how many storages of a size there were at most at the same time

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.overloadpacket.__name__] += 1
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage().data_ptr() not in self._there_anyway:
                size = self._made[leaf.untyped_storage()] = leaf.untyped_storage().nbytes()
                self.largest[size] = max(self.largest[size], list(self._made.values()).count(size))
        return result

    @property
    def alive(self) -> int:
        return sum(self._made.values())
