"""The keys of the schema in words, and which of them was meant by words of others and by keys that do not exist.

Fields are read from the JSON Schema: one added to ``schema.py`` is known here. ``other_names.yaml`` has the words of
others; here is what needs its value to be understood, such as ``zero_redundancy: stage_2``. Each decision that may be
another one is noted. What has no counterpart is left out, and noted as well.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias, get_args

from pydantic import BaseModel

from paceline.bounded_yaml import load_shipped
from paceline.config.schema import Config, json_schema
from paceline.config.settings import nccl_variables
from paceline.config.yaml_text import parse_value


@cache
def other_names() -> dict[str, Any]:
    return dict(load_shipped((Path(__file__).parent / "other_names.yaml").read_text(encoding="utf-8")))


def key_called(word: str) -> str | None:
    """Returns the key that others call so: by their own names, or by a variable of NCCL, in full or without NCCL_."""
    names = {name: key for key, theirs in other_names()["keys"].items() for name in theirs.split()}
    row = nccl_variables().get(f"NCCL_{word.removeprefix('nccl_')}".upper())
    return names.get(word) or (f"comm.nccl.{row['key']}" if row else None)


def suggest_keys(place: str, key: str, kinds: Mapping[str, str | None]) -> list[str]:
    """Returns up to three keys that may have been meant, the likeliest first.

    In order: the same key here but for case, hyphens and a plural, the same key in another section, the name that other
    frameworks use, a like key here, a like key elsewhere. ``kinds`` tells the chosen kind of model and data.
    """
    wanted = key.lower().replace("-", "_")
    here = fields_at(place, kinds.get(place))
    elsewhere = [each for each in known_fields() if each not in here]
    found = [each.path for each in here if each.key in (wanted, f"{wanted}s")]
    # A field whose default is another one's value is the less likely.
    same = [each for each in elsewhere if each.key == wanted and each.key != "kind"]
    found += _texts(sorted(same, key=_is_derived), kinds)
    alias = key_called(wanted)
    found += _texts((each for each in known_fields() if each.path == alias), kinds)
    found += [f"{place}.{each}" if place else each for each in _near(wanted, [field.key for field in here], cutoff=0.6)]
    if not found:
        near = set(_near(wanted, [field.key for field in elsewhere], cutoff=0.7))
        found = _texts((each for each in elsewhere if each.key in near), kinds)
    return list(dict.fromkeys(found))[:3]


def same_key(word: str) -> str | None:
    """Returns the key that a word names: one of ours but for its section, or by the name that others have for it."""
    wanted = word.lower().replace("-", "_")
    same = sorted((each for each in known_fields() if each.key == wanted and wanted != "kind"), key=_is_derived)
    return key_called(wanted) or (same[0].path if same else None)


def _is_derived(field: KnownField) -> bool:
    return field.default is None  # such as data.seed, which follows train.seed


def nearest(word: str, choices: Iterable[str]) -> str | None:
    return next(iter(_near(word.lower().replace("-", "_"), choices, cutoff=0.5)), None)


def _near(word: str, choices: Iterable[str], cutoff: float) -> list[str]:
    plain = {choice.lower().replace("-", "_"): choice for choice in choices}
    return [plain[match] for match in difflib.get_close_matches(word, plain, n=1, cutoff=cutoff)]


def _texts(fields: Iterable[KnownField], kinds: Mapping[str, str | None]) -> list[str]:
    """Writes each field's path once; with the kind that has it, where the chosen kind has it not."""
    by_path: dict[str, list[str | None]] = {}
    for each in fields:
        by_path.setdefault(each.path, []).append(each.kind)
    texts = []
    for path, owners in by_path.items():
        section = path.partition(".")[0]
        is_there = None in owners or kinds.get(section) in (None, *owners)
        texts.append(path if is_there else f"{path} (of {section}.kind = {' or '.join(map(str, owners))})")
    return texts


def near_files(path: Path, otherwise: str = "") -> str:
    """Asks for up to three files of like names, in the same folder or in its ``configs``; the same name comes first."""
    found = []
    for folder in (path.parent, path.parent / "configs"):
        names = [each.name for each in folder.glob("*") if each.is_file()]
        found += [folder / name for name in difflib.get_close_matches(path.name, names, n=3, cutoff=0.7)]
    near = [str(each) for each in sorted(found, key=lambda each: each.name != path.name)][:3]
    return f"did you mean {' or '.join(near)}?" if near else otherwise


def near_folders(path: Path) -> str:
    """Asks for the folder that may have been meant by a path that does not exist, beside it or in ``runs``."""
    missing = path
    while not missing.parent.exists():
        missing = missing.parent
    if path.exists():
        return ""
    places = [missing.parent, *([missing.parent / "runs"] if missing.parent == Path() else [])]
    near, others = [], []
    for place in places:
        names = sorted(each.name for each in place.glob("[!.]*") if each.is_dir())
        alike = difflib.get_close_matches(missing.name, names, n=3, cutoff=0.6)
        found = [place / name / path.relative_to(missing) for name in alike]
        near += [str(each if each.exists() else place / name) for each, name in zip(found, alike, strict=True)]
        others += [str(place / name) for name in names] if (place.name, missing) == ("runs", path) else []
    if near:
        return f"did you mean {' or '.join(near[:3])}?"
    return f"there are {', '.join(others[:8])}" if others else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownField:
    """One key that a config may have; ``kind`` says under which kind of model or data, where that matters."""

    path: str
    kind: str | None
    expected: str  # completes "must be ...": "a number above 0"
    description: str
    choices: tuple[str, ...] = ()
    types: frozenset[str] = frozenset()  # of JSON Schema: integer, number, string, boolean, array, object, null
    default: Any = None
    is_section: bool = False
    is_import_path: bool = False

    @property
    def key(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def place(self) -> str:
        return self.path.rpartition(".")[0]


@cache
def known_fields() -> tuple[KnownField, ...]:
    schema = json_schema()
    return tuple(_walk(schema, schema["$defs"], "", None))


@cache
def known_paths() -> dict[str, tuple[str, bool]]:
    """Returns all keys, with the class of their section and if they are one; the JSON Schema would take 0.1 s."""
    return dict(_paths(Config, ""))


@cache
def section_paths() -> frozenset[str]:
    return frozenset(path for path, (_, is_section) in known_paths().items() if is_section)


def _paths(model: type[BaseModel], place: str) -> Iterator[tuple[str, tuple[str, bool]]]:
    for key, field in model.model_fields.items():
        kinds = get_args(field.annotation) if field.discriminator else (field.annotation,)
        inner = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
        yield place + key, (model.__name__, bool(inner))
        for kind in inner:
            yield from _paths(kind, f"{place}{key}.")


@cache
def section_kinds(section: str) -> tuple[str, ...]:
    """Returns the kinds of a section that has some (model, data); empty for the others."""
    schema = json_schema()
    options = schema["properties"][section].get("oneOf", ())  # in the order of the schema; the mapping is sorted
    sections = (schema["$defs"][option["$ref"].removeprefix("#/$defs/")] for option in options)
    return tuple(choice for each in sections for choice in _choices(each["properties"]["kind"]))


def fields_at(place: str, kind: str | None) -> list[KnownField]:
    return [each for each in known_fields() if each.place == place and (each.kind in (None, kind) or kind is None)]


def find_field(path: str, kind: str | None) -> KnownField | None:
    return next((each for each in known_fields() if each.path == path and each.kind in (None, kind)), None)


def _walk(node: dict[str, Any], defs: dict[str, Any], place: str, kind: str | None) -> list[KnownField]:
    found: list[KnownField] = []
    for key, spec in node["properties"].items():
        path = f"{place}.{key}" if place else key
        inner = spec["discriminator"]["mapping"] if "discriminator" in spec else {}
        if "$ref" in spec:
            inner = {kind: spec["$ref"]}
        if inner:
            field = leaf_field(path, kind, {"type": "object", **spec})
            found.append(replace(field, expected="a section of named values", default=None, is_section=True))
        else:
            found.append(leaf_field(path, kind, spec))
        for each, target in inner.items():
            found += _walk(defs[target.removeprefix("#/$defs/")], defs, path, each)
    return found


def leaf_field(path: str, kind: str | None, spec: dict[str, Any]) -> KnownField:
    options = spec.get("anyOf", [spec])
    choices = [choice for option in options for choice in _choices(option)]
    return KnownField(
        path=path,
        kind=kind,
        expected=" or ".join(sorted((_expected(option) for option in options), key=lambda text: text == "null")),
        description=spec.get("description", ""),
        choices=tuple(str(choice) for choice in choices),
        types=frozenset(option["type"] for option in options if "type" in option),
        default=spec.get("default"),
        is_import_path=any("pattern" in option.get("items", option) for option in options),
    )


def _choices(option: dict[str, Any]) -> list[Any]:
    if option.get("type") == "array":
        return _choices(option.get("items", {}))
    return [option["const"]] if "const" in option else list(option.get("enum", ()))


def _expected(option: dict[str, Any]) -> str:
    if "items" in option:
        return f"a list, each {_expected(option['items'])}"
    choices = _choices(option)
    if choices:
        return str(choices[0]) if len(choices) == 1 else "one of " + ", ".join(str(choice) for choice in choices)
    if "pattern" in option:
        return "a path of the form package.module:name"
    if "prefixItems" in option:
        return f"a list of {len(option['prefixItems'])}, each {_expected(option['prefixItems'][0])}"
    names = {"integer": "a whole number", "number": "a number", "boolean": "true or false", "string": "text"}
    names["object"] = "a section of named plain values"
    named: str = names.get(option["type"], option["type"])
    words = {"minimum": "of at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}
    limits = [f"{word} {option[name]}" for name, word in words.items() if name in option]
    limits += ["that is not empty"] if option.get("minLength") else []
    return named + (" " + " and ".join(limits) if limits else "")


Settings: TypeAlias = list[tuple[str, str]]  # keys of ours with values: any one of them says the same
_ZERO = ("zero_redundancy", "zero_redundancy_optimizer", "zero_optimization", "zero_stage", "zero", "use_zero")
_BATCH = "the batch of a rank; for that of all ranks: train.global_batch"
_SECTIONS = ("model", "data", "optim")
# What a config needs beyond a model's kind, where another framework has it elsewhere.
_SHAPES: dict[str, dict[str, Any]] = {"gpt": {"size": "gpt-micro"}}
_DATA = {"gpt": {"kind": "text"}, "resnet": {"kind": "synthetic_images"}, "mlp": {"kind": "digits"}}
_EPOCHS = 10


def other_kind(section: str, word: str) -> str | None:
    """Returns the kind of a section that a word of others stands for: gpt for a model called transformer."""
    found: str | None = other_names()["kinds"].get(section, {}).get(word.lower().replace("-", "_"))
    return found


def meant_by(name: str, value: Any) -> Settings:
    """Returns our settings for a key or an option of others with its value; none where the value does not matter."""
    key, is_count = name.lower().replace("-", "_"), str(value).isdecimal()
    if key in _ZERO or (key == "stage" and value in (1, 2, 3)):
        if _is_off(value):
            return [("parallel.strategy", "ddp")]
        stage = re.fullmatch(r"(?:stage|zero)?[_-]?([123])", str(value).lower())
        some = ("zero1", "zero2", "fsdp") if stage is None or value is True else (f"zero{stage[1]}",)
        return [("parallel.strategy", strategy) for strategy in some]
    if key in ("bs", "batch_size", "train_batch_size", "global_batch_size") and is_count:
        both = [("train.microbatch", str(value)), ("train.global_batch", str(value))]
        return both if key in ("bs", "batch_size") else both[1:]
    if key in ("pipeline_parallelism", "pipeline_parallel", "tensor_parallelism", "tensor_parallel"):
        degree = value if is_count else 2
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


def translate_setting(name: str, value: Any) -> dict[str, str]:
    """Returns keys of ours with values, as YAML, that say what a setting of others says; null: the key gives way."""
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


def translate_config(given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Translates a file of others: its flat keys, and those of sections that ours have too. Returns notes as well."""
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
    return values, notes


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
