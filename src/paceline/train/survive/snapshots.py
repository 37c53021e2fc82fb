"""Snapshots of a run's state in the memory of its hosts (``checkpoint/storage.py``), while training goes on.

    behind step s        copy to the host                 on CUDA by a stream of its own, while step s + 1 runs
    beside the steps     a thread: write into this host's memory, have keepers of other hosts copy it
    behind later steps   the ranks add up who is done, in the sum of ``hooks.py``; once all are, the snapshot is whole,
                         and what is older goes when the next one is taken

One snapshot is under way at a time. A step that is due meanwhile is taken as soon as that one is whole. Where a rank
cannot keep its part, all ranks learn of it in the same step and take no more: the run goes on with checkpoints on disk.

[Note: direct copies] The passes of a step read a state, and only its update writes it. So CUDA tensors are copied to
the host from where they lie, beside the passes of the next step, and its update waits for the last of them: engines of
the device that do nothing else move them, as fast as the bus is. What passes have no time for is copied on the device
first, where there is room, by kernels that take turns with those of the step. How much that is the first snapshot
tells, which copies all directly. A step that is replayed as a CUDA graph waits in the graph, for an event from outside
of it. From its copy the rest goes to the host piece by piece, behind later steps: a device works off what stands in its
queue before anything else goes that way, such as the loss of a step.

Files of the snapshot before the last are written over: to free pages and map others takes longer than to fill them.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from io import FileIO
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch.utils._pytree import tree_map_only

from paceline.checkpoint.manifest import HEAD, SEAL, State, head_text
from paceline.checkpoint.storage import LocalFiles
from paceline.checkpoint.tensors import encode
from paceline.checkpoint.write import SaveTarget, own_shares, plain_state, write_part
from paceline.checkpoint.writer import StagingBuffer
from paceline.comm.control.kept import Kept, places_of_copies
from paceline.comm.control.wire import Address
from paceline.comm.objects import ask_first_rank
from paceline.predict.formulas.saving import BESIDE_SHARE
from paceline.records.event_words import ELSEWHERE
from paceline.shards import Shard
from paceline.train.master_adamw import MasterAdamW
from paceline.train.step import StepResult
from paceline.train.trainer import Trainer

Fetch: TypeAlias = Callable[[], tuple[list[Shard], State]]  # waits for copies, and returns them on the host
_ATTEMPTS, _PAUSE_S = 5, 0.5  # to have a copy made, while a keeper that was killed is started again
_SPARE_BYTES = 2**30  # of a device: where less would be left, no copy is made on it

_GOOD = (0.5, 0.8)  # of a step: direct copies that take less could be more, and others may not end before the update


class HostMemory(LocalFiles):
    """Files in a folder that goes with its keeper: nothing is made in its place. What is there is written over."""

    def make_folder(self, path: Path) -> None:
        path.mkdir(exist_ok=True)

    def open_new(self, path: Path) -> FileIO:
        return path.open("r+b" if path.exists() else "wb", buffering=0)


class Snapshots:
    """Takes snapshots of a trainer's state, behind steps. All ranks call it at the same steps."""

    def __init__(self, root: Path, every_steps: int, copies: int = 1, about: Mapping[str, Any] | None = None) -> None:
        self.kept = Kept(root)
        self.storage = HostMemory()
        self._every, self._copies, self._about = every_steps, copies, dict(about or {})
        self._token = ""
        self._last_step = 0
        self._is_due = self._is_off = False
        self._pending: Snapshot | None = None
        self._stay: set[str] = set()  # folders from which the run can go on
        self._stage = StagingBuffer()
        self._side: _SideStream | None = None

    @property
    def step(self) -> int | None:
        """The step of the snapshot that is under way, the same on all ranks."""
        return None if self._pending is None else self._pending.target.step

    def __call__(self, trainer: Trainer, result: StepResult) -> None:
        if not self._token or result.step <= self._last_step:
            self._begin(trainer, result.step - 1)
        self._last_step = result.step
        if self._side is not None:
            self._side.end_step()
        self._is_due = self._is_due or result.step % self._every == 0
        if self._is_due and self._pending is None and not (self._is_off or result.is_last):
            self._is_due = False
            self._take(trainer)

    def join(self) -> None:
        """Waits for what is under way."""
        if self._pending is not None:
            self._pending.join()

    def progress(self) -> tuple[bool, bool]:
        """Returns whether this rank's part of the snapshot under way is kept, and whether it cannot be."""
        pending = self._pending
        return (False, False) if pending is None else (pending.is_kept, bool(pending.problem))

    def hear(self, trainer: Trainer, step: int | None, num_kept: int, num_failed: int) -> None:
        """Takes what the ranks had added up while the snapshot of ``step`` was under way."""
        pending = self._pending
        if pending is None or step != pending.target.step or (not num_failed and num_kept < pending.target.world):
            return
        self._pending = None
        if num_failed:
            self._is_off = True
            why = pending.problem or ELSEWHERE
            trainer.note("no_snapshots", {"reason": why, "ranks": num_failed}, step=step)
            return
        self._stay = {pending.target.partial.name}
        detail = pending.detail()
        if self._side is not None:
            detail["stall_seconds"] = round(detail["stall_seconds"] + self._side.waited_s(), 5)
        trainer.note("snapshot", detail, step=step)

    def _begin(self, trainer: Trainer, step: int) -> None:
        """Begins at a step, or again where the run went back to it: what is of later ones is no longer the run's."""
        self.join()
        if not self._token:
            self._stage.reserve(own_shares(trainer.collect_state().shards))
            if trainer.parts.engine.world.device.type == "cuda":
                self._side = _SideStream(trainer)  # before a step is recorded as a graph
        self._pending, self._is_due = None, False
        self._token = ask_first_rank(trainer.parts.engine.world, lambda: secrets.token_hex(4))
        for folder in self.kept.held():
            if int(folder.split(".")[1].removeprefix("step-")) > step:
                shutil.rmtree(self.kept.root / folder, ignore_errors=True)
        self._stay = {name for name in self.kept.held() if name.startswith(f".step-{step:08d}.")}

    def _take(self, trainer: Trainer) -> None:
        comm = trainer.parts.engine.world
        begun = time.perf_counter()
        where: dict[str, Any] = {"folder": self.kept.root, "storage": self.storage}
        target = SaveTarget(step=trainer.step, rank=comm.rank, world=comm.size, token=self._token, **where)
        self._pending = pending = Snapshot(target, self.kept, self._copies, self._stay)
        # On CUDA without a wait for the steps that are under way.
        state = trainer.state() if self._side is None else trainer.collect_state()
        pending.start(replace(state, about=self._about), self._stage, self._side)
        pending.stall_s = time.perf_counter() - begun


class Snapshot:
    """This rank's part of a snapshot: copied by its caller, kept by a thread."""

    def __init__(self, target: SaveTarget, kept: Kept, copies: int, stay: Set[str]) -> None:
        self.target = target
        self.problem = self.without_copy = ""
        self.is_kept = False
        self.stall_s = self._total_s = self._copied_s = self._written_s = 0.0
        self._num_bytes = self._taken_bytes = 0
        self._kept, self._copies, self._stay = kept, copies, stay
        self._begun = time.perf_counter()
        self._thread: threading.Thread | None = None

    def start(self, state: State, stage: StagingBuffer, side: _SideStream | None) -> None:
        """Copies the state, or begins to, and starts the thread that keeps it."""
        try:
            self._take_over()
            shares = own_shares(state.shards)
            if side is None:
                staged, values = stage.copy(shares), plain_state(state)
                fetch: Fetch = lambda: (staged, values)  # noqa: E731
            else:
                fetch = side.copy(state, shares, stage)
        except Exception as error:  # whatever it is, the other ranks wait to hear of it
            self.problem = f"{type(error).__name__}: {error}"
            return
        name = f"snapshot {self.target.step}"
        self._thread = threading.Thread(target=self._run, args=(fetch,), name=name, daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Waits until the thread has ended, if there is one."""
        if self._thread is not None:
            self._thread.join()

    def detail(self) -> dict[str, Any]:
        """Returns what it took: until all was on the host, until it was written, and until other hosts had it."""
        times = {"seconds": round(self._total_s, 4), "stall_seconds": round(self.stall_s, 5)}
        times |= {"copied_seconds": round(self._copied_s, 4), "written_seconds": round(self._written_s, 4)}
        missing = {"without_copy": self.without_copy} if self.without_copy else {}
        return {**times, "bytes": self._num_bytes, **missing}

    def _run(self, fetch: Fetch) -> None:
        try:
            shares, values = fetch()
            self._copied_s = time.perf_counter() - self._begun
            self._write(shares, values)
            self.is_kept = True
        except Exception as error:  # training goes on, and all ranks hear of it
            self.problem = str(error).splitlines()[0] or type(error).__name__
        self._total_s = time.perf_counter() - self._begun

    def _take_over(self) -> None:
        """Takes this rank's files of an older snapshot of this attempt, to write over: nobody goes on from that one."""
        target = self.target
        target.storage.make_folder(target.partial)
        for folder in sorted(self._kept.root.glob(f".step-*.{target.token}")):
            if folder.name not in {*self._stay, target.partial.name}:
                (folder / f"{target.stem}.json{SEAL}").unlink(missing_ok=True)  # it says that all is there
                for file in folder.glob(f"{target.stem}.*.safetensors"):
                    with contextlib.suppress(FileNotFoundError):  # another rank removes the folder
                        file.replace(target.partial / file.name)
                        self._taken_bytes += (target.partial / file.name).stat().st_size

    def _write(self, shares: list[Shard], state: State) -> None:
        target, kept = self.target, self._kept
        for folder in kept.held().keys() - self._stay - {target.partial.name}:
            shutil.rmtree(kept.root / folder, ignore_errors=True)  # other ranks of this host do so, too
        kept.check_room(sum(share.tensor.nbytes for share in shares) - self._taken_bytes)
        self._num_bytes = write_part(target, shares, state)
        if target.rank == 0:
            target.storage.write(target.partial / HEAD, [head_text(state, target.world).encode()])
        part = target.partial / f"{target.stem}.json"
        seal = part.with_name(part.name + SEAL)
        target.storage.write(seal, [target.storage.digest(part).encode()])
        self._written_s = time.perf_counter() - self._begun
        place, keepers = kept.keepers()
        files = kept.held()[target.partial.name]
        own = [name for name in files if name.startswith(part.stem) or (name == HEAD and target.rank == 0)]
        own.sort(key=lambda name: name == seal.name)  # it comes last: it says that all is there
        request = [keepers[place].host, keepers[place].port, target.partial.name, [[name, files[name]] for name in own]]
        for other in places_of_copies(place, len(keepers), self._copies):
            self._have_copied(keepers[other], request)

    def _have_copied(self, keeper: Address, request: list[Any]) -> None:
        """Has another host's keeper take a copy; without one the snapshot is still kept on this host."""
        for _ in range(_ATTEMPTS):
            try:
                with self._kept.asking(keeper) as ask:
                    ask("copy", *request)
                self.without_copy = ""
                return
            except OSError as error:
                self.without_copy = f"{keeper} has no copy: {error.strerror or error}"
                if error.errno == errno.EIO:  # its own answer
                    return
            time.sleep(_PAUSE_S)


class _SideStream:
    """A stream that copies a state beside the steps; updates wait until they may overwrite what is copied."""

    def __init__(self, trainer: Trainer) -> None:
        parts, self._device = trainer.parts, trainer.parts.engine.device
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        # Passes, and not updates alone, write buffers and residuals of compression; averages of weights are written
        # behind an update that an optimizer without a flag has left out, too.
        optimizer = parts.optimizer
        has_flag = getattr(optimizer, "_step_supports_amp_scaling", False) or isinstance(optimizer, MasterAdamW)
        held = [shard.tensor if shard.parameter is None else shard.parameter for shard in parts.engine.shards()]
        self._is_written_early = parts.compressor is not None or not all(each.requires_grad for each in held)
        self._is_written_early |= parts.average is not None and not has_flag
        self._copied = torch.cuda.Event(external=True)  # type: ignore[no-untyped-call]  # what the run has was read
        self._copied.record(torch.cuda.current_stream(self._device))
        self._is_awaited = False
        self._num_direct: int | None = None  # of the shares; None: not known yet
        self._clones: list[torch.Tensor] = []
        self._waits: list[torch.cuda.Event] = []
        self._steps: list[torch.cuda.Event] = []  # the end of the step that is kept, and of the one behind it
        self._direct: tuple[torch.cuda.Event, torch.cuda.Event] | None = None  # around direct copies
        optimizer.register_step_pre_hook(self._before_update)

    def copy(self, state: State, shares: list[Shard], stage: StagingBuffer) -> Fetch:
        """Issues copies, and returns what waits for them on the host: the training thread does not."""
        main, self._waits = torch.cuda.current_stream(self._device), []
        number = self._find_direct([share.tensor.nbytes for share in shares])
        self._stream.wait_stream(main)
        self._steps = [_mark(main)]
        with torch.cuda.stream(self._stream):
            clones = self._clone(shares[number:])
            found = _of_tensors(torch.clone, state.found)
            self._num_direct = number = len(shares) if clones is None else number
            begun = _mark(self._stream)
            staged = stage.copy(shares, part=slice(number), waits=False)
            self._direct = (begun, _mark(self._stream)) if number else None
            self._copied.record(self._stream)
        self._is_awaited = True
        if self._is_written_early:
            self._before_update()
        plain, sources = plain_state(replace(state, found={})), [*shares[:number], *(clones or [])]

        def fetch() -> tuple[list[Shard], State]:
            torch.cuda.set_device(self._device)  # a new thread has the first one
            with torch.cuda.stream(self._stream):
                rest = stage.copy(sources, part=slice(number, None), waits=False, pause=_Pace(self._stream))
                values = _of_tensors(torch.Tensor.cpu, found)
            self._stream.synchronize()  # sync point, of this thread
            return staged + rest, replace(plain, found={name: encode(value, name) for name, value in values.items()})

        return fetch

    def end_step(self) -> None:
        """Marks the end of the step behind the one that is kept, beside which direct copies are made."""
        if len(self._steps) == 1:
            self._steps.append(_mark(torch.cuda.current_stream(self._device)))

    def waited_s(self) -> float:
        """Returns how long the device has waited before the update behind the last snapshot; of a graph 0."""
        is_known = len(self._waits) == 2 and self._waits[1].query()  # type: ignore[no-untyped-call]
        return self._waits[0].elapsed_time(self._waits[1]) / 1000.0 if is_known else 0.0

    def _find_direct(self, sizes: Sequence[int]) -> int:
        """Returns how many of the shares are copied directly: by what the snapshot before took, or all."""
        if self._is_written_early:
            return 0
        is_known = len(self._steps) == 2 and self._steps[1].query()  # type: ignore[no-untyped-call]
        if self._direct is None or self._num_direct is None or not is_known:  # not known where a run went back
            return len(sizes) if self._num_direct is None else self._num_direct
        took, step = (first.elapsed_time(last) for first, last in (self._direct, self._steps))
        return count_direct(sizes, self._num_direct, took / max(step, 1e-9))

    def _clone(self, shares: Sequence[Shard]) -> list[Shard] | None:
        """Copies shares on the device, by few kernels, into memory that stays; None: there is no room."""
        if [each.shape for each in self._clones] != [share.tensor.shape for share in shares]:
            self._clones = []
            free = torch.cuda.mem_get_info(self._device)[0] + torch.cuda.memory_reserved(self._device)
            free -= torch.cuda.memory_allocated(self._device)
            if sum(share.tensor.nbytes for share in shares) + _SPARE_BYTES > free:
                return None
            try:
                self._clones = [torch.empty_like(share.tensor) for share in shares]
            except torch.OutOfMemoryError:  # what is free is in pieces
                return None
        if shares:
            torch._foreach_copy_(self._clones, [share.tensor for share in shares])
        return [replace(share, tensor=clone) for share, clone in zip(shares, self._clones, strict=True)]

    def _before_update(self, *_: Any) -> None:
        stream = torch.cuda.current_stream(self._device)
        if torch.cuda.is_current_stream_capturing():
            stream.wait_event(self._copied)  # of each snapshot to come: the graph has no other place to wait
        elif self._is_awaited:
            self._is_awaited = False
            self._waits = [_mark(stream)]
            stream.wait_event(self._copied)
            self._waits.append(_mark(stream))


class _Pace:
    """Called behind each copy to the host: waits until no other one is under way but the last."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._last: torch.cuda.Event | None = None

    def __call__(self) -> None:
        last, self._last = self._last, torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._last.record(self._stream)
        if last is not None:
            last.synchronize()  # sync point, of a thread beside the training


def count_direct(sizes: Sequence[int], before: int, took: float) -> int:
    """Returns how many tensors of such sizes are copied directly, where ``before`` of them ``took`` a share of a step.

    The number stays while it is good, since memory for copies of the rest is made once.
    """
    least, most = _GOOD
    if took <= most and (took >= least or before >= len(sizes)):
        return before
    wanted = sum(sizes[:before]) * BESIDE_SHARE / max(took, 1e-9)
    return sum(total <= wanted for total in itertools.accumulate(sizes))


def _mark(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


def _of_tensors(change: Callable[[torch.Tensor], torch.Tensor], values: Mapping[str, Any]) -> dict[str, Any]:
    changed: dict[str, Any] = tree_map_only(torch.Tensor, change, dict(values))
    return changed
