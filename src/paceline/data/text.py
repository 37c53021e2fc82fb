"""A text file as tokens: its characters, its bytes, or those of a tokenizer.

Tokens are kept in the smallest integer type that holds the vocabulary, and become int64 in the batch: a gigabyte of
bytes costs a gigabyte.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from paceline.data.documents import decode_text
from paceline.data.tokenizers import ByteTokenizer, CharTokenizer, Tokenizer, code_points, smallest_dtype
from paceline.errors import DataError

_AT_ONCE = 2**20  # characters


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedText:
    """The tokens of a text (1-D), what they stand for, and where the text comes from."""

    tokens: NDArray[np.integer]
    tokenizer: Tokenizer
    source: str


def load_text(path: str | None, unit: Literal["char", "bytes"] | Tokenizer) -> EncodedText:
    """Reads a UTF-8 file, or the documentation inside Python where ``path`` is ``None``, and encodes it.

    The characters of the whole text, sorted, are the vocabulary; bytes always have 256 tokens.
    """
    source = "the documentation inside Python" if path is None else f"data.path = {path!r}"
    content = _python_documentation().encode() if path is None else _read_file(path)
    if unit == "bytes":
        tokens = np.frombuffer(content, dtype=np.uint8)
        return EncodedText(tokens=tokens, tokenizer=ByteTokenizer(), source=source)
    text = content.decode() if path is None else decode_text(content, Path(path).expanduser())
    if unit != "char":
        kind = smallest_dtype(unit.vocab_size)
        encoded = [each.astype(kind) for each in unit.encode_many(_whole_lines(text))]
        return EncodedText(tokens=np.concatenate(encoded), tokenizer=unit, source=source)
    # Fixed-width code points let numpy sort and number the characters of a long text in one go.
    points = code_points(text)
    vocabulary, numbers = np.unique(points, return_inverse=True)
    return EncodedText(
        tokens=numbers.reshape(-1).astype(smallest_dtype(len(vocabulary))),
        tokenizer=CharTokenizer("".join(map(chr, vocabulary.tolist()))),
        source=source,
    )


def _whole_lines(text: str) -> list[str]:
    """Cuts a text into parts of whole lines, which a tokenizer encodes side by side."""
    parts, start = [], 0
    while start < len(text):
        end = text.find("\n", start + _AT_ONCE) + 1 or len(text)
        parts.append(text[start:end])
        start = end
    return parts


def _python_documentation() -> str:
    """Returns the help topics that CPython carries, in the order of their names; they differ between versions."""
    try:
        from pydoc_data import topics
    except ImportError as error:
        raise DataError(
            "this Python was installed without pydoc_data.topics, its own documentation\n"
            "  it is the text that is used where data.path is not set\n  set data.path to a UTF-8 text file"
        ) from error
    return "\n".join(text for _, text in sorted(topics.topics.items()))


def _read_file(path: str) -> bytes:
    try:
        content = Path(path).expanduser().read_bytes()
    except OSError as error:
        raise DataError(
            f"data.path = {path!r} cannot be read: {error.strerror}\n"
            f"  it is looked for from the current directory, {Path.cwd()}\n"
            "  check the path and its permissions, or leave it out to use the documentation inside Python"
        ) from error
    if not content:
        raise DataError(f"data.path = {path!r} is an empty file\n  a text needs at least two tokens")
    return content
