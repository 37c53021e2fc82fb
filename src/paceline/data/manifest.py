"""What stands beside prepared tokens: ``manifest.json`` of a folder that ``paceline data prepare`` has written.

It lists the shards in order with their tokens and SHA-256, the vocabulary, and where all of it came from. It is written
last. So a shard that is younger than the manifest was changed since, and its hash is compared before a run reads it.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np

from paceline.errors import DataError
from paceline.untrusted import file_inside, is_count, open_regular, parse_json_object, plain_name, read_regular

MANIFEST = "manifest.json"
FORMAT = "paceline-tokens-1"
Verify: TypeAlias = Literal["full", "fast", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenShard:
    """One file of tokens."""

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
        """Writes it whole or not at all."""
        part = folder / f"{MANIFEST}.part"
        part.write_text(json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n", encoding="utf-8")
        part.replace(folder / MANIFEST)


def read_manifest(folder: Path) -> DataManifest:
    """Reads the manifest of a folder. Raises ``DataError`` where it is missing or damaged."""
    try:
        return parse_manifest(read_regular(folder / MANIFEST))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DataError(
            f"{folder} has no {MANIFEST}\n  it is a folder that paceline data prepare has written\n"
            "  check the path; a run reads raw files (.bin, .npy) too: set data.path and data.vocab_size"
        ) from error
    except (OSError, ValueError) as error:
        raise DataError(
            f"{folder / MANIFEST} cannot be read: {error}\n  it lists what paceline data prepare has written\n"
            "  prepare the data again"
        ) from error


def parse_manifest(content: bytes) -> DataManifest:
    """Reads a manifest. Raises ValueError for what is none."""
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

    ``fast`` compares sizes, and the hashes of files that are younger than the manifest; ``full`` compares all hashes.
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
        raise DataError(
            "\n  ".join(problems) + f"\n  {MANIFEST} says what was prepared\n  restore the files, or prepare them again"
        )


def hash_file(path: Path) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
