"""Samples of a language model: windows of ``context`` tokens of a text, and as targets the same one token later.

    blocks   sample i begins at token i * T, in every epoch: each token is an input and a target at most once
    random   the N - T places where a window may begin are cut into as many equal spans as there are blocks; sample i
             begins at a place in span i that is drawn anew each epoch, as a pure function of (seed, epoch, i)

So an epoch of random windows is one pass over the text, and no two epochs have the same windows, which a model would
learn by heart. With an ``end_token``, what follows the ends of documents is no target (``models/gpt.py``: the mask).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.data.datasets import IGNORED, EpochDataset, Pair
from paceline.data.documents import decode_text
from paceline.data.order import Indices, mix_seed, random_words
from paceline.data.tokenizers import ByteTokenizer, CharTokenizer, Tokenizer, code_points, smallest_dtype
from paceline.errors import DataError

_WINDOWS = 0x77696E646F7773  # keeps these draws apart from those of the order


class Tokens(Protocol):
    """A long row of tokens, in memory or in files."""

    def __len__(self) -> int: ...

    def read(self, starts: Indices, length: int) -> NDArray[np.int64]:
        """Returns ``length`` tokens from each start on, of shape (starts, length)."""


class TokenArray:
    """Tokens in memory, or in one mapped file, of any integer type."""

    def __init__(self, values: NDArray[np.integer]) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def read(self, starts: Indices, length: int) -> NDArray[np.int64]:
        return np.lib.stride_tricks.sliding_window_view(self.values, length)[starts].astype(np.int64)


class TokenSlice:
    def __init__(self, tokens: Tokens, first: int, last: int) -> None:
        self._tokens, self._first, self._last = tokens, first, last

    def __len__(self) -> int:
        return self._last - self._first

    def read(self, starts: Indices, length: int) -> NDArray[np.int64]:
        return self._tokens.read(starts + self._first, length)


def split_tokens(tokens: Tokens, context: int, eval_fraction: float, source: str) -> tuple[Tokens, Tokens | None]:
    """Cuts tokens once, to train on and to evaluate on; raises ``DataError`` where a part has no whole window."""
    cut = round(len(tokens) * (1 - eval_fraction))
    check_part(cut, context, f"the training part of {source}", eval_fraction)
    if eval_fraction == 0:
        return tokens, None
    check_part(len(tokens) - cut, context, f"the evaluation part of {source}", eval_fraction)
    return TokenSlice(tokens, 0, cut), TokenSlice(tokens, cut, len(tokens))


def check_part(tokens: int, context: int, part: str, eval_fraction: float) -> None:
    if context < 1:
        raise DataError(f"data.context = {context}\n  a sample has at least one token")
    if tokens <= context:
        what = f"{part} has {tokens} tokens with data.eval_fraction = {eval_fraction}, for a context of {context}"
        rule = f"one sample needs {context + 1} tokens: the context, and one more as the last target"
        fix = "bring a longer text, a shorter context, or another data.eval_fraction (0: no evaluation)"
        raise DataError(f"{what}\n  {rule}\n  {fix}")


class TokenBlocks(EpochDataset):
    """Blocks of ``context`` tokens and their successors, one after another."""

    reads_ahead = True

    def __init__(self, tokens: Tokens, context: int, end_token: int | None = None) -> None:
        self.tokens, self.context, self.end_token = tokens, context, end_token

    def __len__(self) -> int:
        return max(len(self.tokens) - 1, 0) // self.context

    def starts(self, indices: Indices, epoch: int) -> Indices:  # noqa: ARG002  # the same in all
        return indices * self.context

    def read(self, indices: Indices, epoch: int) -> Pair:
        tokens = torch.from_numpy(self.tokens.read(self.starts(indices, epoch), self.context + 1))
        inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        if self.end_token is not None:
            targets.masked_fill_(inputs == self.end_token, IGNORED)
        return inputs, targets


class RandomWindows(TokenBlocks):
    """Windows that begin at random places, as many as there are blocks."""

    def __init__(self, tokens: Tokens, context: int, seed: int, end_token: int | None = None) -> None:
        super().__init__(tokens, context, end_token)
        self.seed = mix_seed(seed, _WINDOWS)

    def starts(self, indices: Indices, epoch: int) -> Indices:
        span, rest = divmod(len(self.tokens) - self.context, len(self))
        first = indices * span + np.minimum(indices, rest)
        size = span + (indices < rest)
        drawn = random_words(indices, self.seed, epoch) % size.astype(np.uint64)
        return first + drawn.astype(np.int64)


_AT_ONCE = 2**20  # characters


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedText:
    tokens: NDArray[np.integer]
    tokenizer: Tokenizer
    source: str


def load_text(path: str | None, unit: Literal["char", "bytes"] | Tokenizer) -> EncodedText:
    """Encodes a UTF-8 file, or the documentation inside Python. Characters, sorted, are the vocabulary of ``char``."""
    source = "the documentation inside Python" if path is None else f"data.path = {path!r}"
    content = _python_documentation().encode() if path is None else _read_file(path)
    if unit == "bytes":
        tokens = np.frombuffer(content, dtype=np.uint8)
        return EncodedText(tokens=tokens, tokenizer=ByteTokenizer(), source=source)
    text = content.decode() if path is None else decode_text(content, Path(path).expanduser())
    if unit == "char":
        # Fixed-width code points let numpy sort and number the characters of a long text in one go.
        vocabulary, numbers = np.unique(code_points(text), return_inverse=True)
        tokenizer = CharTokenizer("".join(map(chr, vocabulary.tolist())))
        encoded: NDArray[np.integer] = numbers.reshape(-1).astype(smallest_dtype(len(vocabulary)))
        return EncodedText(tokens=encoded, tokenizer=tokenizer, source=source)
    parts, start = [], 0  # of whole lines, which a tokenizer encodes side by side
    while start < len(text):
        end = text.find("\n", start + _AT_ONCE) + 1 or len(text)
        parts.append(text[start:end])
        start = end
    kind = smallest_dtype(unit.vocab_size)
    joined = np.concatenate([each.astype(kind) for each in unit.encode_many(parts)])
    return EncodedText(tokens=joined, tokenizer=unit, source=source)


def _python_documentation() -> str:
    """Returns the help topics that CPython carries, in the order of their names; they differ between versions."""
    try:
        from pydoc_data import topics
    except ImportError as error:
        what = "this Python was installed without pydoc_data.topics, its own documentation"
        rule = "it is the text that is used where data.path is not set"
        raise DataError(f"{what}\n  {rule}\n  set data.path to a UTF-8 text file") from error
    return "\n".join(text for _, text in sorted(topics.topics.items()))


def _read_file(path: str) -> bytes:
    try:
        content = Path(path).expanduser().read_bytes()
    except OSError as error:
        rule = f"it is looked for from the current directory, {Path.cwd()}"
        fix = "check the path and its permissions, or leave it out to use the documentation inside Python"
        raise DataError(f"data.path = {path!r} cannot be read: {error.strerror}\n  {rule}\n  {fix}") from error
    if not content:
        raise DataError(f"data.path = {path!r} is an empty file\n  a text needs at least two tokens")
    return content
