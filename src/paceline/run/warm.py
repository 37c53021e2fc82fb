"""A process with torch loaded that forks ranks: a rank is there in milliseconds, and a restart too.

Loading torch takes seconds, and ranks that do it all at once share the cores. The server does it once, while the
launcher is still busy with the config, and again only if it was killed. Some libraries start as many threads as
OMP_NUM_THREADS says when they are loaded, whatever torch is told later, so the server is told before it loads anything.

    python -m paceline.run.warm ADDRESS LISTENER MODULE [MODULE ...]      loads the modules, then forks ranks

LISTENER is the descriptor of a socket that listens at ADDRESS: clients may come before the server is ready. A client
(``warm_client.py``) connects for each rank; it sends the command with environment and folder, and its standard output
and error. The server forks, says so, and sends back how the rank ended. A byte from the client is a signal for the
rank: SIGKILL ends its whole group. A client that goes takes its rank with it, and when the launcher goes (end of input
on standard input) the server ends all ranks and itself. It computes nothing and has no CUDA context: a process may be
forked only as long as that is so.

Spare processes, where ranks ask for them (``SPARES``), are ranks that wait for their first attempt: forked when no rank
was asked for in a while, with the environment of one, which they do ahead for what a new rank has to do first
(``prepare`` of the module). A rank that is asked for later, and of which no process has stayed, is one of them.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import math
import os
import select
import selectors
import signal
import socket
import struct
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.cluster import detect
from paceline.comm.control.wire import Address, listen
from paceline.config import Config
from paceline.run.forked import Forked, run_forked
from paceline.run.logs import say
from paceline.run.processes import allocator_variables, end_helper
from paceline.run.signals import PREEMPTING, scratch_folder
from paceline.run.stay import CODE, SPARES, STAYS
from paceline.run.warm_client import FORKED, LENGTH, OVER, STATUS, receive
from paceline.untrusted import parse_json_object

CPU_RANKS = 2  # where there is no GPU: enough to be distributed, and every machine has two cores

# What a rank needs, loaded once before ranks are forked; optimizers load the last, which takes as long as torch itself.
_RANK_MODULES = ("paceline.run.worker", "torch._dynamo")
_COMPILER = "torch._inductor.compile_fx"
# Else torch may ask the driver for GPUs when it is loaded, after which no forked process can use one, and the compiler
# may start workers, who would belong to the server.
_WITHOUT_DEVICE = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "TORCH_WARM_POOL": "0"}
_PATIENCE_S = 0.5
_LONGEST_ADDRESS = 100  # of a socket; Linux takes 107 bytes
_EXITING = 0x4  # of the flags that Linux keeps of a process
_PARENT_DEATH_SIGNAL = 1  # of Linux's prctl
_MOST_BYTES = 2**26  # of a request: an environment has a few MiB at most
_REQUEST_S = 10.0  # a client sends its request as soon as it is connected


class WarmRanks:
    """A server that forks ranks. One that was killed, and its ranks with it, is started again when ranks are."""

    def __init__(self, address: Path, modules: Sequence[str], threads: int | None) -> None:
        self.address, self._modules, self._threads = address, modules, threads
        self._server = self._start()

    def arguments(self, command: Sequence[str]) -> list[str]:
        """Returns the arguments of the Python that stands for a rank which runs ``python -m <command>``."""
        if self._is_gone("another one is started"):
            end_helper(self._server, _PATIENCE_S)
            self._server = self._start()
        client = Path(__file__).with_name("warm_client.py")
        return ["-I", "-S", str(client), str(self.address), *command]

    def close(self) -> None:
        self._is_gone("its ranks went with it")
        end_helper(self._server, _PATIENCE_S)  # while it loads its modules it does not look, and has no ranks

    def _start(self) -> subprocess.Popen[bytes]:
        self.address.unlink(missing_ok=True)
        # From here on clients may come: they wait until the server has loaded its modules.
        with listen(Address(str(self.address))) as listener:
            number, threads = listener.fileno(), self._threads
            told = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
            return subprocess.Popen(
                [sys.executable, "-u", "-m", "paceline.run.warm", str(self.address), str(number), *self._modules],
                env={**os.environ, **allocator_variables(), **told, **_WITHOUT_DEVICE},
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=[number],
                start_new_session=True,  # Ctrl-C in a terminal goes to the launcher alone
            )

    def _is_gone(self, consequence: str) -> bool:
        """Says whether the server has ended by itself, and tells the user."""
        code = self._server.poll()
        if code is not None:
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"left with exit code {code}"
            say(f"the process that ranks are forked from {how}: {consequence}")
        return code is not None


def warm_ranks_of(config: Config, ranks: int | None = None) -> AbstractContextManager[WarmRanks | None]:
    """Starts a server for the ranks of a config, if it asks for one; ``ranks``: those of this host, where given."""
    modules = [*_RANK_MODULES, *(["sklearn.datasets"] if config.data.kind == "digits" else [])]
    modules += [] if config.model.compile in (False, "none") else [_COMPILER]
    return warm_ranks(modules, is_wanted=config.recovery.warm, threads=rank_threads(config, ranks))


@contextlib.contextmanager
def warm_ranks(
    modules: Sequence[str], *, is_wanted: bool = True, threads: int | None = None
) -> Iterator[WarmRanks | None]:
    """Starts a server that loads ``modules``, and ends it with its ranks; None where processes cannot be forked so."""
    with contextlib.ExitStack() as stack:
        address = stack.enter_context(scratch_folder()) / "ranks"
        if not is_wanted or sys.platform != "linux" or len(os.fsencode(address)) > _LONGEST_ADDRESS:
            yield None
            return
        yield stack.enter_context(contextlib.closing(WarmRanks(address, modules, threads)))


def rank_threads(config: Config, ranks: int | None = None) -> int | None:
    """Returns how many threads a rank of this host will compute with; None: ranks will have GPUs."""
    parallel = config.parallel
    if parallel.threads is not None or parallel.device == "cuda":
        return parallel.threads
    count = ranks or (CPU_RANKS if parallel.ranks == "auto" else parallel.ranks)
    return max(1, len(detect.usable_cores()) // (1 if config.comm.backend == "virtual" else count))


def parse_request(content: bytes) -> dict[str, Any]:
    """Reads what a client asks for. Raises ValueError for anything but a command with its folder and environment."""
    request = parse_json_object(content, _MOST_BYTES)
    match request:
        case {"command": [_, *_] as command, "folder": folder, "environment": dict(environment)}:
            texts = [*command, folder, *environment.values()]
            if all(isinstance(each, str) for each in texts):
                return request
    raise ValueError("a request has a command, a folder and an environment, all of them text")


@dataclass(slots=True)
class StayingRank:
    """A rank that may stay for another attempt (``stay.py``); ``number`` on this host, or of what a spare is like."""

    link: socket.socket
    number: str
    patience_s: float  # for it to say that its attempt is over
    until_s: float = math.inf
    waits: bool = False  # for another attempt
    is_spare: bool = False  # it had none yet


class WarmServer:
    """Ranks by process number, each with the client that asked for it."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._clients: dict[int, socket.socket] = {}
        self._ended: set[int] = set()  # by their clients
        self._ranks: dict[int, StayingRank] = {}
        self._late: dict[str, float] = {}  # ranks that did not end their attempt in so many seconds, by number
        self._requests: dict[str, dict[str, Any]] = {}  # the last one of each number, if spares are wanted
        self._num_spares, self._spares_at_s = 0, math.inf
        self._wakeup, self._wakeup_sender = socket.socketpair()
        self._wakeup.setblocking(False)
        self._wakeup_sender.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # a handler, so that the wakeup is written
        signal.set_wakeup_fd(self._wakeup_sender.fileno(), warn_on_full_buffer=False)
        self._selector = selectors.DefaultSelector()
        for each in (0, listener, self._wakeup):
            self._selector.register(each, selectors.EVENT_READ)

    def serve(self) -> Forked | None:
        """Has a rank for each client; returns its request in a forked one, and None here when the launcher is gone."""
        while True:
            if self._spares_at_s <= time.monotonic() and (spare := self._make_spare()) is not None:
                return spare
            until_s = min([self._spares_at_s, *(rank.until_s for rank in self._ranks.values())])
            patience_s = None if math.isinf(until_s) else max(0.0, until_s - time.monotonic())
            for key, _ in self._selector.select(patience_s):
                if key.fileobj == 0:
                    if not os.read(0, 1):
                        signal.set_wakeup_fd(-1)
                        for pid in {*self._clients, *self._ranks}:
                            with contextlib.suppress(ProcessLookupError, PermissionError):
                                os.killpg(pid, signal.SIGKILL)
                        return None
                elif key.fileobj is self._listener:
                    forked = self._accept()
                    if forked is not None:
                        return forked
                elif key.fileobj is self._wakeup:
                    with contextlib.suppress(BlockingIOError):
                        self._wakeup.recv(4096)
                    self._reap()
                else:
                    act, pid = key.data
                    act(pid)
            for pid, rank in self._ranks.items():
                if rank.until_s <= time.monotonic():
                    rank.until_s = math.inf
                    self._late[rank.number] = rank.patience_s
                    with contextlib.suppress(OSError):
                        os.killpg(pid, signal.SIGKILL)

    def _accept(self) -> Forked | None:
        client, _ = self._listener.accept()
        output: list[int] = []
        links: list[socket.socket] = []  # the server's end, and the rank's
        try:
            client.settimeout(_REQUEST_S)
            head, output, _, _ = socket.recv_fds(client, LENGTH.size, 2)
            content = receive(client, min(LENGTH.unpack(head)[0], _MOST_BYTES))
            request = parse_request(content)
            client.settimeout(None)
            pid = -1
            if len(output) == 2:
                if may_stay := STAYS in request["environment"]:
                    pid = self._hand_over(request["environment"], content, output)
                if pid < 0:
                    links = list(socket.socketpair()) if may_stay else []
                    pid = os.fork()
        except (OSError, EOFError, struct.error, ValueError):
            pid = -1  # ended before it had said what it wants, or it is no client of ours
        if pid == 0:
            self._become_rank(client, output)
            for each in links[:1]:
                each.close()
            return Forked(request, links[1] if links else None)
        for descriptor in output:
            os.close(descriptor)
        if links:
            self._keep_link(pid, links, request)
        if pid < 0:
            client.close()
            return None
        self._plan_spares(request)
        with contextlib.suppress(OSError):  # it is gone: then its end is read next
            client.sendall(FORKED)
        self._clients[pid] = client
        self._selector.register(client, selectors.EVENT_READ, data=(self._obey, pid))
        return None

    def _keep_link(self, pid: int, links: list[socket.socket], like: dict[str, Any], *, is_spare: bool = False) -> None:
        """Keeps the server's end of the link to a process that was forked, if it was."""
        links.pop().close()
        if pid > 0:
            links[0].settimeout(_REQUEST_S)
            number, patience = (like["environment"].get(name, "") for name in ("LOCAL_RANK", STAYS))
            self._ranks[pid] = StayingRank(links[0], number, float(patience), waits=is_spare, is_spare=is_spare)
            self._selector.register(links[0], selectors.EVENT_READ, data=(self._end_attempt, pid))

    def _plan_spares(self, request: dict[str, Any]) -> None:
        """Notes how many spares a rank that is there now asks for, and when they may be made."""
        environment = request["environment"]
        if STAYS in environment and SPARES in environment:
            count, after_s = environment[SPARES].split(",")
            self._requests[environment.get("LOCAL_RANK", "")] = request
            self._num_spares, self._spares_at_s = int(count), time.monotonic() + float(after_s)

    def _make_spare(self) -> Forked | None:
        """Forks a spare, if one is wanting; returns, in it, what it is to be like."""
        numbers = sorted(self._requests, key=lambda each: (len(each), each))
        there = [rank.number for rank in self._ranks.values() if rank.is_spare]
        if len(there) >= self._num_spares:
            self._spares_at_s = math.inf
            return None
        like, links = self._requests[min(numbers, key=there.count)], list(socket.socketpair())
        pid = os.fork()
        if pid == 0:
            self._become_rank(None, [os.open(os.devnull, os.O_WRONLY) for _ in range(2)])
            links[0].close()
            return Forked(like, links[1], is_spare=True)
        self._keep_link(pid, links, like, is_spare=True)
        return None

    def _hand_over(self, environment: dict[str, str], content: bytes, output: list[int]) -> int:
        """Gives a request to the rank of its number on this host that has stayed, or to a spare; returns its process.

        -1: there is none.
        """
        number = environment.get("LOCAL_RANK", "")
        if (late_s := self._late.pop(number, None)) is not None:
            say(f"the process of local rank {number} did not end its attempt in {late_s:g} s: another takes its place")
        for pid, rank in sorted(self._ranks.items(), key=lambda each: (each[1].is_spare, each[1].number != number)):
            if rank.waits and (rank.is_spare or rank.number == number) and not _is_ending(pid, or_stopped=True):
                rank.patience_s = float(environment[STAYS])
                with contextlib.suppress(OSError):  # it has ended
                    socket.send_fds(rank.link, [LENGTH.pack(len(content))], output)
                    rank.link.sendall(content)
                    rank.waits, rank.is_spare, rank.number = False, False, number
                    return pid
        return -1

    def _end_attempt(self, pid: int) -> None:
        """Takes the code that a rank's attempt has ended with: its client ends, and the process stays."""
        rank = self._ranks.get(pid)
        told = b""
        with contextlib.suppress(OSError):
            told = b"" if rank is None else rank.link.recv(CODE.size)
        if rank is not None and not told:
            self._selector.unregister(rank.link)  # it has ended
        elif rank is not None:
            rank.waits, rank.until_s = True, math.inf
            self._answer(pid, CODE.unpack(told)[0])

    def _answer(self, pid: int, code: int) -> None:
        """Tells the client of a rank, if it is there, how the rank or its attempt has ended."""
        client = self._clients.pop(pid, None)
        if client is not None:
            self._selector.unregister(client)
            with contextlib.suppress(OSError), client:
                client.sendall(STATUS.pack(code, pid in self._ended))
        self._ended.discard(pid)

    def _become_rank(self, client: socket.socket | None, output: list[int]) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        self._selector.close()
        links = [rank.link for rank in self._ranks.values()]
        clients = [*self._clients.values(), *([] if client is None else [client])]
        for each in (self._listener, self._wakeup, self._wakeup_sender, *clients, *links):
            each.close()
        nothing = os.open(os.devnull, os.O_RDONLY)
        for descriptor, place in ((nothing, 0), (output[0], 1), (output[1], 2)):
            os.dup2(descriptor, place)
            os.close(descriptor)

    def _obey(self, pid: int) -> None:
        """Hands on a signal that a client sends. Its end ends the attempt, and the rank if that may not stay."""
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
        numbers = numbers or bytes([OVER])
        if OVER in numbers or signal.SIGKILL in numbers:
            self._reap()
            if (pid in self._clients or pid in self._ranks) and not _is_ending(pid):
                self._ended.add(pid)  # whoever is dead by now was not ended by this
                if signal.SIGKILL not in numbers and self._tell_over(pid):
                    return
        for number in numbers.replace(bytes([OVER]), bytes([signal.SIGKILL])):
            with contextlib.suppress(OSError):  # it is gone, or that is no signal
                (os.killpg if number == signal.SIGKILL else os.kill)(pid, number)

    def _tell_over(self, pid: int) -> bool:
        """Tells a rank that its attempt is over; False where it cannot stay."""
        rank = self._ranks.get(pid)
        if rank is None:
            return False
        if math.isinf(rank.until_s) and not rank.waits:
            rank.until_s = time.monotonic() + rank.patience_s
            with contextlib.suppress(OSError):  # it has ended
                rank.link.sendall(LENGTH.pack(0))
        return True

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            client, rank = self._clients.get(pid), self._ranks.pop(pid, None)
            if rank is not None:
                with contextlib.suppress(KeyError):
                    self._selector.unregister(rank.link)
                rank.link.close()
                if rank.is_spare:
                    say("a spare process has ended before it was needed: another one is made")
                    self._plan_spares(self._requests[rank.number])
            with contextlib.suppress(OSError):  # that its end was asked for may not have been read yet
                asked = b"" if client is None else client.recv(64, socket.MSG_DONTWAIT)
                if (client is not None or rank is not None) and (not asked or OVER in asked or signal.SIGKILL in asked):
                    os.killpg(pid, signal.SIGKILL)  # what the rank had started
            self._answer(pid, os.waitstatus_to_exitcode(status))


def _is_ending(pid: int, *, or_stopped: bool = False) -> bool:
    """Whether a process is about to end by itself, or was killed, or waits for SIGCONT.

    It can be waited for only when its last thread has ended. Others see it gone before: its files are closed, or its
    first thread has ended, and on a busy machine they may fail of that and be gone sooner than it.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return True
    return bool(int(fields[6]) & _EXITING) or (or_stopped and fields[0] == "T")


def main() -> None:
    address, descriptor, *modules = sys.argv[1:]
    for number in (signal.SIGINT, *PREEMPTING):  # for launcher and ranks, also where all processes are signalled
        signal.signal(number, signal.SIG_IGN)
    warnings.filterwarnings("ignore", message=".*multi-threaded.*fork", category=DeprecationWarning)
    with socket.socket(fileno=int(descriptor)) as listener:
        listener.set_inheritable(False)
        # It dies with its launcher while it has no ranks, and is too busy to look for the launcher.
        system = ctypes.CDLL(None)
        system.prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        if select.select([0], [], [], 0)[0]:  # it went before that
            os._exit(0)
        for name in modules:
            with contextlib.suppress(Exception):  # whatever a library raises: a rank that needs it says so
                importlib.import_module(name)
        system.prctl(_PARENT_DEATH_SIGNAL, 0)
        if _COMPILER in modules and _has_device():
            listener.set_inheritable(True)
            without = [each for each in sys.argv[1:] if each != _COMPILER]
            os.execv(sys.executable, [sys.executable, "-u", "-m", "paceline.run.warm", *without])  # nosec B606
        gc.collect()
        gc.freeze()  # so that collections in ranks leave out what all of them share: faster, and no page is copied
        server = os.getpid()
        forked = WarmServer(listener).serve()
    if forked is not None:
        run_forked(forked, server)
    with contextlib.suppress(OSError):  # a launcher that was killed cannot; the next one removes the folder
        Path(address).unlink()


def _has_device() -> bool:
    """Whether this process has asked CUDA's driver for a device, as only its own file for memory tells."""
    found = [Path("/proc/self/fd", each) for each in os.listdir("/proc/self/fd")]  # noqa: PTH208  # one of them closes
    return any("nvidia-uvm" in os.readlink(each) for each in found if each.is_symlink())  # noqa: PTH115


if __name__ == "__main__":
    main()
