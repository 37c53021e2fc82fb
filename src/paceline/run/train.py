"""From a config to a finished run: on this machine, on several hosts, or as one rank of another launcher.

    result = train("configs/digits.yaml", ["train.epochs=30"])
    print(result.folder, result.summary.final_loss)

``paceline train`` parses its options, calls ``train``, and prints the result.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cluster.detect import ask_ahead
from paceline.comm.control.wire import SECRET, SECRET_FILE, write_secret
from paceline.config import Config, load_config_with_sources
from paceline.errors import LaunchError, PacelineError, RunFolderError, UsageError
from paceline.run import location as runs
from paceline.run.folder import RunFolder, checkpoint_folder, is_in_use
from paceline.run.location import RunLocation, RunOptions, RunResult
from paceline.run.logs import run_log, say
from paceline.run.notes import RunStoppedError, noted_processes
from paceline.run.observe import observing, observing_host
from paceline.run.processes import end_groups
from paceline.run.signals import polling
from paceline.run.warm import WarmRanks, warm_ranks_of
from paceline.run.whereami import Surroundings, recognise

if TYPE_CHECKING:
    from paceline.run.decide import Decision

_SECRET = ".secret"  # in the run's folder, which all hosts see
_LOOK_S = 1.0  # at whether the folder is still there


def train(
    config: Config | str | Path, overrides: Sequence[str] = (), options: RunOptions | None = None
) -> RunResult | None:
    """Trains until the run is done, with restarts as the config says.

    ``overrides`` change keys of the file, ``["train.epochs=2", "name=mine"]``; ``options=RunOptions(force=True)``, of
    ``paceline.run.train``, has what the command line has options for: ``force``, ``resume="auto"``, ``is_quiet``, ...

    Returns None where another process has the result: on ranks other than 0 under torchrun, and on hosts that join
    another one's run. Raises ConfigError, UsageError, RunFolderError or CheckpointError for what cannot be started, and
    LaunchError for a run that failed.
    """
    chosen, around = options or RunOptions(), recognise(os.environ)
    if around.kind == "rank":
        os.environ.update(around.rank_variables())  # as torch's own launcher does
    if isinstance(config, Config):
        asked = config
    else:
        loaded = load_config_with_sources(config, overrides)
        asked = loaded.config
        for note in loaded.notes if os.environ.get("RANK", "0") == "0" else ():
            say(note)
    if around.kind == "rank":
        from paceline.run.worker import run_under_launcher

        if chosen.hosts is not None:
            what = f"--nnodes in a rank of another launcher ({around})"
            rule = "--nnodes starts ranks, and this process is one"
            raise UsageError(f"{what}\n  {rule}\n  leave --nnodes and --rdzv out, or start one process on each host")
        return run_under_launcher(asked, chosen)
    hosts = chosen.hosts or (_hosts_around(asked, around) if around.kind == "host" else None)
    if hosts is not None:
        return _train_on_hosts(asked, chosen, hosts)
    location = runs.locate_run(asked, force=chosen.force, resume=chosen.resume)  # before torch, which takes seconds
    if asked.model.kind == "gpt" and asked.parallel.device != "cpu":
        ask_ahead()  # for the prediction
    with warm_ranks_of(asked) as warm:  # loads torch as this process does
        from paceline.run.decide import decide_run

        return run_decided(decide_run(asked, checks_memory=chosen.checks_memory), location, chosen, warm)


def _hosts_around(asked: Config, around: Surroundings) -> Surroundings:
    """Returns the hosts of a launcher that starts one process on each; their ranks are those of the config."""
    most, ranks = around.count, asked.parallel.ranks
    own = around.host_ranks or asked.parallel.node_ranks
    if isinstance(ranks, int) and (ranks % most or own not in (None, ranks // most)):
        each = f"{most} hosts" + (f" with {own} ranks each" if own else "")
        what, rule = f"parallel.ranks = {ranks} on {each} ({around})", "every host has as many ranks as the others"
        raise UsageError(f"{what}\n  {rule}\n  set parallel.ranks = auto, or {(own or max(1, ranks // most)) * most}")
    if around.number == 0:
        say(str(around))
    return replace(around, host_ranks=own or (ranks // most if isinstance(ranks, int) else None))


def run_decided(decision: Decision, location: RunLocation, options: RunOptions, warm: WarmRanks | None) -> RunResult:
    """Carries out the plan of a run on this machine, and returns what came of it."""
    from paceline.run.decide import BackgroundPrediction, predict_run, show_decisions
    from paceline.run.supervise import LocalRanks, launching, supervise

    config, plan = decision.config, decision.plan
    ranks = plan.layout.ranks
    asked = LocalRanks.of(config, 1 if config.comm.backend == "virtual" else ranks, num_records=ranks, warm=warm)
    if config.monitor.console and not options.is_quiet:
        show_decisions(config, decision.choice, decision.notes)
    expected = predict_run(config)
    claimed, location = runs.claim_run(location, config, plan.to_text(), force=options.force)
    config, folder = location.named_config(config), location.folder
    with claimed:
        if expected is not None:
            claimed.write_prediction(expected.to_text())
        with (
            explain_end(claimed),
            observing(folder, config, is_quiet=options.is_quiet, is_verbose=options.is_verbose),
            BackgroundPrediction(config, folder, expected, warm),
            clearing_saves(checkpoint_folder(config, folder)),
            launching(folder, asked) as launcher,
        ):
            supervise(launcher, config, location)
        return runs.read_result(folder, config, decision.choice)


def _train_on_hosts(asked: Config, options: RunOptions, nodes: Surroundings) -> RunResult | None:
    """Runs this host's ranks; the launchers of all hosts meet before each attempt. None on a host that joins."""
    if options.resume not in (None, "auto"):
        rule = "hosts that come and go start from the run's newest checkpoint"
        raise UsageError(f"--resume {options.resume} with --nnodes\n  {rule}\n  use --resume auto")
    running = next((folder for folder in runs.runs_of(asked) if is_in_use(folder)), None)
    location = RunLocation(folder=running or runs.run_folder(asked))
    if running is None:
        location = runs.locate_run(asked, force=options.force, resume=options.resume, may_begin=True)
    folder, hosts = location.folder, range(nodes.least, nodes.count + 1)
    is_quiet, is_verbose = options.is_quiet, options.is_verbose
    # The environment has the job's secret, or the first launcher leaves one in the run's folder.
    is_given = bool({SECRET, SECRET_FILE} & os.environ.keys())
    secret = {} if is_given else {SECRET_FILE: str(folder.absolute() / _SECRET)}
    with warm_ranks_of(asked, nodes.host_ranks) as warm:
        from paceline.run.decide import decide_run

        config = decide_run(asked, hosts=hosts, host_ranks=nodes.host_ranks, checks_memory=False).config
        named = location.named_config(config)
        if running is None:
            try:  # the first host to claim the folder has it, and the others join: no other number
                claimed, _ = runs.claim_run(replace(location, takes_number=False), config, force=options.force)
            except RunFolderError:
                if not is_in_use(folder):
                    raise  # else another host's launcher came first, in between
            else:
                with claimed:
                    if secret:
                        write_secret(folder / _SECRET)
                    with explain_end(claimed), observing(folder, named, is_quiet=is_quiet, is_verbose=is_verbose):
                        _run_host(named, folder, nodes, secret, warm, asked)
                    return runs.read_result(folder, named)
        say(f"joining the run in {folder} with {named.parallel.decided_ranks // nodes.count} ranks")
        with run_log(folder, who=f"launcher {socket.gethostname()}"), observing_host(folder, named):
            _run_host(named, folder, nodes, secret, warm, asked)
        return None


def _run_host(
    config: Config, folder: Path, nodes: Surroundings, secret: Mapping[str, str], warm: WarmRanks | None, asked: Config
) -> None:
    from paceline.run.agreement import HostFacts
    from paceline.run.supervise import LocalRanks, launching, supervise

    ranks = config.parallel.decided_ranks // nodes.count
    facts = HostFacts.here(asked, folder, ranks)
    local = LocalRanks.of(config, ranks, secret, warm=warm, nodes=nodes, facts=facts, run_id=config.name)
    with launching(folder, local) as launcher:
        supervise(launcher, config, RunLocation(folder=folder))


@contextlib.contextmanager
def explain_end(claimed: RunFolder) -> Iterator[None]:
    """Forgets a run that was refused, says how to continue one that failed, and ends one whose folder is removed."""
    ranks: dict[int, int] = {}

    def look() -> bool:
        if not claimed.is_gone():
            with contextlib.suppress(OSError, ValueError):  # a note that is being written
                ranks.update(noted_processes(claimed.path, os.getpid()))
            return False
        end_groups(ranks.values(), patience_s=0.0)
        if not ranks:  # their notes went with the folder before they were read: the agent ends what it has started
            os.kill(os.getpid(), signal.SIGTERM)
        return True

    try:
        with polling(look, every_s=_LOOK_S, name="folder", patience_s=1.0):
            yield
    except RunStoppedError as error:
        error.args = ("; ".join(filter(None, [str(error), runs.how_to_continue(claimed.path)])),)  # one line
        raise
    except (PacelineError, OSError) as error:
        if claimed.is_gone():
            raise _gone(claimed.path) from error
        if isinstance(error, UsageError):
            claimed.discard()
        elif isinstance(error, LaunchError):
            error.args = ("\n  ".join(filter(None, [str(error), runs.how_to_continue(claimed.path)])),)
        raise
    if claimed.is_gone():
        raise _gone(claimed.path)


@contextlib.contextmanager
def clearing_saves(checkpoints: Path) -> Iterator[None]:
    """Removes what ranks have left of a save where a run fails or is ended; they are ranks of this host alone."""
    try:
        yield
    except LaunchError:
        from paceline.checkpoint.find import clear_leftovers
        from paceline.checkpoint.storage import is_remote

        if not is_remote(checkpoints):
            with contextlib.suppress(OSError):  # the next start removes it
                clear_leftovers(checkpoints)
        raise


def _gone(path: Path) -> LaunchError:
    what = f"the run's folder {path} was removed, or moved away, while the run was going on"
    rule = "its records, checkpoints and logs are kept there as they are written"
    return LaunchError(f"{what}\n  {rule}\n  start it again, and leave the folder alone until the run has ended")
