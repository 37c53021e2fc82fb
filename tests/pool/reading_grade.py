"""The reading grade of a page: Flesch-Kincaid over its prose, without code, tables, formulas and headings.

    grade = 0.39 words / sentences + 11.8 syllables / words - 15.59

A grade is a year of school in the United States. Code inside a sentence counts as one word of one syllable. A sentence
ends with a full stop, a question mark or an exclamation mark, and with its paragraph or list item; a colon or a
semicolon ends none. ``python tests/pool/reading_grade.py FILE...`` prints the grades of pages in Markdown and
reStructuredText, and their median.
"""

from __future__ import annotations

import re
import statistics
import sys
from pathlib import Path

_ITEM = re.compile(r"\s*(?:[-*+]|\d+\.|#\.) +")
_WORD = re.compile(r"[A-Za-z]+(?:['-][A-Za-z]+)*")
_SENTENCE_END = re.compile(r"[.!?]+(?=[\s\"')*]|$)")
_RULE = re.compile(r"\s*([=\-~^*#+_])\1{2,}\s*$")
_ABBREVIATIONS = re.compile(r"\b(e\.g|i\.e|etc|vs|cf)\.")


def paragraphs_of_markdown(text: str) -> list[str]:
    """Returns paragraphs and list items as plain text. Raw HTML lines are left out with code and tables."""
    text = re.sub(r"^(```|~~~).*?^\1 *$", "", text, flags=re.MULTILINE | re.DOTALL)
    blocks = re.split(r"\n\s*\n", text)
    prose = [item for block in blocks for item in _items(_lines_of_prose(block))]
    return [plain for item in prose if (plain := _plain_markdown(item))]


def paragraphs_of_restructured_text(text: str) -> list[str]:
    """Returns the same of reStructuredText: directives go with all that is indented below them."""
    kept: list[str] = []
    lines = text.splitlines()
    inside = False
    for number, line in enumerate(lines):
        if not line.strip():
            kept.append("")
            continue
        if inside and line.startswith((" ", "\t")):
            continue
        inside = line.startswith("..") or (line.rstrip().endswith("::") and not line.startswith(" "))
        is_title = number + 1 < len(lines) and _RULE.match(lines[number + 1])
        is_markup = line.startswith((".. ", ":", "+-", "|")) or _RULE.match(line)
        kept.append("" if is_title or is_markup else line)
    blocks = re.split(r"\n\s*\n", "\n".join(kept))
    prose = [item for block in blocks for item in _items(block.splitlines())]
    return [plain for item in prose if (plain := _plain_restructured(item))]


def grade(paragraphs: list[str]) -> float:
    """Computes the Flesch-Kincaid grade. Raises ValueError where there is no word."""
    text = [_ABBREVIATIONS.sub(r"\1", each) for each in paragraphs]
    words = [word for each in text for word in _WORD.findall(each)]
    if not words:
        raise ValueError("a page without words has no reading grade")
    sentences = sum(max(1, len(_SENTENCE_END.findall(each))) for each in text if _WORD.search(each))
    syllables = sum(num_syllables(word) for word in words)
    return 0.39 * len(words) / sentences + 11.8 * syllables / len(words) - 15.59


def num_syllables(word: str) -> int:
    """Counts groups of vowels, without a silent e at the end of each part of the word."""
    return sum(_num_syllables_of_part(part) for part in re.split(r"[-']", word.lower()) if part)


def grade_of_page(page: Path) -> float:
    """Reads a page of either markup, by the end of its name."""
    text = page.read_text(encoding="utf-8")
    return grade(paragraphs_of_restructured_text(text) if page.suffix == ".rst" else paragraphs_of_markdown(text))


def _num_syllables_of_part(part: str) -> int:
    groups = len(re.findall(r"[aeiouy]+", part))
    is_silent = part.endswith("e") and not part.endswith(("le", "ee", "ye", "oe"))
    is_silent = is_silent or (part.endswith("ed") and not part.endswith(("ted", "ded", "eed")))
    is_silent = is_silent or (part.endswith("es") and not part.endswith(("ses", "zes", "ces", "ges", "ches", "shes")))
    return max(1, groups - is_silent)


def _lines_of_prose(block: str) -> list[str]:
    lines = block.splitlines()
    if lines and lines[0].startswith("    "):  # an indented block of code
        return []
    return [line for line in lines if not line.lstrip().startswith(("#", "|", "<", "!["))]


def _items(lines: list[str]) -> list[str]:
    items: list[str] = []
    for line in lines:
        if (mark := _ITEM.match(line)) or not items:
            items.append(line[mark.end() :] if mark else line.strip())
        else:
            items[-1] += " " + line.strip()
    return items


def _plain_markdown(text: str) -> str:
    text = re.sub(r"`+[^`]+`+", "x", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"[*_]{1,2}(\S(?:.*?\S)?)[*_]{1,2}", r"\1", text).strip()


def _plain_restructured(text: str) -> str:
    text = re.sub(r":[\w:-]+:`[^`]*`|``[^`]+``", "x", text)
    text = re.sub(r"`([^`<]*?)\s*(?:<[^>]*>)?`_*", r"\1", text)
    text = re.sub(r"https?://\S+", "x", text)
    return re.sub(r"\*{1,2}(\S(?:.*?\S)?)\*{1,2}", r"\1", text).strip()


def main(names: list[str]) -> None:
    """Prints the grade of each page, and the median."""
    grades = {name: grade_of_page(Path(name)) for name in names}
    for name, value in grades.items():
        print(f"{value:5.1f}  {name}")
    print(f"{statistics.median(grades.values()):5.1f}  median of {len(grades)}")


if __name__ == "__main__":
    main(sys.argv[1:])
