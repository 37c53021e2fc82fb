"""What tokens stand for: bytes, characters, or the pieces of a ``tokenizer.json`` of Hugging Face.

vocabulary.json   {"kind": "bytes"} or {"kind": "char", "characters": "..."}, with "end_token" where there is one
tokenizer.json    read by the package ``tokenizers``, which only this kind needs
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence, Sized
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import DataError
from paceline.untrusted import is_count, parse_json_object, read_regular

VOCABULARY = "vocabulary.json"
TOKENIZER = "tokenizer.json"
_BESIDE = ("tokenizer_config.json", "special_tokens_map.json")
TOKENIZER_FILES = (VOCABULARY, TOKENIZER, *_BESIDE)
_END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")
_PAD_TOKENS = ("[PAD]", "<pad>", "<|pad|>", "<|finetune_right_pad_id|>")
_NUM_BYTES = 256
_MOST_BYTES = 2**28


class Tokenizer(ABC):
    name: str  # in messages and manifests: bytes, char, or the name of its folder
    vocab_size: int  # every token is less
    end_token: int | None  # between documents; None where there is none
    pad_token: int | None = None  # behind shorter texts of a batch; None where there is none

    def encode_sample(self, texts: Sequence[str], context: int) -> tuple[list[int], list[int]]:
        """Returns the tokens of a text that stands alone, or of a pair, and of which text (0, 1) each is.

        Special tokens are those of the tokenizer; there are at most ``context``, and the longer text is cut first.
        """
        ending = [] if self.end_token is None else [self.end_token]
        parts = [self.encode(text) for text in texts]
        rooms = _rooms(parts, context - len(ending) * len(parts))
        found = [part[:room] + ending for part, room in zip(parts, rooms, strict=True)]
        return [token for part in found for token in part], [n for n, part in enumerate(found) for _ in part]

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of a text. Raises ``DataError`` for a character that it has no token for."""
        tokens: list[int] = self.encode_many([text])[0].tolist()
        return tokens

    @abstractmethod
    def encode_many(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]: ...

    @abstractmethod
    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of tokens; bytes that are no UTF-8 are shown as U+FFFD. The end token is left out."""

    @abstractmethod
    def files(self) -> dict[str, bytes]:
        """Returns the files that ``open_tokenizer`` reads, by name."""

    def save(self, folder: Path) -> None:
        """Writes the files; those that are there already, such as in the tokenizer's own folder, are left alone."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in self.files().items():
            if not (folder / name).is_file() or (folder / name).read_bytes() != content:
                (folder / name).write_bytes(content)


class ByteTokenizer(Tokenizer):
    """The bytes of UTF-8: 256 tokens, and one more between documents if ``has_end``."""

    name = "bytes"

    def __init__(self, *, has_end: bool = False) -> None:
        self.end_token = _NUM_BYTES if has_end else None
        self.vocab_size = _NUM_BYTES + has_end

    def decode(self, tokens: Sequence[int]) -> str:
        _check_tokens(tokens, self)
        return bytes(token for token in tokens if token != self.end_token).decode("utf-8", "replace")

    def encode_many(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        return [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint32) for text in texts]

    def files(self) -> dict[str, bytes]:
        return _vocabulary({"kind": "bytes", "end_token": self.end_token})


class CharTokenizer(Tokenizer):
    """Characters by their place in ``characters``, which are sorted and unique; one more token if ``has_end``."""

    name = "char"

    def __init__(self, characters: str, *, has_end: bool = False) -> None:
        self.characters = characters
        self.end_token = len(characters) if has_end else None
        self.vocab_size = len(characters) + has_end
        points = code_points(characters)
        # The token of each code point up to the last that is known: to look one up takes one load.
        self._tokens = np.full(int(points[-1]) + 2 if len(points) else 1, len(points), dtype=np.uint32)
        self._tokens[points] = np.arange(len(points))

    def decode(self, tokens: Sequence[int]) -> str:
        _check_tokens(tokens, self)
        return "".join(self.characters[token] for token in tokens if token != self.end_token)

    def encode_many(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        found: list[NDArray[np.uint32]] = []
        for text in texts:
            tokens = self._tokens.take(code_points(text), mode="clip")  # the last one has no token
            if tokens.max(initial=0) == len(self.characters) and len(tokens):
                place = int(np.argmax(tokens == len(self.characters)))
                what = f"character {text[place]!r} at place {place} is none of the {len(self.characters)}"
                rule = "the vocabulary of char is that of the text that was trained on"
                fix = "leave the character out, or train with bytes, which have a token for everything"
                raise DataError(f"{what} of the vocabulary\n  {rule}\n  {fix}")
            found.append(tokens)
        return found

    def files(self) -> dict[str, bytes]:
        return _vocabulary({"kind": "char", "characters": self.characters, "end_token": self.end_token})


class FolderTokenizer(Tokenizer):
    """The ``tokenizer.json`` of a folder, as Hugging Face writes it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.name = folder, folder.absolute().name
        self._inner = _load(folder / TOKENIZER)
        tokens: dict[str, int] = self._inner.get_vocab(with_added_tokens=True)
        self.vocab_size = max(tokens.values(), default=-1) + 1
        ends, pads = (_named(folder, "eos_token"), *_END_TOKENS), (_named(folder, "pad_token"), *_PAD_TOKENS)
        self.end_token = next((tokens[each] for each in ends if each in tokens), None)
        self.pad_token = next((tokens[each] for each in pads if each in tokens), None)

    def encode_sample(self, texts: Sequence[str], context: int) -> tuple[list[int], list[int]]:
        parts = [self._inner.encode(text, add_special_tokens=False) for text in texts]
        added = self._inner.num_special_tokens_to_add(is_pair=len(parts) > 1)
        for part, room in zip(parts, _rooms(parts, context - added), strict=True):
            part.truncate(room)
        found = self._inner.post_process(*parts, add_special_tokens=True)
        return found.ids, found.type_ids

    def decode(self, tokens: Sequence[int]) -> str:
        _check_tokens(tokens, self)
        text: str = self._inner.decode(list(tokens), skip_special_tokens=True)
        return text

    def encode_many(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        found = self._inner.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(each.ids, dtype=np.uint32) for each in found]

    def files(self) -> dict[str, bytes]:
        paths = [self.folder / name for name in (TOKENIZER, *_BESIDE)]
        return {path.name: path.read_bytes() for path in paths if path.is_file()}

    def __reduce__(self) -> tuple[Any, tuple[Path, int]]:
        return _reopen, (self.folder, (self.folder / TOKENIZER).stat().st_mtime_ns)


@lru_cache(maxsize=1)
def _reopen(folder: Path, _changed: int) -> FolderTokenizer:
    """Reads a tokenizer that came from another process: once, and with it what it remembers of words."""
    return FolderTokenizer(folder)


def _rooms(parts: Sequence[Sized], room: int) -> list[int]:
    """Returns how many tokens are kept of one text or of two, for which there is ``room``: the longer is cut first."""
    if len(parts) == 1:
        return [max(1, room)]
    least = min(*map(len, parts), room // 2)
    first = least if len(parts[0]) <= len(parts[1]) else room - least
    return [max(1, first), max(1, room - first)]


def code_points(text: str) -> NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)


def has_tokenizer(folder: Path) -> bool:
    return (folder / VOCABULARY).is_file() or (folder / TOKENIZER).is_file()


def open_tokenizer(folder: Path) -> Tokenizer:
    if (folder / VOCABULARY).is_file():
        return _read_vocabulary(folder / VOCABULARY)
    if (folder / TOKENIZER).is_file():
        return FolderTokenizer(folder)
    what = "has no tokenizer" if folder.is_dir() else "is no folder"
    rule = f"a tokenizer is a folder with {TOKENIZER} (Hugging Face) or {VOCABULARY} (Paceline)"
    raise DataError(f"{folder} {what}\n  {rule}\n  give a folder with one of them, or bytes, or char")


def smallest_dtype(vocab_size: int) -> np.dtype[Any]:
    return np.min_scalar_type(max(vocab_size - 1, 0))


def _check_tokens(tokens: Sequence[int], tokenizer: Tokenizer) -> None:
    wrong = [token for token in tokens if not 0 <= token < tokenizer.vocab_size]
    if wrong:
        what = f"token {wrong[0]} is beyond the vocabulary of {tokenizer.name}, which has {tokenizer.vocab_size} tokens"
        raise DataError(f"{what}\n  tokens are decoded by the tokenizer that made them")


def _vocabulary(values: dict[str, Any]) -> dict[str, bytes]:
    text = json.dumps({name: value for name, value in values.items() if value is not None}, ensure_ascii=False)
    return {VOCABULARY: f"{text}\n".encode()}


def _read_vocabulary(path: Path) -> Tokenizer:
    try:
        values = parse_json_object(read_regular(path, _MOST_BYTES))
        kind, characters, end = values.get("kind"), values.get("characters", ""), values.get("end_token")
        if kind not in ("bytes", "char") or not isinstance(characters, str) or (end is not None and not is_count(end)):
            raise ValueError('it needs "kind": "bytes", or "char" with "characters"')
        if kind == "char" and list(characters) != sorted(set(characters)):
            raise ValueError("its characters are not sorted, or one is there twice")
    except (OSError, ValueError) as error:
        rule = "it says what tokens stand for"
        raise DataError(f"{path} cannot be read: {error}\n  {rule}\n  restore it, or prepare the data again") from error
    has_end = end is not None
    return ByteTokenizer(has_end=has_end) if kind == "bytes" else CharTokenizer(characters, has_end=has_end)


def _load(path: Path) -> Any:
    try:
        import tokenizers
    except ImportError as error:
        rule = "it reads the tokenizers of Hugging Face"
        fix = "pip install 'paceline[data]', or use bytes or char"
        raise DataError(f"{path} needs the package tokenizers, which is not installed\n  {rule}\n  {fix}") from error
    try:
        return tokenizers.Tokenizer.from_str(read_regular(path, _MOST_BYTES).decode("utf-8"))
    except Exception as error:  # the package raises plain exceptions
        rule = "it is a file that tokenizers or transformers has saved"
        fix = "save it again with tokenizer.save_pretrained(folder)"
        raise DataError(f"{path} cannot be read as a tokenizer: {error}\n  {rule}\n  {fix}") from error


def _named(folder: Path, key: str) -> str:
    for name in _BESIDE:
        try:
            token = parse_json_object(read_regular(folder / name)).get(key)
        except (OSError, ValueError):
            continue
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            return token
    return ""
