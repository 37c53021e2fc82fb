"""Models of Hugging Face on ranks that share each sequence, through the library's own registration of attention.

``share_attention`` registers ``paceline.attention`` with the library and chooses it for one model. While a part of a
sequence is in use, blocks ask other ranks for its other tokens, and the base model is told the places of those that it
has. Otherwise the model computes what it did: with the library's SDPA, and the masks that belong to it.
"""

from __future__ import annotations

import importlib
from typing import Any

from torch import Tensor, nn

from paceline.errors import ForeignAttentionError, UsageError
from paceline.models.attention import attention, current_part, positions

_NAME = "paceline"
_BEYOND_SDPA = ("softcap", "s_aux", "position_bias")  # arguments of attention that is more than SDPA
_FEWER = "set parallel.context = 1, or take a model with plain attention"


def is_transformers(model: nn.Module) -> bool:
    """Says whether a model is one of transformers, whose attention can be chosen."""
    return hasattr(model, "set_attn_implementation") and hasattr(model, "base_model")


def share_attention(model: Any) -> None:
    """Lets the blocks of a model ask other ranks, in place. Raises ForeignAttentionError where it does not."""
    library = importlib.import_module("transformers")
    library.AttentionInterface.register(_NAME, _attend)
    library.AttentionMaskInterface.register(_NAME, _mask)
    model.set_attn_implementation(_NAME)
    if model.config._attn_implementation != _NAME:
        rule = "it calls no attention that can be registered, so that it would see the tokens of its own rank alone"
        raise ForeignAttentionError(f"{type(model).__name__} computes its attention itself\n  {rule}\n  {_FEWER}")
    model.base_model.register_forward_pre_hook(_with_places, with_kwargs=True)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Computes attention as the library asks for it; returns (batch, length, heads, head_dim), and no weights."""
    part = current_part()
    if part is None:
        plain: Any = importlib.import_module("transformers.integrations.sdpa_attention").sdpa_attention_forward
        found: tuple[Tensor, None] = plain(module, query, key, value, attention_mask, dropout, scaling, **options)
        return found
    other = [name for name in _BEYOND_SDPA if options.get(name) is not None]
    window = options.get("sliding_window")
    length = part.length(query.shape[2])
    if window is not None and window < length:
        other.append(f"a sliding window of {window} tokens, in rows of {length}")
    if other:
        rule = "ranks that share each sequence compute the attention of every token to all before it"
        raise UsageError(f"{type(module).__name__} with {' and '.join(other)}\n  {rule}\n  {_FEWER}")
    is_causal = options.get("is_causal")
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    mixed = attention(query, key, value, is_causal=is_causal, dropout=dropout, scale=scaling)
    return mixed.transpose(1, 2).contiguous(), None


def _mask(*args: Any, **options: Any) -> Tensor | None:
    """Returns the mask that SDPA needs; none for a part of a row, whose attention knows what is causal."""
    if current_part() is not None:
        return None
    plain: Any = importlib.import_module("transformers.masking_utils").sdpa_mask
    mask: Tensor | None = plain(*args, **options)
    return mask


def _with_places(module: nn.Module, args: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    """Tells a base model where in their rows its tokens are. Raises UsageError for a mask, which it would ignore."""
    if current_part() is None:
        return None
    if options.get("attention_mask") is not None:
        raise UsageError(
            f"{type(module).__name__} with an attention_mask, where ranks share each sequence\n"
            "  no rank has the mask of a whole row, and causal attention needs none: padding comes behind a text\n"
            "  leave attention_mask out, and give padded places the target -100"
        )
    tokens = next(each for each in (*args, *options.values()) if isinstance(each, Tensor))
    places = positions(tokens.shape[1], tokens.device)
    known = {"position_ids": places if places.ndim > 1 else places.unsqueeze(0)} if len(args) < 3 else {}
    given = {name: value for name, value in options.items() if value is not None}
    return args, {**known, **given, "use_cache": False}  # of no use, and checkpointing would fill it twice
