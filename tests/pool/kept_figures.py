"""Figures that are kept in a file beside their test: a change that moves one must mean to.

A test file ``test_kept_THING.py`` has a function ``figures()``, which computes them through public functions: names to
numbers, texts, sequences, mappings and dataclasses. ``assert_kept`` compares them with ``kept_THING.json``, numbers to
a relative 1e-9 or an absolute 1e-12: Python 3.12 adds up floats more exactly than 3.11, which shows in the small
difference of two sums. Where a change is meant, ``PACELINE_KEEP=1 pytest tests/ROOM/test_kept_*`` writes the files
anew; read the difference before you commit it.

Figures are the same on every machine, and under every version of torch: no times that were measured, no paths.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, TypeAlias

from paceline.errors import PacelineError

Leaf: TypeAlias = float | int | str | bool | None
RELATIVE, ABSOLUTE = 1e-9, 1e-12
_MOST_TOLD, _MOST_CHARACTERS = 8, 400


def assert_kept(test_file: str, figures: Mapping[str, object]) -> None:
    """Fails where figures are not those of the file beside the test; says which moved, from what to what."""
    path, found = kept_path(Path(test_file)), flat_figures(figures)
    if os.environ.get("PACELINE_KEEP"):
        keep(Path(test_file), figures)
    kept = read_kept(path)
    moved = [
        f"  {case} {name}: {shown(kept[case], name)} -> {shown(found[case], name)}"
        for case in kept.keys() & found.keys()
        for name in sorted(kept[case].keys() | found[case].keys())
        if not is_same(kept[case].get(name, _ABSENT), found[case].get(name, _ABSENT))
    ]
    moved += [f"  {case}: is not in {path.name}" for case in sorted(found.keys() - kept.keys())]
    moved += [f"  {case}: is in {path.name} alone" for case in sorted(kept.keys() - found.keys())]
    if moved:
        more = [f"  and {len(moved) - _MOST_TOLD} more"] if len(moved) > _MOST_TOLD else []
        command = f"PACELINE_KEEP=1 python -m pytest -q tests/{Path(test_file).parent.name}/{Path(test_file).name}"
        told = [f"{len(moved)} figures are not as they were kept:", *sorted(moved)[:_MOST_TOLD], *more]
        raise AssertionError("\n".join([*told, f"where the change is meant, keep the new ones: {command}"]))


def keep(test_file: Path, figures: Mapping[str, object]) -> Path:
    """Writes figures to the file beside their test, a case on each line."""
    path = kept_path(test_file)
    lines = [f"{json.dumps(case)}: {json.dumps(values)}" for case, values in flat_figures(figures).items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    return path


def kept_path(test_file: Path) -> Path:
    return test_file.with_name(test_file.name.removeprefix("test_")).with_suffix(".json")


def read_kept(path: Path) -> dict[str, dict[str, Leaf]]:
    found: dict[str, dict[str, Leaf]] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found


def told(call: Callable[[], object]) -> object:
    """Returns what a call returns; of one that is refused, the words."""
    try:
        return call()
    except PacelineError as error:
        return f"refused: {error}"


def through_json(value: object) -> object:
    """Returns a value as a file would have it; fails for one that no file can have."""
    return json.loads(json.dumps(value))


def flat_figures(figures: Mapping[str, object]) -> dict[str, dict[str, Leaf]]:
    return {case: dict(_leaves(value, "")) for case, value in figures.items()}


def is_same(one: object, other: object) -> bool:
    if isinstance(one, float | int) and isinstance(other, float | int) and not isinstance(one, bool):
        return math.isclose(one, other, rel_tol=RELATIVE, abs_tol=ABSOLUTE)
    return one == other


def shown(values: Mapping[str, Leaf], name: str) -> str:
    return repr(values[name])[:_MOST_CHARACTERS] if name in values else "nothing"


_ABSENT = object()


def _leaves(value: object, name: str) -> Iterator[tuple[str, Leaf]]:
    """Iterates over what a value is made of: items, fields of dataclasses, and what their properties say."""
    if isinstance(value, Enum):
        value = value.value
    if value is None or isinstance(value, str | bool | int):
        yield name, value
    elif isinstance(value, float):
        yield name, (str(value) if not math.isfinite(value) else float(f"{value:.12g}"))
    elif isinstance(value, Mapping):
        yield from _all(((str(key), each) for key, each in value.items()), name)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from _all(_parts(value), name)
    elif isinstance(value, set | frozenset):
        yield from _all(((str(place), each) for place, each in enumerate(sorted(value))), name)
    elif isinstance(value, tuple | list):
        if all(isinstance(each, int) and not isinstance(each, bool) for each in value):
            yield name, " ".join(map(str, value))
        else:
            yield from _all(((str(place), each) for place, each in enumerate(value)), name)
    else:
        raise TypeError(f"{name or 'a figure'} is a {type(value).__name__}: give its numbers")


def _all(parts: Iterator[tuple[str, object]], name: str) -> Iterator[tuple[str, Leaf]]:
    for key, each in parts:
        yield from _leaves(each, f"{name}.{key}" if name else key)


def _parts(value: Any) -> Iterator[tuple[str, object]]:
    """Iterates over a dataclass's fields, and its own properties that are numbers or texts."""
    names = {field.name for field in dataclasses.fields(value)}
    yield from ((name, getattr(value, name)) for name in sorted(names))
    for kind in reversed(type(value).__mro__):
        for name, member in vars(kind).items():
            if isinstance(member, property) and not name.startswith("_") and name not in names:
                with contextlib.suppress(ZeroDivisionError):  # heads of a model that has none
                    found = getattr(value, name)
                    if isinstance(found, float | int | str):
                        yield name, found
