"""One rank of a world of any size on a real device, alone: other ranks are emulated, and their links take real time.

The engine, its kernels and its memory are real. What other ranks send is made of what this rank has, so that values are
finite and mean nothing: this is no training. Numbers that the host reads are those of ranks that are all alike, as in a
dry run. A collective stands on the stream of its wire, which is the links inside a node or the network between nodes:

    starts    when what was computed before it is done, and the wire is free
    takes     what ``price`` says for its kind, bytes and ranks, and longer by as much as its last rank is late
    holds     as many multiprocessors as NCCL has channels, and moves its bytes through memory meanwhile
    is waited for as an operation of NCCL is: the compute's stream waits for an event

On a CPU a wire is a clock: a wait sleeps until the operation ends.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch

from paceline.clock import DeviceClock, Mark, seconds_between
from paceline.cluster.wires import WireCost
from paceline.comm.base import Call, Work
from paceline.comm.dry.communicator import DryCommunicator, DryWorld, Journal
from paceline.predict.replay.program import Issue

Moved: TypeAlias = tuple[torch.Tensor, torch.Tensor]  # where bytes go, and where they come from
_READ_BY_HOSTS = 4096  # elements: what has no more may be numbers that the host reads


@dataclass(slots=True)
class Traffic:
    """Operations of one kind: how many, their bytes, their time on the wires, and how long the compute waited."""

    calls: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    exposed: float = 0.0


class Fabric:
    """The wires of a cluster beside one device, and how long the compute waited for them."""

    def __init__(
        self,
        price: WireCost,
        device: torch.device,
        *,
        node_ranks: int,
        channels: int = 24,
        lateness_s: float = 0.0,
        seed: int = 0,
    ) -> None:
        """``lateness_s``: by how much the last rank comes late on average, exponentially distributed."""
        self.device, self._price, self._node_ranks, self._channels = device, price, node_ranks, channels
        self._lateness_s, self._random = lateness_s, random.Random(seed)  # nosec B311  # lateness is no secret
        self._clock = DeviceClock(device)
        self.is_free, self.keeps = False, True  # links that take no time; whether traffic is kept for ``take_traffic``
        self._wires: dict[bool, _Wire | _GpuWire] = {}
        self._waits: list[tuple[str, Mark, Mark]] = []
        self._issued: list[tuple[Issue, float]] = []  # with the seconds that each takes

    def start(self, operation: Issue, moved: Moved | None, make: Callable[[], Any]) -> Work:
        """Puts an operation on its wire, where ``make`` makes the result and, on a GPU, what is moved is copied."""
        seconds = self._price(operation.kind, operation.num_bytes, operation.ranks)
        if self._lateness_s and operation.kind not in ("send", "recv"):
            seconds += self._random.expovariate(1 / self._lateness_s)
        if self.is_free:
            seconds = 0.0
        if self.keeps:
            self._issued.append((operation, seconds))
        is_inside = len({rank // self._node_ranks for rank in operation.ranks}) == 1
        wire = self._wires.get(is_inside)
        if wire is None:
            wire = _GpuWire(self._channels) if self.device.type == "cuda" else _Wire()
            self._wires[is_inside] = wire
        return _Waited(self, operation.kind, wire.start(seconds, moved, make))

    def wait(self, kind: str, work: Work) -> None:
        if not self.keeps:
            work.wait()
            return
        before = self._clock.mark()
        work.wait()
        self._waits.append((kind, before, self._clock.mark()))

    def take_traffic(self) -> dict[str, Traffic]:
        """Returns what was on the wires since the last call, by kind; waits for the device."""
        found: dict[str, Traffic] = {}
        for operation, seconds in self._issued:
            kind = found.setdefault(operation.kind, Traffic())
            kind.calls += 1
            kind.num_bytes += operation.num_bytes
            kind.seconds += seconds
        for name, before, after in self._waits:
            found.setdefault(name, Traffic()).exposed += seconds_between(before, after)
        self._waits.clear()
        self._issued.clear()
        return found


@dataclass(slots=True, eq=False)
class _Waited:
    fabric: Fabric
    kind: str
    work: Work | None

    def wait(self) -> None:
        work, self.work = self.work, None
        if work is not None:
            self.fabric.wait(self.kind, work)


class _Wire:
    """A wire beside a CPU: free again at some moment."""

    def __init__(self) -> None:
        self._free = 0.0

    def start(self, seconds: float, moved: Moved | None, make: Callable[[], Any]) -> Work:
        del moved
        make()
        self._free = max(time.perf_counter(), self._free) + seconds
        return _Until(self._free)


@dataclass(slots=True, eq=False)
class _Until:
    end: float

    def wait(self) -> None:
        time.sleep(max(0.0, self.end - time.perf_counter()))


class _GpuWire:
    """A wire beside a GPU: a stream on which a kernel holds multiprocessors."""

    def __init__(self, channels: int) -> None:
        self._channels, self._stream = channels, torch.cuda.Stream(priority=-1)  # type: ignore[no-untyped-call]

    def start(self, seconds: float, moved: Moved | None, make: Callable[[], Any]) -> Work:
        from paceline.comm.emulated.hold_kernel import hold  # where there is no GPU, there is no triton

        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            make()
            hold(moved, seconds, self._channels)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        return _GpuWork(event, moved)


@dataclass(slots=True, eq=False)
class _GpuWork:
    event: torch.cuda.Event
    tensors: Moved | None  # whose memory is not given to others before the compute has waited

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self.event)
        self.tensors = None


class EmulatedWorld(DryWorld):
    """Some ranks of a world, each of them alone on the device of a fabric, one after another."""

    backend = "emulated"

    def __init__(self, size: int, fabric: Fabric) -> None:
        super().__init__(size, fabric.device.type)
        self.fabric, self.device = fabric, fabric.device

    def rank(self, rank: int, journal: Journal | None = None) -> EmulatedCommunicator:
        """Returns what a rank talks through. Nothing is written into a journal: the fabric keeps what was issued."""
        return EmulatedCommunicator(super().rank(rank, journal).own, tuple(range(self.size)), "world")


class EmulatedCommunicator(DryCommunicator):
    takes_real_time = True

    def issue(self, call: Call) -> Work:
        moved = call.output.detach(), call.tensor.detach()
        if call.tensor.numel() <= _READ_BY_HOSTS or not call.tensor.is_floating_point():
            return self._start(call.kind, call.whole.nbytes, None, partial(self.set_values, call), **self.pair(call))
        make: Callable[[], Any] = partial(self.set_values, call)
        if call.kind in ("send", "recv"):  # activations or their gradients, whose values nobody sees
            make = call.output.detach().normal_ if call.kind == "recv" else _nothing
        elif self.device.type == "cuda":
            make = _nothing  # the copy does it
        return self._start(call.kind, call.whole.nbytes, moved, make, **self.pair(call))

    def barrier(self) -> None:
        self._start("barrier", 0, None, _nothing).wait()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _start(self, kind: str, num_bytes: int, moved: Moved | None, make: Callable[[], Any], **pair: Any) -> Work:
        world, told = self.own.world, {"ranks": self.ranks, "lane": self.lane} | pair
        assert isinstance(world, EmulatedWorld)
        return world.fabric.start(Issue(number=0, kind=kind, num_bytes=num_bytes, **told), moved, make)


def _nothing() -> None:
    """Makes no result."""
