"""The collectives of ``board.py`` as compiled code, on the same counters and slots.

An all-reduce of B bytes on N ranks at memory bandwidth W takes about 3 B/W for tensors of a rank's own, and 2 B/W for
tensors in a common buffer, of which every rank reduces a slice in place, for all.

``shared_memory.cpp`` is compiled with the machine's C++ compiler, once. The library is kept in the user's cache under a
name that changes with the source, the compiler's command and the processor; several jobs may build it at the same time.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch

from paceline.comm.base import OPS, Call
from paceline.comm.shared import board as plain
from paceline.comm.shared.board import Board
from paceline.comm.shared.progress import ProgressLoop, Steps
from paceline.errors import CommunicationError

_SOURCE = Path(__file__).with_name("shared_memory.cpp")
_COMPILERS = ("c++", "g++", "clang++")
_FLAGS = ("-std=c++17", "-O3", "-shared", "-fPIC")
_TUNED = "-march=native"  # not every compiler knows it for every processor
_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    code: ctypes.CDLL | None
    problem: str = ""


@cache
def load() -> Library:
    """Returns the compiled code, built on the first call on a machine; never raises: the same runs in Python."""
    try:
        return Library(code=ctypes.CDLL(str(build(find_compiler(), _cache_folder()))))
    except (CommunicationError, OSError) as error:
        return Library(code=None, problem=str(error))


def find_compiler() -> str:
    for name in _COMPILERS:
        if path := shutil.which(name):
            return path
    raise CommunicationError(f"no C++ compiler: looked for {', '.join(_COMPILERS)}")


def build(compiler: str, folder: Path) -> Path:
    source = _SOURCE.read_bytes()
    what = [compiler, *_FLAGS, platform.machine(), _processor()]
    name = hashlib.sha256(source + "\0".join(what).encode()).hexdigest()[:16]
    library, problem = folder / f"shared_memory-{name}.so", []
    if library.is_file():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    for tuning in ([_TUNED], []):
        with tempfile.TemporaryDirectory(dir=folder) as scratch:  # moved to its place when it is whole
            made = Path(scratch) / library.name
            command = [compiler, *_FLAGS, *tuning, str(_SOURCE), "-o", str(made)]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
            except subprocess.TimeoutExpired:
                raise CommunicationError(f"{compiler} took more than {_TIMEOUT_S:g} s") from None
            if done.returncode == 0:
                return made.replace(library)
            problem = done.stderr.strip().splitlines()[:1]
    raise CommunicationError(f"{compiler} cannot compile {_SOURCE.name}: {problem}")


def _cache_folder() -> Path:
    """Returns a folder of this user alone, from which it is safe to load code."""
    folder = Path.home() / ".cache" / "paceline"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK) and folder.stat().st_uid == os.getuid():
            return folder
    except (OSError, RuntimeError):
        pass
    return Path(tempfile.mkdtemp(prefix="paceline-"))


def _processor() -> str:
    """Returns what tells this processor from others: code tuned for one may not run on another."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    relevant = ("model name", "flags", "Features", "CPU implementer", "CPU part")
    return "\n".join(sorted({line for line in text.splitlines() if line.startswith(relevant)}))


_MISMATCH = 2  # what a step returns; 0: finished, 1: waiting
_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32)  # by their numbers
_BYTES = 8
MOST_RANKS = 1024  # of a group, as in the C++
MOST_BUFFERS = 4096  # their numbers are not used again
_PLACE_BITS = 40


class _CompiledGroup(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("words", "slots", "common", "common_bytes")),
        *((name, ctypes.c_int64) for name in ("size", "rank", "slot_bytes")),
    )


class _CompiledOperation(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("input", "output")),
        *((name, ctypes.c_int64) for name in ("kind", "type", "op", "source", "is_small", "length")),
        *((name, ctypes.c_int64) for name in ("meeting", "first", "rounds", "stamp", "place")),
        *((name, ctypes.c_int64) for name in ("put", "reduced", "taken", "counter", "ticket", "culprit", "moves")),
    )


class CompiledCollectives(plain.Collectives):
    """The collectives of one rank of a group; those of other dtypes than the compiled ones run in Python."""

    def __init__(self, code: ctypes.CDLL, board: Board, progress: ProgressLoop) -> None:
        super().__init__(board)
        code.paceline_advance.restype = ctypes.c_int64
        code.paceline_advance.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
        self._advance: Callable[[int, int, int], int] = code.paceline_advance
        self._types = {dtype: number for number, dtype in enumerate(_DTYPES) if number != 2 or code.paceline_has_half()}
        self._progress = progress
        self._common = (ctypes.c_void_p * MOST_BUFFERS)()
        self._common_bytes = (ctypes.c_int64 * MOST_BUFFERS)()
        self.num_buffers = 0
        self._owned: dict[int, range] = {}  # by the number of a common buffer, the addresses of this rank's area
        words = ctypes.addressof(ctypes.c_char.from_buffer(board.words))
        slots = board.slot(0, 0, torch.uint8).data_ptr()  # those of all rounds and ranks follow it
        common = (ctypes.addressof(self._common), ctypes.addressof(self._common_bytes))
        self._group = _CompiledGroup(words, slots, *common, board.size, board.rank, board.slot_bytes)

    def start(self, call: Call, output: torch.Tensor, tensor: torch.Tensor, stamp: int) -> Steps:
        is_moved = call.kind in ("all_gather", "broadcast")
        if tensor.numel() == 0 or not (is_moved or tensor.dtype in self._types):
            return super().start(call, output, tensor, stamp)
        if call.kind == "all_gather":
            own = output.view(self.board.size, tensor.numel())[self.board.rank]
            if own.data_ptr() != tensor.data_ptr():
                own.copy_(tensor)
        # Asked now, as the ranks issue in one order: when the operation starts, a rank may have buffers that another
        # has not made yet.
        meets = call.kind == "all_reduce" and self.num_buffers > 0
        return self._steps(call, output, tensor, stamp, meets=meets)

    def add_buffer(self, address: int, area_bytes: int) -> Callable[[], object]:
        """Adds a buffer whose tensors are reduced in place; on all ranks in one order. Returns what forgets it."""
        number, self.num_buffers = self.num_buffers, self.num_buffers + 1
        self._common[number], self._common_bytes[number] = address, area_bytes
        start = address + self.board.rank * area_bytes
        self._owned[number] = range(start, start + area_bytes)
        return partial(self._owned.pop, number, None)

    def _place(self, address: int, num_bytes: int) -> int:
        """Returns in which common buffer a tensor lies, and where; 0 if in none."""
        for number, area in self._owned.items():
            if address in area and address + num_bytes <= area.stop:
                return number + 1 << _PLACE_BITS | address - area.start
        return 0

    def _steps(self, call: Call, output: torch.Tensor, tensor: torch.Tensor, stamp: int, *, meets: bool) -> Steps:
        board, item, kind, source = self.board, tensor.element_size(), call.kind, call.peer
        length = output.numel() if kind == "reduce_scatter" else tensor.numel()
        num_bytes = length * item
        type_ = _BYTES if kind in ("all_gather", "broadcast") else self._types[tensor.dtype]
        is_small = kind == "all_reduce" and num_bytes <= min(plain.SMALL_BYTES, board.slot_bytes)
        per_round = plain.cell_of(board, item) if kind == "reduce_scatter" else board.slot_bytes // item
        rounds = -(-length // per_round)
        # Whether ranks meet first must not hang on where this rank's tensor lies: all of them count the same rounds.
        meets = meets and not is_small
        place = self._place(tensor.data_ptr(), num_bytes) if meets else 0
        first = board.take(rounds + meets)
        operation = _CompiledOperation(
            *(tensor.data_ptr(), output.data_ptr()),
            *(plain.KINDS.index(kind), type_, OPS.index(call.op), source, is_small, length),
            *(first if meets else 0, first + meets, rounds, stamp, place),
        )
        group, address = ctypes.addressof(self._group), ctypes.addressof(operation)
        moves = 0
        while status := self._advance(group, address, self._progress.patience_ns):
            if status == _MISMATCH:
                raise board.mismatch(operation.stamp, operation.culprit, operation.ticket)
            if operation.moves != moves:
                moves = operation.moves
                self._progress.fence.crossings += 1
            missing = board.behind(operation.counter, operation.ticket)
            yield (source,) if kind == "broadcast" and operation.counter == plain.ARRIVED else missing
        self._progress.fence.crossings += 1
        del output, tensor  # alive until here: the operation has their addresses
