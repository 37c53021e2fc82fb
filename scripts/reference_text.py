"""Pieces of Markdown that the reference pages share."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

NOTE = "<!-- Made by scripts/make_reference.py from the code. Change the code, then run the script. -->"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Returns the lines of a table, and an empty line after it."""
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(cells) + " |" for cells in lines] + [""]


def prose(text: str) -> str:
    """Returns plain text as Markdown that shows it: nothing in it is read as markup but quoted code."""
    parts = re.split(r"(`[^`]+`)", " ".join(text.split()))
    return "".join(
        _cell_code(part) if part.startswith("`") else re.sub(r"([*<>|\[\]])", r"\\\1", part) for part in parts
    )


def code(text: str) -> str:
    """Returns a value as code that may stand in a cell of a table."""
    return _cell_code(f"`{text}`")


def _cell_code(text: str) -> str:
    return text.replace("|", r"\|")


def docstring(text: str | None) -> list[str]:
    """Returns a docstring as Markdown: its double quotes of code become single ones, its parts stay."""
    return re.sub(r"``([^`]+)``", r"`\1`", text or "").strip().splitlines()
