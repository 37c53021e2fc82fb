"""All-reduce by every backend and algorithm, beside Gloo's own, on ranks of this machine.

All arms take turns in one run, size by size, over the same ranks with one thread each. ``gbps`` is the tensor's bits
over the time of the operation (what an engine sees), whatever an algorithm moves; ``speedup`` is Gloo's time over an
arm's, taken within each round. Small tensors are reduced several times in a row, since one meeting is soon over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paceline.comm.algorithms.communicator import AlgorithmCommunicator, AlgorithmName
from paceline.comm.algorithms.rounds import state_topology
from paceline.comm.base import Communicator
from paceline.comm.shared.communicator import SharedMemoryCommunicator
from paceline.errors import CommunicationError, UsageError
from paceline.run.function_ranks import run_processes
from paceline_bench.timing import Timing, Turns, interleave

SIZES = tuple(1024 * 4**power for power in range(9))  # 1 KiB to 64 MiB
GLOO = "gloo"
_ROUNDS = 12
_TIMEOUT_S = 1800.0
_ALGORITHMS: tuple[AlgorithmName, ...] = ("ring", "tree", "halving_doubling")


@dataclass(frozen=True, slots=True)
class _ReduceArm:
    """One way to all-reduce: who does it, and where the tensor lies."""

    backend: str
    algorithm: str
    comm: Communicator
    in_buffer: bool = False

    @property
    def name(self) -> str:
        where = ", tensor in the segment" if self.in_buffer else ""
        return f"{self.backend} {self.algorithm}{where}".removesuffix(" native")


def bench_comm(ranks: int, sizes: Sequence[int] = SIZES, rounds: int | None = None) -> list[dict[str, Any]]:
    """Times all-reduce of float32 on so many ranks; returns a row for each size and arm."""
    if unfit := [size for size in sizes if size < 4 or size % 4]:
        raise UsageError(f"sizes {unfit}: a tensor of float32 has 4 bytes for each element\n  give multiples of 4")
    args = (tuple(sizes), rounds or _ROUNDS)
    rows: list[dict[str, Any]] = run_processes(_measure, ranks, args=args, timeout_s=_TIMEOUT_S)[0]
    return rows


def _measure(comm: Communicator, sizes: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    arms, turns = list(_arms(comm)), Turns(rounds=rounds, steps_per_turn=4, warm_up=2)
    rows: list[dict[str, Any]] = []
    for size in sizes:
        steps = {arm.name: _step(arm, size) for arm in arms}
        timings = interleave(steps, turns, baseline=GLOO, device=comm.device, meet=comm.barrier)
        rows += [_row(comm.size, size, arm, timing) for arm, timing in zip(arms, timings, strict=True)]
    return rows


def _arms(comm: Communicator) -> Iterator[_ReduceArm]:
    """Every backend that works here, and the algorithms on the messages of each."""
    yield _ReduceArm(GLOO, "native", comm)
    yield from _algorithms(GLOO, comm)
    try:
        shared = SharedMemoryCommunicator.join(comm)
        plain = SharedMemoryCommunicator.join(comm, compiled=False)
    except CommunicationError:
        return
    if shared.is_compiled:
        yield _ReduceArm("shared_memory", "native", shared)
        yield _ReduceArm("shared_memory", "native", shared, in_buffer=True)
    yield _ReduceArm("shared_memory in Python", "native", plain)
    yield from _algorithms("shared_memory", shared)


def _algorithms(backend: str, comm: Communicator) -> Iterator[_ReduceArm]:
    for name in _ALGORITHMS:
        yield _ReduceArm(backend, name, AlgorithmCommunicator(comm, name))
    if comm.size >= 4 and comm.size % 2 == 0:  # as if the ranks were on two hosts
        stated = state_topology(comm.size, comm.size // 2)
        yield _ReduceArm(backend, "hierarchical", AlgorithmCommunicator(comm, "hierarchical", stated))


def _repeats(num_bytes: int) -> int:
    """Returns how often a tensor is reduced in one timed step."""
    return 10 if num_bytes <= 2**18 else 4 if num_bytes <= 2**22 else 1


def _step(arm: _ReduceArm, num_bytes: int) -> Callable[[], None]:
    own = arm.comm.shared_buffer(num_bytes // 4, torch.float32) if arm.in_buffer else None
    tensor = torch.zeros(num_bytes // 4) if own is None else own

    def reduce() -> None:
        for _ in range(_repeats(num_bytes)):
            arm.comm.all_reduce(tensor, "avg").wait()

    return reduce


def _row(ranks: int, num_bytes: int, arm: _ReduceArm, timing: Timing) -> dict[str, Any]:
    ms = timing.median_ms / _repeats(num_bytes)
    timed = timing.to_json()
    return {
        "ranks": ranks,
        "bytes": num_bytes,
        "arm": arm.name,
        "backend": arm.backend,
        "algorithm": arm.algorithm,
        "median_us": round(ms * 1e3, 2),
        "gbps": round(8 * num_bytes / ms / 1e6, 3),
        "speedup": round(1 / timing.ratio, 3),
        **{name: timed[name] for name in ("ratio", "ratio_low", "ratio_high")},
    }
