"""Ranks that meet and add up: can they talk, how fast, and are they alike?

``handshake`` starts two on this host: over the loopback, in shared memory, over the interface a group would take.
``self_test`` is for any ranks, on as many hosts as they are:

paceline doctor --ranks 4                                              on this host
torchrun --nnodes 2 --nproc-per-node 8 ... -m paceline doctor --ranks 16     between hosts
"""

from __future__ import annotations

import platform
import socket
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from paceline.comm.base import Communicator
from paceline.comm.objects import clock_offset, gather_objects
from paceline.config.settings import GLOO_INTERFACE
from paceline.doctor.findings import DoctorInputs, MachineFinding, finding
from paceline.doctor.network import find_interfaces, gloo_interface, resolve_host, settings_of
from paceline.errors import CommunicationError, PacelineError
from paceline.run.function_ranks import RankHost, run_processes
from paceline.units import format_seconds

PATIENCE_S = 240.0  # interpreters that import torch, on a machine that may be busy
_LARGE = 4 * 2**20  # elements of an all-reduce that shows the bandwidth
_FAR_S = 0.5  # clocks that differ by more make logs of two hosts hard to read side by side


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


def shake_hands(interface: str | None, timeout_s: float = PATIENCE_S) -> Iterator[MachineFinding]:
    """Lets two new processes add up over an interface; None: the loopback, and then in shared memory."""
    name = "handshake" + (f" over {interface}" if interface else "")
    places = [RankHost(interface=interface)] * 2 if interface else None
    start = time.monotonic()
    try:
        greetings = run_processes(_greet, 2, args=(interface is None,), timeout_s=timeout_s, places=places)
    except PacelineError as error:
        fix = "allow connections between processes of this host (firewall, sandbox), or set comm.interface"
        found, meaning = f"two ranks cannot talk: {_two_lines(error)}", "a run would fail, or hang, in the same place"
        yield finding(name, found, meaning, problem=fix)
        return
    seconds = format_seconds(time.monotonic() - start)
    latency = format_seconds(max(each.gloo_s for each in greetings))
    found = f"two ranks started, met and agreed in {seconds}; an all-reduce through Gloo takes {latency}"
    yield finding(name, found, "processes of this host can start and talk")
    if interface is not None:
        return
    times = [each.shared_s for each in greetings if each.shared_s is not None]
    if len(times) < len(greetings):
        why = next(each.problem for each in greetings if each.shared_s is None)
        meaning = "ranks of this host talk through Gloo instead, which is slower"
        yield finding("shared handshake", why, meaning, note="see shared memory above")
    else:
        found = f"an all-reduce in shared memory takes {format_seconds(max(times))}"
        yield finding("shared handshake", found, "comm.backend = auto takes it for CPU ranks of one host")


def _greet(comm: Communicator, also_shared: bool) -> Greeting:
    from paceline.comm.shared.communicator import share_memory

    gloo_s, problem = _latency(comm, 20), ""
    if also_shared:
        try:
            shared = share_memory(comm, timeout_s=10.0)
            if shared is not comm:
                return Greeting(gloo_s=gloo_s, shared_s=_latency(shared, 20))
            problem = "these ranks cannot share memory"
        except CommunicationError as error:  # on both ranks alike
            problem = str(error).partition("\n")[0]
    return Greeting(gloo_s=gloo_s, shared_s=None, problem=problem)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """What one rank saw: seconds of a small all-reduce, bytes per second of a large one, how far its clock is ahead."""

    rank: int
    host: str
    versions: tuple[str, str]
    latency_s: float
    bandwidth: float
    clock_ahead_s: float
    clock_error_s: float


def self_test(comm: Communicator) -> list[RankReport]:
    """Adds up and compares clocks on all ranks; each gets what all saw. Raises PacelineError where a sum is wrong."""
    latency_s, large_s = _latency(comm, 10), min(sum_up(comm, _LARGE) for _ in range(3))
    ahead_s, error_s = clock_offset(comm)
    report = RankReport(
        rank=comm.rank,
        host=socket.gethostname(),
        versions=(platform.python_version(), torch.__version__),
        latency_s=latency_s,
        bandwidth=_LARGE * 4 / large_s,
        clock_ahead_s=ahead_s,
        clock_error_s=error_s,
    )
    return gather_objects(comm, report)


def report_findings(reports: list[RankReport]) -> Iterator[MachineFinding]:
    hosts = Counter(report.host for report in reports)
    latency = format_seconds(max(report.latency_s for report in reports))
    speed = f"{min(report.bandwidth for report in reports) / 1e9:.2f} GB/s"
    shown = ", ".join(f"{host} ({count})" for host, count in hosts.items())
    found = f"{len(reports)} ranks on {shown} add up; an all-reduce takes {latency}, a large one moves {speed}"
    yield finding("self-test", found, "ranks of a run between these hosts can talk")
    versions = {report.versions for report in reports}
    listed = "; ".join(f"Python {python}, torch {version}" for python, version in sorted(versions))
    if len(versions) == 1:
        yield finding("versions", listed, "all ranks run the same")
    else:
        fix = "install the same Python and torch on every host"
        yield finding("versions", listed, "ranks of different versions may not agree", problem=fix)
    if len(hosts) == 1:
        return
    worst = max(reports, key=lambda report: abs(report.clock_ahead_s))
    found = f"at most {format_seconds(abs(worst.clock_ahead_s))} apart"
    found += f" ({worst.host}, to within {format_seconds(worst.clock_error_s)})"
    if abs(worst.clock_ahead_s) - worst.clock_error_s > _FAR_S:
        meaning = "logs and records of these hosts do not line up"
        yield finding("clocks", found, meaning, note="let a time service (chrony, ntpd) set the clocks")
    else:
        yield finding("clocks", found, "times of two hosts can be compared")


def failed_test(error: PacelineError) -> MachineFinding:
    meaning = "a run between these ranks would fail, or hang, in the same place"
    fix = "open the ports between the hosts, set comm.interface, or look at NCCL_DEBUG=INFO"
    return finding("self-test", _two_lines(error), meaning, problem=fix)


def _two_lines(error: PacelineError) -> str:
    return " ".join([line.strip() for line in str(error).splitlines() if line.strip()][:2])


def _latency(comm: Communicator, rounds: int) -> float:
    return statistics.median(sum_up(comm, 1) for _ in range(rounds))


def sum_up(comm: Communicator, numel: int) -> float:
    """Returns the seconds in which all ranks add up so many numbers. Raises PacelineError where the sum is wrong."""
    value = torch.full((numel,), float(comm.rank), device=comm.device)
    start = time.perf_counter()
    comm.all_reduce(value).wait()
    found = float(value[-1].item())  # waits for the device, too
    seconds = time.perf_counter() - start
    expected = comm.size * (comm.size - 1) / 2
    if found != expected:
        raise PacelineError(f"rank {comm.rank}: the ranks added up to {found:g}, and not to {expected:g}")
    return seconds
