"""Residual networks for images: ResNet-18 and ResNet-50.

A block computes ``relu(shortcut(x) + residual(x))``. The last norm of each residual starts at zero, so that every block
begins as the identity. ResNet-50 follows "v1.5": where a block halves the image, the 3x3 convolution has the stride.

Batch norm computes statistics over the samples that one rank sees, so its result depends on how a batch is cut.
``norm="group"`` computes them within each sample, and the cut does not matter.
"""

from __future__ import annotations

import math
from typing import Literal, cast, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.errors import UsageError
from paceline.models.layers import PipelineLayer

Norm = Literal["batch", "group"]
Stem = Literal["imagenet", "small"]

# Blocks in each of the four stages; a stage doubles the width, and all but the first halve the image.
_STAGES = {18: (2, 2, 2, 2), 50: (3, 4, 6, 3)}


class ResNet(nn.Module):
    """Maps images to logits. ``stem="imagenet"`` reduces an image by four before the first block, ``"small"`` not."""

    def __init__(
        self,
        depth: int = 18,
        num_classes: int = 1000,
        in_channels: int = 3,
        width: int = 64,
        norm: Norm = "batch",
        stem: Stem = "imagenet",
    ) -> None:
        super().__init__()
        _check(depth, num_classes=num_classes, in_channels=in_channels, width=width, norm=norm, stem=stem)
        if stem == "small":
            self.stem = nn.Sequential(Conv(in_channels, width, 3), _make_norm(norm, width), nn.ReLU())
        else:
            conv, pool = Conv(in_channels, width, 7, stride=2), nn.MaxPool2d(3, stride=2, padding=1)
            self.stem = nn.Sequential(conv, _make_norm(norm, width), nn.ReLU(), pool)
        self.layers = nn.ModuleList()
        channels = width
        for stage, num_blocks in enumerate(_STAGES[depth]):
            for index in range(num_blocks):
                stride = 2 if stage > 0 and index == 0 else 1
                block = (BasicBlock if depth == 18 else BottleneckBlock)(channels, width * 2**stage, stride, norm)
                self.layers.append(block)
                channels = block.out_channels
        self.head = nn.Linear(channels, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        for block in self.layers:
            x = block(x)
        return self.classify(x)

    def classify(self, x: Tensor) -> Tensor:
        return cast("Tensor", self.head(x.mean(dim=(2, 3))))

    def pipeline_layers(self) -> list[PipelineLayer]:
        """Returns the stem, the blocks, and the output layer: where a pipeline may cut."""
        return [
            PipelineLayer(name="stem", run=self.stem, modules=(self.stem,)),
            *(PipelineLayer(name=f"layers.{i}", run=block, modules=(block,)) for i, block in enumerate(self.layers)),
            PipelineLayer(name="head", run=self.classify, modules=(self.head,)),
        ]

    def example_inputs(self) -> tuple[Tensor]:
        """Returns arguments of ``forward`` for one image, without values, of the size that the stem is meant for."""
        size = 32 if len(self.stem) == 3 else 224
        return (torch.empty(1, cast("Conv", self.stem[0]).in_channels, size, size, device="meta"),)

    def blocks(self) -> list[nn.Module]:
        return list(self.layers)


class BasicBlock(nn.Module):
    def __init__(self, in_channels: int, width: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.out_channels = width
        self.residual = nn.Sequential(
            Conv(in_channels, width, 3, stride),
            _make_norm(norm, width),
            nn.ReLU(),
            Conv(width, width, 3),
            _make_norm(norm, width, scale=0.0),
        )
        self.shortcut = _make_shortcut(in_channels, self.out_channels, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.shortcut(x) + self.residual(x))


class BottleneckBlock(nn.Module):
    """A 3x3 convolution between two 1x1 that narrow to ``width`` and widen to four times that."""

    def __init__(self, in_channels: int, width: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.out_channels = 4 * width
        self.residual = nn.Sequential(
            Conv(in_channels, width, 1),
            _make_norm(norm, width),
            nn.ReLU(),
            Conv(width, width, 3, stride),
            _make_norm(norm, width),
            nn.ReLU(),
            Conv(width, self.out_channels, 1),
            _make_norm(norm, self.out_channels, scale=0.0),
        )
        self.shortcut = _make_shortcut(in_channels, self.out_channels, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.shortcut(x) + self.residual(x))


class Conv(nn.Conv2d):
    """A convolution without bias (a norm follows), padded to keep the image, in He's initialisation."""

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int, stride: int = 1) -> None:
        super().__init__(in_channels, out_channels, kernel_size, stride, padding=kernel_size // 2, bias=False)

    def reset_parameters(self) -> None:
        nn.init.kaiming_normal_(self.weight, mode="fan_out", nonlinearity="relu")


class BatchNorm(nn.BatchNorm2d):
    def __init__(self, channels: int, scale: float) -> None:
        self.scale = scale  # before the base constructor, which calls reset_parameters
        super().__init__(channels)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.constant_(self.weight, self.scale)


class GroupNorm(nn.GroupNorm):
    """Group norm over up to 32 groups of at least four channels, whose weight starts at ``scale``."""

    def __init__(self, channels: int, scale: float) -> None:
        self.scale = scale  # before the base constructor, which calls reset_parameters
        # Where the image has shrunk to one pixel, a group of one channel would be normed to zero.
        num_groups = max(1, min(math.gcd(32, channels), channels // 4))
        super().__init__(num_groups, channels)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.constant_(self.weight, self.scale)


def _make_norm(norm: Norm, channels: int, scale: float = 1.0) -> nn.Module:
    return BatchNorm(channels, scale) if norm == "batch" else GroupNorm(channels, scale)


def _make_shortcut(in_channels: int, out_channels: int, stride: int, norm: Norm) -> nn.Module:
    if stride == 1 and in_channels == out_channels:
        return nn.Identity()
    return nn.Sequential(Conv(in_channels, out_channels, 1, stride), _make_norm(norm, out_channels))


def _check(depth: int, *, norm: str, stem: str, **counts: int) -> None:
    choices = {"depth": (depth, tuple(_STAGES)), "norm": (norm, get_args(Norm)), "stem": (stem, get_args(Stem))}
    for name, (value, allowed) in choices.items():
        if value not in allowed:
            raise UsageError(f"ResNet got {name} = {value!r}; it takes {' or '.join(map(repr, allowed))}")
    for name, count in counts.items():
        if count < 1:
            raise UsageError(f"ResNet got {name} = {count}; it must be at least 1")
