"""A model from the ``config.json`` of a Hugging Face repository, read as plain JSON: its shape, and a config for it.

Llama, Mistral and Qwen shapes, GPT-2 and BERT, and mixtures of experts as Mixtral, Qwen 2 and Qwen 3 have them. What a
config of this package cannot say (experts, BERT's attention in both directions, heads whose size is not width / heads)
is planned all the same, but has no YAML.

A mixture's parameters, for E experts of width f in each of L' layers, a shared one of width s, and L - L' layers with
a dense MLP of width d:  attention and ends  +  L' (3 h (E f + s) + h E)  +  (L - L') 3 h d
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.cluster.entries import near_names
from paceline.errors import UsageError
from paceline.plan.model_shape import ModelShape
from paceline.untrusted import parse_json, read_regular

_LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3")
_MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe")
_KINDS = (*_LLAMA_LIKE, "gpt2", "bert", *_MIXTURES)
# What each family calls them.
_NAMES = {"layers": "num_hidden_layers", "heads": "num_attention_heads", "width": "hidden_size"}
_NAMES |= {"mlp_width": "intermediate_size", "vocab": "vocab_size", "context": "max_position_embeddings"}
_GPT2_NAMES = {"layers": "n_layer", "heads": "n_head", "width": "n_embd", "vocab": "vocab_size"}
_GPT2_NAMES |= {"context": "n_positions"}
_QWEN_NAMES = {"experts": "num_experts", "active": "num_experts_per_tok", "expert": "moe_intermediate_size"}
_MIXTURE_NAMES = {"mixtral": {"experts": "num_local_experts", "active": "num_experts_per_tok"}}
_MIXTURE_NAMES |= {"qwen2_moe": _QWEN_NAMES, "qwen3_moe": _QWEN_NAMES}
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_intermediate_size")
_CLASSIC: dict[str, Any] = {"norm": "layer", "mlp": "gelu", "positions": "learned"}
_IN_A_CONFIG = ["layers", "heads", "kv_heads", "width", "mlp_width", "vocab_size", "norm", "mlp", "positions", "tied"]
_TOKENS_OF_A_BATCH = 2**22
_SAMPLES = 2**16
_LONGEST = 4096  # of a sample, where nothing is said: many models allow more than they are trained with


def read_hugging_face(source: Path | Mapping[str, Any]) -> tuple[ModelShape, dict[str, Any]]:
    """Reads a model: its shape, and the values of a config. Raises UsageError with all that is missing or odd."""
    name = "the config" if isinstance(source, Mapping) else str(source)
    values: Any = source
    if isinstance(source, Path):
        fix = "  name the config.json of a Hugging Face model"
        try:
            values = parse_json(read_regular(source))
        except (OSError, UnicodeDecodeError) as error:
            told = error.strerror if isinstance(error, OSError) else "it is no text"
            raise UsageError(f"{source} cannot be read: {told}\n{fix}") from error
        except ValueError as error:
            raise UsageError(f"{source} is no JSON: {error}\n{fix}") from error
        if not isinstance(values, dict):
            raise UsageError(f"{source} holds a {type(values).__name__}\n  a config.json is an object with fields")
    values = dict(values)
    if isinstance(values.get("text_config"), dict):  # models of text and images keep the transformer in a part
        values |= values["text_config"]
    kind = values.get("model_type")
    if kind is None:
        if "hidden_size" in values and "num_hidden_layers" in values:
            raise UsageError(
                f"{name} lacks model_type\n  it says how the other fields are read\n  add one of {', '.join(_KINDS)}"
            )
        raise UsageError(
            f"{name} lacks model_type: it is not the config.json of a Hugging Face model\n"
            "  a transformer's has model_type, hidden_size, num_hidden_layers and others\n"
            "  name the config.json of the model's repository"
        )
    if kind not in _KINDS:
        near = near_names(str(kind), _KINDS)
        hint = f"did you mean {near[0]}?" if near else "describe it as model.kind: gpt in a config"
        raise UsageError(
            f"{name}: model_type {kind!r} is not known\n"
            f"  plans are for transformers with the shapes of {', '.join(_KINDS)}\n  {hint}"
        )
    return _of_kind(name, kind, values)


def _of_kind(source: str, kind: str, values: dict[str, Any]) -> tuple[ModelShape, dict[str, Any]]:
    fields = _Fields(source, values)
    sizes = fields.sizes((_GPT2_NAMES if kind == "gpt2" else _NAMES) | _MIXTURE_NAMES.get(kind, {}))
    kv_heads = fields.optional("num_key_value_heads") or sizes["heads"]
    head_dim = fields.optional("head_dim")
    heads, width = sizes["heads"], sizes["width"]
    mlp_width = sizes.get("mlp_width") or fields.optional("n_inner") or 4 * width
    if experts := [name for name in _EXPERTS if values.get(name) and kind not in _MIXTURES]:
        fields.problems.append(f"{experts[0]} = {values[experts[0]]}: a {kind} has no mixture of experts")
    if not head_dim and width % heads:
        fields.problems.append(f"{heads} heads do not divide a width of {width}")
    if heads % kv_heads:
        fields.problems.append(f"{kv_heads} heads of keys and values do not divide {heads} heads")
    fields.check()
    is_classic = kind in ("gpt2", "bert")
    window = values.get("sliding_window") if values.get("use_sliding_window", True) else 0
    shape = ModelShape(
        layers=sizes["layers"],
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        mlp_width=mlp_width,
        vocab_size=sizes["vocab"],
        **(_CLASSIC if is_classic else {}),
        tied=bool(values.get("tie_word_embeddings", is_classic)),
        causal=kind != "bert",
        head_dim=head_dim if head_dim != width // heads else 0,
        window=window if isinstance(window, int) else 0,
    )
    if kind in _MIXTURES:
        shape = _mixture(shape, sizes, fields)
        fields.check()
    context = min(sizes["context"], _LONGEST)
    batch = max(1, _TOKENS_OF_A_BATCH // context)
    samples = max(_SAMPLES, 4 * batch)  # of which as many are evaluated as a step has
    data = {"kind": "synthetic_tokens", "vocab_size": shape.vocab_size, "context": context, "samples": samples}
    return shape, {
        "name": kind,
        "model": {"kind": "gpt"} | {name: getattr(shape, name) for name in _IN_A_CONFIG},
        "data": data | {"eval_fraction": round(batch / samples, 4)},
        "train": {"steps": 1000, "global_batch": batch, "precision": "bf16_master"},
    }


def why_no_config(shape: ModelShape) -> str:
    """Returns why a config of this package cannot say a shape; empty where it can."""
    if shape.experts:
        return f"it is a mixture of {shape.experts} experts"
    if shape.head_dim:
        return f"its heads have {shape.head_dim} features, and width / heads is {shape.width / shape.heads:g}"
    return "" if shape.causal else "its attention looks in both directions"


def _mixture(dense: ModelShape, sizes: dict[str, int], fields: _Fields) -> ModelShape:
    """Returns the shape with experts, a shared one counted as so many of the others."""
    width = sizes.get("expert", dense.mlp_width)
    shared = fields.optional("shared_expert_intermediate_size")
    every = fields.optional("decoder_sparse_step") or 1
    if sizes["active"] > sizes["experts"]:
        fields.problems.append(f"num_experts_per_tok = {sizes['active']} of {sizes['experts']} experts")
    without = set(fields.values.get("mlp_only_layers") or ())
    sparse = sum((each + 1) % every == 0 and each not in without for each in range(dense.layers))
    of_mixture = 3 * dense.width * (sizes["experts"] * width + shared) + dense.width * sizes["experts"]
    of_dense = 3 * dense.width * dense.mlp_width
    total = dense.layers * dense.attention_params + dense.end_params
    return replace(
        dense,
        mlp_width=width,
        experts=sizes["experts"],
        active_experts=sizes["active"] + round(shared / width),
        total_params=float(total + sparse * of_mixture + (dense.layers - sparse) * of_dense),
    )


class _Fields:
    """Whole numbers of a file, and what is wrong with them; where one is, 1 stands for it until all are told."""

    def __init__(self, source: str, values: dict[str, Any]) -> None:
        self.source, self.values = source, values
        self.problems: list[str] = []

    def sizes(self, names: dict[str, str]) -> dict[str, int]:
        lacking = [name for name in names.values() if self.values.get(name) is None]
        if lacking:
            self.problems.append(f"lacks {', '.join(lacking)}")
        return {ours: self.optional(name) or 1 for ours, name in names.items()}

    def optional(self, name: str) -> int:
        """Returns one that may be missing, or null: 0 then."""
        value = self.values.get(name)
        if value is None:
            return 0
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            self.problems.append(f"{name} = {value!r} is no whole number above 0")
            return 1
        return value

    def check(self) -> None:
        if self.problems:
            told = "; ".join(dict.fromkeys(self.problems))
            raise UsageError(
                f"{self.source}: {told}\n  the shape of a transformer is read from these fields\n"
                "  take the whole config.json of the model"
            )
