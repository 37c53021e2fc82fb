"""What the agent starts in the place of a rank: it has the rank forked by the warm server, and ends as the rank ends.

    python -I -S warm_client.py ADDRESS MODULE [ARGUMENT ...]

Only the standard library, and little of it: this process is there in 20 ms. Signals that end it end the rank at once,
together with what the rank started; the others are handed on, and so is a SIGTERM that does not come from the agent.
By its SIGTERM the agent ends the attempt: a rank that may stay is told so, and only the attempt ends.
Without a server it becomes the rank itself.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import resource
import signal
import socket
import struct
import sys

LENGTH = struct.Struct("!I")
FORKED = b"f"  # there is a rank; what follows, when it has ended, is its status
OVER = 0  # in the place of a signal's number: the attempt is over
STATUS = struct.Struct("!i?")  # how a rank ended, and whether that was asked for
_ANSWER = len(FORKED) + STATUS.size
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_PATIENCE_S = 0.3
_HANDED_ON = (signal.SIGUSR1, signal.SIGUSR2)


def main() -> None:
    address, *command = sys.argv[1:]
    agent = os.getppid()
    waited_for = {*_ENDING, *_HANDED_ON, signal.SIGIO}
    # Blocked, and taken one by one: a handler would not run where a signal comes just before a wait begins.
    waited_for -= signal.pthread_sigmask(signal.SIG_BLOCK, waited_for)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
        try:
            link.connect(address)
        except OSError:  # the server was killed: the rank loads what it needs by itself
            signal.pthread_sigmask(signal.SIG_UNBLOCK, waited_for)
            os.environ.pop("PACELINE_STAYS", None)  # nobody could have it stay
            os.execv(sys.executable, [sys.executable, "-u", "-m", *command])  # nosec B606  # a list, as the agent's
        # pathlib would take longer to load than the rest of this
        folder = os.getcwd()  # noqa: PTH109
        request = {"command": command, "folder": folder, "environment": dict(os.environ)}
        content = json.dumps(request).encode()
        socket.send_fds(link, [LENGTH.pack(len(content))], [1, 2])
        link.sendall(content)
        fcntl.fcntl(link, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(link, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)  # SIGIO: there is something to read
        ended_by, answer = _wait(link, waited_for, agent)
    status, was_asked = -signal.SIGKILL, True  # where the server is gone, and its ranks with it
    if len(answer) == _ANSWER:
        status, was_asked = STATUS.unpack(answer[len(FORKED) :])
    if ended_by and was_asked:
        _end_by(ended_by)
    if status < 0:
        _end_by(-status)  # also where a signal came later: the rank was dead by then, and that is what counts
    os._exit(status)


def _wait(link: socket.socket, waited_for: set[signal.Signals], agent: int) -> tuple[int, bytes]:
    """Hands signals on until the server says how the rank ended, or is gone; returns what ends us, and its words."""
    ended_by, answer = 0, b""
    while len(answer) < _ANSWER:
        with contextlib.suppress(BlockingIOError):
            piece = link.recv(_ANSWER - len(answer))
            if not piece:
                break
            answer += piece
            continue
        if ended_by and not answer:  # the server may still load its modules, and does not answer
            heard = signal.sigtimedwait(waited_for, _PATIENCE_S)
        else:  # from its first word on only the server knows how the rank ended, however long that takes
            heard = signal.sigwaitinfo(waited_for)
        if heard is None:
            break
        number = heard.si_signo
        # The agent ends ranks by SIGTERM. From others it asks for room: schedulers signal all processes of a job.
        if number in _ENDING and (number != signal.SIGTERM or heard.si_pid == agent):
            ended_by = number
            _tell(link, OVER if number == signal.SIGTERM else signal.SIGKILL)
        elif number != signal.SIGIO:
            _tell(link, number)
    return ended_by, answer


def _tell(link: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # the rank is gone
        link.sendall(bytes([number]))


def receive(link: socket.socket, length: int) -> bytes:
    """Returns so many bytes. Raises EOFError where the other side has closed the socket before."""
    content = b""
    while len(content) < length:
        piece = link.recv(length - len(content))
        if not piece:
            raise EOFError
        content += piece
    return content


def _end_by(number: int) -> None:
    """Ends this process by the signal that ended the rank, without a core file of its own."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (number,))
    os.kill(os.getpid(), number)


if __name__ == "__main__":
    main()
