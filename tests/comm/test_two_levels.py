"""The hierarchical algorithm with shared memory inside hosts: the sums of one level, the same bits on every rank."""

from __future__ import annotations

import pytest
import torch
from gloo_pool import GlooPool
from hypothesis import given
from hypothesis import strategies as st

from paceline.comm.algorithms.communicator import TwoLevelCommunicator, join_hosts
from paceline.comm.algorithms.rounds import from_names, state_topology
from paceline.comm.base import Communicator, ReduceOp
from paceline.comm.shared.segment import FOLDER
from paceline.comm.traced import Trace, TracedCommunicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.errors import UsageError

OPS: tuple[ReduceOp, ...] = ("sum", "avg", "min", "max")


def values(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    made = torch.randn(numel, generator=torch.Generator().manual_seed(rank), dtype=torch.float64) * 9
    return made.to(dtype)


def expected(ranks: int, numel: int, dtype: torch.dtype, op: ReduceOp) -> torch.Tensor:
    stacked = torch.stack([values(rank, numel, dtype) for rank in range(ranks)]).double()
    return {"sum": stacked.sum(0), "avg": stacked.mean(0), "min": stacked.amin(0), "max": stacked.amax(0)}[op]


def two_levels(comm: Communicator, node_ranks: int) -> TwoLevelCommunicator:
    """Virtual ranks have no memory of their own to share: a group of them stands in for a host."""
    topology = state_topology(comm.size, node_ranks)
    first = comm.rank // node_ranks * node_ranks
    return TwoLevelCommunicator(comm, topology, comm.split(range(first, first + node_ranks)))


def reduce_all(comm: TwoLevelCommunicator, numels: list[int], op: ReduceOp, dtype: torch.dtype) -> list[torch.Tensor]:
    tensors = [values(comm.rank, numel, dtype) for numel in numels]
    works = [comm.all_reduce(tensor, op) for tensor in tensors]
    for work in reversed(works):
        work.wait()
        work.wait()
    return tensors


@given(
    shape=st.sampled_from([(4, 2), (6, 2), (6, 3), (9, 3)]),
    numels=st.lists(st.integers(0, 20) | st.just(1000), min_size=1, max_size=4),
    op=st.sampled_from(OPS),
)
def test_every_rank_gets_the_plain_reduction(shape: tuple[int, int], numels: list[int], op: ReduceOp) -> None:
    ranks, node_ranks = shape
    found = run_virtual(lambda comm: reduce_all(two_levels(comm, node_ranks), numels, op, torch.float64), ranks)
    for place, numel in enumerate(numels):
        torch.testing.assert_close(found[0][place], expected(ranks, numel, torch.float64, op), rtol=1e-13, atol=1e-13)
        assert all(torch.equal(tensors[place], found[0][place]) for tensors in found)


def test_tensors_may_be_strided_and_whole_numbers() -> None:
    def reduce(comm: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
        levels = two_levels(comm, 2)
        strided = torch.arange(12.0).view(4, 3).t() + comm.rank
        whole = torch.tensor([comm.rank, 7])
        levels.all_reduce(strided).wait()
        levels.all_reduce(whole, "max").wait()
        with pytest.raises(UsageError, match="avg of"):
            levels.all_reduce(whole, "avg")
        return strided, whole

    for strided, whole in run_virtual(reduce, 4):
        assert torch.equal(strided, 4 * torch.arange(12.0).view(4, 3).t() + 6)
        assert whole.tolist() == [3, 7]


def test_a_link_between_hosts_carries_a_share_of_every_rank() -> None:
    def count(comm: Communicator) -> tuple[int, int]:
        inside, across = Trace(comm.device), Trace(comm.device)
        topology = state_topology(4, 2)
        first = comm.rank // 2 * 2
        local = TracedCommunicator(comm.split([first, first + 1]), inside)
        levels = TwoLevelCommunicator(TracedCommunicator(comm, across), topology, local)
        levels.all_reduce(torch.ones(1000)).wait()
        return across.num_bytes["send"], inside.num_bytes.total()

    for sent, inside in run_virtual(count, 4):
        assert sent == 2 * 1000 * 4 // 2 // 2  # 2 B/L (H-1)/H
        assert inside == 2 * 1000 * 4


def test_groups_that_are_no_hosts_are_refused() -> None:
    def attempt(comm: Communicator) -> str:
        with pytest.raises(UsageError) as raised:
            TwoLevelCommunicator(comm, state_topology(4, 2), comm.split(range(4)))
        return str(raised.value)

    assert "every host has as many ranks" in run_virtual(attempt, 4)[0]


def on_processes(comm: Communicator, op: ReduceOp) -> tuple[list[torch.Tensor], bool, bool]:
    topology = state_topology(comm.size, 2)
    local = join_hosts(comm, topology)
    assert local is not None
    uneven = join_hosts(comm, from_names(["a", "a", "a", "b"]))
    alone = join_hosts(comm, from_names(["a", "b", "c", "d"]))
    levels = TwoLevelCommunicator(comm, topology, local)
    return reduce_all(levels, [3, 100_001], op, torch.float32), uneven is None, alone is None


@pytest.mark.skipif(not FOLDER.is_dir(), reason="the system has no /dev/shm")
@pytest.mark.some(1)
@pytest.mark.parametrize("op", ["avg", "max"])
def test_processes_share_memory_inside_and_send_across(gloo_pool: GlooPool, op: ReduceOp) -> None:
    found = gloo_pool.run(on_processes, op, ranks=4)
    for tensors, uneven, alone in found:
        assert uneven
        assert alone
        for tensor, numel in zip(tensors, (3, 100_001), strict=True):
            torch.testing.assert_close(tensor.double(), expected(4, numel, torch.float32, op), rtol=1e-5, atol=1e-5)
        assert all(torch.equal(one, other) for one, other in zip(tensors, found[0][0], strict=True))
