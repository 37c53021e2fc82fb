"""Virtual ranks: every verb against plain arithmetic on what all ranks put in."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.comm.base import Communicator, ReduceOp
from paceline.comm.virtual.communicator import VirtualCommunicator, run_virtual
from paceline.errors import RankFailedError, UsageError

RANKS = (1, 2, 3, 4, 5)
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
DTYPES = (*FLOATS, torch.int64, torch.uint8, torch.bool)
FOLDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda rows: rows.sum(0),
    "avg": lambda rows: rows.mean(0),
    "min": lambda rows: rows.amin(0),
    "max": lambda rows: rows.amax(0),
}


def value(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What ``rank`` puts in: small whole numbers, which no order of summation rounds."""
    return ((torch.arange(numel) * (rank + 2) + rank) % 5).to(dtype)


def folded(op: ReduceOp, ranks: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """What the ranks' values come to, computed without a communicator."""
    rows = torch.stack([value(rank, numel, dtype) for rank in range(ranks)])
    if dtype is torch.bool:
        return {"sum": rows.any(0), "max": rows.any(0), "min": rows.all(0)}[op]
    return FOLDS[op](rows.double()).to(dtype)


def reductions() -> list[Any]:
    every = [(dtype, op) for dtype in DTYPES for op in FOLDS if op != "avg" or dtype in FLOATS]
    return [pytest.param(dtype, op, id=f"{str(dtype).removeprefix('torch.')}-{op}") for dtype, op in every]


@pytest.mark.parametrize("ranks", RANKS)
def test_ranks_are_numbered_and_share_the_device(ranks: int) -> None:
    def work(comm: VirtualCommunicator) -> tuple[int, int, tuple[int, ...], str]:
        assert isinstance(comm, Communicator)
        return comm.rank, comm.size, comm.ranks, comm.device.type

    assert run_virtual(work, ranks) == [(rank, ranks, tuple(range(ranks)), "cpu") for rank in range(ranks)]


@pytest.mark.some(8)
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(("dtype", "op"), reductions())
def test_reductions(dtype: torch.dtype, op: ReduceOp, ranks: int) -> None:
    for numel in (0, 1, 3):
        whole = folded(op, ranks, numel * ranks, dtype)

        def work(comm: VirtualCommunicator, numel: int = numel) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            reduced, source = value(comm.rank, numel * ranks, dtype), value(comm.rank, numel * ranks, dtype)
            piece = torch.empty(numel, dtype=dtype)
            comm.all_reduce(reduced, op).wait()
            comm.reduce_scatter(piece, source, op).wait()
            return reduced, piece, source

        for rank, (reduced, piece, source) in enumerate(run_virtual(work, ranks)):
            assert torch.equal(reduced, whole)
            assert torch.equal(piece, whole[rank * numel : (rank + 1) * numel])
            assert torch.equal(source, value(rank, numel * ranks, dtype))
            assert reduced.dtype == piece.dtype == dtype


@pytest.mark.some(8)
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gathers_broadcasts_and_exchanges(dtype: torch.dtype, ranks: int) -> None:
    for numel in (0, 1, 3):

        def work(comm: VirtualCommunicator, numel: int = numel) -> list[torch.Tensor]:
            gathered = torch.empty(numel * ranks, dtype=dtype)
            comm.all_gather(gathered, value(comm.rank, numel, dtype)).wait()
            told = value(comm.rank, numel, dtype)
            comm.broadcast(told, source=ranks - 1).wait()
            exchanged = torch.empty(numel * ranks, dtype=dtype)
            comm.all_to_all(exchanged, value(comm.rank, numel * ranks, dtype)).wait()
            return [gathered, told, exchanged]

        for rank, (gathered, told, exchanged) in enumerate(run_virtual(work, ranks)):
            own = slice(rank * numel, (rank + 1) * numel)
            assert torch.equal(gathered, torch.cat([value(r, numel, dtype) for r in range(ranks)]))
            assert torch.equal(told, value(ranks - 1, numel, dtype))
            assert torch.equal(exchanged, torch.cat([value(r, numel * ranks, dtype)[own] for r in range(ranks)]))


@st.composite
def exchange_counts(draw: st.DrawFn) -> list[list[int]]:
    ranks = draw(st.integers(1, 5))
    row = st.lists(st.integers(0, 3), min_size=ranks, max_size=ranks)
    return draw(st.lists(row, min_size=ranks, max_size=ranks))


@given(counts=exchange_counts(), width=st.integers(0, 3))
def test_all_to_all_with_any_splits(counts: list[list[int]], width: int) -> None:
    """``counts[a][b]`` rows go from rank a to rank b; each row says where it comes from and goes to."""
    ranks = len(counts)

    def rows(source: int, target: int) -> torch.Tensor:
        places = torch.arange(counts[source][target] * width).view(counts[source][target], width)
        return 10_000 * source + 1_000 * target + places

    def work(comm: VirtualCommunicator) -> torch.Tensor:
        received = [counts[source][comm.rank] for source in range(ranks)]
        output = torch.full((sum(received), width), -1)
        mine = torch.cat([rows(comm.rank, target) for target in range(ranks)])
        comm.all_to_all(output, mine, received, counts[comm.rank]).wait()
        return output

    for rank, output in enumerate(run_virtual(work, ranks)):
        assert torch.equal(output, torch.cat([rows(source, rank) for source in range(ranks)]))


@pytest.mark.parametrize("ranks", RANKS[1:])
def test_messages_go_round_a_ring(ranks: int) -> None:
    def work(comm: VirtualCommunicator) -> list[float]:
        held, seen = torch.tensor([float(comm.rank)]), []
        for _ in range(ranks):
            got = torch.empty(1)
            sent = comm.send(held, to=(comm.rank + 1) % ranks)
            comm.recv(got, source=(comm.rank - 1) % ranks).wait()
            sent.wait()
            held = got
            seen.append(held.item())
        return seen

    assert run_virtual(work, ranks) == [[float((rank - 1 - i) % ranks) for i in range(ranks)] for rank in range(ranks)]


def test_narrow_floats_are_summed_in_float32() -> None:
    """In bfloat16 256 + 1 is 256 again: the small ones would be lost one by one."""

    def work(comm: VirtualCommunicator) -> float:
        tensor = torch.tensor([256.0 if comm.rank == 0 else 1.0], dtype=torch.bfloat16)
        comm.all_reduce(tensor).wait()
        return tensor.item()

    assert run_virtual(work, 5) == [260.0] * 5


def test_sums_are_taken_in_rank_order() -> None:
    values = [1e16, 1.0, -1e16, 3.0]  # rounded otherwise in every other order

    def work(comm: VirtualCommunicator) -> float:
        tensor = torch.tensor([values[comm.rank]], dtype=torch.float64)
        comm.all_reduce(tensor).wait()
        return tensor.item()

    assert run_virtual(work, 4) == [3.0] * 4


def test_tensors_may_overlap_with_their_results() -> None:
    def work(comm: VirtualCommunicator) -> tuple[list[float], list[float]]:
        own = slice(2 * comm.rank, 2 * comm.rank + 2)
        gathered = torch.full((6,), -1.0)
        gathered[own] = float(comm.rank)
        comm.all_gather(gathered, gathered[own]).wait()
        reduced = torch.arange(6.0) + comm.rank
        comm.reduce_scatter(reduced[own], reduced).wait()
        return gathered.tolist(), reduced[own].tolist()

    whole = [sum(i + rank for rank in range(3)) for i in range(6)]
    assert run_virtual(work, 3) == [([0, 0, 1, 1, 2, 2], whole[2 * rank : 2 * rank + 2]) for rank in range(3)]


def test_parameters_and_tensors_of_any_stride_are_reduced_in_place() -> None:
    def work(comm: VirtualCommunicator) -> tuple[torch.Tensor, torch.Tensor]:
        parameter = torch.nn.Parameter(torch.full((2, 2), float(comm.rank)))
        turned = (torch.arange(6.0) + comm.rank).view(2, 3).t()
        comm.all_reduce(parameter).wait()
        comm.all_reduce(turned).wait()
        return parameter.detach(), turned

    for parameter, turned in run_virtual(work, 2):
        assert torch.equal(parameter, torch.ones(2, 2))
        assert torch.equal(turned, (2 * torch.arange(6.0) + 1).view(2, 3).t())


def test_many_operations_are_in_flight_and_awaited_in_any_order() -> None:
    def work(comm: VirtualCommunicator) -> list[float]:
        tensors = [torch.tensor([float(i * (comm.rank + 1))]) for i in range(30)]
        works = [comm.all_reduce(tensor) for tensor in tensors]
        order = torch.randperm(30, generator=torch.Generator().manual_seed(comm.rank)).tolist()
        for i in order:
            works[i].wait()
        for work in works:
            work.wait()
        return [tensor.item() for tensor in tensors]

    assert run_virtual(work, 4) == [[i * 10.0 for i in range(30)]] * 4


def test_nothing_holds_a_tensor_after_its_work() -> None:
    """The work owns its tensors until it is awaited; afterwards nothing holds them."""

    def work(comm: VirtualCommunicator) -> bool:
        tensor = torch.ones(2)
        watched = weakref.ref(tensor)
        handle = comm.all_reduce(tensor)
        handle.wait()
        del tensor, handle
        return watched() is None

    usual_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # the threads of ranks go on at any moment, as on a busy machine
    try:
        assert [run_virtual(work, 3) for _ in range(50)] == [[True] * 3] * 50
    finally:
        sys.setswitchinterval(usual_s)


# Groups.


def test_groups_have_ranks_of_their_own_in_the_order_given() -> None:
    def work(comm: VirtualCommunicator) -> tuple[int, tuple[int, ...], list[float]]:
        group = comm.split([3, 0] if comm.rank in (0, 3) else [1, 2])
        gathered = torch.empty(2)
        group.all_gather(gathered, torch.tensor([float(comm.rank)])).wait()
        return group.rank, group.ranks, gathered.tolist()

    assert run_virtual(work, 4) == [
        (1, (3, 0), [3.0, 0.0]),
        (0, (1, 2), [1.0, 2.0]),
        (1, (1, 2), [1.0, 2.0]),
        (0, (3, 0), [3.0, 0.0]),
    ]


def test_a_group_of_a_group_is_numbered_within_it() -> None:
    def work(comm: VirtualCommunicator) -> tuple[int, ...] | None:
        if comm.rank == 0:
            return None
        outer = comm.split([1, 2, 3])
        return outer.split([1, 2]).ranks if outer.rank else outer.split([0]).ranks

    assert run_virtual(work, 4) == [None, (1,), (2, 3), (2, 3)]


def test_two_groups_of_the_same_ranks_do_not_mix() -> None:
    """One rank uses them in one order, the other in the other; the n-th group made is the same one on both."""

    def work(comm: VirtualCommunicator) -> list[float]:
        pair = [(comm.split([0, 1]), torch.tensor([1.0])), (comm.split([0, 1]), torch.tensor([10.0]))]
        for handle in [group.all_reduce(tensor) for group, tensor in (pair if comm.rank else reversed(pair))]:
            handle.wait()
        return [tensor.item() for _, tensor in pair]

    assert run_virtual(work, 2) == [[2.0, 20.0]] * 2


def test_groups_may_be_made_in_another_order_on_each_rank() -> None:
    def work(comm: VirtualCommunicator) -> dict[tuple[int, ...], float]:
        every = [(0, 1), (1, 2), (0, 2), (0, 1, 2), (2, 1, 0)]
        mine = [ranks for ranks in every if comm.rank in ranks]
        groups = {ranks: comm.split(ranks) for ranks in mine[comm.rank :] + mine[: comm.rank]}
        found = {}
        for ranks in mine:
            tensor = torch.tensor([float(2**comm.rank)])
            groups[ranks].all_reduce(tensor).wait()
            found[ranks] = tensor.item()
        return found

    for found in run_virtual(work, 3):
        assert found == {ranks: float(sum(2**rank for rank in ranks)) for ranks in found}


def test_messages_of_two_groups_do_not_mix() -> None:
    def work(comm: VirtualCommunicator) -> list[float]:
        group, got = comm.split([1, 0]), torch.empty(2)
        if comm.rank == 0:
            works = [group.send(torch.tensor([1.0]), to=0), comm.send(torch.tensor([2.0]), to=1)]
        else:
            works = [comm.recv(got[0:1], source=0), group.recv(got[1:2], source=1)]
        for handle in works:
            handle.wait()
        return got.tolist()

    assert run_virtual(work, 2)[1] == [2.0, 1.0]


# Wrong arguments.


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda comm: comm.broadcast(torch.ones(1), source=2), "broadcast from rank 2 in a group of 2"),
        (lambda comm: comm.send(torch.ones(1), to=-1), "send to rank -1 in a group of 2"),
        (lambda comm: comm.recv(torch.ones(1), source=2), "recv from rank 2 in a group of 2"),
        (lambda comm: comm.all_gather(torch.ones(3), torch.ones(2)), "the whole must be 2 times the piece"),
        (lambda comm: comm.reduce_scatter(torch.ones(2), torch.ones(3)), "3 elements in all and 2 a rank"),
        (
            lambda comm: comm.all_gather(torch.ones(2).double(), torch.ones(1)),
            "between torch.float64 and torch.float32",
        ),
        (lambda comm: comm.all_to_all(torch.ones(2), torch.ones(3)), "of 3 rows on 2 ranks"),
        (lambda comm: comm.all_to_all(torch.ones(2), torch.ones(2), [1, 1], [1, 2]), r"splits \[1, 2\] do not make 2"),
        (lambda comm: comm.all_to_all(torch.ones(2), torch.ones(2), [3, -1], [1, 1]), r"splits \[3, -1\] do not make"),
        (lambda comm: comm.split([1 - comm.rank]), "this one among them"),
        (lambda comm: comm.split([0, 1, 1]), "distinct ranks"),
        (lambda comm: comm.split([0, 1, 2]), "ranks of this group"),
    ],
)
def test_wrong_arguments_are_refused(call: Callable[[VirtualCommunicator], Any], message: str) -> None:
    with pytest.raises(RankFailedError, match=message) as caught:
        run_virtual(call, 2)
    assert isinstance(caught.value.__cause__, UsageError)


def test_there_is_at_least_one_rank() -> None:
    with pytest.raises(UsageError, match="ranks = 0"):
        run_virtual(lambda comm: comm.rank, 0)


@pytest.mark.parametrize("verb", ["all_reduce", "broadcast"])
def test_a_sparse_tensor_is_refused_before_anything_is_sent(verb: str) -> None:
    def attempt(comm: VirtualCommunicator) -> None:
        with pytest.raises(UsageError, match=rf"{verb} of a tensor with layout torch.sparse_coo[\s\S]*to_dense"):
            getattr(comm, verb)(torch.eye(2).to_sparse())

    run_virtual(attempt, 2)
