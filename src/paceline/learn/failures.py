"""Where the reader's own code failed: the line, as it stands in the reader's file or cell."""

from __future__ import annotations

import inspect
import linecache
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


def line_of(error: BaseException, function: Callable[..., Any]) -> str:
    """Returns the last line of the function's own file that the error passed through; "" where there is none."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return ""
    return last_line(error, code.co_filename)


def last_line(error: BaseException, file: str) -> str:
    """Returns the last line of ``file`` that the error passed through, with its text; "" where there is none."""
    if isinstance(error, SyntaxError) and error.filename == file:
        return f"{Path(file).name}, line {error.lineno}: {(error.text or '').strip()}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    if not frames:
        return ""
    number = frames[-1].lineno or 0
    text = linecache.getline(file, number).strip()
    return f"{Path(file).name}, line {number}" + (f": {text}" if text else "")
