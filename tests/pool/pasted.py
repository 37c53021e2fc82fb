"""What the fix of a message proposes, as overrides that can be pasted behind a command."""

from __future__ import annotations

import re
from itertools import product

from paceline.config import Config, load_config
from paceline.errors import ConfigError, Problem

_SECTIONS = "|".join(Config.model_fields)
_VALUE = r"(?:\[[^\]]*\]|\{[^}]*\}|[^\s,;()?]+)"
# section.key = value, with other values of the same key behind it: parallel.strategy = zero1 or fsdp
_SETTING = re.compile(rf"\b((?:{_SECTIONS})(?:\.\w+)*) = ({_VALUE}(?: or (?!\w+[. ]){_VALUE}| or \w+(?=$|[,;]| \())*)")
_REMOVED = re.compile(rf"remove ((?:{_SECTIONS})(?:\.\w+)+(?: and (?:{_SECTIONS})(?:\.\w+)+)*)")
_UNFINISHED = re.compile(r" with an? \w+ for each")  # something that only the user can add


def proposals(fix: str) -> list[list[str]]:
    """Returns the overrides of each way that a fix names; ``and`` joins those that belong together."""
    found: list[list[str]] = []
    for way in re.split(r"[;,] or |; |, (?!and )(?![^\[{]*[\]}])", fix):  # no comma inside brackets
        removed = [f"{key}=null" for names in _REMOVED.findall(way) for key in names.split(" and ")]
        choices = [[f"{key}={value}" for value in values.split(" or ")] for key, values in _SETTING.findall(way)]
        if (choices or removed) and not _UNFINISHED.search(way):
            found += [[*removed, *chosen] for chosen in product(*choices)]
    return found


def refused_when_pasted(overrides: list[str]) -> list[str]:
    """Pastes what the problems of a config propose, one way at a time; returns what is refused then that was not."""
    problems, refused = problems_of(overrides), []
    for problem in problems:
        others = {each.what for each in problems} - {problem.what}
        for pasted in proposals(problem.fix):
            left = [each.what for each in problems_of([*overrides, *pasted]) if each.what not in others]
            refused += [f"{problem.what}: {problem.fix}: pasted {' '.join(pasted)}: {what}" for what in left]
    return refused


def problems_of(overrides: list[str]) -> list[Problem]:
    """Returns all problems of a config that is given by overrides alone."""
    try:
        load_config(None, overrides)
    except ConfigError as error:
        return error.problems
    return []
