"""Loops of the user's own that are called again when a rank dies: processes of others stay, results are the same."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from pathlib import Path

import pytest
import rank_functions

import paceline
from paceline.errors import LaunchError, RankFailedError, UsageError
from paceline.run.function_ranks import run_processes

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(autouse=True)
def no_process_outlives_the_call() -> Iterator[None]:
    before = {process.pid for process in multiprocessing.active_children()}
    yield
    assert {process.pid for process in multiprocessing.active_children()} - before == set()


def calls(folder: Path, rank: int) -> list[str]:
    return (folder / f"calls-{rank}").read_text().split()


def test_a_loop_goes_on_from_what_it_saved_as_if_no_rank_had_died(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    whole, faulty = tmp_path / "whole", tmp_path / "faulty"
    for folder in (whole, faulty):
        folder.mkdir()
    work = rank_functions.train_until_told
    expected = paceline.run_ranks(work, 2, args=(whole, {}), device="cpu")
    found = paceline.run_ranks(work, 2, args=(faulty, {3: 1, 5: 0}), device="cpu", restarts=2)
    assert [losses for losses, _ in found] == [losses for losses, _ in expected]
    first, second = calls(faulty, 0), calls(faulty, 1)
    assert first[0] == first[1] != first[2]
    assert second[0] != second[1] == second[2]
    assert [pid for _, pid in found] == [int(first[2]), int(second[2])]
    # What was to be done at the end of the process was done at the end of the attempt; those that died did nothing.
    assert len(list(faulty.glob("exits-0-*"))) >= 1
    told = [line for line in capfd.readouterr().err.splitlines() if "restart" in line]
    again = "calling train_until_told again on all ranks"
    assert told == [
        f"paceline: rank 1 died with exit code -9; {again} (restart 1 of 2)",
        f"paceline: rank 0 died with exit code -9; {again} (restart 2 of 2)",
    ]


def test_a_rank_that_had_returned_is_called_again(tmp_path: Path) -> None:
    assert paceline.run_ranks(
        rank_functions.die_after_others_return, 2, args=(tmp_path,), device="cpu", restarts=1
    ) == [1, 1]


def test_a_rank_that_was_interrupted_while_it_joined_joins_the_next_attempt() -> None:
    join = rank_functions.die_while_others_join
    assert run_processes(rank_functions.sum_of_ranks, 2, join=join, restarts=1, timeout_s=60.0) == [2.0, 2.0]


def test_the_last_death_is_raised() -> None:
    with pytest.raises(LaunchError, match="rank 1 died with exit code -9"):
        paceline.run_ranks(rank_functions.always_die, 2, device="cpu", restarts=2)


def test_an_error_of_the_function_is_raised_at_once() -> None:
    with pytest.raises(RankFailedError, match="a bad sample"):
        paceline.run_ranks(rank_functions.fail_on_last, 2, device="cpu", restarts=2)


def test_a_number_of_restarts_that_cannot_be_is_refused() -> None:
    with pytest.raises(UsageError, match="restarts = -1"):
        paceline.run_ranks(rank_functions.always_die, 2, device="cpu", restarts=-1)
