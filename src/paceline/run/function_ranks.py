"""A function on N new processes: what each rank returns comes back, and a rank that dies may be replaced.

    run_processes(function, 2)                  [function(comm) of rank 0, of rank 1]
    run_processes(function, 2, restarts=3)      calls it again on all ranks when one dies

A call of the function is one attempt. Processes of ranks that are well stay for the next one (``stay.py``).
"""

from __future__ import annotations

import contextlib
import json
import linecache
import math
import multiprocessing
import os
import pickle
import socket
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.comm.control.server import private_server
from paceline.comm.control.wire import SECRET_FILE
from paceline.errors import CommunicationError, LaunchError, PacelineError, RankFailedError, UsageError
from paceline.health.failure import describe_error
from paceline.run.processes import allocator_variables, end_with_parent, keep_to_own_cores, loopback_interface
from paceline.run.signals import interrupts_withheld, scratch_folder
from paceline.run.stay import CODE, AttemptOverError, StayingProcess, is_told_over
from paceline.run.warm_client import LENGTH
from paceline.terminal import echo

if TYPE_CHECKING:
    from paceline.comm.base import Communicator

_OVER_S = 3.0  # for a rank to end its attempt


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
    restarts: int = 0,
) -> list[Any]:
    """Runs ``function(comm, *args)`` on ``ranks`` new processes connected by Gloo; returns what each returned.

    ``function``, ``args`` and the results must be picklable; what a cell or a function defines is sent by value. The
    first rank to fail ends the others; its error is raised as RankFailedError with its traceback. No process outlives
    the call. ``places`` has one for each rank; None: this host. ``join`` connects a rank in another way. Where a rank
    dies, all call the function again, up to ``restarts`` times; processes of the others stay for it (``stay.py``).
    """
    if ranks < 1:
        raise UsageError(f"ranks = {ranks}: at least one process is needed")
    if restarts < 0:
        raise UsageError(f"restarts = {restarts}: take 0 for none")
    context, task = multiprocessing.get_context("spawn"), _task_of(function, args, join)
    where = [pickle.dumps(None if places is None else places[rank]) for rank in range(ranks)]
    running: dict[int, _RankProcess] = {}
    with scratch_folder() as folder, private_server(folder) as (address, secret):
        meeting = {"MASTER_ADDR": str(address), SECRET_FILE: str(secret)}

        def start(rank: int, attempt: int) -> None:
            (receiver, sender), links = context.Pipe(duplex=False), socket.socketpair() if restarts else ()
            told = {**meeting, "MASTER_PORT": str(attempt)}
            details = (task, rank, ranks, told, threads, sender, where[rank], *links[1:])
            process = context.Process(target=_rank_main, args=details)
            running[rank] = _RankProcess(process, receiver, *links[:1])
            process.start()
            for each in (sender, *links[1:]):  # the child has its own: ours must not keep them open when it dies
                each.close()

        deadline = time.monotonic() + timeout_s
        try:
            for attempt in range(restarts + 1):
                with interrupts_withheld():
                    for rank in range(ranks):
                        if rank not in running or not running[rank].begin(attempt):
                            start(rank, attempt)
                try:
                    return _collect(running, deadline, timeout_s)
                except _RankDiedError as error:
                    if attempt == restarts:
                        raise
                    told = f"calling {getattr(function, '__name__', 'it')} again on all ranks"
                    echo(f"paceline: {error}; {told} (restart {attempt + 1} of {restarts})", err=True)
                    for each in running.values():
                        each.end_attempt()
            raise AssertionError("the last attempt returns or raises")
        finally:
            for each in running.values():
                if each.process.pid is not None:  # started
                    each.process.kill()
            for each in running.values():
                each.close()


class _RankDiedError(LaunchError):
    """A rank's process has ended without a result or an error."""


@dataclass(slots=True)
class _RankProcess:
    """A rank's process, by which way its result comes, and the link of one that may stay for another attempt."""

    process: Any
    receiver: Connection
    link: socket.socket | None = None

    def end_attempt(self) -> None:
        """Ends what this rank does, and its process where it cannot stay."""
        assert self.link is not None
        try:
            self.link.settimeout(_OVER_S)
            self.link.sendall(LENGTH.pack(0))
            is_over = bool(self.link.recv(CODE.size))
            while is_over and self.receiver.poll():  # a result that is of no use
                self.receiver.recv_bytes()
        except (OSError, EOFError):  # it has ended, or does not answer
            is_over = False
        if not is_over:
            self.process.kill()
            self.close()

    def close(self) -> None:
        if self.process.pid is not None:
            self.process.join()
        self.receiver.close()
        if self.link is not None:
            self.link.close()

    def begin(self, attempt: int) -> bool:
        """Has a process that has stayed begin another attempt; False where it has ended."""
        assert self.link is not None
        request = json.dumps({"attempt": attempt}).encode()
        with contextlib.suppress(OSError):
            self.link.sendall(LENGTH.pack(len(request)) + request)
            return bool(self.process.is_alive())
        return False


def _task_of(function: Callable[..., Any], args: Sequence[Any], join: Callable[[], Communicator] | None) -> bytes:
    """Returns what a rank is to call. Raises UsageError where that cannot be sent."""
    # The lines of cells are in no file: for tracebacks of ranks.
    cells = {name: entry for name, entry in linecache.cache.items() if len(entry) == 4 and entry[1] is None}
    try:  # plain pickle: multiprocessing's own would give every rank the same memory for a tensor
        return _pickled((cells, function, tuple(args), join))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        what = f"{getattr(function, '__qualname__', function)} cannot be sent to other processes: {error}"
        rule = "a new process reads the function, all that it names and the arguments from a pickle"
        fix = "pass plain data, and open files, locks and connections inside the function"
        raise UsageError(f"{what}\n  {rule}\n  {fix}") from error


def _pickled(value: Any) -> bytes:
    """Pickles a value, and functions and classes of a notebook, a script or another function with their code."""
    try:
        from cloudpickle import dumps
    except ImportError:  # what comes with scikit-learn has it in another place
        from joblib.externals.cloudpickle import dumps
    found: bytes = dumps(value)
    return found


def _collect(running: Mapping[int, _RankProcess], deadline: float, timeout_s: float) -> list[Any]:
    results: dict[int, Any] = {}
    lost: set[int] = set()  # ranks that have lost another one, and stay
    while len(results) < len(running):
        pending = {each.receiver: rank for rank, each in running.items() if rank not in results}
        links = {link: rank for rank, each in running.items() if rank not in lost and (link := each.link) is not None}
        are_lost = lost >= set(pending.values())
        left_s = _OVER_S if are_lost else None if math.isinf(deadline) else max(0.0, deadline - time.monotonic())
        ready: list[Any] = wait([*pending, *links], timeout=left_s)
        if not ready and are_lost:
            raise _RankDiedError(f"ranks {sorted(pending.values())} lost one another, and none has died")
        if not ready:
            raise LaunchError(f"ranks {sorted(pending.values())} did not finish within {timeout_s:g} s")
        failures = []
        lost |= {links[each] for each in ready if each in links}
        for receiver in [each for each in ready if each in pending]:
            rank = pending[receiver]
            try:
                is_ok, value = pickle.loads(receiver.recv_bytes())  # nosec B301  # from a child
            except EOFError:
                running[rank].process.join()
                code = running[rank].process.exitcode
                raise _RankDiedError(f"rank {rank} died with exit code {code}") from None
            if is_ok:
                results[rank] = value
            else:
                failures.append((rank, *value))
        if failures:
            raise _first_cause(failures)
    return [results[rank] for rank in range(len(running))]


def _first_cause(failures: list[tuple[int, BaseException, str]]) -> PacelineError:
    """Picks the failure that is not a consequence of another: a lost connection is one."""
    rank, error, text = min(failures, key=lambda failure: isinstance(failure[1], CommunicationError))
    failure = RankFailedError(rank, error, text)
    failure.__cause__ = error
    return failure


def _rank_main(
    task: bytes,
    rank: int,
    ranks: int,
    meeting: dict[str, str],
    threads: int,
    sender: Connection,
    where: bytes,
    link: socket.socket | None = None,
) -> None:
    end_with_parent(os.getppid())
    place: RankHost | None = pickle.loads(where)  # nosec B301  # from the parent
    if place is not None and place.enter is not None:
        place.enter()
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(ranks),
        GLOO_SOCKET_IFNAME=loopback_interface() if place is None else place.interface,
        OMP_NUM_THREADS=str(threads),  # read when torch is loaded, by libraries that do not ask torch later
        **meeting,
        **allocator_variables(),
    )
    staying = None if link is None else StayingProcess(link)
    environment, folder = dict(os.environ), Path.cwd()
    while True:
        keep_to_own_cores(rank, ranks, threads)
        import torch

        torch.set_num_threads(threads)
        if staying is None:
            return _attempt(task, rank, sender, stays=False)
        code = staying.run(partial(_attempt, task, rank, sender, stays=True))
        request, _ = staying.wait_for_next(code)
        os.environ.clear()
        os.environ.update(environment, MASTER_PORT=str(request["attempt"]))
        os.chdir(folder)


def _attempt(task: bytes, rank: int, sender: Connection, *, stays: bool) -> None:
    """Calls the function once, and sends what it returns or raises; not the loss of another rank, where this stays."""
    from paceline.comm.torch_dist import connect, disconnect

    comm: Communicator | None = None
    try:
        sources, function, args, join = pickle.loads(task)  # nosec B301  # from the parent
        linecache.cache.update(sources)
        comm = connect("gloo", device="cpu") if join is None else join()
        result = function(comm, *args)
        # Plain pickle: multiprocessing's own would pass tensors as shared memory, which dies with this process.
        sender.send_bytes(_pickled((True, result)))
        disconnect()
    except BaseException as error:
        if stays and (is_told_over() or describe_error(rank, error).cause == "lost"):
            if (loop := getattr(comm, "loop", None)) is not None:
                loop.abandon()
            raise AttemptOverError from None
        sender.send_bytes(_pickled((False, (_portable(error), traceback.format_exc()))))


def _portable(error: BaseException) -> BaseException:
    try:
        pickle.loads(_pickled(error))  # nosec B301  # its own
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
