"""The pool of ranks that share a GPU: a rank that fails, dies or hangs is told, and does not spoil the next task."""

from __future__ import annotations

import os
import signal
import threading

import pytest
import torch
from gloo_pool import GlooPool, Outcome
from nccl_cases import NCCL, STARTED_TOO
from nccl_pool import own_host

from paceline.comm.base import Communicator


def sum_of_ranks(comm: Communicator, start: float) -> tuple[float, int, str]:
    total = torch.tensor([start + comm.rank], device=comm.device)
    comm.all_reduce(total).wait()
    return total.item(), os.getpid(), comm.backend


def fail_on_last(comm: Communicator, how: str) -> None:
    """Sums once; then the last rank fails, and the others wait for it in a sum."""
    total = torch.ones(1, device=comm.device)
    comm.all_reduce(total).wait()
    assert total.item() == comm.size
    if comm.rank == comm.size - 1:
        if how == "raise":
            raise ValueError("a bad sample")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        stand_still()
    comm.all_reduce(total).wait()
    total.item()


def stand_still() -> None:
    threading.Event().wait()


def outcomes(pool: GlooPool, how: str) -> list[Outcome]:
    before = pool.run(sum_of_ranks, 1.0, ranks=2)
    assert [each[0] for each in before] == [3.0, 3.0]
    assert {each[2] for each in before} == {pool.backend}
    found = pool.outcomes(fail_on_last, how, ranks=2, timeout_s=4.0, group_timeout_s=20.0)
    after = pool.run(sum_of_ranks, 1.0, ranks=2)
    assert [each[0] for each in after] == [3.0, 3.0]
    assert before[1][1] != after[1][1]
    return found


@pytest.mark.parametrize("pool", [STARTED_TOO, NCCL], indirect=True)
def test_what_a_rank_raises_comes_back(pool: GlooPool) -> None:
    error = outcomes(pool, "raise")[1].error
    assert isinstance(error, ValueError)
    assert "in fail_on_last" in error.__notes__[0]


@pytest.mark.parametrize("pool", [STARTED_TOO, NCCL], indirect=True)
def test_a_rank_that_is_killed_is_told_from_those_that_wait_for_it(pool: GlooPool) -> None:
    waiting, killed = outcomes(pool, "kill")
    assert str(killed.error) == f"rank 1 died with exit code {-signal.SIGKILL}"
    assert waiting.error is not None


@pytest.mark.parametrize("pool", [STARTED_TOO, NCCL], indirect=True)
def test_a_rank_that_hangs_says_where_and_is_replaced(pool: GlooPool) -> None:
    _, hung = outcomes(pool, "hang")
    assert str(hung.error) == "rank 1 died with exit code 1"  # after it had written down where it stood
    assert hung.error is not None
    assert "in stand_still" in hung.error.__notes__[0]


def test_every_worker_is_a_host_of_its_own() -> None:
    hosts = [own_host(number) for number in range(4)]
    assert len({host["NCCL_HOSTID"] for host in hosts}) == 4
    assert {host["NCCL_SOCKET_IFNAME"] for host in hosts} <= {"lo", "lo0"}
