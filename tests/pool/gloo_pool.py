"""Real ranks for tests: worker processes that live for the whole session and are sent functions.

Starting a process that imports torch costs seconds, a new process group on a living one some 50 ms. So the fixture
``gloo_pool`` (in ``tests/conftest.py``) starts workers when a test first needs them and keeps them:

    def sum_of_ranks(comm: Communicator, start: float) -> float:      # top level of the test's own file
        total = torch.tensor([start + comm.rank])
        comm.all_reduce(total).wait()
        return total.item()

    def test_sum(gloo_pool: GlooPool) -> None:
        assert gloo_pool.run(sum_of_ranks, 1.0, ranks=2) == [3.0, 3.0]

The function is named by its file, not by its module: pytest imports test files under names that another process could
not import. Each task gets a fresh group, made by ``connect()`` from a launcher's environment, with a timeout, and
torch's generator seeded with 0. Arguments and results travel as pickles. Warnings are errors there as here.

``run`` returns what each rank returned, or raises what a rank raised. ``outcomes`` returns both as data, for tests of
ranks that fail. A worker that raised, died or hung is replaced by a new one. ``nccl_pool.py`` has the same for ranks
that share one GPU.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib.util
import inspect
import math
import os
import pickle
import socket
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.distributed import TCPStore

from paceline.comm.torch_dist import connect, disconnect
from paceline.errors import CommunicationError
from paceline.run.processes import loopback_interface

HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What a worker is sent: one rank's part of a function call."""

    file: str
    module: str
    name: str
    args: bytes  # a pickle of its own, read after the function's module is there
    rank: int
    ranks: int
    port: int
    group_timeout_s: float
    timeout_s: float
    backend: str
    test: str  # that has the task done, as pytest names it


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one rank: a value, or an error."""

    rank: int
    value: Any = None
    error: BaseException | None = None


class Worker:
    """One process of the pool, seen from the tests."""

    def __init__(
        self, start: type[subprocess.Popen[bytes]] | None = None, log: Path | None = None, **told: str
    ) -> None:
        """Takes what starts processes, a file for what the worker prints, and variables of its environment."""
        ours, theirs = socket.socketpair()
        self.log = log
        with contextlib.ExitStack() as stack:
            # Not a child of multiprocessing, so that tests may count those.
            self.process = (start or subprocess.Popen)(
                [sys.executable, "-c", f"import gloo_pool; gloo_pool.serve({theirs.fileno()})"],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **told},
                pass_fds=[theirs.fileno()],
                stderr=None if log is None else stack.enter_context(log.open("ab")),
            )
        theirs.close()  # the worker has its own end: ours must not keep the pipe open when it dies
        self.connection = Connection(ours.detach())
        self._is_ready = False

    def send(self, task: Task) -> None:
        """Hands over a task."""
        self.connection.send_bytes(pickle.dumps(task))

    def wait_until_ready(self) -> None:
        """Returns when the worker has imported torch, so that a group's timeout does not cover that."""
        if not self._is_ready:
            try:
                self.connection.recv_bytes()
            except (EOFError, ConnectionResetError):
                left = f"a worker left with exit code {self.process.wait()} while it started"
                raise RuntimeError(f"{left}\n{self.last_words()}") from None
            self._is_ready = True

    def read(self, rank: int) -> Outcome:
        """Reads what a task came to."""
        try:
            is_ok, value, text = pickle.loads(self.connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            died = RuntimeError(f"rank {rank} died with exit code {self.process.wait()}")
            if self.log is not None:
                died.add_note(self.last_words())
            return Outcome(rank=rank, error=died)
        if is_ok:
            return Outcome(rank=rank, value=value)
        value.add_note(f"raised on rank {rank} of the pool:\n{text}")
        return Outcome(rank=rank, error=value)

    def last_words(self) -> str:
        """Returns the end of what the worker printed: of one that hung, where it stood."""
        lines = [] if self.log is None else self.log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-60:])

    def end(self) -> None:
        """Ends the process, whatever it is doing."""
        self.connection.close()
        self.process.kill()
        self.process.wait()


class GlooPool:
    """Workers that are sent functions."""

    backend = "gloo"
    group_timeout_s = 60.0
    timeout_s = 120.0
    patience_s = math.inf  # with the others, once one rank has failed

    def __init__(self) -> None:
        self._workers: list[Worker] = []

    def start_worker(self, rank: int) -> Worker:
        """Starts the process that will be this rank of all tasks."""
        del rank
        return Worker()

    def run(
        self,
        function: Callable[..., Any],
        *args: object,
        ranks: int = 2,
        group_timeout_s: float | None = None,
        timeout_s: float | None = None,
    ) -> list[Any]:
        """Runs ``function(comm, *args)`` on each rank and returns the results by rank.

        Raises a rank's own error if one fails, preferring those that are not the mere consequence of another's.
        """
        found = self.outcomes(function, *args, ranks=ranks, group_timeout_s=group_timeout_s, timeout_s=timeout_s)
        errors = [outcome.error for outcome in found if outcome.error is not None]
        if errors:
            raise min(errors, key=lambda error: isinstance(error, CommunicationError))
        return [outcome.value for outcome in found]

    def outcomes(
        self,
        function: Callable[..., Any],
        *args: object,
        ranks: int = 2,
        group_timeout_s: float | None = None,
        timeout_s: float | None = None,
    ) -> list[Outcome]:
        """Runs ``function(comm, *args)`` on each rank and returns what became of each, errors included."""
        assert "<" not in function.__qualname__, f"{function.__qualname__} must stand at the top level of its file"
        group_timeout_s, timeout_s = group_timeout_s or self.group_timeout_s, timeout_s or self.timeout_s
        while len(self._workers) < ranks:
            self._workers.append(self.start_worker(len(self._workers)))
        for worker in self._workers[:ranks]:
            worker.wait_until_ready()
        # The store lives here, as under torchrun's agent: its port is taken before anyone is told of it.
        store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        for rank, worker in enumerate(self._workers[:ranks]):
            task = Task(
                file=inspect.getfile(function),
                module=function.__module__,
                name=function.__qualname__,
                args=pickle.dumps(args),
                rank=rank,
                ranks=ranks,
                port=store.port,
                group_timeout_s=group_timeout_s,
                timeout_s=timeout_s,
                backend=self.backend,
                test=os.environ.get("PYTEST_CURRENT_TEST", ""),
            )
            worker.send(task)
        return self._collect(ranks, timeout_s)

    def _collect(self, ranks: int, timeout_s: float) -> list[Outcome]:
        found: dict[int, Outcome] = {}
        # A worker that hangs writes down where, and exits; the extra time is for one that cannot.
        deadline = time.monotonic() + timeout_s + 10.0
        while len(found) < ranks:
            waiting = {self._workers[rank].connection: rank for rank in range(ranks) if rank not in found}
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            for rank in [waiting[connection] for connection in ready] if ready else list(waiting.values()):
                worker = self._workers[rank]
                found[rank] = worker.read(rank) if ready else _hung(worker, rank, timeout_s)
                if found[rank].error is not None:
                    worker.end()
                    self._workers[rank] = self.start_worker(rank)
                    deadline = min(deadline, time.monotonic() + self.patience_s)
        return [found[rank] for rank in range(ranks)]

    def close(self) -> None:
        """Ends all workers."""
        for worker in self._workers:
            worker.end()
        self._workers.clear()


def _hung(worker: Worker, rank: int, timeout_s: float) -> Outcome:
    error = TimeoutError(f"rank {rank} did not finish within {timeout_s:g} s, or soon after another one had failed")
    error.add_note(worker.last_words())
    return Outcome(rank=rank, error=error)


# The worker's side.


def serve(file_descriptor: int) -> None:
    """Carries out tasks until the tests' end of the pipe closes."""
    connection = Connection(file_descriptor)
    torch.set_num_threads(1)
    connection.send_bytes(b"ready")
    while True:
        try:
            task: Task = pickle.loads(connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            return
        os.environ["PYTEST_CURRENT_TEST"] = task.test
        # Compilers and drivers warn in ways that differ by version.
        warnings.simplefilter("error" if task.backend == "gloo" else "default")
        faulthandler.dump_traceback_later(task.timeout_s, exit=True)
        is_ok, reply = _carry_out(task)
        faulthandler.cancel_dump_traceback_later()
        connection.send_bytes(reply)
        if not is_ok and task.backend == "nccl":
            os._exit(1)  # to leave a group of NCCL waits for ranks that may be gone


def _carry_out(task: Task) -> tuple[bool, bytes]:
    is_gpu = task.backend == "nccl"
    environment = {
        "RANK": str(task.rank),
        "LOCAL_RANK": "0" if is_gpu else str(task.rank),  # a GPU is shared by hosts that have one each
        "WORLD_SIZE": str(task.ranks),
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(task.port),
        "GLOO_SOCKET_IFNAME": loopback_interface(),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    os.environ.update(environment)
    torch.manual_seed(0)
    is_ok = False
    try:
        function = getattr(_load(task.file, task.module), task.name)
        args = pickle.loads(task.args)
        comm = connect("nccl" if is_gpu else "gloo", device="cuda" if is_gpu else "cpu", timeout_s=task.group_timeout_s)
        reply = pickle.dumps((True, function(comm, *args), ""))
        is_ok = True
    except BaseException as error:  # a test's own outcome exceptions are no Exceptions
        text = traceback.format_exc()
        reply = pickle.dumps((False, _portable(error), text))
    finally:
        if is_ok or not is_gpu:
            disconnect()
        for name in environment:
            os.environ.pop(name, None)
    if is_ok and is_gpu:
        gc.collect()
        torch.cuda.empty_cache()
    return is_ok, reply


def _load(file: str, module: str) -> ModuleType:
    if module not in sys.modules:
        spec = importlib.util.spec_from_file_location(module, file)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[module] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[module])
    return sys.modules[module]


def _portable(error: BaseException) -> BaseException:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
