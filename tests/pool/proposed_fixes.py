"""Commands and settings that a text proposes, and whether paceline would read them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from typer.main import get_command

from paceline.cli.app import app
from paceline.config.suggest import KnownField, known_fields, section_kinds

FILLED = "VALUE"  # what stands in a message only when it is told

# A command ends with its line, or where the sentence around it goes on.
_COMMAND = re.compile(r"(?<![\w/.-])paceline ([a-z]+(?:[^\n;()`'\"]|(?<=[ =])['\"][^'\"]*['\"])*)")
_OPTION = re.compile(r"(?:^|(?<=\s))--?[a-zA-Z][a-z-]*")
# What is said of the product, or is a key in a store of ranks: no command.
_SAID = re.compile(r"(?:joined|all|told|arrived|nccl|ddp|zero\d|fsdp|hybrid|engine|has|is|with|reads|does|started)\b")


def _walk(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    for name, inner in getattr(command, "commands", {}).items():
        yield " ".join((*path, name)), inner
        yield from _walk(inner, (*path, name))


COMMANDS: dict[str, Any] = dict(_walk(get_command(app)))


def unreadable_commands(text: str) -> list[str]:
    """Returns the commands of a text whose verb or whose options paceline does not know."""
    return [f"paceline {words}" for words in _COMMAND.findall(text) if not _SAID.match(words) and not _is_known(words)]


def _is_known(words: str) -> bool:
    verb, _, rest = words.partition(" ")
    command = COMMANDS.get(verb.rstrip(",.:"))
    if command is None:
        return False
    if hasattr(command, "commands") and rest:  # the word behind it is a verb too, or the sentence goes on
        inner = re.match(r"[a-z-]+", rest)
        command = COMMANDS.get(f"{verb} {inner.group()}") if inner else command
        if command is None:
            return False
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    return set(_OPTION.findall(re.split(r", |: | -- ", rest)[0])) <= known | {"--help", "-h"}


_FIELDS: dict[str, list[KnownField]] = {}
for each in known_fields():
    _FIELDS.setdefault(each.path, []).append(each)
_SECTIONS = "|".join(path for path, fields in _FIELDS.items() if fields[0].is_section and "." not in path)
_SETTING = re.compile(rf"(?<![\w./-])((?:{_SECTIONS})(?:\.[a-z_0-9]+)+)(?![\w(/*]|\.\w)(?: ?= ?([\w.-]*\w))?")
# Words that look like a key and are none: attributes of a communicator or a model.
_NO_KEYS = {"comm.rank", "comm.size", "comm.send", "comm.recv", "model.module"}


def unreadable_settings(text: str) -> list[str]:
    """Returns the keys of a text that no config has, and those with a value that they do not take."""
    found = [(path, value) for path, value in _SETTING.findall(text) if path not in _NO_KEYS]
    return [f"{path} = {value}" for path, value in found if path not in _FIELDS or not _can_be(value, path)]


def unreadable_fixes(text: str, *, typed: str) -> list[str]:
    """Returns what cannot be done of what was printed after a command; the user's own words may stand there too."""
    commands = [each for each in unreadable_commands(text) if each.split()[1] in COMMANDS]
    fixes = "\n".join(re.findall(r"^\s*(?:try|set|use|add|did you mean) .*", text, re.MULTILINE))
    return [each for each in commands if not each.startswith(typed)] + unreadable_settings(fixes)


def _can_be(value: str, path: str) -> bool:
    """Says whether a key takes a value that stands in a message; none stands for any."""
    if not value or FILLED in value:
        return True
    section, _, key = path.rpartition(".")
    choices = {choice for field in _FIELDS[path] for choice in field.choices}
    choices.update(section_kinds(section) if key == "kind" else ())
    types = {name for field in _FIELDS[path] for name in field.types}
    kinds = {"true": "boolean", "false": "boolean", "null": "null"}
    if value in kinds:
        return kinds[value] in types
    if re.fullmatch(r"[\d.e]+", value):
        return "number" in types or (value.isdecimal() and "integer" in types)
    return value in choices or (not choices and "string" in types)
