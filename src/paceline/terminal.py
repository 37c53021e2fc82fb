"""What reaches a terminal: text that it shows and does not obey.

Whoever wrote the files of a run may have put escapes into names, messages and logs that clear a screen or hide a line.
They are shown as what they are, ``\\x1b[2J``. Nor is anything in square brackets taken for the markup of rich.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import IO, TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderHook
    from rich.segment import Segment

# Control characters but for tabs and ends of lines, ends of lines that only some know, and those that turn text around.
_OBEYED = [*range(9), *range(11, 32), *range(127, 160), 0x2028, 0x2029, *range(0x202A, 0x202F), *range(0x2066, 0x206A)]
_SHOWN = {code: chr(code).encode("unicode_escape").decode("ascii") for code in _OBEYED}


def plain(text: str) -> str:
    """Returns text with whatever a terminal would obey written out, but for tabs and ends of lines."""
    return text if text.isprintable() else text.translate(_SHOWN)


def excerpt(text: str, most: int = 60) -> str:
    """Returns a text, of one with more than so many characters the beginning."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def echo(text: object = "", *, err: bool = False, nl: bool = True) -> None:
    """Prints plain text, to standard error with ``err``."""
    import typer

    typer.echo(plain(str(text)), err=err, nl=nl)


def table_lines(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns rows of cells as lines in which columns stand below one another."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def new_console(file: IO[str] | None = None, *, stderr: bool = False) -> Console:
    """Returns a console of rich that shows text as it is."""
    from rich.console import Console

    console = Console(file=file, stderr=stderr, markup=False, emoji=False)
    console.push_render_hook(cast("RenderHook", _PlainHook()))
    return console


class _PlainHook:
    def process_renderables(self, renderables: list[Any]) -> list[Any]:
        return [_Plain(each) for each in renderables]


class _Plain:
    """Something to show whose text is plain; the styles are rich's own."""

    def __init__(self, content: RenderableType) -> None:
        self._content = content

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        from rich.segment import Segment

        for segment in console.render(self._content, options):
            text, style, control = segment
            yield segment if control else Segment(plain(text), style, control)
