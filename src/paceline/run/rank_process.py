"""The process that a rank is: what its launcher told it, its cores and output, and how it ends.

**Cores.** Each rank on a CPU keeps to its share of the host's cores. It and the threads of its backend wake one another
all the time. Free to go anywhere, they are moved to the cores of other ranks, and wait there for the scheduler's tick
while the core that they left has nothing to do.

**Memory.** What a step frees is needed again in the next. Some builds of torch (those for ARM) use an allocator that
gives it back to the system after 10 ms; then every step takes page faults for all of its gradients.

**No process is left behind.** A rank goes when its launcher goes, and takes what it started with it. It leads a process
group of its own, as the agent starts it in a new session. Its loader workers are in that group, and so can be ended
with it, and also after it. The rank asks for its parent twice a second. Linux could send it a signal at once
(PR_SET_PDEATHSIG), but one that ends the rank ends it before it can end its loader workers, and macOS has none.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
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
    """Says whether the ranks of a config will talk through NCCL, before they do."""
    return config.comm.backend in ("auto", "nccl") and uses_gpu(config)


def uses_gpu(config: Config) -> bool:
    import torch

    return config.parallel.device != "cpu" and torch.cuda.is_available()


def keep_cores(config: Config) -> None:
    """Keeps a rank on a CPU, and the threads that its backend will start, to its share of the host's cores."""
    local_rank, local_ranks = os.environ.get("LOCAL_RANK"), os.environ.get("LOCAL_WORLD_SIZE")
    if not config.parallel.own_cores or local_rank is None or local_ranks is None or uses_gpu(config):
        return
    keep_to_own_cores(int(local_rank), int(local_ranks), config.parallel.threads or 1)


def redirect_output(path: Path) -> None:
    """Sends this process's output, that of its libraries too, to a file."""
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


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
    """Lets torch keep what it compiles from run to run, in the user's cache; a folder that the user names stays.

    Where that folder cannot be written, torch's own is used, which may be gone after a restart of the machine.
    """
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
    threading.Thread(target=watch, name="parent", daemon=True).start()


def end_children() -> None:
    """Ends the processes that this one started with multiprocessing, such as loader workers."""
    for child in multiprocessing.active_children():
        child.kill()


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
    """Sends a signal to a group; says whether there is one."""
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
