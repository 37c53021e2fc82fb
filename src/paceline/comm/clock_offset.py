"""How far the clocks of ranks are apart, by messages to and fro.

Of some rounds the fastest counts: half of its round trip is what the offset may be wrong by.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from paceline.comm.base import Communicator

_ROUNDS = 10


def clock_offset(comm: Communicator, read: Callable[[], float] = time.time) -> tuple[float, float]:
    """Returns how far this rank's clock is ahead of rank 0's, and by how much that may be wrong. All ranks call it.

    Costs ``2 x rounds`` messages a rank, one rank after the other. ``read`` reads the clock.
    """
    best = (float("inf"), 0.0)
    for rank in range(1, comm.size):
        for _ in range(_ROUNDS):
            if comm.rank == 0:
                ping = torch.zeros(1, dtype=torch.float64, device=comm.device)
                comm.recv(ping, rank).wait()
                ping.fill_(read())
                comm.send(ping, rank).wait()
            elif comm.rank == rank:
                pong = torch.zeros(1, dtype=torch.float64, device=comm.device)
                start = read()
                comm.send(pong, 0).wait()
                comm.recv(pong, 0).wait()
                reading, end = float(pong.item()), read()
                best = min(best, (end - start, (start + end) / 2 - reading))
    return (0.0, 0.0) if comm.rank == 0 else (best[1], best[0] / 2)
