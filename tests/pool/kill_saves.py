"""Saves that are killed at any byte: run as a program, which forks one process for each kill.

    python -m kill_saves FOLDER FIRST_SEED NUMBER RANKS

A child saves steps 1, 2, 3 on two virtual ranks and tells of each that is there for good; it kills itself with SIGKILL
in the middle of one of its operations on files, drawn by a seed. After it the parent looks for a checkpoint as a start
does. That is done NUMBER times; then single real ranks are killed while they save, RANKS times (``kill_ranks.py``).
Prints one JSON object for each kill.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
from pathlib import Path

import torch
from deadly_files import DeadlyFiles
from kill_ranks import kill_ranks

from paceline.checkpoint import CheckpointWriter, Retention, State, find_checkpoint, list_checkpoints, open_checkpoint
from paceline.comm.base import Communicator
from paceline.comm.solo import SoloCommunicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.errors import CheckpointError
from paceline.shards import Shard, whole_region

STEPS = 3
OPERATIONS = 95  # about as many as three saves take


def save_steps(folder: Path, seed: int, tell: int) -> None:
    """What a child does."""
    draw = random.Random(seed)
    files = DeadlyFiles(draw, draw.randrange(OPERATIONS))

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
    folder, first, number, ranks = Path(sys.argv[1]), *map(int, sys.argv[2:])
    for seed in range(first, first + number):
        sys.stdout.write(json.dumps(try_one(folder / "checkpoints", seed)) + "\n")
    for found in kill_ranks(folder / "ranks", range(first, first + ranks)):
        sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
