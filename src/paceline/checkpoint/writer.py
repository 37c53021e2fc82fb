"""Saving, all ranks together: at once, or in the background while training goes on.

    at once         write | agree | rank 0: commit | agree
    in background   copy to the host | a thread: write; rank 0's: wait for the others' parts, commit | agree, later

In the background nothing is sent: rank 0's thread looks for the files with which each rank says that it has written.
The ranks agree when the next save comes, or the end; there an error of any of them is raised on all. What a rank stands
still for is the copy of what it writes, into memory that is kept for the next time.

``save`` and ``load`` are for plain loops: an engine, its optimizer, and what else a loop wants to remember.
"""

from __future__ import annotations

import contextlib
import json
import math
import secrets
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, overload

import torch
from torch import nn

from paceline.checkpoint.find import Depth, Retention, apply_retention, clear_leftovers, find_checkpoint, spots_in
from paceline.checkpoint.manifest import HasShards, State, likely_line
from paceline.checkpoint.optimizer import held_by, restore
from paceline.checkpoint.read import HUGGING_FACE, LORA, file_shards, open_checkpoint
from paceline.checkpoint.storage import FileStore, storage_of
from paceline.checkpoint.tools.pretrained import load_model
from paceline.checkpoint.write import SaveTarget, commit, discard, own_shares, plain_state, write_part
from paceline.comm.base import Communicator
from paceline.comm.objects import ask_first_rank, gather_objects
from paceline.errors import CheckpointError, UsageError
from paceline.health.ledger_view import CHECKPOINT
from paceline.models.hugging_face import folder_files
from paceline.models.lora import A, adapters
from paceline.shards import FlatLayout, Shard, flat_layout

_ALIGN_BYTES = 64
_PAGE_BYTES = 4096
_PIECE = 2**21  # elements that are copied at once, where there is a pause behind them
_ALL = slice(None)
_LOOK_EVERY_S = 0.02
_LEAVE_S = 0.3  # for the parts of others that were as good as there
_VISIBLE_S = 60.0  # how long a shared file system may take to show what another host has written


class CheckpointWriter:
    """Writes the checkpoints of a run, one at a time. All ranks make the same calls."""

    def __init__(
        self, folder: Path, comm: Communicator, retention: Retention | None = None, storage: FileStore | None = None
    ) -> None:
        """Clears what killed saves have left; rank 0 gives this attempt a token that no other has."""
        self.folder = folder
        self._comm = comm
        self._retention = retention or Retention()
        self._storage = storage or storage_of(folder)
        token, rank, world = ask_first_rank(comm, self._begin), comm.rank, comm.size
        self._target = SaveTarget(folder=folder, step=0, rank=rank, world=world, token=token, storage=self._storage)
        self._stage = StagingBuffer()
        self._pending: _PendingSave | None = None
        self._newest: _PendingSave | None = None
        self._reports: list[tuple[int, dict[str, Any]]] = []

    def save(self, state: State, *, in_background: bool = False) -> Path:
        """Saves a state; returns where it is, or will be. Waits for the save before.

        Raises CheckpointError on all ranks where one cannot write, now or in the save before; older ones are intact.
        """
        self.finish()
        target = replace(self._target, step=state.step)
        self._pending = self._newest = save = _PendingSave(target, self._retention)
        try:
            save.plain = plain_state(state)
            if self._comm.rank == 0 and state.line is None:
                spots = list(spots_in(self.folder).values())
                save.plain = replace(save.plain, line=likely_line(state.step, spots))
            shares = own_shares(state.shards)
            save.shares = self._stage.copy(shares) if in_background else shares
        except Exception as error:  # whatever it is, the other ranks wait to hear of it
            save.problem = _describe(error)
        if in_background:
            save.start_thread()
        else:
            save.write()
            self.finish()
        return target.final

    def reserve(self, state: State, at_least: int = 0) -> bool:
        """Makes room for saves in the background of such a state, in a thread: the first of them takes less time.

        Does nothing, and says so, where no rank writes ``at_least`` bytes. All ranks call it; a small exchange.
        """
        shares = own_shares(state.shards)
        if max(gather_objects(self._comm, sum(share.tensor.nbytes for share in shares))) < at_least:
            return False
        self._stage.reserve(shares)
        return True

    def finish(self) -> None:
        """Waits for what is being written. Raises CheckpointError, on all ranks, if one of them could not."""
        pending = self._pending
        if pending is None:
            return
        pending.written.wait()
        problems = gather_objects(self._comm, pending.problem)
        self._pending = None
        reasons = [f"rank {rank}: {text}" if len(problems) > 1 else text for rank, text in enumerate(problems) if text]
        if reasons:
            if self._comm.rank == 0:
                discard(pending.target)
            pending.abandon()
            raise CheckpointError(reasons[0])
        pending.complete_agreed()
        ask_first_rank(self._comm, pending.check_committed)
        self._reports += pending.report(is_done=True)

    def leave(self) -> None:
        """Ends the thread that writes, soon: others have failed, and their parts may never come. Nothing is sent."""
        if self._newest is not None:  # also one that the ranks have agreed on, and that waits for a part to be seen
            self._newest.leave()

    def reports(self) -> list[tuple[int, dict[str, Any]]]:
        """Returns what saves took that came to an end since it was last asked, by step, as records have it."""
        if self._pending is not None:
            self._reports += self._pending.report(is_done=False)
        found, self._reports = self._reports, []
        return found

    def _begin(self) -> str:
        try:
            clear_leftovers(self.folder, storage=self._storage)
        except OSError as error:
            raise CheckpointError(f"cannot clear what killed saves have left in {self.folder}: {error}") from error
        return secrets.token_hex(4)


class StagingBuffer:
    """Host memory that a save in the background copies to: one buffer, made ahead, and kept for the next time.

    Pinned where the tensors are on a CUDA device. To map fresh pages takes longer than to copy into them, and to pin
    them longer still. So the buffer is made by a thread while the run trains towards its first save: ``reserve``, and
    then ``copy`` costs what moving the bytes does. Memory: what a rank writes.
    """

    def __init__(self) -> None:
        self.buffer = torch.empty(0, dtype=torch.uint8)
        self._thread: threading.Thread | None = None

    def reserve(self, shares: Sequence[Shard]) -> None:
        """Begins to make room for shares as large as these, in a thread. It does no harm if that fails."""
        if self._thread is not None:
            self._thread.join()
        length = _places(shares).length
        if self.buffer.numel() < length:
            self.buffer = torch.empty(0, dtype=torch.uint8)  # the old one is free before the new one is there
            args = length, _cuda_device(shares)
            self._thread = threading.Thread(target=self._make, args=args, name="staging buffer", daemon=True)
            self._thread.start()

    def copy(
        self,
        shares: Sequence[Shard],
        *,
        part: slice = _ALL,
        waits: bool = True,
        pause: Callable[[], object] | None = None,
    ) -> list[Shard]:
        """Returns copies of a part of shares, which last until the next time; on CUDA it ``waits`` until they are made.

        ``pause`` is called behind each piece, between which what a step sends to the host comes through.
        """
        if self._thread is not None:
            self._thread.join()
        places, device = _places(shares), _cuda_device(shares)
        if self.buffer.numel() < places.length:
            self.buffer = torch.empty(0, dtype=torch.uint8)
            self.buffer = torch.empty(places.length, dtype=torch.uint8, pin_memory=device is not None)
        staged = []
        for share, view in zip(shares[part], places.views(self.buffer)[part], strict=True):
            place = view.view(share.tensor.dtype)
            size = max(1, place.numel()) if pause is None else _PIECE
            pieces = (torch.split(each.view(-1), size) for each in (place, share.tensor))
            for piece, source in zip(*pieces, strict=True):
                piece.copy_(source, non_blocking=True)
                if pause is not None:
                    pause()
            staged.append(replace(share, tensor=place))
        if device is not None and waits:
            torch.cuda.synchronize(device)  # sync point: the next step may change what is being copied
        return staged

    def _make(self, length: int, device: torch.device | None) -> None:
        try:
            if device is not None:
                torch.cuda.set_device(device)  # a new thread has the first one, and would open it
                self.buffer = torch.empty(length, dtype=torch.uint8, pin_memory=True)
                return
            buffer = torch.empty(length, dtype=torch.uint8)
            buffer.numpy()[::_PAGE_BYTES] = 0  # by numpy: torch would start a second set of threads from here
            self.buffer = buffer
        except RuntimeError:
            return  # no memory: the save that needs it reports it


def _places(shares: Sequence[Shard]) -> FlatLayout:
    """Returns where the bytes of each share lie in the buffer."""
    return flat_layout([(share.tensor.nbytes,) for share in shares], align=_ALIGN_BYTES)


def _cuda_device(shares: Sequence[Shard]) -> torch.device | None:
    return next((share.tensor.device for share in shares if share.tensor.device.type == "cuda"), None)


class _PendingSave:
    """A save under way, written by the caller or by a thread, and what came of it."""

    def __init__(self, target: SaveTarget, retention: Retention) -> None:
        self.target = target
        self.plain: State | None = None
        self.shares: list[Shard] = []
        self.problem = ""
        self.commit_problem = ""
        self.written = threading.Event()
        self._is_agreed = threading.Event()
        self._is_abandoned = threading.Event()
        self._retention = retention
        self._thread: threading.Thread | None = None
        self._start = time.perf_counter()
        self._stall_s, self._total_s, self._num_bytes = 0.0, 0.0, 0
        self._is_reported = False

    def start_thread(self) -> None:
        self._stall_s = time.perf_counter() - self._start
        self._thread = threading.Thread(target=self._run, name=f"save {self.target.step}", daemon=True)
        self._thread.start()

    def write(self) -> None:
        try:
            if self.plain is not None and not self.problem:
                self._num_bytes = write_part(self.target, self.shares, self.plain)
        except Exception as error:  # all ranks hear of it when they next agree
            self.problem = _describe(error)
        self.shares = []
        self.written.set()

    def abandon(self) -> None:
        """Ends the thread, if there is one: another rank could not write."""
        if self._thread is not None:
            self._is_abandoned.set()
            self._thread.join()
            discard(self.target)

    def leave(self) -> None:
        if self._thread is not None:
            self._thread.join(_LEAVE_S)
            self._is_abandoned.set()

    def complete_agreed(self) -> None:
        self._is_agreed.set()
        if self._thread is None:
            self._complete()
        else:
            self._thread.join()

    def check_committed(self) -> None:
        """Raises CheckpointError if rank 0 could not make a checkpoint of what all have written."""
        if self.commit_problem:
            raise CheckpointError(self.commit_problem)

    def report(self, *, is_done: bool) -> list[tuple[int, dict[str, Any]]]:
        """Returns what it took on this rank, once: when it ``is_done``, or when its thread has ended well."""
        has_worked = self._thread is not None and not (self._thread.is_alive() or self.problem or self.commit_problem)
        if self._is_reported or not (is_done or has_worked):
            return []
        self._is_reported = True
        if self._thread is None:  # training stood still until now
            self._stall_s = self._total_s = time.perf_counter() - self._start
        times = {"seconds": round(self._total_s, 4), "stall_seconds": round(self._stall_s, 4)}
        detail = {**times, "bytes": self._num_bytes, "background": self._thread is not None}
        return [(self.target.step, {"folder": str(self.target.folder), **detail})]

    def _run(self) -> None:
        self.write()
        self._complete()
        self._total_s = time.perf_counter() - self._start

    def _complete(self) -> None:
        """On rank 0, waits for the parts of all ranks, commits, and removes what is not kept."""
        target = self.target
        if target.rank or self.problem or self.plain is None:
            return
        try:
            if self._are_parts_there():
                commit(target, self.plain)
                apply_retention(target.folder, target.step, self._retention, target.storage, self.plain.line)
        except Exception as error:  # all ranks hear of it
            if not target.storage.names(target.final):
                discard(target)
            self.commit_problem = _describe(error)

    def _are_parts_there(self) -> bool:
        """Waits for the parts of all ranks; False: the save is abandoned.

        Raises CheckpointError if one does not appear soon after the ranks have agreed that all is written.
        """
        target, deadline = self.target, math.inf
        wanted = [f"rank-{rank:05d}.json" for rank in range(target.world)]
        while missing := set(wanted) - set(target.storage.names(target.partial)):
            if self._is_agreed.is_set():
                deadline = min(deadline, time.monotonic() + _VISIBLE_S)
            if self._is_abandoned.wait(_LOOK_EVERY_S):
                return False
            if time.monotonic() > deadline:
                what = f"rank {wanted.index(min(missing))} has written its part of {target.final}"
                fix = "all ranks write into one folder\n  set checkpoint.folder to one that all hosts share"
                raise CheckpointError(f"{what}, and rank 0 does not see it\n  {fix}")
        return True


@contextlib.contextmanager
def raised_on_all(comm: Communicator) -> Iterator[None]:
    """Raises CheckpointError on all ranks where the block fails on one, with the first rank's reason."""
    problem, cause = "", None
    try:
        yield
    except Exception as error:  # whatever it is, the other ranks wait to hear of it
        problem, cause = _describe(error), error
    for rank, text in enumerate(gather_objects(comm, problem)):
        if text:
            raise CheckpointError(f"rank {rank}: {text}") from cause


def _describe(error: Exception) -> str:
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


def warn_of(passed: object) -> None:
    warnings.warn(str(passed), stacklevel=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What a loop goes on from; ``own`` is what this rank had alone, None where there were more ranks, or fewer."""

    path: Path
    step: int
    extra: Any
    own: dict[str, Any] | None = None


def save(
    folder: str | Path,
    engine: HasShards,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int,
    extra: Any = None,
    own: dict[str, Any] | None = None,
    keep: int | None = None,
) -> Path:
    """Saves into ``folder/step-<step>``, each rank what it holds; of older ones the newest ``keep`` are left.

    Called by all ranks. ``extra`` is what else is to be remembered: plain values, those of rank 0; ``own`` those that
    each rank has alone. Raises CheckpointError on all ranks if one cannot write; older checkpoints are intact then.
    """
    _enter(engine)
    writer = CheckpointWriter(Path(folder), engine.world, Retention(last=keep))
    shards, found = held_by(engine, optimizer)
    shards += file_shards(_model_files(engine), engine.world.rank)
    values = {"extra": extra}
    return writer.save(State(step=step, position=0, shards=shards, values=values, own=own or {}, found=found))


def _model_files(engine: Any) -> dict[str, bytes]:
    """Returns what an export needs to know of a model: a Hugging Face model's config, and who has adapters."""
    module = getattr(engine, "module", None)
    if not isinstance(module, nn.Module):
        return {}
    files = {HUGGING_FACE + name: content for name, content in folder_files(module).items()}
    if any(name.endswith(f".{A}") for name in engine.state_names()):
        pairs = [(each.name, each.tensor if each.parameter is None else each.parameter) for each in engine.shards()]
        parts = list(module) if isinstance(module, nn.ModuleList) else [module]  # stages of a pipeline
        own = adapters(parts, [name for name, parameter in pairs if parameter.requires_grad])
        found = {name: each for rank in gather_objects(engine.world, own) for name, each in rank.items()}
        files[LORA] = json.dumps(found).encode()
    return files


@overload
def load(path: str | Path, *, classes: Sequence[str] | None = None, **model: Any) -> nn.Module: ...


@overload
def load(
    path: str | Path, engine: HasShards, optimizer: torch.optim.Optimizer | None = None, *, verify: Depth = "full"
) -> Loaded: ...


def load(
    path: str | Path,
    engine: HasShards | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    verify: Depth = "full",
    **model: Any,
) -> Loaded | nn.Module:
    """Loads a checkpoint, or the newest whole one of a folder, into an engine of any strategy and number of ranks.

    Called by all ranks, which read what rank 0 chooses. Newer ones that it passes over are warned of, with the reason.
    Raises CheckpointError on all of them if one cannot.

    Without an engine, ``path`` is a folder of Hugging Face. What comes back is its model without values: give it to
    ``parallelize``, whose ranks read the bytes that they hold. Keys are those of ``model: {kind: hf}`` in a config:
    ``task``, ``fresh``, ``lora={"rank": 8}`` or ``lora={"path": folder}``. ``classes`` names those of a new head.
    """
    if engine is None:
        return load_model(Path(path), **model)
    if model:
        rule = "keys of a model are for a folder of Hugging Face, which is read without an engine"
        raise UsageError(f"{', '.join(model)} beside an engine\n  {rule}\n  leave out one of them")
    _enter(engine)
    chosen = ask_first_rank(engine.world, lambda: find_checkpoint(str(path), Path(path), verify, warn_of))
    with raised_on_all(engine.world):
        checkpoint = open_checkpoint(chosen)
        restore(checkpoint, engine, optimizer, "build both as they were when it was saved")
        is_same = checkpoint.manifest.world == engine.world.size
        own = checkpoint.own(engine.world.rank) if is_same else None
        return Loaded(path=chosen, step=checkpoint.step, extra=checkpoint.values.get("extra"), own=own)


def _enter(engine: HasShards) -> None:
    if engine.world.ledger is not None:  # the rank saves or loads until the next pass begins
        engine.world.ledger.enter(CHECKPOINT)
