"""Writes the kept figures of a room's tests anew (tests/pool/kept_figures.py).

    python scripts/keep_figures.py ROOM ...

Do it where a change means to move them, and read the difference before it is committed.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1] / "tests"


def main() -> None:
    """Writes the files of each room that is named; of all rooms where none is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rooms", nargs="*", help="folders of tests/; none: all")
    rooms = parser.parse_args().rooms or sorted({path.parent.name for path in TESTS.glob("*/test_kept_*.py")})
    sys.path[:0] = [str(TESTS / "pool")]
    from kept_figures import keep

    for room in rooms:
        sys.path.insert(0, str(TESTS / room))
        for path in sorted((TESTS / room).glob("test_kept_*.py")):
            print(keep(path, importlib.import_module(path.stem).figures()))


if __name__ == "__main__":
    main()
