"""``paceline train --nnodes``: one host's part in a run on several, which may come and go.

The launcher of each host starts its own ranks and supervises them as the only launcher of a run does
(``supervise.py``). What differs: launchers meet before each attempt, and the folder is shared.
"""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from pathlib import Path

from paceline.comm.control.wire import SECRET, SECRET_FILE, write_secret
from paceline.config import Config
from paceline.errors import RunFolderError, UsageError
from paceline.run.console import say
from paceline.run.folder import is_in_use
from paceline.run.location import RunLocation, claim_run, locate_run, run_folder, runs_of
from paceline.run.logs import run_log
from paceline.run.nodes import Nodes
from paceline.run.observe import observing, observing_host
from paceline.run.result import RunOptions, RunResult, explain_end, read_result
from paceline.run.variables import rank_variables
from paceline.run.warm import WarmRanks, warm_ranks_of

_SECRET = ".secret"  # in the run's folder, which all hosts see


def train_on_hosts(asked: Config, options: RunOptions, nodes: Nodes) -> RunResult | None:
    """Runs this host's ranks until the run is done, with other hosts; returns None on a host that joins."""
    if options.resume not in (None, "auto"):
        raise UsageError(
            f"--resume {options.resume} with --nnodes\n"
            "  hosts that come and go start from the run's newest checkpoint\n  use --resume auto"
        )
    running = next((folder for folder in runs_of(asked) if is_in_use(folder)), None)
    location = RunLocation(folder=running or run_folder(asked))
    if running is None:
        location = locate_run(asked, force=options.force, resume=options.resume, may_begin=True)
    with warm_ranks_of(asked, nodes.ranks) as warm:
        from paceline.run.decide import Participants, decide_run

        config = decide_run(
            asked, Participants(hosts=range(nodes.least, nodes.most + 1), host_ranks=nodes.ranks), checks_memory=False
        ).config
        folder = location.folder
        if running is None:
            try:
                return _run_as_first(config, location, nodes, warm, options, asked)
            except RunFolderError:
                if not is_in_use(folder):
                    raise  # else another host's launcher came first, in between
        config = location.settle(config)
        say(f"joining the run in {folder} with {_ranks_here(config, nodes)} ranks")
        with run_log(folder, who=f"launcher {socket.gethostname()}"), observing_host(folder, config):
            _run(config, folder, nodes, warm, asked)
        return None


def _run_as_first(
    config: Config, location: RunLocation, nodes: Nodes, warm: WarmRanks | None, options: RunOptions, asked: Config
) -> RunResult:
    # The first host to claim the folder has it, and the others join: no other number.
    claimed, _ = claim_run(replace(location, takes_number=False), config, force=options.force)
    config, folder = location.settle(config), location.folder
    with claimed:
        if not _given_secret():
            write_secret(folder / _SECRET)
        with explain_end(claimed), observing(folder, config, options):
            _run(config, folder, nodes, warm, asked)
        return read_result(folder, config)


def _run(config: Config, folder: Path, nodes: Nodes, warm: WarmRanks | None, asked: Config) -> None:
    from paceline.run.agreement import HostFacts
    from paceline.run.local import LocalRanks, launching
    from paceline.run.rank_process import uses_nccl
    from paceline.run.supervise import supervise
    from paceline.run.watch import watch_policy

    ranks = _ranks_here(config, nodes)
    local = LocalRanks(
        ranks=ranks,
        threads=config.parallel.threads,
        variables={
            **rank_variables(config, uses_nccl=uses_nccl(config)),
            **({} if _given_secret() else {SECRET_FILE: str(folder.absolute() / _SECRET)}),
        },
        warm=warm,
        watch=watch_policy(config),
        nodes=nodes,
        facts=HostFacts.here(asked, folder, ranks),
        run_id=config.name,
    )
    with launching(folder, local) as launcher:
        supervise(launcher, config, RunLocation(folder=folder))


def _given_secret() -> bool:
    """Says whether the environment has the job's secret; else the first launcher leaves one in the run's folder."""
    return bool({SECRET, SECRET_FILE} & os.environ.keys())


def _ranks_here(config: Config, nodes: Nodes) -> int:
    return config.parallel.decided_ranks // nodes.most
