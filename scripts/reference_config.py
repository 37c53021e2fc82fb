"""The reference of config keys, from the JSON Schema: every key with its values, its default and what it means."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from paceline.config.schema import json_schema
from paceline.config.suggest import leaf_field
from reference_text import NOTE, code, prose, table

HEAD = ("key", "values", "default", "meaning")
INTRODUCTION = """\
Every key that a config may have. [The config](../config.md) explains how they work together. On the command line a key
is written with its section: `parallel.ranks=4`. The same list is in the JSON Schema that `paceline config schema`
prints, and `paceline config explain FILE` shows what each key of a config has become.

A default of `null` means that Paceline decides: from the data, from the model, or from other keys. A key whose default
is *required* must be given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A part of the config with a heading of its own; ``node`` is its part of the JSON Schema."""

    title: str
    path: str
    node: dict[str, Any]
    level: int
    hides: frozenset[str] = frozenset()  # keys that the heading above lists for all kinds


def config_page() -> str:
    """Returns the page."""
    schema = json_schema()
    top = {key: spec for key, spec in schema["properties"].items() if not _targets(spec)}
    lines = ["# Config keys", "", NOTE, "", INTRODUCTION, "", "## Top level", ""]
    lines += table(HEAD, (_row(key, key, spec, schema) for key, spec in top.items()))
    for key, spec in schema["properties"].items():
        if key not in top:
            lines += _section(key, key, spec, schema, level=2)
    return "\n".join(lines).rstrip() + "\n"


def _section(title: str, path: str, spec: dict[str, Any], schema: dict[str, Any], level: int) -> Iterator[str]:
    """Yields a section: a plain one, or one that has a form for each ``kind``."""
    nodes = {kind: _resolve(target, schema) for kind, target in _targets(spec).items()}
    if None in nodes:
        yield from _group(Group(title=title, path=path, node=nodes[None], level=level), schema)
        return
    shared = _shared(list(nodes.values()))
    yield from [f"{'#' * level} {title}", "", prose(_sentence(spec.get("description", ""))), ""]
    yield f"`{path}.kind` says which: " + ", ".join(code(str(kind)) for kind in nodes) + ". Keys of every kind:"
    yield ""
    any_node = next(iter(nodes.values()))
    yield from table(HEAD, (_row(f"{path}.{key}", key, any_node["properties"][key], any_node) for key in shared))
    for kind, node in nodes.items():
        own = Group(title=f"{title}, kind {kind}", path=path, node=node, level=level + 1, hides=frozenset(shared))
        yield from _group(own, schema)


def _group(group: Group, schema: dict[str, Any]) -> Iterator[str]:
    properties = {key: spec for key, spec in group.node["properties"].items() if key not in group.hides}
    inner = {key: spec for key, spec in properties.items() if _targets(spec)}
    yield from [f"{'#' * group.level} {group.title}", "", prose(group.node.get("description", "")), ""]
    leaves = {key: spec for key, spec in properties.items() if key not in inner and "const" not in spec}
    if leaves:
        yield from table(HEAD, (_row(f"{group.path}.{key}", key, spec, group.node) for key, spec in leaves.items()))
    for key, spec in inner.items():
        title = f"{group.path}.{key}" + group.title.removeprefix(group.path)
        yield from _section(title, f"{group.path}.{key}", spec, schema, group.level + 1)
    for key, spec in leaves.items():
        yield from _named(f"{group.path}.{key}", spec, schema, group)


def _named(path: str, spec: dict[str, Any], schema: dict[str, Any], group: Group) -> Iterator[str]:
    """Yields the sections that a config names itself: ``optim.groups.NAME``."""
    value = spec.get("additionalProperties")
    targets = _targets(value) if isinstance(value, dict) else {}
    if None in targets and "properties" not in _resolve(targets[None], schema):
        return  # plain values
    if None in targets:
        yield from _section(f"{path}.NAME", f"{path}.NAME", value, schema, group.level + 1)
    elif targets:
        yield from [f"{'#' * (group.level + 1)} {path}.NAME", ""]
        yield f"Each is a section `{path.partition('.')[0]}` of one of these kinds, with the keys listed there: "
        yield ", ".join(code(str(kind)) for kind in targets) + "."
        yield ""


def _targets(spec: dict[str, Any]) -> dict[str | None, str]:
    """Returns what a part of the schema refers to: one section, or one for each kind; empty for a plain value."""
    if "$ref" in spec:
        return {None: spec["$ref"]}
    mapping: dict[str | None, str] = {}
    if "discriminator" in spec:
        order = [option["$ref"] for option in spec["oneOf"]]
        mapping = dict(sorted(spec["discriminator"]["mapping"].items(), key=lambda item: order.index(item[1])))
    return mapping


def _resolve(reference: str, schema: dict[str, Any]) -> dict[str, Any]:
    node: dict[str, Any] = schema["$defs"][reference.removeprefix("#/$defs/")]
    return node


def _shared(nodes: list[dict[str, Any]]) -> list[str]:
    """Returns the keys that are the same in all kinds of a section."""
    first, *others = nodes
    return [
        key for key in first["properties"] if all(first["properties"][key] == n["properties"].get(key) for n in others)
    ]


def _row(path: str, key: str, spec: dict[str, Any], node: dict[str, Any]) -> tuple[str, str, str, str]:
    field = leaf_field(path, None, spec)
    default = "*required*" if key in node.get("required", ()) else code(_value(spec.get("default")))
    return code(path), prose(field.expected), default, prose(field.description)


def _value(default: Any) -> str:
    return default if isinstance(default, str) and default else json.dumps(default)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + "."
