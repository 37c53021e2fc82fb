"""Takes a step apart into phases, without stopping the device.

Laps are marks on the device's time line; the waits for communication that fall into a lap are taken out of it and
added up as exposed communication. A step's numbers are read when the device has passed its last mark: at once on a CPU,
a step or two later on CUDA.
"""

from __future__ import annotations

import resource
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from paceline.clock import DeviceClock, Mark, on_device, seconds_between
from paceline.comm.traced import Trace
from paceline.monitor.records import StepRecord

_DRAIN_STEPS = 32  # the same steps on all ranks, so that none waits for another that writes
_DRAIN_S = 0.5
_MEMORY_EVERY = 20  # steps; asking CUDA's allocator takes longer than all the rest here


@dataclass(slots=True, kw_only=True)
class StepFacts:
    """What the trainer knows of a step when it has issued it, and what the meter notes beside it.

    One object, and not frozen: it is made every step, between matrix products, where every call counts.
    """

    step: int
    epoch: float
    position: int
    lr: float
    samples: int
    loss_sum: torch.Tensor
    count: torch.Tensor | float
    grad_norm: torch.Tensor | None
    loss_scale: torch.Tensor | None = None
    on_host: torch.Tensor | None = None  # loss sum, count, norm and scale, on their way from a device
    start: Mark | float = 0.0
    laps: list[tuple[str, Mark | float, int]] = field(default_factory=list)
    waits: list[tuple[Mark, Mark]] = field(default_factory=list)
    memory_bytes: int = 0
    time: float = 0.0


class StepMeter:
    """Times steps and turns them into records."""

    def __init__(self, device: torch.device, trace: Trace) -> None:
        self._device = device
        self._is_device = device.type != "cpu"
        self._take = DeviceClock(device).take
        self._trace = trace
        self._waits = trace.waits
        self._start = self._take()
        self._laps: list[tuple[str, Mark | float, int]] = []  # phase, its end, waits so far in the step
        self._pending: deque[StepFacts] = deque()
        self._memory_bytes = 0
        self._drained_at = time.time()

    def start(self) -> None:
        """Begins a step now: what happened since the last one (an evaluation, say) is not counted."""
        self._trace.take_waits()
        self._start = self._take()
        self._laps = []

    def lap(self, phase: str) -> None:
        """Ends a phase of the step."""
        self._laps.append((phase, self._take(), len(self._waits)))

    def finish(self, facts: StepFacts) -> bool:
        """Ends the step; the next one starts here. Returns whether it is time to drain.

        Short steps are read many at once, which costs less than one by one.
        """
        if facts.step % _MEMORY_EVERY == 1 or not self._memory_bytes:
            self._memory_bytes = peak_memory_bytes(self._device)
        if self._is_device:
            facts.on_host = _to_host(facts)
        # The copy to the host is ordered before this mark: once it is past, the values can be read.
        end = self._take()
        facts.waits = waits = self._trace.take_waits()
        self._laps.append(("other", end, len(waits)))
        facts.start, facts.laps = self._start, self._laps
        facts.memory_bytes, facts.time = self._memory_bytes, time.time()
        self._pending.append(facts)
        self._start, self._laps = end, []
        return len(self._pending) >= _DRAIN_STEPS or facts.time - self._drained_at > _DRAIN_S

    def drain(self, *, wait: bool = False) -> Iterator[StepRecord]:
        """Yields the records of the steps that the device has finished; with ``wait``, of all steps issued."""
        self._drained_at = time.time()
        while self._pending and (wait or _is_past(self._pending[0].laps[-1][1])):
            yield _record(self._pending.popleft())


def _is_past(mark: Mark | float) -> bool:
    return isinstance(mark, float) or mark.is_past()


def _numbers(facts: StepFacts) -> list[torch.Tensor | float]:
    norm = 0.0 if facts.grad_norm is None else facts.grad_norm
    return [facts.loss_sum, facts.count, norm, 1.0 if facts.loss_scale is None else facts.loss_scale]


def _to_host(facts: StepFacts) -> torch.Tensor:
    """Starts the copy of a step's numbers to the host; nothing here waits for the device."""
    stacked = torch.stack([on_device(number, facts.loss_sum.device) for number in _numbers(facts)])
    return stacked.to("cpu", non_blocking=True)


def _record(facts: StepFacts) -> StepRecord:
    phases = {"data": 0.0, "forward": 0.0, "backward": 0.0, "optimizer": 0.0, "other": 0.0}
    comm_s, last, num_waits = 0.0, facts.start, 0
    for phase, mark, num_waits_then in facts.laps:
        waited = 0.0
        for start, end in facts.waits[num_waits:num_waits_then]:
            waited += end.seconds_since(start)
        phases[phase] += seconds_between(last, mark) - waited
        comm_s += waited
        last, num_waits = mark, num_waits_then
    step_s = seconds_between(facts.start, last)
    numbers = map(float, _numbers(facts)) if facts.on_host is None else facts.on_host.tolist()
    loss_sum, count, grad_norm, loss_scale = numbers
    return StepRecord(
        step=facts.step,
        epoch=facts.epoch,
        position=facts.position,
        loss=loss_sum / count if count else None,
        loss_sum=loss_sum,
        count=int(count),
        lr=facts.lr,
        grad_norm=grad_norm if facts.grad_norm is not None else None,
        samples=facts.samples,
        step_s=step_s,
        data_s=phases["data"],
        forward_s=phases["forward"],
        backward_s=phases["backward"],
        comm_s=comm_s,
        optimizer_s=phases["optimizer"],
        samples_per_s=facts.samples / step_s if step_s > 0 else 0.0,
        memory_bytes=facts.memory_bytes,
        time=facts.time,
        loss_scale=loss_scale,
    )


def peak_memory_bytes(device: torch.device) -> int:
    """Returns the most memory that this process has held: the allocator's on CUDA, resident memory on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
