"""The processes that ranks are: their cores, memory and output, and how they end.

**Cores.** Each rank on a CPU keeps to its share of the host's cores. It and the threads of its backend wake one another
all the time; free to go anywhere, they wait on the cores of other ranks while their own has nothing to do.

**Memory.** What a step frees is needed again in the next. Some builds of torch (those for ARM) use an allocator that
gives it back to the system after 10 ms; then every step takes page faults for all of its gradients.

**No process is left behind.** A rank leads a process group with its loader workers, asks for its parent twice a second,
and takes the group along: a signal from Linux (PR_SET_PDEATHSIG) would end it before it can.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import psutil

if TYPE_CHECKING:
    from paceline.config import Config

_COMPILED = "TORCHINDUCTOR_CACHE_DIR"
PROFILE = "PACELINE_PROFILE"  # the folder that profiled ranks leave what they saw in
MACHINE = "PACELINE_MACHINE"  # a file that says what this machine can do


def loopback_interface() -> str:
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), "lo")


def profile_request() -> Path | None:
    """Returns the folder that ``paceline profile`` wants the spans of this rank in; None in every other run."""
    folder = os.environ.get(PROFILE)
    return None if folder is None else Path(folder)


def machine_entry() -> Path | None:
    named = os.environ.get(MACHINE)
    return Path(named) if named else None


def node_ranks(config: Config) -> int | None:
    """Returns how many ranks share this host: as the config says, or the launcher; None: all of them."""
    detected = os.environ.get("LOCAL_WORLD_SIZE")
    return config.parallel.node_ranks or (None if detected is None else int(detected))


def restarted_by_launcher() -> dict[str, Any] | None:
    """Returns which restart by torch's agent this is; None for the first start."""
    number = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    of = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    return {"number": number, "of": of, "reason": "restarted by the agent"} if number else None


def uses_nccl(config: Config) -> bool:
    return config.comm.backend in ("auto", "nccl") and uses_gpu(config)


def uses_gpu(config: Config) -> bool:
    import torch

    return config.parallel.device != "cpu" and torch.cuda.is_available()


def open_device(config: Config, *, waits: bool = False) -> None:
    """Has a thread open this rank's GPU while the process does other things; or ``waits``, until it has multiplied.

    That takes seconds. Torch does it when it first needs the device, and holds all threads of Python up meanwhile.
    """
    import torch

    number = int(os.environ.get("LOCAL_RANK", "0"))
    if not uses_gpu(config) or torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return
    if not waits:
        threading.Thread(target=_open_device, args=(number,), name="device", daemon=True).start()
        return
    torch.cuda.set_device(number)
    for dtype in (torch.float32, torch.bfloat16):  # whose libraries are loaded by the first product
        square = torch.ones(64, 64, device=f"cuda:{number}", dtype=dtype)
        (square @ square).sum().item()


def _open_device(number: int) -> None:
    with contextlib.suppress(OSError, AttributeError):  # no driver of that name: torch opens the device
        driver = ctypes.CDLL("libcuda.so.1")
        device, context = ctypes.c_int(), ctypes.c_void_p()
        if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), number) == 0:
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)  # the one that torch will use


def keep_cores(config: Config) -> None:
    """Keeps a rank on a CPU, and the threads that its backend will start, to its share of the host's cores."""
    local_rank, local_ranks = os.environ.get("LOCAL_RANK"), os.environ.get("LOCAL_WORLD_SIZE")
    if not config.parallel.own_cores or local_rank is None or local_ranks is None or uses_gpu(config):
        return
    keep_to_own_cores(int(local_rank), int(local_ranks), config.parallel.threads or 1)


def redirect_output(path: Path) -> None:
    """Sends this process's output, that of its libraries too, to a file."""
    with path.open("ab") as log:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)


def tell_agent(message: str, text: str, when: float) -> None:
    """Leaves an error where torch's agent looks for one, if an agent has started this process."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is not None:
        detail = {"py_callstack": text, "timestamp": str(int(when))}
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps({"message": {"message": message, "extraInfo": detail}}), encoding="utf-8")


def leave_process(code: int) -> NoReturn:
    """Leaves at once, with loader workers: threads of the backend may wait for ranks that are gone."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    end_children()
    os._exit(code)


def keep_compiled(config: Config) -> None:
    """Lets torch keep what it compiles from run to run, in the user's cache, unless the user names a folder."""
    if config.model.compile in (False, "none") or _COMPILED in os.environ:
        return
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paceline" / "compiled"
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            os.environ[_COMPILED] = str(folder)


def allocator_variables() -> dict[str, str]:
    """Returns variables for processes that will load torch: the allocator keeps freed memory for a second."""
    return {"MIMALLOC_PURGE_DELAY": os.environ.get("MIMALLOC_PURGE_DELAY", "1000")}


def share_of_cores(cores: Sequence[int], local_rank: int, local_ranks: int, threads: int = 1) -> list[int]:
    """Returns the cores that a rank keeps to: all, where they cannot be shared out evenly or are fewer than threads."""
    share, rest = divmod(len(cores), local_ranks)
    if rest or share < threads:
        return sorted(cores)
    return sorted(cores)[local_rank * share : (local_rank + 1) * share]


def keep_to_own_cores(local_rank: int, local_ranks: int, threads: int = 1) -> None:
    """Keeps the calling thread, and threads and processes that it starts, to this rank's share (Linux)."""
    if hasattr(os, "sched_setaffinity"):
        allowed = sorted(os.sched_getaffinity(0))
        with contextlib.suppress(OSError):  # taken away meanwhile: then it goes without
            os.sched_setaffinity(0, share_of_cores(allowed, local_rank, local_ranks, threads))


def end_with_parent(parent: int, *, every_s: float = 0.5) -> None:
    """Ends this process, and all in its group if it leads one, as soon as process ``parent`` is gone."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(every_s)
        if os.getpgrp() == os.getpid():
            os.killpg(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGKILL)

    if os.getppid() != parent:
        os._exit(1)  # it went while this process was starting
    if any(thread.name == "parent" for thread in threading.enumerate()):
        return  # in an earlier attempt of this process
    threading.Thread(target=watch, name="parent", daemon=True).start()


def end_children() -> None:
    for child in multiprocessing.active_children():
        child.kill()


def end_helper(process: subprocess.Popen[bytes], patience_s: float) -> None:
    """Ends a process that takes the end of its input for that of its launcher."""
    assert process.stdin is not None
    process.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(patience_s)
    if process.poll() is None:
        process.kill()
        process.wait()


def end_groups(leaders: Iterable[int], *, patience_s: float = 2.0) -> None:
    """Ends what is left of the process groups of ``leaders``, who may be gone: asks first, then insists."""
    left = {leader for leader in leaders if _signal_group(leader, signal.SIGTERM)}
    deadline = time.monotonic() + patience_s
    while left and time.monotonic() < deadline:
        time.sleep(0.02)
        left &= _living_groups()
    for leader in left:
        _signal_group(leader, signal.SIGKILL)


def _signal_group(leader: int, number: int) -> bool:
    try:
        os.killpg(leader, number)
    except (ProcessLookupError, PermissionError):  # the latter on macOS, for a group of zombies
        return False
    return True


def _living_groups() -> set[int]:
    """Returns the groups that have a process which still runs: one that nobody has waited for yet does not."""
    found = set()
    for process in psutil.process_iter(["status"]):
        if process.info["status"] != psutil.STATUS_ZOMBIE:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                found.add(os.getpgid(process.pid))
    return found
