"""What the shell offers on the Tab key besides verbs and options: configs, keys with their values, and runs.

Each function gets the word as it stands and returns words that continue it. Keys are offered section by section, as
folders are. Where one key is left, so are its values: a shell would put a space behind a single word.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import typer

_RUNS = "runs"
_ENDINGS = (".yaml", ".yml")
_MARKS = ("config.yaml", "records")  # of a run's folder


def complete_config(incomplete: str) -> Iterator[str]:
    """Yields configs that ship, by name, and files and folders that may hold one."""
    from paceline.config.shipped import shipped_configs

    yield from (name for name, path in shipped_configs().items() if path.suffix in _ENDINGS)
    for path in _beside(incomplete):
        if path.is_dir() or path.suffix in _ENDINGS:
            yield f"{path}/" if path.is_dir() else str(path)


def complete_override(context: typer.Context, incomplete: str) -> Iterator[tuple[str, str]]:
    """Yields keys of a config with what they mean, and values of one that is written out."""
    before = list(context.params.get("overrides") or ())
    if incomplete == "=" or before[-1:] == ["="]:  # bash takes key=value for three words
        key = before[-2] if before[-1:] == ["="] else before[-1]
        yield from ((value, meaning) for value, meaning in _values(key) if value or incomplete == "=")
        return
    key, sign, _ = incomplete.partition("=")
    if sign:
        yield from ((f"{key}={value}", meaning) for value, meaning in _values(key))
        return
    found = list(_keys(incomplete))
    while len(found) == 1 and found[0][0].endswith("."):
        found = list(_keys(found[0][0]))
    if len(found) == 1:
        key = found[0][0].removesuffix("=")
        found = [(f"{key}={value}", meaning) for value, meaning in _values(key)]
    yield from found


def complete_run(incomplete: str) -> Iterator[str]:
    """Yields the folders of runs in ``runs``, or in the folder that is being written."""
    places = [Path(_RUNS)] if "/" not in incomplete and Path(_RUNS).is_dir() else []
    found = itertools.chain(*(place.glob("[!.]*") for place in places), _beside(incomplete))
    yield from sorted({str(each) for each in found if any((each / mark).exists() for mark in _MARKS)})


def _beside(incomplete: str) -> Iterator[Path]:
    folder = Path(incomplete) if incomplete.endswith("/") else Path(incomplete).parent
    yield from sorted(folder.glob("[!.]*"))


def _keys(incomplete: str) -> Iterator[tuple[str, str]]:
    """Yields what continues a key up to the next dot, once each."""
    from paceline.config.schema import descriptions
    from paceline.config.suggest import known_paths

    for path, (owner, is_section) in known_paths().items():
        place, _, key = path.rpartition(".")
        if place == incomplete.rpartition(".")[0] and path.startswith(incomplete):
            yield f"{path}{'.' if is_section else '='}", descriptions()[owner][key]


def _values(key: str) -> Iterator[tuple[str, str]]:
    """Yields nothing, for a value of one's own, and the values that a key is known to take."""
    from paceline.config.suggest import known_fields

    for field in known_fields():
        if field.path == key and not field.is_section:
            known = [*field.choices, *(["true", "false"] if "boolean" in field.types else [])]
            default = [str(field.default)] if not known and isinstance(field.default, int | float | str) else []
            yield from ((value, field.description) for value in ("", *known, *default))
            return
