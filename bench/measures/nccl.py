"""Engines over real NCCL: several ranks that share one GPU, each a host of its own to NCCL, over sockets.

    measure      all-reduce, reduce-scatter and all-gather of several sizes; the median of the slowest rank
    time         arms of ours and of torch in turns, on all ranks
    emulate      the same arms again on links that take what was measured, each rank beside the others as before

So an emulated step shares its GPU as the real one does, and what differs is the emulation. Ranks that share a GPU take
turns on it: what a collective costs here says nothing of a real network.
"""

from __future__ import annotations

import bisect
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch

from paceline.comm.base import Communicator, Work
from paceline.comm.emulated.communicator import EmulatedWorld, Fabric
from paceline.comm.torch_dist import connect
from paceline.run.function_ranks import run_processes
from paceline.run.processes import loopback_interface
from paceline_bench.arms import Arm, BenchWorkload, arms_on_links, select, set_up, sets_of
from paceline_bench.engines import BF16_TOLERANCE, MeasuredArm, check_losses, clean_up
from paceline_bench.timing import Turns, interleave, time_step

Rows: TypeAlias = list[dict[str, Any]]
Points: TypeAlias = dict[str, list[tuple[int, float]]]  # seconds by bytes of the whole buffer, by kind

KINDS = ("all_reduce", "reduce_scatter", "all_gather")
SIZES = (4 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)
_TINY_SIZES = SIZES[:3]
_CHANNELS = 2  # of NCCL over sockets: few
EMULATED = ", emulated"
TURNS = Turns(rounds=10, steps_per_turn=1, warm_up=3)

_OLD = {"norm": "layer", "mlp": "gelu", "positions": "learned", "tied": True, "context": 512, "vocab_size": 8192}
WORKLOADS = {
    "29m": BenchWorkload(model="GPT-29M", batch=8, context=512, shape=_OLD | {"layers": 8, "heads": 8, "width": 512}),
    "160m": BenchWorkload(
        model="GPT-160M", batch=8, context=512, shape=_OLD | {"layers": 12, "heads": 16, "width": 1024}
    ),
    "62m": BenchWorkload(  # nothing was tuned with it
        model="GPT-62M, gated",
        batch=8,
        context=512,
        shape={"norm": "rms", "mlp": "swiglu", "positions": "rotary", "tied": False, "context": 512}
        | {"vocab_size": 8192, "layers": 12, "heads": 10, "kv_heads": 5, "width": 640},
    ),
}
TINY = {name: BenchWorkload(model="gpt-nano", batch=1, context=8) for name in WORKLOADS}


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclCases:
    """What is timed. ``words``: arms whose name contains one of them."""

    device: str = "cuda"
    turns: Turns = TURNS
    words: Sequence[str] | None = None
    emulates: bool = True
    timeout_s: float = 300.0


def bench_nccl(model: str, ranks: int, asked: NcclCases) -> Rows:
    """Times the arms of one model on so many ranks; on a CPU, where nothing is meant, over Gloo."""
    workload = (WORKLOADS if asked.device == "cuda" else TINY)[model]
    threads = max(1, (os.cpu_count() or 1) // ranks) if asked.device == "cuda" else 1
    join = partial(join_on_one_gpu, asked.device)
    rows: Rows = run_processes(
        _measure, ranks, args=(workload, asked), timeout_s=asked.timeout_s, threads=threads, join=join
    )[0]
    return rows


def join_on_one_gpu(device: str) -> Communicator:
    """Joins the ranks of a launcher that share the first GPU: to NCCL each is a host of its own."""
    if device != "cuda":
        return connect("gloo", device="cpu")
    os.environ.update(
        LOCAL_RANK="0",
        LOCAL_WORLD_SIZE="1",
        NCCL_HOSTID=f"host{os.environ['RANK']}",
        NCCL_SOCKET_IFNAME=loopback_interface(),
        NCCL_IB_DISABLE="1",
    )
    return connect("nccl", device="cuda")


def _measure(comm: Communicator, workload: BenchWorkload, asked: NcclCases) -> Rows:
    is_gpu = comm.device.type == "cuda"
    points = measure_collectives(comm, SIZES if is_gpu else _TINY_SIZES)
    fabric = Fabric(partial(cost_of, points), comm.device, node_ranks=1, channels=_CHANNELS)
    emulated = EmulatedWorld(comm.size, fabric).rank(comm.rank)
    fabric.keeps = False
    rows: Rows = []
    for arms in sets_of(select(arms_on_links(), asked.words)):
        rows += _time(comm, emulated if asked.emulates else None, arms, workload, asked.turns)
        clean_up(comm.device)
    sent = {"arm": "collectives", "backend": comm.backend, "seconds": {kind: points[kind] for kind in KINDS}}
    return [{"model": workload.model, "ranks": comm.size} | row for row in [sent, *rows]]


def measure_collectives(comm: Communicator, sizes: Sequence[int], rounds: int = 7) -> Points:
    """Returns the seconds of collectives by size: of each the median, of the slowest rank."""
    found: Points = {kind: [] for kind in KINDS}
    for size in sizes:
        whole = torch.zeros(size // 4, device=comm.device)
        piece = torch.zeros(size // 4 // comm.size, device=comm.device)
        whole = whole[: len(piece) * comm.size]
        calls: dict[str, Callable[[], Work]] = {
            "all_reduce": partial(comm.all_reduce, whole),
            "reduce_scatter": partial(comm.reduce_scatter, piece, whole),
            "all_gather": partial(comm.all_gather, whole, piece),
        }
        for kind, call in calls.items():
            taken = []
            for _ in range(2 + rounds):  # two warm up
                comm.barrier()
                taken.append(time_step(lambda call=call: call().wait(), comm.device))  # type: ignore[misc]
            slowest = torch.tensor([statistics.median(taken[2:])], dtype=torch.float64, device=comm.device)
            comm.all_reduce(slowest, "max").wait()
            found[kind].append((size, slowest.item()))
    return found


def cost_of(points: Points, kind: str, num_bytes: int, ranks: tuple[int, ...]) -> float:
    """Returns what an operation takes by what was measured: between two sizes on the line, beyond them by rate."""
    if len(ranks) < 2:
        return 0.0
    known = points.get(kind) or points["all_gather"]  # a broadcast, or a message: every rank receives all once
    place = bisect.bisect_left(known, (num_bytes, 0.0))
    if place == 0:
        return known[0][1]
    if place == len(known):
        (_, before), (size, seconds) = known[-2:]
        rate = max((seconds - before) / (size - known[-2][0]), 0.0)
        return seconds + rate * (num_bytes - size)
    (low, fewer), (high, more) = known[place - 1 : place + 1]
    return fewer + (more - fewer) * (num_bytes - low) / (high - low)


def _time(
    comm: Communicator, emulated: Communicator | None, arms: Sequence[Arm], workload: BenchWorkload, turns: Turns
) -> Rows:
    steps, peers = {}, {arm.name: arm.peer for arm in arms}
    for arm in arms:
        steps[arm.name] = set_up(arm, workload, comm, turns.warm_up)
        if emulated is not None and arm.name.startswith("paceline"):  # torch's have the group of all real ranks
            steps[arm.name + EMULATED] = set_up(arm, workload, emulated, 0)
            peers[arm.name + EMULATED] = arm.name
    timed = interleave(steps, turns, baseline=peers, device=comm.device, meet=comm.barrier)
    real = [MeasuredArm(timing=each, losses=steps[each.arm].losses) for each in timed if EMULATED not in each.arm]
    check_losses(workload, real, BF16_TOLERANCE)
    return [{"backend": "emulated" if EMULATED in each.arm else comm.backend} | each.to_json() for each in timed]
