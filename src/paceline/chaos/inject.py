"""Lets faults happen in a rank, where a plan says so; in a run without a plan none of this is there.

    in a phase     the meter hears where every phase ends, on every path: there a rank dies, hangs, raises, or dawdles
    on a link      every operation of the rank takes longer, inside the time that it waits
    in a loss      the trainer's loss is multiplied, before backward, so that all ranks see the same gradients
    while saving   the writes of a checkpoint, or of a snapshot, end in the middle of a chunk
    in recovery    a rank that has read its state dies before its first step

A phase's fault comes at its end; that of an evaluation or a checkpoint at its beginning. What dies may be more than the
rank: another one, the keeper or the launcher of its host, or all that is there (``victims``).
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import re
import signal
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

from paceline.chaos import faults
from paceline.checkpoint import list_checkpoints
from paceline.checkpoint.manifest import SavedFile
from paceline.checkpoint.storage import FileStore, storage_of
from paceline.health.ledger_view import STEP_PHASES
from paceline.train.loss import Loss, LossValue
from paceline.train.survive.snapshots import Snapshots
from paceline.train.trainer import Trainer

_STEP = re.compile(r"step-(\d+)")
_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "preempt": signal.SIGUSR1}
_HOSTS_S, _LOOK_S = 120.0, 0.05
_MESSAGE_S = 2e-4  # what an operation between processes takes at least: a slow link takes a multiple of it


class InjectedError(RuntimeError):
    """An error that a plan of faults asked for."""


class Injector:
    """The faults of one rank that have not happened yet. ``launcher`` started it; ``find_ranks`` returns processes."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        checkpoints: Path,
        launcher: int = 0,
        find_ranks: Callable[[], Mapping[int, int]] = dict,
    ) -> None:
        self._plan = faults.read_plan(folder)
        done = {(fired.number, fired.rank) for fired in faults.read_notes(folder, faults.Fired)}
        self._folder, self._rank, self._checkpoints = folder, rank, checkpoints
        self._launcher, self._find_ranks = launcher, find_ranks
        self._known = {number for number, _ in done}
        self._faults = [one for one in self._plan.faults if one.rank in (None, rank) and (one.number, rank) not in done]
        self._slowed: dict[str, tuple[float, int]] = {}  # by kind of fault: how much longer, until which step
        self._loss_factor = 1.0
        self._lap_at, self._started_at = time.perf_counter(), time.time()
        self._trainer: Trainer | None = None

    def storage(self) -> FileStore:
        """Returns where checkpoints go, with the faults of saving."""
        storage = storage_of(self._checkpoints)
        if any(each.kind in faults.WHILE_SAVING for each in self._faults):
            storage.write = partial(self._write, faults.WHILE_SAVING, storage.write)  # type: ignore[method-assign]
        return storage

    def attach(self, trainer: Trainer) -> None:
        """Puts the faults of phases and losses into a trainer that is about to run."""
        self._trainer, meter = trainer, trainer.parts.meter
        self._wait_for_hosts(trainer.parts.engine.world.size)
        if self._rank == 0:
            faults.note(self._folder, faults.Started(step=trainer.step, position=trainer.position, time=time.time()))
        for fault in self._faults:
            if fault.kind == "kill-in-recovery" and fault.number - 1 in self._known:
                self._do(fault, trainer.step + 1)
        for hook in trainer.hooks:
            if isinstance(hook, Snapshots) and any(each.kind in faults.IN_SNAPSHOT for each in self._faults):
                write = partial(self._write, faults.IN_SNAPSHOT, hook.storage.write)
                hook.storage.write = write  # type: ignore[method-assign]
        meter.lap = partial(self._lap, meter.lap)  # type: ignore[method-assign]
        meter.enter = partial(self._enter, meter.enter)  # type: ignore[method-assign]
        trace = trainer.parts.engine.world.trace
        if trace is not None and any(each.kind == "slow-link" for each in self._faults):
            trace.end_wait = partial(self._end_wait, trace.end_wait)  # type: ignore[method-assign]
        if any(each.kind in faults.ON_LOSS for each in self._faults):
            trainer.parts = replace(trainer.parts, loss=FaultyLoss(trainer.parts.loss, lambda: self._loss_factor))

    def _wait_for_hosts(self, size: int) -> None:
        """Waits until all hosts have come at first: then this attempt is ended, and all ranks are started together."""
        deadline = time.monotonic() + _HOSTS_S
        while size < self._plan.ranks and time.monotonic() < deadline:
            if faults.read_notes(self._folder, faults.Started):  # they had come, and one has gone
                break
            time.sleep(_LOOK_S)

    def _lap(self, lap: Callable[[str], None], phase: str) -> None:
        assert self._trainer is not None
        step = self._trainer.step + 1
        if more := self._slowness("slow", step):  # takes as many times as long as a slow rank's
            time.sleep(more * (time.perf_counter() - self._lap_at))
        if phase == "optimizer":
            self._loss_factor = 1.0
        for fault in self._due(step):
            if fault.kind in faults.SLOW:
                self._fire(fault, step)
                self._slowed[fault.kind] = fault.factor - 1.0, step + fault.length
            elif fault.kind in faults.ON_LOSS and phase == "data":
                self._fire(fault, step)
                self._loss_factor = float("nan") if fault.kind == "nan" else fault.factor
            elif fault.kind == "corrupt-checkpoint" and list_checkpoints(self._checkpoints):
                self._corrupt(fault, step)
            elif fault.phase == phase:
                self._do(fault, step)
        lap(phase)
        if phase == "optimizer" and self._rank == 0:
            self._note_passed(step)
        self._lap_at = time.perf_counter()

    def _end_wait(self, end_wait: Callable[[Any], None], start: Any) -> None:
        """Makes operations take longer: the rank's own wait for one, and so that of the others for the next."""
        assert self._trainer is not None
        more = self._slowness("slow-link", self._trainer.step)
        if more and start is not None:
            time.sleep(more * _MESSAGE_S)
        end_wait(start)

    def _slowness(self, kind: str, step: int) -> float:
        more, end = self._slowed.get(kind, (0.0, 0))
        return more if step < end else 0.0

    def _enter(self, enter: Callable[[str], None], phase: str) -> None:
        assert self._trainer is not None
        enter(phase)
        step = self._trainer.step
        for fault in self._due(step):
            if fault.phase == phase and phase not in STEP_PHASES:
                self._do(fault, step)

    def _due(self, step: int) -> list[faults.Fault]:
        return [each for each in self._faults if each.step is not None and step >= each.step]

    def _do(self, fault: faults.Fault, step: int) -> None:
        if fault.kind.startswith("kill-"):
            self._kill(fault, step)
            return
        self._fire(fault, step)
        while fault.kind == "hang":
            time.sleep(3600.0)
        if fault.kind in _SIGNALS:
            os.kill(os.getpid(), _SIGNALS[fault.kind])
        if fault.kind == "exception":
            raise InjectedError(f"an error that chaos asked for, in step {step}")
        if fault.kind == "oom":
            raise torch.OutOfMemoryError(f"out of memory, as chaos asked for, in step {step}")

    def _kill(self, fault: faults.Fault, step: int) -> None:
        """Kills what a fault says, this rank last; all of it is stopped first, so that nothing sees another end."""
        found, own = victims(fault.kind, self._rank, self._launcher, self._find_ranks()), os.getpid()
        meets = fault.kind in faults.OF_HOSTS and listens(self._launcher, self._plan.meeting)
        self._fire(fault, step, detail=faults.MEETS if meets else "")
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    if pid != own:
                        os.kill(pid, number)
        if own in found:
            die()

    def _corrupt(self, fault: faults.Fault, step: int) -> None:
        """Flips one bit of one file of the newest checkpoint, and dies: the next start must do without."""
        newest, draw = list_checkpoints(self._checkpoints)[-1], self._draw(fault)
        files = sorted(path for path in newest.iterdir() if path.is_file() and path.stat().st_size)
        path = draw.choice(files)
        place, bit = draw.randrange(path.stat().st_size), draw.randrange(8)
        self._fire(fault, step, detail=f"bit {bit} of byte {place} of {newest.name}/{path.name}")
        with path.open("r+b") as file:
            file.seek(place)
            value = file.read(1)[0]
            file.seek(place)
            file.write(bytes([value ^ (1 << bit)]))
        die()

    def _write(
        self, kinds: Collection[str], write: Callable[..., SavedFile], path: Path, chunks: Iterable[memoryview | bytes]
    ) -> SavedFile:
        found = _STEP.search(path.parent.name)
        step = int(found[1]) if found is not None else 0
        for fault in self._due(step):
            if fault.kind in kinds:
                if fault.kind == "unwritable":
                    self._fire(fault, step, detail=path.name)
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
                return write(path, self._cut(fault, step, path, chunks))
        return write(path, chunks)

    def _cut(
        self, fault: faults.Fault, step: int, path: Path, chunks: Iterable[memoryview | bytes]
    ) -> Iterator[memoryview | bytes]:
        """Yields the first bytes of a file, and ends as the fault says."""
        draw = self._draw(fault)
        num_whole, num_written = draw.randrange(3), 0
        for number, chunk in enumerate(chunks):
            if number < num_whole:
                num_written += len(chunk)
                yield chunk
                continue
            part = memoryview(chunk)[: draw.randrange(len(chunk) + 1)]
            num_written += len(part)
            yield part
            break
        if fault.kind in faults.IN_SNAPSHOT and self._trainer is not None:
            step = self._trainer.step  # which goes on beside it
        self._fire(fault, step, detail=f"after {num_written} bytes of {path.name}")
        if fault.kind in ("kill-while-saving", "kill-in-snapshot"):
            die()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    def _fire(self, fault: faults.Fault, step: int, *, detail: str = "") -> None:
        at, rank, now = 0 if self._trainer is None else self._trainer.position, self._rank, time.time()
        self._faults.remove(fault)
        fired = faults.Fired(number=fault.number, rank=rank, step=step, position=at, time=now, detail=detail)
        faults.note(self._folder, fired)

    def _note_passed(self, step: int) -> None:
        """Notes the faults that the run is past: where it was not ended, by a step that needed all ranks again."""
        known = {(each.number, each.is_later) for each in faults.read_notes(self._folder, faults.Passed)}
        for fired in faults.read_notes(self._folder, faults.Fired):
            is_later = fired.time < self._started_at
            if fired.step + (not is_later) <= step and (fired.number, is_later) not in known:
                known.add((fired.number, is_later))
                passed = faults.Passed(number=fired.number, step=step, is_later=is_later, time=time.time())
                faults.note(self._folder, passed)

    def _draw(self, fault: faults.Fault) -> random.Random:
        return random.Random(f"{self._plan.seed} {fault.number}")  # nosec B311  # faults by a seed


class FaultyLoss:
    """A loss that is multiplied in some steps; as it is else."""

    def __init__(self, loss: Loss, factor: Callable[[], float]) -> None:
        self._loss = loss
        self._factor = factor

    @property
    def elements_per_sample(self) -> float | None:
        return self._loss.elements_per_sample

    def __call__(self, model: Callable[..., Any], batch: Any) -> LossValue:
        value, factor = self._loss(model, batch), self._factor()
        return value if factor == 1.0 else replace(value, total=value.total * factor)

    def score(self, model: Callable[..., Any], batch: Any) -> LossValue:
        return self._loss.score(model, batch)


def victims(kind: str, rank: int, launcher: int, ranks: Mapping[int, int]) -> list[int]:
    """Returns the processes that a fault of a rank kills."""
    if kind == "kill-two":
        after = [each for each in sorted(ranks) if each > rank] or sorted(ranks)
        return [ranks[after[0]], os.getpid()]
    if kind == "kill-launcher":
        return [launcher]
    if kind in ("kill-keeper", "kill-host"):
        children = psutil.Process(launcher).children(recursive=True)
        keepers = [each.pid for each in children if "paceline.run.keeper" in each.cmdline()]
        return keepers if kind == "kill-keeper" else [launcher, *(each.pid for each in children)]
    return [os.getpid()]


def listens(launcher: int, port: int | None) -> bool:
    """Whether the hosts of a run meet at this launcher; a run without a port has one launcher."""
    found = psutil.Process(launcher).net_connections() if port is not None else []
    return port is None or any(each.status == psutil.CONN_LISTEN and each.laddr.port == port for each in found)


def die() -> None:
    """Ends this process as the kernel does when memory is short."""
    os.kill(os.getpid(), signal.SIGKILL)
