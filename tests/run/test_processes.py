"""Functions on real processes: what they return and raise comes back, and no process outlives the call."""

from __future__ import annotations

import linecache
import multiprocessing
import os
import socket
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import rank_functions
import torch

import paceline
from paceline.errors import LaunchError, LostRankError, RankFailedError, UsageError
from paceline.run.function_ranks import RankHost, _first_cause, run_processes
from paceline.run.processes import loopback_interface


@pytest.fixture(autouse=True)
def no_process_outlives_the_call() -> Iterator[None]:
    before = {process.pid for process in multiprocessing.active_children()}
    yield
    assert {process.pid for process in multiprocessing.active_children()} - before == set()


def test_results_come_back_by_rank_and_each_rank_has_its_own_arguments() -> None:
    argument = torch.zeros(3)
    zero, one = run_processes(rank_functions.add_in_place, 2, args=(argument, 10.0))
    assert [(found["rank"], found["size"], found["threads"]) for found in (zero, one)] == [(0, 2, 1), (1, 2, 1)]
    assert zero["tensor"].tolist() == [1.0, 1.0, 1.0]
    assert one["tensor"].tolist() == [2.0, 2.0, 2.0]
    assert zero["total"].tolist() == one["total"].tolist() == [30.0, 30.0, 30.0]
    assert argument.tolist() == [0.0, 0.0, 0.0]


def test_a_failure_is_raised_with_the_ranks_traceback_whatever_its_error_is() -> None:
    with pytest.raises(RankFailedError, match="rank 1 failed: RuntimeError: UnpicklableError: a bad sample") as caught:
        run_processes(rank_functions.fail_on_last, 2)
    assert caught.value.rank == 1
    assert "in fail_on_last" in caught.value.traceback_text
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_a_process_that_dies_is_named_with_its_exit_code() -> None:
    with pytest.raises(LaunchError, match="rank 1 died with exit code 7"):
        run_processes(rank_functions.die_on_last, 2)


def test_a_result_that_cannot_be_sent_fails_on_its_rank() -> None:
    with pytest.raises(RankFailedError, match=r"rank 0 failed: .*lock"):
        run_processes(rank_functions.return_a_lock, 1)


def test_ranks_that_do_not_finish_are_named() -> None:
    with pytest.raises(LaunchError, match=r"ranks \[0, 1\] did not finish within 0\.1 s"):
        run_processes(rank_functions.wait_for_nobody, 2, timeout_s=0.1)


LOCK = threading.Lock()


@pytest.mark.parametrize(
    ("function", "args"), [(lambda _: LOCK, ()), (rank_functions.add_in_place, (threading.Lock(), 1.0))]
)
def test_what_cannot_be_sent_is_refused_before_a_process_starts(
    monkeypatch: pytest.MonkeyPatch, function: Any, args: tuple[Any, ...]
) -> None:
    monkeypatch.setattr(function, "__module__", "__main__")
    with pytest.raises(UsageError, match="open files, locks and connections inside the function"):
        run_processes(function, 2, args=args)


CELL = """
import torch, paceline

SCALE = 3.0

class Net(torch.nn.Linear):
    def forward(self, x):
        return SCALE * super().forward(x)

class Answer:
    def __init__(self, losses, where):
        self.losses, self.where = losses, where

def train(comm, steps):
    torch.manual_seed(0)
    engine = paceline.parallelize(Net(4, 1), comm, "zero1")
    optimizer = torch.optim.SGD(engine.parameters(), lr=0.01)
    losses = []
    for step in range(steps):
        loss = engine(torch.full((2, 4), comm.rank + 1.0)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Answer(losses, (comm.rank, comm.size, type(engine.module).__name__))

def fail(comm):
    raise Strange("in a cell")

class Strange(Exception):
    pass
"""


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Returns what a cell of a notebook defines: in ``__main__``, with lines that are in no file but known."""
    monkeypatch.setitem(linecache.cache, "<cell 1>", (len(CELL), None, CELL.splitlines(keepends=True), "<cell 1>"))
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(CELL, "<cell 1>", "exec"), names)
    return names


def test_what_a_cell_defines_trains_on_ranks_and_comes_back(cell: dict[str, Any]) -> None:
    found = paceline.run_ranks(cell["train"], 2, args=(4,), device="cpu")
    assert all(isinstance(each, cell["Answer"]) for each in found)
    assert [each.where for each in found] == [(0, 2, "Net"), (1, 2, "Net")]
    assert found[0].losses[-1] < found[0].losses[0]
    with pytest.raises(RankFailedError, match="rank 0 failed: Strange: in a cell") as caught:
        paceline.run_ranks(cell["fail"], 1, device="cpu")
    assert isinstance(caught.value.__cause__, cell["Strange"])
    assert 'raise Strange("in a cell")' in caught.value.traceback_text


def test_there_is_at_least_one_process() -> None:
    with pytest.raises(UsageError, match="ranks = 0"):
        run_processes(rank_functions.add_in_place, 0)


def test_the_first_cause_is_not_a_lost_connection() -> None:
    lost, cause = LostRankError("another rank is gone"), ValueError("a bad sample")
    failure = _first_cause([(0, lost, "its traceback"), (1, cause, "the traceback")])
    assert isinstance(failure, RankFailedError)
    assert (failure.rank, failure.__cause__, failure.traceback_text) == (1, cause, "the traceback")


def test_the_loopback_interface_exists() -> None:
    assert loopback_interface() in {name for _, name in socket.if_nameindex()}


def test_a_rank_enters_its_place_before_it_joins_the_others(tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    places = [RankHost(enter=partial(os.chdir, folder), interface=loopback_interface()) for folder in folders]
    found = run_processes(rank_functions.where_am_i, 2, places=places)
    assert found == [(2, str(folder)) for folder in folders]
