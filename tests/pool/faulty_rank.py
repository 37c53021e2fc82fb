"""One rank of a small loop that goes wrong on rank 1 in a way that is asked for: what verdicts are tested on.

    python -m faulty_rank FOLDER FAULT BACKEND [HOST]

With a host's name, the ranks watch themselves, as those of a launcher that knows nothing of verdicts do.

Lines that a verdict is to name end in ``# stands here: <fault>``.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections import deque
from itertools import count
from pathlib import Path

import torch

from paceline.comm.base import Communicator
from paceline.comm.ledger.ledger import Ledger
from paceline.comm.torch_dist import connect, disconnect
from paceline.health.verdict import HangLimits
from paceline.run.notes import note_process
from paceline.run.watch import WatchPolicy, keep_ledger, watch_itself
from paceline.run.whereami import HOST

ROUNDS = 6
BAD_ROUND = 3
GUILTY = 1


def data(fault: str, is_bad: bool) -> torch.Tensor:
    """Reads a batch."""
    if is_bad and fault == "loader":
        time.sleep(600)  # stands here: loader
    return torch.ones(4)


def compute(fault: str, is_bad: bool) -> None:
    """Takes its time."""
    if is_bad and fault == "loop":
        deque(count(), maxlen=0)  # stands here: loop
    if is_bad and fault == "sleep":
        time.sleep(600)  # stands here: sleep
    if is_bad and fault == "dead":
        os.kill(os.getpid(), 9)


def one_round(comm: Communicator, ledger: Ledger, fault: str, is_bad: bool) -> None:
    """Adds up, and tells the others: what every rank does in every round."""
    ledger.enter("data")
    value = data(fault, is_bad)
    ledger.enter("forward")
    compute(fault, is_bad)
    ledger.enter("backward")
    if is_bad and fault == "order":
        comm.broadcast(value).wait()  # stands here: order
        comm.all_reduce(value).wait()
        return
    if is_bad and fault == "shape":
        comm.all_reduce(torch.ones(5)).wait()  # stands here: shape
    elif not (is_bad and fault == "skip"):
        comm.all_reduce(value).wait()
    comm.broadcast(value).wait()  # stands here: skip
    comm.barrier()


def end_with_test() -> None:
    """Lets the kernel kill this process with its parent: a loop that holds the interpreter has no thread to do it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def main() -> None:
    """Runs a rank."""
    folder, fault, backend = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    rank = int(os.environ["RANK"])
    end_with_test()
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    note_process(folder, rank)
    comm = keep_ledger(connect(backend, timeout_s=120.0), folder)  # type: ignore[arg-type]
    if len(sys.argv) > 4:
        policy = WatchPolicy(limits=HangLimits(step_s=2.0, setup_s=100.0))
        os.environ[HOST] = sys.argv[4]
        watch_itself(comm, folder, policy)
    for number in count() if fault == "endless" else range(ROUNDS):
        one_round(comm, comm.ledger, fault, number == BAD_ROUND and rank == GUILTY)
        comm.ledger.count_step()
        if number == BAD_ROUND:
            (folder / f"came-{rank}").touch()
    comm.ledger.finish()
    disconnect()


if __name__ == "__main__":
    main()
