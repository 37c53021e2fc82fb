"""The pool of real ranks: what ranks raise comes back, and one that fails or hangs does not spoil the next task."""

from __future__ import annotations

import os
import threading

import pytest
import torch
from gloo_pool import GlooPool

from paceline.comm.base import Communicator


class OwnError(Exception):
    """An error of this file's own."""


def identity(comm: Communicator, value: object) -> tuple[int, int, object, int]:
    return comm.rank, comm.size, value, os.getpid()


def raise_own_error(comm: Communicator) -> None:
    raise OwnError(f"of rank {comm.rank}")


def hang(_: Communicator) -> None:
    threading.Event().wait()


def draw(comm: Communicator) -> float:
    return torch.rand(1).item() + 0 * comm.rank


def test_a_task_gets_its_rank_and_arguments_in_a_process_of_its_own(gloo_pool: GlooPool) -> None:
    found = gloo_pool.run(identity, {"a": [1]}, ranks=2)
    assert [each[:3] for each in found] == [(0, 2, {"a": [1]}), (1, 2, {"a": [1]})]
    assert len({each[3] for each in found} | {os.getpid()}) == 3


def test_every_task_starts_from_the_same_seed(gloo_pool: GlooPool) -> None:
    assert len(set(gloo_pool.run(draw, ranks=2) + gloo_pool.run(draw, ranks=2))) == 1


def test_a_function_inside_another_is_refused(gloo_pool: GlooPool) -> None:
    with pytest.raises(AssertionError, match="must stand at the top level of its file"):
        gloo_pool.run(lambda comm: comm.rank)


def test_failures_come_back_and_the_next_task_gets_new_workers(gloo_pool: GlooPool) -> None:
    before = gloo_pool.run(identity, None, ranks=1)
    (raised,) = gloo_pool.outcomes(raise_own_error, ranks=1)
    assert isinstance(raised.error, OwnError)
    assert "in raise_own_error" in raised.error.__notes__[0]
    between = gloo_pool.run(identity, None, ranks=1)
    (hung,) = gloo_pool.outcomes(hang, ranks=1, timeout_s=0.5)
    assert str(hung.error) == "rank 0 died with exit code 1"  # it wrote down where it hung, and exited
    after = gloo_pool.run(identity, None, ranks=1)
    assert len({found[0][3] for found in (before, between, after)}) == 3
