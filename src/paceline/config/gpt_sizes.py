"""The named sizes of GPT, and what a config's ``None`` becomes: plain numbers, for checks and plans without torch.

Where dimensions are changed on top of a size, ``kv_heads`` and ``mlp_width`` keep the size's proportion to ``heads``
and ``width``. Without a size, the model follows the current family: RMS norm, SwiGLU, rotary positions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.errors import Problem

if TYPE_CHECKING:
    from paceline.config.sections import GPTModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTShape:
    """The dimensions of a GPT, all decided but the vocabulary, which is the data's."""

    layers: int
    heads: int
    kv_heads: int
    width: int
    mlp_width: int
    context: int | None  # None: the data's
    norm: str = "rms"
    mlp: str = "swiglu"
    positions: str = "rotary"
    tied: bool = False
    dropout: float = 0.0


_OLD_FAMILY: dict[str, Any] = {"context": 1024, "norm": "layer", "mlp": "gelu", "positions": "learned", "tied": True}

GPT_SIZES: dict[str, GPTShape] = {
    "gpt-nano": GPTShape(layers=4, heads=4, kv_heads=2, width=64, mlp_width=128, context=64, tied=True),
    "gpt-micro": GPTShape(layers=4, heads=4, kv_heads=4, width=128, mlp_width=384, context=128, tied=True),
    "gpt-mini": GPTShape(layers=6, heads=6, kv_heads=6, width=192, mlp_width=512, context=256, tied=True),
    "gpt-11m": GPTShape(layers=6, heads=6, kv_heads=6, width=384, mlp_width=1024, context=256, tied=True),
    "gpt-124m": GPTShape(layers=12, heads=12, kv_heads=12, width=768, mlp_width=4 * 768, **_OLD_FAMILY),
    "gpt-350m": GPTShape(layers=24, heads=16, kv_heads=16, width=1024, mlp_width=4 * 1024, **_OLD_FAMILY),
    "gpt-1.1b": GPTShape(layers=20, heads=16, kv_heads=8, width=2048, mlp_width=5632, context=2048),
    "gpt-3b": GPTShape(layers=28, heads=24, kv_heads=8, width=3072, mlp_width=8192, context=4096),
    "gpt-7b": GPTShape(layers=32, heads=32, kv_heads=32, width=4096, mlp_width=11008, context=4096),
}


def missing_dimensions(model: GPTModelConfig) -> list[str]:
    """Returns the fields that a GPT without a size lacks."""
    if model.size is not None:
        return []
    return [name for name in ("layers", "heads", "width") if getattr(model, name) is None]


def gpt_shape(model: GPTModelConfig) -> GPTShape | None:
    """Decides every dimension of a GPT, or returns ``None`` where it has neither a size nor the dimensions."""
    given: dict[str, Any] = {name: value for name in GPTShape.__slots__ if (value := getattr(model, name)) is not None}
    if model.size is not None:
        return GPTShape(**_follow_size(GPT_SIZES[model.size], given))
    if model.layers is None or model.heads is None or model.width is None:
        return None
    return GPTShape(**_follow_family(model.heads, model.width, given))


def _follow_size(base: GPTShape, given: dict[str, Any]) -> dict[str, Any]:
    settings = {name: getattr(base, name) for name in GPTShape.__slots__} | given
    if "kv_heads" not in given:
        settings["kv_heads"] = max(1, base.kv_heads * settings["heads"] // base.heads)
    if "mlp_width" not in given:
        settings["mlp_width"] = base.mlp_width * settings["width"] // base.width
    return settings


def _follow_family(heads: int, width: int, given: dict[str, Any]) -> dict[str, Any]:
    # Three matrices of 8/3 the width hold as many parameters as two of 4 times; a multiple of 64 suits matrix units.
    mlp_width = 4 * width if given.get("mlp") == "gelu" else 64 * math.ceil(8 * width / 3 / 64)
    return {"kv_heads": heads, "mlp_width": mlp_width, "context": None} | given


def head_problems(*, width: int, heads: int, kv_heads: int, is_rotary: bool) -> Iterator[Problem]:
    """Yields what does not fit: heads and the width, heads of keys and values, pairs of features."""
    # A whole number of features for each head, and of pairs of them where they are turned in pairs.
    unit = heads * (2 if is_rotary else 1)
    lower = width // unit * unit
    widths = f"model.width = {lower} or {lower + unit}" if lower else f"model.width = {unit}"
    if width % heads:
        yield Problem(
            what=f"model.width = {width} is not a multiple of model.heads = {heads}",
            rule="every head has the same whole number of features",
            fix=f"try {widths}",
        )
    elif width % unit:
        yield Problem(
            what=f"model.width / model.heads = {width} / {heads} = {width // heads} is odd",
            rule="model.positions = rotary turns pairs of a head's features",
            fix=f"try {widths}, or model.positions = learned",
        )
    if heads % kv_heads:
        yield Problem(
            what=f"model.heads = {heads} is not a multiple of model.kv_heads = {kv_heads}",
            rule="each head of keys and values serves the same number of heads",
            fix=f"try model.kv_heads = {math.gcd(heads, kv_heads)}",
        )
