"""The picture of the house in docs/architecture.md is the one that the code gives."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_picture_is_up_to_date() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "draw_architecture.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
