"""Options that other launchers have, such as ``--batch-size 32``: each becomes what to write here, with a note."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from paceline.errors import ConfigError, Problem, did_you_mean

_RULE = "what a run does is in its config, and changed by section.key=value after it"
_CONFIG = ("config", "config_file", "cfg")
_ENDINGS = (".yaml", ".yml")


def translate_options(words: Sequence[str], known: Sequence[str]) -> tuple[Path, list[str], list[str]]:
    """Returns the config and the overrides that words come to, and a line on each option that was translated.

    Raises ConfigError with an answer to each option that is neither ``known`` nor understood.
    """
    files: list[str] = []
    overrides: list[str] = []
    notes: list[str] = []
    problems: list[Problem] = []
    for option, value in _options(words):
        if not option:
            (overrides if files or _is_override(value) else files).append(value)
        elif option.strip("-") in _CONFIG and value:
            files.append(value)
        elif found := _translate(option, value):
            overrides += found
            notes.append(f"{option} {value}".strip() + f": read as {shlex.join(found)}")
        else:
            problems.append(_answer(option, value, known))
    if len(files) != 1:
        what = f"{' and '.join(files)} are configs" if files else "there is no config among the arguments"
        fix = "write paceline train configs/digits.yaml, and then the options"
        problems.append(Problem(what=what, rule="one config is the first argument", fix=fix))
    if problems:
        raise ConfigError(problems, source="paceline train")
    return Path(files[0]), overrides, notes


def _options(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yields options with their values, if any, and other words with no option."""
    waiting = list(words)
    while waiting:
        word = waiting.pop(0)
        name, separator, value = word.partition("=")
        if not word.startswith("-") or not word.strip("-"):
            yield "", word
            continue
        following = waiting[0] if waiting and not separator else "-"
        is_file = following.endswith(_ENDINGS) and name.strip("-") not in _CONFIG
        if not following.startswith("-") and "=" not in following and not is_file:
            value = waiting.pop(0)
        yield name, value


def _is_override(word: str) -> bool:
    return "=" in word and not word.endswith(_ENDINGS)


def _translate(option: str, value: str) -> list[str]:
    from paceline.config.translate import translate_setting

    found = translate_setting(option.strip("-"), value or True)
    return [f"{key}={setting}" for key, setting in found.items()]


def _answer(option: str, value: str, known: Sequence[str]) -> Problem:
    from paceline.config.suggest import suggest_keys

    what = f"{f'{option} {value}'.strip()} is not an option of train"
    if own := did_you_mean(option, known, cutoff=0.75):
        return Problem(what=what, rule=f"the options are {', '.join(known)}", fix=own)
    name = option.strip("-").replace("-", "_")
    found = [f"{key}={value or '...'}" for key in map(_settable, suggest_keys("", name, {})) if key]
    fix = f"write {' or '.join(found)}" if found else "leave it out, or find its key: paceline config explain CONFIG"
    return Problem(what=what, rule=_RULE, fix=fix)


def _settable(key: str) -> str:
    """Returns a key that one word can set: of a section its kind, or nothing where it has none."""
    if key in ("model", "data", "optim"):
        return f"{key}.kind"
    return key if "." in key or key == "name" else ""
