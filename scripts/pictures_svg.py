"""What the pictures of the course are drawn with: a sheet of 800 units, its colours in light and dark, and shapes.

Colours are classes, so that a reader's light or dark theme chooses them: ``a`` to ``h`` fill a shape, ``on`` is text
that stands on such a fill. One class means one thing in all pictures: ``a`` forward, ``b`` backward, ``c`` gathers,
``d`` reductions, ``e`` what is waited for or does not fit, ``f`` the optimizer, ``h`` gradients of weights, ``g`` the
rest. Numbers are written with one decimal, so that the same data gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

WIDTH, MARGIN = 800, 24
LETTER = 6.3  # the width of a letter of small text, about
_LONGEST_TITLE = 70  # letters

STYLE = """
.page{fill:#fbfbfa}.ink{fill:#1f2430}.soft{fill:#5b6472}.on{fill:#fff}.panel{fill:#f0f0ee}.none{fill:#e3e5e8}
.a{fill:#2f6bb8}.b{fill:#b8620c}.c{fill:#2f7d55}.d{fill:#7a52b8}.e{fill:#bf3040}.f{fill:#1d7a8a}.g{fill:#6b7280}
.h{fill:#8d7200}.thin{fill-opacity:.3}.s0{fill-opacity:.12}.s1{fill-opacity:.28}.s2{fill-opacity:.45}.s3{fill-opacity:.8}.edge{fill:none;stroke:#1f2430;stroke-width:1.6}
.wire{fill:none;stroke:#8a92a0;stroke-width:1.3}.dash{stroke-dasharray:4 3}.red{stroke:#bf3040;stroke-width:2}
.tip{fill:#1f2430}
.title{font-size:18px;font-weight:600}.name{font-size:14px;font-weight:600}.small{font-size:12px}.tiny{font-size:10.5px}
.bold{font-weight:600}.halo{paint-order:stroke;stroke:#fbfbfa;stroke-width:4px}.mid{text-anchor:middle}.end{text-anchor:end}
@media (prefers-color-scheme:dark){
.page{fill:#14171d}.ink{fill:#e6e8ec}.soft{fill:#a3acba}.on{fill:#0b1220}.panel{fill:#1d222a}.none{fill:#2b313b}
.a{fill:#6ea3ea}.b{fill:#eba45a}.c{fill:#63bd8e}.d{fill:#b294ea}.e{fill:#f0707b}.f{fill:#5cc4d2}.g{fill:#98a1b0}
.h{fill:#d3b93c}.thin{fill-opacity:.4}.edge{stroke:#e6e8ec}.wire{stroke:#6a7382}.red{stroke:#f0707b}.tip{fill:#e6e8ec}
.halo{stroke:#14171d}}
"""


def num(value: float) -> str:
    """Writes a coordinate with one decimal at most."""
    text = f"{value:.1f}"
    return text[:-2] if text.endswith(".0") else text


class Picture:
    """A sheet that grows downwards. ``title`` and ``about`` are read aloud and stand on top."""

    def __init__(self, title: str, about: str, source: str) -> None:
        assert len(title) <= _LONGEST_TITLE, f"the title of {len(title)} letters is wider than the sheet: {title}"
        self.title, self.about = title, about
        self._source = source
        self._parts: list[str] = []
        self.text(MARGIN, 34, title, "title ink")
        self.top = self.paragraph(MARGIN, 56, about) + 8

    def paragraph(self, x: float, y: float, words: str, width: float = WIDTH - 2 * MARGIN) -> float:
        """Writes small text in lines; returns where the next line would stand."""
        for line in _lines(words, int(width / LETTER)):
            self.text(x, y, line, "small soft")
            y += 17
        return y

    def text(self, x: float, y: float, words: str, kinds: str = "small ink") -> None:
        self._parts.append(f'<text class="{kinds}" x="{num(x)}" y="{num(y)}">{escape(words)}</text>')

    def digits(self, places: Sequence[tuple[float, float]], letters: str, kinds: str) -> None:
        """Writes one letter at each place, in one element."""
        if places:
            xs, ys = (" ".join(num(place[axis]) for place in places) for axis in (0, 1))
            self._parts.append(f'<text class="{kinds}" x="{xs}" y="{ys}">{escape(letters)}</text>')

    def box(self, x: float, y: float, width: float, height: float, kinds: str, rx: float = 0, says: str = "") -> None:
        """Draws a rectangle; ``says`` shows under the pointer."""
        size = f'x="{num(x)}" y="{num(y)}" width="{num(width)}" height="{num(height)}"'
        corner = f' rx="{num(rx)}"' if rx else ""
        end = f"><title>{escape(says)}</title></rect>" if says else "/>"
        self._parts.append(f'<rect class="{kinds}" {size}{corner}{end}')

    def triangle(self, x: float, y: float, side: float, kinds: str) -> None:
        """Draws the lower left half of a square."""
        self._parts.append(f'<path class="{kinds}" d="M{num(x)} {num(y)}v{num(side)}h{num(side)}z"/>')

    def band(self, x1: float, y1: float, x2: float, y2: float, kind: str, width: float = 2.4) -> None:
        """Draws a straight line in one of the colours."""
        length = max(((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5, 1e-6)
        dx, dy = -(y2 - y1) / length * width / 2, (x2 - x1) / length * width / 2
        corners = ((x1 + dx, y1 + dy), (x2 + dx, y2 + dy), (x2 - dx, y2 - dy), (x1 - dx, y1 - dy))
        path = "L".join(f"{num(x)} {num(y)}" for x, y in corners)
        self._parts.append(f'<path class="{kind}" d="M{path}z"/>')

    def boxes(self, places: Iterable[tuple[float, float, float, float]], kinds: str) -> None:
        """Draws many rectangles of one kind, (x, y, width, height) each, in one element."""
        path = "".join(f"M{num(x)} {num(y)}h{num(w)}v{num(h)}h{num(-w)}z" for x, y, w, h in places)
        if path:
            self._parts.append(f'<path class="{kinds}" d="{path}"/>')

    def line(self, x1: float, y1: float, x2: float, y2: float, kinds: str = "wire") -> None:
        self._parts.append(f'<path class="{kinds}" d="M{num(x1)} {num(y1)}L{num(x2)} {num(y2)}"/>')

    def arrow(self, x1: float, y1: float, x2: float, y2: float, kinds: str = "edge", size: float = 4.0) -> None:
        """Draws a straight line with a tip at its end."""
        length = max(((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5, 1e-6)
        dx, dy = (x2 - x1) / length * size, (y2 - y1) / length * size
        back_x, back_y = x2 - 1.6 * dx, y2 - 1.6 * dy
        self.line(x1, y1, back_x, back_y, kinds)
        corners = f"M{num(x2)} {num(y2)}L{num(back_x - dy)} {num(back_y + dx)}L{num(back_x + dy)} {num(back_y - dx)}z"
        self._parts.append(f'<path class="tip" d="{corners}"/>')

    def legend(self, x: float, y: float, entries: Iterable[tuple[str, str]]) -> float:
        """Draws squares of these kinds with their words, in lines as wide as the sheet; returns the next line's y."""
        left = x
        for kinds, words in entries:
            width = 20 + 6.6 * len(words) + 18
            if left > x and left + width > WIDTH - MARGIN + 18:
                left, y = x, y + 20
            self.box(left, y - 10, 13, 12, kinds, rx=2)
            self.text(left + 19, y, words, "small ink")
            left += width
        return y + 20

    def ruler(self, x: float, y: float, width: float, end: float, unit: str, marks: int = 6) -> None:
        """Draws an axis from 0 to ``end`` below y, with round numbers."""
        step = _round_step(end / marks)
        self.line(x, y, x + width, y)
        place = 0.0
        while place <= end * 1.0001:
            at = x + width * place / end
            self.line(at, y, at, y + 5)
            self.text(at, y + 18, f"{place:g} {unit}" if place else f"0 {unit}", "tiny soft mid")
            place = round(place + step, 9)

    def svg(self, height: float) -> str:
        """Returns the file."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{num(height)}" '
            f'viewBox="0 0 {WIDTH} {num(height)}" role="img" aria-labelledby="t d" '
            'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif">'
        )
        named = f'<title id="t">{escape(self.title)}</title>\n<desc id="d">{escape(self.about)}</desc>'
        made = f"<!-- Drawn by scripts/draw_pictures.py: {self._source}. -->"
        page = f'<rect class="page" width="{WIDTH}" height="{num(height)}" rx="12"/>'
        return "\n".join([head, named, made, f"<style>{STYLE}</style>", page, *self._parts, "</svg>\n"])


def _lines(words: str, most: int) -> list[str]:
    lines = [""]
    for word in words.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > most:
            lines.append("")
        lines[-1] += (" " if lines[-1] else "") + word
    return lines


def _round_step(step: float) -> float:
    """Returns the next larger of 1, 2 and 5 times a power of ten."""
    power = 1e-9
    while power * 10 <= step:
        power *= 10
    return next(round(power * each, 9) for each in (1, 2, 5, 10) if round(power * each, 9) >= step * 0.999)
