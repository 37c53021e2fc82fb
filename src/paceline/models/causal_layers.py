"""Causal language models of Hugging Face as rows of layers, which a pipeline may cut: embedding, blocks, norm and head.

    llama, mistral, qwen2, qwen3, gemma, gpt_neox    rotary positions, which every block computes for itself
    gpt2                                             learned positions, added to the embedding

A block is called without a mask: the library's fused attention is causal then. So sequences are whole, without padding,
and at most as long as a sliding window.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import UsageError
from paceline.models.pipeline_layer import PipelineLayer

# Embedding, blocks, last norm, and what else belongs to the embedding and to every block, as attributes of the base.
_LLAMA = ("embed_tokens", "layers", "norm", (), "rotary_emb")
_FAMILIES: dict[str, tuple[str, str, str, tuple[str, ...], str]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma"), _LLAMA),
    "gpt_neox": ("embed_in", "layers", "final_layer_norm", ("emb_dropout",), "rotary_emb"),
    "gpt2": ("wte", "h", "ln_f", ("wpe", "drop"), ""),
}


@dataclass(frozen=True, slots=True)
class _Entry:
    embedding: nn.Module
    positions: nn.Module | None
    dropout: nn.Module | None

    def __call__(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embedding(tokens)
        if self.positions is not None:
            x = x + self.positions(_positions(x))
        return x if self.dropout is None else self.dropout(x)


@dataclass(frozen=True, slots=True)
class _Block:
    block: nn.Module
    rotary: nn.Module | None
    window: int | None

    def __call__(self, x: Tensor) -> Tensor:
        if self.window is not None and x.shape[1] > self.window:
            raise UsageError(
                f"{x.shape[1]} tokens for a sliding window of {self.window}, in a pipeline\n"
                "  its blocks attend to all tokens before\n  set data.context to at most the window"
            )
        places = _positions(x)
        turned = {} if self.rotary is None else {"position_embeddings": self.rotary(x, places)}
        found = self.block(x, attention_mask=None, position_ids=places, **turned)
        stream: Tensor = found[0] if isinstance(found, tuple) else found  # older releases return more
        return stream


@dataclass(frozen=True, slots=True)
class _Exit:
    norm: nn.Module
    head: nn.Module

    def __call__(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(x))
        return logits


def causal_layers(model: Any) -> list[PipelineLayer] | None:
    """Returns the layers of a causal language model of Hugging Face; None for any other model."""
    base, settings = getattr(model, "base_model", None), getattr(model, "config", None)
    family = _FAMILIES.get(str(getattr(settings, "model_type", None)))
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if family is None or not isinstance(base, nn.Module) or base is model or not isinstance(head, nn.Linear):
        return None
    attention = getattr(settings, "_attn_implementation", None)
    if attention == "eager":
        raise UsageError(
            f"{type(model).__name__} with attention of its own (eager) cannot be cut into stages\n"
            "  its blocks need a mask, which stages do not send\n  build it with attn_implementation='sdpa'"
        )
    first, row, last, beside, turns = family
    embedding, blocks, norm = (getattr(base, name) for name in (first, row, last))
    extra = {name: getattr(base, name, None) for name in beside}
    entry = _Entry(embedding, extra.get("wpe"), extra.get("drop", extra.get("emb_dropout")))
    rotary = getattr(base, turns) if turns else None
    window = getattr(settings, "sliding_window", None) if getattr(settings, "use_sliding_window", True) else None
    prefix = model.base_model_prefix
    around = () if rotary is None else (rotary,)
    modules = (embedding, *(each for each in extra.values() if each is not None))
    return [
        PipelineLayer(name=f"{prefix}.{first}", run=entry, modules=modules),
        *(
            PipelineLayer(name=f"{prefix}.{row}.{i}", run=_Block(block, rotary, window), modules=(block, *around))
            for i, block in enumerate(blocks)
        ),
        PipelineLayer(name=f"{prefix}.{last}", run=_Exit(norm, head), modules=(norm, head)),
    ]


def _positions(x: Tensor) -> Tensor:
    return torch.arange(x.shape[1], device=x.device).unsqueeze(0)
