"""How often a run is started again, where each limit lies; and what a full disk explains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.config.sections import RecoveryConfig
from paceline.health.diagnosis import Diagnosis, FailedAttempt, Restart, Stop, after_failure, diagnose
from paceline.health.exit_codes import FAILED, HUNG, NO_PROGRESS
from paceline.health.failure import Cause, Failure, FailureKind


def attempt(kind: FailureKind, step: int = 5, first_step: int = 0, **values: Any) -> FailedAttempt:
    return FailedAttempt(first_step=first_step, kind=kind, rank=0, step=step, message=f"at {step}", **values)


def decide(*attempts: FailedAttempt, requeues: int = 0, **policy: Any) -> Restart | Stop:
    return after_failure(RecoveryConfig(**policy), attempts, max_requeues=requeues)


def why(decision: Restart | Stop) -> str:
    assert isinstance(decision, Stop)
    return decision.reason.removeprefix("not started again: ")


def test_room_is_made_as_often_as_it_was_agreed() -> None:
    made, failed = attempt("preempted"), attempt("error")
    assert decide(made, requeues=1) == Restart(number=1)
    assert decide(made, failed, made, requeues=2) == Restart(number=2)
    assert decide(made, made, requeues=1) == Stop(reason="not started again: --max-requeues is 1")
    assert decide(made) == Stop(reason="not started again: --max-requeues is 0")


def test_hosts_that_come_or_go_cost_nothing() -> None:
    assert decide(*[attempt("hosts")] * 9, max_restarts=1) == Restart(number=0)
    assert decide(attempt("hosts"), attempt("preempted"), attempt("error"), max_restarts=1) == Restart(number=1)


@pytest.mark.parametrize(
    ("kind", "policy", "reason"),
    [
        ("refused", {}, ""),
        ("error", {"max_restarts": 0}, ""),
        ("mistake", {}, "an error of this kind comes again"),
        ("out_of_memory", {"on_oom": "stop"}, "memory would run out again (see recovery.on_oom)"),
        ("full_disk", {}, "it must be able to write first"),
        ("hang", {"on_hang": "stop"}, "recovery.on_hang = stop"),
    ],
)
def test_what_a_restart_does_not_help_ends_the_run(kind: FailureKind, policy: dict[str, Any], reason: str) -> None:
    decision = decide(attempt(kind), **policy)
    assert why(decision) == reason
    assert not decision.gives_up  # type: ignore[union-attr]


def test_memory_is_tried_with_half_the_microbatch_while_that_can_be() -> None:
    policy = {"on_oom": "halve", "max_restarts": 3}
    assert decide(attempt("out_of_memory", 0), **policy) == Restart(number=1, halves_microbatch=True)
    twice = decide(attempt("out_of_memory", 5), attempt("out_of_memory", 5), **policy, max_stalled_restarts=2)
    assert twice == Restart(number=2, halves_microbatch=True)  # the same came twice, and the microbatch is another
    assert why(decide(attempt("out_of_memory", can_halve=False), **policy)) == "the microbatch cannot be halved"
    assert decide(attempt("error", can_halve=False), **policy) == Restart(number=1)


def test_an_error_before_the_first_step_comes_again() -> None:
    assert why(decide(attempt("error", 0))) == "it came before the first step, and would again"
    assert decide(attempt("error", 0, 3)) == Restart(number=1)  # a run that went on from a checkpoint
    assert decide(attempt("killed", 0)) == Restart(number=1)
    assert decide(attempt("killed", 0), attempt("error", 0)) == Restart(number=2)


def test_the_same_twice_is_enough() -> None:
    decision = decide(attempt("error", 7), attempt("error", 7, 5), max_stalled_restarts=5)
    assert (why(decision), decision) == (
        "the same came twice, after step 7",
        Stop(reason=decision.reason, gives_up=True),
    )  # type: ignore[union-attr]
    assert decide(attempt("error", 7), attempt("killed", 7), max_stalled_restarts=5) == Restart(number=2)


def test_the_budget_is_told_with_what_it_was_spent_on() -> None:
    steps = [attempt("killed", step) for step in (3, 6, 9)]
    assert decide(*steps, max_restarts=3) == Restart(number=3)
    decision = decide(*steps, max_restarts=2, restart_window=None)
    assert why(decision).splitlines() == [
        "recovery.max_restarts = 2 is reached",
        "    restart 1: at 3 after step 3",
        "    restart 2: at 6 after step 6",
    ]
    assert decision.gives_up  # type: ignore[union-attr]
    assert decide(*steps, max_restarts=2, restart_window=6) == Restart(number=2)  # of the last six steps
    told = why(decide(*steps, max_restarts=2, restart_window=7))
    assert told.startswith("recovery.max_restarts = 2 is reached within recovery.restart_window = 7 steps\n")


def test_restarts_must_come_further() -> None:
    steps = [attempt("killed", 9), attempt("killed", 4), attempt("killed", 5)]
    assert decide(*steps[:2], max_restarts=9, max_stalled_restarts=1) == Restart(number=2)
    assert why(decide(*steps, max_restarts=9, max_stalled_restarts=1)) == (
        "each of the last 2 restarts came no further than step 9"
    )
    assert why(decide(*steps[:2], max_restarts=9, max_stalled_restarts=0)) == (
        "the last restart came no further than step 9"
    )


@pytest.mark.parametrize(
    ("code", "gives_up", "left"),
    [(FAILED, False, FAILED), (FAILED, True, NO_PROGRESS), (HUNG, True, HUNG), (HUNG, False, HUNG)],
)
def test_the_code_says_that_restarts_did_not_help(code: int, gives_up: bool, left: int) -> None:
    assert Stop(gives_up=gives_up).exit_code(code) == left


@pytest.mark.parametrize(("cause", "is_full"), [("died", True), ("died", False), ("killed", True), ("raised", True)])
def test_a_full_disk_explains_a_rank_that_left_no_word_and_no_other(cause: Cause, is_full: bool) -> None:
    failure = Failure(rank=1, cause=cause, message="bad", traceback="Traceback\n  of it\n", time=1.0)
    found = diagnose([failure], Path("run"), is_disk_full=is_full)
    is_explained = cause == "died" and is_full
    assert ("the disk of run is full, so that it could not say why: free some space" in found.message) is is_explained
    assert found.cause.kind == ("full_disk" if is_explained else "error")
    assert "\n\nTraceback\n  of it\n" in found.message
    assert found.message.endswith("\n  its log is run/logs/rank-1.log")
    assert found == Diagnosis(cause=found.cause, message=found.message, code=FAILED)
