"""Takes a step apart into phases, without stopping the device.

Laps are marks on the device's time line; the waits for communication that fall into a lap are taken out of it and
added up as exposed communication. A step's numbers are read when the device has passed its last mark: at once on a CPU,
a step or two later on CUDA.
"""

from __future__ import annotations

import operator
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableSequence, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, Protocol, cast

import psutil
import torch

from paceline.clock import CudaMark, DeviceClock, Mark, on_device, seconds_between
from paceline.comm.ledger import file as cells
from paceline.comm.ledger.file import LAPS, NUM_CELLS, PHASE, STEP, TIMED_STEPS
from paceline.comm.ledger.ledger import Ledger
from paceline.comm.traced import Trace
from paceline.free_memory import peak_memory_bytes
from paceline.health.ledger_view import BACKWARD, DATA, FORWARD, OPTIMIZER, PHASES
from paceline.records.records import CommRecord, StepRecord

_DRAIN_STEPS = 64  # at most; a power of two
_DRAIN_S = 0.5  # of steps that are drained at once, about
_FIRST_PHASE = PHASES.index(DATA)
# What comes after a phase in the first step; from then on it is what came in the step before, since with several
# microbatches a forward pass may follow a backward one.
_PHASE_AFTER = {name: PHASES.index(then) for name, then in pairwise((DATA, FORWARD, BACKWARD, OPTIMIZER, DATA))}
_TIMES: dict[int, Callable[[StepRecord], float]] = {  # cells that add up seconds
    getattr(cells, f"{name.upper()}_NS"): operator.attrgetter(f"{name}_s")
    for name in ("step", "data", "forward", "backward", "optimizer")
}
_COMM_S = 1.0  # between records of communication, at least
_MEMORY_EVERY = 50  # steps; to ask the system, or CUDA's allocator, takes longer than all the rest here


class StepNumbers(Protocol):
    """What a step computed, on its device."""

    loss_sum: torch.Tensor
    count: torch.Tensor | float
    grad_norm: torch.Tensor
    loss_scale: torch.Tensor | None


class StepFacts(Protocol):
    """What the trainer knows of a step when it has issued it."""

    step: int
    position: int
    lr: float

    @property
    def epoch(self) -> float: ...

    @property
    def samples(self) -> int: ...  # of this rank

    @property
    def outcome(self) -> StepNumbers: ...


_GroupNames = Mapping[tuple[int, ...], str]
_Moment = Mark | float
_Lap = tuple[str, _Moment, int]  # phase, its end, waits so far in the step
_Waits = Sequence[tuple[Mark, Mark]]
# A step that was issued: facts, numbers on their way from a device, start, laps, end, waits, memory, time of day,
# seconds of the host. Bare tuples are made in half the time of named ones.
_Issued = tuple[StepFacts, torch.Tensor | None, _Moment, list[_Lap], _Moment, _Waits, "_Memory", float, float | None]


class _Memory(NamedTuple):
    """Bytes that a rank has held at most, holds now, and keeps of the device."""

    peak: int = 0
    allocated: int | None = None
    reserved: int | None = None


class StepMeter:
    """Times steps and turns them into records."""

    def __init__(
        self, device: torch.device, trace: Trace, ledger: Ledger | None = None, groups: _GroupNames | None = None
    ) -> None:
        """With a ``ledger``, phases and steps are noted there as they begin. ``groups`` are names by their ranks."""
        self._device, self._is_device = device, device.type != "cpu"
        self._process = psutil.Process()
        # Takes a mark of the time that steps are measured in.
        self.take: Callable[[], _Moment] = (DeviceClock(device) if trace.clock is None else trace.clock).take
        self._trace, self._waits = trace, trace.waits
        trace.adds_up = True
        self._start = self.take()
        self._laps: list[_Lap] = []
        self._order: list[int] = []  # the number of the phase that followed each lap of the last step
        self._pending: deque[_Issued] = deque()
        self._memory, self._finished = _Memory(), 0
        self._groups = groups or {}
        self._drain_every = 1  # steps; a power of two
        self._drained_at = self._issued_at = self._comm_at = time.time()
        self.rate_against(None, None)
        if ledger is not None:
            ledger.is_own_loop = False  # phases and steps are noted here
        self._cells: MutableSequence[int] = [0] * NUM_CELLS if ledger is None else cast("Any", ledger.cells)

    def rate_against(self, flops_per_sample: float | None, peak_flops: float | None) -> None:
        """Sets what a sample takes of this rank, and what its device could do: steps get FLOP/s and MFU."""
        self._flops_per_sample, self._peak_flops = flops_per_sample, peak_flops

    def enter(self, phase: str) -> None:
        """Notes that the rank does something else than a step from here on, until the next one starts."""
        self._cells[PHASE] = PHASES.index(phase)
        self._cells[LAPS] += 1

    def start(self) -> None:
        """Begins a step now: what happened since the last one (an evaluation, say) is not counted."""
        self._trace.take_waits()
        self._start, self._issued_at = self.take(), time.time()
        self._laps = []
        self._cells[PHASE] = _FIRST_PHASE

    def lap(self, phase: str) -> None:
        """Ends a phase of the step."""
        number, order = len(self._laps), self._order
        self._laps.append((phase, self.take(), len(self._waits)))
        self._cells[PHASE] = order[number] if number < len(order) else _PHASE_AFTER[phase]

    def finish(self, facts: StepFacts) -> bool:
        """Ends the step; the next one starts here. Returns whether to drain: many steps at once cost less.

        Ranks drain after the same steps, by their numbers: each at its own time, they would wait for one another.
        """
        # Not in the first step alone, at whose worst moment the optimizer has no states yet.
        self._finished += 1
        if self._finished <= 2 or facts.step % _MEMORY_EVERY == 1:
            self._memory = _memory(self._device, self._process)
        on_host = None
        if self._is_device:  # the copy waits for nothing, and is before the mark: once that is past, it can be read
            device = facts.outcome.loss_sum.device
            stacked = torch.stack([on_device(number, device) for number in _numbers(facts.outcome)])
            on_host = stacked.to("cpu", non_blocking=True)
        end, now = self.take(), time.time()
        host_s = _host_seconds(self._laps, now - self._issued_at) if self._is_device else None
        waits = self._trace.take_waits() if self._waits else ()
        self._pending.append((facts, on_host, self._start, self._laps, end, waits, self._memory, now, host_s))
        if len(self._laps) != len(self._order):
            self._order = [*(PHASES.index(phase) for phase, _, _ in self._laps[1:]), _FIRST_PHASE]
        self._start, self._laps, self._issued_at = end, [], now
        self._cells[PHASE] = _FIRST_PHASE
        self._cells[STEP] += 1
        is_late = abs(now - self._drained_at) > 2 * _DRAIN_S  # the clock may be set back
        return is_late or facts.step % self._drain_every == 0 or len(self._pending) >= 2 * _DRAIN_STEPS

    def drain(self, *, wait: bool = False) -> Iterator[StepRecord]:
        """Yields the records of the steps that the device has finished; with ``wait``, of all steps issued."""
        self._drained_at = time.time()
        done: list[StepRecord] = []
        try:
            while self._pending:
                end = self._pending[0][4]
                if not (wait or isinstance(end, float) or end.is_past()):
                    break
                record = _record(self._pending.popleft())
                if self._flops_per_sample and record.samples and record.step_s > 0:
                    record.flops_per_s = self._flops_per_sample * record.samples / record.step_s
                    record.mfu = record.flops_per_s / self._peak_flops if self._peak_flops else None
                done.append(record)
                yield record
        finally:
            if done:
                for cell, seconds in _TIMES.items():  # for whoever compares ranks: the number of steps last
                    self._cells[cell] += int(1e9 * sum(max(0.0, seconds(each)) for each in done))
                self._cells[TIMED_STEPS] += len(done)
                self._drain_every = 1  # the most steps, a power of two, that take _DRAIN_S
                while self._drain_every < _DRAIN_STEPS and 2 * self._drain_every * done[-1].step_s <= _DRAIN_S:
                    self._drain_every *= 2

    def drain_comm(self, step: int, *, wait: bool = False) -> list[CommRecord]:
        """Returns records of the operations that ended, by kind and group: once a second, or of all with ``wait``."""
        now = self._now()
        if not wait and abs(now - self._comm_at) < _COMM_S:
            return []
        self._comm_at = now
        return [
            CommRecord(
                step=step,
                kind=total.kind,
                group=self._groups.get(total.group) or f"ranks {','.join(map(str, total.group))}",
                ranks=len(total.group),
                calls=total.calls,
                bytes=total.num_bytes,
                seconds=total.seconds,
                time=now,
            )
            for total in self._trace.take_totals(wait=wait)
        ]

    def _now(self) -> float:
        """Returns the time that records of communication have: a simulation has its own."""
        return time.time()


def _numbers(outcome: StepNumbers) -> list[torch.Tensor | float]:
    scale = 1.0 if outcome.loss_scale is None else outcome.loss_scale
    return [outcome.loss_sum, outcome.count, outcome.grad_norm, scale]


def _host_seconds(laps: Sequence[_Lap], issued_s: float) -> float | None:
    """Returns the host's time for a step that the device was waiting for, 0 if it was not; None without a device.

    The device waits if it has ended the backward pass when the host has issued the update.
    """
    mark = laps[-2][1] if len(laps) > 1 else None
    if not isinstance(mark, CudaMark):
        return None
    return issued_s if mark.is_past() else 0.0


def _record(issued: _Issued) -> StepRecord:
    facts, on_host, start, laps, end, waits, memory, now, host_s = issued
    seconds = {DATA: 0.0, FORWARD: 0.0, BACKWARD: 0.0, OPTIMIZER: 0.0}
    comm_s, last, num_waits = 0.0, start, 0
    for phase, mark, num_waits_then in laps:
        took = seconds_between(last, mark)
        if num_waits_then > num_waits:
            waited = 0.0
            for begin, then in waits[num_waits:num_waits_then]:
                waited += seconds_between(begin, then)
            took, comm_s, num_waits = took - waited, comm_s + waited, num_waits_then
        seconds[phase] += took
        last = mark
    for begin, then in waits[num_waits:]:  # after the last lap
        comm_s += seconds_between(begin, then)
    data_s, forward_s, backward_s, optimizer_s = seconds.values()
    step_s = seconds_between(start, end)
    numbers = map(float, _numbers(facts.outcome)) if on_host is None else on_host.tolist()
    loss_sum, count, grad_norm, loss_scale = numbers
    samples = facts.samples
    return StepRecord(
        step=facts.step,
        epoch=facts.epoch,
        position=facts.position,
        loss=loss_sum / count if count else None,
        loss_sum=loss_sum,
        count=int(count),
        lr=facts.lr,
        grad_norm=grad_norm,
        samples=samples,
        step_s=step_s,
        data_s=data_s,
        forward_s=forward_s,
        backward_s=backward_s,
        comm_s=comm_s,
        optimizer_s=optimizer_s,
        samples_per_s=samples / step_s if step_s > 0 else 0.0,
        memory_bytes=memory.peak,
        time=now,
        loss_scale=loss_scale,
        host_s=max(0.0, host_s - data_s) if host_s else host_s,
        peak_bytes=memory.peak,
        allocated_bytes=memory.allocated,
        reserved_bytes=memory.reserved,
    )


def _memory(device: torch.device, process: psutil.Process) -> _Memory:
    """Asks for memory: CUDA's allocator, or the system for what this process keeps resident on a CPU."""
    if device.type != "cuda":
        return _Memory(peak_memory_bytes(device), process.memory_info().rss)
    found = torch.cuda.memory.memory_stats_as_nested_dict(device)  # one question to the allocator
    allocated, reserved = (found.get(name, {}).get("all", {}) for name in ("allocated_bytes", "reserved_bytes"))
    return _Memory(allocated.get("peak", 0), allocated.get("current", 0), reserved.get("current", 0))
