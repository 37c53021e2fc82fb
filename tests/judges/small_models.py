"""Small random models of Hugging Face's architectures, as cases: built, a batch for each, a step alone and on ranks."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import Alone, Numbers, State
from torch.nn.modules.batchnorm import _BatchNorm

from paceline import checkpoint
from paceline.comm.base import Communicator
from paceline.engines.apply import parallelize

VOCABULARY, LENGTH, CLASSES, WIDTH = 40, 8, 4, 16
RANKS = 2
ALL = tuple(range(RANKS))
FLOAT64 = Numbers()
# They cast to it themselves, whatever dtype they have; the routers of two do, whose gradients tensor ranks add up.
FLOAT32_INSIDE = ("gemma", "gemma2", "mamba", "mamba2", "deepseek_v3", "mixtral, split", "olmoe, split")
LOSS_SHARE = 0.005  # by which a loss in bf16 may be off: its logits are, by 2^-8

# Every name that a config of the library may have for a size; each config takes those that it knows.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "embedding_size", "embedding_dim"), WIDTH),
    **dict.fromkeys(("word_embed_proj_dim", "attention_hidden_size"), WIDTH),
    **dict.fromkeys(("intermediate_size", "n_inner", "d_ff", "ffn_dim", "hidden_dim", "d_inner"), 2 * WIDTH),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 2 * WIDTH),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 32),
    **dict.fromkeys(("max_source_positions", "max_target_positions"), 16),
    **dict.fromkeys(("head_dim", "d_kv", "rotary_dim", "qk_nope_head_dim", "v_head_dim"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), WIDTH),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("n_shared_experts", "n_group", "topk_group", "first_k_dense_replace"), 1),
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "vocab_size": VOCABULARY,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "sliding_window": 4,
    "image_size": 8,
    "patch_size": 4,
    "state_size": 4,
    "time_step_rank": 2,
    "num_mel_bins": 8,
    "query_pre_attn_scalar": 4,
    "layerdrop": 0.0,
    "hidden_sizes": [8, WIDTH],
    "depths": [1, 1],
}
WIDTHS = [
    *("hidden_size", "n_embd", "d_model", "dim", "embedding_size", "embedding_dim", "word_embed_proj_dim"),
    *("intermediate_size", "n_inner", "d_ff", "ffn_dim", "hidden_dim", "head_dim", "d_kv", "rotary_dim"),
]
SOUND = {
    "conv_dim": [8, 8],
    "conv_kernel": [5, 3],
    "conv_stride": [3, 2],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "apply_spec_augment": False,
    "classifier_proj_size": 8,
}
# What else some architectures need to be small.
ALSO: dict[str, dict[str, Any]] = {
    "convnext": {"num_stages": 2, "patch_size": 2},
    "deberta-v2": {"relative_attention": True, "position_biased_input": False, "pos_att_type": ["p2c", "c2p"]},
    "deepseek_v3": {"head_dim": 4, "qk_rope_head_dim": 4, "num_key_value_heads": 4},
    "falcon": {"new_decoder_architecture": False, "multi_query": True, "alibi": False},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 4},
    "hubert": SOUND,
    "mamba2": {"num_heads": 8, "n_groups": 1, "expand": 2, "chunk_size": 4},
    "mobilenet_v2": {"image_size": 32, "depth_multiplier": 0.25},
    "poolformer": {"num_encoder_blocks": 2, "patch_sizes": [3, 3], "strides": [2, 2], "padding": [1, 1]},
    "regnet": {"embedding_size": 8, "groups_width": 4},
    "resnet": {"embedding_size": 8},
    "rwkv": {"context_length": 16},
    "segformer": {
        "num_encoder_blocks": 2,
        "sr_ratios": [2, 1],
        "patch_sizes": [3, 3],
        "strides": [2, 2],
        "num_attention_heads": [1, 2],
        "mlp_ratios": [2, 2],
    },
    "swin": {"embed_dim": 8, "num_heads": [2, 2], "window_size": 2, "patch_size": 2},
    "wav2vec2": {**SOUND, "codevector_dim": 8, "proj_codevector_dim": 8},
    "wavlm": {**SOUND, "num_buckets": 8, "max_bucket_distance": 16},
}
CAUSAL = (
    *("gpt2", "gpt_neo", "gpt_neox", "gptj", "opt", "bloom", "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2"),
    *("phi", "phi3", "falcon", "mpt", "stablelm", "olmo", "olmo2", "cohere", "granite", "starcoder2"),
    *("mamba", "mamba2", "rwkv"),
    *("mixtral", "qwen2_moe", "olmoe", "deepseek_v3", "granitemoe"),
)
MASKED = ("bert", "roberta", "distilbert", "albert", "electra", "mpnet", "modernbert")
FROM_TEXT_TO_TEXT = ("t5", "bart", "pegasus", "marian", "mbart")
IMAGES = (
    *("vit", "convnext", "swin", "deit", "resnet", "dinov2", "regnet", "segformer", "mobilenet_v2", "poolformer"),
    "beit",
)
AUDIO = ("wav2vec2", "hubert", "wavlm")
CLASSES_OF = {
    **dict.fromkeys(CAUSAL, "AutoModelForCausalLM"),
    **dict.fromkeys(MASKED, "AutoModelForMaskedLM"),
    **dict.fromkeys(("deberta-v2", "xlnet"), "AutoModelForSequenceClassification"),
    **dict.fromkeys(FROM_TEXT_TO_TEXT, "AutoModelForSeq2SeqLM"),
    **dict.fromkeys(IMAGES, "AutoModelForImageClassification"),
    **dict.fromkeys(AUDIO, "AutoModelForAudioClassification"),
    "whisper": "AutoModelForSpeechSeq2Seq",
}
ARCHITECTURES = tuple(CLASSES_OF)


def config_of(name: str, times: int = 1) -> Any:
    """The architecture's config with small sizes, widths so many times as large, and nothing dropped by chance."""
    from transformers import CONFIG_MAPPING  # here: to load it takes seconds, which every worker would pay

    kind = CONFIG_MAPPING[name]
    known = kind().to_dict()
    sizes = {key: times * value if key in WIDTHS else value for key, value in SIZES.items() if key in known}
    config = kind(**{**sizes, **ALSO.get(name, {})}, num_labels=CLASSES)
    for key, value in config.to_dict().items():
        if "drop" in key and isinstance(value, float):
            setattr(config, key, 0.0)
    if name in FROM_TEXT_TO_TEXT:
        config.decoder_start_token_id = 1
    if name == "deit":
        config.architectures = ["DeiTForImageClassification"]  # not the one with a teacher
    return config


def build(name: str, numbers: Numbers = FLOAT64, times: int = 1) -> Any:
    """A model on its device, the same at every call."""
    import transformers

    torch.manual_seed(3)
    kind = getattr(transformers, CLASSES_OF[name])
    # Experts in a loop: the library's grouped products are not made for float64.
    model = kind.from_config(config_of(name, times), experts_implementation="eager")
    return model.to(numbers.device, numbers.dtype)


def batch_of(name: str, ranks: tuple[int, ...], samples: int = 2) -> dict[str, torch.Tensor]:
    """The inputs of some ranks, one behind the other; ``labels`` are for ``loss_of``."""
    each = [_batch_of_rank(name, rank, samples) for rank in ranks]
    return {key: torch.cat([one[key] for one in each]) for key in each[0]}


def _batch_of_rank(name: str, rank: int, samples: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(samples, *shape, generator=generator, dtype=torch.float64)

    tokens = torch.randint(3, VOCABULARY, (samples, LENGTH), generator=generator)
    labels = torch.randint(0, CLASSES, (samples,), generator=generator)
    if name in IMAGES:
        size = 32 if name == "mobilenet_v2" else 8
        return {"pixel_values": numbers(3, size, size), "labels": labels}
    if name in AUDIO:
        return {"input_values": numbers(64), "labels": labels}
    if name == "whisper":
        return {"input_features": numbers(8, 32), "decoder_input_ids": tokens, "labels": tokens}
    if CLASSES_OF[name] == "AutoModelForSequenceClassification":
        return {"input_ids": tokens, "labels": labels}
    decoder = {"decoder_input_ids": tokens} if name in FROM_TEXT_TO_TEXT else {}
    return {"input_ids": tokens.flip(0), **decoder, "labels": tokens}


def logits_of(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    found: torch.Tensor = model(**{key: value for key, value in batch.items() if key != "labels"}).logits
    return found


def loss_of(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The cross-entropy, of float64 in float64; the library's own loss casts to float32."""
    logits = logits_of(model, batch)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(logits.flatten(0, -2), batch["labels"].flatten())


def adamw(parameters: Iterable[torch.nn.Parameter], numbers: Numbers = FLOAT64) -> torch.optim.Optimizer:
    """AdamW, whose eps is large enough that a gradient of nothing but rounding moves nothing."""
    return torch.optim.AdamW([each for each in parameters if each.requires_grad], lr=0.01, eps=numbers.eps)


def train_step(model: Any, name: str, ranks: tuple[int, ...], numbers: Numbers = FLOAT64) -> float:
    optimizer = adamw(model.parameters(), numbers)
    loss = loss_of(model, numbers.put(batch_of(name, ranks)))
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return loss.item()


@functools.cache
def trained_alone(name: str, numbers: Numbers = FLOAT64) -> tuple[float, Alone]:
    """The loss of the batch of all ranks, and the model after a step.

    In float64, and where batch norm goes by it, the batch is one; else the ranks' parts go one after another: products
    of other sizes are other kernels, which round in other places.
    """
    alone = Alone(build(name, numbers).train(), numbers)
    optimizer, losses = adamw(alone.parameters(), numbers), []
    is_one = numbers.is_exact or any(isinstance(each, _BatchNorm) for each in alone.module.modules())
    for ranks in [ALL] if is_one else [(rank,) for rank in ALL]:
        loss = loss_of(alone, numbers.put(batch_of(name, ranks))) * (len(ranks) / RANKS)
        alone.backward(loss)
        losses.append(loss.item())
    alone.update(optimizer)
    return sum(losses), alone


def on_a_rank(
    comm: Communicator, name: str, strategy: str, numbers: Numbers = FLOAT64, folder: Path | None = None
) -> tuple[float, State]:
    engine = parallelize(build(name, numbers).train(), comm, strategy, **numbers.options)
    loss = train_step(engine, name, (comm.rank,), numbers)
    if folder is not None:
        checkpoint.save(folder, engine, step=1)
    return loss, dict(engine.full_state_dict())


def tolerance_of(name: str) -> dict[str, float]:
    """The tolerance in float64."""
    return {"rtol": 1e-5, "atol": 1e-6} if name in FLOAT32_INSIDE else {"rtol": 1e-9, "atol": 1e-11}


def assert_trained(name: str, found: list[tuple[float, State]], loss: float, alone: Alone) -> None:
    mean = sum(each for each, _ in found) / RANKS
    numbers = alone.numbers
    assert mean == pytest.approx(loss, rel=tolerance_of(name)["rtol"] if numbers.is_exact else LOSS_SHARE)
    for _, state in found:
        numbers.assert_trained(state, alone, **tolerance_of(name))
