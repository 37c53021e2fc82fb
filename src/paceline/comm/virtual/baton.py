"""One baton among N threads: one rank runs at a time, with random states of its own.

A rank holds the baton while it computes and passes it on, in rank order, when it must wait. With the baton go the
random states of torch, numpy and Python, and torch's note that a mode is on, which belong to the process: each rank
behaves as if it had one to itself, and two runs give the same bits. When no rank can go on, that is known at once and
reported as a verdict; a rank that keeps the baton beyond the time limit is reported with the line it stands at.
"""

from __future__ import annotations

import _random
import contextlib
import ctypes
import random
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch.utils import _python_dispatch

from paceline.comm.ledger.call_sites import name_site
from paceline.errors import CommunicationError, RankFailedError, StuckRankError
from paceline.health.ledger_view import LedgerEntry

# Whose lines say nothing about what a rank does: this room, torch, and the locks below them.
_PLUMBING = (f"{Path(__file__).parents[1]}/", f"{Path(torch.__file__).parent}/", threading.__file__)


class Abandoned(BaseException):
    """Unwinds a rank because another one failed. Not an Exception, so that no ``except Exception`` swallows it."""


@dataclass(slots=True)
class _LazyState:
    """Reads and writes a random state only where somebody has drawn from it: Numpy's takes 0.08 ms each, Python's 0.02.

    ``look`` returns memory that shows whether, or None; ``is_shown`` says of a state whether that is all of it.
    """

    look: Callable[[], Any]
    get: Callable[[], Any]
    put: Callable[[Any], None]
    is_shown: Callable[[Any], bool] = lambda _: True
    known: Any = None  # the state that was read or written last
    memory: Any = None  # and what tells of a change since

    def capture(self) -> Any:
        """Returns the state: the same object as before where nothing has changed."""
        memory = self.look()
        if memory is None or memory != self.memory or not self.is_shown(self.known):
            self.known, self.memory = self.get(), memory
        return self.known

    def restore(self, state: Any) -> None:
        if self.capture() is not state:
            self.put(state)
            self.known, self.memory = state, self.look()


_MT19937_BYTES = 624 * 4 + 4  # the numbers, and the place among them
_PYTHON_BYTES = _random.Random.__basicsize__ - object.__basicsize__


def _numpy_memory() -> bytes | None:
    """Returns the memory of numpy's usual generator; nothing for another one."""
    generator = np.random.mtrand.get_bit_generator()
    if not isinstance(generator, np.random.MT19937):
        return None
    return ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)


def _python_memory() -> tuple[bytes, float | None] | None:
    """Returns the memory of Python's generator, and the number that it keeps for the next call of ``gauss``."""
    generator: Any = getattr(random.getstate, "__self__", None)
    if sys.implementation.name != "cpython" or type(generator) is not random.Random:
        return None
    return ctypes.string_at(id(generator) + object.__basicsize__, _PYTHON_BYTES), vars(generator)["gauss_next"]


_NUMPY = _LazyState(
    _numpy_memory,
    lambda: np.random.get_state(legacy=False),
    lambda state: np.random.set_state(state),
    lambda state: not state["has_gauss"],  # a normal number that numpy keeps for the next call does not show
)
_PYTHON = _LazyState(_python_memory, lambda: random.getstate(), lambda state: random.setstate(state))
# A mode belongs to a thread. That one is on torch notes for the process too, and 2.10 then compiles nothing in it.
_MODE_NOTES = [name for name in vars(_python_dispatch) if name.startswith("_is_in_")]


@dataclass(frozen=True, slots=True)
class ProcessStates:
    torch_cpu: torch.Tensor
    torch_cuda: torch.Tensor | None
    numpy: Any
    python: tuple[Any, ...]
    modes: dict[str, bool]

    @classmethod
    def capture(cls, device: torch.device) -> ProcessStates:
        cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        modes = {name: getattr(_python_dispatch, name) for name in _MODE_NOTES}
        return cls(torch.get_rng_state(), cuda, _NUMPY.capture(), _PYTHON.capture(), modes)

    def restore(self, device: torch.device) -> None:
        torch.set_rng_state(self.torch_cpu)
        if self.torch_cuda is not None:
            torch.cuda.set_rng_state(self.torch_cuda, device)
        _NUMPY.restore(self.numpy)
        _PYTHON.restore(self.python)
        vars(_python_dispatch).update(self.modes)


@dataclass(frozen=True, slots=True)
class BatonWait:
    is_over: Callable[[], bool]
    describe: Callable[[], str]
    entry: Callable[[], LedgerEntry]


class Baton:
    def __init__(self, num_ranks: int, device: torch.device, *, timeout_s: float, seed: int) -> None:
        self.num_ranks, self.device = num_ranks, device
        self._timeout_s, self._seed = timeout_s, seed
        # A rank waits for its turn at a lock: a semaphore costs as much as a small operation of a rank.
        self._turn = [threading.Lock() for _ in range(num_ranks)]
        for turn in self._turn:
            turn.acquire()
        self._waits: dict[int, BatonWait] = {}
        self._finished: set[int] = set()
        self._holder = 0
        self._last_sign = time.monotonic()
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._states: list[ProcessStates] = []
        self._threads: list[threading.Thread] = []
        self.explain: Callable[[Mapping[int, LedgerEntry], set[int]], str]  # why no rank can go on; set by the world

    def sign_of_life(self) -> None:
        """Notes that the holder makes progress; unwinds it if the world has ended meanwhile."""
        self._last_sign = time.monotonic()
        if self._error is not None:
            raise Abandoned

    def wait(self, rank: int, until: BatonWait) -> None:
        self.sign_of_life()
        if until.is_over():
            return
        self._waits[rank] = until
        self._pass_on(rank)
        self._turn[rank].acquire()
        self.sign_of_life()
        self._states[rank].restore(self.device)

    def fail(self, error: BaseException) -> NoReturn:
        self._end(error)
        raise Abandoned

    def run(self, work: list[Callable[[], Any]]) -> list[Any]:
        before = ProcessStates.capture(self.device)
        torch.default_generator.manual_seed(self._seed)
        if self.device.type == "cuda":
            torch.cuda.manual_seed(self._seed)
        np.random.seed(self._seed % 2**32)
        random.seed(self._seed)
        self._states = [ProcessStates.capture(self.device)] * self.num_ranks
        results: list[Any] = [None] * self.num_ranks
        self._threads = [
            threading.Thread(target=self._live, args=(rank, work[rank], results), name=f"rank-{rank}", daemon=True)
            for rank in range(self.num_ranks)
        ]
        try:
            for thread in self._threads:
                thread.start()
            self._give_turn(0)
            self._watch()
        except BaseException as error:
            self._end(error)
            raise
        finally:
            deadline = time.monotonic() + 5.0
            for rank, thread in enumerate(self._threads):
                # A rank stuck in its own code cannot be ended; it is a daemon, and unwinds at its next operation.
                is_stuck = rank == self._holder and isinstance(self._error, StuckRankError)
                thread.join(timeout=0.1 if is_stuck else max(0.1, deadline - time.monotonic()))
            before.restore(self.device)
        if self._error is not None:
            raise self._error
        return results

    def _live(self, rank: int, work: Callable[[], Any], results: list[Any]) -> None:
        self._turn[rank].acquire()
        try:
            self.sign_of_life()
            self._states[rank].restore(self.device)
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)
            # [Note: one autograd thread] All backward work of a CUDA device shares one autograd thread, so a rank that
            # blocks inside a backward hook would block every rank. With multithreading off (a setting of this thread),
            # backward runs on the rank's own thread, which may block.
            with torch.autograd.set_multithreading_enabled(self.device.type != "cuda"):
                results[rank] = work()
            self._finished.add(rank)
            self._pass_on(rank)
        except Abandoned:
            pass
        except CommunicationError as error:  # a verdict already names the ranks
            self._end(error)
        except BaseException as error:
            failure = RankFailedError(rank, error, "".join(traceback.format_exception(error)))
            failure.__cause__ = error
            self._end(failure)

    def _pass_on(self, rank: int) -> None:
        self._states[rank] = ProcessStates.capture(self.device)
        for step in range(1, self.num_ranks + 1):
            candidate = (rank + step) % self.num_ranks
            if candidate in self._finished:
                continue
            # Without a name for its wait, which would hold the rank's tensors for a moment of its turn.
            if candidate not in self._waits or self._waits[candidate].is_over():
                self._waits.pop(candidate, None)
                self._holder = candidate
                self._give_turn(candidate)
                return
        if len(self._finished) == self.num_ranks:
            self._ended.set()
            return
        why = self.explain({rank: wait.entry() for rank, wait in self._waits.items()}, self._finished)
        self.fail(StuckRankError(f"no rank can go on: {why}\n{self.describe_ranks()}"))

    def _watch(self) -> None:
        """Waits for the end; raises when the holder has given no sign of life within the limit."""
        while not self._ended.wait(timeout=min(1.0, self._timeout_s / 4)):
            silent_s = time.monotonic() - self._last_sign
            if silent_s > self._timeout_s:
                raise StuckRankError(
                    f"rank {self._holder} has given no sign of life for {silent_s:.1f} s (limit {self._timeout_s:g} s)"
                    f"; it stands at {self._line_of(self._holder)}\n{self.describe_ranks()}"
                )

    def describe_ranks(self) -> str:
        lines = []
        for rank in range(self.num_ranks):
            if rank in self._finished:
                what = "has finished"
            elif rank in self._waits and not self._waits[rank].is_over():
                what = f"waits for {self._waits[rank].describe()}"
            elif rank == self._holder:
                what = f"runs at {self._line_of(rank)}"
            else:
                what = "is ready to run"
            lines.append(f"  rank {rank} {what}")
        return "\n".join(lines)

    def _line_of(self, rank: int) -> str:
        return call_site(sys._current_frames().get(self._threads[rank].ident or -1))

    def _end(self, error: BaseException) -> None:
        if self._error is None:
            self._error = error
        for rank in range(self.num_ranks):
            self._give_turn(rank)
        self._ended.set()

    def _give_turn(self, rank: int) -> None:
        """Gives a rank its turn; one that was given and not yet taken stays one."""
        with contextlib.suppress(RuntimeError):
            self._turn[rank].release()


def call_site(frame: Any) -> str:
    """Returns ``file:line in function`` of the innermost frame outside our communication and torch: see name_site."""
    innermost = frame
    while frame is not None and frame.f_code.co_filename.startswith(_PLUMBING):
        frame = frame.f_back
    frame = frame or innermost
    return "an unknown line" if frame is None else name_site(frame)
