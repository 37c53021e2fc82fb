"""The package's GPT in the names and shapes of Hugging Face's, out and in; computes the same.

    RMSNorm, SwiGLU, rotary            LlamaForCausalLM      the same tensors under other names
    LayerNorm, GELU, learned, tied     GPT2LMHeadModel       matrices transposed, q, k and v in one, biases of zero

Other combinations have no counterpart there, and keep their own names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
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
_GPT2_NORMS = {"attention_norm": "ln_1", "mlp_norm": "ln_2"}
_GPT2_MATRICES = {"attention.output": "attn.c_proj", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}
_QKV = ("attention.query", "attention.key", "attention.value")

Streams = Mapping[str, Stream]


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


def to_hugging_face(shape: GPTShape, streams: Streams) -> tuple[dict[str, Any], list[Stream]]:
    """Returns a GPT's config.json and tensors, as Hugging Face has them. Raises UsageError without a counterpart."""
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
    """Returns a Llama's or GPT-2's tensors under the names of the package's GPT. Raises CheckpointError for others."""
    kind = config.get("model_type")
    if kind == "llama":
        return _from_llama(streams)
    if kind == "gpt2":
        return _from_gpt2(streams)
    raise CheckpointError(
        f"config.json says model_type = {kind!r}\n  llama and gpt2 have a counterpart here\n"
        "  import the weights under their own names: name the safetensors file itself"
    )


def _to_llama(shape: GPTShape, streams: Streams) -> tuple[dict[str, Any], list[Stream]]:
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
    names = _llama_names(shape.layers)
    if lacking := [name for name in streams if name not in names]:
        raise UsageError(
            f"--hf: {lacking[0]} has no counterpart in Llama\n  leave --hf out: tensors keep their own names"
        )
    return config, [replace(each, name=names[name]) for name, each in streams.items()]


def _llama_names(layers: int) -> dict[str, str]:
    """Returns Llama's name of each tensor of the package's GPT."""
    blocks = {
        f"layers.{layer}.{ours}.weight": f"model.layers.{layer}.{theirs}.weight"
        for layer in range(layers)
        for ours, theirs in _LLAMA_BLOCK.items()
    }
    return _LLAMA_ENDS | blocks


def _from_llama(streams: Streams) -> dict[str, Stream]:
    names = {theirs: ours for ours, theirs in _llama_names(len(streams)).items()}  # at most so many layers
    kept = [name for name in streams if not name.endswith("rotary_emb.inv_freq")]  # a constant, which older files have
    if lacking := [name for name in kept if name not in names]:
        raise CheckpointError(f"{lacking[0]} has no counterpart in the package's GPT, which has no biases")
    return {names[name]: replace(streams[name], name=names[name]) for name in kept}


def _to_gpt2(shape: GPTShape, streams: Streams) -> tuple[dict[str, Any], list[Stream]]:
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
    return config, found


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
