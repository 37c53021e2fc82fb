"""Folders of PEFT, which hold low-rank adapters alone: ``adapter_config.json`` and ``adapter_model.safetensors``.

    base_model.model.LAYER.lora_A.weight    rank x inputs
    base_model.model.LAYER.lora_B.weight    outputs x rank
    base_model.model.PARAMETER              what was trained whole beside them, such as a new head

The names of the tensors say which layers have adapters: ``target_modules`` may be patterns of several kinds.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.config.sections import LoraConfig
from paceline.errors import ConfigError, Problem, UsageError
from paceline.untrusted import is_count, is_number, open_regular, parse_json_object, read_regular, reason_of

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
A, B = ".lora_A.weight", ".lora_B.weight"
_MOST_BYTES = 2**26
# What changes how adapters are computed, or what is trained beside them: its tensors would mean something else.
_OTHER_KINDS = (
    *("use_dora", "use_qalora", "use_bdlora", "lora_bias", "rank_pattern", "alpha_pattern", "layer_replication"),
    *("target_parameters", "trainable_token_indices", "alora_invocation_tokens", "megatron_config"),
    *("arrow_config", "kasa_config", "velora_config", "monteclora_config"),
)
_PLAIN_STARTS = (True, False, "gaussian", "orthogonal", "eva")  # those that leave the frozen weights as they were


def read_peft(folder: Path) -> LoraConfig:
    """Reads what a folder says of its adapters, but no values. Raises ConfigError for what is no such folder."""
    try:
        with open_regular(folder / WEIGHTS) as file:
            (size,) = struct.unpack("<Q", (file.read(8) or b"").ljust(8, b"\xff"))
            header = file.read(size) or b"" if size <= _MOST_BYTES else b""
        found = parse_peft(read_regular(folder / CONFIG), header)
        return found.model_copy(update={"path": str(folder)})
    except (OSError, ValueError) as error:
        what = f"the adapters in {folder} cannot be used: {getattr(error, 'strerror', None) or reason_of(error)}"
        rule = f"a folder has {CONFIG} and {WEIGHTS}, as PEFT and paceline checkpoint export --format peft write them"
        problem = Problem(what=what, rule=rule, fix="name such a folder, or begin with new adapters: model.lora.rank")
        raise ConfigError([problem], source=str(folder)) from error


def parse_peft(config: bytes, header: bytes) -> LoraConfig:
    """Reads a config, and the header of the tensors. Raises ValueError for adapters that are not plain ones."""
    values = parse_json_object(config)
    plain = {"peft_type": ("LORA",), "bias": (None, "none"), "init_lora_weights": (None, *_PLAIN_STARTS)}
    odd = [key for key, known in plain.items() if values.get(key) not in known]
    odd += [key for key in _OTHER_KINDS if values.get(key)]
    if odd:
        raise ValueError(f"{', '.join(f'{key} = {values.get(key)}' for key in odd)}: plain LORA is read, of one rank")
    rank, alpha, dropout = values.get("r", 8), values.get("lora_alpha", 8), values.get("lora_dropout", 0.0)
    if not (is_count(rank) and rank and is_number(alpha) and is_number(dropout)):
        raise ValueError(f"r = {rank}, lora_alpha = {alpha} and lora_dropout = {dropout} are no such numbers")
    names = [name.removeprefix(PREFIX) for name in parse_json_object(header) if name.startswith(PREFIX)]
    layers = [name.removesuffix(A) for name in names if name.endswith(A)]
    if not layers:
        raise ValueError(f"it has no tensor {PREFIX}...{A}")
    alpha = alpha * math.sqrt(rank) if values.get("use_rslora") else alpha
    return LoraConfig(rank=rank, alpha=alpha, dropout=dropout, targets=layers)


def peft_config(layers: dict[str, dict[str, Any]], rank: int, names: list[str], **known: Any) -> bytes:
    """Returns ``adapter_config.json`` for adapters of one rank: by layers their scale, dropout, and whether transposed.

    ``names`` are those of all tensors of the model. Raises UsageError for adapters of several kinds.
    """
    kinds = {(each["scale"], each.get("dropout", 0.0), each["is_transposed"]) for each in layers.values()}
    if len(kinds) > 1:
        rule = "a folder of PEFT has adapters of one scale and dropout, on weights that all lie alike"
        raise UsageError(f"the adapters differ: {sorted(kinds)}\n  {rule}\n  merge them: paceline checkpoint merge")
    ((scale, dropout, is_transposed),) = kinds
    stacks = [each["stack"] for each in layers.values() if "stack" in each]
    layers = {name: each for name, each in layers.items() if "stack" not in each}
    lasts = {name.rpartition(".")[2] for name in layers}
    is_short = {name.rpartition(".")[0] for name in names if lasts & set(name.split(".")[:-1])} == layers.keys()
    values = {"peft_type": "LORA", "r": rank, "lora_alpha": scale * rank, "lora_dropout": dropout, "bias": "none"}
    values |= {"target_modules": sorted(lasts if is_short else layers), "fan_in_fan_out": is_transposed, **known}
    values |= {"target_parameters": stacks} if stacks else {}
    return (json.dumps({**values, "inference_mode": True}, indent=2) + "\n").encode()


def stack_places(layers: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Returns where PEFT has the adapters of stacks: those of one module inside each other, the last one outside."""
    places: dict[str, str] = {}
    for name, adapter in reversed(layers.items()):
        if "stack" in adapter:
            place = adapter["stack"].rpartition(".")[0]
            while place in places.values():
                place += ".base_layer"
            places[name] = place
    return places


def resolve_lora(lora: LoraConfig) -> LoraConfig:
    """Returns the settings of adapters as their folder says them, where they begin with one; dropout may be new."""
    found = lora if lora.path is None else read_peft(Path(lora.path))
    return found.model_copy(update={"dropout": lora.dropout or found.dropout})


def lora_problems(lora: LoraConfig, *, is_pretrained: bool) -> Iterator[Problem]:
    """Yields what is wrong with the adapters of a config."""
    if lora.path is None:
        if lora.rank == 0 and lora != LoraConfig():
            what, rule = "keys of model.lora with model.lora.rank = 0", "without a rank there are no adapters"
            yield Problem(what=what, rule=rule, fix="set model.lora.rank = 8, or leave model.lora out")
        return
    if not is_pretrained:
        what, rule = "model.lora.path with model.pretrained = false", "adapters belong to the weights they learned with"
        yield Problem(what=what, rule=rule, fix="leave model.pretrained out, or give model.lora.rank, not the path")
    try:
        found = read_peft(Path(lora.path))
    except ConfigError as error:
        yield from error.problems
        return
    for key in ("rank", "alpha", "targets"):
        own, given = getattr(found, key), getattr(lora, key)
        if lora.is_changed(key) and given != own:
            what, rule = f"model.lora.{key} = {given} with model.lora.path", f"the adapters of the folder have {own}"
            yield Problem(what=what, rule=rule, fix=f"leave model.lora.{key} out")
