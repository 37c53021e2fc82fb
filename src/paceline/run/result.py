"""How a run is asked for, and what comes of it: options, the result, and the words of its end."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.config import Config
from paceline.errors import LaunchError, PacelineError, UsageError
from paceline.notebook import Shown, curve
from paceline.records.records import EndRecord, RunRecord, StepRecord, read_records
from paceline.records.report import RunSummary, summarize
from paceline.run.failure import RunStoppedError
from paceline.run.folder import RunFolder
from paceline.run.location import how_to_continue
from paceline.run.notes import noted_processes
from paceline.run.rank_process import end_groups
from paceline.run.signals import polling

if TYPE_CHECKING:
    from paceline.run.nodes import Nodes
    from paceline.search.automatic import Choice

_LOOK_S = 1.0  # at whether the folder is still there


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """How a run is started.

    ``force`` replaces a run folder of the same name. ``resume`` continues from a checkpoint: ``auto`` stands for the
    run's newest, and so do ``last`` and ``latest``, unless a file or folder has that name. ``is_quiet``: progress is
    not shown. ``is_verbose``: the lines of the run's log are, in its place. ``checks_memory``: a run that is estimated
    to need more memory than there is, is refused.
    """

    force: bool = False
    resume: str | None = None
    is_quiet: bool = False
    is_verbose: bool = False
    checks_memory: bool = True
    hosts: Nodes | None = None

    def __post_init__(self) -> None:
        if self.resume in ("last", "latest") and not Path(self.resume).exists():
            object.__setattr__(self, "resume", "auto")


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RunResult(Shown):
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

    def facts(self) -> dict[str, object]:
        return {**self.summary.facts(), "folder": self.folder}

    def charts(self) -> list[str]:
        try:
            records = list(read_records(self.folder / "records" / "rank-0.jsonl"))
        except (OSError, ValueError):  # the folder was removed since, or somebody changed it
            return []
        return [curve("training loss", [each.loss for each in records if isinstance(each, StepRecord)])]


@contextlib.contextmanager
def explain_end(claimed: RunFolder) -> Iterator[None]:
    """Forgets a run that was refused; adds to the error of one that failed how to continue it.

    A run whose folder is removed is ended, and told as that.
    """
    try:
        with _ending_without(claimed):
            yield
    except RunStoppedError as error:
        error.args = ("; ".join(filter(None, [str(error), how_to_continue(claimed.path)])),)  # one line
        raise
    except (PacelineError, OSError) as error:
        if claimed.is_gone():
            raise _gone(claimed.path) from error
        if isinstance(error, UsageError):
            claimed.discard()
        elif isinstance(error, LaunchError):
            error.args = ("\n  ".join(filter(None, [str(error), how_to_continue(claimed.path)])),)
        raise
    if claimed.is_gone():
        raise _gone(claimed.path)


@contextlib.contextmanager
def clearing_saves(folder: Path) -> Iterator[None]:
    """Removes what ranks have left of a save where a run fails or is ended; they are ranks of this host alone."""
    try:
        yield
    except LaunchError:
        from paceline.checkpoint.find import clear_leftovers, places_of
        from paceline.checkpoint.storage import is_remote

        for place in places_of(folder):
            if not is_remote(place):
                with contextlib.suppress(OSError):  # the next start removes it
                    clear_leftovers(place)
        raise


@contextlib.contextmanager
def _ending_without(claimed: RunFolder) -> Iterator[None]:
    """Ends the ranks of this process when their folder is removed: what they would still compute has no place."""
    ranks: dict[int, int] = {}

    def look(_: object) -> bool:
        if not claimed.is_gone():
            with contextlib.suppress(OSError, ValueError):  # a note that is being written
                ranks.update(noted_processes(claimed.path, os.getpid()))
            return False
        end_groups(ranks.values(), patience_s=0.0)
        if not ranks:  # their notes went with the folder before they were read: the agent ends what it has started
            os.kill(os.getpid(), signal.SIGTERM)
        return True

    with polling(look, every_s=_LOOK_S, name="folder", patience_s=1.0):
        yield


def _gone(path: Path) -> LaunchError:
    return LaunchError(
        f"the run's folder {path} was removed, or moved away, while the run was going on\n"
        "  its records, checkpoints and logs are kept there as they are written\n"
        "  start it again, and leave the folder alone until the run has ended"
    )


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
