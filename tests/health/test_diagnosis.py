"""One diagnosis of ranks that died or hung: who is to blame, the exit code, and whether a restart helps."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.config.sections import RecoveryConfig
from paceline.health.diagnosis import (
    Diagnosis,
    FailedAttempt,
    Restart,
    Stop,
    TrainedSteps,
    after_failure,
    diagnose,
    first_cause,
)
from paceline.health.exit_codes import FAILED, HUNG, NO_PROGRESS, REFUSED
from paceline.health.failure import Failure, FailureKind

# Who is to blame


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


@pytest.mark.parametrize("cause", [*CAUSES, *CONSEQUENCES], ids=lambda failure: failure.cause)
def test_a_consequence_is_never_the_cause_however_early(cause: Failure) -> None:
    later = CONSEQUENCES[CONSEQUENCES.index(cause) + 1 :] if cause in CONSEQUENCES else CONSEQUENCES
    for order in itertools.permutations([cause, *later]):
        assert first_cause(order) is cause


def test_of_equal_causes_the_first_counts() -> None:
    first, second = (Failure(rank=rank, cause="raised", message="", time=time) for rank, time in ((3, 1.5), (0, 1.6)))
    assert first_cause([second, first]) is first


# The diagnosis


def test_a_diagnosis_names_the_cause_and_its_log() -> None:
    assert diagnose([*CONSEQUENCES, CAUSES[0]], Path("run")) == Diagnosis(
        cause=CAUSES[0], message="rank 1 was killed by SIGKILL\n  its log is run/logs/rank-1.log", code=FAILED
    )


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("rank 3: the disk is full", "full_disk"),
        ("rank 3 is missing from barrier(): it waits for data; rank 0 waits for it", "hang"),
        ("ranks 3 and 4 are missing from barrier(); rank 0 waits for them", "hang"),
        ("9 ranks (3, 4 ...) are missing from barrier(); rank 0 waits for them", "hang"),
        ("ranks called different operations (operation 7): rank 3 called barrier(), rank 0 called send()", "hang"),
    ],
)
def test_the_log_is_that_of_the_rank_that_the_first_line_names(message: str, kind: FailureKind) -> None:
    told_by = Failure(rank=0, cause="raised", message=message, time=1.0, kind=kind)
    assert diagnose([told_by], Path("run")).message.endswith("its log is run/logs/rank-3.log")


def test_the_exit_code_says_what_happened() -> None:
    hung = Failure(rank=0, cause="stuck", message="rank 0 is missing", time=1.0, kind="hang")
    refused = Failure(rank=0, cause="raised", message="too many ranks", time=1.0, is_refusal=True, kind="refused")
    assert diagnose([hung], Path("run")).code == HUNG
    assert diagnose([refused], Path("run")) == Diagnosis(cause=refused, message="too many ranks", code=REFUSED)
    assert Stop(gives_up=True).exit_code(FAILED) == NO_PROGRESS
    assert Stop(gives_up=True).exit_code(HUNG) == HUNG
    assert Stop().exit_code(FAILED) == FAILED


def test_an_attempt_is_known_by_what_ended_it_and_how_far_it_came() -> None:
    progress = {0: TrainedSteps(first_step=10, last_step=14), 1: TrainedSteps(first_step=10, last_step=13)}
    failure = Failure(rank=1, cause="stuck", message="rank 1 stands (step 3, for 2.1 s)", time=1.0, kind="hang")
    found = FailedAttempt.of(diagnose([failure], Path("run")), progress)
    assert (found.first_step, found.last_step, str(found)) == (10, 13, "rank 1 stands (step 3) after step 13")
    unknown = FailedAttempt.of(diagnose([CAUSES[1]], Path("run")), {})
    assert str(unknown) == "rank 2 failed: ValueError before its first step"


# Whether a restart helps


def attempt(
    kind: FailureKind = "killed", step: int = 5, *, first: int = 0, message: str = "", rank: int = 1
) -> FailedAttempt:
    text = message or f"rank {rank} was killed by SIGKILL"
    return FailedAttempt(first_step=first, kind=kind, rank=rank, step=step, message=text)


def decide(*attempts: FailedAttempt, **settings: Any) -> Restart | Stop:
    return after_failure(RecoveryConfig(**settings), attempts)


def test_a_killed_rank_is_started_again_up_to_the_limit() -> None:
    found = [attempt(step=10 * number) for number in range(1, 5)]
    decisions = [decide(*found[:number]) for number in range(1, 5)]
    assert decisions[:3] == [Restart(number=1), Restart(number=2), Restart(number=3)]
    spent = decisions[3]
    assert isinstance(spent, Stop)
    assert (spent.gives_up, spent.exit_code(FAILED)) == (True, NO_PROGRESS)
    assert spent.reason == (
        "not started again: recovery.max_restarts = 3 is reached within recovery.restart_window = 100 steps\n"
        "    restart 1: rank 1 was killed by SIGKILL after step 10\n"
        "    restart 2: rank 1 was killed by SIGKILL after step 20\n"
        "    restart 3: rank 1 was killed by SIGKILL after step 30"
    )
    assert decide(found[0], max_restarts=0) == Stop()


def test_progress_refills_the_budget() -> None:
    early = [attempt(step=10), attempt(step=60)]
    assert isinstance(decide(*early, attempt(step=109), max_restarts=2, restart_window=100), Stop)
    found = [attempt(step=step) for step in (10, 60, 110, 160, 210)]
    for number in range(2, 6):
        assert decide(*found[:number], max_restarts=2, restart_window=100) == Restart(number=2)
    assert isinstance(decide(*found, max_restarts=2, restart_window=None), Stop)


def test_hosts_that_come_or_go_cost_nothing() -> None:
    gone = attempt("hosts", 20, message="host h1 was lost")
    assert decide(*[gone] * 9, max_restarts=1) == Restart(number=0)
    assert decide(attempt(step=10), *[gone] * 9, max_restarts=1) == Restart(number=0)
    assert decide(*[gone] * 9, attempt(step=20), max_restarts=1) == Restart(number=1)


def test_the_same_at_the_same_step_twice_is_not_tried_a_third_time() -> None:
    decision = decide(attempt("error", 7, message="ValueError: x"), attempt("error", 7, message="ValueError: x"))
    assert decision == Stop(reason="not started again: the same came twice, after step 7", gives_up=True)
    other = decide(attempt("error", 7, message="ValueError: x"), attempt("error", 7, message="OSError: y"))
    assert other == Restart(number=2)
    assert decide(attempt(step=7), attempt(step=7, rank=2), max_stalled_restarts=1) == Restart(number=2)
    again = decide(attempt(step=7), attempt(step=7, first=6))
    assert again == Stop(reason="not started again: the same came twice, after step 7", gives_up=True)


def test_a_rank_that_is_killed_while_it_recovers_is_started_again() -> None:
    """By the same signal after the same step as the one from which it recovers, and not by what that step does."""
    assert decide(attempt(step=7), attempt(step=7, first=7)) == Restart(number=2)
    decision = decide(attempt(step=7), attempt(step=7, first=7), attempt(step=7, first=7))
    assert isinstance(decision, Stop)
    assert "each of the last 2 restarts came no further than step 7" in decision.reason
    fault = "rank 1 was killed by SIGSEGV"
    assert isinstance(decide(attempt(step=7, message=fault), attempt(step=7, first=7, message=fault)), Stop)


def test_a_run_must_get_further() -> None:
    stalled = [attempt(step=37), attempt(step=33, first=30), attempt(step=36, first=30, rank=0)]
    assert decide(*stalled[:2]) == Restart(number=2)  # once is forgiven
    decision = decide(*stalled)
    assert isinstance(decision, Stop)
    assert decision.gives_up
    assert decision.reason == "not started again: each of the last 2 restarts came no further than step 37"
    strict = decide(*stalled[:2], max_stalled_restarts=0)
    assert strict == Stop(reason="not started again: the last restart came no further than step 37", gives_up=True)


@pytest.mark.parametrize(
    ("kind", "settings", "text"),
    [
        ("refused", {}, ""),
        ("mistake", {}, "an error of this kind comes again"),
        ("out_of_memory", {}, "memory would run out again"),
        ("full_disk", {}, "it must be able to write first"),
        ("hang", {"on_hang": "stop"}, "recovery.on_hang = stop"),
    ],
)
def test_what_a_restart_does_not_help_against(kind: FailureKind, settings: dict[str, Any], text: str) -> None:
    decision = decide(attempt(kind), **settings)
    assert isinstance(decision, Stop)
    assert text in decision.reason
    assert not decision.gives_up


def test_an_error_before_the_first_step_comes_again() -> None:
    assert isinstance(decide(attempt("error", 0)), Stop)
    assert decide(attempt("killed", 0)) == Restart(number=1)
    assert decide(attempt("error", 30, first=30)) == Restart(number=1)


def test_memory_and_hangs_are_asked_for() -> None:
    assert decide(attempt("out_of_memory"), on_oom="restart") == Restart(number=1)
    halved = [attempt("out_of_memory"), attempt("out_of_memory")]
    assert decide(*halved, on_oom="halve") == Restart(number=2, halves_microbatch=True)
    assert isinstance(decide(*halved, on_oom="restart"), Stop)
    assert decide(attempt("hang")) == Restart(number=1)


@given(st.lists(st.integers(0, 20), min_size=1, max_size=8), st.integers(0, 4), st.integers(0, 2))
def test_restarts_end_whatever_comes(steps: list[int], limit: int, stalled: int) -> None:
    attempts = [attempt(step=step, rank=place) for place, step in enumerate(steps)]
    decision = decide(*attempts, max_restarts=limit, max_stalled_restarts=stalled)
    if isinstance(decision, Restart):
        assert decision.number == len(attempts) <= limit
        steps = [attempt.last_step for attempt in attempts]
        assert len(steps) - 1 - steps.index(max(steps)) <= stalled  # since the one that came furthest
    assert decision == decide(*attempts, max_restarts=limit, max_stalled_restarts=stalled)


def test_a_rank_that_is_stopped_twice_at_the_same_place_is_the_same_incident() -> None:
    told = [f"rank 1 is stopped (SIGSTOP) in phase data (step 3), for {5 + n}.3 s (process {n})" for n in (1, 2)]
    failures = [Failure(rank=1, cause="stuck", message=message, time=0.0, kind="hang") for message in told]
    first, second = (FailedAttempt.of(diagnose([failure], Path("run")), {}) for failure in failures)
    assert first == second
