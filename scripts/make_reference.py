"""Writes the reference pages from the code: the command line, the config keys and the public names.

    python scripts/make_reference.py            # write docs/reference/*.md and the contents of docs/index.md
    python scripts/make_reference.py --check    # exit 1 where a page is not what the code gives

The pages are committed, so that they read on any Git host without a build. A test runs the check.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from contents import with_contents
from reference_api import api_page
from reference_cli import cli_page
from reference_config import config_page

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
INDEX = DOCS / "index.md"
PAGES: dict[str, Callable[[], str]] = {"cli.md": cli_page, "config.md": config_page, "api.md": api_page}


def made_pages() -> dict[Path, str]:
    """Returns the text of each page that the code gives, by its path. The contents come last: they read the titles."""
    made = {DOCS / "reference" / name: make() for name, make in PAGES.items()}
    return made | {INDEX: with_contents(INDEX.read_text(encoding="utf-8"), DOCS)}


def out_of_date() -> list[Path]:
    """Returns the pages that are not what the code gives."""
    return [path for path, text in made_pages().items() if not path.exists() or path.read_text("utf-8") != text]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    if parser.parse_args().check:
        stale = out_of_date()
        for path in stale:
            print(f"{path.relative_to(ROOT)} is out of date: run python scripts/make_reference.py", file=sys.stderr)
        return int(bool(stale))
    (DOCS / "reference").mkdir(exist_ok=True)
    for path, text in made_pages().items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
