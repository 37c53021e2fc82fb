"""A rank that is well stays: when another one fails, its process waits for the next attempt, with all that is dear.

What is dear stays: the process with its imports, the CUDA context, what was compiled. What belongs to an attempt goes:
communicators are aborted, the trainer with its engine, tensors and graphs is freed, loader workers are ended, what was
to be done at the end of the process is done, modules of the user's own are forgotten. The next attempt begins as in a
new process, so that nothing of a step that was half done can be left. A process that cannot be cleared so (a thread of
the attempt still runs, the device does not answer) says why and ends, and a new one takes its place.

    the rank                     whoever has started it: ``warm.py``, or ``run_processes``
    a peer is lost:  code   ->   the attempt is over here, as if the process had ended with that code
                            <-   nothing: a peer failed, this attempt is over everywhere
    code                    ->
                            <-   what to do next, with standard output and error

``AttemptOverError`` unwinds the rank's main thread. A signal raises it between two lines of Python; a thread aborts the
communicators of NCCL first, for which a device may wait. Operations of Gloo end as those who took part in them go.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import signal
import socket
import struct
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from types import FrameType
from typing import Any, Final

import psutil

from paceline.health.exit_codes import FAILED
from paceline.run.logs import say
from paceline.run.processes import end_children, leave_process
from paceline.run.warm_client import LENGTH, receive
from paceline.untrusted import parse_json_object

STAYS: Final = "PACELINE_STAYS"  # in the environment of a process that may stay: seconds for it to end an attempt
SPARES: Final = "PACELINE_SPARES"  # beside it: how many spare processes a host has, and seconds until they are made
CODE: Final = struct.Struct("!i")
_SIGNAL = getattr(signal, "SIGRTMIN", 34) + 5
_TRIES_S = 0.05  # from one try to interrupt the main thread to the next, and for it to hear
_THREADS_S = 1.0  # for the threads of an attempt to end with it, where nobody says how long the attempt may take to end
# Of the seconds to end an attempt: handlers of errors may finish, then its threads; after all of them it is killed.
_HANDLERS_SHARE, _CLEARS_SHARE = 0.3, 0.6
_TOLD = threading.Event()
_HELPERS = ("torch._inductor", "torch/_inductor", "resource_tracker")  # processes that libraries start once
_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_LIBRARIES = (*(sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib")), "<frozen ")


class AttemptOverError(BaseException):
    """Unwinds an attempt whose process stays; ``code`` is what its end would be to whoever has started the process."""

    def __init__(self, code: int = FAILED) -> None:
        super().__init__(code)
        self.code = code


def is_told_over() -> bool:
    """Whether this attempt is over because a peer has failed, whatever it fails with itself from here on."""
    return _TOLD.is_set()


class StayingProcess:
    """This process, from attempt to attempt, with a ``link`` to whoever has started it. Made by the main thread."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._modules, self._path, self._cores = set(sys.modules), list(sys.path), os.sched_getaffinity(0)
        self._requests: SimpleQueue[tuple[dict[str, Any], list[int]] | None] = SimpleQueue()
        self._is_heard, self._is_over, self._ending = threading.Event(), threading.Event(), threading.Lock()
        self._is_over.set()  # until the first attempt begins
        self._insists = False  # interrupts handlers of errors too
        self._ender: threading.Thread | None = None  # while somebody has this attempt end
        self._exits: list[partial[Any]] = []  # what code of the attempt wants done at the end of the process
        self._at_exit = atexit.register, atexit.unregister
        atexit.register, atexit.unregister = self._register, self._unregister  # type: ignore[assignment]
        signal.signal(_SIGNAL, self._interrupt)
        threading.Thread(target=self._listen, name="stay", daemon=True).start()

    def run(self, attempt: Callable[[], object]) -> int:
        """Runs an attempt, clears what it left, and returns its code. A process that cannot be cleared ends itself."""
        try:
            try:
                os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"  # else it ends the process when another one is gone
                with self._ending:
                    self._ender = None
                    self._is_heard.clear()
                    self._is_over.clear()
                    self._end_if_told()
                attempt()
                code = 0
            finally:
                with self._ending:
                    self._is_over.set()
        except AttemptOverError as over:  # also where it comes between two lines of what is above
            code = over.code
            self._is_over.set()
        try:
            self._clear()
        except BaseException as error:  # whatever it is: a process that cannot be cleared does not stay
            with contextlib.suppress(Exception):
                rank, why = os.environ.get("RANK", "?"), f"{type(error).__name__}: {error}"
                say(f"the process of rank {rank} cannot stay for another attempt, so a new one takes its place: {why}")
            leave_process(code)
        return code

    def wait_for_next(self, code: int | None) -> tuple[dict[str, Any], list[int]]:
        """Tells that the attempt is over, with that code, and returns the next one's request and output.

        None: there was no attempt yet. Where there is no next one, because whoever has started this is gone, it ends.
        """
        if code is not None:
            self._link.sendall(CODE.pack(code))
        request = self._requests.get()
        if request is None:
            leave_process(code or 0)
        return request

    def _clear(self) -> None:
        from paceline.comm.meeting import abort

        abort()
        while self._exits:
            try:
                self._exits.pop()()
            except Exception:  # at the end of a process too, the others are called
                traceback.print_exc()
        end_children()
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.Error):  # it has just ended
                if not any(name in word for word in child.cmdline() for name in _HELPERS):
                    child.kill()
        gc.collect()
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        for name, module in list(sys.modules.items()):
            if name not in self._modules and is_own(getattr(module, "__file__", None) or "<frozen "):
                del sys.modules[name]
        sys.path[:] = self._path
        if torch is not None:
            torch.set_default_dtype(torch.float32)
            torch.set_grad_enabled(True)
            modes = torch._C._len_torch_dispatch_stack() + torch._C._len_torch_function_stack()
            modes += sum(map(torch.is_autocast_enabled, ("cpu", "cuda"))) + torch.is_inference_mode_enabled()
            if modes or torch._C._autograd._top_saved_tensors_default_hooks(False):
                raise RuntimeError("the attempt was interrupted where it left a context of torch")
        os.sched_setaffinity(0, self._cores)
        deadline = time.monotonic() + _CLEARS_SHARE * _patience_s()
        if self._ender is not None:
            self._ender.join(deadline - time.monotonic())  # it must not interrupt the next attempt
            if self._ender.is_alive():
                raise TimeoutError("its communicators could not be aborted")
        while found := next(self._threads(), ""):
            if time.monotonic() > deadline:
                raise TimeoutError(f"a thread of the attempt still runs, in {found}")
            time.sleep(0.01)

    def _register(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
        """Takes the place of ``atexit.register``: what libraries register is left to the end of the process."""
        module = sys.modules.get(getattr(function, "__module__", ""))
        file = getattr(module, "__file__", None) or "<frozen "
        if file.startswith(_PACKAGE) or is_own(file):
            self._exits.append(partial(function, *args, **kwargs))
            return function
        self._at_exit[0](function, *args, **kwargs)
        return function

    def _unregister(self, function: Callable[..., Any]) -> None:
        self._exits = [each for each in self._exits if each.func != function]
        self._at_exit[1](function)

    def _threads(self) -> Iterator[str]:
        """Yields where threads are that run code of the attempt: of the user's own, or of ours."""
        staying: set[int | None] = {threading.get_ident()}
        # Those of this file, and the one that looks for the parent.
        staying |= {thread.ident for thread in threading.enumerate() if thread.name in ("stay", "parent")}
        for ident, frame in sys._current_frames().items():
            current: FrameType | None = frame
            while current is not None and ident not in staying:
                file = current.f_code.co_filename
                if file.startswith(_PACKAGE) or is_own(file):
                    yield f"{file}:{current.f_lineno} {current.f_code.co_name}"
                    break
                current = current.f_back

    def _listen(self) -> None:
        with contextlib.suppress(OSError, EOFError, struct.error):  # whoever has started this process is gone
            while True:
                head, output, _, _ = socket.recv_fds(self._link, LENGTH.size, 2)
                if length := LENGTH.unpack(head)[0]:
                    request = parse_json_object(receive(self._link, length), length)
                    _TOLD.clear()  # what is told from here on is of that attempt, also before it has begun
                    self._requests.put((request, output))
                else:
                    with self._ending:
                        _TOLD.set()
                        self._end_if_told()
        self._requests.put(None)

    def _end_if_told(self) -> None:
        if _TOLD.is_set() and self._ender is None and not self._is_over.is_set():
            self._ender = threading.Thread(target=self._end, name="stay", daemon=True)
            self._ender.start()

    def _end(self) -> None:
        """Interrupts the main thread until its attempt is over: what is raised inside of a destructor is lost.

        A thread that handles an error is on its way out: what it clears then is cleared, unless that takes too long.
        """
        from paceline.comm.meeting import abort

        main, insists_at = threading.main_thread().ident, time.monotonic() + _HANDLERS_SHARE * _patience_s()
        assert main is not None
        while not self._is_over.is_set():
            if time.monotonic() >= insists_at:
                self._insists, insists_at = True, insists_at + _HANDLERS_SHARE * _patience_s()
            signal.pthread_kill(main, _SIGNAL)
            self._is_heard.wait(_TRIES_S)
            abort(only="nccl")
            self._is_over.wait(_TRIES_S)

    def _interrupt(self, *_: object) -> None:
        if self._is_over.is_set() or (sys.exc_info()[0] is not None and not self._insists):
            return
        self._insists = False  # once, then it may handle this
        self._is_heard.set()
        raise AttemptOverError


def _patience_s() -> float:
    return float(os.environ.get(STAYS, _THREADS_S))


def is_own(file: str) -> bool:
    """Whether a file is the user's own: of no library."""
    return not file.startswith((_PACKAGE, *_LIBRARIES))
