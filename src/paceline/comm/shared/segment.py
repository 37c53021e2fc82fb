"""A piece of memory that the processes of one host share, what lies where in it, and who among them is alive.

The creator makes a file in the system's memory file system and reserves every page of it, so that running out is an
error there and not a signal later. The others map it by its name, and the name is removed at once: from then on the
kernel frees the memory with the last process that maps it. A creator that is killed before that leaves a file behind;
its name carries the creator's process, and the next start removes files of processes that are gone.

Slots and cells shrink as groups grow: up to 25 ranks a segment takes 40 MiB at most, and above that 1.25 MiB more with
each rank.
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

from paceline.comm.shared import board
from paceline.comm.shared.progress import CELLS, COUNTER_WORDS, HEADER_WORDS, Fence, Ring
from paceline.errors import CommunicationError
from paceline.shards import round_up

FOLDER = Path("/dev/shm")  # nosec B108  # files there are made with O_EXCL
_PROCESSES = Path("/proc")
_STEM = "paceline"
LINE_BYTES = 64  # bytes of a cache line
_SLOT_BYTES = (256 * 1024, 1024 * 1024)  # a chunk: large against the cost of a round, small against the cache
_ALL_SLOTS_BYTES = 32 * 2**20
_CELL_BYTES = (4 * 1024, 256 * 1024)
_ALL_CELLS_BYTES = 8 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A process by its number and the moment it started, as numbers are used again."""

    pid: int
    started: int

    @staticmethod
    def this() -> Process:
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
class RankLocation:
    """Where a rank runs: processes with the same ``host`` can share memory and see one another."""

    host: tuple[str, str, str]  # its name, its boot, its process numbers
    process: Process

    @staticmethod
    def here() -> RankLocation:
        try:
            boot = (_PROCESSES / "sys/kernel/random/boot_id").read_text().strip()
        except OSError:
            boot = ""
        return RankLocation(host=(socket.gethostname(), boot, _namespace()), process=Process.this())

    def __str__(self) -> str:
        name, boot, numbers = self.host
        return f"{name} (boot {boot[:8] or 'unknown'}, process namespace {numbers or 'unknown'})"


def _namespace() -> str:
    """Returns which numbering of processes is seen here: containers have one each."""
    try:
        return (_PROCESSES / "self/ns/pid").readlink().name.strip("pid:[]")
    except OSError:
        return ""


class SharedSegment:
    """Shared memory, mapped into this process for as long as somebody uses it."""

    def __init__(self, memory: mmap.mmap, name: str) -> None:
        self.name = name
        self._memory = memory
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self.address = self._bytes.data_ptr()  # in this process

    @staticmethod
    def create(num_bytes: int) -> SharedSegment:
        if not FOLDER.is_dir():
            raise CommunicationError(no_folder())
        remove_stale_segments()
        found = os.statvfs(FOLDER)
        free = found.f_bavail * found.f_frsize
        no_room = (
            f"shared memory needs {num_bytes / 2**20:.1f} MiB, and {FOLDER} has {free / 2**20:.1f} MiB free\n"
            "  a group of ranks on one host keeps its buffers there\n"
            f"  make {FOLDER} larger (a container: --shm-size), end what fills it, or use plain Gloo"
        )
        if free < num_bytes:
            raise CommunicationError(no_room)
        process = Process.this()
        name = f"{_STEM}-{_namespace()}-{process.pid}-{process.started}-{secrets.token_hex(4)}"
        descriptor = os.open(FOLDER / name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, num_bytes)
            return SharedSegment(mmap.mmap(descriptor, num_bytes), name)
        except OSError as error:
            (FOLDER / name).unlink()
            why = f"cannot make {num_bytes} bytes of shared memory: {error}"
            raise CommunicationError(no_room if error.errno in (errno.ENOSPC, errno.ENOMEM) else why) from error
        finally:
            os.close(descriptor)

    @staticmethod
    def open(name: str, num_bytes: int) -> SharedSegment:
        try:
            descriptor = os.open(FOLDER / name, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            what = f"cannot open {FOLDER / name}: {error.strerror}"
            rule = "ranks that share memory see the same files there, as the same user"
            raise CommunicationError(f"{what}\n  {rule}\n  use plain Gloo for these ranks") from error
        try:
            return SharedSegment(mmap.mmap(descriptor, num_bytes), name)
        except (OSError, ValueError) as error:  # a ValueError where the file is shorter
            raise CommunicationError(f"cannot map {FOLDER / name}: {error}") from error
        finally:
            os.close(descriptor)

    def unlink(self) -> None:
        """Takes the name away; the memory stays until nobody maps it. Safe to call twice."""
        (FOLDER / self.name).unlink(missing_ok=True)

    def when_freed(self, act: Callable[[], object]) -> None:
        """Calls ``act`` when nothing in this process uses the memory any more: no tensor lies in it."""
        weakref.finalize(self._memory, act).atexit = False

    def words(self, offset: int, count: int) -> memoryview:
        return memoryview(self._memory)[offset : offset + 8 * count].cast("q")

    def bytes(self, offset: int, count: int) -> torch.Tensor:
        return self._bytes[offset : offset + count]


class SegmentLayout:
    """Where in a segment everything is, for a group of ``size`` ranks: offsets in bytes.

    In this order: the board's words, a cache line of each rank for its failure, counters of rings, headers of cells,
    areas, cells. Groups that are ``is_quick`` have compiled code and a core for each rank: slots are small.
    """

    def __init__(self, size: int, *, is_quick: bool) -> None:
        self.size = size
        num_cells, num_slots = size**2 * CELLS, size * board.SLOTS
        low, high = _SLOT_BYTES
        self.slot_bytes = low if is_quick else _bytes_each(_ALL_SLOTS_BYTES, num_slots, low, high)
        self.cell_bytes = _bytes_each(_ALL_CELLS_BYTES, num_cells, *_CELL_BYTES)
        self._failures = 8 * board.WORDS * size
        self._counters = self._failures + size * LINE_BYTES
        self._headers = self._counters + 8 * COUNTER_WORDS * size**2
        self._areas = round_up(self._headers + 8 * HEADER_WORDS * num_cells, 4096)
        self._cells = self._areas + num_slots * self.slot_bytes
        self.num_bytes = self._cells + num_cells * self.cell_bytes

    def make_board(self, segment: SharedSegment, rank: int, fence: Fence) -> board.Board:
        starts = range(self._areas, self._cells, self.slot_bytes)
        slots = [segment.bytes(start, self.slot_bytes) for start in starts]
        areas = [slots[owner * board.SLOTS :][: board.SLOTS] for owner in range(self.size)]
        return board.Board(segment.words(0, board.WORDS * self.size), areas, rank, fence)

    def failures(self, segment: SharedSegment) -> memoryview:
        """Returns a word for each rank, a cache line apart, that is set when it gives up."""
        return segment.words(self._failures, self.size * LINE_BYTES // 8)[:: LINE_BYTES // 8]

    def make_ring(self, segment: SharedSegment, source: int, to: int, fence: Fence) -> Ring:
        pair = source * self.size + to
        counters = segment.words(self._counters + 8 * COUNTER_WORDS * pair, COUNTER_WORDS)
        places = range(pair * CELLS, (pair + 1) * CELLS)
        headers = [segment.words(self._headers + 8 * HEADER_WORDS * place, HEADER_WORDS) for place in places]
        cells = [segment.bytes(self._cells + self.cell_bytes * place, self.cell_bytes) for place in places]
        return Ring(counters, headers, cells, fence)


def _bytes_each(total: int, count: int, low: int, high: int) -> int:
    """Shares ``total`` bytes out in whole cache lines, within limits: less for each in a larger group."""
    return min(high, max(low, total // count // LINE_BYTES * LINE_BYTES))


def remove_stale_segments() -> None:
    """Removes the files of creators that are gone; those of other users and containers are left alone."""
    for path in stale_segments(_namespace()):
        with contextlib.suppress(PermissionError, FileNotFoundError):  # another user's, or another start was faster
            path.unlink()


def stale_segments(namespace: str = "*") -> list[Path]:
    stale = []
    for path in FOLDER.glob(f"{_STEM}-{namespace}-*-*-*"):
        pid, started, _ = path.name.split("-")[-3:]
        if pid.isdigit() and started.isdigit() and not Process(pid=int(pid), started=int(started)).is_alive():
            stale.append(path)
    return stale


def no_folder() -> str:
    return f"this machine has no {FOLDER}\n  ranks of one host share memory through it\n  use plain Gloo here"
