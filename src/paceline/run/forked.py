"""What a process does that was forked from the warm server (``warm.py``): one request, or one after another.

A rank runs the ``main`` of its module. One that may stay waits for the next attempt then (``stay.py``). A spare does
what the ``prepare`` of its module does, and waits for its first.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import socket
import sys
import time
from dataclasses import dataclass
from typing import Any, NoReturn

from paceline.run.signals import PREEMPTING
from paceline.run.stay import StayingProcess

PARENT = "PACELINE_PARENT"


@dataclass(frozen=True, slots=True)
class Forked:
    """What a process that was forked is to do, with its link to the server if it may stay for another attempt."""

    request: dict[str, Any]
    link: socket.socket | None
    is_spare: bool = False


def run_forked(forked: Forked, server: int) -> NoReturn:
    """Does what was requested; a rank that stays goes on with the next request when its attempt is over."""
    staying, request = None if forked.link is None else StayingProcess(forked.link), forked.request
    since: list[str] = []
    if forked.is_spare and staying is not None:
        _prepare(request, server)
        request, since = _next(staying, None)
    while True:
        _set_up(request["environment"], request["folder"], server)
        name, *arguments = request["command"]
        sys.argv = [name, *arguments, *since]
        if staying is None:
            sys.exit(importlib.import_module(name).main())
        code = staying.run(lambda: sys.exit(importlib.import_module(name).main()))  # noqa: B023
        sys.stdout.flush()
        nothing = os.open(os.devnull, os.O_WRONLY)  # who reads the output of the attempt waits for its end
        for place in (1, 2):
            os.dup2(nothing, place)
        os.close(nothing)
        request, since = _next(staying, code)


def _prepare(request: dict[str, Any], server: int) -> None:
    """Does ahead what a rank with such a request has to do first; whatever fails, that rank says so."""
    _set_up(request["environment"], request["folder"], server)
    for number in (signal.SIGINT, *PREEMPTING):  # they ask ranks for room
        signal.signal(number, signal.SIG_IGN)
    name, *arguments = request["command"]
    with contextlib.suppress(Exception):
        prepare = getattr(importlib.import_module(name), "prepare", None)
        if prepare is not None:
            prepare(arguments)


def _next(staying: StayingProcess, code: int | None) -> tuple[dict[str, Any], list[str]]:
    """Waits for the next request, whose output this process takes; returns arguments that say how it came to it."""
    request, output = staying.wait_for_next(code)
    for descriptor, place in zip(output, (1, 2), strict=True):
        os.dup2(descriptor, place)
        os.close(descriptor)
    return request, ["--since", str(time.monotonic()), "--process", "spare" if code is None else "kept"]


def _set_up(environment: dict[str, str], folder: str, server: int) -> None:
    os.environ.clear()
    os.environ.update(environment, **{PARENT: str(server)})
    os.chdir(folder)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for each in PREEMPTING:
        signal.signal(each, signal.SIG_DFL)
    torch, number = sys.modules.get("torch"), os.environ.get("OMP_NUM_THREADS", "")
    if torch is not None and number.isdecimal():  # libraries have read it when they were loaded in the server
        torch.set_num_threads(int(number))
