"""The recipes of CONTRIBUTING.md use names that the files which they change have."""

from __future__ import annotations

import ast
import builtins
import importlib
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
_FENCE = re.compile(r"^ *```python\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


def steps() -> Iterator[tuple[str, str]]:
    """Yields the blocks of Python in the recipes, each with the file that its step names; "" for a new one."""
    for step in re.split(r"^(?=\d+\. )", TEXT, flags=re.MULTILINE):
        path = re.match(r"\d+\. In `((?:src|tests)/[\w./]+\.py)`", step)
        for block in _FENCE.finditer(step):
            yield "" if path is None else path[1], textwrap.dedent(block[1])


def parse(block: str) -> ast.Module:
    """Reads statements, entries of a dict, or cases of a match."""
    for whole in (block, f"{{\n{block}}}", f"match None:\n{textwrap.indent(block, '    ')}"):
        try:
            return ast.parse(whole)
        except SyntaxError:
            continue
    raise AssertionError(f"this is no Python:\n{block}")


def names_from_outside(tree: ast.Module) -> set[str]:
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    stored = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    arguments = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    return used - stored - arguments - defined - set(dir(builtins))


RECIPES = list(steps())
OWN = {name for _, block in RECIPES for name in re.findall(r"(?:def|class) (\w+)", block)}


@pytest.mark.parametrize("number", range(len(RECIPES)))
def test_names_of_a_step_are_in_its_file(number: int) -> None:
    path, block = RECIPES[number]
    tree = parse(block)
    if path:
        text = (ROOT / path).read_text(encoding="utf-8")
        assert not [name for name in sorted(names_from_outside(tree) - OWN) if not re.search(rf"\b{name}\b", text)]
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module != "__future__":
            module = importlib.import_module(node.module)
            assert not [alias.name for alias in node.names if not hasattr(module, alias.name)]


def test_names_in_the_text_are_in_the_code() -> None:
    files = [path for room in ("src", "tests") for path in (ROOT / room).rglob("*.py")]
    known = {word for path in files for word in re.findall(r"\w+", path.read_text())}
    prose = _FENCE.sub("", TEXT)
    names = {name for name in re.findall(r"`(_?[A-Za-z]\w+(?:\.[a-z]\w+)?)`", prose) if re.search(r"[_A-Z]", name)}
    unknown = [name for name in names - OWN if name.rpartition(".")[2] not in known]
    assert not [name for name in sorted(unknown) if name not in ("BEFORE", "AFTER")]
