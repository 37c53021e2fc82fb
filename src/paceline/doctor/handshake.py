"""Two real ranks that meet and add up: over the loopback, in shared memory, over the interface a group would take."""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

from paceline.comm.base import Communicator
from paceline.config.settings import GLOO_INTERFACE
from paceline.doctor.findings import DoctorInputs, MachineFinding, finding
from paceline.doctor.network import find_interfaces, gloo_interface, resolve_host, settings_of
from paceline.doctor.self_test import sum_up, two_lines
from paceline.errors import CommunicationError, PacelineError
from paceline.run.processes import RankHost, run_processes
from paceline.units import format_seconds

_PATIENCE_S = 240.0  # two interpreters that import torch, on a machine that may be busy
_ROUNDS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Greeting:
    """What one rank saw: seconds of an all-reduce through Gloo and in shared memory, or why not there."""

    gloo_s: float
    shared_s: float | None
    problem: str = ""


def handshake(surroundings: DoctorInputs) -> Iterator[MachineFinding]:
    """Starts two ranks that talk, once for each interface that matters."""
    if surroundings.is_quick:
        return
    yield from shake_hands(None)
    present, settings = find_interfaces(), settings_of(surroundings)
    chosen = gloo_interface(settings, present, resolve_host(socket.gethostname()).usable)
    loopbacks = [each.name for each in present if each.is_loopback]
    if chosen is not None and chosen not in loopbacks:
        yield from shake_hands(settings[GLOO_INTERFACE].value if GLOO_INTERFACE in settings else chosen)


def shake_hands(interface: str | None, timeout_s: float = _PATIENCE_S) -> Iterator[MachineFinding]:
    """Lets two new processes add up over an interface; None: the loopback, and then in shared memory.

    Never takes longer than it may.
    """
    name = "handshake" + (f" over {interface}" if interface else "")
    places = [RankHost(enter=_stay, interface=interface)] * 2 if interface else None
    start = time.monotonic()
    try:
        greetings = run_processes(_greet, 2, args=(interface is None,), timeout_s=timeout_s, places=places)
    except PacelineError as error:
        yield finding(
            name,
            f"two ranks cannot talk: {two_lines(error)}",
            "a run would fail, or hang, in the same place",
            problem="allow connections between processes of this host (firewall, sandbox), or set comm.interface",
        )
        return
    seconds = format_seconds(time.monotonic() - start)
    latency = format_seconds(max(each.gloo_s for each in greetings))
    yield finding(
        name,
        f"two ranks started, met and agreed in {seconds}; an all-reduce through Gloo takes {latency}",
        "processes of this host can start and talk",
    )
    if interface is None:
        yield _in_shared_memory(greetings)


def _in_shared_memory(greetings: list[Greeting]) -> MachineFinding:
    times = [each.shared_s for each in greetings if each.shared_s is not None]
    if len(times) < len(greetings):
        why = next(each.problem for each in greetings if each.shared_s is None)
        meaning = "ranks of this host talk through Gloo instead, which is slower"
        return finding("shared handshake", why, meaning, note="see shared memory above")
    found = f"an all-reduce in shared memory takes {format_seconds(max(times))}"
    return finding("shared handshake", found, "comm.backend = auto takes it for CPU ranks of one host")


def _stay() -> None:
    """Does nothing: the rank runs where it was started."""


def _greet(comm: Communicator, also_shared: bool) -> Greeting:
    """Adds up with the other rank; raises where the sum is wrong."""
    from paceline.comm.shared.communicator import share_memory

    gloo_s, problem = _time_sums(comm), ""
    if also_shared:
        try:
            shared = share_memory(comm, timeout_s=10.0)
            if shared is not comm:
                return Greeting(gloo_s=gloo_s, shared_s=_time_sums(shared))
            problem = "these ranks cannot share memory"
        except CommunicationError as error:  # on both ranks alike
            problem = str(error).partition("\n")[0]
    return Greeting(gloo_s=gloo_s, shared_s=None, problem=problem)


def _time_sums(comm: Communicator) -> float:
    return statistics.median(sum_up(comm, 1) for _ in range(_ROUNDS))
