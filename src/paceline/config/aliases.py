"""What other frameworks, and scripts around them, call things: their words with a value, and ours.

``suggest.py`` knows keys that have another name elsewhere. Here is what needs its value to be understood, such as
``zero_redundancy: stage_2``, and words for whole sections, such as ``model: transformer``.
"""

from __future__ import annotations

import re
from typing import Any, TypeAlias

Settings: TypeAlias = list[tuple[str, str]]
"""Keys of ours with the values that say the same: any one of them does."""

_ON = ("parallel.strategy", "zero1"), ("parallel.strategy", "zero2"), ("parallel.strategy", "fsdp")
_ZERO = ("zero_redundancy", "zero_redundancy_optimizer", "zero_optimization", "zero_stage", "zero", "use_zero")
_KINDS = {
    "model": {
        "transformer": "gpt",
        "gpt2": "gpt",
        "llm": "gpt",
        "language_model": "gpt",
        "cnn": "resnet",
        "resnet18": "resnet",
        "resnet50": "resnet",
        "linear": "mlp",
        "classifier": "mlp",
    },
    "data": {
        "mnist": "digits",
        "cifar10": "synthetic_images",
        "cifar": "synthetic_images",
        "imagenet": "synthetic_images",
        "shakespeare": "text",
        "synthetic": "synthetic_classification",
    },
    "optim": {"adam": "adamw", "adam_w": "adamw"},
}


def other_kind(section: str, word: str) -> str | None:
    """Returns the kind of a section that a word of others stands for: gpt for a model called transformer."""
    return _KINDS.get(section, {}).get(word.lower().replace("-", "_"))


def meant_by(name: str, value: Any) -> Settings:
    """Returns our settings for a key or an option of others with its value; none where the value does not matter."""
    key = name.lower().replace("-", "_")
    if key in _ZERO or (key == "stage" and value in (1, 2, 3)):
        return _zero(value)
    if key in ("bs", "batch_size", "train_batch_size", "global_batch_size") and _is_count(value):
        both = [("train.microbatch", str(value)), ("train.global_batch", str(value))]
        return both if key in ("bs", "batch_size") else both[1:]
    if key in ("pipeline_parallelism", "pipeline_parallel", "tensor_parallelism", "tensor_parallel"):
        degree = value if _is_count(value) and value is not True else 2
        return [("parallel." + key.partition("_")[0], "1" if _is_off(value) else str(degree))]
    if key in ("communication_pattern", "all_reduce_algorithm"):
        return [("comm.algorithm", str(value))]
    if key in ("mixed_precision", "amp", "use_amp"):
        return [("train.precision", value if value in ("bf16", "fp16") else "fp32" if _is_off(value) else "auto")]
    if key in ("fp16", "bf16"):
        return [("train.precision", "fp32" if _is_off(value) else key)]
    if key in ("ddp", "fsdp"):
        return [("parallel.strategy", key)]
    if key in ("activation_checkpointing", "gradient_checkpointing", "enable_activation_checkpointing"):
        return [("memory.checkpoint_activations", "none" if _is_off(value) else "full")]
    if key == "cpu_offload":
        return [("memory.offload", "[]" if _is_off(value) else "[optimizer, parameters]")]
    if key == "compression_ratio":
        return [("comm.compression", f"{{policy: topk, ratio: {value}}}")]
    return []


def _zero(value: Any) -> Settings:
    if _is_off(value):
        return [("parallel.strategy", "ddp")]
    stage = re.fullmatch(r"(?:stage|zero)?[_-]?([123])", str(value).lower())
    return list(_ON) if stage is None or value is True else [("parallel.strategy", f"zero{stage[1]}")]


def _is_off(value: Any) -> bool:
    return value is None or value is False or value in (0, "0", "false", "no", "none", "off")


def _is_count(value: Any) -> bool:
    return str(value).isdecimal()
