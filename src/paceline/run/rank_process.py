"""The process that a rank is: what its launcher told it, where its output goes, how it ends."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from paceline.run.cores import keep_to_own_cores
from paceline.run.orphans import end_children

if TYPE_CHECKING:
    from paceline.config import Config


def node_ranks(config: Config) -> int | None:
    """Returns how many ranks share this host: as the config says, or the launcher; None: all of them."""
    detected = os.environ.get("LOCAL_WORLD_SIZE")
    return config.parallel.node_ranks or (None if detected is None else int(detected))


def restarted_by_launcher() -> dict[str, Any] | None:
    """Returns what is known of a restart by torch's agent."""
    number = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    of = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    return {"number": number, "of": of, "reason": "restarted by the agent"} if number else None


def uses_nccl(config: Config) -> bool:
    """Says whether the ranks of a config will talk through NCCL, before they do."""
    return config.comm.backend in ("auto", "nccl") and uses_gpu(config)


def uses_gpu(config: Config) -> bool:
    """Says whether the ranks of a config will compute on GPUs."""
    import torch

    return config.parallel.device != "cpu" and torch.cuda.is_available()


def use_threads(config: Config) -> None:
    """Computes with as many threads as the config says, where it does."""
    if config.parallel.threads is not None:
        import torch

        torch.set_num_threads(config.parallel.threads)


def keep_cores(config: Config) -> None:
    """Keeps a rank on a CPU, and the threads that its backend will start, to its share of the host's cores."""
    local_rank, local_ranks = os.environ.get("LOCAL_RANK"), os.environ.get("LOCAL_WORLD_SIZE")
    if not config.parallel.own_cores or local_rank is None or local_ranks is None or uses_gpu(config):
        return
    keep_to_own_cores(int(local_rank), int(local_ranks), config.parallel.threads or 1)


def redirect_output(path: Path) -> None:
    """Sends this process's output, that of its libraries too, to a file."""
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def leave_process(code: int) -> NoReturn:
    """Leaves at once, with loader workers: threads of the backend may wait for ranks that are gone."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    end_children()
    os._exit(code)
