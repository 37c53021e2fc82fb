"""Lets tests import what the scripts of the top-level ``bench/`` import: the packages beside them."""

from __future__ import annotations

import sys
from pathlib import Path

# Worker processes get this path too.
sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
