"""What ranks are given to do in tests of several files; new processes import functions by their module's name."""

from __future__ import annotations

import atexit
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

import torch

import paceline
from paceline.comm.base import Communicator
from paceline.comm.meeting import join_store
from paceline.comm.objects import gather_objects
from paceline.comm.torch_dist import connect


class UnpicklableError(Exception):
    """An error whose arguments are not those it is made from."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(f"{reason} on rank {rank}")


def add_in_place(comm: Communicator, tensor: torch.Tensor, factor: float) -> dict[str, Any]:
    """Changes its argument and returns it, with what all ranks have."""
    tensor += comm.rank + 1
    total = tensor * factor
    comm.all_reduce(total).wait()
    return {"rank": comm.rank, "size": comm.size, "tensor": tensor, "total": total, "threads": torch.get_num_threads()}


def fail_on_last(comm: Communicator) -> None:
    """Raises on the last rank while the others wait for it."""
    if comm.rank == comm.size - 1:
        raise UnpicklableError(comm.rank, "a bad sample")
    comm.barrier()


def die_on_last(comm: Communicator) -> None:
    """Ends the last rank's process while the others wait for it."""
    if comm.rank == comm.size - 1:
        os._exit(7)
    comm.barrier()


def return_a_lock(comm: Communicator) -> Any:
    """Returns what cannot be sent back."""
    del comm
    return threading.Lock()


def wait_for_nobody(comm: Communicator) -> NoReturn:
    """Never returns."""
    while True:
        comm.barrier()


def where_am_i(comm: Communicator) -> tuple[int, str]:
    """Says how many ranks there are, and where this one was put."""
    comm.barrier()  # a rank that leaves while another still joins ends that one's joining
    return comm.size, str(Path.cwd())


def groups_in_any_order(comm: Communicator) -> list[tuple[int, tuple[int, ...], list[float]]]:
    """Makes groups in another order, and another number of them, on each rank; returns who met whom in each."""
    asked = {0: [[3, 0]], 1: [[1, 2], [1, 2]], 2: [[2, 3], [1, 2], [1, 2]], 3: [[2, 3], [3, 0]]}[comm.rank]
    found = []
    for ranks in asked:
        group = comm.split(ranks)
        gathered = torch.empty(2)
        group.all_gather(gathered, torch.tensor([float(comm.rank)])).wait()
        inner = group.split([1 - group.rank, group.rank] if group.rank else [group.rank, 1 - group.rank])
        assert inner.ranks == group.ranks
        found.append((group.rank, group.ranks, gathered.tolist()))
    return found


def note_exit(path: Path) -> None:
    path.touch()


def train_until_told(comm: Communicator, folder: Path, deaths: dict[int, int]) -> tuple[list[float], int]:
    """Trains and saves after each step; a rank of ``deaths`` dies once in that step. Goes on from what is saved."""
    with (folder / f"calls-{comm.rank}").open("a") as calls:
        calls.write(f"{os.getpid()}\n")
    atexit.register(note_exit, folder / f"exits-{comm.rank}-{time.monotonic_ns()}")
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
    engine = paceline.parallelize(model, comm, strategy="fsdp")
    optimizer = torch.optim.Adam(engine.parameters(), lr=0.01)
    with paceline.Run(comm, "loop", engine, optimizer, monitor={"folder": str(folder / "runs")}) as run:
        losses: list[float] = list(run.resume().get("losses", []))
        while len(losses) < 6:
            step = len(losses) + 1
            inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(step * 10 + comm.rank))
            loss = engine(inputs).square().mean()
            loss.backward()
            mark = folder / f"died-{step}"
            if deaths.get(step) == comm.rank and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
            optimizer.zero_grad()
            losses = [*losses, sum(gather_objects(comm, loss.item()))]
            run.save(losses=losses)
    return losses, os.getpid()


def die_after_others_return(comm: Communicator, folder: Path) -> int:
    """Rank 0 returns at once; rank 1 dies, once."""
    calls = len(list(folder.glob(f"call-{comm.rank}-*")))
    (folder / f"call-{comm.rank}-{calls}").touch()
    if comm.rank == 1 and not calls:
        os.kill(os.getpid(), signal.SIGKILL)
    return calls


def die_while_others_join() -> Communicator:
    """Connects; in the first attempt rank 1 dies instead, when rank 0 waits for it."""
    if (os.environ["RANK"], os.environ["MASTER_PORT"]) == ("1", "0"):
        join_store(60.0).wait(["default_pg/paceline arrived 0"])
        os.kill(os.getpid(), signal.SIGKILL)
    return connect("gloo", device="cpu")


def sum_of_ranks(comm: Communicator) -> float:
    total = torch.ones(1)
    comm.all_reduce(total).wait()
    return total.item()


def always_die(comm: Communicator) -> None:
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    comm.barrier()
