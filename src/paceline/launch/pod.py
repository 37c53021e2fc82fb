"""What runs in a pod or a container beside the training itself, without torch.

    python -m paceline.launch.pod alive           exit code 0 unless a process of this container is stopped
    python -m paceline.launch.pod wait HOST PORT  waits until the launcher of the first pod listens there
    python -m paceline.launch.pod stay COMMAND    runs a command; where it must not be started again, stays behind it

``alive`` judges no progress, which Paceline itself does: it finds a process that is stopped or dead beside a living
container. A process that a debugger holds is alive. ``stay`` is for a StatefulSet, which starts every container again
that ends: a run that is done, was refused or gave up would be started for ever.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import time
from collections.abc import Sequence

import psutil

from paceline.errors import UsageError
from paceline.health.exit_codes import DONE, FAILED, MEANINGS, NO_PROGRESS, REFUSED
from paceline.launch.background import run_command
from paceline.run.whereami import address_towards
from paceline.terminal import echo

FINAL = (DONE, REFUSED, NO_PROGRESS)  # after these a start of the same command would change nothing
_STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_DEAD)  # not STATUS_TRACING_STOP: a debugger holds it
_LOOK_S = 1.0
_WAIT_S = 1800.0  # a cluster may take that long to find a machine for the first pod


def alive(first: int = 1) -> str:
    """Returns what is wrong with process ``first`` and those that it started; an empty text: nothing."""
    try:
        process = psutil.Process(first)
        if process.status() == psutil.STATUS_ZOMBIE:
            return f"process {first} has ended"
        processes = [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return f"there is no process {first}"
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended while we looked
            if process.status() in _STOPPED:
                return f"process {process.pid} ({process.name()}) is stopped"
    return ""


def wait_for_host(host: str, port: int, *, within_s: float = _WAIT_S) -> bool:
    """Waits until somebody listens at ``host``, which may take minutes, or until that is this pod; says whether."""
    deadline = time.monotonic() + within_s
    while True:
        with contextlib.suppress(OSError, UsageError):
            if address_towards(host, port) != socket.getaddrinfo(host, port)[0][4][0]:
                socket.create_connection((host, port), timeout=_LOOK_S).close()
            return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(min(_LOOK_S, within_s))


def stay(command: Sequence[str]) -> int:
    """Runs a command, hands signals on to it, and returns its exit code; after a final one only once SIGTERM comes."""
    code, asked = run_command(command)
    if code in FINAL and not asked:
        echo(f"paceline: exit code {code} ({MEANINGS[code]}): this pod stays until it is deleted", err=True)
        while not asked:
            time.sleep(_LOOK_S)
    return code


def main(words: Sequence[str]) -> int:
    match list(words):
        case ["alive"]:
            if problem := alive():
                echo(f"paceline: {problem}", err=True)
            return FAILED if problem else DONE
        case ["wait", host, port]:
            if wait_for_host(host, int(port)):
                return DONE
            what = f"nobody listens at {host}:{port} after {_WAIT_S:.0f} s\n  all pods meet at the first one"
            echo(f"paceline: {what}\n  kubectl describe pod says why it was not started", err=True)
            return FAILED
        case ["stay", *command] if command:
            return stay(command)
        case _:
            echo("paceline: use alive, wait HOST PORT, or stay COMMAND", err=True)
            return REFUSED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
