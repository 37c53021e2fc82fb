"""The errors with which a run ends, each with the exit code of the command."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

from paceline.errors import LaunchError, PacelineError, UsageError
from paceline.health.diagnosis import Diagnosis, Stop, diagnose
from paceline.health.exit_codes import PREEMPTED
from paceline.health.failure import Failure

_SMALL_BYTES = 2**16


class RunFailedError(LaunchError):
    """A run that ended because a rank failed."""

    def __init__(self, diagnosis: Diagnosis, end: Stop | None = None) -> None:
        """``end`` says why the run is not started again, where that was decided."""
        reason = "" if end is None or not end.reason else f"\n  {end.reason}"
        self.diagnosis = diagnosis
        self.code = diagnosis.code if end is None else end.exit_code(diagnosis.code)
        super().__init__(f"{diagnosis.message}{reason}")


class RunPreemptedError(LaunchError):
    """A run that was asked to make room, and has saved its state, or had trained no step that could be lost."""

    code = PREEMPTED

    def __init__(self, *, is_saved: bool = True) -> None:
        super().__init__(f"preempted: {'the state is saved' if is_saved else 'no step was trained yet'}")


class RunStoppedError(LaunchError):
    """A run that a signal ended, such as Ctrl-C's SIGINT."""

    def __init__(self, number: int) -> None:
        self.code = 128 + number
        name = signal.Signals(number).name
        super().__init__(f"ended by {name}{' (Ctrl-C)' if name == 'SIGINT' else ''}; no rank is left")


def explain_failures(failures: list[Failure], folder: Path) -> PacelineError:
    """Makes the one error that the user sees: UsageError for what was refused, RunFailedError for what went wrong."""
    if not failures:
        return LaunchError(f"the ranks ended without a result or an error\n  their logs are in {folder / 'logs'}")
    is_silent = any(failure.cause == "died" for failure in failures)
    is_full = is_silent and shutil.disk_usage(folder).free < _SMALL_BYTES
    diagnosis = diagnose(failures, folder, is_disk_full=is_full)
    return UsageError(diagnosis.message) if diagnosis.cause.is_refusal else RunFailedError(diagnosis)
