"""Files in the memory of hosts: each host's keeper serves its own to the others, and copies some of theirs.

    /dev/shm/paceline-run-<token>/snapshots/      one folder for each host, made by its launcher, removed by its keeper
      keepers.json                                where the keepers of all hosts answer, in the order of the hosts
      secret                                      which every connection proves (``wire.py``)
      .step-00000020.<token>/...                  what ranks write and read (``checkpoint/storage.py``)

Processes of a host read and write its folder themselves. A keeper answers what it has, gives a part of a file, hashes
one, and takes copies: it reads them from another keeper, each under a temporary name until it is there. No torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from paceline.comm.control import wire
from paceline.errors import CommunicationError
from paceline.untrusted import parse_json, plain_name, read_regular

FOLDER = Path("/dev/shm")  # nosec B108  # what lies there is in memory; folders of runs are their users' alone
ROOT = "snapshots"
PIECE_BYTES = 2**21  # of a file, in one message
_SECRET, _KEEPERS = "secret", "keepers.json"
_REPLY_S, _WORK_S, _SLOW = 10.0, 600.0, ("digest", "copy")  # these may take as long as work does
_AGAIN_S, _PAUSE_S = 3.0, 0.2
_gone: set[wire.Address] = set()  # keepers for which this process has waited in vain


def places_of_copies(place: int, size: int, copies: int) -> list[int]:
    """Returns which of so many hosts copy what the one at a place holds."""
    return [(place + number) % size for number in range(1, min(copies, size - 1) + 1)]


class Kept:
    """The folder of one host, for the processes there."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def make(self, secret: bytes) -> None:
        self.root.mkdir(mode=0o700)
        self.write_secret(secret)
        self.write_keepers(0, [])

    def write_secret(self, secret: bytes) -> None:
        if not (self.root / _SECRET).exists() or self.secret() != secret:
            wire.write_secret(self.root / _SECRET, secret)

    def secret(self) -> bytes:
        return wire.read_secret(self.root / _SECRET)

    def write_keepers(self, place: int, addresses: Iterable[wire.Address]) -> None:
        text = json.dumps([place, *([each.host, each.port] for each in addresses)])
        path = self.root / _KEEPERS
        with path.open("r+" if path.exists() else "w", encoding="ascii") as file:  # what is there has its room
            file.write(text)
            file.truncate()

    def keepers(self) -> tuple[int, list[wire.Address]]:
        """Returns which of the hosts this one is, and where the keepers of all of them answer."""
        place, *addresses = parse_json(read_regular(self.root / _KEEPERS))
        return int(place), [wire.Address(host, port) for host, port in addresses]

    def held(self) -> dict[str, dict[str, int]]:
        """Returns the sizes of this host's files, by folder and name."""
        found: dict[str, dict[str, int]] = {}
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile: what there was
            for folder in sorted(self.root.glob(".step-*")):
                found[folder.name] = {each.name: each.stat().st_size for each in sorted(folder.glob("[!.]*"))}
        return found

    def held_by(self, keeper: wire.Address) -> dict[str, dict[str, int]]:
        """Returns what another host's keeper holds; nothing where it is gone. One that was killed is started again."""
        deadline = time.monotonic() + (0.0 if keeper in _gone else _AGAIN_S)
        while True:
            with contextlib.suppress(OSError), self.asking(keeper) as ask:
                found: dict[str, dict[str, int]] = ask("held")
                _gone.discard(keeper)
                return found
            if time.monotonic() > deadline:
                _gone.add(keeper)
                return {}
            time.sleep(_PAUSE_S)

    def check_room(self, num_bytes: int) -> None:
        """Raises OSError where so much does not fit into this host's memory."""
        free, shared = psutil.virtual_memory().available, shutil.disk_usage(self.root).free
        if num_bytes > min(free, shared):
            where = "of this host's memory" if free < shared else "of /dev/shm"
            text = f"{num_bytes / 2**20:,.0f} MiB are needed, and {min(free, shared) / 2**20:,.0f} MiB {where} are free"
            raise OSError(errno.ENOSPC, text)

    @contextlib.contextmanager
    def asking(self, keeper: wire.Address) -> Iterator[Callable[..., Any]]:
        """Yields what asks a keeper. Raises OSError where it cannot be reached, refuses, or has another secret."""
        try:
            with contextlib.closing(wire.WireLink(keeper, self.secret(), _REPLY_S)) as link:
                yield lambda *request: link.ask(*request, timeout_s=_WORK_S if request[0] in _SLOW else _REPLY_S)
        except CommunicationError as error:
            raise OSError(errno.EIO, f"the keeper at {keeper}: {str(error).splitlines()[0]}") from error

    def operations(self) -> dict[str, Callable[..., Any]]:
        """Returns what this host's keeper answers."""
        return {"held": self.held, "read": self._read, "digest": self._digest, "copy": self._copy}

    def _path(self, folder: str, name: str) -> Path:
        if not folder.startswith(".step-") or name.startswith("."):
            raise ValueError(f"{folder}/{name} is no file of a snapshot")
        return self.root / plain_name(folder) / plain_name(name)

    def _read(self, folder: str, name: str, first: int, length: int) -> bytes:
        with self._path(folder, name).open("rb") as file:
            file.seek(int(first))
            content = file.read(min(int(length), PIECE_BYTES))
        if len(content) != length:
            raise EOFError(f"{name} has {len(content)} of {length} bytes at {first}")
        return content

    async def _digest(self, folder: str, name: str) -> str:
        def digest() -> str:
            with self._path(folder, name).open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()

        return await asyncio.to_thread(digest)

    async def _copy(self, host: str, port: int, folder: str, files: Sequence[Sequence[Any]]) -> None:
        """Takes files of another keeper, in this order. Raises OSError where they do not fit, or cannot be had."""

        def copy() -> None:
            self.check_room(sum(int(size) for _, size in files))
            with self.asking(wire.Address(host, port)) as ask:
                for name, size in files:
                    path = self._path(folder, name)
                    path.parent.mkdir(exist_ok=True)
                    partial = path.with_name(f".{path.name}")
                    with partial.open("wb") as file:
                        for first in range(0, size, PIECE_BYTES):
                            file.write(ask("read", folder, name, first, min(PIECE_BYTES, size - first)))
                    partial.replace(path)

        await asyncio.to_thread(copy)
