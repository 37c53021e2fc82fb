"""Compiles ``shared_memory.cpp`` with the machine's C++ compiler, once, and loads it.

The library is kept in the user's cache under a name that changes with the source, the compiler's command and the
processor. It is written beside its place and moved there, so that several jobs may build it at the same time. Where
there is no compiler, or it fails, ``load`` says why, and the same protocol runs in Python.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from paceline.errors import CommunicationError

_SOURCE = Path(__file__).with_name("shared_memory.cpp")
_COMPILERS = ("c++", "g++", "clang++")
_FLAGS = ("-std=c++17", "-O3", "-shared", "-fPIC")
_TUNED = "-march=native"  # not every compiler knows it for every processor
_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """The compiled code, or why there is none."""

    code: ctypes.CDLL | None
    problem: str = ""


@cache
def load() -> Library:
    """Returns the compiled code, built on the first call on a machine; never raises."""
    try:
        return Library(code=ctypes.CDLL(str(build(find_compiler(), _cache_folder()))))
    except (CommunicationError, OSError) as error:
        return Library(code=None, problem=str(error))


def find_compiler() -> str:
    """Returns the path of a C++ compiler; raises CommunicationError where there is none."""
    for name in _COMPILERS:
        if path := shutil.which(name):
            return path
    raise CommunicationError(f"no C++ compiler: looked for {', '.join(_COMPILERS)}")


def build(compiler: str, folder: Path) -> Path:
    """Returns the library in ``folder``, compiled if it is not there yet."""
    source = _SOURCE.read_bytes()
    what = [compiler, *_FLAGS, platform.machine(), _processor()]
    name = hashlib.sha256(source + "\0".join(what).encode()).hexdigest()[:16]
    library = folder / f"shared_memory-{name}.so"
    if not library.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        _compile(compiler, library)
    return library


def _compile(compiler: str, library: Path) -> None:
    problems = []
    for tuning in ([_TUNED], []):
        with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
            made = Path(scratch) / library.name
            command = [compiler, *_FLAGS, *tuning, str(_SOURCE), "-o", str(made)]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
            except subprocess.TimeoutExpired:
                raise CommunicationError(f"{compiler} took more than {_TIMEOUT_S:g} s") from None
            if done.returncode == 0:
                made.replace(library)
                return
            problems.append(done.stderr.strip().splitlines()[:1])
    raise CommunicationError(f"{compiler} cannot compile {_SOURCE.name}: {problems[-1]}")


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
