"""What the agent starts in the place of a rank: it has the rank forked by the warm server, and ends as the rank ends.

    python -I -S warm_client.py ADDRESS MODULE [ARGUMENT ...]

Only the standard library, and little of it: this process is there in 20 ms. Signals that end it end the rank at once,
together with what the rank started; the others are handed on. Without a server it becomes the rank itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import struct
import sys
from types import FrameType

LENGTH = struct.Struct("!I")
FORKED = b"f"  # there is a rank; what follows, when it has ended, is its status
STATUS = struct.Struct("!i?")  # how a rank ended, and whether that was asked for
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_PATIENCE_S = 0.3
_HANDED_ON = (signal.SIGUSR1, signal.SIGUSR2)


def main() -> None:
    address, *command = sys.argv[1:]
    ended_by, is_forked = 0, False
    signal.pthread_sigmask(signal.SIG_BLOCK, _HANDED_ON)  # the rank may be there before there is a way to it
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
        try:
            link.connect(address)
        except OSError:  # the server was killed: the rank loads what it needs by itself
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDED_ON)
            os.execv(sys.executable, [sys.executable, "-u", "-m", *command])  # nosec B606  # a list, as the agent's
        # pathlib would take longer to load than the rest of this
        folder = os.getcwd()  # noqa: PTH109
        request = {"command": command, "folder": folder, "environment": dict(os.environ)}
        content = json.dumps(request).encode()
        socket.send_fds(link, [LENGTH.pack(len(content))], [1, 2])
        link.sendall(content)

        def end(number: int, _: FrameType | None) -> None:
            nonlocal ended_by
            ended_by = number
            _tell(link, signal.SIGKILL)
            if not is_forked:  # the server is still loading its modules, and does not answer
                signal.setitimer(signal.ITIMER_REAL, _PATIENCE_S)

        signal.signal(signal.SIGALRM, lambda *_: _end_by(ended_by))
        for number in _ENDING:
            signal.signal(number, end)
        for number in _HANDED_ON:
            signal.signal(number, lambda number, _: _tell(link, number))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDED_ON)
        try:
            receive(link, len(FORKED))
            is_forked = True  # from here on only the server knows how the rank ended, however long that takes
            signal.setitimer(signal.ITIMER_REAL, 0)
            status, was_asked = STATUS.unpack(receive(link, STATUS.size))
        except EOFError:
            status, was_asked = -signal.SIGKILL, True  # the server is gone, and its ranks go with it
    if ended_by and was_asked:
        _end_by(ended_by)
    if status < 0:
        _end_by(-status)  # also where a signal came later: the rank was dead by then, and that is what counts
    os._exit(status)


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
    os.kill(os.getpid(), number)


if __name__ == "__main__":
    main()
