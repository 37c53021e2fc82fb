"""What the docs say can be run: their Python, their commands, and the names, files and keys that they mention.

The Python blocks of a page run from top to bottom in one namespace, as a reader would type them. A block of text right
behind one is what it prints. Commands are read by the command line's own parser, and their overrides by the config's.
"""

from __future__ import annotations

import functools
import json
import re
import shlex
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml
from pydantic import BaseModel

from paceline.cli.app import app
from paceline.comm.base import Communicator
from paceline.config import Config, load_config

ROOT = Path(__file__).parents[2]
FILES = [*ROOT.glob("docs/*.md"), *ROOT.glob("docs/learn/*.md"), ROOT / "README.md"]
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in FILES)
# The README's are parts of programs; the lessons' run as notebooks, in tests/learn/test_notebooks.py.
EXAMPLES = [page for page in PAGES if page != "README.md" and not re.match(r"docs/learn/\d+-", page)]

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_QUOTED = re.compile(r"`([^`\n]+)`")


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A block of Python: where it begins on its page, and what the page says that it prints; None: nothing is said."""

    line: int
    source: str
    printed: str | None


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def examples_of(text: str) -> list[Example]:
    found: list[Example] = []
    blocks = list(_FENCE.finditer(text))
    for number, block in enumerate(blocks):
        if block[1] != "python":
            continue
        after = blocks[number + 1] if number + 1 < len(blocks) else None
        follows = after is not None and after[1] == "text" and not text[block.end() : after.start()].strip()
        printed = after[2] if after is not None and follows else None
        found.append(Example(line=text[: block.start(2)].count("\n"), source=block[2], printed=printed))
    return found


def prose_of(text: str) -> str:
    return _FENCE.sub("", text)


def commands_of(text: str) -> list[str]:
    """Returns what a reader would type, in blocks and in the text, without what stands behind it as a remark."""
    prose = prose_of(text)
    lines = [line.strip() for line in prose.splitlines() if line.startswith("    ")]
    lines += [" ".join(each.split()) for each in re.findall(r"`(paceline [^`]*)`", prose)]
    return [re.split(r"\s{2,}| #", line)[0] for line in lines if line.startswith("paceline ")]


@pytest.mark.parametrize("page", [page for page in EXAMPLES if examples_of(read(page))])
def test_the_examples_of_a_page_run(
    page: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    module = types.ModuleType(f"docs_{Path(page).stem.replace('-', '_')}")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # where dataclasses look for their own module
    for example in examples_of(read(page)):
        where = "\n" * example.line + example.source  # so that a traceback names the line of the page
        exec(compile(where, str(ROOT / page), "exec"), vars(module))
        printed = capsys.readouterr().out
        if example.printed is not None:
            assert printed == example.printed, f"{page}:{example.line}"


@functools.cache
def whole_command() -> Any:
    """Builds the command line, which takes a quarter of a second, once."""
    return typer.main.get_command(app)


def parameters_of(words: list[str]) -> dict[str, Any]:
    """Parses a command without running it. Raises what the command line raises for a call that it cannot read."""
    command: Any = whole_command()
    if words[0].startswith("-"):  # an option of the whole, which would act
        assert words[0] in {each for parameter in command.params for each in parameter.opts}
        return {}
    while hasattr(command, "commands") and words:
        if words[0] not in command.commands and "start" in command.commands:  # paceline launch CONFIG
            words = ["start", *words]
        name, *words = words
        command = command.commands[name]
    parameters: dict[str, Any] = command.make_context(command.name, words).params if words else {}  # a verb's name
    return parameters


@pytest.mark.parametrize("page", [page for page in PAGES if commands_of(read(page))])
def test_commands_can_be_read(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for line in commands_of(read(page)):
        _, *words = shlex.split(line.partition(" > ")[0].replace("FILE", "configs/digits.yaml"))
        given = parameters_of(words)
        if str(given.get("config")).endswith(".yaml"):
            load_config(Path(given["config"]), list(given.get("overrides") or []))


@pytest.mark.parametrize("page", [page for page in EXAMPLES if "```yaml" in read(page)])
def test_parts_of_configs_can_be_read(page: str) -> None:
    for block in _FENCE.finditer(read(page)):
        if block[1] == "yaml":
            sections = yaml.safe_load(block[2])
            overrides = [
                f"{s}.{key}={json.dumps(value)}" for s, keys in sections.items() for key, value in keys.items()
            ]
            load_config(ROOT / "configs" / "gpt_fsdp.yaml", overrides)


# Names.


@cache
def source() -> str:
    return "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "src").rglob("*.py")))


def quoted(page: str) -> list[str]:
    return _QUOTED.findall(prose_of(read(page)))


@pytest.mark.parametrize("page", [*PAGES, "CONTRIBUTING.md"])
def test_files_that_are_named_exist(page: str) -> None:
    folders = (ROOT, ROOT / "src", ROOT / "src" / "paceline", ROOT / "bench")
    names = [name for name in quoted(page) if re.fullmatch(r"[\w./-]+\.(py|yaml|md)", name)]
    written = {"config.yaml", "train.py", "same.py"}  # by a run, by the reader
    missing = [name for name in names if name not in written and not any((f / name).is_file() for f in folders)]
    assert not missing
    links = re.findall(r"\]\(([^)#]+)(?:#[\w-]+)?\)", read(page))
    assert not [link for link in links if "://" not in link and not ((ROOT / page).parent / link).exists()]


@pytest.mark.parametrize("page", PAGES)
def test_private_names_that_are_named_exist(page: str) -> None:
    names = {name for name in quoted(page) if re.fullmatch(r"_[a-z]\w+", name)}
    assert not [name for name in names if not re.search(rf"\b(def {name}\(|self\.{name}\b)", source())]


def keys_of(model: type[BaseModel]) -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield name
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from (f"{name}.{key}" for key in keys_of(inner))


@pytest.mark.parametrize("page", PAGES)
def test_keys_of_the_config_that_are_named_exist(page: str) -> None:
    verbs = {f"comm.{name}" for name in (*vars(Communicator), *Communicator.__annotations__)}  # of a communicator
    known = set(keys_of(Config)) | verbs
    sections = ("parallel", "memory", "comm", "optim", "train", "checkpoint", "monitor")
    pattern = re.compile(rf"((?:{'|'.join(sections)})\.[a-z_.]+)\b(?: ?[:=].*)?")
    named = [found[1] for name in quoted(page) if (found := pattern.fullmatch(name))]
    assert not [key for key in named if key not in known and not key.endswith(".py")]
