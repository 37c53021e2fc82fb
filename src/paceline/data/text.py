"""A text as tokens, in blocks for a language model.

A block of context T holds T inputs and, one token later, T targets; the next block starts T tokens on. So every token
of a text is an input at most once and a target at most once. Tokens are kept in the smallest integer type that holds
the vocabulary, and become int64 in the batch: a gigabyte of bytes costs a gigabyte.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from paceline.data.datasets import InMemoryDataset, Pair
from paceline.errors import DataError

_NUM_BYTES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedText:
    """The tokens of a text (1-D), and the characters that they stand for in order; ``None`` for bytes."""

    tokens: torch.Tensor
    vocab_size: int
    characters: str | None
    source: str


class TokenBlocks(InMemoryDataset):
    """Blocks of ``context`` tokens and their successors: inputs ``tokens[i*T:(i+1)*T]``, targets one token later."""

    def __init__(self, tokens: torch.Tensor, context: int) -> None:
        self.tokens = tokens
        self.context = context

    def __len__(self) -> int:
        return max(len(self.tokens) - 1, 0) // self.context

    def take(self, index: torch.Tensor) -> Pair:
        # A view: neighbouring blocks share the token that is the last target of one and the first input of the other.
        blocks = self.tokens.unfold(0, self.context + 1, self.context)[index]
        return _as_int64(blocks[:, :-1]), _as_int64(blocks[:, 1:])


def load_text(path: str | None, unit: Literal["char", "byte"]) -> EncodedText:
    """Reads a UTF-8 file, or the documentation inside Python where ``path`` is ``None``, and encodes it.

    The characters of the whole text, sorted, are the vocabulary; bytes always have 256 tokens.
    """
    source = "the documentation inside Python" if path is None else f"data.path = {path!r}"
    content = _python_documentation().encode() if path is None else _read_file(path)
    if unit == "byte":
        tokens = torch.from_numpy(np.frombuffer(content, dtype=np.uint8).copy())
        return EncodedText(tokens=tokens, vocab_size=_NUM_BYTES, characters=None, source=source)
    # Fixed-width code points let numpy sort and number the characters of a long text in one go.
    points = np.frombuffer(_decode(content, source).encode("utf-32-le"), dtype=np.uint32)
    vocabulary, numbers = np.unique(points, return_inverse=True)
    return EncodedText(
        tokens=torch.from_numpy(numbers.reshape(-1).astype(_smallest_dtype(len(vocabulary)))),
        vocab_size=len(vocabulary),
        characters="".join(map(chr, vocabulary.tolist())),
        source=source,
    )


def split_blocks(text: EncodedText, context: int, eval_fraction: float) -> tuple[TokenBlocks, TokenBlocks | None]:
    """Cuts the text once, to train on and to evaluate on; raises ``DataError`` where a part has not one whole block."""
    if context < 1:
        raise DataError(f"data.context = {context}\n  a sample has at least one token")
    cut = round(len(text.tokens) * (1 - eval_fraction))
    train = _blocks(text, "training", text.tokens[:cut], context, eval_fraction)
    if eval_fraction == 0:
        return train, None
    return train, _blocks(text, "evaluation", text.tokens[cut:], context, eval_fraction)


def _blocks(text: EncodedText, part: str, tokens: torch.Tensor, context: int, eval_fraction: float) -> TokenBlocks:
    if len(tokens) <= context:
        raise DataError(
            f"the {part} part of {text.source} has {len(tokens)} tokens, of {len(text.tokens)} in all with "
            f"data.eval_fraction = {eval_fraction}, for a context of {context}\n"
            f"  one sample needs {context + 1} tokens: the context, and one more as the last target\n"
            f"  bring a longer text, a shorter context, or another data.eval_fraction (0: no evaluation)"
        )
    return TokenBlocks(tokens, context)


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


def _decode(content: bytes, source: str) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{source} is not UTF-8: {error.reason} at byte {error.start}\n"
            '  characters are read as UTF-8\n  convert the file, or set data.tokens = "byte"'
        ) from error


def _smallest_dtype(vocab_size: int) -> type[np.uint8] | type[np.int16] | type[np.int32]:
    if vocab_size <= np.iinfo(np.uint8).max + 1:
        return np.uint8
    return np.int16 if vocab_size <= np.iinfo(np.int16).max + 1 else np.int32


def _as_int64(tokens: torch.Tensor) -> torch.Tensor:
    return tokens.to(torch.int64, memory_format=torch.contiguous_format)
