"""One rank of a run: what the launcher starts on each process.

    python -m paceline.cli.worker RUN_FOLDER --launcher PID [--resume CHECKPOINT | --resume auto] [--restart JSON]

It reads the resolved config from the run's folder, joins the others, trains, and writes records. An error goes to
``logs/rank-<r>.error.json`` for the launcher, and to this rank's log. SIGTERM, SIGUSR1 and SIGUSR2 ask it to save and
leave, together with the others; ``auto`` stands for the run's newest checkpoint, and the beginning without one.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.attempt import Attempt
from paceline.cli.rank_process import keep_cores, leave_process, node_ranks, redirect_output, restarted_by_launcher
from paceline.launch.failure import forget_failure
from paceline.launch.folder import config_of
from paceline.launch.orphans import end_with_parent, note_process
from paceline.launch.requests import hear_requests
from paceline.launch.warm_server import PARENT

if TYPE_CHECKING:
    from paceline.comm.base import Communicator
    from paceline.config import Config


def main() -> None:
    """Runs one rank and leaves with its exit code."""
    parser = argparse.ArgumentParser(prog="paceline.cli.worker", description="One rank of a run.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--launcher", type=int, required=True)
    parser.add_argument("--resume")
    parser.add_argument("--restart", type=json.loads)
    arguments = parser.parse_args()
    folder, rank = arguments.folder.absolute(), int(os.environ["RANK"])  # absolute: the user's code may go elsewhere
    end_with_parent(int(os.environ.get(PARENT, arguments.launcher)))
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the launcher decides; a rank may sit in a collective
    attempt = Attempt(folder, rank, restart=arguments.restart or restarted_by_launcher())
    try:
        from paceline.config import load_config

        config = load_config(config_of(folder))
        hear_requests(attempt.request.ask, grace_s=config.recovery.grace_s, leave=leave_process)
        note_process(folder, rank, arguments.launcher)
        forget_failure(folder, rank)
        redirect_output(folder / "logs" / f"rank-{rank}.log")
        if config.comm.backend == "virtual":
            _run_virtual(config, attempt, arguments.resume)
            return
        from paceline.comm.torch_dist import connect, disconnect

        keep_cores(config)
        comm = connect(config.comm.backend, device=config.parallel.device, timeout_s=config.comm.timeout_s)
        config = _fit_to_world(config, comm)
        attempt.run(config, comm, resume=arguments.resume)
        disconnect()
    except BaseException as error:
        attempt.leave(error)


def _fit_to_world(config: Config, comm: Communicator) -> Config:
    """Returns the config for the ranks that are there, which may be fewer or more than before where nodes come and go.

    Raises ConfigError if they cannot train it.
    """
    from paceline.config import check_ranks
    from paceline.errors import ConfigError

    if comm.size == config.parallel.ranks:
        return config
    problems = check_ranks(config, comm.size, node_ranks(config))
    if problems:
        raise ConfigError(problems, source=f"config, on {comm.size} ranks")
    return config.model_copy(update={"parallel": config.parallel.model_copy(update={"ranks": comm.size})})


def _run_virtual(config: Config, first: Attempt, resume: str | None) -> None:
    """Runs all ranks in this process, in turn. Where one fails, leaves with its error."""
    from paceline.comm.virtual import run_virtual
    from paceline.errors import RankFailedError

    assert isinstance(config.parallel.ranks, int)
    attempts = [first, *(first.of_rank(rank) for rank in range(1, config.parallel.ranks))]
    try:
        run_virtual(
            lambda comm: attempts[comm.rank].run(config, comm, resume=resume),
            config.parallel.ranks,
            device=config.parallel.device,
            timeout_s=config.comm.timeout_s,
        )
    except RankFailedError as error:
        attempts[error.rank].leave(error.__cause__ or error)


if __name__ == "__main__":
    main()
