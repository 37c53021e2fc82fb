"""What new processes are given to do in tests of ``run_processes``, which imports functions by their module's name."""

from __future__ import annotations

import os
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


def return_a_function(comm: Communicator) -> Any:
    """Returns what cannot be sent back."""
    return lambda: comm


def wait_for_nobody(comm: Communicator) -> NoReturn:
    """Never returns."""
    while True:
        comm.barrier()


def where_am_i(comm: Communicator) -> tuple[int, str, str]:
    """Says how many ranks there are, and where this one was put."""
    return comm.size, str(Path.cwd()), os.environ["MASTER_ADDR"]
