"""Writes down which tests enter which functions of the package, their processes included: for ``scripts/mutants.py``.

``install`` has every function write one line when a test first enters it: the test, a tab, file and line of the
function. What a test starts inherits the test's name in ``PYTEST_CURRENT_TEST``; workers of the pool are told it with
each task. It needs ``sys.monitoring``, that is, Python 3.12: a function that has been seen costs nothing more.

For pytest: PYTEST_DONT_REWRITE, since the module is loaded before it.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from types import CodeType
from typing import Any

PACKAGE = str(Path(__file__).parents[2] / "src" / "paceline") + os.sep
TOOL = 4
_last = ""


def install(path: str) -> None:
    """Starts to append to the file, here and in every process that is forked from here."""
    monitoring = sys.monitoring  # type: ignore[attr-defined,unused-ignore]
    written = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.set_inheritable(written, False)
    waiting: list[bytes] = []

    def entered(code: CodeType, _offset: int) -> Any:
        global _last
        if not code.co_filename.startswith(PACKAGE):
            return monitoring.DISABLE
        test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]
        if test != _last:
            _last = test
            monitoring.restart_events()
        waiting.append(f"{test}\t{code.co_filename[len(PACKAGE) :]}:{code.co_firstlineno}\n".encode())
        lines = waiting[:]
        with contextlib.suppress(OSError):  # where a test lets no file grow: the lines are written later
            os.write(written, b"".join(lines))
            del waiting[: len(lines)]
        # Each task of a pool's worker enters connect(): so the worker sees that the test is another one.
        return None if code.co_name == "connect" else monitoring.DISABLE

    monitoring.use_tool_id(TOOL, "touched")
    monitoring.register_callback(TOOL, monitoring.events.PY_START, entered)
    monitoring.set_events(TOOL, monitoring.events.PY_START)
    os.register_at_fork(after_in_child=monitoring.restart_events)


def pytest_runtest_setup() -> None:
    """Has every function write itself down again for the next test (this module is then a plugin of pytest)."""
    sys.monitoring.restart_events()  # type: ignore[attr-defined,unused-ignore]
