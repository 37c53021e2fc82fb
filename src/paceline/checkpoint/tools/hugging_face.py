"""The package's GPT in the names and shapes of Hugging Face's, out and in; computes the same.

    RMSNorm, SwiGLU, rotary            LlamaForCausalLM      the same tensors under other names
    LayerNorm, GELU, learned, tied     GPT2LMHeadModel       matrices transposed, q, k and v in one, biases of zero

Other combinations have no counterpart there, and keep their own names.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from paceline.bounded_yaml import load_shipped
from paceline.checkpoint.manifest import Manifest, damaged
from paceline.checkpoint.tensors import Stream
from paceline.config.sections import GPTModelConfig, gpt_shape
from paceline.errors import CheckpointError, UsageError
from paceline.plan.model_shape import ModelShape
from paceline.untrusted import is_count

_EPS = 1e-5
_ROTARY_BASE = 10_000.0
_NAMES = load_shipped((Path(__file__).parent / "hugging_face_names.yaml").read_text(encoding="utf-8"))
_LLAMA, _GPT2 = _NAMES["llama"], _NAMES["gpt2"]

Streams = Mapping[str, Stream]


def shape_of(manifest: Manifest) -> ModelShape:
    """Returns the dimensions of the GPT that a checkpoint holds. Raises UsageError for another model."""
    kind = manifest.setting("model", "kind")
    if kind != "gpt":
        what = f"--hf for {f'model.kind = {kind}' if kind else 'a checkpoint without a config'}"
        rule = "Hugging Face has counterparts of its own models, also from factories, and of the package's GPT"
        raise UsageError(f"{what}\n  {rule}\n  leave --hf out: tensors keep their own names")
    try:
        shape = gpt_shape(GPTModelConfig.model_validate(manifest.setting("model")))
    except ValueError as error:
        raise damaged(f"the config that a checkpoint has of its model is none: {str(error).splitlines()[0]}") from error
    if shape is None:
        raise damaged("the config that a checkpoint has of its model has no sizes")
    context = manifest.setting("data", "context")
    return replace(shape, context=shape.context or (context if is_count(context) else 0))


def to_hugging_face(shape: ModelShape, streams: Streams) -> tuple[dict[str, Any], list[Stream]]:
    """Returns a GPT's config.json and tensors, as Hugging Face has them. Raises UsageError without a counterpart."""
    kind = (shape.norm, shape.mlp, shape.positions)
    is_classic = kind == ("layer", "gelu", "learned") and shape.tied and shape.kv_heads == shape.heads
    try:
        if shape.layers > len(streams):
            raise KeyError(f"{shape.layers} layers")
        if kind == ("rms", "swiglu", "rotary"):
            return _to_llama(shape, streams)
        if is_classic:
            return _to_gpt2(shape, streams)
    except (KeyError, IndexError) as error:
        raise damaged(f"the tensors of a checkpoint are not those of its config: {error}") from error
    raise UsageError(
        f"--hf for a GPT with norm {shape.norm}, mlp {shape.mlp}, positions {shape.positions}, tied {shape.tied}, "
        f"{shape.kv_heads} of {shape.heads} heads for keys and values\n"
        "  Llama has rms, swiglu, rotary; GPT-2 has layer, gelu, learned, tied, all heads\n"
        "  leave --hf out: tensors keep their own names"
    )


def from_hugging_face(config: Mapping[str, Any], streams: Streams) -> dict[str, Stream]:
    """Returns a Llama's or GPT-2's tensors under the names of the package's GPT. Raises CheckpointError for others."""
    kind = config.get("model_type")
    if kind not in ("llama", "gpt2"):
        fix = "import the weights under their own names: name the safetensors file itself"
        raise CheckpointError(f"config.json says model_type = {kind!r}\n  llama and gpt2 are known here\n  {fix}")
    return _from_llama(streams) if kind == "llama" else _from_gpt2(streams)


def _to_llama(shape: ModelShape, streams: Streams) -> tuple[dict[str, Any], list[Stream]]:
    width = streams["token_embedding.weight"].shape[1]
    inner, context = streams["layers.0.mlp.up.weight"].shape[0], shape.context or 2048
    config = _common_config("llama", "LlamaForCausalLM", shape, streams)
    config |= {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": shape.layers}
    config |= {"num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads}
    config |= {"head_dim": width // shape.heads, "max_position_embeddings": context, "hidden_act": "silu"}
    config |= {"rms_norm_eps": _EPS, "rope_theta": _ROTARY_BASE, "attention_bias": False, "mlp_bias": False}
    names = _llama_names(shape.layers)
    if lacking := [name for name in streams if name not in names]:
        raise UsageError(f"--hf: {lacking[0]} has no counterpart in Llama\n  leave --hf out")
    return config, [replace(each, name=names[name]) for name, each in streams.items()]


def _llama_names(layers: int) -> dict[str, str]:
    blocks = {
        f"layers.{layer}.{ours}.weight": f"model.layers.{layer}.{theirs}.weight"
        for layer in range(layers)
        for ours, theirs in _LLAMA["block"].items()
    }
    return {**_LLAMA["ends"], **blocks}


def _from_llama(streams: Streams) -> dict[str, Stream]:
    names = {theirs: ours for ours, theirs in _llama_names(len(streams)).items()}  # at most so many layers
    kept = [name for name in streams if not name.endswith("rotary_emb.inv_freq")]  # a constant, which older files have
    if lacking := [name for name in kept if name not in names]:
        raise CheckpointError(f"{lacking[0]} has no counterpart in the package's GPT, which has no biases")
    return {names[name]: replace(streams[name], name=names[name]) for name in kept}


def _to_gpt2(shape: ModelShape, streams: Streams) -> tuple[dict[str, Any], list[Stream]]:
    width = streams["token_embedding.weight"].shape[1]
    inner, positions = (streams[f"{name}.weight"].shape[0] for name in ("layers.0.mlp.up", "position_embedding"))
    config = _common_config("gpt2", "GPT2LMHeadModel", shape, streams)
    config |= {"n_embd": width, "n_inner": inner, "n_layer": shape.layers, "n_head": shape.heads}
    config |= {"n_positions": positions, "activation_function": "gelu_new", "layer_norm_epsilon": _EPS}
    config |= dict.fromkeys(("embd_pdrop", "resid_pdrop", "attn_pdrop"), shape.dropout)
    ends = {f"transformer.{theirs}.weight": f"{ours}.weight" for theirs, ours in _GPT2["embeddings"].items()}
    found = [replace(streams[ours], name=theirs) for theirs, ours in ends.items()]
    for theirs, names in _gpt2_parts(shape.layers).items():
        parts, name = [streams[each] for each in names], f"transformer.{theirs}"
        rows, dtype = sum(part.shape[0] for part in parts), parts[0].dtype
        if len(parts[0].shape) == 1:
            found.append(replace(parts[0], name=f"{name}.weight"))
        else:
            found.append(Stream.made(f"{name}.weight", (parts[0].shape[1], rows), dtype, partial(_transposed, parts)))
        found.append(Stream.made(f"{name}.bias", (rows,), dtype, partial(torch.zeros, rows, dtype=dtype)))
    return config, found


def _gpt2_parts(layers: int) -> dict[str, list[str]]:
    """Returns the tensors of the package's GPT in each of GPT-2's that has a bias."""
    blocks = {
        f"h.{layer}.{theirs}": [f"layers.{layer}.{name}.weight" for name in ours]
        for layer in range(layers)
        for theirs, ours in _GPT2["block"].items()
    }
    return {"ln_f": ["norm.weight"], **blocks}


def _from_gpt2(streams: Streams) -> dict[str, Stream]:
    plain = {name.removeprefix("transformer."): stream for name, stream in streams.items()}
    for name, stream in plain.items():
        if name.endswith(".bias") and not name.endswith("attn.bias") and bool(stream.whole().any()):
            raise CheckpointError(f"{name} is not zero\n  the package's GPT has no biases\n  take another model")
    found = {f"{ours}.weight": _gpt2_weight(plain, theirs, dims=(2,)) for theirs, ours in _GPT2["embeddings"].items()}
    layers = next(number for number in itertools.count() if f"h.{number}.ln_1.weight" not in plain)
    for theirs, names in _gpt2_parts(layers).items():
        whole = _gpt2_weight(plain, theirs, dims=(1, 2) if len(names) == 1 else (2,))
        if len(whole.shape) == 1:
            found[names[0]] = whole
            continue
        columns, rows = whole.shape[0], whole.shape[1] // len(names)
        for at, name in enumerate(names):
            cut = partial(_transposed, [whole], at * rows, (at + 1) * rows)
            found[name] = Stream.made(name, (rows, columns), whole.dtype, cut)
    return {name: replace(stream, name=name) for name, stream in found.items()}


def _gpt2_weight(streams: Streams, name: str, dims: tuple[int, ...]) -> Stream:
    found = streams.get(f"{name}.weight")
    if found is None or len(found.shape) not in dims:
        what = "is missing" if found is None else f"has the shape {list(found.shape)}"
        raise CheckpointError(f"{name}.weight {what}\n  a GPT-2 has it\n  copy or download the folder again")
    return found


def _transposed(parts: Sequence[Stream], first: int = 0, last: int | None = None) -> torch.Tensor:
    """Returns some columns of tensors, one below the other, as rows."""
    whole = parts[0].whole() if len(parts) == 1 else torch.cat([part.whole() for part in parts])
    return whole[:, first:last].t()


def _common_config(kind: str, architecture: str, shape: ModelShape, streams: Streams) -> dict[str, Any]:
    embedding = streams["token_embedding.weight"]
    found = {"architectures": [architecture], "model_type": kind, "vocab_size": embedding.shape[0]}
    found |= {"tie_word_embeddings": shape.tied, "torch_dtype": str(embedding.dtype).removeprefix("torch.")}
    return {**found, "bos_token_id": None, "eos_token_id": None}
