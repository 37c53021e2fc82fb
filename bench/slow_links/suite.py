"""The whole measurement: every placement of ranks at every speed, as rows with the bound beside each.

link_bytes     what the busiest interface really carried in one direction, by the kernel's counters
theory_bytes   what the formulas put there (payload); ``bytes_ratio`` is the first over the second
wire_bytes     what the shaper let pass, with the headers of every packet
bound_ms       theory_bytes over the rate of the link; ``fraction`` of it is bound_ms / median_ms
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from paceline.cluster.costs import ALGORITHMS, Placement
from paceline.comm.base import Communicator
from paceline.errors import LaunchError
from paceline.plan.layout import Compression
from paceline.run.function_ranks import RankHost, run_processes
from slow_links.arms import COMPUTE, Workbench
from slow_links.meeting import Meeting
from slow_links.network import INTERFACE, Network, enter, hosts
from slow_links.theory import Way, least_seconds, link_bytes
from slow_links.turns import Arm, LinkTimer, Sample, Turns, median_and_spread, slowest_rank

KIB, MIB = 2**10, 2**20
GIGABIT, FAST_ETHERNET = 10**9, 10**8
PLACEMENTS = (Placement(ranks=4, hosts=2), Placement(ranks=4, hosts=4))
WAYS: tuple[Way, ...] = ("native", *ALGORITHMS)
TOP_1 = Compression(policy="topk", ratio=0.01)
POLICIES = (
    TOP_1,
    Compression(policy="topk", ratio=0.001),
    Compression(policy="randomk", ratio=0.05),
    *(Compression(policy=name) for name in ("threshold", "powersgd", "sign", "int8", "fp16", "bf16")),
)
_TURN_S = 0.4  # what a turn may take: small messages are repeated
_MOST_REPEATS = 10
_TIMEOUT_S = 3600.0

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """What is measured, and how often. The last size of a speed is the large one."""

    sizes: dict[int, tuple[int, ...]]  # bits per second: bytes of the all-reduces
    rounds: int = 4
    policies: tuple[Compression, ...] = POLICIES
    parts: tuple[str, ...] = ("all_reduce", "bucketing", "compression", "training")


FULL = Schedule(sizes={GIGABIT: (64 * KIB, MIB, 32 * MIB), FAST_ETHERNET: (64 * KIB, MIB, 8 * MIB)})
QUICK = Schedule(sizes={GIGABIT: (64 * KIB, 8 * MIB)}, rounds=1, policies=(TOP_1, Compression(policy="int8")))


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """What one rank is to measure, where, and on which network."""

    network: Network
    where: Placement
    schedule: Schedule
    meeting: Path


def measure(where: Placement, schedule: Schedule) -> list[Row]:
    """Measures one placement of ranks at all speeds, on hosts that exist only meanwhile. Needs root."""
    with hosts(where.hosts) as network, tempfile.TemporaryDirectory() as folder:
        _tell(f"{_named(where)}: hosts are up, ranks start")
        meeting = Path(folder) / "meeting"
        Meeting.prepare(meeting, where.ranks)
        assignment = Assignment(network=network, where=where, schedule=schedule, meeting=meeting)
        places = [
            RankHost(enter=partial(enter, network.host(where.host(rank))), interface=INTERFACE)
            for rank in range(where.ranks)
        ]
        by_rank = run_processes(measure_on_rank, where.ranks, args=(assignment,), places=places, timeout_s=_TIMEOUT_S)
    return [_row(where, samples) for samples in zip(*by_rank, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a rank saw of one arm, and under which circumstances."""

    part: str
    bits_per_second: int
    size_bytes: int | None
    sample: Sample


def measure_on_rank(comm: Communicator, assignment: Assignment) -> list[Measured]:
    """Measures everything on one rank, which has been put on its host."""
    if comm.backend not in ("gloo", "nccl"):  # shared memory knows no hosts: nothing would use the links
        raise LaunchError(f"ranks on separate hosts got a {type(comm).__name__}, and not Gloo")
    meeting = Meeting(assignment.meeting, comm.rank, comm.size)
    host = assignment.where.host(comm.rank)
    timer = LinkTimer(meeting, assignment.network, host)
    found: list[Measured] = []
    for speed in assignment.schedule.sizes:
        if comm.rank % assignment.where.node_ranks == 0:
            assignment.network.shape(host, speed)
        meeting()
        for part, size, arms, expected_s in _arms(Workbench(comm, assignment.where), assignment, speed):
            repeats = min(max(int(_TURN_S / expected_s), 1), _MOST_REPEATS)
            turns = Turns(rounds=assignment.schedule.rounds, repeats=repeats, warm_up=3 if part == "training" else 1)
            start = time.perf_counter()
            samples = timer.measure(arms, turns)
            found += [Measured(part=part, bits_per_second=speed, size_bytes=size, sample=each) for each in samples]
            if comm.rank == 0:
                what = part if size is None else f"{part} of {size / MIB:g} MiB"
                seconds = time.perf_counter() - start
                _tell(f"{_named(assignment.where)}, {speed / 1e6:g} Mbit/s: {what} ({seconds:.0f} s)")
    return found


def _arms(bench: Workbench, assignment: Assignment, speed: int) -> list[tuple[str, int | None, list[Arm], float]]:
    """Lists what takes turns: the part, the size, the arms, and about how long one run takes."""
    schedule, found = assignment.schedule, list[tuple[str, int | None, list[Arm], float]]()
    ways = [way for way in WAYS if way != "hierarchical" or assignment.where.hosts > 1]
    if "all_reduce" in schedule.parts:
        for size in schedule.sizes[speed]:
            found.append(("all_reduce", size, bench.all_reduces(size, ways), 16 * size / speed))
    model_s = 8 * 8e6 / speed  # of the model's 5 MB
    if "bucketing" in schedule.parts:
        found.append(("bucketing", None, bench.bucketing(), model_s))
    if "compression" in schedule.parts:
        found.append(("compression", None, bench.compressions(schedule.policies), model_s))
    if "training" in schedule.parts:
        found.append(("training", None, bench.trainings([TOP_1]), model_s))
    return found


def _row(where: Placement, by_rank: Sequence[Measured]) -> Row:
    first, samples = by_rank[0], [each.sample for each in by_rank]
    seconds = slowest_rank(samples)
    median, spread = median_and_spread(seconds)
    theory = link_bytes(first.sample.num_bytes, first.sample.way, where)
    carried = max(max(sample.sent, sample.received) for sample in samples)
    bound = least_seconds(theory, first.bits_per_second)
    return {
        "part": first.part,
        "hosts": where.hosts,
        "ranks": where.ranks,
        "bits_per_second": first.bits_per_second,
        "arm": first.sample.arm,
        "size_bytes": first.size_bytes,
        "median_ms": 1e3 * median,
        "spread_ms": 1e3 * spread,
        "runs": len(seconds),
        "theory_bytes": theory,
        "link_bytes": carried,
        "wire_bytes": max(sample.wire for sample in samples),
        "bytes_ratio": carried / theory if theory else None,
        "bound_ms": 1e3 * bound if theory else None,
        "fraction": bound / median if theory and first.sample.arm != COMPUTE else None,
    }


def _named(where: Placement) -> str:
    return f"{where.hosts} hosts x {where.node_ranks} ranks"


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
