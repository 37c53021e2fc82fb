"""One real rank of two that is killed while it saves: the other lives on for a moment, as in every run.

Two processes train over Gloo or shared memory, with the saver of every run, at once or in the background. One of them
is killed with SIGKILL: by itself in the middle of an operation on files, or by the parent at some moment after a save
has begun. Everything but the moment itself is drawn by a seed. Then a start looks for a checkpoint, and two new
processes go on from it to the end. What was found, and what the run comes to, is compared with an undisturbed run.
"""

from __future__ import annotations

import importlib
import os
import random
import shutil
import signal
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
from deadly_files import DeadlyFiles
from free_ports import free_port

from paceline.checkpoint import find_checkpoint, list_checkpoints, open_checkpoint
from paceline.comm.torch_dist import connect
from paceline.config import CheckpointConfig, config_from_dict
from paceline.errors import CheckpointError, CommunicationError
from paceline.run.processes import loopback_interface
from paceline.train.assemble import build_trainer
from paceline.train.survive.hooks import Saver

RANKS, STEPS, EVERY = 2, 8, 2
LOST, WRONG = 3, 4  # how a process ends that has lost the other, and one that should not have failed
PATIENCE_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """How a run saves, and how one of its ranks dies. ``victim`` None: none does, and everything is kept."""

    seed: int
    in_background: bool
    backend: Literal["gloo", "shared_memory"]
    victim: int | None = None
    last: int | None = None  # the operation on files in which it dies; None: the parent kills it
    step: int = 0  # then the save that has begun
    delay_s: float = 0.0  # and for how long
    is_ended: bool = True  # the other rank is killed too, as a launcher does; else it finds out by itself


def saves_in_background(seed: int) -> bool:
    """Says how the run of a seed saves."""
    return seed // 2 % 2 == 1


def draw_case(seed: int, operations: dict[bool, list[int]]) -> Case:
    """Draws one; ``operations``: how many each rank does in a whole run, by whether that saves in the background."""
    draw, victim, in_background = random.Random(f"rank {seed}"), seed % 2, saves_in_background(seed)
    by_itself = draw.random() < 0.6
    return Case(
        seed=seed,
        in_background=in_background,
        backend=draw.choice(("gloo", "shared_memory")),
        victim=victim,
        last=draw.randrange(operations[in_background][victim]) if by_itself else None,
        step=draw.randrange(EVERY, STEPS + 1, EVERY),
        delay_s=draw.random() * 0.006,
        is_ended=draw.random() < 0.5,
    )


class ToldFiles(DeadlyFiles):
    """Files that tell the parent, by three bytes, which rank begins to save which step."""

    def __init__(self, case: Case, rank: int, tell: int) -> None:
        super().__init__(random.Random(case.seed), case.last if rank == case.victim else None)
        self._rank, self._tell = rank, tell

    def make_folder(self, path: Path) -> None:
        """Makes a folder, after it was told."""
        if path.name.startswith(".step-"):
            os.write(self._tell, bytes([self._rank, ord("b"), int(path.name[6:14])]))
        super().make_folder(path)


def train(rank: int, port: int, folder: Path, case: Case, tell: int) -> None:
    """What a rank does: it goes on from the newest checkpoint to the end."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(RANKS),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME=loopback_interface(),
    )
    comm = connect(case.backend, device="cpu", timeout_s=PATIENCE_S)
    config = config_from_dict(
        {
            "model": {"kind": "mlp", "hidden_dim": 32, "dropout": 0.2},
            "data": {"kind": "synthetic_classification", "samples": 20, "features": 16, "classes": 4},
            "train": {"steps": STEPS, "global_batch": 8},
            "parallel": {"ranks": RANKS, "strategy": "zero2"},
        }
    )
    trainer, files = build_trainer(config, comm), ToldFiles(case, rank, tell)
    keep = STEPS if case.victim is None else 2
    policy = CheckpointConfig(every_steps=EVERY, asynchronous=case.in_background, keep=keep)
    saver = Saver(folder, policy, storage=files)
    if list_checkpoints(folder):
        trainer.load_state(open_checkpoint(find_checkpoint("auto", folder)))
    for result in trainer.steps():
        saver(trainer, result)
        if saver.last_saved == result.step and not (case.in_background and not result.is_last):
            os.write(tell, bytes([rank, ord("d"), result.step]))
    os.write(tell, bytes([rank, ord("n"), min(files.count, 255)]))


class Attempt:
    """Two ranks as processes, and what they have told."""

    def __init__(self, folder: Path, case: Case) -> None:
        self.told: list[tuple[int, str, int]] = []
        self._read, write = os.pipe()
        port = free_port()
        self.pids = [self._start(rank, port, folder, case, write) for rank in range(RANKS)]
        os.close(write)
        self.codes: dict[int, int] = {}

    def _start(self, rank: int, port: int, folder: Path, case: Case, write: int) -> int:
        pid = os.fork()
        if pid:
            return pid
        code = 0
        try:
            os.close(self._read)
            train(rank, port, folder, case, write)
        except CommunicationError:
            code = LOST
        except BaseException:
            traceback.print_exc()
            code = WRONG
        os._exit(code)

    def hear(self) -> bool:
        """Waits for one thing that is told; False when both are gone."""
        part = os.read(self._read, 3)  # three bytes are written at once or not at all
        if part:
            self.told.append((part[0], chr(part[1]), part[2]))
        return bool(part)

    def wait(self, rank: int) -> int:
        """Waits for the end of a rank; returns its code, or minus the signal. One that takes too long is killed."""
        deadline = time.monotonic() + PATIENCE_S
        while rank not in self.codes:
            pid, status = os.waitpid(self.pids[rank], os.WNOHANG)
            if pid:
                self.codes[rank] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadline:
                self.kill(rank)
            else:
                time.sleep(0.001)
        return self.codes[rank]

    def kill(self, rank: int) -> None:
        """Kills a rank that may be gone."""
        if rank not in self.codes:
            os.kill(self.pids[rank], signal.SIGKILL)

    def close(self) -> list[int]:
        """Hears the rest; returns how each ended."""
        while self.hear():
            pass
        os.close(self._read)
        return [self.wait(rank) for rank in range(RANKS)]


def kill_ranks(folder: Path, seeds: Sequence[int]) -> Iterator[dict[str, object]]:
    """Kills a rank for each seed; says what came of it."""
    importlib.import_module("torch._dynamo")  # which optimizers load, and every process would by itself
    whole = folder / "whole"
    operations = {each: _undisturbed(whole, each) for each in sorted(set(map(saves_in_background, seeds)))}
    for seed in seeds:
        yield _try_one(folder / str(seed), whole, draw_case(seed, operations))


def _undisturbed(folder: Path, in_background: bool) -> list[int]:
    """Trains from the beginning to the end; returns how many operations on files each rank did."""
    shutil.rmtree(folder, ignore_errors=True)
    attempt = Attempt(folder, Case(seed=0, in_background=in_background, backend="gloo"))
    assert attempt.close() == [0] * RANKS
    return [next(count for told, kind, count in attempt.told if (told, kind) == (rank, "n")) for rank in range(RANKS)]


def _try_one(folder: Path, whole: Path, case: Case) -> dict[str, object]:
    assert case.victim is not None
    shutil.rmtree(folder, ignore_errors=True)
    attempt, other = Attempt(folder, case), 1 - case.victim
    if case.last is None:
        while attempt.hear():
            if attempt.told[-1] == (case.victim, "b", case.step):
                time.sleep(case.delay_s)
                attempt.kill(case.victim)
                break
    attempt.wait(case.victim)
    if case.is_ended:
        attempt.kill(other)
    codes = attempt.close()
    passed: list[str] = []
    found = _found(folder, passed)
    is_right = found == 0 or _is_same(folder, whole, found)
    again = Attempt(folder, Case(seed=0, in_background=case.in_background, backend=case.backend, victim=None))
    ends = again.close()
    return {
        **asdict(case),
        "every": EVERY,
        "lost": LOST,
        "codes": codes,
        "begun": max((step for _, kind, step in attempt.told if kind == "b"), default=0),
        "promised": max((step for _, kind, step in attempt.told if kind == "d"), default=0),
        "found": found,
        "passed_over": passed,
        "is_right": is_right,
        "goes_on": ends == [0] * RANKS and _is_same(folder, whole, STEPS),
        "left": [path.name for path in folder.glob(".*")],
    }


def _found(folder: Path, passed: list[str]) -> int:
    """Returns the step that a start would go on from; 0: the beginning."""
    try:
        return open_checkpoint(find_checkpoint("auto", folder, tell=lambda each: passed.append(str(each)))).step
    except CheckpointError:
        passed += [path.name for path in list_checkpoints(folder)]
        return 0


def _is_same(folder: Path, whole: Path, step: int) -> bool:
    """Says whether a checkpoint has every bit of the one that nobody disturbed."""
    name = f"step-{step:08d}"
    ours, theirs = open_checkpoint(folder / name), open_checkpoint(whole / name)
    names = theirs.shapes()
    is_same = ours.shapes() == names and ours.values == theirs.values
    return is_same and all(torch.equal(ours.read(each), theirs.read(each)) for each in names)
