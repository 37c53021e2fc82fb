"""One message for a failed run: the cause and not its consequences; and the files that ranks leave it in."""

from __future__ import annotations

import errno
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline.errors import UsageError
from paceline.health.exit_codes import FAILED
from paceline.health.failure import Failure, describe_error, silent_failure
from paceline.run.notes import (
    FAILURES,
    RunFailedError,
    RunStoppedError,
    explain_failures,
    forget,
    read_failures,
    write_failure,
)


def test_of_long_output_the_end_is_shown(tmp_path: Path) -> None:
    failure = silent_failure(0, 1, "\n".join(f"line {number}" for number in range(100)))
    text = str(explain_failures([failure], tmp_path))
    assert "line 99" in text
    assert "line 80" in text
    assert "line 79" not in text


# What the user is told


CONSEQUENCES = [
    Failure(rank=5, cause="stuck", message="waited", time=1.0),
    Failure(rank=6, cause="ended", message="was ended by SIGTERM", time=1.0),
    Failure(rank=7, cause="lost", message="another rank is gone", time=1.0),
]


CAUSES = [
    Failure(rank=1, cause="killed", message="was killed by SIGKILL", time=9.0),
    Failure(rank=2, cause="raised", message="ValueError", time=9.0),
    Failure(rank=3, cause="died", message="left with exit code 7", time=9.0),
]


def test_a_failure_names_rank_cause_traceback_and_log(tmp_path: Path) -> None:
    cause = Failure(rank=1, cause="raised", message="ValueError: bad", traceback="Traceback\nValueError: bad", time=2.0)
    problem = explain_failures([*CONSEQUENCES, cause], tmp_path)
    assert type(problem) is RunFailedError
    assert (problem.diagnosis.cause, problem.code) == (cause, FAILED)
    assert str(problem) == (
        f"rank 1 failed: ValueError: bad\n\nTraceback\nValueError: bad\n\n  its log is {tmp_path}/logs/rank-1.log"
    )


def test_what_was_refused_is_told_as_if_it_had_been_found_before_the_start(tmp_path: Path) -> None:
    refused = Failure(rank=1, cause="raised", message="ranks = 4\n  too many", time=2.0, is_refusal=True)
    problem = explain_failures([refused, *CONSEQUENCES], tmp_path)
    assert type(problem) is UsageError
    assert str(problem) == "ranks = 4\n  too many"


def test_a_full_disk_explains_a_rank_that_could_not_say_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    silent = silent_failure(1, 1)
    assert "the disk" not in str(explain_failures([silent], tmp_path))
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=0))
    problem = explain_failures([silent], tmp_path)
    assert f"the disk of {tmp_path} is full" in str(problem)
    assert isinstance(problem, RunFailedError)
    assert problem.diagnosis.cause.kind == "full_disk"  # so that it is not started again in vain
    assert "the disk" not in str(explain_failures([CAUSES[0]], tmp_path))


def test_ranks_that_left_nothing_at_all_still_make_a_message(tmp_path: Path) -> None:
    assert str(tmp_path / "logs") in str(explain_failures([], tmp_path))


@pytest.mark.parametrize(("number", "text"), [(signal.SIGINT, "SIGINT (Ctrl-C)"), (signal.SIGTERM, "SIGTERM")])
def test_a_run_that_was_stopped_names_the_signal(number: int, text: str) -> None:
    error = RunStoppedError(number)
    assert str(error) == f"ended by {text}; no rank is left"
    assert error.code == 128 + number


# Files


def test_failures_come_back_from_their_files_and_can_be_cleared(tmp_path: Path) -> None:
    assert read_failures(tmp_path) == []
    failures = [describe_error(rank, ValueError(f"bad {rank}"), is_refusal=rank == 2) for rank in (0, 2)]
    for failure in failures:
        write_failure(tmp_path, failure)
    assert read_failures(tmp_path) == failures
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["rank-0.error.json", "rank-2.error.json"]
    forget(tmp_path, FAILURES)
    assert list((tmp_path / "logs").iterdir()) == []


def test_a_failure_that_cannot_be_written_leaves_no_half_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="No space left"):
        write_failure(tmp_path, silent_failure(0, 1))
    assert list((tmp_path / "logs").iterdir()) == []
