"""What ranks are given to do in tests of several files; new processes import functions by their module's name."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any, NoReturn

import torch

from paceline.comm.base import Communicator


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
