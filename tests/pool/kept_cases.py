"""Models, machines and configs that several tests of kept figures share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from paceline.cluster.detect import Machine
from paceline.config import Config, config_from_dict
from paceline.units import GIB

GPT: dict[str, Any] = {"kind": "gpt", "size": "gpt-124m"}
TOKENS: dict[str, Any] = {"kind": "synthetic_tokens", "vocab_size": 50304, "context": 512}
SHORT = {**TOKENS, "context": 64}
IMAGES: dict[str, Any] = {"kind": "synthetic_images", "size": 64}
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "vocab_size": 32000,
    "num_key_value_heads": 4,
    "intermediate_size": 5632,
    "max_position_embeddings": 2048,
}
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 1024}
QWEN = {
    **LLAMA,
    "model_type": "qwen2_moe",
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 700,
    "shared_expert_intermediate_size": 1400,
    "decoder_sparse_step": 2,
    "mlp_only_layers": [3],
}
GPT2 = {"model_type": "gpt2", "n_layer": 4, "n_head": 4, "n_embd": 64, "vocab_size": 500, "n_positions": 8192}
BERT = {**LLAMA, "model_type": "bert", "tie_word_embeddings": True, "num_key_value_heads": None}
H100 = "NVIDIA H100 80GB HBM3"
HOST = Machine(processor="any", cores=4, memory_bytes=16e9)
GPUS = replace(HOST, gpus=(H100,) * 4, gpu_memory_bytes=(80 * GIB,) * 4)


def make_config(model: dict[str, Any] | None = None, data: dict[str, Any] | None = None, **sections: Any) -> Config:
    """Returns a config of ten steps of 32 samples, by default of GPT-124M, with sections changed."""
    train = {"global_batch": 32, "steps": 10, **sections.pop("train", {})}
    return config_from_dict({"model": model or GPT, "data": data or TOKENS, "train": train, **sections})


def dry_config(**sections: Any) -> Config:
    """Returns a tiny GPT on four GPUs, whose dry run takes a moment, with sections changed."""
    values: dict[str, Any] = {
        "name": "dry",
        "model": {"kind": "gpt", "layers": 2, "heads": 2, "width": 32, "context": 16, "tied": True, "dropout": 0.0},
        "data": {"kind": "synthetic_tokens", "vocab_size": 64, "context": 16, "samples": 64},
        "parallel": {"ranks": 4, "device": "cuda"},
        "train": {"steps": 2, "global_batch": 16, "accumulate": 2},
        "comm": {"bucket_mb": 0.05, "first_bucket_mb": 0.01},
    }
    for name, section in sections.items():
        values[name] = values.get(name, {}) | section
    return config_from_dict(values)
