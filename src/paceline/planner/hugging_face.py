"""A model from the ``config.json`` of a Hugging Face repository, read as plain JSON: its shape, and a config for it.

Llama, Mistral and Qwen shapes, GPT-2 and BERT. What a config of this package cannot say (BERT's attention in both
directions, heads whose size is not width / heads) is planned all the same, but has no YAML.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.cluster.entries import near_names
from paceline.errors import UsageError
from paceline.planner.workload import ModelShape

_LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3")
_KINDS = (*_LLAMA_LIKE, "gpt2", "bert")
# What each family calls them.
_NAMES = {
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "width": "hidden_size",
    "mlp_width": "intermediate_size",
    "vocab": "vocab_size",
    "context": "max_position_embeddings",
}
_GPT2_NAMES = {
    "layers": "n_layer",
    "heads": "n_head",
    "width": "n_embd",
    "vocab": "vocab_size",
    "context": "n_positions",
}
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_intermediate_size")
_TOKENS_OF_A_BATCH = 2**22
_LONGEST = 4096  # of a sample, where nothing is said: many models allow more than they are trained with


@dataclass(frozen=True, slots=True, kw_only=True)
class HuggingFaceModel:
    """What a file says: the shape, the sections of a config for it, what was assumed, and why it has no YAML."""

    name: str
    shape: ModelShape
    sections: dict[str, dict[str, Any]]
    assumed: tuple[str, ...]
    no_config: str = ""

    @property
    def overrides(self) -> list[str]:
        """The sections as ``section.key=value``, which overrides of the user's own may follow."""
        values = [
            f"{section}.{key}={json.dumps(value)}"
            for section, content in self.sections.items()
            for key, value in content.items()
        ]
        return [f"name={self.name}", *values]


def read_hugging_face(path: Path) -> HuggingFaceModel:
    """Reads a model. Raises UsageError for what is no JSON, no transformer known here, or lacks fields."""
    values = _read(path)
    kind = values.get("model_type")
    if kind is None and "hidden_size" in values and "num_hidden_layers" in values:
        raise UsageError(
            f"{path} lacks model_type\n  it says how the other fields are read\n  add one of {_list(_KINDS)}"
        )
    if kind is None:
        raise UsageError(
            f"{path} lacks model_type: it is not the config.json of a Hugging Face model\n"
            "  a transformer's has model_type, hidden_size, num_hidden_layers and others\n"
            "  name the config.json of the model's repository"
        )
    experts = [name for name in _EXPERTS if values.get(name)]
    if experts:
        raise UsageError(
            f"{path}: model_type {kind!r} with {experts[0]} = {values[experts[0]]} is a mixture of experts\n"
            "  plans are for dense transformers: this package trains no others\n  name a dense model"
        )
    if kind not in _KINDS:
        near = near_names(str(kind), _KINDS)
        hint = f"did you mean {', '.join(near)}?" if near else "it is no transformer of a shape known here"
        raise UsageError(
            f"{path}: model_type {kind!r} cannot be planned: {hint}\n  plans are for transformers: {_list(_KINDS)}\n"
            "  describe it as model.kind: gpt in a config, if it is one"
        )
    return _of_kind(path, str(kind), values)


def _read(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}\n  --hf takes a config.json") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is no JSON: {error}\n  --hf takes the config.json of a model") from error
    if not isinstance(values, dict):
        raise UsageError(f"{path} holds a {type(values).__name__}\n  a config.json is an object with fields")
    text = values.get("text_config")
    return {**values, **text} if isinstance(text, dict) else values


def _of_kind(path: Path, kind: str, values: dict[str, Any]) -> HuggingFaceModel:
    sizes = _sizes(path, values, _GPT2_NAMES if kind == "gpt2" else _NAMES)
    heads, width = sizes["heads"], sizes["width"]
    kv_heads = _optional(path, values, "num_key_value_heads") or heads
    head_dim = _optional(path, values, "head_dim") or 0
    mlp_width = sizes.get("mlp_width") or _optional(path, values, "n_inner") or 4 * width
    if not head_dim and width % heads:
        raise UsageError(f"{path}: {heads} heads do not divide a width of {width}\n  every head has as many features")
    is_classic = kind in ("gpt2", "bert")
    tied = bool(values.get("tie_word_embeddings", is_classic))
    shape = ModelShape(
        layers=sizes["layers"],
        hidden=width,
        heads=heads,
        kv_heads=kv_heads,
        ffn=mlp_width,
        vocab=sizes["vocab"],
        gated=not is_classic,
        tied=tied,
        causal=kind != "bert",
        head_dim=head_dim if head_dim != width // heads else 0,
    )
    context = min(sizes["context"], _LONGEST)
    batch = max(1, _TOKENS_OF_A_BATCH // context)
    no_config = "its attention looks in both directions" if kind == "bert" else ""
    if shape.head_dim:
        no_config = f"its heads have {head_dim} features, and width / heads is {width / heads:g}"
    assumed = [f"a step of {batch} sequences of {context} tokens (train.global_batch, data.context), bf16 with masters"]
    sections = {
        "model": _model_section(shape, is_classic),
        "data": {"kind": "synthetic_tokens", "vocab_size": sizes["vocab"], "context": context, "samples": 65536},
        "train": {"steps": 1000, "global_batch": batch, "precision": "bf16_master"},
    }
    return HuggingFaceModel(name=kind, shape=shape, sections=sections, assumed=tuple(assumed), no_config=no_config)


def _model_section(shape: ModelShape, is_classic: bool) -> dict[str, Any]:
    return {
        "kind": "gpt",
        "layers": shape.layers,
        "heads": shape.heads,
        "kv_heads": shape.kv_heads,
        "width": shape.hidden,
        "mlp_width": shape.ffn,
        "vocab_size": shape.vocab,
        "norm": "layer" if is_classic else "rms",
        "mlp": "gelu" if is_classic else "swiglu",
        "positions": "learned" if is_classic else "rotary",
        "tied": shape.tied,
    }


def _sizes(path: Path, values: dict[str, Any], names: dict[str, str]) -> dict[str, int]:
    lacking = [name for name in names.values() if values.get(name) is None]
    if lacking:
        raise UsageError(
            f"{path} lacks {_list(lacking)}\n  the shape of a transformer is read from {_list(list(names.values()))}\n"
            "  take the whole config.json of the model"
        )
    return {ours: _whole(path, name, values[name]) for ours, name in names.items()}


def _optional(path: Path, values: dict[str, Any], name: str) -> int | None:
    value = values.get(name)
    return None if value is None else _whole(path, name, value)


def _whole(path: Path, name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UsageError(f"{path}: {name} = {value!r}\n  it is a whole number above 0\n  correct it")
    return value


def _list(names: tuple[str, ...] | list[str]) -> str:
    return ", ".join(names)
