"""A short self-test of the ranks themselves, on as many hosts as they are: can they talk, how fast, and are they alike?

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
from paceline.doctor.findings import MachineFinding, finding
from paceline.errors import PacelineError
from paceline.units import format_seconds

_ROUNDS = 10
_LARGE = 4 * 2**20  # elements of an all-reduce that shows the bandwidth
_FAR_S = 0.5  # clocks that differ by more make logs of two hosts hard to read side by side


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """What one rank saw: seconds of a small all-reduce, bytes per second of a large one, how far its clock is ahead."""

    rank: int
    host: str
    device: str
    versions: tuple[str, str]
    latency_s: float
    bandwidth: float
    clock_ahead_s: float
    clock_error_s: float


def self_test(comm: Communicator) -> list[RankReport]:
    """Adds up, exchanges and compares clocks on all ranks; every rank gets what all saw.

    Raises PacelineError where a sum is wrong.
    """
    latency_s = statistics.median(sum_up(comm, 1) for _ in range(_ROUNDS))
    large_s = min(sum_up(comm, _LARGE) for _ in range(3))
    ahead_s, error_s = clock_offset(comm)
    report = RankReport(
        rank=comm.rank,
        host=socket.gethostname(),
        device=torch.cuda.get_device_name(comm.device) if comm.device.type == "cuda" else "cpu",
        versions=(platform.python_version(), torch.__version__),
        latency_s=latency_s,
        bandwidth=_LARGE * 4 / large_s,
        clock_ahead_s=ahead_s,
        clock_error_s=error_s,
    )
    return gather_objects(comm, report)


def report_findings(reports: list[RankReport]) -> Iterator[MachineFinding]:
    """Says what the ranks saw, and what is odd about it."""
    hosts = Counter(report.host for report in reports)
    latency = format_seconds(max(report.latency_s for report in reports))
    speed = f"{min(report.bandwidth for report in reports) / 1e9:.2f} GB/s"
    shown = ", ".join(f"{host} ({count})" for host, count in hosts.items())
    yield finding(
        "self-test",
        f"{len(reports)} ranks on {shown} add up; an all-reduce takes {latency}, a large one moves {speed}",
        "ranks of a run between these hosts can talk",
    )
    versions = {report.versions for report in reports}
    listed = "; ".join(f"Python {python}, torch {version}" for python, version in sorted(versions))
    yield finding(
        "versions",
        listed,
        "all ranks run the same" if len(versions) == 1 else "ranks of different versions may not agree",
        problem="" if len(versions) == 1 else "install the same Python and torch on every host",
    )
    if len(hosts) > 1:
        yield _clock_finding(reports)


def _clock_finding(reports: list[RankReport]) -> MachineFinding:
    worst = max(reports, key=lambda report: abs(report.clock_ahead_s))
    apart = format_seconds(abs(worst.clock_ahead_s))
    is_far = abs(worst.clock_ahead_s) - worst.clock_error_s > _FAR_S
    return finding(
        "clocks",
        f"at most {apart} apart ({worst.host}, to within {format_seconds(worst.clock_error_s)})",
        "logs and records of these hosts do not line up" if is_far else "times of two hosts can be compared",
        note="let a time service (chrony, ntpd) set the clocks" if is_far else "",
    )


def failed_test(error: PacelineError) -> MachineFinding:
    """Makes a finding of ranks that could not be tested."""
    return finding(
        "self-test",
        two_lines(error),
        "a run between these ranks would fail, or hang, in the same place",
        problem="open the ports between the hosts, set comm.interface, or look at NCCL_DEBUG=INFO",
    )


def two_lines(error: PacelineError) -> str:
    """Returns the first two lines of a message as one."""
    return " ".join([line.strip() for line in str(error).splitlines() if line.strip()][:2])


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
