"""The package's GPT in the names and shapes of Hugging Face's, out and in; computes the same.

    RMSNorm, SwiGLU, rotary            LlamaForCausalLM      the same tensors under other names
    LayerNorm, GELU, learned, tied     GPT2LMHeadModel       matrices transposed, q, k and v in one, biases of zero

Other combinations have no counterpart there, and keep their own names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from paceline.checkpoint.manifest import Manifest
from paceline.checkpoint.tensors import Stream
from paceline.checkpoint.tools.stream import stream_made
from paceline.config.sections import GPTModelConfig, GPTShape, gpt_shape
from paceline.errors import CheckpointError, UsageError

_EPS = 1e-5
_ROTARY_BASE = 10_000.0
_LLAMA_ENDS = {
    "token_embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
_LLAMA_BLOCK = {
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
_BLOCK = re.compile(r"layers\.(\d+)\.(.+)\.weight")
_GPT2_NORMS = {"attention_norm": "ln_1", "mlp_norm": "ln_2"}
_GPT2_MATRICES = {"attention.output": "attn.c_proj", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}
_QKV = ("attention.query", "attention.key", "attention.value")

Streams = Mapping[str, Stream]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A model for Hugging Face: its config.json, and its tensors."""

    config: dict[str, Any]
    streams: list[Stream]


def shape_of(manifest: Manifest) -> GPTShape:
    """Returns the dimensions of the GPT that a checkpoint holds. Raises UsageError for another model."""
    config = manifest.about.get("config") or {}
    model = config.get("model") or {}
    if model.get("kind") != "gpt":
        kind = model.get("kind")
        raise UsageError(
            f"--hf for {f'model.kind = {kind}' if kind else 'a checkpoint without a config'}\n"
            "  Hugging Face has a counterpart of the package's GPT\n  leave --hf out: tensors keep their own names"
        )
    shape = gpt_shape(GPTModelConfig.model_validate(model))
    assert shape is not None  # the run has had one
    return replace(shape, context=shape.context or (config.get("data") or {}).get("context"))


def to_hugging_face(shape: GPTShape, streams: Streams) -> Exported:
    """Returns a GPT in Hugging Face's names. Raises UsageError for one that has no counterpart."""
    if (shape.norm, shape.mlp, shape.positions) == ("rms", "swiglu", "rotary"):
        return _to_llama(shape, streams)
    is_classic = (shape.norm, shape.mlp, shape.positions) == ("layer", "gelu", "learned")
    if is_classic and shape.tied and shape.kv_heads == shape.heads:
        return _to_gpt2(shape, streams)
    raise UsageError(
        f"--hf for a GPT with norm {shape.norm}, mlp {shape.mlp}, positions {shape.positions}, tied {shape.tied}, "
        f"{shape.kv_heads} of {shape.heads} heads for keys and values\n"
        "  Llama has rms, swiglu, rotary; GPT-2 has layer, gelu, learned, tied, all heads\n"
        "  leave --hf out: tensors keep their own names"
    )


def from_hugging_face(config: Mapping[str, Any], streams: Streams) -> dict[str, Stream]:
    """Returns the tensors of a Llama or GPT-2 under the names of the package's GPT.

    Raises CheckpointError for another model, or one with tensors that this GPT has not.
    """
    kind = config.get("model_type")
    if kind == "llama":
        return _from_llama(streams)
    if kind == "gpt2":
        return _from_gpt2(streams)
    raise CheckpointError(
        f"config.json says model_type = {kind!r}\n  llama and gpt2 have a counterpart here\n"
        "  import the weights under their own names: name the safetensors file itself"
    )


def _to_llama(shape: GPTShape, streams: Streams) -> Exported:
    vocabulary, width = streams["token_embedding.weight"].shape
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": streams["layers.0.mlp.up.weight"].shape[0],
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": width // shape.heads,
        "max_position_embeddings": shape.context or 2048,
        "hidden_act": "silu",
        "rms_norm_eps": _EPS,
        "rope_theta": _ROTARY_BASE,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": shape.tied,
        "torch_dtype": _dtype_name(streams),
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return Exported(config=config, streams=[replace(each, name=_llama_name(name)) for name, each in streams.items()])


def _llama_name(name: str) -> str:
    found = _BLOCK.fullmatch(name)
    if found is not None and found[2] in _LLAMA_BLOCK:
        return f"model.layers.{found[1]}.{_LLAMA_BLOCK[found[2]]}.weight"
    if name in _LLAMA_ENDS:
        return _LLAMA_ENDS[name]
    raise UsageError(f"--hf: {name} has no counterpart in Llama\n  leave --hf out: tensors keep their own names")


def _from_llama(streams: Streams) -> dict[str, Stream]:
    back = {theirs: ours for ours, theirs in _LLAMA_ENDS.items()}
    blocks = {theirs: ours for ours, theirs in _LLAMA_BLOCK.items()}
    found: dict[str, Stream] = {}
    for name, stream in streams.items():
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.weight", name)
        if match is not None and match[2] in blocks:
            ours = f"layers.{match[1]}.{blocks[match[2]]}.weight"
        elif name in back:
            ours = back[name]
        elif name.endswith("rotary_emb.inv_freq"):
            continue  # a constant, which older files have
        else:
            raise CheckpointError(f"{name} has no counterpart in the package's GPT, which has no biases")
        found[ours] = replace(stream, name=ours)
    return found


def _to_gpt2(shape: GPTShape, streams: Streams) -> Exported:
    vocabulary, width = streams["token_embedding.weight"].shape
    hidden = streams["layers.0.mlp.up.weight"].shape[0]
    config = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": vocabulary,
        "n_embd": width,
        "n_inner": hidden,
        "n_layer": shape.layers,
        "n_head": shape.heads,
        "n_positions": streams["position_embedding.weight"].shape[0],
        "activation_function": "gelu_new",
        "layer_norm_epsilon": _EPS,
        "embd_pdrop": shape.dropout,
        "resid_pdrop": shape.dropout,
        "attn_pdrop": shape.dropout,
        "tie_word_embeddings": True,
        "torch_dtype": _dtype_name(streams),
        "bos_token_id": None,
        "eos_token_id": None,
    }
    found = [
        replace(streams["token_embedding.weight"], name="transformer.wte.weight"),
        replace(streams["position_embedding.weight"], name="transformer.wpe.weight"),
        *_gpt2_norm("transformer.ln_f", streams["norm.weight"]),
    ]
    for layer in range(shape.layers):
        found += _gpt2_block(f"transformer.h.{layer}", f"layers.{layer}", streams)
    return Exported(config=config, streams=found)


def _gpt2_block(theirs: str, ours: str, streams: Streams) -> list[Stream]:
    found = []
    for name, other in _GPT2_NORMS.items():
        found += _gpt2_norm(f"{theirs}.{other}", streams[f"{ours}.{name}.weight"])
    parts = [streams[f"{ours}.{name}.weight"] for name in _QKV]
    rows, columns = sum(part.shape[0] for part in parts), parts[0].shape[1]

    def joined() -> torch.Tensor:
        return torch.cat([part.whole() for part in parts]).t()

    found.append(stream_made(f"{theirs}.attn.c_attn.weight", (columns, rows), parts[0].dtype, joined))
    found.append(_zeros(f"{theirs}.attn.c_attn.bias", rows, parts[0].dtype))
    for name, other in _GPT2_MATRICES.items():
        part = streams[f"{ours}.{name}.weight"]
        found.append(stream_made(f"{theirs}.{other}.weight", part.shape[::-1], part.dtype, partial(_transposed, part)))
        found.append(_zeros(f"{theirs}.{other}.bias", part.shape[0], part.dtype))
    return found


def _gpt2_norm(theirs: str, weight: Stream) -> list[Stream]:
    return [replace(weight, name=f"{theirs}.weight"), _zeros(f"{theirs}.bias", weight.shape[0], weight.dtype)]


def _from_gpt2(streams: Streams) -> dict[str, Stream]:
    plain = {name.removeprefix("transformer."): stream for name, stream in streams.items()}
    for name, stream in plain.items():
        if name.endswith(".bias") and not name.endswith("attn.bias") and bool(stream.whole().any()):
            raise CheckpointError(
                f"{name} is not zero\n  the package's GPT has no biases\n  such a model cannot be imported"
            )
    found = {
        "token_embedding.weight": plain["wte.weight"],
        "position_embedding.weight": plain["wpe.weight"],
        "norm.weight": plain["ln_f.weight"],
    }
    layers = 1 + max(int(name.split(".")[1]) for name in plain if name.startswith("h."))
    for layer in range(layers):
        theirs, ours = f"h.{layer}", f"layers.{layer}"
        found |= {f"{ours}.{name}.weight": plain[f"{theirs}.{other}.weight"] for name, other in _GPT2_NORMS.items()}
        fused = plain[f"{theirs}.attn.c_attn.weight"]
        width = fused.shape[0]
        for at, name in enumerate(_QKV):
            take: Callable[[], torch.Tensor] = partial(_cut, fused, at * width, (at + 1) * width)
            found[f"{ours}.{name}.weight"] = stream_made("", (width, width), fused.dtype, take)
        for name, other in _GPT2_MATRICES.items():
            part = plain[f"{theirs}.{other}.weight"]
            found[f"{ours}.{name}.weight"] = stream_made("", part.shape[::-1], part.dtype, partial(_transposed, part))
    return {name: replace(stream, name=name) for name, stream in found.items()}


def _zeros(name: str, size: int, dtype: torch.dtype) -> Stream:
    return stream_made(name, (size,), dtype, partial(torch.zeros, size, dtype=dtype))


def _transposed(stream: Stream) -> torch.Tensor:
    return stream.whole().t()


def _cut(stream: Stream, first: int, last: int) -> torch.Tensor:
    return stream.whole()[:, first:last].t()


def _dtype_name(streams: Streams) -> str:
    return str(streams["token_embedding.weight"].dtype).removeprefix("torch.")
