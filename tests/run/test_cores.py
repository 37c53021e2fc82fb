"""Ranks keep to their own cores, and what their backends start does too, without getting in their way."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest
import torch

from paceline.comm.base import Communicator
from paceline.comm.shared.communicator import SharedMemoryCommunicator
from paceline.config import Config
from paceline.run.function_ranks import run_processes
from paceline.run.processes import allocator_variables, keep_cores, keep_to_own_cores, share_of_cores

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems have no such call")


def cores_and_policies(comm: Communicator) -> tuple[set[int], set[int], int, list[int]]:
    """Returns the cores of this thread, those of Gloo's threads, this thread's policy, and those of Gloo's."""
    comm.barrier()  # nobody leaves before all have come
    tasks = [each for each in Path("/proc/self/task").iterdir() if "gloo" in (each / "comm").read_text()]
    policies = [os.sched_getscheduler(int(each.name)) for each in tasks]
    cores = set[int]().union(*(os.sched_getaffinity(int(each.name)) for each in tasks))
    return os.sched_getaffinity(0), cores, os.sched_getscheduler(0), policies


def in_thread(function: object, *args: object) -> set[int]:
    """Returns the cores of a thread that has called ``function``: those of the test itself stay as they are."""
    found: list[set[int]] = []

    def run() -> None:
        function(*args)  # type: ignore[operator]
        found.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


def test_shares_cover_all_cores_once() -> None:
    shares = [share_of_cores([7, 2, 3, 0, 5, 4], rank, 3) for rank in range(3)]
    assert shares == [[0, 2], [3, 4], [5, 7]]


@pytest.mark.parametrize(("ranks", "threads"), [(3, 1), (8, 1), (2, 3)])
def test_uneven_or_too_small_shares_leave_all_cores(ranks: int, threads: int) -> None:
    cores = [0, 1, 2, 3]
    assert all(share_of_cores(cores, rank, ranks, threads) == cores for rank in range(ranks))


@linux
def test_only_the_calling_thread_is_moved() -> None:
    before = os.sched_getaffinity(0)
    assert in_thread(keep_to_own_cores, 0, len(before)) == {min(before)}
    assert os.sched_getaffinity(0) == before


@linux
def test_config_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.sched_getaffinity(0)
    monkeypatch.setenv("LOCAL_RANK", str(len(before) - 1))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(len(before)))
    config = Config.model_validate(
        {"model": {"kind": "mlp"}, "data": {"kind": "digits"}, "parallel": {"device": "cpu"}}
    )
    assert in_thread(keep_cores, config) == {max(before)}
    parallel = config.parallel.model_copy(update={"own_cores": False})
    assert in_thread(keep_cores, config.model_copy(update={"parallel": parallel})) == before


@linux
@pytest.mark.skipif(torch.__version__ < "2.11", reason="Gloo's threads have no names before torch 2.11")
def test_ranks_and_the_threads_of_gloo_keep_to_their_cores() -> None:
    found = run_processes(cores_and_policies, 2)
    allowed = sorted(os.sched_getaffinity(0))
    for rank, (mine, of_threads, policy, of_gloo) in enumerate(found):
        assert mine == of_threads == set(share_of_cores(allowed, rank, 2))
        assert policy == os.SCHED_OTHER
        assert of_gloo
        assert set(of_gloo) == {os.SCHED_BATCH}


def test_freed_memory_is_kept_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MIMALLOC_PURGE_DELAY", raising=False)
    assert allocator_variables() == {"MIMALLOC_PURGE_DELAY": "1000"}
    monkeypatch.setenv("MIMALLOC_PURGE_DELAY", "7")
    assert allocator_variables() == {"MIMALLOC_PURGE_DELAY": "7"}


def may_spin(comm: Communicator) -> bool:
    found = SharedMemoryCommunicator.join(comm)._resources.progress.may_spin
    comm.barrier()
    return found


@linux
@pytest.mark.skipif(
    len(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else [0]) % 2 == 1, reason="odd cores"
)
def test_ranks_on_cores_of_their_own_wait_without_sleeping() -> None:
    assert run_processes(may_spin, 2) == [True, True]
