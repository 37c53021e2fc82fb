"""Checkpoints in object stores and other places that fsspec knows: S3, GCS, Azure, HTTP file servers, memory.

An object store has no folders and no rename. So a rename here is a copy inside the store, object by object, and the
rule is

    the manifest comes last under the new name, and goes first under the old one.

Whatever is killed in between, a folder without a manifest is no checkpoint, and one with a manifest has all its files,
which the hashes in it prove. Cost: what is written is copied once more by the store itself; nothing comes back here.

A place keeps its protocol as a path does: ``Path("s3://bucket/run")`` is ``s3:/bucket/run``, and so are those below it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from paceline.checkpoint.manifest import MANIFEST, SavedFile
from paceline.checkpoint.storage import LocalFiles, Storage
from paceline.errors import CheckpointError, UsageError

_REMOTE = re.compile(r"^([a-z][a-z0-9+.-]+):/+")  # a single letter is a drive
_ROOTED = ("file", "local", "memory")  # whose paths begin with a slash
_CHUNK_BYTES = 2**24


class RemoteFiles:
    """A file system of fsspec."""

    def __init__(self, files: Any) -> None:
        self._files = files

    def make_folder(self, path: Path) -> None:
        """Makes a folder where the store has such a thing."""
        self._files.makedirs(_text(path), exist_ok=True)

    def write(self, path: Path, chunks: Iterable[memoryview | bytes]) -> SavedFile:
        """Writes a file from its parts; it is there when the store has taken all of it. Returns its size and hash."""
        digest, num_bytes = hashlib.sha256(), 0
        with self._files.open(_text(path), "wb", block_size=_CHUNK_BYTES) as file:
            for chunk in chunks:
                view = memoryview(chunk)
                file.write(view)
                digest.update(view)
                num_bytes += view.nbytes
        return SavedFile(num_bytes=num_bytes, sha256=digest.hexdigest())

    def read(self, path: Path) -> bytes:
        """Returns a whole file."""
        content: bytes = self._files.cat_file(_text(path))
        return content

    def read_into(self, path: Path, spans: Iterable[tuple[int, memoryview]]) -> None:
        """Fills buffers from places of one file. Raises EOFError where it ends before."""
        for offset, buffer in spans:
            for first in range(0, len(buffer), _CHUNK_BYTES):
                view = buffer[first : first + _CHUNK_BYTES]
                start = offset + first
                found = self._files.cat_file(_text(path), start=start, end=start + len(view))
                if len(found) != len(view):
                    raise EOFError(
                        f"{path} ends at byte {start + len(found)}, and {len(view) - len(found)} more are needed"
                    )
                view[:] = found

    def size(self, path: Path) -> int | None:
        """Returns the size of a file; None if there is none."""
        try:
            found = self._files.info(_text(path))
        except FileNotFoundError:
            return None
        return int(found["size"]) if found["type"] == "file" else None

    def digest(self, path: Path) -> str:
        """Returns the SHA-256 of a file, which is read in chunks."""
        digest = hashlib.sha256()
        with self._files.open(_text(path), "rb", block_size=_CHUNK_BYTES, cache_type="readahead") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
        return digest.hexdigest()

    def names(self, path: Path) -> list[str]:
        """Returns what is in a folder, sorted; nothing if there is none."""
        try:
            self._files.invalidate_cache(_text(path))  # other ranks write there, too
            found = self._files.ls(_text(path), detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(name.rstrip("/").rpartition("/")[2] for name in found)

    def rename(self, path: Path, to: Path) -> None:
        """Copies a file or a folder and removes the old one: the manifest last, and first."""
        if self.size(path) is not None:
            self._files.copy(_text(path), _text(to))
            self._files.rm_file(_text(path))
            return
        names = sorted(self.names(path), key=lambda name: (name == MANIFEST, name))
        self.remove(to)
        self.make_folder(to)
        for name in names:
            self._files.copy(_text(path / name), _text(to / name))
        self.remove(path)

    def settle(self, path: Path) -> None:
        """Does nothing: what a store has taken, stays."""
        del path

    def remove(self, path: Path) -> None:
        """Removes a folder with all that is in it, if it is there: its manifest first."""
        if self.size(path / MANIFEST) is not None:
            self._files.rm_file(_text(path / MANIFEST))
        if self.names(path):
            self._files.rm(_text(path), recursive=True)
        elif self._files.isdir(_text(path)):
            self._files.rmdir(_text(path))


def is_remote(where: str | Path) -> bool:
    """Says whether a place is one that fsspec is asked for, such as ``s3://bucket/run``."""
    return _REMOTE.match(str(where)) is not None


def storage_of(path: Path) -> Storage:
    """Returns what reads and writes a path: this machine's files, or those of the protocol that it begins with.

    Raises UsageError where fsspec, or what it needs for the protocol, is not installed.
    """
    found = _REMOTE.match(path.as_posix())
    if found is None:
        return LocalFiles()
    try:
        import fsspec
    except ImportError as error:
        raise UsageError(
            f"{url_of(path)} needs fsspec, which is not installed\n  URLs are read and written through it\n"
            "  pip install 'paceline[remote]'"
        ) from error
    try:
        return RemoteFiles(fsspec.filesystem(found[1]))
    except (ImportError, ValueError) as error:
        raise UsageError(
            f"{url_of(path)} cannot be opened: {error}\n  each protocol has a package of its own\n"
            "  for S3: pip install 'paceline[remote]' s3fs"
        ) from error
    except OSError as error:
        raise CheckpointError(
            f"{url_of(path)} cannot be reached: {error}\n  the store must answer\n  check its address and your rights"
        ) from error


def url_of(path: Path) -> str:
    """Returns a path as people write it: with both slashes behind a protocol."""
    text = path.as_posix()
    found = _REMOTE.match(text)
    if found is None:
        return text
    rest = text[found.end() :]
    return f"{found[1]}:///{rest}" if found[1] in _ROOTED else f"{found[1]}://{rest}"


def settled(path: Path) -> Path:
    """Returns a path that means the same in every folder and process."""
    return path if is_remote(path) else path.resolve()


def _text(path: Path) -> str:
    return url_of(path)
