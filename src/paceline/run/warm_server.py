"""A process with torch loaded that forks ranks: a rank is there in milliseconds, and a restart too.

    python -m paceline.run.warm_server ADDRESS LISTENER MODULE [MODULE ...]      loads the modules, then forks ranks

LISTENER is the descriptor of a socket that listens at ADDRESS: clients may come before this process is ready. A client
(``warm_client.py``) connects for each rank; it sends the command with environment and folder, and its standard output
and error. The server forks, says so, and sends back how the rank ended. A byte from the client is a signal for the
rank: SIGKILL ends its whole group. A client that goes takes its rank with it, and when the launcher goes (end of input
on standard input) the server ends all ranks and itself.

It computes nothing and has no CUDA context: a process may be forked only as long as that is so.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import select
import selectors
import signal
import socket
import struct
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from paceline.run.warm_client import FORKED, LENGTH, STATUS, receive
from paceline.untrusted import parse_json_object

PARENT = "PACELINE_PARENT"
_EXITING = 0x4  # of the flags that Linux keeps of a process
_PARENT_DEATH_SIGNAL = 1  # of Linux's prctl
_MOST_BYTES = 2**26  # of a request: an environment has a few MiB at most
_REQUEST_S = 10.0  # a client sends its request as soon as it is connected


def parse_request(content: bytes) -> dict[str, Any]:
    """Reads what a client asks for. Raises ValueError for anything but a command with its folder and environment."""
    request = parse_json_object(content, _MOST_BYTES)
    match request:
        case {"command": [_, *_] as command, "folder": folder, "environment": dict(environment)}:
            texts = [*command, folder, *environment.values()]
            if all(isinstance(each, str) for each in texts):
                return request
    raise ValueError("a request has a command, a folder and an environment, all of them text")


class WarmServer:
    """Ranks by process number, each with the client that asked for it."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._clients: dict[int, socket.socket] = {}
        self._ended: set[int] = set()  # by their clients
        self._wakeup, wakeup = socket.socketpair()
        self._wakeup.setblocking(False)
        wakeup.setblocking(False)
        self._wakeup_sender = wakeup
        signal.signal(signal.SIGCHLD, lambda *_: None)  # a handler, so that the wakeup is written
        signal.set_wakeup_fd(wakeup.fileno(), warn_on_full_buffer=False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(0, selectors.EVENT_READ)
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._wakeup, selectors.EVENT_READ)

    def serve(self) -> dict[str, Any] | None:
        """Forks a rank for each client; returns its request in the rank, and None here when the launcher is gone."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj == 0:
                    if not os.read(0, 1):
                        self._end_all()
                        return None
                elif key.fileobj is self._listener:
                    request = self._accept()
                    if request is not None:
                        return request
                elif key.fileobj is self._wakeup:
                    with contextlib.suppress(BlockingIOError):
                        self._wakeup.recv(4096)
                    self._reap()
                else:
                    self._obey(key.data)

    def _accept(self) -> dict[str, Any] | None:
        client, _ = self._listener.accept()
        output: list[int] = []
        try:
            client.settimeout(_REQUEST_S)
            head, output, _, _ = socket.recv_fds(client, LENGTH.size, 2)
            request = parse_request(receive(client, min(LENGTH.unpack(head)[0], _MOST_BYTES)))
            client.settimeout(None)
            pid = os.fork() if len(output) == 2 else -1
        except (OSError, EOFError, struct.error, ValueError):
            pid = -1  # ended before it had said what it wants, or it is no client of ours
        if pid == 0:
            self._become_rank(client, output)
            return request
        for descriptor in output:
            os.close(descriptor)
        if pid < 0:
            client.close()
            return None
        with contextlib.suppress(OSError):  # it is gone: then its end is read next
            client.sendall(FORKED)
        self._clients[pid] = client
        self._selector.register(client, selectors.EVENT_READ, data=pid)
        return None

    def _become_rank(self, client: socket.socket, output: list[int]) -> None:
        """Closes all that belongs to the server: its sockets, its signals, its process group."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        self._selector.close()
        for each in (self._listener, self._wakeup, self._wakeup_sender, client, *self._clients.values()):
            each.close()
        nothing = os.open(os.devnull, os.O_RDONLY)
        for descriptor, place in ((nothing, 0), (output[0], 1), (output[1], 2)):
            os.dup2(descriptor, place)
            os.close(descriptor)

    def _obey(self, pid: int) -> None:
        """Hands on a signal that a client sends; its end ends the rank."""
        client = self._clients.get(pid)
        if client is None:
            return
        try:
            numbers = client.recv(64)
        except OSError:
            numbers = b""
        if not numbers:
            self._selector.unregister(client)
            self._clients.pop(pid).close()
        if not numbers or signal.SIGKILL in numbers:
            self._reap()
            if pid in self._clients and not _is_ending(pid):  # whoever is dead by now was not ended by this
                self._ended.add(pid)
        for number in numbers or bytes([signal.SIGKILL]):
            with contextlib.suppress(OSError):  # it is gone, or that is no signal
                (os.killpg if number == signal.SIGKILL else os.kill)(pid, number)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            client = self._clients.pop(pid, None)
            if client is not None:
                self._selector.unregister(client)
                with contextlib.suppress(OSError):  # that its end was asked for may not have been read yet
                    asked = client.recv(64, socket.MSG_DONTWAIT)
                    if not asked or signal.SIGKILL in asked:
                        os.killpg(pid, signal.SIGKILL)  # what the rank had started
                with contextlib.suppress(OSError), client:
                    client.sendall(STATUS.pack(os.waitstatus_to_exitcode(status), pid in self._ended))
            self._ended.discard(pid)

    def _end_all(self) -> None:
        signal.set_wakeup_fd(-1)
        for pid in self._clients:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)


def _is_ending(pid: int) -> bool:
    """Whether a process is about to end by itself, or was killed.

    It can be waited for only when its last thread has ended. Others see it gone before: its files are closed, or its
    first thread has ended, and on a busy machine they may fail of that and be gone sooner than it.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return True
    return bool(int(fields[6]) & _EXITING)


def main() -> None:
    """Serves until the launcher is gone; in a rank, runs what was asked for."""
    address, descriptor, *modules = sys.argv[1:]
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # they are for the launcher
    warnings.filterwarnings("ignore", message=".*multi-threaded.*fork", category=DeprecationWarning)
    with socket.socket(fileno=int(descriptor)) as listener:
        listener.set_inheritable(False)
        with _ended_with_parent():
            for name in modules:
                with contextlib.suppress(ImportError):  # a rank that needs it says so
                    importlib.import_module(name)
        gc.collect()
        gc.freeze()  # so that collections in ranks leave out what all of them share: faster, and no page is copied
        server = os.getpid()
        request = WarmServer(listener).serve()
    if request is not None:
        _run(request, server)
    with contextlib.suppress(OSError):  # a launcher that was killed cannot; the next one removes the folder
        Path(address).unlink()


@contextlib.contextmanager
def _ended_with_parent() -> Iterator[None]:
    """Lets this process die with its launcher while it has no ranks, and is too busy to look for the launcher."""
    system = ctypes.CDLL(None)
    system.prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if select.select([0], [], [], 0)[0]:  # it went before that
        os._exit(0)
    yield
    system.prctl(_PARENT_DEATH_SIGNAL, 0)


def _run(request: dict[str, Any], server: int) -> NoReturn:
    """Runs a rank's module in this process, as ``python -m`` would."""
    os.environ.clear()
    os.environ.update(request["environment"], **{PARENT: str(server)})
    os.chdir(request["folder"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)
    _use_threads(os.environ.get("OMP_NUM_THREADS"))
    name, *arguments = request["command"]
    sys.argv = [name, *arguments]
    module: ModuleType = importlib.import_module(name)
    module.main()
    sys.exit(0)


def _use_threads(number: str | None) -> None:
    """Applies OMP_NUM_THREADS, which libraries read when they were loaded in the server."""
    torch = sys.modules.get("torch")
    if torch is not None and number is not None and number.isdecimal():
        torch.set_num_threads(int(number))


if __name__ == "__main__":
    main()
