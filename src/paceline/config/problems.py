"""Turns what pydantic finds into problems that say what is wrong, the rule and the fix."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from paceline.config import suggest
from paceline.config.schema import Config
from paceline.config.yaml_text import parse_value
from paceline.errors import ConfigError, Problem

if TYPE_CHECKING:
    from pydantic import ValidationError

_NO_SUCH_THING = (0, 0.0, False, "", "none", "None", "off", "never", "no")
MISSING = object()


def schema_problems(
    error: ValidationError, values: Mapping[str, Any], locate: Callable[[str], str] = lambda _path: ""
) -> list[Problem]:
    """Translates a validation error of ``values``; ``locate`` tells where a dotted key was given: ``" (line 4)"``."""
    problems: dict[str, Problem] = {}
    for each in error.errors(include_url=False, include_context=False, include_input=False):
        path, problem = _problem_at(each["type"], each["loc"], values, locate)
        problems.setdefault(path, problem)
    strange = [path for path, problem in problems.items() if "." not in path and path not in Config.model_fields]
    if len(strange) > 1:
        first = problems[strange[0]]
        problems[strange[0]] = replace(first, fix=f"{first.fix} (for the whole file: paceline config import FILE)")
    return list(problems.values())


def _problem_at(
    kind: str, location: tuple[int | str, ...], values: Mapping[str, Any], locate: Callable[[str], str]
) -> tuple[str, Problem]:
    """Returns the key that pydantic found something ``kind`` at, and the problem."""
    if location[:3] == ("data", "mixture", "sources") and len(location) > 3:  # told as of a section data
        place = f"data.sources.{location[3]}"

        def moved(text: str) -> str:
            return re.sub(r"(?<![\w.])data(?=\.| = |$)", lambda _: place, text)

        alone = {"data": values["data"]["sources"][str(location[3])]}
        path, found = _problem_at(kind, ("data", *location[4:]), alone, lambda path: locate(moved(path)))
        return moved(path), replace(found, what=moved(found.what), rule=moved(found.rule), fix=moved(found.fix))
    named = {section: value_at(values, f"{section}.kind") for section in ("model", "data")}
    kinds = {section: kind if kind in suggest.section_kinds(section) else None for section, kind in named.items()}
    path = _path_of(location, kinds)
    if kind in ("extra_forbidden", "invalid_key"):
        return path, _unknown_key(path, kinds, locate(path), value_at(values, path))
    if kind == "missing" and value_at(values, path) is MISSING:
        tags = suggest.section_kinds(path) if "." not in path else ()
        known = suggest.find_field(path, kinds.get(path.partition(".")[0]))
        rule = f"it says {known.description}" if tags and known else f"it must be {known.expected}" if known else ""
        fix = f"set {path}.kind to one of {', '.join(tags)}" if tags else f"set {path}"
        return path, Problem(what=f"{path} is missing", rule=rule, fix=fix)
    if kind.startswith("union_tag"):
        return path, _wrong_kind(path, values, locate)
    return path, _wrong_value(path, kinds, values, locate)


def format_value(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(list(value)) if isinstance(value, tuple) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _path_of(location: tuple[int | str, ...], kinds: Mapping[str, str | None]) -> str:
    """Turns pydantic's location into a dotted key: without the union's tag, and cut at a leaf, or an argument."""
    parts = [str(part) for part in location]
    if parts[0] in kinds and len(parts) > 1:
        del parts[1]  # pydantic inserts the kind
    kind = kinds.get(parts[0])
    for end in range(1, len(parts)):
        known = suggest.find_field(".".join(parts[:end]), kind)
        if known is not None and not known.is_section:
            return ".".join(parts[: end + 1]) if "object" in known.types else known.path
    return ".".join(parts)


def value_at(values: Mapping[str, Any], path: str) -> Any:
    content: Any = values
    for part in path.split("."):
        if not isinstance(content, Mapping) or part not in content:
            return MISSING
        content = content[part]
    return content


def _unknown_key(path: str, kinds: Mapping[str, str | None], where: str, value: Any) -> Problem:
    place, _, key = path.rpartition(".")
    kind = kinds.get(place)
    keys = ", ".join(dict.fromkeys(each.key for each in suggest.fields_at(place, kind)))
    owner = f"{place} of kind {kind}" if kind else place or "the top of a config"
    meant = [f"{ours} = {setting}" for ours, setting in suggest.meant_by(key, value)]
    found = meant or suggest.suggest_keys(place, key, kinds)
    fix = f"did you mean {' or '.join(found)}?" if found else "remove it, or choose one of these"
    return Problem(what=f"{path} is not a known key{where}", rule=f"the keys of {owner} are {keys}", fix=fix)


def _wrong_kind(section: str, values: Mapping[str, Any], locate: Callable[[str], str]) -> Problem:
    path, kinds = f"{section}.kind", suggest.section_kinds(section)
    value = value_at(values, path)
    rule = f"{path} must be one of {', '.join(kinds)}"
    if value is MISSING:
        fix = f"add for instance {path} = {kinds[0]}"
        return Problem(what=f"{path} is missing{locate(section)}", rule=rule, fix=fix)
    what, fix = f"{path} = {format_value(value)} is not a kind of {section}{locate(path)}", ""
    if isinstance(value, str):
        other, size = "data" if section == "model" else "model", suggest.find_field("model.size", "gpt")
        ours = suggest.other_kind(section, value)
        if ours is None and value in suggest.section_kinds(other):
            fix = f"{value} is a kind of {other}: did you mean {other}.kind = {value}?"
        elif ours is None and section == "model" and size is not None and value in size.choices:
            fix = f"did you mean model.kind = gpt with model.size = {value}?"
        elif near := ours or suggest.nearest(value, kinds):
            fix = f"did you mean {path} = {near}?"
    return Problem(what=what, rule=rule, fix=fix)


def _wrong_value(
    path: str, kinds: Mapping[str, str | None], values: Mapping[str, Any], locate: Callable[[str], str]
) -> Problem:
    value = value_at(values, path)
    shown = f"{path} = {format_value(value)}"
    known = suggest.find_field(path, kinds.get(path.partition(".")[0]))
    if known is None:  # a value below args, where any key may stand
        what = f"the key {path} is not text" if value is MISSING else f"{shown} is not a plain value"
        rule = "arguments in a config are finite numbers, text, true, false, null, and lists and sections of these"
        return Problem(what=what + locate(path), rule=rule, fix="make other objects in the function that takes them")
    if known.is_section:
        one, kind = suggest.find_field(f"{path}.kind", None), None
        if isinstance(value, str):  # one word in the place of the section's keys
            some = suggest.section_kinds(path) if path in ("model", "data") else one.choices if one else ()
            kind = value if value in some else suggest.other_kind(path, value)
        fix = f"write {path}: {{kind: {kind}}}" if kind else f"write its keys indented below '{known.key}:'"
        return Problem(what=f"{shown} is not a section of named values{locate(path)}", rule=known.description, fix=fix)
    what, rule = f"{shown} is not {known.expected}{locate(path)}", f"{path}: {known.description}"
    return Problem(what=what, rule=rule, fix=_suggest_value(known, value))


def _suggest_value(known: suggest.KnownField, value: Any) -> str:
    """Returns the first suggestion that fits, or else the default."""
    key, types = known.path, known.types
    if isinstance(value, str) and (other := suggest.other_names()["values"].get(key, {}).get(value)):
        return f"did you mean {other}?"
    if fix := _list_fix(known, value):
        return fix
    if isinstance(value, str) and (near := suggest.nearest(value, known.choices)):
        return f"did you mean {key} = {near}?"
    if known.is_import_path and isinstance(value, str):
        module, _, name = value.rpartition(".")
        is_dotted = ":" not in value and module and name.isidentifier()
        example = "for a function build in my_model.py, write my_model:build"
        return f"did you mean {key} = {module}:{name}?" if is_dotted else example
    if fix := _quoting_fix(known, value):
        return fix
    if isinstance(value, float) and value.is_integer() and "integer" in types:
        return f"write it as a whole number: {key} = {int(value)}"
    if "null" in types and not isinstance(value, list | dict) and value in _NO_SUCH_THING:
        return f"for none, leave it out or write {key} = null"
    has_default = known.default is not None or "null" in types
    return "" if not has_default else f"the default is {key} = {format_value(known.default)}"


def _list_fix(known: suggest.KnownField, value: Any) -> str:
    """Finds one value where a list of them is meant, and names in a list that are like known ones."""
    if "array" not in known.types or not isinstance(value, str | list) or not value:
        return ""
    given = [value] if isinstance(value, str) else value
    if not all(isinstance(each, str) for each in given):
        return ""
    if known.is_import_path:
        given = [each if ":" in each else ":".join(each.rsplit(".", 1)) for each in given]
        return "" if given == value else f"did you mean {known.path} = [{', '.join(given)}]?"
    near = [suggest.nearest(each, known.choices) or each for each in given] if known.choices else given
    if near == given and known.choices and not set(given) <= set(known.choices):
        return ""
    return f"did you mean {known.path} = [{', '.join(near)}]?"


def _quoting_fix(known: suggest.KnownField, value: Any) -> str:
    """Finds text that would be right without its quotes, and values that would be right within them."""
    if not isinstance(value, str):
        is_scalar = isinstance(value, int | float)
        wants_text = known.types <= {"string", "null"} and not known.choices
        return f"put it in quotes: {known.key}: '{format_value(value)}'" if wants_text and is_scalar else ""
    if "boolean" in known.types and value.lower() in ("yes", "on", "y", "no", "off", "n", "true", "false"):
        return f"write {known.path} = {'true' if value.lower() in ('yes', 'on', 'y', 'true') else 'false'}"
    try:
        parsed = parse_value(value)
    except ConfigError:
        return ""
    wanted = {int: {"integer", "number"}, float: {"number"}, bool: {"boolean"}}.get(type(parsed), set())
    return f"write it without quotes: {known.key}: {value}" if wanted & known.types else ""
