"""One rank of a run: what the launcher starts on each process.

    python -m paceline.run.worker RUN_FOLDER --launcher PID [--resume CHECKPOINT|auto] [--restart JSON]

It reads the resolved config from the run's folder, joins the others, trains, and writes records. An error goes to
``logs/rank-<r>.error.json`` for the launcher, and to this rank's log. SIGTERM, SIGUSR1 and SIGUSR2 ask it to save and
leave, together with the others; ``auto`` stands for the run's newest checkpoint, and the beginning without one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
from dataclasses import replace
from pathlib import Path

from paceline.comm.torch_dist import connect, disconnect
from paceline.comm.virtual.communicator import run_virtual
from paceline.config import Config, load_config
from paceline.errors import RankFailedError
from paceline.plan.plan import Plan, RunMachine
from paceline.run.attempt import RankRunner, StartTimes
from paceline.run.folder import config_of, read_plan
from paceline.run.logs import rank_logs
from paceline.run.notes import note_process
from paceline.run.rank_process import (
    end_with_parent,
    keep_compiled,
    keep_cores,
    leave_process,
    node_ranks,
    redirect_output,
)
from paceline.run.signals import hear_requests
from paceline.run.warm_server import PARENT
from paceline.search.make_plan import decided_config, make_plan


def main() -> None:
    parser = argparse.ArgumentParser(prog="paceline.run.worker", description="One rank of a run.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--launcher", type=int, required=True)
    parser.add_argument("--resume")
    parser.add_argument("--restart", type=json.loads)
    arguments = parser.parse_args()
    folder, rank = arguments.folder.absolute(), int(os.environ["RANK"])  # absolute: the user's code may go elsewhere
    note_process(folder, rank, arguments.launcher)  # at once: whoever watches looks at the process
    end_with_parent(int(os.environ.get(PARENT, arguments.launcher)))
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the launcher decides; a rank may sit in a collective
    restart = arguments.restart
    times = StartTimes.since_start_of(arguments.launcher if restart is None else os.getpid())
    times.lap("processes")
    attempt, logs = RankRunner(folder, rank, restart=restart, times=times), contextlib.ExitStack()
    try:
        config = load_config(config_of(folder))
        hear_requests(attempt.request.ask, grace_s=config.recovery.grace_s, leave=leave_process)
        redirect_output(folder / "logs" / f"rank-{rank}.log")
        logs.enter_context(rank_logs(folder, rank, config.monitor.log_level, owns_output=True))
        if config.comm.backend == "virtual":
            plan = read_plan(folder)
            assert plan is not None
            _run_virtual(config, plan, attempt, arguments.resume)
            return
        keep_cores(config)
        keep_compiled(config)
        comm = connect(config.comm.backend, device=config.parallel.device, timeout_s=config.comm.timeout_s)
        times.lap("joining")
        plan = read_plan(folder)
        if plan is None or plan.layout.ranks != comm.size:  # where hosts come and go, ranks may be fewer or more
            machine = RunMachine(device=config.parallel.device, ranks=comm.size, node_ranks=node_ranks(config))
            plan = make_plan(config, machine, source=f"config, on {comm.size} ranks")
            config = decided_config(config, plan)
        attempt.run(config, comm, plan=plan, resume=arguments.resume)
        disconnect()
    except BaseException as error:
        attempt.leave(error)


def _run_virtual(config: Config, plan: Plan, first: RankRunner, resume: str | None) -> None:
    """Runs all ranks in this process, in turn. Where one fails, leaves with its error."""
    ranks = plan.layout.ranks
    first.times = None  # they take turns
    attempts = [first, *(replace(first, rank=rank) for rank in range(1, ranks))]
    try:
        run_virtual(
            lambda comm: attempts[comm.rank].run(config, comm, plan=plan, resume=resume),
            ranks,
            device=plan.device,
            timeout_s=config.comm.timeout_s,
        )
    except RankFailedError as error:
        attempts[error.rank].leave(error.__cause__ or error)


if __name__ == "__main__":
    main()
