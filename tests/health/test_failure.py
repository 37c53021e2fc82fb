"""How one rank failed: its message, its kind, the part of its traceback that helps, and what is no failure at all."""

from __future__ import annotations

import copy
import errno
import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

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
    RunFolderError,
    TrainingError,
    UsageError,
)
from paceline.health.diagnosis import first_cause
from paceline.health.exit_codes import HUNG
from paceline.health.failure import (
    Failure,
    describe_error,
    failure_of_verdict,
    is_refusal,
    locate_death,
    silent_failure,
    user_traceback,
)
from paceline.health.ledger_view import GroupName, LedgerCall, LedgerEntry, LedgerView
from paceline.health.verdict import HangVerdict
from paceline.imports import import_from_path


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
    nccl = "NCCL error in: ProcessGroupNCCL.cpp:3780, remote process exited or there was a network error, NCCL 2.28"
    assert describe_error(0, RuntimeError(nccl)).cause == "lost"


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


def test_a_full_disk_of_another_rank_is_told_as_its_own() -> None:
    """All ranks raise what one of them has told in words."""
    problem = "rank 1: cannot write a checkpoint to x: [Errno 28] No space left on device: 'y'\n  older ones are intact"
    failure = describe_error(0, CheckpointError(problem))
    assert failure.kind == "full_disk"
    assert str(failure).startswith("rank 1 failed: cannot write a checkpoint to x")
    assert str(describe_error(1, CheckpointError(problem))).startswith("rank 1 failed: cannot write")
    assert describe_error(0, CheckpointError("rank 1: the model does not fit")).kind == "error"


# Whole failures


class OutOfMemoryError(RuntimeError):
    """As torch names its own, which is not imported where failures are described."""


@pytest.mark.parametrize(
    ("error", "cause", "kind", "message"),
    [
        (ValueError("bad"), "raised", "error", "ValueError: bad"),
        (TypeError("bad"), "raised", "mistake", "TypeError: bad"),
        (MemoryError("no room"), "raised", "out_of_memory", "MemoryError: no room"),
        (OutOfMemoryError("CUDA"), "raised", "out_of_memory", "OutOfMemoryError: CUDA"),
        (CommunicationError("rank 2: nobody came"), "stuck", "error", "nobody came"),
        (CommunicationError("rank 3: nobody came"), "stuck", "error", "rank 3: nobody came"),
        (LostRankError("rank 2: it is gone"), "lost", "lost", "it is gone"),
        (
            OSError(errno.EMFILE, "Too many open files"),
            "raised",
            "error",
            "OSError: [Errno 24] Too many open files\n"
            "  no more files can be opened: some are left open (see ulimit -n)",
        ),
        (
            PermissionError(errno.EACCES, "Permission denied"),
            "raised",
            "error",
            "PermissionError: [Errno 13] Permission denied",
        ),
        (
            CheckpointError("cannot save: [Errno 13] Permission denied"),
            "raised",
            "full_disk",
            "cannot save: [Errno 13] Permission denied\n  the permission to write there is gone: give it back",
        ),
        (
            OSError(errno.ENOSPC, "No space"),
            "raised",
            "full_disk",
            "OSError: [Errno 28] No space\n  the disk is full: free some space",
        ),
    ],
)
def test_an_error_is_described_by_cause_kind_and_message(error: Exception, cause: str, kind: str, message: str) -> None:
    failure = describe_error(2, error)
    assert (failure.rank, failure.cause, failure.kind, failure.message) == (2, cause, kind, message)
    assert not failure.is_refusal
    refused = describe_error(2, error, is_refusal=True)
    assert (refused.kind, refused.is_refusal, str(refused)) == ("refused", True, message)


def test_the_causes_of_an_error_decide_its_kind() -> None:
    error = DataError("sample 3 cannot be read")
    error.__cause__ = RuntimeError("in a worker")
    assert describe_error(0, error).kind == "error"
    error.__cause__.__cause__ = AttributeError("no such field")
    assert describe_error(0, error).kind == "mistake"
    error.__cause__.__cause__ = MemoryError()
    assert describe_error(0, error).kind == "out_of_memory"


def test_a_full_disk_hides_no_line_of_the_users_code(user_code: ModuleType) -> None:
    full = OSError(errno.ENOSPC, "No space")
    assert describe_error(0, full).traceback == ""
    full.__cause__ = caught(user_code.inner, 3)
    assert "in inner" in describe_error(0, full).traceback


def test_an_error_in_whose_context_nobody_is_interested_is_not_followed() -> None:
    error = ValueError("bad")
    error.__context__ = OSError(errno.ENOSPC, "No space")
    assert describe_error(0, error).kind == "full_disk"
    error.__suppress_context__ = True
    assert describe_error(0, error).kind == "error"


@pytest.mark.timeout(20)
@pytest.mark.parametrize("made", [ValueError, TrainingError])
def test_an_error_that_was_raised_from_itself_is_described(made: type[Exception]) -> None:
    error, other = made("bad"), made("worse")
    error.__cause__ = error
    assert describe_error(0, error).kind == "error"
    error.__cause__, other.__cause__ = other, error
    assert describe_error(0, error).kind == "error"


def test_of_a_deep_foreign_traceback_the_last_five_frames_are_left() -> None:
    nested: list[object] = []
    for _ in range(3000):
        nested = [nested]
    text = user_traceback(caught(copy.deepcopy, nested))
    assert 0 < text.count("  File") <= 5
    assert "RecursionError" in text


def test_files_of_python_and_torch_are_not_the_users() -> None:
    """An installed package is: it is what the user chose to call."""
    from paceline.health import failure

    library = failure._STANDARD_LIBRARY
    assert failure._is_users("/home/me/train.py")
    assert failure._is_users(f"{library}/site-packages/timm/models.py")
    assert failure._is_users("/usr/lib/python3/dist-packages/timm/models.py")
    assert not failure._is_users(f"{library}/json/decoder.py")
    assert not failure._is_users(f"{library}/site-packages/torch/nn/functional.py")
    assert not failure._is_users("<frozen importlib._bootstrap>")
    assert not failure._is_users(failure.__file__)
    assert failure._is_users(f"{failure._PACKAGE}_extras/own.py")
    assert failure._is_users(f"{library}.own/train.py")


def test_a_folder_is_refused_only_before_the_trainer_is_built() -> None:
    assert is_refusal(RunFolderError("x"), is_built=False, has_trained=False)
    assert not is_refusal(RunFolderError("x"), is_built=True, has_trained=False)


# Failures without an error


def test_a_rank_that_the_watch_ended_made_no_progress() -> None:
    failure = silent_failure(3, HUNG, "  \nlast words\n\n")
    assert (failure.cause, failure.kind, failure.message, failure.traceback) == (
        "stuck",
        "hang",
        "made no progress",
        "last words",
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT])
def test_a_signal_that_ends_is_told_as_somebody_elses(number: signal.Signals) -> None:
    failure = silent_failure(0, -number)
    assert (failure.cause, failure.kind) == ("ended", "killed")
    assert str(failure) == f"rank 0 was ended by {number.name}, which did not come from here"


def test_only_a_kill_without_a_sender_may_be_for_want_of_memory() -> None:
    assert silent_failure(0, -signal.SIGBUS).message == "was killed by SIGBUS"
    assert silent_failure(0, -signal.SIGKILL).message == (
        "was killed by SIGKILL\n  if nobody sent it, the machine ran out of memory (dmesg tells)"
    )


@pytest.mark.parametrize(
    ("message", "cause", "told"),
    [
        ("ValueError: bad", "raised", "rank 4 failed: ValueError: bad"),
        ("waited", "stuck", "rank 4 failed: waited"),
        ("it is gone", "lost", "rank 4 failed: it is gone"),
        ("was killed by SIGKILL", "killed", "rank 4 was killed by SIGKILL"),
        ("left with exit code 1", "died", "rank 4 left with exit code 1"),
        ("was ended by SIGTERM", "ended", "rank 4 was ended by SIGTERM"),
        ("rank 4 ran out of memory", "raised", "rank 4 ran out of memory"),
        ("rank 44 ran out of memory", "raised", "rank 4 failed: rank 44 ran out of memory"),
        ("rank 12: the disk is full", "raised", "rank 12 failed: the disk is full"),
    ],
)
def test_a_failure_is_told_with_the_rank_that_it_concerns(message: str, cause: str, told: str) -> None:
    failure = Failure(rank=4, cause=cause, message=message, time=1.0)  # type: ignore[arg-type]
    assert str(failure) == told
    for values in ({"is_refusal": True}, {"kind": "hang"}):
        assert str(Failure(rank=4, cause="raised", message=message, time=1.0, **values)) == message  # type: ignore[arg-type]


def test_the_ranks_that_a_verdict_blames_failed_first() -> None:
    verdict = HangVerdict(kind="missing", ranks=(2, 1), sentence="ranks 1 and 2 are missing")
    blamed, victim = (failure_of_verdict(verdict, rank, Path("run/verdict.txt")) for rank in (2, 0))
    assert victim.time - blamed.time > 0.5
    for failure, rank in ((blamed, 2), (victim, 0)):
        assert (failure.rank, failure.cause, failure.kind, failure.blamed) == (rank, "stuck", "hang", 1)
        assert str(failure) == "ranks 1 and 2 are missing\n  what every rank does is in run/verdict.txt"
    nobody = HangVerdict(kind="silent", ranks=(), sentence="nothing moves")
    first, second = (failure_of_verdict(nobody, rank, Path("verdict.txt")) for rank in (0, 5))
    assert abs(second.time - first.time) < 0.5
    assert (first.blamed, second.blamed) == (0, 5)


def test_a_death_is_told_with_where_the_rank_was() -> None:
    entry = LedgerEntry(
        number=1, group=GroupName((0, 1)), sequence=0, call=LedgerCall(kind="barrier"), site="loop.py:3 in main"
    )
    killed = silent_failure(1, -signal.SIGKILL)
    failure, verdict = locate_death(killed, LedgerView(rank=1, phase="forward", step=7, entries=(entry,)))
    where = "in phase forward, 7 steps after its start, after barrier() at loop.py:3 in main"
    assert failure.message.splitlines() == [
        "was killed by SIGKILL",
        f"  it was {where}",
        "  if nobody sent it, the machine ran out of memory (dmesg tells)",
    ]
    assert (verdict.kind, verdict.ranks) == ("dead", (1,))
    assert verdict.sentence == f"rank 1 was killed by SIGKILL {where}"
    failure, _ = locate_death(silent_failure(1, 7), LedgerView(rank=1))
    assert failure.message == "left with exit code 7 and no error\n  it was in phase setup, 0 steps after its start"
