"""New Python processes that have torch loaded: forked from a server instead of started from nothing.

Loading torch and Paceline takes three seconds of a core, and the tests start hundreds of processes. After ``install()``
those of ``FORKED``, and those of multiprocessing's "spawn", are forked from a server that has loaded both, which is
started when it is first needed. They are processes like others: with arguments, environment, folder, files, cores and
session of their own, their own number to send signals to, and the exit status that ``subprocess`` expects. Only their
parent is another one. All other commands are started as ever, and so are these where a test asks for ``real_starts``:
it needs to see what loading does.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import importlib
import inspect
import json
import multiprocessing.popen_spawn_posix as spawning
import multiprocessing.util
import os
import pkgutil
import runpy
import select
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import warnings
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

FORKED = (
    "paceline",
    "paceline.run.warm",
    "torch.distributed.run",
    "faulty_rank",
    "kill_saves",
    "own_loop",
    "recorded_loop",
    "deeds",
    "run_functions",
    "run_tests",
    "save_sharded",
)  # of python -m
FORKED_CODE = (
    "import gloo_pool;",
    "from multiprocessing.spawn import spawn_main;",
    "import sys;exec(eval(sys.stdin.readline()))",  # a worker of pytest-xdist, as execnet starts it
    "# forked\n",  # of a test that says so
)  # of python -c
# CUDA refuses to start in a process that was forked from one that has looked for devices, as libraries do on loading.
HAS_GPU = Path("/dev/nvidiactl").exists()
FLAGS = ("-u", "-s", "-E", "-B")
LENGTH, NUMBER = struct.Struct("!I"), struct.Struct("!i")
FIRST_SPARE_FILE = 200
EXECUTE = list(inspect.signature(subprocess.Popen._execute_child).parameters)[1:]  # type: ignore[attr-defined]

plain_popen = subprocess.Popen
plain_spawn = spawning.Popen
plain_spawnv = multiprocessing.util.spawnv_passfds
_address: str | None = None  # of the server, here and in all that it forks
_links: dict[int, socket.socket] = {}  # by process: where its exit status will arrive


# Who asks for a process.


def is_forked(command: Any) -> bool:
    """Says whether a command is started by the server: none is beside a GPU."""
    if HAS_GPU or isinstance(command, (str, bytes, os.PathLike)) or os.fsdecode(command[0]) != sys.executable:
        return False
    kind, what = [*without_flags(command[1:]), "", ""][:2]
    return (kind == "-m" and what in FORKED) or (kind == "-c" and what.startswith(FORKED_CODE))


def without_flags(arguments: Sequence[Any]) -> list[str]:
    """Drops flags of Python that make no difference to a process that is forked."""
    words = [os.fsdecode(each) for each in arguments]
    while words and words[0] in FLAGS:
        del words[0]
    return words


def ask(command: Sequence[str], files: dict[int, int], *, env: Any = None, cwd: Any = None, session: bool) -> int:
    """Has a process forked, in which each of our ``files`` has the number that it is given; returns its number."""
    _server_number()
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    link.connect(str(_address))
    request = {
        "command": without_flags(command[1:]),
        "env": {os.fsdecode(name): os.fsdecode(value) for name, value in (os.environ if env is None else env).items()},
        "cwd": os.fsdecode(Path.cwd() if cwd is None else cwd),
        "files": list(files),
        "session": session,
        "group": os.getpgid(0),
        "cores": sorted(os.sched_getaffinity(0)),
    }
    content = json.dumps(request).encode()
    socket.send_fds(link, [LENGTH.pack(len(content))], list(files.values()))
    link.sendall(content)
    pid: int = NUMBER.unpack(receive(link, NUMBER.size))[0]
    _links[pid] = link
    return pid


def status_of(pid: int, is_waiting: bool) -> int | None:
    """Returns the exit status of a process, as ``os.waitpid`` would; None while there is none."""
    link = _links[pid]
    # The status of a process that has ended may still be on its way, where a parent would see it at once.
    if not is_waiting and not select.select([link], [], [], 0)[0] and not has_ended(pid):
        return None
    try:
        status: int = NUMBER.unpack(receive(link, NUMBER.size))[0]
    except (EOFError, OSError):
        status = signal.SIGKILL  # the server is gone
    _links.pop(pid).close()
    return status


def has_ended(pid: int) -> bool:
    """Whether a process is gone, or waits to be reaped by the server."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state in ("Z", "X")


class ForkedPopen(plain_popen):  # type: ignore[type-arg]
    """Starts a process as ``subprocess`` does, or has it forked."""

    def _execute_child(self, *arguments: Any) -> None:
        given = dict(zip(EXECUTE, arguments, strict=True))
        is_new = given["start_new_session"]
        self._is_forked = (
            not given["shell"]
            and given["preexec_fn"] is None
            and is_forked(given["args"])
            and (is_new or os.getsid(0) == os.getsid(_server_number()))
        )
        if not self._is_forked:
            super()._execute_child(*arguments)  # type: ignore[misc]
            return
        ends = [("p2cread", 0), ("c2pwrite", 1), ("errwrite", 2)]
        files = {number: given[name] if given[name] != -1 else number for name, number in ends}
        files |= {number: number for number in given["pass_fds"]}
        self.pid = ask(given["args"], files, env=given["env"], cwd=given["cwd"], session=is_new)
        self._child_created = True
        self._close_pipe_fds(*(given[name] for name in EXECUTE if name in PIPES))  # type: ignore[attr-defined]

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if not self._is_forked:
            return super()._try_wait(wait_flags)  # type: ignore[misc,no-any-return]
        status = status_of(self.pid, not wait_flags & os.WNOHANG)
        return (0, 0) if status is None else (self.pid, status)

    def _internal_poll(self, *arguments: Any, **keywords: Any) -> int | None:
        if not getattr(self, "_is_forked", False):
            return super()._internal_poll(*arguments, **keywords)  # type: ignore[misc,no-any-return]
        if self.returncode is None and self.pid in _links:
            status = status_of(self.pid, is_waiting=False)
            if status is not None:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")


class ForkedSpawn(plain_spawn):
    """A process of multiprocessing's "spawn" whose exit status comes from the server."""

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        """Returns the exit code, or None while the process runs."""
        if self.returncode is None and self.pid in _links:
            status = status_of(self.pid, not flag & os.WNOHANG)
            self.returncode = None if status is None else os.waitstatus_to_exitcode(status)
            return self.returncode
        return super().poll(flag)  # type: ignore[no-any-return]


def forked_spawnv(path: Any, command: Sequence[Any], files: Sequence[int]) -> int:
    """Stands for multiprocessing's way to start a Python."""
    if not is_forked(command) or os.getsid(0) != os.getsid(_server_number()):
        return plain_spawnv(path, command, files)  # type: ignore[no-any-return]
    return ask(command, {number: number for number in (0, 1, 2, *files)}, session=False)


# The server.

_server: subprocess.Popen[bytes] | None = None
_server_pid = 0


def _server_number() -> int:
    """Returns the process number of the server, which is started if there is none."""
    global _address, _server, _server_pid
    if _address is None:
        folder = tempfile.mkdtemp(prefix="paceline-tests-")
        _address = str(Path(folder) / "forks")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(_address)
            listener.listen(64)
            code = f"import fork_server; fork_server.serve({listener.fileno()}, {_address!r})"
            path = [str(Path(__file__).parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
            _server = plain_popen(
                [sys.executable, "-u", "-c", code],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path)), **WHILE_LOADING},
                stdin=subprocess.PIPE,
                pass_fds=[listener.fileno()],
            )
        _server_pid = _server.pid
    return _server_pid


ALSO_LOADED = (
    "torch.distributed.run",
    "torch.distributed.elastic.agent.server.local_elastic_agent",
    "torch._inductor.compile_fx",
    "transformers.models.llama.modeling_llama",
    "transformers.models.gpt2.modeling_gpt2",
    "torch.distributed.fsdp",
    "peft",
    "torch.distributed.pipelining",
    "sklearn.datasets",
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "tensorboard.backend.event_processing.event_accumulator",
)  # beside Paceline
WHILE_LOADING = {"OMP_NUM_THREADS": "1", "TORCH_WARM_POOL": "0"}  # the compiler starts no processes
ELASTIC = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"


def install() -> None:
    """Has processes forked from here on, in this process and in those."""
    _set_popen(ForkedPopen)
    spawning.Popen = ForkedSpawn  # type: ignore[misc]
    multiprocessing.util.spawnv_passfds = forked_spawnv


def uninstall() -> None:
    """Has all processes started as ever."""
    _set_popen(plain_popen)
    spawning.Popen = plain_spawn  # type: ignore[misc]
    multiprocessing.util.spawnv_passfds = plain_spawnv


def _set_popen(kind: type[subprocess.Popen[Any]]) -> None:
    subprocess.Popen = kind  # type: ignore[misc]
    if ELASTIC in sys.modules:  # torch's agent, which keeps a name of its own for it
        sys.modules[ELASTIC].Popen = kind  # type: ignore[attr-defined]


def end() -> None:
    """Ends the server, if one was started here."""
    global _address, _server
    uninstall()
    if _server is not None and _address is not None:
        assert _server.stdin is not None
        _server.stdin.close()
        _server.wait()
        shutil.rmtree(Path(_address).parent, ignore_errors=True)
    _address = _server = None


def serve(listener_number: int, address: str) -> None:
    """Loads everything, then forks until the input ends."""
    global _address, _server_pid
    own = os.environ["PYTHONPATH"].split(os.pathsep)
    standard_path = [place for place in sys.path if place and place not in own]
    load_all()
    _address, _server_pid = address, os.getpid()
    install()
    leave_operators_at_exit()
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=listener_number) as listener:
        request = fork_for_clients(listener)
    if request is None:
        os._exit(0)
    become(request, standard_path)


def load_all() -> None:
    """Loads what a process of Paceline may need."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in ALSO_LOADED:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
        for name in ("paceline", "paceline_classic", "paceline_bench.profile"):
            package = importlib.import_module(name)
            for found in pkgutil.walk_packages(package.__path__, f"{name}."):
                if not found.name.endswith(("__main__", "warm_client")):
                    with contextlib.suppress(ImportError):
                        importlib.import_module(found.name)
    anyio = sys.modules.get("anyio")
    if anyio is not None:  # a plugin of pytest too: a worker is told that its assertions stay as they are
        anyio.__doc__ = f"{anyio.__doc__ or ''}\n\nPYTEST_DONT_REWRITE"


def leave_operators_at_exit() -> None:
    """Spares processes that end the taking apart of torch's operators, which takes a tenth of a second each time."""
    torch_library = sys.modules["torch.library"]
    for finalizer, info in weakref.finalize._registry.items():  # type: ignore[attr-defined]
        if info.func is torch_library._del_library:  # type: ignore[attr-defined]
            finalizer.atexit = False


def fork_for_clients(listener: socket.socket) -> dict[str, Any] | None:
    """Returns the request in a process that was forked for it, and None in the server when its input ends."""
    clients: dict[int, socket.socket] = {}
    wakeup, sender = socket.socketpair()
    wakeup.setblocking(False)
    sender.setblocking(False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    selector = selectors.DefaultSelector()
    for source in (0, listener, wakeup):
        selector.register(source, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj == 0:
                return None
            if key.fileobj is wakeup:
                with contextlib.suppress(BlockingIOError):
                    wakeup.recv(4096)
                reap(clients)
                continue
            client, _ = listener.accept()
            try:
                head, files, _, _ = socket.recv_fds(client, LENGTH.size, 100)
                content = receive(client, LENGTH.unpack(head)[0])
            except (OSError, EOFError, struct.error):
                client.close()  # killed before it had said what it wants
                continue
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                # Here, not when they are collected: by then their numbers may be those of other files.
                for each in (selector, wakeup, sender, client, *clients.values()):
                    each.close()
                request: dict[str, Any] = json.loads(content)
                request["at"] = files
                return request
            for number in files:
                os.close(number)
            clients[pid] = client
            with contextlib.suppress(OSError):
                client.sendall(NUMBER.pack(pid))


def reap(clients: dict[int, socket.socket]) -> None:
    """Tells those who asked for them how processes ended."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        with contextlib.suppress(OSError), clients.pop(pid) as client:
            client.sendall(NUMBER.pack(status))


# A process that was forked.


def become(request: dict[str, Any], standard_path: Sequence[str]) -> None:
    """Turns this process into the one that was asked for, and runs its code."""
    take_files(request["files"], request["at"])
    if request["session"]:
        os.setsid()
    else:
        with contextlib.suppress(OSError):  # the group is gone
            os.setpgid(0, request["group"])
    os.sched_setaffinity(0, request["cores"])
    for number in (signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    _links.clear()
    import numpy
    import torch

    numpy.random.seed()
    threads = os.environ.get("OMP_NUM_THREADS", "")
    torch.set_num_threads(int(threads) if threads.isdecimal() else len(request["cores"]))
    asked = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    kind, what, *arguments = request["command"]
    sys.path[:] = [request["cwd"] if kind == "-m" else "", *asked, *standard_path]
    sys.argv[:] = [what if kind == "-m" else "-c", *arguments]
    try:
        if kind == "-m":
            sys.modules.pop(what, None)  # loaded by others: it runs anew, as the main module
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        else:
            exec(compile(what, "<string>", "exec"), {"__name__": "__main__", "__builtins__": __builtins__})
    except SystemExit as left:
        if left.code is not None and not isinstance(left.code, int):
            raise
        leave(left.code or 0)
    leave(0)


def leave(code: int) -> NoReturn:
    """Ends as Python does, but for taking all modules apart, which would copy the pages that are shared."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code & 0xFF)


def take_files(numbers: Sequence[int], at: Sequence[int]) -> None:
    """Gives received files the numbers that they have in the process that asked, and closes all others."""
    spare = [fcntl.fcntl(number, fcntl.F_DUPFD, FIRST_SPARE_FILE) for number in at]
    for place, number in zip(numbers, spare, strict=True):
        os.dup2(number, place)
    wanted = set(numbers)
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        if int(name) not in wanted:
            with contextlib.suppress(OSError):
                os.close(int(name))


def receive(link: socket.socket, length: int) -> bytes:
    """Reads so many bytes."""
    content = bytearray()
    while len(content) < length:
        piece = link.recv(length - len(content))
        if not piece:
            raise EOFError
        content += piece
    return bytes(content)
