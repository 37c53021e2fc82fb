"""Real ranks for one function: N processes that talk over Gloo, and what each returned.

For verification and benchmarks, where a function is to run on real processes and its results are wanted here. Training
goes through ``run/local.py``, which supervises.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from paceline.comm.control.server import private_server
from paceline.comm.control.wire import SECRET_FILE
from paceline.errors import CommunicationError, LaunchError, PacelineError, RankFailedError, UsageError
from paceline.run.rank_process import allocator_variables, end_with_parent, keep_to_own_cores
from paceline.run.scratch import scratch_folder
from paceline.run.signals import interrupts_withheld


@dataclass(frozen=True, slots=True, kw_only=True)
class RankHost:
    """Where a rank runs: ``enter`` moves its new process there, and Gloo talks over ``interface``."""

    enter: Callable[[], None]
    interface: str


def run_processes(
    function: Callable[..., Any],
    ranks: int,
    *,
    args: Sequence[Any] = (),
    timeout_s: float = 600.0,
    threads: int = 1,
    places: Sequence[RankHost] | None = None,
) -> list[Any]:
    """Runs ``function(comm, *args)`` on ``ranks`` new processes connected by Gloo; returns what each returned.

    ``function``, ``args`` and the results must be picklable. The first rank to fail ends the others; its error is
    raised as RankFailedError with its traceback. No process outlives the call. Without ``places``, one for each rank,
    they run on this host.
    """
    if ranks < 1:
        raise UsageError(f"ranks = {ranks}: at least one process is needed")
    context = multiprocessing.get_context("spawn")
    task = _pack(function, args)
    where = [pickle.dumps(None if places is None else places[rank]) for rank in range(ranks)]
    pipes = [context.Pipe(duplex=False) for _ in range(ranks)]
    with scratch_folder() as folder, private_server(folder) as (address, secret):
        meeting = {"MASTER_ADDR": str(address), "MASTER_PORT": "0", SECRET_FILE: str(secret)}
        processes = [
            context.Process(
                target=_rank_main, args=(task, rank, ranks, meeting, threads, pipes[rank][1], where[rank]), daemon=True
            )
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


def _pack(function: Callable[..., Any], args: Sequence[Any]) -> bytes:
    # Plain pickle: multiprocessing's own would give every rank the same memory for a tensor.
    try:
        return pickle.dumps((function, tuple(args)))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UsageError(
            f"{getattr(function, '__qualname__', function)} cannot be sent to other processes: {error}\n"
            "  a new process imports the function by its module and name, and reads the arguments from a pickle\n"
            "  define the function at the top level of a module, and pass it plain data"
        ) from error


def loopback_interface() -> str:
    """Returns the name of the loopback interface: ``lo`` on Linux, ``lo0`` on macOS."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), "lo")


def _collect(receivers: list[Any], processes: list[Any], timeout_s: float) -> list[Any]:
    deadline = time.monotonic() + timeout_s
    results: dict[int, Any] = {}
    while len(results) < len(receivers):
        pending = {receivers[rank]: rank for rank in range(len(receivers)) if rank not in results}
        ready: list[Any] = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
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
    failures.sort(key=lambda failure: isinstance(failure[1], CommunicationError))
    rank, error, text = failures[0]
    failure = RankFailedError(rank, error, text)
    failure.__cause__ = error
    return failure


def _rank_main(
    task: bytes, rank: int, ranks: int, meeting: dict[str, str], threads: int, sender: Connection, where: bytes
) -> None:
    end_with_parent(os.getppid())
    place: RankHost | None = pickle.loads(where)  # nosec B301  # from the parent
    if place is not None:
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
        function, args = pickle.loads(task)  # nosec B301  # from the parent
        result = function(connect("gloo", device="cpu"), *args)
        # Plain pickle: multiprocessing's own would pass tensors as shared memory, which dies with this process.
        sender.send_bytes(pickle.dumps((True, result)))
        disconnect()
    except BaseException as error:
        sender.send_bytes(pickle.dumps((False, (_portable(error), traceback.format_exc()))))


def _portable(error: BaseException) -> BaseException:
    """Returns the error if it can be pickled, or one that says the same."""
    try:
        pickle.loads(pickle.dumps(error))  # nosec B301  # its own
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
