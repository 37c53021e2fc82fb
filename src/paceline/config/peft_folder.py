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
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PeftFolder:
    """What a folder of adapters says. ``shapes`` are those of its tensors, by their names without the prefix."""

    rank: int
    alpha: float
    dropout: float
    is_transposed: bool
    base: str | None
    shapes: dict[str, tuple[int, ...]]

    @property
    def layers(self) -> list[str]:
        return [name.removesuffix(A) for name in self.shapes if name.endswith(A)]

    @property
    def whole(self) -> list[str]:
        """The parameters that were trained whole."""
        return [name for name in self.shapes if not name.endswith((A, B))]


def read_peft(folder: Path) -> PeftFolder:
    """Reads a folder but for its values. Raises ConfigError for what is none, and for adapters that are not plain."""
    try:
        return _parse(parse_json_object(read_regular(folder / CONFIG)), dict(_shapes(folder / WEIGHTS)))
    except (OSError, ValueError) as error:
        what = f"the adapters in {folder} cannot be used: {getattr(error, 'strerror', None) or reason_of(error)}"
        rule = f"a folder has {CONFIG} and {WEIGHTS}, as PEFT and paceline checkpoint export --format peft write them"
        problem = Problem(what=what, rule=rule, fix="name such a folder, or begin with new adapters: model.lora.rank")
        raise ConfigError([problem], source=str(folder)) from error


def _parse(values: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> PeftFolder:
    start, bias = values.get("init_lora_weights", True), values.get("bias", "none")
    odd = [f"{key} = {values[key]}" for key in _OTHER_KINDS if values.get(key)]
    odd += [f"peft_type = {values.get('peft_type')}"] if values.get("peft_type") != "LORA" else []
    odd += [f"bias = {bias}"] if bias != "none" else []
    odd += [f"init_lora_weights = {start}"] if start not in _PLAIN_STARTS else []
    if odd:
        raise ValueError(f"{', '.join(odd)}: plain LORA is read, of one rank")
    rank, alpha, dropout = values.get("r", 8), values.get("lora_alpha", 8), values.get("lora_dropout", 0.0)
    if not (is_count(rank) and rank and is_number(alpha) and alpha > 0 and is_number(dropout) and 0 <= dropout < 1):
        raise ValueError(f"r = {rank}, lora_alpha = {alpha} and lora_dropout = {dropout} are no such numbers")
    found = PeftFolder(
        rank=rank,
        alpha=alpha * math.sqrt(rank) if values.get("use_rslora") else float(alpha),
        dropout=float(dropout),
        is_transposed=bool(values.get("fan_in_fan_out")),
        base=values.get("base_model_name_or_path") or None,
        shapes=shapes,
    )
    sizes = {tuple(shapes.get(name + B, ()))[-1:] + shapes[name + A][:1] for name in found.layers}
    if sizes != {(rank, rank)}:
        raise ValueError(f"its tensors are not pairs of lora_A and lora_B of rank {rank}")
    return found


def _shapes(path: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    with open_regular(path) as file:
        (size,) = struct.unpack("<Q", (file.read(8) or b"").ljust(8, b"\xff"))
        if size > _MOST_BYTES:
            raise ValueError(f"{path.name} is no safetensors file")
        header = parse_json_object(file.read(size) or b"")
    for name in header.keys() - {"__metadata__"}:
        shape = header[name].get("shape") if isinstance(header[name], dict) else None
        if not name.startswith(PREFIX) or not isinstance(shape, list) or not all(map(is_count, shape)):
            raise ValueError(f"{path.name} has {name[:80]!r}, and names begin with {PREFIX}")
        yield name.removeprefix(PREFIX), tuple(shape)


def peft_config(layers: dict[str, dict[str, Any]], rank: int, names: list[str], **known: Any) -> bytes:
    """Returns ``adapter_config.json`` for adapters of one rank: by layers their scale, dropout, and whether transposed.

    ``names`` are those of all tensors of the model. Raises UsageError for adapters of several kinds.
    """
    kinds = {(each["scale"], each.get("dropout", 0.0), each["is_transposed"]) for each in layers.values()}
    if len(kinds) > 1:
        rule = "a folder of PEFT has adapters of one scale and dropout, on weights that all lie alike"
        raise UsageError(f"the adapters differ: {sorted(kinds)}\n  {rule}\n  merge them: paceline checkpoint merge")
    ((scale, dropout, is_transposed),) = kinds
    lasts = {name.rpartition(".")[2] for name in layers}
    is_short = {name.rpartition(".")[0] for name in names if lasts & set(name.split(".")[:-1])} == layers.keys()
    values = {"peft_type": "LORA", "r": rank, "lora_alpha": scale * rank, "lora_dropout": dropout, "bias": "none"}
    values |= {"target_modules": sorted(lasts if is_short else layers), "fan_in_fan_out": is_transposed, **known}
    return (json.dumps({**values, "inference_mode": True}, indent=2) + "\n").encode()


def resolve_lora(lora: LoraConfig) -> LoraConfig:
    """Returns the settings of adapters with what their folder says, where they begin with one."""
    if lora.path is None:
        return lora
    found = read_peft(Path(lora.path))
    sizes = {"rank": found.rank, "alpha": found.alpha, "dropout": lora.dropout or found.dropout}
    return LoraConfig.model_validate({**sizes, "targets": found.layers, "path": lora.path})


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
    for key, own in {"rank": found.rank, "alpha": found.alpha, "targets": found.layers}.items():
        if getattr(lora, key) not in (own, getattr(LoraConfig(), key)):
            what = f"model.lora.{key} = {getattr(lora, key)} with model.lora.path, whose adapters have {own}"
            rule = "the folder says what its adapters are like"
            yield Problem(what=what, rule=rule, fix=f"leave model.lora.{key} out")
