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
from dataclasses import dataclass

import torch

from paceline.clock import DeviceClock, Mark, on_device, seconds_between
from paceline.comm.traced import Trace
from paceline.monitor.records import StepRecord

_DRAIN_STEPS = 8  # the same steps on all ranks, so that none waits for another that writes
_DRAIN_S = 0.5
_MEMORY_EVERY = 20  # steps; asking CUDA's allocator takes longer than all the rest here


@dataclass(slots=True, kw_only=True)
class StepFacts:
    """What the trainer knows of a step when it has issued it. Not frozen: made every step, and that takes three times
    as long."""

    step: int
    epoch: float
    position: int
    lr: float
    samples: int
    loss_sum: torch.Tensor
    count: torch.Tensor | float
    grad_norm: torch.Tensor | None


@dataclass(slots=True)
class _Pending:
    facts: StepFacts
    values: list[torch.Tensor | float] | torch.Tensor
    start: Mark | float
    laps: list[tuple[str, Mark | float, int]]
    waits: list[tuple[Mark, Mark]]
    memory_bytes: int
    time: float


class StepMeter:
    """Times steps and turns them into records."""

    def __init__(self, device: torch.device, trace: Trace) -> None:
        self._device = device
        self._take = DeviceClock(device).take
        self._trace = trace
        self._waits = trace.waits
        self._start = self._take()
        self._laps: list[tuple[str, Mark | float, int]] = []  # phase, its end, waits so far in the step
        self._pending: deque[_Pending] = deque()
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

    def finish(self, facts: StepFacts) -> None:
        """Ends the step; the next one starts here."""
        if facts.step % _MEMORY_EVERY == 1 or not self._memory_bytes:
            self._memory_bytes = peak_memory_bytes(self._device)
        values = _on_host(facts)
        # The copy to the host is ordered before this mark: once it is past, the values can be read.
        end = self._take()
        waits = self._trace.take_waits()
        self._laps.append(("other", end, len(waits)))
        pending = _Pending(facts, values, self._start, self._laps, waits, self._memory_bytes, time.time())
        self._pending.append(pending)
        self._start, self._laps = end, []

    def is_due(self) -> bool:
        """Says whether it is time to drain: short steps are read many at once, which costs less than one by one."""
        if not self._pending:
            return False
        return len(self._pending) >= _DRAIN_STEPS or self._pending[-1].time - self._drained_at > _DRAIN_S

    def drain(self, *, wait: bool = False) -> Iterator[StepRecord]:
        """Yields the records of the steps that the device has finished; with ``wait``, of all steps issued."""
        self._drained_at = time.time()
        while self._pending and (wait or _is_past(self._pending[0].laps[-1][1])):
            yield _record(self._pending.popleft())


def _is_past(mark: Mark | float) -> bool:
    return isinstance(mark, float) or mark.is_past()


def _on_host(facts: StepFacts) -> list[torch.Tensor | float] | torch.Tensor:
    """Starts the copy of a step's numbers to the host; on CUDA nothing here waits for the device."""
    parts = [facts.loss_sum, facts.count, facts.grad_norm if facts.grad_norm is not None else 0.0]
    if facts.loss_sum.device.type == "cpu":
        return parts
    stacked = torch.stack([on_device(part, facts.loss_sum.device) for part in parts])
    return stacked.to("cpu", non_blocking=True)


def _record(pending: _Pending) -> StepRecord:
    facts = pending.facts
    phases = {"data": 0.0, "forward": 0.0, "backward": 0.0, "optimizer": 0.0, "other": 0.0}
    comm_s, last, num_waits = 0.0, pending.start, 0
    for phase, mark, num_waits_then in pending.laps:
        waited = 0.0
        for start, end in pending.waits[num_waits:num_waits_then]:
            waited += end.seconds_since(start)
        phases[phase] += seconds_between(last, mark) - waited
        comm_s += waited
        last, num_waits = mark, num_waits_then
    step_s = seconds_between(pending.start, last)
    values = pending.values
    loss_sum, count, grad_norm = map(float, values) if isinstance(values, list) else values.tolist()
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
        memory_bytes=pending.memory_bytes,
        time=pending.time,
    )


def peak_memory_bytes(device: torch.device) -> int:
    """Returns the most memory that this process has held: the allocator's on CUDA, resident memory on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
