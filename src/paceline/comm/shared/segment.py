"""A piece of memory that the processes of one host share, and who among them is alive.

The creator makes a file in the system's memory file system and reserves every page of it, so that running out is an
error there and not a signal later. The others map it by its name, and the name is removed at once: from then on the
kernel frees the memory with the last process that maps it, however that ends. A creator that is killed before that
leaves a file behind; its name carries the creator's process, and the next start removes files of processes that are
gone.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import secrets
import socket
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from paceline.errors import CommunicationError

FOLDER = Path("/dev/shm")
_PROCESSES = Path("/proc")
_STEM = "paceline"


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A process by its number and the moment it started, as numbers are used again."""

    pid: int
    started: int

    @staticmethod
    def this() -> Process:
        """Returns the process that calls."""
        return Process(pid=os.getpid(), started=_state_of(os.getpid())[1])

    def is_alive(self) -> bool:
        """Says whether it still runs; one that has ended and whose parent has not looked yet does not."""
        state, started = _state_of(self.pid)
        return started == self.started and state not in ("", "Z", "X")


def _state_of(pid: int) -> tuple[str, int]:
    try:
        text = (_PROCESSES / str(pid) / "stat").read_text()
    except OSError:
        return "", 0
    fields = text.rpartition(")")[2].split()  # the name before it may hold blanks and brackets
    return fields[0], int(fields[19])


@dataclass(frozen=True, slots=True, kw_only=True)
class Whereabouts:
    """Where a rank runs: processes with the same ``host`` can share memory and see one another."""

    host: tuple[str, str, str]  # its name, its boot, its process numbers
    process: Process

    @staticmethod
    def here() -> Whereabouts:
        """Returns those of the process that calls."""
        boot = _read(_PROCESSES / "sys/kernel/random/boot_id")
        return Whereabouts(host=(socket.gethostname(), boot, _namespace()), process=Process.this())

    def __str__(self) -> str:
        name, boot, numbers = self.host
        return f"{name} (boot {boot[:8] or 'unknown'}, process namespace {numbers or 'unknown'})"


def _namespace() -> str:
    """Returns which numbering of processes is seen here: containers have one each."""
    try:
        return (_PROCESSES / "self/ns/pid").readlink().name.strip("pid:[]")
    except OSError:
        return ""


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


class Segment:
    """Shared memory, mapped into this process for as long as somebody uses it."""

    def __init__(self, memory: mmap.mmap, name: str) -> None:
        self.name = name
        self._memory = memory
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8)

    @staticmethod
    def create(num_bytes: int) -> Segment:
        """Makes a new segment of zeros; raises CommunicationError where there is no room for it."""
        if not FOLDER.is_dir():
            raise CommunicationError(no_folder())
        remove_stale_segments()
        free = os.statvfs(FOLDER)
        if free.f_bavail * free.f_frsize < num_bytes:
            raise CommunicationError(_no_room(num_bytes, free.f_bavail * free.f_frsize))
        process = Process.this()
        name = f"{_STEM}-{_namespace()}-{process.pid}-{process.started}-{secrets.token_hex(4)}"
        descriptor = os.open(FOLDER / name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, num_bytes)
            return Segment(mmap.mmap(descriptor, num_bytes), name)
        except OSError as error:
            (FOLDER / name).unlink()
            if error.errno in (errno.ENOSPC, errno.ENOMEM):
                raise CommunicationError(_no_room(num_bytes, free.f_bavail * free.f_frsize)) from error
            raise CommunicationError(f"cannot make {num_bytes} bytes of shared memory: {error}") from error
        finally:
            os.close(descriptor)

    @staticmethod
    def open(name: str, num_bytes: int) -> Segment:
        """Maps a segment that another process made."""
        try:
            descriptor = os.open(FOLDER / name, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise CommunicationError(
                f"cannot open {FOLDER / name}: {error.strerror}\n"
                "  ranks that share memory see the same files there, as the same user\n  use plain Gloo for these ranks"
            ) from error
        try:
            return Segment(mmap.mmap(descriptor, num_bytes), name)
        except (OSError, ValueError) as error:  # a ValueError where the file is shorter
            raise CommunicationError(f"cannot map {FOLDER / name}: {error}") from error
        finally:
            os.close(descriptor)

    def unlink(self) -> None:
        """Takes the name away; the memory stays until nobody maps it. Safe to call twice."""
        (FOLDER / self.name).unlink(missing_ok=True)

    @property
    def address(self) -> int:
        """Where it is mapped in this process."""
        return self._bytes.data_ptr()

    def when_freed(self, act: Callable[[], object]) -> None:
        """Calls ``act`` when nothing in this process uses the memory any more: no tensor lies in it."""
        weakref.finalize(self._memory, act).atexit = False

    def words(self, offset: int, count: int) -> memoryview:
        """Returns ``count`` integers of 8 bytes from ``offset`` on."""
        return memoryview(self._memory)[offset : offset + 8 * count].cast("q")

    def bytes(self, offset: int, count: int) -> torch.Tensor:
        """Returns ``count`` bytes from ``offset`` on."""
        return self._bytes[offset : offset + count]


def remove_stale_segments() -> None:
    """Removes the files of creators that are gone; those of other users and containers are left alone."""
    namespace = _namespace()
    for path in FOLDER.glob(f"{_STEM}-{namespace}-*-*-*"):
        pid, _, rest = path.name.removeprefix(f"{_STEM}-{namespace}-").partition("-")
        started = rest.partition("-")[0]
        if not (pid.isdigit() and started.isdigit()):
            continue
        if not Process(pid=int(pid), started=int(started)).is_alive():
            with contextlib.suppress(PermissionError, FileNotFoundError):  # another user's, or another start was faster
                path.unlink()


def no_folder() -> str:
    """Says that the system has no memory to share by name."""
    return f"this machine has no {FOLDER}\n  ranks of one host share memory through it\n  use plain Gloo here"


def _no_room(needed: int, free: int) -> str:
    return (
        f"shared memory needs {needed / 2**20:.1f} MiB, and {FOLDER} has {free / 2**20:.1f} MiB free\n"
        "  a group of ranks on one host keeps its buffers there\n"
        f"  make {FOLDER} larger (a container: --shm-size), end what fills it, or use plain Gloo"
    )
