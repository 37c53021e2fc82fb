"""Options that other launchers have, such as ``--batch-size 32``: each is answered with what to write here."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from paceline.errors import ConfigError, Problem

_RULE = "what a run does is in its config, and changed by section.key=value after it"


_NEEDED = {"memory.offload": "parallel.strategy=fsdp"}  # what a setting does not go without


def refuse_options(words: Sequence[str], known: Sequence[str]) -> None:
    """Raises ConfigError with what to write in place of each option among the words that is not ``known``.

    The first word is the config, if it is no option: what is proposed goes with it.
    """
    problems = [_answer(name, value, known, words) for name, value in _options(words)]
    if problems:
        raise ConfigError(problems, source="paceline train")


def _options(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yields options and their values; nothing where the next word is an option or an override."""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word.startswith("-") and word.strip("-"):
            name, separator, value = word.partition("=")
            is_value = not separator and not following.startswith("-") and "=" not in following
            yield name, following if is_value else value


def _answer(option: str, value: str, known: Sequence[str], words: Sequence[str]) -> Problem:
    from paceline.config.aliases import meant_by
    from paceline.config.suggest import suggest_keys

    name, shown = option.strip("-").replace("-", "_"), f"{option} {value}".strip()
    what = f"{shown} is not an option of train"
    if name in ("config", "config_file", "cfg"):
        fix = f"write paceline train {value or 'CONFIG'}"
        return Problem(what=what, rule="the config is the first argument", fix=fix)
    found = [f"{key}={setting}" for key, setting in meant_by(name, value or True)]
    own = difflib.get_close_matches(option, known, n=1, cutoff=0.75)
    if own and not found:
        return Problem(what=what, rule=f"the options are {', '.join(known)}", fix=f"did you mean {own[0]}?")
    found = found or [f"{key}={value or '...'}" for key in map(_settable, suggest_keys("", name, {})) if key]
    accepted, refusal = _accepted(words, found) if value or "=..." not in "".join(found) else (found, "")
    if refusal:
        return Problem(what=what, rule=refusal, fix="leave it out")
    fix = (
        f"write {' or '.join(accepted)}"
        if accepted
        else "leave it out, or find its key: paceline config explain CONFIG"
    )
    return Problem(what=what, rule=_RULE, fix=fix)


def _accepted(words: Sequence[str], settings: Sequence[str]) -> tuple[list[str], str]:
    """Returns the settings that the config takes, as a shell reads them; where it takes none, why."""
    from paceline.config import load_config

    path, found, refusal = Path(words[0]), [], ""
    overrides = [word for word in words[1:] if "=" in word and not word.startswith("-")]
    for setting in settings:
        needed = _NEEDED.get(setting.partition("=")[0])
        for way in [[setting], *([[needed, setting]] if needed else [])]:
            try:
                if path.is_file():
                    load_config(path, [*overrides, *way])
            except ConfigError as error:
                refusal = refusal or "; ".join(filter(None, (error.problems[0].what, error.problems[0].rule)))
                continue
            found.append(shlex.join(way))
            break
    return found, "" if found else refusal


def _settable(key: str) -> str:
    """Returns a key that one word can set: of a section its kind, or nothing where it has none."""
    if key in ("model", "data", "optim"):
        return f"{key}.kind"
    return key if "." in key or key == "name" else ""
