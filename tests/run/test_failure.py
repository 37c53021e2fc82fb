"""One message for a failed run: the cause and not its consequences, and of tracebacks what helps."""

from __future__ import annotations

import errno
import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from torch.utils.data import DataLoader

from paceline.errors import (
    BadSampleError,
    CheckpointError,
    CommunicationError,
    ConfigError,
    DataError,
    LateRankError,
    LostRankError,
    MemoryExhaustedError,
    PacelineError,
    Problem,
    TrainingError,
    UsageError,
)
from paceline.health.diagnosis import first_cause
from paceline.health.exit_codes import FAILED
from paceline.health.failure import Failure, describe_error, is_refusal, silent_failure, user_traceback
from paceline.imports import import_from_path
from paceline.run.notes import (
    FAILURES,
    RunFailedError,
    RunStoppedError,
    explain_failures,
    forget,
    read_failures,
    write_failure,
)


@pytest.fixture
def user_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module of the user's, which is neither ours nor torch's nor Python's."""
    name = f"code_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(
        "def inner(index):\n    raise ValueError('bad pixel')\n"
        "def outer(index):\n    try:\n        inner(index)\n    except ValueError as error:\n"
        "        raise KeyError('no sample') from error\n"
        "class Data:\n    def __len__(self): return 4\n    def __getitem__(self, index): return inner(index)\n"
        "def call_ours():\n    from paceline.imports import import_from_path\n    import_from_path('no-path', 'x')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return __import__(name)


def caught(call: Callable[..., object], *args: object) -> BaseException:
    """Returns what a call raises, without the frame of this function."""
    with pytest.raises(Exception) as raised:  # noqa: PT011
        call(*args)
    error = raised.value
    return error.with_traceback(raised.tb.tb_next)


# Tracebacks


def test_a_traceback_begins_with_the_users_code(user_code: ModuleType) -> None:
    loader: DataLoader[object] = DataLoader(user_code.Data(), batch_size=2)
    text = user_traceback(caught(next, iter(loader)))
    assert "torch" not in text
    assert [line for line in text.splitlines() if line.startswith("  File")] == [
        f'  File "{user_code.__file__}", line 10, in __getitem__',
        f'  File "{user_code.__file__}", line 2, in inner',
    ]
    assert text.endswith("ValueError: bad pixel")


def test_the_errors_that_an_error_came_from_are_shown_too(user_code: ModuleType) -> None:
    text = user_traceback(caught(user_code.outer, 3))
    assert text.index("ValueError: bad pixel") < text.index("direct cause") < text.index("KeyError: 'no sample'")


def test_an_error_of_ours_shows_the_users_code_beneath_it_and_not_itself(user_code: ModuleType) -> None:
    error = DataError("sample 3 cannot be read")
    error.__cause__ = caught(user_code.inner, 3)
    text = user_traceback(error)
    assert text.endswith("ValueError: bad pixel")
    assert "DataError" not in text


def test_the_users_code_that_calls_ours_wrongly_is_shown(user_code: ModuleType) -> None:
    text = user_traceback(caught(user_code.call_ours))
    assert "in call_ours" in text
    assert "x = 'no-path' does not name a function or class" in text


def test_an_error_of_ours_without_the_users_code_says_it_all(monkeypatch: pytest.MonkeyPatch) -> None:
    assert user_traceback(TrainingError("the loss is nan")) == ""
    monkeypatch.setattr(sys, "path", sys.path[:])
    missing = caught(import_from_path, "nowhere_at_all:build", "model.factory")
    assert isinstance(missing.__cause__, ModuleNotFoundError)
    assert user_traceback(missing) == ""


def test_a_foreign_error_without_the_users_code_keeps_its_last_frames() -> None:
    text = user_traceback(caught(json.loads, "{"))
    assert text.endswith("JSONDecodeError: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)")
    assert text.count("  File") == 3


def test_the_traceback_of_a_loader_worker_comes_with_the_error() -> None:
    """A worker's error arrives without frames: its traceback is a note."""
    error = DataError("sample 3 cannot be read")
    error.__cause__ = ValueError("bad pixel")
    error.__cause__.add_note("in a loader worker:\n  File of the user")
    assert user_traceback(error) == "ValueError: bad pixel\nin a loader worker:\n  File of the user"
    assert not is_refusal(error, is_built=False, has_trained=False)


def test_data_that_is_wrong_comes_again_and_data_that_is_away_may_come_back() -> None:
    assert describe_error(0, BadSampleError("token 3 is 11, beyond a vocabulary of 11")).kind == "mistake"
    assert describe_error(0, DataError("tokens.bin cannot be read any more: Input/output error")).kind == "error"


# Messages


def test_a_lost_connection_is_known_whoever_lost_it() -> None:
    ours = LostRankError("rank 2: all_reduce in group [0, 1, 2] failed: another rank is gone")
    ours.__cause__ = RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:40860")
    assert describe_error(2, ours).cause == "lost"
    assert str(describe_error(2, ours)) == "rank 2 failed: all_reduce in group [0, 1, 2] failed: another rank is gone"
    assert describe_error(0, ours.__cause__).cause == "lost"
    assert describe_error(0, ours.__cause__).traceback == ""
    assert describe_error(0, ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")).cause == "raised"


def test_a_rank_that_waited_in_vain_is_no_cause_of_its_own() -> None:
    assert describe_error(0, LateRankError("rank 1 was awaited in vain")).cause == "stuck"


@pytest.mark.parametrize(("made", "cause"), [(LostRankError, "lost"), (LateRankError, "stuck"), (UsageError, "raised")])
def test_a_failure_is_judged_by_its_kind_and_not_by_its_words(made: type[PacelineError], cause: str) -> None:
    for words in ("no words", "rank 1 is gone (process ended)", "Connection closed by peer", "did not come within 3 s"):
        assert describe_error(0, made(words)).cause == cause


@pytest.mark.parametrize(
    ("number", "sign"),
    [(errno.ENOSPC, "the disk is full"), (errno.EDQUOT, "quota"), (errno.EROFS, "read-only"), (errno.EFBIG, "ulimit")],
)
def test_a_disk_that_takes_no_more_is_named_without_a_traceback(number: int, sign: str, tmp_path: Path) -> None:
    failed = RuntimeError("unexpected pos 64 vs 0")  # what torch.save makes of it
    failed.__context__ = OSError(number, "cannot write")
    for error in (OSError(number, "cannot write", str(tmp_path)), failed):
        failure = describe_error(1, error)
        assert sign in failure.message
        assert failure.traceback == ""


@pytest.mark.parametrize(
    ("exit_code", "cause", "message"),
    [
        (-signal.SIGKILL, "killed", "rank 1 was killed by SIGKILL\n  if nobody sent it, the machine ran out of memory"),
        (-signal.SIGSEGV, "killed", "rank 1 was killed by SIGSEGV"),
        (-signal.SIGABRT, "died", "rank 1 was killed by SIGABRT"),
        (-signal.SIGTERM, "ended", "rank 1 was ended by SIGTERM"),
        (-200, "killed", "rank 1 was killed by signal 200"),
        (7, "died", "rank 1 left with exit code 7 and no error"),
        (0, "died", "rank 1 left with exit code 0 and no error"),
    ],
)
def test_a_rank_without_a_word_is_described_by_its_exit_code(exit_code: int, cause: str, message: str) -> None:
    failure = silent_failure(1, exit_code)
    assert failure.cause == cause
    assert str(failure).startswith(message)


@pytest.mark.parametrize(
    ("log", "cause", "kind"),
    [
        (
            "[E] watchdog thread terminated: ncclRemoteError: A call failed possibly due to a network error",
            "lost",
            "lost",
        ),
        ("[E] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3)", "stuck", "error"),
        ("double free or corruption", "died", "killed"),
    ],
)
def test_an_abort_by_nccl_is_blamed_on_another_rank(log: str, cause: str, kind: str) -> None:
    aborted = silent_failure(0, -signal.SIGABRT, log=log)
    assert (aborted.cause, aborted.kind) == (cause, kind)
    gone = silent_failure(1, 0)
    assert first_cause([aborted, gone]) is (aborted if cause == "died" else gone)
    assert silent_failure(0, -signal.SIGKILL, log=log).cause == "killed"


def test_a_message_that_names_its_rank_is_told_as_it_is() -> None:
    error = MemoryExhaustedError("rank 1 ran out of memory with a microbatch of 8")
    assert str(describe_error(1, error)) == "rank 1 ran out of memory with a microbatch of 8"
    assert str(describe_error(0, error)) == "rank 0 failed: rank 1 ran out of memory with a microbatch of 8"
    assert describe_error(1, error).kind == "out_of_memory"


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


# Refusals


CONFIG = ConfigError([Problem(what="x")])


@pytest.mark.parametrize(
    ("error", "before", "built", "trained"),
    [
        (CONFIG, True, True, False),
        (UsageError("x"), True, True, False),
        (DataError("x"), True, False, False),
        (CheckpointError("x"), True, False, False),
        (TrainingError("x"), False, False, False),
        (CommunicationError("x"), False, False, False),
        (ValueError("x"), False, False, False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_only_what_was_asked_for_is_refused_and_only_in_time(
    error: Exception, before: bool, built: bool, trained: bool
) -> None:
    assert is_refusal(error, is_built=False, has_trained=False) is before
    assert is_refusal(error, is_built=True, has_trained=False) is built
    assert is_refusal(error, is_built=True, has_trained=True) is trained


def test_an_error_of_the_users_code_is_a_failure_and_no_refusal(user_code: ModuleType) -> None:
    error: PacelineError = UsageError("model.factory raised")
    error.__cause__ = caught(user_code.inner, 3)
    assert not is_refusal(error, is_built=False, has_trained=False)


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


def test_a_full_disk_of_another_rank_is_told_as_its_own() -> None:
    """All ranks raise what one of them has told in words."""
    problem = "rank 1: cannot write a checkpoint to x: [Errno 28] No space left on device: 'y'\n  older ones are intact"
    failure = describe_error(0, CheckpointError(problem))
    assert failure.kind == "full_disk"
    assert str(failure).startswith("rank 1 failed: cannot write a checkpoint to x")
    assert str(describe_error(1, CheckpointError(problem))).startswith("rank 1 failed: cannot write")
    assert describe_error(0, CheckpointError("rank 1: the model does not fit")).kind == "error"
