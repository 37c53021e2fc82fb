"""The function of an exercise, from a Python file of the reader's. The file runs, as the reader's own program would."""

from __future__ import annotations

import difflib
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.errors import UsageError
from paceline.learn.course import last_line
from paceline.learn.exercise import Exercise


def load_function(exercise: Exercise, path: Path) -> Callable[..., Any]:
    """Runs a file and returns the function that the exercise asks for.

    Raises UsageError where there is no such file, it fails by itself, or it does not define the function.
    """
    if not path.is_file():
        raise UsageError(
            f"there is no file {str(path)!r}\n"
            f"  exercise {exercise.number} asks for a Python file that defines {exercise.function}\n"
            f"  write the function into a file, and run: paceline learn check {exercise.number} FILE.py"
        )
    defined = _run(path)
    found = defined.get(exercise.function)
    if not callable(found):
        names = [name for name, value in defined.items() if callable(value) and not name.startswith("_")]
        near = difflib.get_close_matches(exercise.function, names, n=1)
        fix = f"did you mean it by {near[0]}? Rename that" if near else f"define it: def {exercise.function}(...):"
        raise UsageError(
            f"{path} defines no function {exercise.function}\n"
            f"  exercise {exercise.number} calls the function of that name\n  {fix}"
        )
    return found  # type: ignore[no-any-return]


def _run(path: Path) -> dict[str, Any]:
    """Runs a file with its folder on the path of imports. Nothing is cached, so that an edit always counts."""
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        return runpy.run_path(str(path), run_name="answer")
    except (Exception, SystemExit) as error:
        where = last_line(error, str(path))
        raise UsageError(
            f"{path} raised {type(error).__name__}: {error}\n"
            f"  {where or 'the file fails by itself'}\n  run it alone first: python {path}"
        ) from error
