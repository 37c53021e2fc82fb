"""From a config to a finished run: on this machine, on several hosts, or as one rank of another launcher.

    result = train("configs/digits.yaml", ["train.epochs=30"])
    print(result.folder, result.summary.final_loss)

``paceline train`` parses its options, calls ``train``, and prints the result.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.config import Config, dump_yaml, load_config
from paceline.errors import LaunchError, UsageError
from paceline.records.records import EndRecord, RunRecord, StepRecord, read_records
from paceline.records.report import RunSummary, summarize
from paceline.run.console import LiveProgress
from paceline.run.folder import RunFolder, claim_folder
from paceline.run.location import RunLocation, how_to_continue, locate_run
from paceline.run.warm import WarmRanks, warm_ranks_of

if TYPE_CHECKING:
    from paceline.run.decide import Decision
    from paceline.run.supervise import RestartNote
    from paceline.search.choice import Choice


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOptions:
    """Several hosts: how many (``2`` or ``1:4``), where they meet (``HOST:PORT``), and the ranks of this one."""

    counts: str
    endpoint: str
    ranks: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """How a run is started.

    ``force`` replaces a run folder of the same name. ``resume`` continues from a checkpoint: ``auto`` stands for the
    run's newest. ``port`` is where the ranks meet; 0: a free one. ``is_quiet``: progress is not shown.
    ``checks_memory``: a run that is estimated to need more memory than there is, is refused.
    """

    force: bool = False
    resume: str | None = None
    port: int = 0
    is_quiet: bool = False
    checks_memory: bool = True
    hosts: HostOptions | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """A finished run: its folder, its config as decided, and what its records say.

    ``choice`` is how a strategy was chosen that the config left open. ``has_trained`` is False where the checkpoint was
    that of the last step already.
    """

    folder: Path
    config: Config
    summary: RunSummary
    last_step: int
    choice: Choice | None = None
    has_trained: bool = True

    @property
    def final_loss(self) -> float | None:
        """The loss of the last step."""
        return self.summary.final_loss


def train(
    config: Config | str | Path, overrides: Sequence[str] = (), options: RunOptions | None = None
) -> RunResult | None:
    """Trains until the run is done, with restarts as the config says.

    Returns None where another process has the result: on ranks other than 0 under torchrun, and on hosts that join
    another one's run. Raises ConfigError, UsageError, RunFolderError or CheckpointError for what cannot be started, and
    LaunchError for a run that failed.
    """
    asked = config if isinstance(config, Config) else load_config(Path(config), list(overrides))
    chosen = options or RunOptions()
    if "RANK" in os.environ:
        from paceline.run.under_launcher import run_under_launcher

        return run_under_launcher(asked, chosen)
    if chosen.hosts is not None:
        from paceline.run.hosts import train_on_hosts

        return train_on_hosts(asked, chosen, chosen.hosts)
    return train_here(asked, chosen)


def train_here(asked: Config, options: RunOptions) -> RunResult:
    """Runs all ranks on this machine."""
    location = locate_run(asked, force=options.force, resume=options.resume)  # before torch, which takes seconds
    with warm_ranks_of(asked) as warm:  # loads torch as this process does
        from paceline.run.decide import decide_run

        return run_decided(decide_run(asked, checks_memory=options.checks_memory), location, options, warm)


def run_decided(decision: Decision, location: RunLocation, options: RunOptions, warm: WarmRanks | None) -> RunResult:
    """Carries out the plan of a run on this machine, and returns what came of it."""
    from paceline.run.decide import show_decisions
    from paceline.run.local import check_port, launch_local
    from paceline.run.prediction import BackgroundPrediction, predict_run
    from paceline.run.rank_process import uses_nccl
    from paceline.run.supervise import rank_command, supervise
    from paceline.run.variables import rank_variables
    from paceline.run.watch import watch_policy

    config, plan = decision.config, decision.plan
    variables = rank_variables(config, uses_nccl=uses_nccl(config))
    check_port(options.port)
    is_shown = config.monitor.console and not options.is_quiet
    if is_shown:
        show_decisions(config, decision.choice)
    expected = predict_run(config)
    folder, ranks = location.folder, plan.layout.ranks

    def start(checkpoint: Path | None, restart: RestartNote | None) -> None:
        launch_local(
            rank_command(folder, checkpoint, restart),
            folder,
            ranks=1 if config.comm.backend == "virtual" else ranks,
            num_records=ranks,
            threads=config.parallel.threads,
            port=options.port,
            variables=variables,
            warm=warm,
            watch=watch_policy(config),
        )

    is_continued, written = location.is_continued, plan.to_text()
    with claim_folder(folder, dump_yaml(config), written, force=options.force, resume=is_continued) as claimed:
        if expected is not None:
            claimed.write_prediction(expected.to_text())
        prediction = BackgroundPrediction(config, folder, expected, warm)
        with explain_end(claimed), LiveProgress(folder, is_shown=is_shown), prediction:
            supervise(start, config, location)
        return read_result(folder, config, decision.choice)


@contextlib.contextmanager
def explain_end(claimed: RunFolder) -> Iterator[None]:
    """Forgets a run that was refused; adds to the error of one that failed how to continue it."""
    try:
        yield
    except UsageError:
        claimed.discard()
        raise
    except LaunchError as error:
        error.args = (f"{error}{how_to_continue(claimed.path)}",)
        raise


def read_result(folder: Path, config: Config, choice: Choice | None = None) -> RunResult:
    """Reads what a run did from its records. Raises LaunchError if it is not finished."""
    summary = summarize(folder)
    if summary.status != "done":
        raise LaunchError(
            f"the ranks left before the run was done: it is {summary.status}, at step {summary.steps}\n"
            f"  their logs are in {folder / 'logs'}"
        )
    has_trained, last_step = False, 0
    for record in read_records(folder / "records" / "rank-0.jsonl"):
        if isinstance(record, RunRecord | StepRecord):
            has_trained = isinstance(record, StepRecord)  # in the last attempt
        elif isinstance(record, EndRecord):
            last_step = record.step
    return RunResult(
        folder=folder, config=config, summary=summary, last_step=last_step, choice=choice, has_trained=has_trained
    )
