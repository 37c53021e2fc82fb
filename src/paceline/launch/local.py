"""Ranks on this machine: torch's elastic agent starts and supervises one process per rank.

The agent restarts nothing here: the first failure ends the run, the cause is told in one message, and no process is
left behind. A worker's output goes to its own log; progress is what the caller reads from the records.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from paceline.errors import LaunchError
from paceline.launch.failure import Failure, clear_failures, explain_failures, killed_rank, read_failures
from paceline.launch.processes import loopback_interface


def launch_local(
    command: Sequence[str], folder: Path, *, ranks: int, threads: int | None = None, port: int = 0
) -> None:
    """Runs ``python -m <command>`` on ``ranks`` processes until all are done.

    Raises LaunchError with the first rank's error when one fails, KeyboardInterrupt when the user ends it.
    """
    clear_failures(folder)
    share = max(1, (os.cpu_count() or 1) // ranks)
    settings = {
        "OMP_NUM_THREADS": str(threads or share),
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", loopback_interface()),
        "CUBLAS_WORKSPACE_CONFIG": os.environ.get("CUBLAS_WORKSPACE_CONFIG", ":4096:8"),
        "PYTHONUNBUFFERED": "1",
    }
    with _environment(settings), _quiet_agent(), tempfile.TemporaryDirectory() as scratch:
        # The agent's own redirects catch what a worker prints before it opens its log.
        logs = DefaultLogsSpecs(log_dir=scratch, redirects=Std.ALL)
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            run_id=f"paceline-{os.getpid()}",
            rdzv_backend="c10d",
            rdzv_endpoint=f"localhost:{port}",
            max_restarts=0,
            monitor_interval=0.1,
            logs_specs=logs,
        )
        try:
            elastic_launch(config, sys.executable)("-u", "-m", *command)
        except ChildFailedError as error:
            raise explain_failures([*read_failures(folder), *_killed(error, folder, scratch)], folder) from None
        except SignalException as error:
            raise KeyboardInterrupt(str(error)) from None
        except (RuntimeError, ConnectionError, OSError) as error:  # the rendezvous itself failed
            raise LaunchError(_explain_start(error, port)) from error


def _killed(error: ChildFailedError, folder: Path, scratch: str) -> list[Failure]:
    """Finds ranks that ended without leaving an error of their own."""
    known = {failure.rank for failure in read_failures(folder)}
    found = []
    for rank, failure in error.failures.items():
        if rank in known:
            continue
        code = int(failure.exitcode)
        if code in (-15, -2) and (known or len(error.failures) > 1):
            continue  # ended by the agent, because of another
        killed = killed_rank(rank, code, float(failure.timestamp or time.time()))
        stderr = "".join(p.read_text(errors="replace") for p in Path(scratch).rglob(f"{rank}/stderr.log"))
        if code > 0 and stderr.strip():  # it died before it had a log
            tail = "\n".join(stderr.strip().splitlines()[-20:])
            killed = Failure(**{**_fields(killed), "message": f"{killed.message}\n\n{tail}"})
        found.append(killed)
    return found


def _fields(failure: Failure) -> dict[str, Any]:
    return {name: getattr(failure, name) for name in Failure.__slots__}


def _explain_start(error: Exception, port: int) -> str:
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    if port and ("EADDRINUSE" in str(error) or "in use" in str(error) or "failed to listen" in str(error)):
        return f"port {port} is in use\n  the ranks meet there\n  choose another with --port, or leave it out"
    return f"the ranks could not be started: {text}"


@contextlib.contextmanager
def _environment(settings: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _quiet_agent() -> Iterator[None]:
    """Silences the agent's log: what matters is told in our own words."""
    logger = logging.getLogger("torch.distributed.elastic")
    others = logging.getLogger("torch.distributed")
    levels = logger.level, others.level
    logger.setLevel(logging.CRITICAL)
    others.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(levels[0])
        others.setLevel(levels[1])
