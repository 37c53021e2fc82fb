"""Formulas of docs/ as MathML: what binds closest, what is no formula, and that a browser sees what was written."""

# ruff: noqa: RUF001  # the signs of formulas

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def formulas(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(DOCS.parent / "scripts"))
    return importlib.import_module("formulas")


def spelled(html: str) -> str:
    """Returns MathML as TeX would have it, so that the order of operations is seen."""
    text = html
    names = {"mfrac": "frac", "msub": "sub", "msup": "sup", "msubsup": "subsup", "msqrt": "root"}
    for tag, name in names.items():
        text = text.replace(f"<{tag}>", f"{name}[").replace(f"</{tag}>", "]")
    text = text.replace("<mrow>", "{").replace("</mrow>", "}").replace("</td><td", "</td> | <td")
    return re.sub(r"<[^>]*>", "", text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("t = α + M / W", "t=α+frac[{M}{W}]"),
        ("8 P (N-1)/N / W  <=  t_b", "frac[{8P" + "frac[{N−1}{N}]}{W}]≤sub[t{b}]"),
        ("b S  >=  F_r / W x (N-1)/N", "bS≥frac[{sub[F{r}]}{W}]×frac[{N−1}{N}]"),
        ("a = b / c / d + 1", "a=frac[{b}{cd}]+1"),
        ("y = x W_r^T", "y=xsubsup[W{r}{T}]"),
        ("z = a x b", "z=a×b"),
        ("t = sqrt(2 t_c / (3 N))", "t=root[frac[{2sub[t{c}]}{3N}]]"),
        ("e = (a + b) (c + d) / 2", "e=frac[{{(a+b)}{(c+d)}}{2}]"),
        ("e = max(a_i, b_(i-1))", "e=max{(sub[a{i}],sub[b{i−1}])}"),
        ("T  >=  1        so        d² = 4", "T≥1 | so | sup[d2]=4"),
        ("FLOPs of a step = 6 P T", "FLOPsofastep=6PT"),
    ],
)
def test_what_binds_closest(formulas: ModuleType, text: str, expected: str) -> None:
    assert spelled(formulas.typeset(text)) == expected


@pytest.mark.parametrize(
    "text",
    [
        "rank 0:  forward  backward",
        "comm = paceline.connect()",
        "train.global_batch = train.microbatch x train.accumulate x ranks",
        "data: {kind: images}",
        "a = (b",
        "a = b +",
        "device   parameters -> forward",
        "predicted 920.0 ms a step",
        "y = x\nmore words",
    ],
)
def test_what_is_no_formula_stays_text(formulas: ModuleType, text: str) -> None:
    assert formulas.typeset(text) is None


def test_letters_of_symbols_are_small_in_prose(formulas: ModuleType) -> None:
    assert (
        formulas.with_small_letters("N_d ranks, 10^9 & S^2")
        == "N<sub>d</sub> ranks, 10<sup>9</sup> &amp; S<sup>2</sup>"
    )
    for text in ("bucket_mb", "a file_name", "2.0^x", "__init__"):
        assert "<" not in formulas.with_small_letters(text)


def test_the_formula_of_each_lesson_is_typeset(formulas: ModuleType) -> None:
    """Each lesson has an inequality that says when it stops paying: a block that is not read would stay text."""
    for page in sorted((DOCS / "learn").glob("[0-9]*.md")):
        text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        blocks = [found.group() for found in re.finditer(r"(?:^    .*\n)+", text, flags=re.MULTILINE)]
        assert any("<mfrac>" in (formulas.typeset(block.replace("\n    ", "\n").strip()) or "") for block in blocks), (
            page
        )
