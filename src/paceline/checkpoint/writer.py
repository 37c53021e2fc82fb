"""Saving, all ranks together: at once, or in the background while training goes on.

    at once         write | agree | rank 0: commit | agree
    in background   copy to the host | a thread: write; rank 0's: wait for the others' parts, commit | agree, later

In the background nothing is sent: rank 0's thread looks for the files with which each rank says that it has written.
The ranks agree when the next save comes, or the end; there an error of any of them is raised on all. What a rank stands
still for is the copy of what it writes, into memory that is kept for the next time.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from paceline.checkpoint.find import spots_in
from paceline.checkpoint.manifest import State, likely_line
from paceline.checkpoint.retention import Retention, apply_retention, clear_leftovers
from paceline.checkpoint.storage import FileStore, LocalFiles, put_in_place, storage_of
from paceline.checkpoint.write import (
    RankShare,
    SaveTarget,
    commit,
    discard,
    missing_parts,
    own_shares,
    plain_state,
    write_part,
)
from paceline.comm.base import Communicator
from paceline.comm.objects import ask_first_rank, gather_objects
from paceline.errors import CheckpointError

_ALIGN_BYTES = 64
_PAGE_BYTES = 4096
_LOOK_EVERY_S = 0.02
_VISIBLE_S = 60.0  # how long a shared file system may take to show what another host has written


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveReport:
    """What a save took on this rank: how long training stood still, how long it was under way, and its bytes."""

    step: int
    stall_s: float
    total_s: float
    num_bytes: int
    is_background: bool


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
        self._token = ask_first_rank(comm, self._begin)
        self._stage = StagingBuffer()
        self._pending: _PendingSave | None = None
        self._reports: list[SaveReport] = []

    def save(self, state: State, *, in_background: bool = False) -> Path:
        """Saves a state; returns where it is, or will be. Waits for the save before.

        Raises CheckpointError on all ranks where one cannot write, now or in the save before; older ones are intact.
        """
        self.finish()
        target = SaveTarget(
            folder=self.folder,
            step=state.step,
            rank=self._comm.rank,
            world=self._comm.size,
            token=self._token,
            storage=self._storage,
        )
        self._pending = save = _PendingSave(target, self._retention)
        try:
            save.plain = self._plain(state)
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
        """Makes room for saves in the background of a state as large as this one, in a thread.

        Without it the first of them takes longer. Does nothing, and says so, where no rank writes ``at_least`` bytes.
        All ranks call it; a small exchange.
        """
        shares = own_shares(state.shards)
        if max(gather_objects(self._comm, sum(share.flat.nbytes for share in shares))) < at_least:
            return False
        self._stage.reserve(shares)
        return True

    def finish(self) -> None:
        """Waits for what is being written. Raises CheckpointError, on all ranks, if one of them could not."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        pending.written.wait()
        try:
            self._agree(pending.target, pending.problem)
        except CheckpointError:
            pending.abandon()
            raise
        pending.complete_agreed()
        ask_first_rank(self._comm, pending.check_committed)
        self._reports += pending.take_report()

    def reports(self) -> list[SaveReport]:
        """Returns what has come to an end since it was last asked. Sends nothing."""
        if self._pending is not None and self._pending.has_worked():
            self._reports += self._pending.take_report()
        found, self._reports = self._reports, []
        return found

    def _begin(self) -> str:
        try:
            clear_leftovers(self.folder, storage=self._storage)
        except OSError as error:
            raise CheckpointError(f"cannot clear what killed saves have left in {self.folder}: {error}") from error
        return secrets.token_hex(4)

    def _plain(self, state: State) -> State:
        """Copies the values of a state; on rank 0 with its line."""
        plain = plain_state(state)
        if self._comm.rank or state.line is not None:
            return plain
        return replace(plain, line=likely_line(state.step, list(spots_in(self.folder, self._storage).values())))

    def _agree(self, target: SaveTarget, problem: str) -> None:
        """Raises CheckpointError on all ranks if one has a problem; a small exchange."""
        problems = gather_objects(self._comm, problem)
        reasons = [f"rank {rank}: {text}" if len(problems) > 1 else text for rank, text in enumerate(problems) if text]
        if reasons:
            if self._comm.rank == 0:
                discard(target)
            raise CheckpointError(reasons[0])


def copy_checkpoint(path: Path, name: str) -> Path:
    """Copies a checkpoint to the folder ``name`` beside it, which retention leaves alone; replaces an older copy.

    The copy is made under a temporary name, so a kill while it is made leaves the older one. A kill between the two
    renames leaves the older one under the name ``.<name>.old``. Files are shared with the original where they can be.
    """
    final, partial, files = path.parent / name, path.parent / f".{name}.new", LocalFiles()
    try:
        files.remove(partial)
        shutil.copytree(path, partial, copy_function=_link)
        put_in_place(files, partial, final)
    except OSError as error:  # shutil.Error is one
        shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(f"cannot copy {path} to {final}: {error}\n  {path} itself is complete") from error
    return final


def _link(source: str, target: str) -> str:
    try:
        os.link(source, target)
    except OSError:  # a file system without links
        shutil.copy2(source, target)
    return target


class StagingBuffer:
    """Host memory that a save in the background copies to: one buffer, made ahead, and kept for the next time.

    Pinned where the tensors are on a CUDA device. To map fresh pages takes longer than to copy into them, and to pin
    them longer still. So the buffer is made by a thread while the run trains towards its first save: ``reserve``, and
    then ``copy`` costs what moving the bytes does. Memory: what a rank writes.
    """

    def __init__(self) -> None:
        self.buffer = torch.empty(0, dtype=torch.uint8)
        self._thread: threading.Thread | None = None

    def reserve(self, shares: Sequence[RankShare]) -> None:
        """Begins to make room for shares as large as these, in a thread. It does no harm if that fails."""
        self._wait()
        length = _offsets(shares)[-1]
        if self.buffer.numel() < length:
            self.buffer = torch.empty(0, dtype=torch.uint8)  # the old one is free before the new one is there
            self._thread = threading.Thread(
                target=self._make, args=(length, _cuda_device(shares)), name="staging buffer", daemon=True
            )
            self._thread.start()

    def copy(self, shares: Sequence[RankShare]) -> list[RankShare]:
        """Returns copies of shares, which last until the next time. Waits until they are made."""
        self._wait()
        offsets, device = _offsets(shares), _cuda_device(shares)
        if self.buffer.numel() < offsets[-1]:
            self.buffer = torch.empty(0, dtype=torch.uint8)
            self.buffer = torch.empty(offsets[-1], dtype=torch.uint8, pin_memory=device is not None)
        staged = []
        for share, offset in zip(shares, offsets, strict=False):
            place = self.buffer[offset : offset + share.flat.nbytes].view(share.flat.dtype)
            place.copy_(share.flat, non_blocking=True)
            staged.append(replace(share, flat=place))
        if device is not None:
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

    def _wait(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()


def _offsets(shares: Sequence[RankShare]) -> list[int]:
    """Returns where each share begins, and last where all end."""
    offsets = [0]
    for share in shares:
        offsets.append(offsets[-1] + -(-share.flat.nbytes // _ALIGN_BYTES) * _ALIGN_BYTES)
    return offsets


def _cuda_device(shares: Sequence[RankShare]) -> torch.device | None:
    return next((share.flat.device for share in shares if share.flat.device.type == "cuda"), None)


class _PendingSave:
    """A save under way, written by the caller or by a thread, and what came of it."""

    def __init__(self, target: SaveTarget, retention: Retention) -> None:
        self.target = target
        self.plain: State | None = None
        self.shares: list[RankShare] = []
        self.problem = ""
        self.commit_problem = ""
        self.written = threading.Event()
        self._is_agreed = threading.Event()
        self._is_abandoned = threading.Event()
        self._retention = retention
        self._thread: threading.Thread | None = None
        self._start = time.perf_counter()
        self._stall_s, self._total_s, self._num_bytes = 0.0, 0.0, 0
        self._is_taken = False

    def has_worked(self) -> bool:
        is_over = self._thread is not None and not self._thread.is_alive()
        return is_over and not (self.problem or self.commit_problem)

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

    def complete_agreed(self) -> None:
        """Sees a save to its end that all ranks have written."""
        self._is_agreed.set()
        if self._thread is None:
            self._complete()
        else:
            self._thread.join()

    def check_committed(self) -> None:
        """Raises CheckpointError if rank 0 could not make a checkpoint of what all have written."""
        if self.commit_problem:
            raise CheckpointError(self.commit_problem)

    def take_report(self) -> list[SaveReport]:
        """Returns what it took, once."""
        if self._is_taken:
            return []
        self._is_taken = True
        if self._thread is None:  # training stood still until now
            self._stall_s = self._total_s = time.perf_counter() - self._start
        return [
            SaveReport(
                step=self.target.step,
                stall_s=self._stall_s,
                total_s=self._total_s,
                num_bytes=self._num_bytes,
                is_background=self._thread is not None,
            )
        ]

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
        deadline: float | None = None
        while missing := missing_parts(self.target):
            if deadline is None and self._is_agreed.is_set():
                deadline = time.monotonic() + _VISIBLE_S
            if self._is_abandoned.wait(_LOOK_EVERY_S):
                return False
            if deadline is not None and time.monotonic() > deadline:
                raise CheckpointError(
                    f"rank {missing[0]} has written its part of {self.target.final}, and rank 0 does not see it\n"
                    "  all ranks write into one folder\n  set checkpoint.folder to one that all hosts share"
                )
        return True


@contextlib.contextmanager
def raised_on_all(comm: Communicator, what: str = "") -> Iterator[None]:
    """Raises CheckpointError on all ranks where the block fails on one: ``what``, and the first rank's reason."""
    problem, cause = "", None
    try:
        yield
    except Exception as error:  # whatever it is, the other ranks wait to hear of it
        problem, cause = what + _describe(error), error
    for rank, text in enumerate(gather_objects(comm, problem)):
        if text:
            raise CheckpointError(f"rank {rank}: {text}") from cause


def _describe(error: Exception) -> str:
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
