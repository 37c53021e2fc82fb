"""Lets the tests of engines, and the worker processes they start, import ``engine_cases``."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
