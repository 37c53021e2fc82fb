"""The order of the pages: docs/contents.yaml, for the site's navigation and for the list in docs/index.md.

An entry of the file is a page or a pattern; a page that does not exist is left out, and a pattern takes the pages that
no other entry names. So a new lesson, or a new page about the engines, is reached without a line of its own.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

import yaml

BEGIN, END = "<!-- contents: begin (scripts/make_reference.py) -->", "<!-- contents: end -->"
LONGEST = 40
"""Characters of a title in the navigation; a longer one is cut at its colon."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A page of the book. ``path`` is relative to docs/; ``about`` completes its title in a list, and may be empty."""

    path: str
    title: str
    about: str

    @property
    def short_title(self) -> str:
        """The title for a narrow column: of a long one, the part before its colon, or before "from ... to ..."."""
        if len(self.title) <= LONGEST or self.title.startswith("Lesson"):
            return self.title
        return re.split(r": |, from ", self.title, maxsplit=1)[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of the book, in the order in which it is read."""

    caption: str
    pages: tuple[Page, ...]


def read_contents(docs: Path) -> list[Part]:
    """Returns the parts of the book with the pages that exist."""
    parts = yaml.safe_load((docs / "contents.yaml").read_text(encoding="utf-8"))
    named = {os.path.normpath(docs / entry) for part in parts for entry in part["pages"] if "*" not in entry}
    seen = {os.path.normpath(docs / "index.md")}
    found: list[Part] = []
    for part in parts:
        pages: list[Page] = []
        for entry, about in part["pages"].items():
            for path in _matching(docs, entry, named):
                if os.path.normpath(path) not in seen:
                    seen.add(os.path.normpath(path))
                    relative = os.path.relpath(path, docs)
                    pages.append(Page(path=Path(relative).as_posix(), title=title_of(path), about=about or ""))
        if pages:
            found.append(Part(caption=part["caption"], pages=tuple(pages)))
    return found


def _matching(docs: Path, entry: str, named: set[str]) -> list[Path]:
    """Returns the pages of an entry: the one it names, or those of a pattern that no other entry names."""
    if "*" not in entry:
        return [docs / entry] if (docs / entry).is_file() else []
    return sorted((path for path in docs.glob(entry) if os.path.normpath(path) not in named), key=_natural)


def _natural(path: Path) -> list[tuple[int, str]]:
    """Orders 2-collectives before 10-more."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", path.name)]


def title_of(path: Path) -> str:
    """Returns the first heading of a page. Raises ValueError where it has none."""
    heading = re.search(r"^# (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    if heading is None:
        raise ValueError(f"{path} has no heading: a page begins with '# Title'")
    return heading[1].strip()


def with_contents(index: str, docs: Path) -> str:
    """Returns the start page with the list of all pages between its marks. Raises ValueError where it has none."""
    before, begin, rest = index.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"docs/index.md has no lines {BEGIN} and {END}")
    lines: list[str] = []
    for part in read_contents(docs):
        lines += ["", f"## {part.caption}", "", *(_line(page) for page in part.pages)]
    return "\n".join([f"{before}{BEGIN}", *lines, "", f"{END}{after}"])


def _line(page: Page) -> str:
    return f"- [{page.short_title}]({page.path})" + (f": {page.about}" if page.about else "")
