"""The package's GPT in the names and shapes of Hugging Face's, out and in; computes the same.

    RMSNorm, SwiGLU, rotary            LlamaForCausalLM      the same tensors under other names
    the same with experts              MixtralForCausalLM    a tensor for each matrix of an expert
    with shared ones, dense layers     Qwen2MoeForCausalLM   the shared one has a gate of 1/2, and counts twice
    the first two, with norms of       Qwen3ForCausalLM, Qwen3MoeForCausalLM    of each head
    queries and keys                   OlmoeForCausalLM      of all heads together
    LayerNorm, GELU, learned, tied     GPT2LMHeadModel       matrices transposed, q, k and v in one, biases of zero

Other combinations have no counterpart there, and keep their own names.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from paceline.bounded_yaml import load_shipped
from paceline.checkpoint.manifest import MALFORMED, Manifest, damaged
from paceline.checkpoint.read import Checkpoint
from paceline.checkpoint.tensors import Stream
from paceline.checkpoint.tools.experts import renumbered, split_stream, with_stacks
from paceline.checkpoint.tools.stream import stream_saved
from paceline.config.sections import GPTModelConfig, gpt_shape
from paceline.errors import CheckpointError, UsageError
from paceline.plan.model_shape import ModelShape
from paceline.untrusted import is_count

_NAMES = load_shipped((Path(__file__).parent / "hugging_face_names.yaml").read_text(encoding="utf-8"))
_LLAMA, _GPT2 = _NAMES["llama"], _NAMES["gpt2"]
_QWEN, _SHARED_GATE, _SHARED_DOWN = "qwen2_moe", ".mlp.shared_expert_gate.weight", ".mlp.shared_expert.down_proj.weight"
_ARCHITECTURES = {"llama": "LlamaForCausalLM", "mixtral": "MixtralForCausalLM", _QWEN: "Qwen2MoeForCausalLM"}
_ARCHITECTURES |= {"qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM", "olmoe": "OlmoeForCausalLM"}
_QK_NORMS = {"qwen3": "head", "qwen3_moe": "head", "olmoe": "whole"}

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
    is_classic = is_classic and shape.qk_norm == "none" and not shape.head_dim
    try:
        if shape.layers > len(streams):
            raise KeyError(f"{shape.layers} layers")
        if kind == ("rms", "swiglu", "rotary"):
            return _to_llama(shape, streams)
        if is_classic and not shape.experts:
            return _to_gpt2(shape, streams)
    except (KeyError, IndexError) as error:
        raise damaged(f"the tensors of a checkpoint are not those of its config: {error}") from error
    raise UsageError(
        f"--hf for a GPT with norm {shape.norm}, mlp {shape.mlp}, positions {shape.positions}, tied {shape.tied}, "
        f"{shape.kv_heads} of {shape.heads} heads for keys and values, {shape.experts} experts, "
        f"qk_norm {shape.qk_norm}, {shape.head_width} features of a head\n"
        "  Llama has rms, swiglu, rotary, and so have mixtures; GPT-2 has layer, gelu, learned, tied, all heads\n"
        "  leave --hf out: tensors keep their own names"
    )


def from_hugging_face(config: Mapping[str, Any], files: Checkpoint) -> tuple[dict[str, Stream], dict[str, Any]]:
    """Returns tensors under the names of the package's GPT, and ``model`` of a config for them (of GPT-2: nothing).

    Raises CheckpointError for a model that computes something else.
    """
    kind = config.get("model_type")
    if kind == "gpt2":
        return _from_gpt2({name: stream_saved(files, name) for name in files.shapes()}), {}
    if kind not in tuple(_ARCHITECTURES):
        rule = f"{', '.join(_ARCHITECTURES)} and gpt2 are known here"
        fix = "train it with model.kind = hf, or name the safetensors file itself: it keeps its own names"
        raise CheckpointError(f"config.json says model_type = {kind!r}\n  {rule}\n  {fix}")
    try:
        model, odd = _model_keys(config), _odd_settings(config)
        gpt_shape(GPTModelConfig.model_validate(model))
        found, problems = ({}, [f"config.json says {'; '.join(odd)}"]) if odd else _from_llama(kind, files, model)
    except (*MALFORMED, ZeroDivisionError) as error:
        raise CheckpointError(f"config.json is not that of a {kind}: {error}\n  copy the folder again") from error
    if problems:
        rule = "the package's GPT has the names and shapes of config.json, and other settings in one way only"
        fix = "train it with model.kind = hf, or copy the folder again"
        raise CheckpointError("\n  ".join([*problems, rule, fix]))
    return found, model


def _model_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    kind, flat = config["model_type"], {**config, **(config.get("rope_parameters") or {})}
    usual = {"head_dim": config["hidden_size"] // config["num_attention_heads"], "rotary_base": ModelShape.rotary_base}
    usual["norm_eps"] = ModelShape.norm_eps
    keys = {ours: flat[theirs] for theirs, ours in _NAMES["keys"].items() if flat.get(theirs) is not None}
    keys = {name: value for name, value in keys.items() if value != usual.get(name)}
    if kind in _QK_NORMS:
        keys["qk_norm"] = _QK_NORMS[kind]
    if kind in (_QWEN, "qwen3_moe", "olmoe"):
        keys["router"] = {"renormalise": bool(config.get("norm_topk_prob"))}
        keys["dense_layers"] = len(config.get("mlp_only_layers") or [])
    if kind == _QWEN:
        keys["shared_experts"] = config["shared_expert_intermediate_size"] // config["moe_intermediate_size"]
    return {"kind": "gpt", **keys}


def _odd_settings(config: Mapping[str, Any]) -> list[str]:
    """Returns what a config says that the package's GPT has in another way only."""
    rope, dense = config.get("rope_parameters") or config.get("rope_scaling") or {}, config.get("mlp_only_layers") or []
    shared, inner = config.get("shared_expert_intermediate_size", 0), config.get("moe_intermediate_size", 1)
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    sees_all = not window or window >= config["max_position_embeddings"]
    rules = {
        "hidden_act": (config.get("hidden_act"), "silu"),
        "rope_type": (rope.get("rope_type", rope.get("type")), "default"),
        "clip_qkv": (config.get("clip_qkv"), "none"),
        "sliding_window": (None if sees_all else window, "none"),
        "decoder_sparse_step": (config.get("decoder_sparse_step"), 1),
        "mlp_only_layers": (dense, list(range(len(dense)))),
        "shared_expert_intermediate_size": (shared, shared // inner * inner),
    }
    return [f"{key} = {found}, not {own}" for key, (found, own) in rules.items() if found not in (None, own)]


def _to_llama(shape: ModelShape, streams: Streams) -> tuple[dict[str, Any], list[Stream]]:
    kind, embedding, context = _family(shape), streams["token_embedding.weight"], shape.context or 2048
    width, inner = embedding.shape[1], shape.expert_width or shape.mlp_width
    config = _common_config(kind, _ARCHITECTURES[kind], shape, streams)
    config |= {"hidden_size": width, "intermediate_size": shape.mlp_width, "num_hidden_layers": shape.layers}
    config |= {"num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads}
    config |= {"head_dim": shape.head_width, "max_position_embeddings": context, "hidden_act": "silu"}
    config |= {"rms_norm_eps": shape.norm_eps, "rope_theta": shape.rotary_base}
    config |= {"attention_bias": False, "mlp_bias": False}
    if shape.experts:
        config |= {"num_local_experts" if kind == "mixtral" else "num_experts": shape.experts}
        config |= {"num_experts_per_tok": shape.active, "norm_topk_prob": shape.router.renormalise}
    if kind in ("mixtral", "olmoe"):
        config["intermediate_size"] = inner
    if kind in (_QWEN, "qwen3_moe"):
        config |= {"moe_intermediate_size": inner, "mlp_only_layers": list(range(shape.dense_layers))}
    if kind == _QWEN:
        config |= {"shared_expert_intermediate_size": shape.shared_experts * inner, "qkv_bias": False}
    names, found = _llama_names(kind, range(shape.layers)), list[Stream]()
    if lacking := [name for name in streams if name not in names]:
        raise UsageError(f"--hf: {lacking[0]} has no counterpart in {_ARCHITECTURES[kind]}\n  leave --hf out")
    for name, stream in streams.items():
        theirs = names[name]
        found += [replace(stream, name=theirs)] if isinstance(theirs, str) else split_stream(stream, theirs)
    if kind == _QWEN:
        found = [_scaled(each, 2.0) if each.name.endswith(_SHARED_DOWN) else each for each in found]
        empty = {_SHARED_GATE: (1, width)}
        if not shape.shared_experts:
            first = {_SHARED_DOWN.replace("down", name): (0, width) for name in ("gate", "up")}
            empty |= {**first, _SHARED_DOWN: (width, 0)}
        for layer, (name, size) in itertools.product(range(shape.dense_layers, shape.layers), empty.items()):
            make = partial(torch.zeros, size, dtype=embedding.dtype)
            found.append(Stream.made(f"model.layers.{layer}{name}", size, embedding.dtype, make))
    return config, found


def _family(shape: ModelShape) -> str:
    """Returns the model_type that computes what a GPT does. Raises UsageError for what none of them has."""
    rule = shape.router
    if shape.experts and (rule.scores, rule.scale, rule.groups) != ("softmax", 1.0, 1):
        what = f"--hf for a GPT with router.scores = {rule.scores}, scale = {rule.scale}, groups = {rule.groups}"
        raise UsageError(f"{what}\n  mixtures of Hugging Face have softmax, 1.0 and 1\n  leave --hf out")
    is_even = not shape.shared_experts and not shape.dense_layers
    if shape.qk_norm == "none":
        return "llama" if not shape.experts else "mixtral" if rule.renormalise and is_even else _QWEN
    if shape.qk_norm == "head" and not shape.shared_experts:
        return "qwen3_moe" if shape.experts else "qwen3"
    if shape.qk_norm == "whole" and shape.experts and is_even and not shape.head_dim:
        return "olmoe"
    raise UsageError(
        f"--hf for a GPT with qk_norm = {shape.qk_norm}, experts = {shape.experts}, shared_experts = "
        f"{shape.shared_experts}, dense_layers = {shape.dense_layers}, head_dim = {shape.head_dim or 'width / heads'}\n"
        "  head: Qwen 3, without shared experts; whole: OLMoE, with experts in all layers, head_dim = width / heads\n"
        "  leave --hf out: tensors keep their own names"
    )


def _llama_names(kind: str, layers: Iterable[int]) -> dict[str, str | tuple[str, ...]]:
    """Returns what a family calls each tensor of a GPT; of experts, a pattern for each matrix."""
    family = _NAMES[kind]
    block = {f"{ours}.weight": f"{theirs}.weight" for ours, theirs in {**_LLAMA["block"], **family["block"]}.items()}
    experts = family.get("experts", {})
    block |= {ours: tuple(f"{each}.weight" for each in theirs) for ours, theirs in experts.items()}
    return {**_LLAMA["ends"], **_layer_names(layers, block)}


def _layer_names(layers: Iterable[int], block: Mapping[str, Any]) -> dict[str, Any]:
    def named(layer: int, theirs: Any) -> Any:
        prefix = f"model.layers.{layer}."
        return prefix + theirs if isinstance(theirs, str) else tuple(prefix + each for each in theirs)

    return {f"layers.{layer}.{ours}": named(layer, theirs) for layer in layers for ours, theirs in block.items()}


def _scaled(stream: Stream, factor: float) -> Stream:
    return Stream.made(stream.name, stream.shape, stream.dtype, lambda: stream.whole() * factor)


def _from_llama(kind: str, files: Checkpoint, model: Mapping[str, Any]) -> tuple[dict[str, Stream], list[str]]:
    """Returns the tensors under our names, and what is odd about theirs."""
    layers, experts = range(min(model["layers"], len(files.shapes()))), model.get("experts", 0)
    names, stacked = _llama_names(kind, layers), _layer_names(layers, _NAMES["stacked"])
    parts: dict[str, list[str]] = {}
    for part in files.shapes():
        parts.setdefault(renumbered(part, "*"), []).append(part)
    patterns = {stacked[ours]: theirs for ours, theirs in names.items() if not isinstance(theirs, str)}
    stacks = {
        name: [parts.get(each, []) for each in rows] for name, rows in patterns.items() if name not in files.shapes()
    }
    stacks = {name: rows for name, rows in stacks.items() if any(rows)}
    files, problems = with_stacks(files, stacks, dict.fromkeys(stacks, min(experts, len(files.shapes()))))
    kept, found = {name: stream_saved(files, name) for name in files.shapes()}, dict[str, Stream]()
    for ours, theirs in names.items():
        name = next((each for each in (theirs, stacked.get(ours)) if each in kept), None)
        if name is None:
            continue
        found[ours] = replace(kept.pop(name), name=ours)
        if ours in stacked and found[ours].shape[0] != experts:
            problems.append(f"{name} is {list(found[ours].shape)}, and config.json says {experts} experts")
        if ours.endswith(".shared.down.weight"):
            found[ours] = _scaled(found[ours], 0.5)
            gate = kept.pop(str(theirs).replace(_SHARED_DOWN, _SHARED_GATE))
            if bool(gate.whole().any()):
                problems.append(f"{gate.name} is not zero: it weighs the shared expert by the token")
    if not problems:  # else parts of experts are left over, too; older files have a constant of the rotation
        lacking = [name for name in kept if not name.endswith("rotary_emb.inv_freq")]
        problems = [f"{name} has no counterpart in the package's GPT" for name in lacking]
    return {name: each for name, each in found.items() if 0 not in each.shape}, problems


def _to_gpt2(shape: ModelShape, streams: Streams) -> tuple[dict[str, Any], list[Stream]]:
    width = streams["token_embedding.weight"].shape[1]
    inner, positions = (streams[f"{name}.weight"].shape[0] for name in ("layers.0.mlp.up", "position_embedding"))
    config = _common_config("gpt2", "GPT2LMHeadModel", shape, streams)
    config |= {"n_embd": width, "n_inner": inner, "n_layer": shape.layers, "n_head": shape.heads}
    config |= {"n_positions": positions, "activation_function": "gelu_new", "layer_norm_epsilon": shape.norm_eps}
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
    return {**found, **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))}
