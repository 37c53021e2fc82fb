"""Where checkpoints lie: the few things that are done with files, so that another kind of storage can do them too.

A file outlives a crash of the machine when ``write`` has returned, and a name when ``settle`` of its folder has. A
rename is atomic: whoever looks sees the old name or the new one.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from paceline.checkpoint.manifest import SavedFile

_CHUNK_BYTES = 2**24
_LARGE_BYTES = 2**20


class Storage(Protocol):
    """Folders with files, by their paths."""

    def make_folder(self, path: Path) -> None:
        """Makes a folder and those above it, if they are not there."""

    def write(self, path: Path, chunks: Iterable[memoryview | bytes]) -> SavedFile:
        """Writes a file from its parts, to stay; returns its size and hash."""

    def read(self, path: Path) -> bytes:
        """Returns a whole file."""

    def read_into(self, path: Path, spans: Iterable[tuple[int, memoryview]]) -> None:
        """Fills buffers from places of one file. Raises EOFError where it ends before."""

    def size(self, path: Path) -> int | None:
        """Returns the size of a file; None if there is none."""

    def digest(self, path: Path) -> str:
        """Returns the SHA-256 of a file."""

    def names(self, path: Path) -> list[str]:
        """Returns what is in a folder, sorted; nothing if there is none."""

    def rename(self, path: Path, to: Path) -> None:
        """Gives a file or a folder another name in the same place, at once or not at all; replaces a file of it."""

    def settle(self, path: Path) -> None:
        """Makes the names in a folder stay."""

    def remove(self, path: Path) -> None:
        """Removes a folder with all that is in it, if it is there."""


class LocalFiles:
    """The file system of this machine, or one that is mounted on it."""

    def make_folder(self, path: Path) -> None:
        """Makes a folder and those above it, if they are not there."""
        path.mkdir(parents=True, exist_ok=True)

    def write(self, path: Path, chunks: Iterable[memoryview | bytes]) -> SavedFile:
        """Writes a file from its parts, to stay; returns its size and hash."""
        digest, num_bytes = hashlib.sha256(), 0
        # Hashing and writing both leave the interpreter alone: a second thread takes no time of the first one's.
        with ThreadPoolExecutor(1) as pool, path.open("wb", buffering=0) as file:
            for chunk in chunks:
                view = memoryview(chunk)
                hashed = pool.submit(digest.update, view) if len(view) >= _LARGE_BYTES else None
                if hashed is None:
                    digest.update(view)
                num_bytes += len(view)
                while view:  # a device may take less than it is given
                    view = view[file.write(view) :]
                if hashed is not None:
                    hashed.result()
            os.fsync(file.fileno())
        return SavedFile(num_bytes=num_bytes, sha256=digest.hexdigest())

    def read(self, path: Path) -> bytes:
        """Returns a whole file."""
        return path.read_bytes()

    def read_into(self, path: Path, spans: Iterable[tuple[int, memoryview]]) -> None:
        """Fills buffers from places of one file. Raises EOFError where it ends before."""
        with path.open("rb", buffering=0) as file:
            for offset, buffer in spans:
                file.seek(offset)
                view = buffer
                while view:
                    count = file.readinto(view)
                    if not count:
                        raise EOFError(f"{path} ends at byte {file.tell()}, and {len(view)} more are needed")
                    view = view[count:]

    def size(self, path: Path) -> int | None:
        """Returns the size of a file; None if there is none."""
        try:
            return path.stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return None

    def digest(self, path: Path) -> str:
        """Returns the SHA-256 of a file."""
        digest, chunk = hashlib.sha256(), bytearray(_CHUNK_BYTES)
        view = memoryview(chunk)
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(chunk):
                digest.update(view[:count])
        return digest.hexdigest()

    def names(self, path: Path) -> list[str]:
        """Returns what is in a folder, sorted; nothing if there is none."""
        try:
            return sorted(each.name for each in path.iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return []

    def rename(self, path: Path, to: Path) -> None:
        """Gives a file or a folder another name in the same place, at once or not at all; replaces a file of it."""
        path.replace(to)

    def settle(self, path: Path) -> None:
        """Makes the names in a folder stay."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def remove(self, path: Path) -> None:
        """Removes a folder with all that is in it, if it is there."""
        if path.exists():
            shutil.rmtree(path)
