"""Settings of other frameworks, and of the scripts around them, as settings of ours.

    translate_setting("batch_size", 32)              {"train.microbatch": "32", "train.global_batch": "null"}
    translate_config(values)                         a config of ours, and what a reader should know of it

``other_names.yaml`` has the words; here is what needs its value to be understood, such as ``zero_redundancy: stage_2``.
Each decision that may be another one is noted. What has no counterpart is left out, and noted as well.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from paceline.config.fields import fields_at, section_paths
from paceline.config.suggest import other_names, same_key
from paceline.config.yaml_text import parse_value

Settings: TypeAlias = list[tuple[str, str]]
"""Keys of ours with the values that say the same: any one of them does."""

_ZERO = ("zero_redundancy", "zero_redundancy_optimizer", "zero_optimization", "zero_stage", "zero", "use_zero")
_BATCH = "the batch of a rank; for that of all ranks: train.global_batch"
_SECTIONS = ("model", "data", "optim")
# What a config needs beyond a model's kind, where another framework has it elsewhere.
_SHAPES: dict[str, dict[str, Any]] = {"gpt": {"size": "gpt-micro"}}
_DATA: dict[str, dict[str, Any]] = {
    "gpt": {"kind": "text"},
    "resnet": {"kind": "synthetic_images"},
    "mlp": {"kind": "digits"},
}
_EPOCHS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class TranslatedConfig:
    values: dict[str, Any]
    notes: tuple[str, ...]


def other_kind(section: str, word: str) -> str | None:
    """Returns the kind of a section that a word of others stands for: gpt for a model called transformer."""
    found: str | None = other_names()["kinds"].get(section, {}).get(word.lower().replace("-", "_"))
    return found


def meant_by(name: str, value: Any) -> Settings:
    """Returns our settings for a key or an option of others with its value; none where the value does not matter."""
    key = name.lower().replace("-", "_")
    if key in _ZERO or (key == "stage" and value in (1, 2, 3)):
        if _is_off(value):
            return [("parallel.strategy", "ddp")]
        stage = re.fullmatch(r"(?:stage|zero)?[_-]?([123])", str(value).lower())
        some = ("zero1", "zero2", "fsdp") if stage is None or value is True else (f"zero{stage[1]}",)
        return [("parallel.strategy", strategy) for strategy in some]
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


def _is_off(value: Any) -> bool:
    return value is None or value is False or value in (0, "0", "false", "no", "none", "off")


def _is_count(value: Any) -> bool:
    return str(value).isdecimal()


def translate_setting(name: str, value: Any) -> dict[str, str]:
    """Returns keys of ours and their values, as YAML, that say what a setting of others says; none for an unknown one.

    A key whose value is null gives way: the file's value for it would contradict the others.
    """
    key = name.lower().replace("-", "_")
    if key in ("bs", "batch_size") and str(value).isdecimal():
        return {"train.microbatch": str(value), "train.global_batch": "null"}
    known = dict(meant_by(key, value)[:1])  # of several that do, the first
    ours = None if known else same_key(key)
    if ours in _SECTIONS and isinstance(value, str):
        known = {f"{ours}.kind": other_kind(ours, value) or value}
    elif ours is not None and not any(each.path == ours and each.is_section for each in fields_at("", None)):
        known = {ours: "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)}
    return known


def translate_config(given: Mapping[str, Any]) -> TranslatedConfig:
    """Translates a file of others: its flat keys, and those of sections that ours have too."""
    values: dict[str, Any] = {}
    notes: list[str] = []
    for name, value in given.items():
        if name in section_paths() and isinstance(value, Mapping):
            values[name] = {**values.get(name, {}), **value}
            continue
        found = translate_setting(name, value)
        if not found:
            notes.append(f"{name} = {value!r}: left out, as nothing here is called so")
        elif name.lower().replace("-", "_") in ("bs", "batch_size"):
            notes.append(f"{name} = {value!r}: taken for {_BATCH}")
        elif len(meant_by(name, value)) > 1:
            others = " or ".join(f"{key} = {each}" for key, each in meant_by(name, value)[1:])
            notes.append(f"{name} = {value!r}: taken for {_shown(found)}; it could be {others}")
        for key, text in found.items():
            _set(values, key, parse_value(text))
    _fill_up(values, notes)
    return TranslatedConfig(values=values, notes=tuple(notes))


def _set(values: dict[str, Any], key: str, value: Any) -> None:
    section, _, rest = key.partition(".")
    if not rest:
        values[section] = value
    elif value is not None:
        _set(values.setdefault(section, {}), rest, value)


def _fill_up(values: dict[str, Any], notes: list[str]) -> None:
    """Adds what a config needs and others do not say, and takes out what cannot stand beside the rest."""
    parallel = values.get("parallel", {})
    decided = [f"parallel.{key}" for key in ("strategy", "pipeline", "tensor") if key in parallel]
    if parallel.get("sharding_strategy") == "auto" and decided:
        del parallel["sharding_strategy"]
        notes.append(f"sharding_strategy = 'auto': left out, as {' and '.join(decided)} decide it")
    train = values.setdefault("train", {})
    if parallel.get("pipeline", 1) > 1 and not {"accumulate", "global_batch"} & train.keys():
        train["accumulate"] = 2 * parallel["pipeline"]
        notes.append(f"train.accumulate = {train['accumulate']}: the microbatches that fill a pipeline")
    if not {"epochs", "steps"} & train.keys():
        train["epochs"] = _EPOCHS
        notes.append(f"train.epochs = {_EPOCHS}: the file names no length; set train.epochs or train.steps")
    if "model" not in values:
        values["model"] = {"kind": "mlp"}
        notes.append("model.kind = mlp: the file names no model")
    kind = values["model"].get("kind")
    if values["model"] == {"kind": kind} and kind in _SHAPES:
        values["model"] |= _SHAPES[kind]
        notes.append(f"model.{_shown(_SHAPES[kind])}: the file names no size; see docs/reference/config.md for others")
    if "data" not in values and kind in _DATA:
        values["data"] = dict(_DATA[kind])
        notes.append(f"data.{_shown(_DATA[kind])}: the file names no data; put your own there")


def _shown(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} = {value}" for key, value in settings.items())
