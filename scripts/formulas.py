"""Formulas of docs/, written as text in blocks of their own, as MathML for the site (docs/conf.py).

    4 P (N-1)/N / W  <=  4 P b S / F_r        so        b S  >=  F_r / W x (N-1)/N

A Git host shows the text as it is. ``typeset`` returns what the site shows, or None for a block that is no formula: one
in which a line has no relation, or begins with one that does not parse. Three spaces or more separate the cells of a
line; a cell without an operator is prose.

What binds closest first: ``_ ^``, a fraction without spaces ``(N-1)/N``, factors side by side, ``/`` and ``x``, sums.
"""

from __future__ import annotations

import re
from html import escape

_RELATIONS = {"=": "=", "<=": "≤", ">=": "≥", "<": "&lt;", ">": "&gt;", "<-": "←"}
_SUMS = {"+": "+", "-": "−"}  # noqa: RUF001
_NAMES = {"sqrt", "log2", "max", "min", "exp", "softmax", "dropout", "shared", "logsumexp"}
_TOKEN = re.compile(
    r"(?P<space> *)(?:(?P<number>\d[\d,]*(?:\.\d+)?)|(?P<word>[^\W\d_]+\d*²?)|(?P<mark><=|>=|<-|[-=<>+/*^_(),²]))"
)
_SMALL = re.compile(r"(?<![\w.])(?:([^\W\d_])_(\w+)|([^\W\d_]|\d+)(?=\^))(?:\^(-?\d+|T)\b)?(?!\w)")


class _NoFormulaError(Exception):
    """A text that is none."""


class _Parser:
    """Reads one cell from left to right; each method returns the MathML of what it has read."""

    def __init__(self, text: str) -> None:
        self._tokens: list[tuple[str, str, bool]] = []  # kind, text, and whether a space is before it
        place = 0
        while place < len(text.rstrip()):
            found = _TOKEN.match(text, place)
            if found is None or not found.lastgroup:
                raise _NoFormulaError
            self._tokens.append((found.lastgroup, found[found.lastgroup], bool(found["space"])))
            place = found.end()
        self._place = 0

    def read(self) -> str:
        """Returns the whole cell."""
        found = self._related()
        if self._place < len(self._tokens):
            raise _NoFormulaError
        return found

    def _related(self) -> str:
        found = self._sum()
        while (mark := self._next()) in _RELATIONS:
            self._place += 1
            found += f"<mo>{_RELATIONS[mark]}</mo>{self._sum()}"
        return found

    def _token(self, ahead: int = 0) -> tuple[str, str, bool]:
        place = self._place + ahead
        return self._tokens[place] if place < len(self._tokens) else ("end", "", False)

    def _next(self) -> str:
        return self._token()[1]

    def _take(self, mark: str) -> None:
        if self._next() != mark:
            raise _NoFormulaError
        self._place += 1

    def _sum(self) -> str:
        found = ""
        if self._next() in _SUMS:
            found, self._place = f"<mo>{_SUMS[self._next()]}</mo>", self._place + 1
        found += self._quotient()
        while (mark := self._next()) in _SUMS:
            self._place += 1
            found += f"<mo>{_SUMS[mark]}</mo>{self._quotient()}"
        return found

    def _quotient(self) -> str:
        """Reads factors, divided and multiplied: ``a / b / c`` has one line with b c below it."""
        found, below = self._product(), ""
        while True:
            if self._next() == "/":
                self._place += 1
                below += self._product()
                continue
            if below:
                found, below = f"<mfrac><mrow>{_bare(found)}</mrow><mrow>{_bare(below)}</mrow></mfrac>", ""
            if self._next() != "*" and not self._is_times():
                return found
            self._place += 1
            found += f"<mo>×</mo>{self._product()}"  # noqa: RUF001

    def _is_times(self) -> bool:
        """Says whether an x stands between two operands."""
        kind, text, _ = self._token()
        return (kind, text) == ("word", "x") and (self._token(1)[0] in ("word", "number") or self._token(1)[1] == "(")

    def _product(self) -> str:
        found = [self._tight()]
        while (self._token()[0] in ("word", "number") or self._next() == "(") and not self._is_times():
            found.append(self._tight())
        spaced = "".join(f'{each}<mspace width="{0.3 if "mtext" in each[-8:] else 0.18}em"/>' for each in found[:-1])
        return spaced + found[-1]

    def _tight(self) -> str:
        """Reads a factor, or a fraction without spaces."""
        found = self._factor()
        if self._next() == "/" and not self._token()[2] and not self._token(1)[2]:
            self._place += 1
            return f"<mfrac><mrow>{_bare(found)}</mrow><mrow>{_bare(self._factor())}</mrow></mfrac>"
        return found

    def _factor(self) -> str:
        kind, text, _ = self._token()
        self._place += 1
        if kind == "number":
            found = f"<mn>{text}</mn>"
        elif text == "(":
            found = self._inside()
        elif kind == "word" and text in _NAMES and self._next() == "(":
            self._place += 1
            inner = self._inside()
            found = f"<msqrt>{_bare(inner)}</msqrt>" if text == "sqrt" else f"<mi>{text}</mi>{inner}"
        elif text == "log2":
            found = f'<msub><mi>log</mi><mn>2</mn></msub><mspace width="0.18em"/>{self._factor()}'
        elif kind == "word":
            is_article = text == "a" and self._token()[0] == "word" and len(self._next()) > 1
            found = "<mtext>a</mtext>" if is_article else _name(text)
        else:
            raise _NoFormulaError
        return self._raised(found)

    def _inside(self) -> str:
        """Reads up to the closing parenthesis; the opening one is read."""
        found = self._related()
        while self._next() == ",":
            self._place += 1
            found += f"<mo>,</mo>{self._sum()}"
        self._take(")")
        return f"<mrow><mo>(</mo>{found}<mo>)</mo></mrow>"

    def _raised(self, base: str) -> str:
        low = high = ""
        while (mark := self._next()) in ("_", "^") and not self._token()[2]:
            self._place += 1
            kind, text, _ = self._token()
            self._place += 1
            if text == "(":
                part = _bare(self._inside())
            elif kind in ("word", "number"):
                part = _name(text) if kind == "word" else f"<mn>{text}</mn>"
            else:
                raise _NoFormulaError
            low, high = (part, high) if mark == "_" else (low, part)
        if low and high:
            return f"<msubsup>{base}<mrow>{low}</mrow><mrow>{high}</mrow></msubsup>"
        if not low and not high:
            return base
        kind = "msub" if low else "msup"
        return f"<{kind}>{base}<mrow>{low or high}</mrow></{kind}>"


def _name(text: str) -> str:
    """Returns a symbol, or a word that stands upright."""
    if text.endswith("²"):
        return f"<msup>{_name(text[:-1])}<mn>2</mn></msup>"
    return f"<mi>{text}</mi>" if len(text) == 1 else f"<mtext>{text}</mtext>"


def _bare(found: str) -> str:
    """Returns what one pair of parentheses holds, where a line or a root holds it together."""
    start, end = "<mrow><mo>(</mo>", "<mo>)</mo></mrow>"
    if not (found.startswith(start) and found.endswith(end)):
        return found
    depth = 0
    for mark in re.finditer(r"</?mrow>", found):
        depth += 1 if mark[0] == "<mrow>" else -1
        if depth == 0:
            return found[len(start) : -len(end)] if mark.end() == len(found) else found
    return found


def _cells(line: str) -> list[str]:
    """Returns the cells of a line; a relation that stands apart belongs to the cells on both its sides."""
    found = [""] if line.startswith("   ") else []
    for cell in re.split(r" {3,}", line.strip()):
        starts, ends = cell.split(" ")[0], found[-1].split(" ")[-1] if found else ""
        if found and {starts, ends} & {*_RELATIONS, "+"}:
            found[-1] += f"  {cell}"
        else:
            found.append(cell)
    return found


def with_small_letters(text: str) -> str:
    """Returns prose as HTML, with ``N_d`` and ``S^2`` set low and high; names of several letters stay as they are."""

    def small(found: re.Match[str]) -> str:
        letter, low, other, high = found.groups()
        return (letter or other) + (f"<sub>{low}</sub>" if low else "") + (f"<sup>{high}</sup>" if high else "")

    return _SMALL.sub(small, escape(text, quote=False))


def typeset(text: str) -> str | None:
    """Returns a block of formulas as HTML with MathML; None for a block that is none."""
    rows = []
    for line in text.rstrip().splitlines():
        cells, has_relation = [], False
        for cell in _cells(line):
            is_related = any(f" {mark} " in f" {cell} " for mark in _RELATIONS)
            try:
                if not is_related and not re.search(r"[_^/+]", cell):
                    raise _NoFormulaError
                cells.append(f"<td><math>{_Parser(cell).read()}</math></td>")
                has_relation = has_relation or is_related
            except _NoFormulaError:
                if is_related and not has_relation:
                    return None
                cells.append(f'<td class="prose">{with_small_letters(cell)}</td>')
        if not has_relation:
            return None
        rows.append(f"<tr>{''.join(cells)}</tr>")
    return f'<table class="formula">{"".join(rows)}</table>' if rows else None
