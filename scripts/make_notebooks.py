"""Makes the notebooks of the course from its pages; ``--check`` says which are not current.

python scripts/make_notebooks.py

A page ``docs/learn/N-name.md`` becomes ``notebooks/learn-N-name.ipynb``. Text becomes cells of text, a block of Python
a cell of code, and a block of text right behind one a cell that shows what the code prints. The lines that check an
answer (``paceline learn check 1.2 ANSWER``) become a cell in which the reader puts the answer in place of three dots.
The same pages give the same bytes.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs" / "learn"
NOTEBOOKS = ROOT / "notebooks"
EXPECTED_TAG = "expected-output"
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```[ ]*\n?", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(\]\(|src=\")(?!\w+://|#|mailto:)([^)\"#\s]+)")
_PAGE_NAME = re.compile(r"\d+-[\w-]+\.md")
_CHECK = re.compile(r"(?:learn check |learn\.check\(\")(\d+\.\d+)")
_CHECK_LINE = re.compile(r"\s*(?:\$ )?(?:paceline learn (?:check|hint) |learn\.check\(|from paceline import learn$)")
_CHECK_SENTENCE = re.compile(r"In Python: `learn\.check\([^`]*\)`(?:, after `from paceline import learn`)?\.")
_FUNCTION = re.compile(r"learn\.check\(\"(\d+\.\d+)\", (\w+)\)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A cell: its kind, what it holds, and whether it shows what the cell of code before it prints."""

    kind: Literal["markdown", "code"]
    text: str
    is_expected: bool = False


def cells_of(page: str) -> list[Cell]:
    """Returns the cells of a page, in its order."""
    checked_in_code = {number for block in _FENCE.finditer(page) for number in _CHECK.findall(block[2])}
    functions = {number: name for number, name in _FUNCTION.findall(page) if name != "answer"}
    cells: list[Cell] = []
    text, end = "", 0
    for block in _FENCE.finditer(page):
        between = page[end : block.start()]
        text, end = text + between, block.end()
        follows_code = bool(cells) and cells[-1].kind == "code" and not text.strip()
        if block[1] == "python":
            cells += text_cells(text, checked_in_code, functions)
            cells.append(Cell(kind="code", text=block[2].rstrip("\n")))
            text = ""
        elif block[1] == "text" and follows_code:
            cells.append(Cell(kind="markdown", text=f"It prints:\n\n{block[0].rstrip()}", is_expected=True))
            text = ""
        else:
            text += block[0]
    return cells + text_cells(text + page[end:], checked_in_code, functions)


def text_cells(text: str, checked_in_code: set[str], functions: dict[str, str]) -> list[Cell]:
    """Returns text as cells, with a cell of code behind the paragraph that says how to check an exercise.

    ``functions`` has the names of functions that exercises ask for, by number.
    """
    cells: list[Cell] = []
    held: list[str] = []
    waiting: list[str] = []
    done = set(checked_in_code)
    depth = 0
    for paragraph in paragraphs_of(text):
        numbers = [each for each in dict.fromkeys(_CHECK.findall(paragraph)) if each not in done]
        waiting += numbers
        done |= set(numbers)
        if not only_checks(paragraph):
            held.append(paragraph)
        depth += paragraph.count("<details") - paragraph.count("</details>")
        if waiting and depth <= 0:  # a folded part stays in one cell
            cells += text_cell(held)
            cells += [answer_cell(number, functions.get(number)) for number in waiting]
            held, waiting = [], []
    return cells + text_cell(held) + [answer_cell(number, functions.get(number)) for number in waiting]


def paragraphs_of(text: str) -> list[str]:
    """Splits text at empty lines, but not inside of a fence."""
    parts: list[str] = []
    is_open = False
    for part in re.split(r"\n[ \t]*\n", text):
        if is_open:
            parts[-1] += "\n\n" + part
        else:
            parts.append(part)
        is_open ^= len(re.findall(r"^```", part, re.MULTILINE)) % 2 == 1
    return [part.strip("\n") for part in parts if part.strip()]


def only_checks(paragraph: str) -> bool:
    """Says whether a paragraph says how to check an answer, and nothing else."""
    if _CHECK_SENTENCE.fullmatch(paragraph):
        return True
    lines = [line for line in paragraph.splitlines() if not line.startswith("```")]
    return paragraph.startswith(("    ", "```")) and all(_CHECK_LINE.match(line) for line in lines)


def text_cell(paragraphs: list[str]) -> list[Cell]:
    text = "\n\n".join(paragraphs).strip("\n")
    return [Cell(kind="markdown", text=_LINK.sub(_moved, text))] if text.strip() else []


def answer_cell(number: str, function: str | None) -> Cell:
    what = "your answer" if function is None else f"the function {function} that you wrote"
    lines = ("from paceline import learn", "", f"answer = ...  # {what}", f'learn.check("{number}", answer)')
    return Cell(kind="code", text="\n".join(lines))


def _moved(link: re.Match[str]) -> str:
    """Rewrites a link that is relative to ``docs/learn`` so that it is relative to ``notebooks``."""
    target = link[2]
    if _PAGE_NAME.fullmatch(target):
        return f"{link[1]}{notebook_name(Path(target).stem)}"
    parts = ["docs", "learn", *Path(target).parts]
    while ".." in parts:
        place = parts.index("..")
        del parts[place - 1 : place + 1]
    return f"{link[1]}../{'/'.join(parts)}"


def notebook_name(stem: str) -> str:
    return f"learn-{stem}.ipynb"


def notebook_of(page: Path) -> dict[str, Any]:
    """Returns a page as a notebook of format 4.5."""
    cells = cells_of(page.read_text(encoding="utf-8"))
    return {
        "cells": [_cell_record(cell, number) for number, cell in enumerate(cells)],
        "metadata": {**METADATA, "source": f"docs/learn/{page.name}, by scripts/make_notebooks.py"},
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def _cell_record(cell: Cell, number: int) -> dict[str, Any]:
    record: dict[str, Any] = {"cell_type": cell.kind}
    if cell.kind == "code":
        record |= {"execution_count": None}
    record |= {"id": f"cell-{number:03d}", "metadata": {"tags": [EXPECTED_TAG]} if cell.is_expected else {}}
    if cell.kind == "code":
        record |= {"outputs": []}
    return record | {"source": cell.text.splitlines(keepends=True)}


def notebooks() -> Iterator[tuple[Path, str]]:
    """Yields the file of each notebook of the course, and what it should hold."""
    for page in sorted(PAGES.glob("[0-9]*-*.md")):
        text = json.dumps(notebook_of(page), indent=1, ensure_ascii=False)
        yield NOTEBOOKS / notebook_name(page.stem), text + "\n"


def stale() -> list[str]:
    """Returns the names of notebooks that are missing, differ from their page, or have no page."""
    wanted = dict(notebooks())
    differing = [
        path for path, text in wanted.items() if not path.is_file() or path.read_text(encoding="utf-8") != text
    ]
    left_over = [path for path in NOTEBOOKS.glob("learn-*.ipynb") if path not in wanted]
    return sorted(path.name for path in [*differing, *left_over])


def main() -> int:
    if "--check" in sys.argv[1:]:
        for name in stale():
            print(f"notebooks/{name} is not current: run python scripts/make_notebooks.py")
        return 1 if stale() else 0
    NOTEBOOKS.mkdir(exist_ok=True)
    for path, text in notebooks():
        path.write_text(text, encoding="utf-8")
    for path in set(NOTEBOOKS.glob("learn-*.ipynb")) - {path for path, _ in notebooks()}:
        path.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
