"""The schema as a list of fields, for messages: what may stand where, in words.

It is read from the JSON Schema, so there is one source of truth: a field added to ``schema.py`` is known here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, get_args

from pydantic import BaseModel

from paceline.config.schema import Config, json_schema


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
    """Lists every key of the schema, sections included, in order."""
    schema = json_schema()
    return tuple(_walk(schema, schema["$defs"], "", None))


@cache
def section_paths() -> frozenset[str]:
    """Returns the paths of all sections, read from the models: to make the JSON Schema takes 0.1 s of every start."""
    return frozenset(_sections(Config, ""))


def _sections(model: type[BaseModel], place: str) -> Iterator[str]:
    for key, field in model.model_fields.items():
        kinds = get_args(field.annotation) if field.discriminator else (field.annotation,)
        for kind in kinds:
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield place + key
                yield from _sections(kind, f"{place}{key}.")


@cache
def section_kinds(section: str) -> tuple[str, ...]:
    """Returns the kinds of a section that has some (model, data); empty for the others."""
    schema = json_schema()
    options = schema["properties"][section].get("oneOf", ())  # in the order of the schema; the mapping is sorted
    sections = (schema["$defs"][option["$ref"].removeprefix("#/$defs/")] for option in options)
    return tuple(choice for each in sections for choice in _choices(each["properties"]["kind"]))


def fields_at(place: str, kind: str | None) -> list[KnownField]:
    """Lists the keys that are valid in a section, for its kind."""
    return [each for each in known_fields() if each.place == place and (each.kind in (None, kind) or kind is None)]


def find_field(path: str, kind: str | None) -> KnownField | None:
    """Returns the field at a path, for the kind of its section, or ``None``."""
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
    """Returns the field that a part of the JSON Schema describes; one that is no section."""
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
    named = names.get(
        option["type"], "a section of named plain values" if option["type"] == "object" else option["type"]
    )
    words = {"minimum": "of at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}
    limits = [f"{word} {option[name]}" for name, word in words.items() if name in option]
    limits += ["that is not empty"] if option.get("minLength") else []
    return named + (" " + " and ".join(limits) if limits else "")
