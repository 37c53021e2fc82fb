"""The reference of the command line, from its own declarations: every verb with arguments, options and examples."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main

from paceline.cli.app import app
from reference_text import NOTE, code, prose, table

INTRODUCTION = """\
Every verb of `paceline`, as `paceline VERB --help` shows it. CONFIG is a YAML file; SECTION.KEY=VALUE overrides one of
its [keys](config.md). Exit codes are listed in [Deployment](../deployment.md#exit-codes-for-schedulers)."""


def cli_page() -> str:
    """Returns the page."""
    root = typer.main.get_command(app)
    lines = ["# Command line", "", NOTE, "", INTRODUCTION, ""]
    lines += table(("verb", "what it does"), (_entry(path, command) for path, command in verbs(root, ("paceline",))))
    for name, command in root.commands.items():
        lines += _verb((root.name, name), command, level=2)
    return "\n".join(lines).rstrip() + "\n"


def verbs(command: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields every verb that can be called, with the words that call it."""
    if not hasattr(command, "commands"):
        yield path, command
        return
    for name, inner in command.commands.items():
        yield from verbs(inner, (*path, name))


def _entry(path: tuple[str, ...], command: Any) -> tuple[str, str]:
    words = " ".join(path)
    return f"[{words}](#{words.replace(' ', '-')})", prose(_description(command)[0])


def _verb(path: tuple[str, ...], command: Any, level: int) -> Iterator[str]:
    description = _description(command)
    yield from [f"{'#' * level} {' '.join(path)}", ""]
    for paragraph in description:
        yield from [prose(paragraph), ""]
    if hasattr(command, "commands"):
        for name, inner in command.commands.items():
            yield from _verb((*path, name), inner, level + 1)
        return
    yield from ["```text", _usage(path, command), "```", ""]
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    options = [each for each in command.params if each.param_type_name == "option" and not each.hidden]
    if arguments:
        yield from table(
            ("argument", "meaning"), ((code(_metavar(each)), prose(each.help or "")) for each in arguments)
        )
    if options:
        yield from table(("option", "default", "meaning"), (_option(each) for each in options))
    yield from _examples(command)


def _usage(path: tuple[str, ...], command: Any) -> str:
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    words = [_metavar(each) if each.required else f"[{_metavar(each)}]" for each in arguments]
    words = [word + (" ..." if each.nargs == -1 else "") for word, each in zip(words, arguments, strict=True)]
    has_options = any(each.param_type_name == "option" for each in command.params)
    return " ".join([*path, *words, *(["[OPTIONS]"] if has_options else [])])


def _metavar(parameter: Any) -> str:
    return (parameter.metavar or parameter.name.upper()).strip("[].")  # typer's own marks of a list


def _option(option: Any) -> tuple[str, str, str]:
    names = ", ".join([*option.opts, *option.secondary_opts])
    value = "" if option.is_flag else " " + (option.metavar or _kind(option))
    return code(names + value), _default(option), prose(option.help or "")


def _kind(option: Any) -> str:
    kinds: dict[Any, str] = {int: "N", float: "X", Path: "PATH", "integer": "N", "float": "X", "path": "PATH"}
    described = getattr(option, "type_descriptor", None)  # before typer 0.29 the type itself has a name
    return kinds.get(described.annotation if described else option.type.name.removesuffix(" range"), "TEXT")


def _default(option: Any) -> str:
    value = option.default
    if value == sys.executable:
        return "the Python of this command"
    if value is None or value is False or callable(value) or repr(value) in ("[]", "()", "Sentinel.UNSET"):
        return "*required*" if option.required else ""
    return code(str(value))


def _parts(command: Any) -> tuple[str, str]:
    text, _, examples = inspect.cleandoc(command.help or "").partition("Examples:")
    return text, examples


def _description(command: Any) -> list[str]:
    """Returns the paragraphs of the help before its examples."""
    return [part for part in re.split(r"\n\s*\n", _parts(command)[0].replace("\b", "")) if part.strip()]


def _examples(command: Any) -> Iterator[str]:
    lines = [line.strip() for line in _parts(command)[1].splitlines() if line.strip()]
    if lines:
        yield from ["```shell", *lines, "```", ""]
