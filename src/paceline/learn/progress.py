"""Which exercises a reader has passed, and how many hints were shown: one small JSON file.

    {"passed": ["1.1", "1.2"], "hints": {"1.2": 1}}

The file is a convenience: a broken one counts as empty, and one that cannot be written stops nothing.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field, replace
from pathlib import Path

from paceline.untrusted import is_count, parse_json_object, read_regular

_MOST_BYTES = 2**16


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The exercises that were passed, and the number of hints shown for each."""

    passed: frozenset[str] = frozenset()
    hints: dict[str, int] = field(default_factory=dict)

    def with_passed(self, number: str) -> Progress:
        """Returns the progress with one exercise passed."""
        return replace(self, passed=self.passed | {number})

    def with_hint(self, number: str) -> Progress:
        """Returns the progress with one more hint shown."""
        return replace(self, hints={**self.hints, number: self.hints.get(number, 0) + 1})


def load_progress(path: Path) -> Progress:
    """Reads the file; an empty progress where there is none, or where it cannot be read."""
    try:
        found = parse_progress(read_regular(path, _MOST_BYTES))
    except (OSError, ValueError):
        return Progress()
    return found


def parse_progress(text: bytes) -> Progress:
    """Reads progress from JSON. Raises ValueError for anything else; values of another kind are left out."""
    found = parse_json_object(text, _MOST_BYTES)
    passed, hints = found.get("passed"), found.get("hints")
    numbers = [each for each in passed if isinstance(each, str)] if isinstance(passed, list) else []
    counts = hints.items() if isinstance(hints, dict) else ()
    return Progress(passed=frozenset(numbers), hints={key: count for key, count in counts if is_count(count, 1000)})


def save_progress(path: Path, progress: Progress) -> bool:
    """Writes the file, whole or not at all; returns whether it was written."""
    text = json.dumps({"passed": sorted(progress.passed), "hints": progress.hints}, indent=1)
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text + "\n", encoding="utf-8")
        temporary.replace(path)
    except OSError:
        return False
    return True
