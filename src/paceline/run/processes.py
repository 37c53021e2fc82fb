"""The processes that ranks are: their cores, memory and output, how they end, and N of them for one function.

**Cores.** Each rank on a CPU keeps to its share of the host's cores. It and the threads of its backend wake one another
all the time; free to go anywhere, they wait on the cores of other ranks while their own has nothing to do.

**Memory.** What a step frees is needed again in the next. Some builds of torch (those for ARM) use an allocator that
gives it back to the system after 10 ms; then every step takes page faults for all of its gradients.

**No process is left behind.** A rank goes when its launcher goes, and takes what it started with it: it leads a process
group, with its loader workers. It asks for its parent twice a second. A signal from Linux (PR_SET_PDEATHSIG) would end
it before it can end its loader workers, and macOS has none.
"""

from __future__ import annotations

import contextlib
import json
import linecache
import math
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import psutil

from paceline.comm.control.server import private_server
from paceline.comm.control.wire import SECRET_FILE
from paceline.errors import CommunicationError, LaunchError, PacelineError, RankFailedError, UsageError
from paceline.run.signals import interrupts_withheld, scratch_folder

if TYPE_CHECKING:
    from paceline.comm.base import Communicator
    from paceline.config import Config

_COMPILED = "TORCHINDUCTOR_CACHE_DIR"
PROFILE = "PACELINE_PROFILE"  # the folder that profiled ranks leave what they saw in
MACHINE = "PACELINE_MACHINE"  # a file that says what this machine can do


@dataclass(frozen=True, slots=True, kw_only=True)
class RankHost:
    """Where a rank runs: Gloo talks over ``interface``, and ``enter`` moves its new process there; None: it stays."""

    interface: str
    enter: Callable[[], None] | None = None


def run_processes(
    function: Callable[..., Any],
    ranks: int,
    *,
    args: Sequence[Any] = (),
    timeout_s: float = 600.0,
    threads: int = 1,
    places: Sequence[RankHost] | None = None,
    join: Callable[[], Communicator] | None = None,
) -> list[Any]:
    """Runs ``function(comm, *args)`` on ``ranks`` new processes connected by Gloo; returns what each returned.

    ``function``, ``args`` and the results must be picklable; what a cell or a function defines is sent by value. The
    first rank to fail ends the others; its error is raised as RankFailedError with its traceback. No process outlives
    the call. ``places`` has one for each rank; None: this host. ``join`` connects a rank in another way.
    """
    if ranks < 1:
        raise UsageError(f"ranks = {ranks}: at least one process is needed")
    context = multiprocessing.get_context("spawn")
    # The lines of cells are in no file: for tracebacks of ranks.
    cells = {name: entry for name, entry in linecache.cache.items() if len(entry) == 4 and entry[1] is None}
    try:  # plain pickle: multiprocessing's own would give every rank the same memory for a tensor
        task = _pickled((cells, function, tuple(args), join))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UsageError(
            f"{getattr(function, '__qualname__', function)} cannot be sent to other processes: {error}\n"
            "  a new process reads the function, all that it names and the arguments from a pickle\n"
            "  pass plain data, and open files, locks and connections inside the function"
        ) from error
    where = [pickle.dumps(None if places is None else places[rank]) for rank in range(ranks)]
    pipes = [context.Pipe(duplex=False) for _ in range(ranks)]
    with scratch_folder() as folder, private_server(folder) as (address, secret):
        meeting = {"MASTER_ADDR": str(address), "MASTER_PORT": "0", SECRET_FILE: str(secret)}
        processes = [
            context.Process(target=_rank_main, args=(task, rank, ranks, meeting, threads, pipes[rank][1], where[rank]))
            for rank in range(ranks)
        ]
        try:
            with interrupts_withheld():
                for process in processes:
                    process.start()
            for _, sender in pipes:
                sender.close()  # the child has its own end: ours must not keep the pipe open when it dies
            return _collect([receiver for receiver, _ in pipes], processes, timeout_s)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
            for process in processes:
                if process.pid is not None:  # started
                    process.join()


def _pickled(value: Any) -> bytes:
    """Pickles a value, and functions and classes of a notebook, a script or another function with their code."""
    try:
        from cloudpickle import dumps
    except ImportError:  # what comes with scikit-learn has it in another place
        from joblib.externals.cloudpickle import dumps
    found: bytes = dumps(value)
    return found


def loopback_interface() -> str:
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), "lo")


def _collect(receivers: list[Any], processes: list[Any], timeout_s: float) -> list[Any]:
    deadline = time.monotonic() + timeout_s
    results: dict[int, Any] = {}
    while len(results) < len(receivers):
        pending = {receivers[rank]: rank for rank in range(len(receivers)) if rank not in results}
        left_s = None if math.isinf(deadline) else max(0.0, deadline - time.monotonic())
        ready: list[Any] = wait(list(pending), timeout=left_s)
        if not ready:
            raise LaunchError(f"ranks {sorted(pending.values())} did not finish within {timeout_s:g} s")
        failures = []
        for receiver in ready:
            rank = pending[receiver]
            try:
                is_ok, value = pickle.loads(receiver.recv_bytes())  # nosec B301  # from a child
            except EOFError:
                processes[rank].join()
                raise LaunchError(f"rank {rank} died with exit code {processes[rank].exitcode}") from None
            if is_ok:
                results[rank] = value
            else:
                failures.append((rank, *value))
        if failures:
            raise _first_cause(failures)
    return [results[rank] for rank in range(len(receivers))]


def _first_cause(failures: list[tuple[int, BaseException, str]]) -> PacelineError:
    """Picks the failure that is not a consequence of another: a lost connection is one."""
    rank, error, text = min(failures, key=lambda failure: isinstance(failure[1], CommunicationError))
    failure = RankFailedError(rank, error, text)
    failure.__cause__ = error
    return failure


def _rank_main(
    task: bytes, rank: int, ranks: int, meeting: dict[str, str], threads: int, sender: Connection, where: bytes
) -> None:
    end_with_parent(os.getppid())
    place: RankHost | None = pickle.loads(where)  # nosec B301  # from the parent
    if place is not None and place.enter is not None:
        place.enter()
    keep_to_own_cores(rank, ranks, threads)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(ranks),
        GLOO_SOCKET_IFNAME=loopback_interface() if place is None else place.interface,
        OMP_NUM_THREADS=str(threads),  # read when torch is loaded, by libraries that do not ask torch later
        **meeting,
        **allocator_variables(),
    )
    import torch

    from paceline.comm.torch_dist import connect, disconnect

    torch.set_num_threads(threads)
    try:
        sources, function, args, join = pickle.loads(task)  # nosec B301  # from the parent
        linecache.cache.update(sources)
        result = function(connect("gloo", device="cpu") if join is None else join(), *args)
        # Plain pickle: multiprocessing's own would pass tensors as shared memory, which dies with this process.
        sender.send_bytes(_pickled((True, result)))
        disconnect()
    except BaseException as error:
        sender.send_bytes(_pickled((False, (_portable(error), traceback.format_exc()))))


def _portable(error: BaseException) -> BaseException:
    try:
        pickle.loads(_pickled(error))  # nosec B301  # its own
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


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
