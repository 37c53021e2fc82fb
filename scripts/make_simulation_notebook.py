"""Makes ``notebooks/distributed_training_simulation.ipynb`` from the script beside it; ``--check`` compares them.

python scripts/make_simulation_notebook.py

The script is in percent format: ``# %%`` begins a cell of code, ``# %% [markdown]`` a cell of text, whose lines are
comments. The same script gives the same bytes.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

SCRIPT = Path(__file__).parents[1] / "notebooks" / "distributed_training_simulation.py"
NOTEBOOK = SCRIPT.with_suffix(".ipynb")

_MARK = re.compile(r"^# %%(?P<text> \[markdown\])?[ ]*$", re.MULTILINE)


def cells_of(script: str) -> Iterator[tuple[Literal["markdown", "code"], str]]:
    """Yields the kind and the content of each cell. Raises ValueError for lines before the first cell."""
    marks = list(_MARK.finditer(script))
    if not marks or script[: marks[0].start()].strip():
        raise ValueError("the script begins with a line '# %%' or '# %% [markdown]'")
    ends = [mark.start() for mark in marks[1:]] + [len(script)]
    for mark, end in zip(marks, ends, strict=True):
        content = script[mark.end() : end].strip("\n")
        yield ("markdown", uncommented(content)) if mark["text"] else ("code", content)


def uncommented(content: str) -> str:
    """Returns the text of comment lines. Raises ValueError for a line that is no comment."""
    lines = content.splitlines()
    if odd := next((line for line in lines if line != "#" and not line.startswith("# ")), None):
        raise ValueError(f"a cell of text has the line {odd!r}: each of its lines begins with '# '")
    return "\n".join(line[2:] for line in lines)


def notebook_of(script: str) -> str:
    """Returns a notebook of format 4.5 with the cells of a script, without outputs."""
    record = {
        "cells": [_record(kind, content, number) for number, (kind, content) in enumerate(cells_of(script))],
        "metadata": {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
            "source": f"notebooks/{SCRIPT.name}, by scripts/{Path(__file__).name}",
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(record, indent=1, ensure_ascii=False) + "\n"


def _record(kind: str, content: str, number: int) -> dict[str, Any]:
    record: dict[str, Any] = {"cell_type": kind, "id": f"cell-{number:03d}", "metadata": {}}
    if kind == "code":
        record |= {"execution_count": None, "outputs": []}
    return record | {"source": content.splitlines(keepends=True)}


def is_current() -> bool:
    """Says whether the notebook is there and has the cells of the script."""
    wanted = notebook_of(SCRIPT.read_text(encoding="utf-8"))
    return NOTEBOOK.is_file() and NOTEBOOK.read_text(encoding="utf-8") == wanted


def main() -> int:
    if "--check" in sys.argv[1:]:
        if not is_current():
            print(f"notebooks/{NOTEBOOK.name} is not current: run python scripts/{Path(__file__).name}")
        return 0 if is_current() else 1
    NOTEBOOK.write_text(notebook_of(SCRIPT.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
