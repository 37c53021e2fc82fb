"""Tokens in files that may be larger than memory: mapped, and read where a window lies.

    FOLDER        prepared by ``paceline data prepare``, with a manifest; else all its .bin or .npy files, by name
    FILE.bin      nanoGPT's: nothing but tokens, uint16 or uint32
    FILE.npy      one row of them, as numpy saves it
    train-*.bin   several, by name

Several files are one row of tokens. Every batch is compared with the vocabulary: the kernels of a GPU would end the
process at a token beyond it. ``manifest.json`` lists the shards with their tokens and SHA-256, and the vocabulary. It
is written last: a shard that is younger was changed since, and its hash is compared before a run reads it.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from paceline.data.order import Indices
from paceline.data.tokenizers import Tokenizer, has_tokenizer, open_tokenizer
from paceline.errors import BadSampleError, DataError
from paceline.untrusted import file_inside, is_count, open_regular, parse_json_object, plain_name, read_regular

_LOOKED_AT = 2**14  # bytes at each of three places of a raw file
_AT_ONCE = 2**24  # tokens
_FEWEST = 8  # tokens of four bytes, to judge by


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFile:
    """One file of ``tokens`` numbers of a ``dtype``, which begin at byte ``offset``."""

    path: Path
    dtype: str
    tokens: int
    offset: int = 0


class MappedTokens:
    """The tokens of several files, one after another. Its maps are opened when they are read, in each process anew."""

    def __init__(self, files: tuple[TokenFile, ...], vocab_size: int) -> None:
        self.files, self.vocab_size = files, vocab_size
        self._ends = np.cumsum([file.tokens for file in files], dtype=np.int64)
        self._maps: dict[int, NDArray[Any]] = {}
        self._may_be_negative = any(np.dtype(file.dtype).kind == "i" for file in files)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_maps": {}}

    def read(self, starts: Indices, length: int) -> NDArray[np.int64]:
        found = np.empty((len(starts), length), dtype=np.int64)
        numbers = np.searchsorted(self._ends, starts, side="right")
        for row, (start, number) in enumerate(zip(starts.tolist(), numbers.tolist(), strict=True)):
            first, done = start - (int(self._ends[number - 1]) if number else 0), 0
            while done < length:  # once, but for a window that reaches into the next files
                part = self._map(number)[first : first + length - done]
                found[row, done : done + len(part)] = part
                number, first, done = number + 1, 0, done + len(part)
        is_beyond = found.size and int(found.max()) >= self.vocab_size
        if is_beyond or (self._may_be_negative and found.size and int(found.min()) < 0):
            self._refuse(found, starts)
        return found

    def places_of(self, token: int) -> Indices:
        """Returns where a token is. Reads all files once, at the speed of the disk."""
        found = [np.empty(0, dtype=np.int64)]
        for number, file in enumerate(self.files):
            first = int(self._ends[number]) - file.tokens
            for start in range(0, file.tokens, _AT_ONCE):
                block = self._map(number)[start : start + _AT_ONCE]
                found.append(np.flatnonzero(block == token) + (first + start))
        return np.concatenate(found)

    def _map(self, number: int) -> NDArray[Any]:
        known = self._maps.get(number)
        if known is None:
            file = self.files[number]
            try:
                known = np.memmap(file.path, dtype=file.dtype, mode="r", offset=file.offset, shape=(file.tokens,))
            except OSError as error:
                rule = f"it had {file.tokens} tokens"
                raise DataError(f"{file.path} cannot be read any more: {error}\n  {rule}") from error
            except ValueError as error:
                size = file.path.stat().st_size
                what = f"{file.path} was cut off: it has {size:,} bytes, and had {file.tokens:,} tokens when it began"
                rule = "a run maps files that do not change"
                raise BadSampleError(f"{what}\n  {rule}\n  restore it, or prepare it again") from error
            self._maps[number] = known = np.asarray(known)
        return known

    def _refuse(self, found: NDArray[np.int64], starts: Indices) -> None:
        is_wrong = (found < 0) | (found >= self.vocab_size)
        row, column = np.unravel_index(int(np.argmax(is_wrong)), found.shape)
        place = int(starts[row]) + int(column)
        number = int(np.searchsorted(self._ends, place, side="right"))
        within = place - (int(self._ends[number - 1]) if number else 0)
        path, token = self.files[number].path, found[row, column]
        what = f"{path}: token {within} is {token}, beyond a vocabulary of {self.vocab_size}"
        rule = "every token is from 0 to data.vocab_size - 1, and raw files must be of the type that data.dtype says"
        raise BadSampleError(f"{what}\n  {rule}\n  check both, or prepare the file again")


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedTokens:
    tokens: MappedTokens
    end_token: int | None = None
    tokenizer: Tokenizer | None = None


def open_tokens(
    path: str, *, dtype: Literal["uint16", "uint32"] | None, vocab_size: int | None, verify: Verify = "fast"
) -> OpenedTokens:
    """Opens a prepared folder, raw files or numpy's. Raises ``DataError`` for what is missing, cut off or changed."""
    folder = Path(path).expanduser()
    if (folder / MANIFEST).is_file():
        manifest = read_manifest(folder)
        check_shards(folder, manifest, verify)
        shards, kind = [shard for shard in manifest.shards if shard.tokens], manifest.dtype
        files = [TokenFile(path=folder / shard.file, dtype=kind, tokens=shard.tokens) for shard in shards]
        tokens = _joined(files, max(vocab_size or 0, manifest.vocab_size), path)
        tokenizer = open_tokenizer(folder) if has_tokenizer(folder) else None
        return OpenedTokens(tokens=tokens, end_token=manifest.end_token, tokenizer=tokenizer)
    found = _find(path)
    if vocab_size is None:
        rule = "raw tokens do not say how many there may be"
        fix = "set data.vocab_size, such as 50257 for GPT-2's, or prepare the data with paceline data prepare"
        raise DataError(f"data.vocab_size is not set, and data.path = {path!r} has no {MANIFEST}\n  {rule}\n  {fix}")
    kind = dtype or file_dtype(vocab_size)
    return OpenedTokens(tokens=_joined([open_file(each, kind) for each in found], vocab_size, path))


def file_dtype(vocab_size: int) -> Literal["uint16", "uint32"]:
    """Returns the type of the tokens in a file: the smallest of the two that hold the vocabulary."""
    return "uint16" if vocab_size <= np.iinfo(np.uint16).max + 1 else "uint32"


def open_file(path: Path, dtype: Literal["uint16", "uint32"]) -> TokenFile:
    """Looks at a file of raw tokens, or of numpy's. Raises ``DataError`` where it is cut off, or has another type."""
    try:
        if path.suffix == ".npy":
            return _numpy_file(path)
        with open_regular(path) as file:
            size = file.seek(0, 2)
            is_wider = dtype == "uint16" and _looks_wider(file, size)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}\n  it is a file of tokens\n  restore it") from error
    item = np.dtype(dtype).itemsize
    if size % item or not size:
        what = f"{path} has {size:,} bytes, which is no whole number of {dtype} tokens"
        raise DataError(f"{what}\n  it was cut off, or has another type\n  copy it again, or set data.dtype")
    if is_wider:
        rule = "so it holds tokens of uint32: a raw file does not say its type, data.dtype does"
        fix = "set data.dtype = uint32; if every second token is 0, save the file as .npy, which says its type"
        raise DataError(f"{path}: read as uint16, every second token is 0\n  {rule}\n  {fix}")
    return TokenFile(path=path, dtype=dtype, tokens=size // item)


def _looks_wider(file: Any, size: int) -> bool:
    """Says whether numbers of two bytes look like halves of wider ones: every second is 0, wherever one looks."""
    blocks = []
    for start in (0, size // 2, size - _LOOKED_AT):
        file.seek(max(0, start // 4 * 4))
        content = file.read(_LOOKED_AT)
        blocks.append(np.frombuffer(content[: len(content) // 4 * 4], dtype="<u2").reshape(-1, 2))
    low, high = np.concatenate(blocks).T
    return len(low) >= _FEWEST and bool(low.any()) and not high.any()


def _numpy_file(path: Path) -> TokenFile:
    with open_regular(path) as file:
        major, _ = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if major == 1 else np.lib.format.read_array_header_2_0
        shape, _, kind = read(file)
        offset, size = file.tell(), file.seek(0, 2)
    if len(shape) != 1 or kind.kind not in "ui":
        raise ValueError(f"it holds {kind} of shape {shape}, and tokens are one row of whole numbers")
    if size - offset != shape[0] * kind.itemsize or not shape[0]:
        raise ValueError(f"it has {size - offset:,} bytes of tokens, and its header says {shape[0] * kind.itemsize:,}")
    return TokenFile(path=path, dtype=kind.str, tokens=shape[0], offset=offset)


def _find(path: str) -> list[Path]:
    place = Path(path).expanduser()
    found = [place] if place.exists() else sorted(place.parent.glob(place.name))
    if place.is_dir():
        found = sorted(each for each in place.iterdir() if each.suffix in (".bin", ".npy"))
    if not found:
        raise DataError(
            f"data.path = {path!r} holds no tokens\n  it is a folder that paceline data prepare has written, a .bin or "
            f".npy file, or a pattern such as 'train-*.bin'; a relative path starts at {Path.cwd()}\n  check the path"
        )
    return found


def _joined(files: list[TokenFile], vocab_size: int, path: str) -> MappedTokens:
    if not files:
        raise DataError(f"data.path = {path!r} has no tokens\n  a run needs at least two\n  prepare more text")
    return MappedTokens(tuple(files), vocab_size)


MANIFEST = "manifest.json"
FORMAT = "paceline-tokens-1"
Verify: TypeAlias = Literal["full", "fast", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenShard:
    file: str
    tokens: int
    documents: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DataManifest:
    """All that is known of a folder of tokens. ``source`` lists the files that it was made of."""

    dtype: str
    vocab_size: int
    end_token: int | None
    tokenizer: str
    skipped: int
    source: tuple[str, ...]
    shards: tuple[TokenShard, ...]

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)

    @property
    def documents(self) -> int:
        return sum(shard.documents for shard in self.shards)

    def write(self, folder: Path) -> None:
        part = folder / f"{MANIFEST}.part"
        part.write_text(json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n", encoding="utf-8")
        part.replace(folder / MANIFEST)


def read_manifest(folder: Path) -> DataManifest:
    try:
        return parse_manifest(read_regular(folder / MANIFEST))
    except (FileNotFoundError, NotADirectoryError) as error:
        rule = "it is a folder that paceline data prepare has written"
        fix = "check the path; a run reads raw files (.bin, .npy) too: set data.path and data.vocab_size"
        raise DataError(f"{folder} has no {MANIFEST}\n  {rule}\n  {fix}") from error
    except (OSError, ValueError) as error:
        rule = "it lists what paceline data prepare has written"
        raise DataError(f"{folder / MANIFEST} cannot be read: {error}\n  {rule}\n  prepare the data again") from error


def parse_manifest(content: bytes) -> DataManifest:
    values = parse_json_object(content)
    if values.pop("format", None) != FORMAT:
        raise ValueError(f"its format is not {FORMAT}")
    try:
        shards = tuple(TokenShard(**each) for each in values.pop("shards"))
        found = DataManifest(**{**values, "shards": shards, "source": tuple(values["source"])})
    except (TypeError, KeyError) as error:
        raise ValueError(f"it lacks a name, or has one too many: {error}") from error
    for shard in shards:
        file_inside(Path(os.curdir), plain_name(shard.file))
        if not is_count(shard.tokens) or not is_count(shard.documents) or not isinstance(shard.sha256, str):
            raise ValueError(f"its shard {shard.file!r} has no counts")
    is_right = found.dtype in ("uint16", "uint32") and is_count(found.vocab_size, 2**32)
    if not is_right or not (found.end_token is None or is_count(found.end_token, found.vocab_size - 1)):
        raise ValueError("its dtype, vocabulary or end token is none")
    return found


def check_shards(folder: Path, manifest: DataManifest, verify: Verify) -> None:
    """Raises ``DataError`` with all shards that are missing, cut off or changed since they were prepared.

    ``fast`` compares sizes, and the hashes of files that are younger than the manifest; ``full`` all hashes.
    """
    if verify == "none":
        return
    written = (folder / MANIFEST).stat().st_mtime_ns
    item = np.dtype(manifest.dtype).itemsize
    problems = []
    for shard in manifest.shards:
        path, expected = folder / shard.file, shard.tokens * item
        try:
            status = path.stat()
            if status.st_size != expected:
                problems.append(f"{path} has {status.st_size:,} bytes, and had {expected:,} when it was prepared")
            elif (verify == "full" or status.st_mtime_ns > written) and hash_file(path) != shard.sha256:
                problems.append(f"{path} has changed since it was prepared: its SHA-256 differs")
        except OSError as error:
            problems.append(f"{path} cannot be read: {error.strerror}")
    if problems:
        problems += [f"{MANIFEST} says what was prepared", "restore the files, or prepare them again"]
        raise DataError("\n  ".join(problems))


def hash_file(path: Path) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
