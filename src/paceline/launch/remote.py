"""What ``--on ssh`` and ``--on ray`` run on each host: it takes orders from standard input, one JSON object on a line.

    python -m paceline.launch.remote

    {"do": "look", "folder": "/shared/runs", "mark": "..."}     answers what this host has, in one line of JSON
    {"do": "run", "command": [...], "environment": {...}}       runs a command until it ends, and leaves with its code
    {"do": "signal", "number": 15}                              goes on to the command
    {"do": "alive"}                                             while a command runs: answers a line with ALIVE

The environment has the job's secret, which so is on no command line. When the input ends, whoever started the run is
gone: the command is asked to save and to leave. On Linux it is asked so, too, when this process is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

from paceline import __version__
from paceline.cluster.detect import detect_machine
from paceline.comm.control.wire import SECRET, Address, listen
from paceline.launch.background import exit_code_of
from paceline.launch.job import LAUNCHED, LaunchJob
from paceline.run.whereami import HOST
from paceline.untrusted import parse_json_object, read_regular

ALIVE = b"\x06\n"  # ASCII's acknowledgement
_MARK = ".launch-mark"
_MOST_BYTES = 2**20
_PATIENCE_S = 4.0  # for a launcher whose host is cut off to save
_PARENT_DEATH_SIGNAL = 1  # of Linux's prctl


def start_command(job: LaunchJob) -> str:
    """Returns what a shell of a host runs to take orders."""
    path = job.settings.get("pythonpath", "")
    words = [*(["env", f"PYTHONPATH={path}"] if path else []), job.python, "-m", "paceline.launch.remote"]
    return " && ".join([*job.setup, f"exec {shlex.join(words)}"])


def look_order(job: LaunchJob, mark: str, address: str = "") -> dict[str, Any]:
    """Returns the order to look; the first host gets the ``address`` at which the others meet, and leaves the mark."""
    where = {"folder": str(job.runs), "address": address, "port": job.port or 0}
    return {"do": "look", "config": job.config, "mark": mark, "is_first": bool(address), **where}


def run_order(job: LaunchJob, command: Sequence[str], secret: str, host: str, **variables: str) -> dict[str, Any]:
    """Returns the order to run a command on a host."""
    environment = {SECRET: secret, LAUNCHED: job.name, HOST: host, **variables}
    if path := job.settings.get("pythonpath"):
        environment["PYTHONPATH"] = path
    return {"do": "run", "command": list(command), "workdir": job.workdir, "environment": environment}


def give_order(process: subprocess.Popen[bytes], order: Mapping[str, object]) -> None:
    """Gives an order to the process that takes them on a host; one that has ended gets none."""
    assert process.stdin is not None
    with contextlib.suppress(OSError, ValueError):
        process.stdin.write(json.dumps(order).encode() + b"\n")
        process.stdin.flush()


def main(orders: IO[bytes], answers: IO[str]) -> int:
    """Carries out orders until the input ends, or a command that it ran has ended."""
    for line in orders:
        order = parse_json_object(line, _MOST_BYTES)
        if order["do"] == "look":
            answers.write(json.dumps(look(order)) + "\n")
            answers.flush()
        elif order["do"] == "run":
            return _run(order, orders)
    return 0


def look(order: dict[str, Any]) -> dict[str, Any]:
    """Returns what this host has, and whether it sees the folder in which the first host has left a mark."""
    machine = detect_machine()
    found: dict[str, Any] = {"host": socket.gethostname(), "paceline": __version__, "torch": version("torch")}
    found |= {"gpus": len(machine.gpus), "gpu_bytes": min(machine.gpu_memory_bytes, default=0.0)}
    found |= {"memory_bytes": machine.memory_bytes, "config": "", "sees": False}
    found["port"] = _free_port(order["address"], order["port"])
    with contextlib.suppress(OSError):
        found["config"] = read_regular(Path(order["config"]), _MOST_BYTES).decode("utf-8", "replace")
    folder, mark = Path(order["folder"]), str(order["mark"])
    with contextlib.suppress(OSError):
        if order["is_first"]:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / _MARK).write_text(mark, encoding="ascii")
        found["sees"] = read_regular(folder / _MARK, 128).decode("ascii", "replace") == mark
    return found


def forget_mark(folder: Path) -> None:
    """Removes the mark by which hosts have found that they share a folder."""
    with contextlib.suppress(OSError):
        (folder / _MARK).unlink()


def _free_port(address: str, asked: int) -> int | str:
    if not address:
        return 0
    try:
        with listen(Address(address, asked)) as probe:
            return int(probe.getsockname()[1])
    except OSError as error:
        return f"{address}:{asked}: {error.strerror or error}"


def _run(order: dict[str, Any], orders: IO[bytes]) -> int:
    system, is_linux = ctypes.CDLL(None), sys.platform == "linux"
    process = subprocess.Popen(
        order["command"],
        cwd=order["workdir"],
        env={**os.environ, **order["environment"]},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        # No other thread runs yet.
        preexec_fn=(lambda: system.prctl(_PARENT_DEATH_SIGNAL, int(signal.SIGTERM))) if is_linux else None,
    )

    heard = threading.Event()

    def take_orders() -> None:
        for line in orders:
            heard.set()
            with contextlib.suppress(ValueError, KeyError, OSError):
                asked = parse_json_object(line, _MOST_BYTES)
                if asked["do"] == "alive":
                    os.write(sys.stdout.fileno(), ALIVE)
                else:
                    process.send_signal(int(asked["number"]))
        process.send_signal(signal.SIGTERM)

    def end_if_cut_off() -> None:
        while heard.wait(order["lease_s"]):
            heard.clear()
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_PATIENCE_S)
        process.kill()

    threading.Thread(target=take_orders, name="orders", daemon=True).start()
    if order.get("lease_s"):  # whoever holds the run takes a silent host for lost, and goes on without it
        threading.Thread(target=end_if_cut_off, name="lease", daemon=True).start()
    for number in (signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, lambda *_: process.send_signal(signal.SIGTERM))
    return exit_code_of(process)


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        ended = main(sys.stdin.buffer, sys.stdout)
        sys.stdout.flush()
        os._exit(ended)  # a thread may still wait for orders
