"""The actor of ``--on ray``: it has ``paceline.launch.remote`` run on its machine, and hands over orders and output.

Ray calls its methods from several threads at once. When the actor is gone, the pipe to ``remote`` closes, and the run
on that machine is asked to save and to leave.
"""

from __future__ import annotations

import contextlib
import json
import queue
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.untrusted import parse_json_object

_NEWS_S = 1.0  # that a call waits for output
_MOST_LINES = 1000
_END_S = 10.0


class RemoteWorker:
    """Runs one command on its machine. ``command`` starts ``paceline.launch.remote`` there."""

    def __init__(self, command: Sequence[str], workdir: str) -> None:
        self._lines: queue.Queue[str] = queue.Queue()
        self._process = subprocess.Popen(
            list(command), cwd=workdir, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        self._reader = threading.Thread(target=self._read, name="output", daemon=True)

    def ask(self, order: Mapping[str, object]) -> dict[str, Any] | str:
        """Gives an order that is answered by one line of JSON; returns why there is no answer as a text."""
        assert self._process.stdout is not None
        self._order(order)
        said = ""
        for line in self._process.stdout:
            said = line.decode("utf-8", "replace").strip() or said
            with contextlib.suppress(ValueError):
                return parse_json_object(line)
        return f"does not start Paceline: {said or f'exit code {self._process.wait()}'}"

    def run(self, order: Mapping[str, object]) -> None:
        """Starts the command of an order. The job's secret is in the order, and so on no command line."""
        self._order(order)
        self._reader.start()

    def news(self) -> tuple[list[str], int | None]:
        """Returns the lines that the command has printed since, after a second at most; its exit code when it ended."""
        found = []
        with contextlib.suppress(queue.Empty):
            found.append(self._lines.get(timeout=_NEWS_S))
            while len(found) < _MOST_LINES:
                found.append(self._lines.get_nowait())
        code = self._process.poll()
        if code is None:
            return found, None
        self._reader.join(_NEWS_S)  # processes that the command left behind may hold its output open
        while not self._lines.empty():
            found.append(self._lines.get_nowait())
        return found, 128 - code if code < 0 else code

    def signal(self, number: int) -> None:
        """Hands a signal on to the command."""
        self._order({"do": "signal", "number": number})

    def stop(self) -> None:
        """Ends the command without a save: at once, or after some seconds by force."""
        for number in (signal.SIGINT, signal.SIGKILL):
            self.signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_S)
                return
        self._process.kill()

    def close(self) -> None:
        """Ends the orders, by which the command is asked to save and to leave, and waits for it."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()
        self._process.wait()

    def _order(self, order: Mapping[str, object]) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # it has ended
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line.decode("utf-8", "replace").rstrip())
