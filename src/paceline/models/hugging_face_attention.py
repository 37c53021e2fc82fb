"""Models of Hugging Face on ranks that share each sequence, through the library's own registration of attention.

``share_attention`` registers ``paceline.attention`` with the library and chooses it for one model. While a part of a
sequence is in use, blocks ask other ranks for its other tokens, and the base model is told the places of those that it
has. Otherwise the model computes what it did: with the library's SDPA, and the masks that belong to it.
"""

from __future__ import annotations

import importlib
from typing import Any, NoReturn

from torch import Tensor, nn

from paceline.errors import ForeignAttentionError
from paceline.models.attention import attention, current_part, positions
from paceline.models.hugging_face import text_part

_NAME = "paceline"
_BEYOND_SDPA = ("softcap", "s_aux", "position_bias")  # arguments of attention that is more than SDPA
_KINDS = {"full_attention", "sliding_attention"}  # of layers that can be shared; a window, if rows fit into it
_NOISE = ("jitter_noise", "input_jitter_noise", "moe_jitter_eps")  # of routers of experts
_NO_MORE = (
    "ranks that share each sequence compute the attention of every token to all before it, and nothing else of it"
)
_PLAIN = "set parallel.context = 1, or take a model with plain attention"

_OF_WHOLE_ROWS = {  # what a model is called with, and no rank can give
    "output_router_logits": (
        "the loss of a router goes by how many tokens of whole batches each expert has, and a rank knows its own",
        "set output_router_logits to False in the model's config",
    ),
    "position_ids": (
        "the places of a rank's tokens in their rows are passed on, and each row is one document",
        "leave position_ids out; give documents that do not see one another rows of their own",
    ),
    "attention_mask": (
        "no rank has the mask of a whole row, and causal attention needs none: padding comes behind a text",
        "leave attention_mask out, and give padded places the target -100",
    ),
}


def is_transformers(model: nn.Module) -> bool:
    """Says whether a model is one of transformers, whose attention can be chosen."""
    return hasattr(model, "set_attn_implementation") and hasattr(model, "base_model")


def share_attention(model: Any) -> None:
    """Lets the blocks of a model ask other ranks, in place. Raises ForeignAttentionError where one does not."""
    name, settings = type(model).__name__, text_part(model.config)
    if kinds := sorted(set(getattr(settings, "layer_types", None) or ()) - _KINDS):
        _refuse(f"{name} with layers of {' and '.join(kinds)}")
    if noise := sorted({each for part in model.modules() for each in _NOISE if getattr(part, each, 0)}):
        rule = "ranks that share each sequence draw the same numbers, each for other tokens"
        _refuse(f"{name} with {' and '.join(noise)}", rule, "set parallel.context = 1, or the noise to 0 in its config")
    library = importlib.import_module("transformers")
    library.AttentionInterface.register(_NAME, _attend)
    library.AttentionMaskInterface.register(_NAME, _mask)
    model.set_attn_implementation(_NAME)
    if model.config._attn_implementation != _NAME:
        _refuse(f"{name}, which computes its attention itself")
    model.get_decoder().register_forward_pre_hook(_with_places, with_kwargs=True)


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
    if attention_mask is not None:  # not that of ``_mask``
        other.append("a mask or bias of its own")
    if other:
        _refuse(f"{type(module).__name__} with {' and '.join(other)}")
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


def _refuse(what: str, rule: str = _NO_MORE, fix: str = _PLAIN) -> NoReturn:
    raise ForeignAttentionError(f"{what}, where ranks share each sequence\n  {rule}\n  {fix}")


def _with_places(module: nn.Module, args: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    """Tells a base model where in their rows its tokens are. Raises ForeignAttentionError for what it would ignore."""
    if current_part() is None:
        return None
    for name, (rule, fix) in _OF_WHOLE_ROWS.items():
        if options.get(name) is not None and options[name] is not False:
            _refuse(f"{type(module).__name__} with {name}", rule, fix)
    tokens = next(each for each in (*args, *options.values()) if isinstance(each, Tensor))
    places = positions(tokens.shape[1], tokens.device)
    known = {"position_ids": places if places.ndim > 1 else places.unsqueeze(0)} if len(args) < 3 else {}
    return args, {**options, **known, "use_cache": False}  # of no use, and checkpointing would fill it twice
