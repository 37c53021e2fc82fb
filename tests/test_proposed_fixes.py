"""What our messages propose can be done: every command, option, config key, value and name in them is there.

A message is found in the source, whether a test ever brings it up or not: each string that is no docstring, with
``VALUE`` in the place of what is filled in. Fixes of the config's rules depend on the values that were given: the tests
of the rules paste them (``tests/config``), and whatever a verb prints
in a test is read in the same way (``pool/command_runs.py``).
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from proposed_fixes import COMMANDS, FILLED, unreadable_commands, unreadable_fixes, unreadable_settings

import paceline

SOURCE = Path(__file__).parents[1] / "src" / "paceline"
PACKAGES = ("paceline", "paceline_bench", "paceline_classic", "paceline_course")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)

OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]+")
NAME = re.compile(r"(?<![\w./:])paceline\.([a-z_A-Z]+)(?=[(.\s,;:])(?!\.py)")
# Options of programs that are not ours, and rooms that write for such programs: sbatch, kubectl, ssh, the compiler.
OTHERS = {
    "--standalone": "torchrun",
    "--nproc-per-node": "torchrun",
    "--master-port": "torchrun",
    "--shm-size": "docker",
    "--ulimit": "docker",
    "--ipc": "docker",
    "--install": "update-alternatives",
    "--speed": "python bench/links.py",
    "--dport": "iptables",
}
WRITE_FOR_OTHERS = ("paceline/launch/", "paceline/comm/shared/native/")


class Message(NamedTuple):
    """A string of the source, and where it stands."""

    place: str
    text: str


@functools.cache
def messages() -> tuple[Message, ...]:
    """All texts of the source; read when the first test asks."""
    return tuple(_messages())


def _messages() -> Iterator[Message]:
    for path in sorted(path for name in PACKAGES for path in SOURCE.with_name(name).rglob("*.py")):
        for node in strings_of(ast.parse(path.read_text())):
            text = text_of(node)
            if " " in text:
                yield Message(f"{path.relative_to(SOURCE.parent)}:{node.lineno}", text)


def strings_of(tree: ast.AST) -> Iterator[ast.Constant | ast.JoinedStr]:
    """Yields the strings of a module without docstrings; one that is filled in counts as a whole, not by its pieces."""
    left = [tree]
    while left:
        node = left.pop()
        parts = [part for name in node._fields for part in listed(getattr(node, name, None))]
        if isinstance(node, ast.Constant):
            yield node
        elif isinstance(node, ast.JoinedStr):
            yield node
            parts = [part for part in parts if not isinstance(part, ast.Constant)]
        elif isinstance(node, DOCUMENTED) and node.body and isinstance(node.body[0], ast.Expr):
            docstring = node.body[0].value
            parts = [part for part in parts if part is not node.body[0]]
            parts += [part for name in docstring._fields for part in listed(getattr(docstring, name, None))]
        left += parts


def listed(value: Any) -> list[ast.AST]:
    """The nodes that a field of a node holds; whether a name is read or written is none."""
    if isinstance(value, ast.AST):
        return [] if isinstance(value, ast.expr_context) else [value]
    return [each for each in value if isinstance(each, ast.AST)] if isinstance(value, list) else []


def text_of(node: ast.Constant | ast.JoinedStr) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(str(each.value) if isinstance(each, ast.Constant) else FILLED for each in node.values)
    return node.value if isinstance(node.value, str) else ""


def test_there_are_messages_to_look_at() -> None:
    assert len(messages()) > 3_000
    assert sum("paceline " in message.text for message in messages()) > 100


def test_every_command_that_a_message_names_is_read_by_paceline() -> None:
    assert [(place, command) for place, text in messages() for command in unreadable_commands(text)] == []


def test_every_key_that_a_message_names_is_in_the_schema_and_takes_the_value() -> None:
    assert [(place, setting) for place, text in messages() for setting in unreadable_settings(text)] == []


def test_every_option_that_a_message_names_is_an_option_of_some_command() -> None:
    known = {option for command in COMMANDS.values() for parameter in command.params for option in parameter.opts}
    known |= {
        each for command in COMMANDS.values() for parameter in command.params for each in parameter.secondary_opts
    }
    wrong = [
        f"{place}: {option}"
        for place, text in messages()
        if not place.startswith(WRITE_FOR_OTHERS)
        for option in OPTION.findall(text)
        if option not in {*known, *OTHERS, "--help"}
    ]
    assert wrong == []


def test_every_public_name_that_a_message_proposes_is_there() -> None:
    wrong = [
        f"{place}: paceline.{name}"
        for place, text in messages()
        for name in NAME.findall(text)
        if not hasattr(paceline, name) and not (SOURCE / name).is_dir() and not (SOURCE / f"{name}.py").is_file()
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("try paceline train CONFIG --resume auto, or leave it", []),
        ("see paceline report", []),
        ("paceline trian CONFIG", ["paceline trian CONFIG"]),
        ("look: paceline train CONFIG --resumes auto", ["paceline train CONFIG --resumes auto"]),
        ("paceline checkpoint lst runs/a", ["paceline checkpoint lst runs/a"]),
        ("paceline checkpoint inspect VALUE (of rank 3)", []),
    ],
)
def test_a_command_that_cannot_be_read_is_noticed(text: str, found: list[str]) -> None:
    assert unreadable_commands(text) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("set parallel.strategy = fsdp, train.steps=3, or memory.offload = VALUE", []),
        ("set parallel.strategies = fsdp", ["parallel.strategies = fsdp"]),
        ("set parallel.strategy = zero4.", ["parallel.strategy = zero4"]),
        ("set train.steps = many", ["train.steps = many"]),
        ("set model.kind = gpt or model.kind = gtp", ["model.kind = gtp"]),
    ],
)
def test_a_setting_that_the_config_does_not_take_is_noticed(text: str, found: list[str]) -> None:
    assert unreadable_settings(text) == found


def test_of_what_a_command_printed_only_what_it_proposes_counts() -> None:
    printed = "train.stepz = 3: no such key\n  try train.steps = many\npaceline report --of a: no such option\n"
    assert unreadable_fixes(printed, typed="paceline report --of") == ["train.steps = many"]
    assert unreadable_fixes(printed, typed="paceline train") == [
        "paceline report --of a: no such option",
        "train.steps = many",
    ]
