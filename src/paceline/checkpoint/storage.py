"""Where checkpoints lie: the few things that are done with files, on this machine and in stores that fsspec knows.

A file outlives a crash of the machine when ``write`` has returned, and a name when ``sync_folder`` of its folder has. A
rename is atomic: whoever looks sees the old name or the new one.

An object store (S3, GCS, Azure, HTTP file servers, memory) has no folders and no rename. So a rename there is a copy
inside the store, object by object, and the rule is

    the manifest comes last under the new name, and goes first under the old one.

Whatever is killed in between, a folder without a manifest is no checkpoint, and one with a manifest has all its files,
which the hashes in it prove. Cost: what is written is copied once more by the store itself; nothing comes back here.

Snapshots lie in the memory of hosts. They outlive the ranks, and end with the run:

    .step-00000020.<token>/            on each host (``comm/control/kept.py``), written by the ranks of one attempt:
      rank-00000.f32.safetensors, ...  the files of this host's ranks, as on disk (``write.py``), and copies of some of
      rank-00000.json, .json.sha256    other hosts' ranks; the last one is the hash of the one before
      head.json                        with rank 0's files: what is the same on every rank, and who took part

No host has a whole snapshot. Whoever reads ``snapshot:/dev/shm/...`` sees the folders of all hosts as one, and reads
from them, through their keepers, the regions that it needs. A step is a checkpoint there when the files of all ranks of
one attempt are on some host: its manifest is made of them as it is read. So all that works with a checkpoint on disk
works with a snapshot: hashes, other numbers of ranks, the choice of the newest.

A place keeps its protocol as a path does: ``Path("s3://bucket/run")`` is ``s3:/bucket/run``. No torch.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from io import FileIO
from pathlib import Path
from typing import Any, TypeAlias

from paceline.checkpoint.manifest import (
    HEAD,
    MALFORMED,
    MANIFEST,
    SEAL,
    SavedFile,
    damaged,
    manifest_text,
    merge_parts,
    parse_manifest,
)
from paceline.comm.control.kept import PIECE_BYTES, ROOT, Kept
from paceline.comm.control.wire import Address
from paceline.config.suggest import near_folders
from paceline.errors import CheckpointError, UsageError
from paceline.untrusted import file_inside, is_count, open_regular, plain_name, read_regular

_REMOTE = re.compile(r"^([a-z][a-z0-9+.-]+):/+")  # a single letter is a drive
_SNAPSHOT = "snapshot:"
_ROOTED = ("file", "local", "memory", "snapshot")  # whose paths begin with a slash
_CHUNK_BYTES = 2**24
_LARGE_BYTES = 2**20
_MOST_THREADS = 8
_WEIGHTS = (".safetensors", ".pt", ".pth", ".bin")
_WEIGHT_FOLDERS = (".metadata", "model.safetensors", "model.safetensors.index.json")
# What keeps a file from being read or written: the rule, and the way out.
_FAILED = "its disk or the way to it failed"
_UNREADABLE = ("all of a checkpoint must be readable", "give yourself the permission, or read it as its owner")
_READING = dict.fromkeys((errno.EACCES, errno.EPERM), _UNREADABLE) | {
    errno.ENOENT: ("it is gone, or never was there", "check the path, or use another checkpoint"),
    errno.ENOTSUP: ("plain files alone are read", "copy the file itself there, or use another checkpoint"),
    errno.EFBIG: ("manifests and values are small", "use another checkpoint"),
}
_FORBIDDEN = ("nobody but its owner may write there", "name another place, or give yourself the permission")
_WRITING = dict.fromkeys((errno.EACCES, errno.EPERM), _FORBIDDEN) | {
    errno.ENOSPC: ("the disk is full", "free some space, or name another place"),
    errno.EDQUOT: ("the disk quota is used up", "free some space, or name another place"),
    errno.EFBIG: ("files may not grow that large here", "raise the limit (ulimit -f), or name another place"),
    errno.EROFS: ("the disk is read-only", "name another place"),
    errno.ENOTDIR: ("a file is where a folder is needed", "name another place"),
    errno.EEXIST: ("a file is where a folder is needed", "name another place"),
    errno.ENOENT: ("no folder can be made there", "name another place"),
}


def num_threads() -> int:
    """Returns how many threads of a rank read or write at once: a few, since other ranks of the host do so, too."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(_MOST_THREADS, cores // 2))


class LocalFiles:
    """The file system of this machine, or one that is mounted on it."""

    def make_folder(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)

    def write(self, path: Path, chunks: Iterable[memoryview | bytes]) -> SavedFile:
        """Writes a file from its parts, to stay; returns its size and hash."""
        digest, num_bytes = hashlib.sha256(), 0
        # Hashing and writing both leave the interpreter alone: a second thread takes no time of the first one's.
        with ThreadPoolExecutor(1) as pool, self.open_new(path) as file:
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
            file.truncate()  # what a file that is written over had more
            os.fsync(file.fileno())
        return SavedFile(num_bytes=num_bytes, sha256=digest.hexdigest())

    def open_new(self, path: Path) -> FileIO:
        return path.open("wb", buffering=0)

    def read(self, path: Path) -> bytes:
        return read_regular(path)

    def read_into(self, path: Path, spans: Iterable[tuple[int, memoryview]]) -> None:
        """Fills buffers from places of one file. Raises EOFError where it ends before."""
        with open_regular(path) as file:
            for offset, view in spans:
                file.seek(offset)
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
        with open_regular(path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def names(self, path: Path) -> list[str]:
        """Returns what is in a folder, sorted; nothing if there is none."""
        try:
            return sorted(each.name for each in path.iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return []

    def rename(self, path: Path, to: Path) -> None:
        """Gives a file or a folder another name in the same place, at once or not at all; replaces a file of it."""
        path.replace(to)

    def sync_folder(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def remove(self, path: Path) -> None:
        if path.is_dir():
            shutil.rmtree(path)
        elif path.exists():
            path.unlink()


class RemoteFiles:
    def __init__(self, files: Any) -> None:
        self._files = files

    def make_folder(self, path: Path) -> None:
        self._files.makedirs(url_of(path), exist_ok=True)

    def write(self, path: Path, chunks: Iterable[memoryview | bytes]) -> SavedFile:
        digest, num_bytes = hashlib.sha256(), 0
        with self._files.open(url_of(path), "wb", block_size=_CHUNK_BYTES) as file:
            for chunk in chunks:
                view = memoryview(chunk)
                file.write(view)
                digest.update(view)
                num_bytes += view.nbytes
        return SavedFile(num_bytes=num_bytes, sha256=digest.hexdigest())

    def read(self, path: Path) -> bytes:
        content: bytes = self._files.cat_file(url_of(path))
        return content

    def read_into(self, path: Path, spans: Iterable[tuple[int, memoryview]]) -> None:
        for offset, buffer in spans:
            for first in range(0, len(buffer), _CHUNK_BYTES):
                view, start = buffer[first : first + _CHUNK_BYTES], offset + first
                found = self._files.cat_file(url_of(path), start=start, end=start + len(view))
                if lacking := len(view) - len(found):
                    raise EOFError(f"{path} ends at byte {start + len(found)}, and {lacking} more are needed")
                view[:] = found

    def size(self, path: Path) -> int | None:
        try:
            found = self._files.info(url_of(path))
        except FileNotFoundError:
            return None
        return int(found["size"]) if found["type"] == "file" else None

    def digest(self, path: Path) -> str:
        digest = hashlib.sha256()
        with self._files.open(url_of(path), "rb", block_size=_CHUNK_BYTES, cache_type="readahead") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
        return digest.hexdigest()

    def names(self, path: Path) -> list[str]:
        try:
            self._files.invalidate_cache(url_of(path))  # other ranks write there, too
            found = self._files.ls(url_of(path), detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(name.rstrip("/").rpartition("/")[2] for name in found)

    def rename(self, path: Path, to: Path) -> None:
        """Copies a file or a folder and removes the old one: the manifest last, and first."""
        if self.size(path) is not None:
            self._files.copy(url_of(path), url_of(to))
            self._files.rm_file(url_of(path))
            return
        names = sorted(self.names(path), key=lambda name: (name == MANIFEST, name))
        self.remove(to)
        self.make_folder(to)
        for name in names:
            self._files.copy(url_of(path / name), url_of(to / name))
        self.remove(path)

    def sync_folder(self, _: Path) -> None:
        """Does nothing: what a store has taken, stays."""

    def remove(self, path: Path) -> None:
        if self.size(path / MANIFEST) is not None:  # which goes first
            self._files.rm_file(url_of(path / MANIFEST))
        if self.names(path):
            self._files.rm(url_of(path), recursive=True)
        elif self._files.isdir(url_of(path)):
            self._files.rmdir(url_of(path))


class SnapshotFiles(LocalFiles):
    """Reads what all hosts hold as one folder of checkpoints. It looks at the hosts once."""

    def __init__(self, path: Path) -> None:
        parts = path.parts
        self._top = parts.index(ROOT) + 1 if ROOT in parts else len(parts)
        self._kept = Kept(Path("/", *parts[1 : self._top]))
        self._manifests: dict[str, bytes] = {}

    def names(self, path: Path) -> list[str]:
        match path.parts[self._top :]:
            case ():
                return sorted({_step_of(each) for each in self._held})
            case (step,) if folder := self._folder(step):
                return sorted([*self._held[folder], *([MANIFEST] if self._manifest(folder) else [])])
        return []

    def size(self, path: Path) -> int | None:
        folder, name = self._place(path)
        if name == MANIFEST:
            return len(self._manifest(folder)) or None
        return self._held.get(folder, {}).get(name, (None,))[0]

    def read(self, path: Path) -> bytes:
        content = bytearray(self.size(path) or 0)
        self.read_into(path, [(0, memoryview(content))])
        return bytes(content)

    def read_into(self, path: Path, spans: Iterable[tuple[int, memoryview]]) -> None:
        folder, name = self._place(path)
        if name == MANIFEST:
            for offset, view in spans:
                view[:] = self._manifest(folder)[offset : offset + len(view)]
            return
        keeper = self._keeper(folder, name)
        if keeper is None:
            super().read_into(self._kept.root / folder / name, spans)
            return
        with self._kept.asking(keeper) as ask:
            for offset, view in spans:
                for first in range(0, len(view), PIECE_BYTES):
                    part = view[first : first + PIECE_BYTES]
                    part[:] = ask("read", folder, name, offset + first, len(part))

    def digest(self, path: Path) -> str:
        folder, name = self._place(path)
        keeper = self._keeper(folder, name)
        if keeper is None:
            return super().digest(self._kept.root / folder / name)
        with self._kept.asking(keeper) as ask:
            return str(ask("digest", folder, name))

    @cached_property
    def _held(self) -> dict[str, dict[str, tuple[int, Address | None]]]:
        """By folder and name, how large a file is and whose keeper has it; None: this host, which goes first."""
        place, keepers = self._kept.keepers()
        found: dict[str, dict[str, tuple[int, Address | None]]] = {}
        for each, keeper in [*enumerate(keepers), (place, None)]:
            held = {} if keeper is not None else self._kept.held()
            if keeper is not None and each != place:
                held = self._kept.held_by(keeper)
            for folder, files in held.items():
                rows = {plain_name(name): (size, keeper) for name, size in files.items() if is_count(size)}
                found.setdefault(plain_name(folder), {}).update(rows)
        return found

    def _place(self, path: Path) -> tuple[str, str]:
        """Returns the folder and the name of a file on the hosts."""
        match path.parts[self._top :]:
            case (step, name):
                return (step if step.startswith(".") else self._folder(step)), name
        return "", ""

    def _folder(self, step: str) -> str:
        """Returns the folder of a step; of those of several attempts one that is whole."""
        found = [each for each in self._held if _step_of(each) == step]
        return max(found, key=lambda each: bool(self._manifest(each)), default="")

    def _keeper(self, folder: str, name: str) -> Address | None:
        try:
            return self._held[folder][name][1]
        except KeyError:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), f"{folder}/{name}") from None

    def _manifest(self, folder: str) -> bytes:
        """Returns the manifest of what the ranks of one attempt wrote; nothing where files of some are missing."""
        if folder not in self._manifests:
            self._manifests[folder] = self._merged(folder)
        return self._manifests[folder]

    def _merged(self, folder: str) -> bytes:
        where, files = snapshots_in(self._kept.root), self._held.get(folder, {})
        if HEAD not in files:
            return b""
        try:
            head = parse_manifest(self.read(where / folder / HEAD).decode(), where / folder / HEAD)
            if _step_of(folder) != f"step-{head.step:08d}":
                raise damaged(f"{where / folder} is damaged: what is in it is of step {head.step}")
            if not {name + SEAL for name in head.files} <= files.keys():
                return b""
            found = merge_parts({name: self.read(where / folder / name) for name in head.files}, head)
        except MALFORMED as error:
            raise damaged(f"{where / folder} is damaged: {type(error).__name__}: {error}") from error
        for name in head.files:
            if self.read(where / folder / (name + SEAL)) != found.files[name].sha256.encode():
                raise damaged(f"{where / folder / name} is damaged: its hash is not its own")
        return manifest_text(found).encode()


def _step_of(folder: str) -> str:
    return folder[1:].rpartition(".")[0]


def is_snapshot(path: Path) -> bool:
    return path.parts[:1] == (_SNAPSHOT,)


def snapshots_in(root: Path) -> Path:
    """Returns what reads the snapshots of all hosts, for a process on the host that has this folder."""
    return Path(f"{_SNAPSHOT}{root.as_posix()}")


def on_this_host(path: Path, root: Path | None) -> Path:
    """Returns the path by which a host with this folder reads what another one has found."""
    return snapshots_in(root) / path.name if root is not None and is_snapshot(path) else path


FileStore: TypeAlias = LocalFiles | RemoteFiles


def file_in(folder: Path, name: str) -> Path:
    """Returns the path of a file of a checkpoint. Raises CheckpointError for a path or link that leads elsewhere."""
    try:
        found = _REMOTE.match(folder.as_posix())
        if found is None:
            return file_inside(folder, name)
        if found[1] in ("file", "local"):  # by fsspec's way, which opens pipes, too
            path = file_inside(Path("/", folder.as_posix()[found.end() :]), name)
            if path.exists() and not path.is_file():
                raise ValueError(f"{name!r} is not a plain file")
        return folder / plain_name(name)
    except ValueError as error:
        raise damaged(f"{url_of(folder)} is damaged: {error}") from error


def put_in_place(storage: FileStore, partial: Path, final: Path) -> None:
    """Gives what was written under a temporary name its own, to stay. What had that name is removed behind it."""
    old = final.with_name(f".{final.name}.old")
    storage.remove(old)
    is_there = bool(storage.names(final)) or storage.size(final) is not None
    if is_there:
        storage.rename(final, old)
    try:
        storage.rename(partial, final)
    except OSError:
        if is_there:
            storage.rename(old, final)
        raise
    storage.sync_folder(final.parent)
    storage.remove(old)


def is_remote(where: str | Path) -> bool:
    return _REMOTE.match(str(where)) is not None


def storage_of(path: Path) -> FileStore:
    """Returns what reads and writes a path. Raises UsageError where what its protocol needs is not installed."""
    found = _REMOTE.match(path.as_posix())
    if found is None:
        return LocalFiles()
    if found[1] == "snapshot":
        return SnapshotFiles(path)
    try:
        import fsspec
    except ImportError as error:
        rule = "URLs are read and written through fsspec, which is not installed"
        raise UsageError(f"{url_of(path)} needs fsspec\n  {rule}\n  pip install 'paceline[remote]'") from error
    try:
        return RemoteFiles(fsspec.filesystem(found[1]))
    except (ImportError, ValueError) as error:
        rule, fix = "each protocol has a package of its own", "for S3: pip install 'paceline[remote]' s3fs"
        raise UsageError(f"{url_of(path)} cannot be opened: {error}\n  {rule}\n  {fix}") from error
    except OSError as error:
        what = f"{url_of(path)} cannot be reached: {error}"
        raise CheckpointError(f"{what}\n  the store must answer\n  check its address and your rights") from error


def url_of(path: Path) -> str:
    """Returns a path as people write it: with both slashes behind a protocol."""
    text = path.as_posix()
    found = _REMOTE.match(text)
    if found is None:
        return text
    rest = text[found.end() :]
    return f"{found[1]}:///{rest}" if found[1] in _ROOTED else f"{found[1]}://{rest}"


def absolute_path(path: Path) -> Path:
    """Returns a path that means the same in every folder and process."""
    return path if is_remote(path) else path.resolve()


def nothing_there(path: Path, fix: str) -> CheckpointError:
    """Returns the error of a place without checkpoints, with what is there instead; ``fix`` fits who asked."""
    where, rule = url_of(path), "a run saves into <run folder>/checkpoints/step-<number>"
    if not isinstance(storage_of(path), LocalFiles):
        return CheckpointError(f"no checkpoint in {where}\n  {rule}\n  {fix}")
    if path.suffix in _WEIGHTS if path.is_file() else any((path / name).is_file() for name in _WEIGHT_FOLDERS):
        what = f"no checkpoint in {where}: it holds weights in another format"
        return CheckpointError(f"{what}\n  {rule}\n  take them in first:  paceline checkpoint import {where} DST")
    what = ": there is no such folder" if not path.exists() else ": it is a file" if path.is_file() else ""
    return CheckpointError(f"no checkpoint in {where}{what}\n  {rule}\n  {near_folders(path) or fix}")


def cannot_read(path: Path, error: OSError) -> CheckpointError:
    """Returns the error of a file or folder that the system does not let anybody read."""
    where, why = url_of(Path(error.filename or path)), error.strerror or str(error)
    rule, fix = _READING.get(error.errno or 0, (_FAILED, "look at the disk, or use another checkpoint"))
    return CheckpointError(f"{where} cannot be read: {why}\n  {rule}\n  {fix}")


def cannot_write(path: Path, error: OSError, *, name: str = "") -> CheckpointError:
    """Returns the error of a place that cannot be written. ``name`` is the setting that it comes from, if any."""
    rule, fix = _WRITING.get(error.errno or 0, (_FAILED, "look at the disk"))
    what = f"{name} = {url_of(path)}" if name else url_of(path)
    return CheckpointError(f"cannot write {what}: {error.strerror or error}\n  {rule}\n  {fix}")
