"""Suggests the key or the file that was meant by one that does not exist."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from paceline.bounded_yaml import load_shipped
from paceline.config.fields import KnownField, fields_at, known_fields
from paceline.config.settings import nccl_variables


@cache
def other_names() -> dict[str, Any]:
    """Returns what other frameworks call keys, kinds of sections and values."""
    return dict(load_shipped((Path(__file__).parent / "other_names.yaml").read_text(encoding="utf-8")))


def key_called(word: str) -> str | None:
    """Returns the key that others call so: by their own names, or by a variable of NCCL, in full or without NCCL_."""
    names = {name: key for key, theirs in other_names()["keys"].items() for name in theirs.split()}
    row = nccl_variables().get(f"NCCL_{word.removeprefix('nccl_')}".upper())
    return names.get(word) or (f"comm.nccl.{row['key']}" if row else None)


def suggest_keys(place: str, key: str, kinds: Mapping[str, str | None]) -> list[str]:
    """Returns up to three keys that may have been meant, the likeliest first.

    In order: the same key here but for case, hyphens and a plural, the same key in another section, the name that other
    frameworks use, a like key here, a like key elsewhere. ``kinds`` tells the chosen kind of model and data.
    """
    wanted = key.lower().replace("-", "_")
    here = fields_at(place, kinds.get(place))
    elsewhere = [each for each in known_fields() if each not in here]
    found = [each.path for each in here if each.key in (wanted, f"{wanted}s")]
    # A field whose default is another one's value is the less likely.
    same = [each for each in elsewhere if each.key == wanted and each.key != "kind"]
    found += _texts(sorted(same, key=_is_derived), kinds)
    alias = key_called(wanted)
    if alias is not None:
        found += _texts((each for each in known_fields() if each.path == alias), kinds)
    found += [f"{place}.{each}" if place else each for each in _near(wanted, [field.key for field in here], cutoff=0.6)]
    if not found:
        near = set(_near(wanted, [field.key for field in elsewhere], cutoff=0.7))
        found = _texts((each for each in elsewhere if each.key in near), kinds)
    return list(dict.fromkeys(found))[:3]


def same_key(word: str) -> str | None:
    """Returns the key that a word names: one of ours but for its section, or by the name that others have for it."""
    wanted = word.lower().replace("-", "_")
    same = sorted((each for each in known_fields() if each.key == wanted and wanted != "kind"), key=_is_derived)
    return key_called(wanted) or (same[0].path if same else None)


def _is_derived(field: KnownField) -> bool:
    return field.default is None  # such as data.seed, which follows train.seed


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """Returns the choice that is most like a word, or ``None`` when none is."""
    return next(iter(_near(word.lower().replace("-", "_"), choices, cutoff=0.5)), None)


def _near(word: str, choices: Iterable[str], cutoff: float) -> list[str]:
    plain = {choice.lower().replace("-", "_"): choice for choice in choices}
    return [plain[match] for match in difflib.get_close_matches(word, plain, n=1, cutoff=cutoff)]


def _texts(fields: Iterable[KnownField], kinds: Mapping[str, str | None]) -> list[str]:
    """Writes each field's path once; with the kind that has it, where the chosen kind has it not."""
    by_path: dict[str, list[str | None]] = {}
    for each in fields:
        by_path.setdefault(each.path, []).append(each.kind)
    texts = []
    for path, owners in by_path.items():
        section = path.partition(".")[0]
        is_there = None in owners or kinds.get(section) in (None, *owners)
        texts.append(path if is_there else f"{path} (of {section}.kind = {' or '.join(map(str, owners))})")
    return texts


def near_files(path: Path) -> list[str]:
    """Returns up to three files that may have been meant by a path that does not exist.

    They have a like name in the same folder or in its folder ``configs``; this name comes first.
    """
    found = []
    for folder in (path.parent, path.parent / "configs"):
        names = [each.name for each in folder.glob("*") if each.is_file()]
        found += [folder / name for name in difflib.get_close_matches(path.name, names, n=3, cutoff=0.7)]
    return [str(each) for each in sorted(found, key=lambda each: each.name != path.name)][:3]


def near_folders(path: Path) -> str:
    """Asks for the folder that may have been meant by a path that does not exist, in the words of a fix.

    Folders beside the first part that is missing are looked at, and those of ``runs``: a run may be named alone.
    Empty where the path exists, and where there is no folder.
    """
    missing = path
    while not missing.parent.exists():
        missing = missing.parent
    if path.exists():
        return ""
    places = [missing.parent, *([missing.parent / "runs"] if missing.parent == Path() else [])]
    near, others = [], []
    for place in places:
        names = sorted(each.name for each in place.glob("[!.]*") if each.is_dir())
        alike = difflib.get_close_matches(missing.name, names, n=3, cutoff=0.6)
        found = [place / name / path.relative_to(missing) for name in alike]
        near += [str(each if each.exists() else place / name) for each, name in zip(found, alike, strict=True)]
        others += [str(place / name) for name in names] if (place.name, missing) == ("runs", path) else []
    if near:
        return f"did you mean {' or '.join(near[:3])}?"
    return f"there are {', '.join(others[:8])}" if others else ""
