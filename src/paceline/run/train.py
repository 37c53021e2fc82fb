"""From a config to a finished run: on this machine, on several hosts, or as one rank of another launcher.

    result = train("configs/digits.yaml", ["train.epochs=30"])
    print(result.folder, result.summary.final_loss)

``paceline train`` parses its options, calls ``train``, and prints the result.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cluster.detect import ask_ahead
from paceline.config import Config, load_config_with_sources
from paceline.errors import UsageError
from paceline.run.console import say
from paceline.run.location import RunLocation, claim_run, locate_run
from paceline.run.result import RunOptions, RunResult, clearing_saves, explain_end, read_result
from paceline.run.warm import WarmRanks, warm_ranks_of
from paceline.run.whereami import Surroundings, recognise

if TYPE_CHECKING:
    from paceline.run.decide import Decision
    from paceline.run.nodes import Nodes


def train(
    config: Config | str | Path, overrides: Sequence[str] = (), options: RunOptions | None = None
) -> RunResult | None:
    """Trains until the run is done, with restarts as the config says.

    ``overrides`` change keys of the file, ``["train.epochs=2", "name=mine"]``; ``options=RunOptions(force=True)``, of
    ``paceline.run.train``, is for what the command line has options for: ``force``, ``resume="auto"``, ``is_quiet``,
    ``is_verbose``.

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
        from paceline.run.under_launcher import run_under_launcher

        if chosen.hosts is not None:
            raise UsageError(
                f"--nnodes in a rank of another launcher ({around})\n  --nnodes starts ranks, and this process is one"
                "\n  leave --nnodes and --rdzv out, or start one process on each host"
            )
        return run_under_launcher(asked, chosen)
    hosts = chosen.hosts or (_hosts_around(asked, around) if around.kind == "host" else None)
    if hosts is not None:
        from paceline.run.hosts import train_on_hosts

        return train_on_hosts(asked, chosen, hosts)
    location = locate_run(asked, force=chosen.force, resume=chosen.resume)  # before torch, which takes seconds
    if asked.model.kind == "gpt" and asked.parallel.device != "cpu":
        ask_ahead()  # for the prediction
    with warm_ranks_of(asked) as warm:  # loads torch as this process does
        from paceline.run.decide import decide_run

        return run_decided(decide_run(asked, checks_memory=chosen.checks_memory), location, chosen, warm)


def _hosts_around(asked: Config, around: Surroundings) -> Nodes:
    """Returns the hosts of a launcher that starts one process on each; their ranks are those of the config."""
    nodes, ranks = around.nodes(), asked.parallel.ranks
    own = nodes.ranks or asked.parallel.node_ranks
    if isinstance(ranks, int) and (ranks % nodes.most or own not in (None, ranks // nodes.most)):
        each = f"{nodes.most} hosts" + (f" with {own} ranks each" if own else "")
        raise UsageError(
            f"parallel.ranks = {ranks} on {each} ({around})\n  every host has as many ranks as the others\n"
            f"  set parallel.ranks = auto, or {(own or max(1, ranks // nodes.most)) * nodes.most}"
        )
    if around.number == 0:
        say(str(around))
    return replace(nodes, ranks=own or (ranks // nodes.most if isinstance(ranks, int) else None))


def run_decided(decision: Decision, location: RunLocation, options: RunOptions, warm: WarmRanks | None) -> RunResult:
    """Carries out the plan of a run on this machine, and returns what came of it."""
    from paceline.run.decide import show_decisions
    from paceline.run.local import LocalRanks, launching
    from paceline.run.observe import observing
    from paceline.run.prediction import BackgroundPrediction, predict_run
    from paceline.run.rank_process import uses_nccl
    from paceline.run.supervise import supervise
    from paceline.run.variables import rank_variables
    from paceline.run.watch import watch_policy

    config, plan = decision.config, decision.plan
    variables = rank_variables(config, uses_nccl=uses_nccl(config))
    is_shown = config.monitor.console and not options.is_quiet
    if is_shown:
        show_decisions(config, decision.choice, decision.notes)
    expected = predict_run(config)
    ranks = plan.layout.ranks
    asked = LocalRanks(
        ranks=1 if config.comm.backend == "virtual" else ranks,
        num_records=ranks,
        threads=config.parallel.threads,
        variables=variables,
        warm=warm,
        watch=watch_policy(config),
    )

    claimed, location = claim_run(location, config, plan.to_text(), force=options.force)
    config, folder = location.settle(config), location.folder
    with claimed:
        if expected is not None:
            claimed.write_prediction(expected.to_text())
        prediction = BackgroundPrediction(config, folder, expected, warm)
        with (
            explain_end(claimed),
            observing(folder, config, options),
            prediction,
            clearing_saves(folder),
            launching(folder, asked) as launcher,
        ):
            supervise(launcher, config, location)
        return read_result(folder, config, decision.choice)
