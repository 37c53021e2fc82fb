"""Saves that are killed at any byte: run as a program, which forks one process for each kill.

    python kill_saves.py FOLDER FIRST_SEED NUMBER

A child saves steps 1, 2, 3 on two ranks and tells of each that is there for good; it kills itself with SIGKILL in the
middle of one of its operations on files, drawn by a seed. After it the parent looks for a checkpoint as a start does.
Prints one JSON object for each kill.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
from collections.abc import Iterable
from pathlib import Path

import torch

from paceline.checkpoint import CheckpointWriter, Retention, State, find_checkpoint, list_checkpoints, open_checkpoint
from paceline.checkpoint.manifest import SavedFile
from paceline.checkpoint.storage import LocalFiles
from paceline.comm.base import Communicator
from paceline.comm.solo import SoloCommunicator
from paceline.comm.virtual import run_virtual
from paceline.errors import CheckpointError
from paceline.layout import Shard, whole_region

STEPS = 3
OPERATIONS = 95  # about as many as three saves take


class DeadlyFiles(LocalFiles):
    """Files whose n-th operation is the last thing that the process does, half done or just done."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._left = self._random.randrange(OPERATIONS)

    def write(self, path: Path, chunks: Iterable[memoryview | bytes]) -> SavedFile:
        """Writes, and may die after some bytes of a chunk."""
        return super().write(path, self._watched(path, chunks))

    def _watched(self, path: Path, chunks: Iterable[memoryview | bytes]) -> Iterable[memoryview | bytes]:
        for chunk in chunks:
            if self._is_over():
                with path.open("ab") as file:
                    file.write(memoryview(chunk)[: self._random.randrange(len(chunk) + 1)])
                die()
            yield chunk
        self._pass()

    def rename(self, path: Path, to: Path) -> None:
        """Renames, and may die before or after."""
        self._pass()
        super().rename(path, to)
        self._pass()

    def settle(self, path: Path) -> None:
        """Settles, and may die after it."""
        super().settle(path)
        self._pass()

    def make_folder(self, path: Path) -> None:
        """Makes a folder, and may die after it."""
        super().make_folder(path)
        self._pass()

    def remove(self, path: Path) -> None:
        """Removes a folder, and may die when some of it is gone."""
        for name in self.names(path):
            self._pass()
            (path / name).unlink()
        super().remove(path)

    def _is_over(self) -> bool:
        self._left -= 1
        return self._left < 0

    def _pass(self) -> None:
        if self._is_over():
            die()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def save_steps(folder: Path, seed: int, tell: int) -> None:
    """What a child does."""
    files = DeadlyFiles(seed)

    def work(comm: Communicator) -> None:
        writer = CheckpointWriter(folder, comm, Retention(last=2), files)
        for step in range(1, STEPS + 1):
            writer.save(make_state(comm, step), in_background=seed % 2 == 1)
            if seed % 2 == 0 or step == STEPS:
                writer.finish()
            committed = step if seed % 2 == 0 or step == STEPS else step - 1  # a save waits for the one before
            if comm.rank == 0:
                os.write(tell, bytes([committed]))

    run_virtual(work, 2)


def make_state(comm: Communicator, step: int) -> State:
    values = torch.arange(40_000.0) * step
    shard = Shard(name="model/w", region=whole_region(values.shape), tensor=values, copy=comm.rank, copies=comm.size)
    return State(step=step, position=step, shards=[shard], own={"rank": comm.rank})


def try_one(folder: Path, seed: int) -> dict[str, object]:
    """Lets a child die, and starts again."""
    shutil.rmtree(folder, ignore_errors=True)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        save_steps(folder, seed, write)
        os._exit(0)
    os.close(write)
    told = b""
    while part := os.read(read, 64):
        told += part
    os.close(read)
    _, status = os.waitpid(child, 0)
    promised = max(told, default=0)
    CheckpointWriter(folder, SoloCommunicator(torch.device("cpu")))  # the next start clears what is left
    try:
        path = find_checkpoint("auto", folder)
        found = open_checkpoint(path).step
        is_right = torch.equal(open_checkpoint(path).read("model/w"), torch.arange(40_000.0) * found)
    except CheckpointError:
        found, is_right = 0, promised == 0
    left = [path.name for path in folder.glob(".*")] if folder.is_dir() else []
    whole = [path.name for path in list_checkpoints(folder)]
    return {
        "seed": seed,
        "killed": os.WIFSIGNALED(status),
        "promised": promised,
        "found": found,
        "is_right": is_right,
        "left": left,
        "whole": whole,
    }


def main() -> None:
    torch.set_num_threads(1)
    os.fsync = lambda _: None  # processes die here, and no machine
    folder, first, number = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    for seed in range(first, first + number):
        sys.stdout.write(json.dumps(try_one(folder / "checkpoints", seed)) + "\n")


if __name__ == "__main__":
    main()
