"""One rank of a run: what the launcher starts on each process.

    python -m paceline.run.worker RUN_FOLDER --launcher PID [--resume CHECKPOINT|auto] [--restart JSON] [--beside]

It reads the resolved config from the run's folder, joins the others, trains, and writes records. An error goes to
``logs/rank-<r>.error.json`` for the launcher, and to this rank's log. SIGTERM, SIGUSR1 and SIGUSR2 ask it to save and
leave, together with the others; ``auto`` stands for the run's newest checkpoint, and the beginning without one. With
``--beside`` the ranks watch themselves, as those of several hosts have several launchers.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import CommunicationError
from paceline.run.attempt import Attempt
from paceline.run.codes import DONE, HUNG
from paceline.run.failure import forget_failure
from paceline.run.folder import config_of
from paceline.run.orphans import end_with_parent, note_process
from paceline.run.rank_process import keep_cores, leave_process, node_ranks, redirect_output, restarted_by_launcher
from paceline.run.requests import hear_requests
from paceline.run.warm_server import PARENT

if TYPE_CHECKING:
    from paceline.comm.base import Communicator
    from paceline.config import Config

HOST = "PACELINE_HOST"  # what this host is called, where several have the same name, as containers may


def main() -> None:
    """Runs one rank and leaves with its exit code."""
    parser = argparse.ArgumentParser(prog="paceline.run.worker", description="One rank of a run.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--launcher", type=int, required=True)
    parser.add_argument("--resume")
    parser.add_argument("--restart", type=json.loads)
    parser.add_argument("--beside", action="store_true")
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
        if arguments.beside:
            _leave_if_over(config, folder)
        forget_failure(folder, rank)
        redirect_output(folder / "logs" / f"rank-{rank}.log")
        if config.comm.backend == "virtual":
            _run_virtual(config, attempt, arguments.resume)
            return
        from paceline.comm.torch_dist import connect, disconnect

        keep_cores(config)
        comm = connect(config.comm.backend, device=config.parallel.device, timeout_s=config.comm.timeout_s)
        config = _fit_to_world(config, comm)
        if arguments.beside:
            comm = _watch_beside(config, folder, comm)
        attempt.run(config, comm, resume=arguments.resume)
        disconnect()
    except BaseException as error:
        if arguments.beside and isinstance(error, CommunicationError):
            _leave_if_different(folder)
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


def _leave_if_over(config: Config, folder: Path) -> None:
    """Leaves with success, after a word for the launchers, where the attempt before has hung and was the last."""
    from paceline.run.hangs import is_over, note_over
    from paceline.run.supervision import restart_policy

    if is_over(folder, restart_policy(config)):
        note_over(folder)
        leave_process(DONE)


def _watch_beside(config: Config, folder: Path, comm: Communicator) -> Communicator:
    """Lets the ranks of all hosts watch themselves; forgets failures of ranks that are no more."""
    from paceline.run.beside import watch_beside
    from paceline.run.failure import read_failures
    from paceline.run.watch import watch_policy

    for failure in read_failures(folder) if comm.rank == 0 else ():
        if failure.rank >= comm.size:
            forget_failure(folder, failure.rank)
    return watch_beside(comm, folder, watch_policy(config), host=os.environ.get(HOST))


def _leave_if_different(folder: Path) -> None:
    """Leaves as after a verdict where this rank has lost another that called something else."""
    from paceline.run.hangs import note_own_mismatch

    if note_own_mismatch(folder, int(os.environ["WORLD_SIZE"])):
        traceback.print_exc()
        leave_process(HUNG)


def _run_virtual(config: Config, first: Attempt, resume: str | None) -> None:
    """Runs all ranks in this process, in turn. Where one fails, leaves with its error."""
    from paceline.comm.virtual.communicator import run_virtual
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
