"""TCP ports for processes that tests start, where the command line asks for one."""

from __future__ import annotations

import contextlib
import random
import socket

# Below those that Linux and macOS hand out to whoever asks for any: nobody is given one before it is used.
_PORTS = range(20_000, 32_000)


def free_port() -> int:
    """Returns a TCP port of the loopback interface that nobody uses now."""
    for port in random.SystemRandom().sample(_PORTS, 100):
        with socket.socket() as probe, contextlib.suppress(OSError):  # in use
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError("no port is free, of 100 tried")
