"""How a run is asked for, and what comes of it: options, the result, and the words of its end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.config import Config
from paceline.errors import LaunchError, UsageError
from paceline.records.records import EndRecord, RunRecord, StepRecord, read_records
from paceline.records.report import RunSummary, summarize
from paceline.run.folder import RunFolder
from paceline.run.location import how_to_continue

if TYPE_CHECKING:
    from paceline.run.nodes import Nodes
    from paceline.search.choice import Choice


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """How a run is started.

    ``force`` replaces a run folder of the same name. ``resume`` continues from a checkpoint: ``auto`` stands for the
    run's newest. ``is_quiet``: progress is not shown.
    ``checks_memory``: a run that is estimated to need more memory than there is, is refused.
    """

    force: bool = False
    resume: str | None = None
    is_quiet: bool = False
    checks_memory: bool = True
    hosts: Nodes | None = None


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
