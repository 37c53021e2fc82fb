"""``paceline train --nnodes``: one host's part in a run on several, which may come and go.

torch's agents start ranks again by themselves and know nothing of verdicts. So a rank that finds a verdict leaves a
note before it ends the others (``notes.py``), and ranks that are started again read the notes and ask
``health/diagnosis.py`` as a single launcher does. Where the answer is to stop, they leave with success, which no agent
takes for another failure, and the launchers tell the verdict.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from paceline.comm.control.wire import SECRET, SECRET_FILE, write_secret
from paceline.config import Config
from paceline.config.sections import RecoveryConfig
from paceline.errors import RunFolderError, UsageError
from paceline.health.diagnosis import Stop, after_failure
from paceline.run.console import say
from paceline.run.folder import is_in_use
from paceline.run.location import RunLocation, claim_run, locate_run, run_folder, runs_of
from paceline.run.logs import run_log
from paceline.run.nodes import Nodes
from paceline.run.notes import HANGS, forget, hung_attempts
from paceline.run.observe import observing, observing_host
from paceline.run.result import RunOptions, RunResult, explain_end, read_result
from paceline.run.supervise import rank_command
from paceline.run.variables import rank_variables
from paceline.run.warm import WarmRanks, warm_ranks_of

_LOOK_S = 0.2
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
    from paceline.run.watch import forget_health

    # The first host to claim the folder has it, and the others join: no other number.
    claimed, _ = claim_run(replace(location, takes_number=False), config, force=options.force)
    config, folder = location.settle(config), location.folder
    with claimed:
        if not _given_secret():
            write_secret(folder / _SECRET)
        forget(folder, HANGS)
        forget_health(folder, range(_ranks_here(config, nodes) * nodes.most))
        with explain_end(claimed), observing(folder, config, options):
            _run(config, folder, nodes, warm, asked)
        return read_result(folder, config)


def _run(config: Config, folder: Path, nodes: Nodes, warm: WarmRanks | None, asked: Config) -> None:
    from paceline.run.agreement import HostFacts
    from paceline.run.local import LocalRanks, launch_local
    from paceline.run.rank_process import uses_nccl

    ranks = _ranks_here(config, nodes)
    with telling_restarts(folder, config.recovery, say):
        local = LocalRanks(
            ranks=ranks,
            num_records=ranks * nodes.most,
            threads=config.parallel.threads,
            variables={
                **rank_variables(config, uses_nccl=uses_nccl(config)),
                **({} if _given_secret() else {SECRET_FILE: str(folder.absolute() / _SECRET)}),
            },
            warm=warm,
            nodes=nodes,
            facts=HostFacts.here(asked, folder, ranks),
            run_id=config.name,
            restarts=config.recovery,
        )
        launch_local([*rank_command(folder, "auto"), "--self-watch"], folder, local)


def _given_secret() -> bool:
    """Says whether the environment has the job's secret; else the first launcher leaves one in the run's folder."""
    return bool({SECRET, SECRET_FILE} & os.environ.keys())


def _ranks_here(config: Config, nodes: Nodes) -> int:
    return config.parallel.decided_ranks // nodes.most


@contextlib.contextmanager
def telling_restarts(folder: Path, policy: RecoveryConfig, tell: Callable[[str], None]) -> Iterator[None]:
    """Tells each verdict after which ranks are started again; the last one is the launcher's error."""
    from paceline.run.polling import polling

    known = len(hung_attempts(folder))

    def tell_new(_: object = None) -> bool:
        nonlocal known
        attempts = hung_attempts(folder)
        for number in range(known + 1, len(attempts) + 1):
            if not isinstance(after_failure(policy, attempts[:number]), Stop):
                what = attempts[number - 1]
                tell(f"{what}; restarting from the newest checkpoint (restart {number} of {policy.max_restarts})")
        known = len(attempts)
        return False

    try:
        with polling(tell_new, every_s=_LOOK_S, name="verdicts"):
            yield
    finally:
        tell_new()
