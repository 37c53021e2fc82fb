"""Texts that are kept beside a test, and compared with what is said now.

Where a change is meant, ``PACELINE_KEEP=1 pytest FILE`` writes them anew; read the difference before you commit it.
"""

from __future__ import annotations

import difflib
import json
import os
from pathlib import Path
from typing import Any


def check_kept(path: Path, text: str) -> None:
    """Fails with the lines that differ from the kept text."""
    if os.environ.get("PACELINE_KEEP"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")
    kept = path.read_text(encoding="utf-8").rstrip("\n")
    moved = list(difflib.unified_diff(kept.splitlines(), text.splitlines(), "kept", "now", lineterm="", n=0))
    assert not moved, "\n".join(
        [f"{path.name} is another text now; if that is meant, PACELINE_KEEP=1 keeps it", *moved]
    )


def plain(value: Any) -> Any:
    """Returns a value as JSON can write it, numbers with ten digits."""
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset | range):
        return [plain(each) for each in value]
    if isinstance(value, float):
        return float(f"{value:.10g}")
    return value if isinstance(value, int | str | None) else str(value)


def shown(value: Any) -> str:
    return json.dumps(plain(value), indent=1)
