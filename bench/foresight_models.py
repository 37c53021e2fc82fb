"""Six models that no table of ours has, as a user would write them: factories, a folder of transformers, a loss.

Values are random, and nothing is downloaded. ``bench/foresight.py`` trains them through ``paceline train``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset


class Pairs(Dataset[tuple[Any, Any]]):
    """Few samples, again and again: what takes time is the model, and not its data."""

    def __init__(self, samples: int, kept: list[tuple[Any, Any]]) -> None:
        self.samples, self.kept = samples, kept

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, place: int) -> tuple[Any, Any]:
        return self.kept[place % len(self.kept)]


def texts(samples: int, vocab: int, source: int, target: int) -> Pairs:
    generator = torch.Generator().manual_seed(0)
    both = [torch.randint(0, vocab, (64, length), generator=generator) for length in (source, target)]
    return Pairs(samples, list(zip(*both, strict=True)))


def masks(samples: int, size: int) -> Pairs:
    images = torch.rand(16, 3, size, size, generator=torch.Generator().manual_seed(0))
    return Pairs(samples, [(image, (image.mean(0) > 0.5).long()) for image in images])


def t5(**sizes: Any) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0, use_cache=False))


def t5_loss(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    source, target = batch
    logits = model(input_ids=source, labels=target).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), target.flatten(), reduction="sum"), target.numel()


class UNet(nn.Module):
    """Convolutions down and up again, with what was seen on the way down beside what comes up."""

    def __init__(self, width: int, levels: int, classes: int) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(levels)]
        self.down = nn.ModuleList(_double(before, after) for before, after in zip([3, *widths], widths, strict=False))
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * each, each, 2, stride=2) for each in reversed(widths[:-1]))
        self.join = nn.ModuleList(_double(2 * each, each) for each in reversed(widths[:-1]))
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        seen: list[Tensor] = []
        for number, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if number else x)
            seen.append(x)
        seen.pop()
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat([seen.pop(), up(x)], dim=1))
        out: Tensor = self.head(x)
        return out


def _double(before: int, after: int) -> nn.Sequential:
    parts = [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU(inplace=True)]
    again = [nn.Conv2d(after, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU(inplace=True)]
    return nn.Sequential(*parts, *again)


def unet(width: int = 64, levels: int = 5, classes: int = 2) -> nn.Module:
    return UNet(width, levels, classes)


def mask_loss(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    images, targets = batch
    return F.cross_entropy(model(images).float(), targets, reduction="sum"), targets.numel()


def language_model(kind: str, folder: str, **sizes: Any) -> None:
    """Writes the folder of a causal language model of transformers: its config, and no weights."""
    from transformers.models.auto.configuration_auto import AutoConfig  # threads may ask for it at once

    AutoConfig.for_model(kind, **sizes).save_pretrained(folder)
