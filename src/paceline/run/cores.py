"""Cores and memory that a rank on a CPU keeps.

Each rank keeps to its share of the host's cores. It and the threads of its backend wake one another all the time. Free
to go anywhere, they are moved to the cores of other ranks, and wait there for the scheduler's tick while the core that
they left has nothing to do.

Memory that a step frees is needed again in the next. Some builds of torch (those for ARM) use an allocator that gives
it back to the system after 10 ms; then every step takes page faults for all of its gradients.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence


def allocator_variables() -> dict[str, str]:
    """Returns what processes with torch are told before they load it: to keep what was freed for a second."""
    return {"MIMALLOC_PURGE_DELAY": os.environ.get("MIMALLOC_PURGE_DELAY", "1000")}


def share_of_cores(cores: Sequence[int], local_rank: int, local_ranks: int, threads: int = 1) -> list[int]:
    """Returns the cores that a rank keeps to: all, where they cannot be shared out evenly or are fewer than threads."""
    share, rest = divmod(len(cores), local_ranks)
    if rest or share < threads:
        return sorted(cores)
    return sorted(cores)[local_rank * share : (local_rank + 1) * share]


def keep_to_own_cores(local_rank: int, local_ranks: int, threads: int = 1) -> None:
    """Keeps the calling thread, and threads and processes that it starts, to this rank's share (Linux)."""
    if hasattr(os, "sched_setaffinity"):
        allowed = sorted(os.sched_getaffinity(0))
        with contextlib.suppress(OSError):  # taken away meanwhile: then it goes without
            os.sched_setaffinity(0, share_of_cores(allowed, local_rank, local_ranks, threads))
