"""Real NCCL ranks that share one GPU, for tests.

NCCL refuses two ranks on one GPU of the same host. A host is what ``NCCL_HOSTID`` says, so here every process is a host
of its own, with one GPU, and they talk over sockets on the loopback interface. All else is as in ``gloo_pool.py``:

    def test_sum(nccl_pool: NcclPool) -> None:
        assert nccl_pool.run(sum_of_ranks, 1.0, ranks=2) == [3.0, 3.0]

Workers are started, not forked: CUDA does not survive a fork. What they print goes to a file each, whose end is told
with an error. When a rank has failed, the others have ten seconds: they may wait for it inside a kernel.
"""

from __future__ import annotations

from pathlib import Path

import torch
from fork_server import plain_popen
from gloo_pool import GlooPool, Worker

from paceline.comm.base import Communicator
from paceline.run.processes import loopback_interface


def sum_of_ones(comm: Communicator) -> float:
    """The first thing that ranks do: if this works, they can share the GPU."""
    total = torch.ones(1, device=comm.device)
    comm.all_reduce(total).wait()
    return total.item()


def own_host(number: int) -> dict[str, str]:
    """Returns variables that make a process a host of its own to NCCL. It reads them once in its life."""
    return {
        "NCCL_HOSTID": f"host{number}",
        "NCCL_SOCKET_IFNAME": loopback_interface(),
        "NCCL_IB_DISABLE": "1",
        # After an error torch waits four times as long, a minute by default, for others to write down what they did.
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "250",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    }


class NcclPool(GlooPool):
    """Workers that share the first GPU."""

    backend = "nccl"
    group_timeout_s = 30.0
    timeout_s = 45.0
    patience_s = 10.0

    def __init__(self, folder: Path, ranks: int = 4) -> None:
        """Takes a folder for what workers print; so many are started at once, as each takes seconds to load torch."""
        super().__init__()
        self._folder = folder
        self._workers = [self.start_worker(rank) for rank in range(ranks)]

    def start_worker(self, rank: int) -> Worker:
        return Worker(plain_popen, self._folder / f"worker-{rank}.log", **own_host(rank))

    def printed(self) -> str:
        """Returns all that workers have printed so far."""
        return "".join(path.read_text(errors="replace") for path in sorted(self._folder.glob("worker-*.log")))
