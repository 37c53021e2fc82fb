"""Temporary folders of launchers; those that a killed one left are removed when the next one is made.

A folder lies in the system's folder for temporary files, and is its user's alone (0700): it holds sockets, and what
ranks print before they have a log. Its process holds a lock on a file in it, which the system lets go of when the
process ends, however that ends: a folder whose lock can be had is nobody's any more.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

_PREFIX, _LOCK = "paceline-run-", ".lock"
_MAKING_S = 60.0  # between a folder and its lock, at most
_HELD: dict[Path, int] = {}  # with the process that made it: for one that leaves without unwinding its blocks


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """Makes a temporary folder for as long as the block runs."""
    remove_leftovers()
    path = Path(tempfile.gettempdir(), f"{_PREFIX}{secrets.token_hex(8)}")
    _HELD[path] = os.getpid()  # before it is there: an interrupt may come at any moment
    lock = -1
    try:
        path.mkdir(mode=0o700)
        lock = os.open(path / f"{_LOCK}.new", os.O_RDWR | os.O_CREAT, 0o600)
        with contextlib.suppress(OSError):  # a file system without locks: then nobody finds it unlocked either
            fcntl.flock(lock, fcntl.LOCK_EX)
        (path / f"{_LOCK}.new").rename(path / _LOCK)  # locked when others can see it
        yield path
    finally:
        if lock >= 0:
            os.close(lock)
        _remove(path)


def remove_held() -> None:
    """Removes the folders of this process, which leaves at once: without unwinding the blocks that hold them."""
    for path, process in list(_HELD.items()):
        if process == os.getpid():
            _remove(path)


def _remove(path: Path) -> None:
    for _ in range(3):  # another thread may still write there
        shutil.rmtree(path, ignore_errors=True)
        if not path.exists():
            break
    _HELD.pop(path, None)


def remove_leftovers() -> None:
    """Removes the folders of this user that no process holds."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # it went meanwhile
            if path.is_symlink() or path.stat().st_uid != os.getuid():
                continue
            try:
                lock = os.open(path / _LOCK, os.O_RDWR)
            except FileNotFoundError:
                is_left = time.time() - path.stat().st_mtime > _MAKING_S
            else:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    is_left = True
                except OSError:
                    is_left = False
                finally:
                    os.close(lock)
            if is_left:
                shutil.rmtree(path, ignore_errors=True)
