"""Collectives made of messages: the plain reduction, the same bits on every rank, the bytes of the formulas."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from covering import covering
from gloo_pool import GlooPool
from hypothesis import given
from hypothesis import strategies as st

from paceline.cluster.costs import (
    ALGORITHMS,
    Algorithm,
    MeasuredTable,
    Placement,
    Wire,
    Wires,
    host_link_bytes,
    sent_bytes,
)
from paceline.comm.algorithms.communicator import AlgorithmCommunicator, AlgorithmName
from paceline.comm.algorithms.lanes import combine
from paceline.comm.algorithms.rounds import (
    Round,
    Topology,
    cut,
    detect_topology,
    from_names,
    share_table,
    state_topology,
)
from paceline.comm.base import Communicator
from paceline.comm.traced import Trace, TracedCommunicator
from paceline.comm.virtual.communicator import VirtualCommunicator, run_virtual
from paceline.errors import CommunicationError, RankFailedError, StuckRankError, UsageError

NAMES: tuple[AlgorithmName, ...] = get_args(AlgorithmName)
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
OTHERS = (torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64)
OPS = ("sum", "avg", "min", "max", "product")
CPU = torch.device("cpu")
_AFTER = {"sum": torch.add, "avg": torch.add, "min": torch.minimum, "max": torch.maximum, "product": torch.mul}


def wrap(comm: Communicator, name: str, hosts: int = 2, **options: Any) -> AlgorithmCommunicator:
    """Ranks take turns on the hosts (rank 0 on host 0, rank 1 on host 1, ...), so that hosts may differ in size."""
    topology = from_names([rank % hosts for rank in range(comm.size)])
    return AlgorithmCommunicator(comm, name, topology, **options)  # type: ignore[arg-type]


def values(rank: int, numel: int, dtype: torch.dtype, *, whole: bool = False) -> torch.Tensor:
    """Whole numbers are the same in any order of summation; others show what an order rounds."""
    generator = torch.Generator().manual_seed(100 * rank + numel)
    if whole or not dtype.is_floating_point:
        return torch.randint(-4, 5, (numel,), generator=generator).abs().to(dtype)
    return (torch.randn(numel, generator=generator, dtype=torch.float64) * 3).to(dtype)


def reduction(tensors: list[torch.Tensor], op: str) -> torch.Tensor:
    """The plain reduction in rank order, in float64 where it is one of floats."""
    wide = [t.double() if t.is_floating_point() else t for t in tensors]
    total = wide[0]
    for tensor in wide[1:]:
        total = _AFTER[op](total, tensor)
    return total / len(tensors) if op == "avg" else total


def close(found: torch.Tensor, expected: torch.Tensor, tensors: list[torch.Tensor], op: str = "sum") -> bool:
    """Within one rounding for each rank that an element goes through, of the largest sum or product on its way."""
    if not found.is_floating_point():
        return torch.equal(found, expected)
    largest = reduction([t.double().abs() for t in tensors], "product" if op == "product" else "sum")
    room = torch.finfo(found.dtype).eps * largest * (len(tensors) + 1)
    return bool(((found.double() - expected).abs() <= room + 1e-300).all())


def is_defined(op: str, dtype: torch.dtype) -> bool:
    if op == "product" and dtype == torch.float16:  # that of nine ranks may leave its range
        return False
    if dtype.is_complex:
        return op in ("sum", "avg", "product")
    return dtype.is_floating_point or op != "avg"


def all_reduced(comm: Communicator, numel: int, dtype: torch.dtype, op: str) -> torch.Tensor:
    tensor = values(comm.rank, numel, dtype)
    comm.all_reduce(tensor, op).wait()  # type: ignore[arg-type]
    return tensor


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, int, int, int, torch.dtype, str, int]:
    ranks = draw(st.integers(1, 9))
    numel = draw(st.sampled_from([0, 1, ranks - 1, ranks, ranks + 1]) | st.integers(2, 70))
    dtype = draw(st.sampled_from(FLOATS + OTHERS))
    op = draw(st.sampled_from([op for op in OPS if is_defined(op, dtype)]))
    hosts = draw(st.integers(min(2, ranks), ranks))
    return draw(st.sampled_from(NAMES)), ranks, hosts, numel, dtype, op, draw(st.sampled_from([1, 16, 2**20]))


@given(cases())
def test_an_all_reduce_is_the_plain_reduction_with_the_same_bits_on_every_rank(
    case: tuple[str, int, int, int, torch.dtype, str, int],
) -> None:
    name, ranks, hosts, numel, dtype, op, chunk = case
    found = run_virtual(lambda c: all_reduced(wrap(c, name, hosts, chunk_bytes=chunk), numel, dtype, op), ranks)
    inputs = [values(rank, numel, dtype) for rank in range(ranks)]
    assert close(found[0], reduction(inputs, op), inputs, op)
    assert all(torch.equal(each, found[0]) and each.dtype == dtype for each in found)


@covering(name=NAMES, ranks=range(1, 10))
def test_whole_numbers_are_summed_exactly_by_every_number_of_ranks(name: str, ranks: int) -> None:
    def work(comm: VirtualCommunicator) -> list[torch.Tensor]:
        group = wrap(comm, name, min(ranks, 3), chunk_bytes=24)
        found = [values(comm.rank, n, torch.float64, whole=True) for n in (0, 1, ranks - 1, ranks, ranks + 1, 90)]
        for tensor in found:
            group.all_reduce(tensor).wait()
        return found

    for found in run_virtual(work, ranks):
        for tensor in found:
            inputs = [values(rank, tensor.numel(), torch.float64, whole=True) for rank in range(ranks)]
            assert torch.equal(tensor, reduction(inputs, "sum"))


@given(
    name=st.sampled_from(NAMES),
    ranks=st.integers(1, 9),
    length=st.integers(0, 9),
    dtype=st.sampled_from(FLOATS + OTHERS),
    op=st.sampled_from(OPS),
    chunk=st.sampled_from([1, 2**20]),
)
def test_reduce_scatter_all_gather_and_broadcast_give_what_they_should(
    name: str, ranks: int, length: int, dtype: torch.dtype, op: str, chunk: int
) -> None:
    op = op if is_defined(op, dtype) else "sum"

    def work(comm: VirtualCommunicator) -> list[torch.Tensor]:
        group = wrap(comm, name, min(ranks, 2), chunk_bytes=chunk)
        whole = values(comm.rank, length * ranks, dtype)
        before, piece, gathered = whole.clone(), torch.empty(length, dtype=dtype), torch.empty_like(whole)
        group.reduce_scatter(piece, whole, op).wait()  # type: ignore[arg-type]
        assert torch.equal(whole, before)
        group.all_gather(gathered, whole[:length]).wait()
        told = values(comm.rank, length, dtype)
        group.broadcast(told, source=ranks - 1).wait()
        return [piece, gathered, told]

    found = run_virtual(work, ranks)
    inputs = [values(rank, length * ranks, dtype) for rank in range(ranks)]
    assert close(torch.cat([piece for piece, _, _ in found]), reduction(inputs, op), inputs, op)
    for _, gathered, told in found:
        assert torch.equal(gathered, torch.cat([each[:length] for each in inputs]))
        assert torch.equal(told, values(ranks - 1, length, dtype))


@pytest.mark.parametrize("name", NAMES)
def test_tensors_may_lie_anyhow_and_in_place(name: str) -> None:
    def work(comm: VirtualCommunicator) -> list[torch.Tensor]:
        group = wrap(comm, name, chunk_bytes=8)
        strided = torch.zeros(14)[::2] + comm.rank
        column = (torch.arange(12.0).view(3, 4) + comm.rank).t()
        every_other = torch.zeros(10)
        every_other[::2] = float(comm.rank)
        parameter = torch.nn.Parameter(torch.full((2, 2), float(comm.rank)))
        for tensor in (strided, column, every_other[::2], parameter):
            group.all_reduce(tensor).wait()
        group.broadcast(column, source=1).wait()
        own = slice(2 * comm.rank, 2 * comm.rank + 2)
        gathered, reduced = torch.full((6,), -1.0), torch.arange(6.0) + comm.rank
        gathered[own] = float(comm.rank)
        group.all_gather(gathered, gathered[own]).wait()
        group.reduce_scatter(reduced[own], reduced).wait()
        turned = torch.empty(4, 3).t()
        if name in ("tree", "hierarchical"):  # the backend's all-gather, which takes no such tensor
            turned = turned.contiguous()
        group.all_gather(turned, (torch.arange(8.0).view(2, 4).t() + comm.rank).reshape(-1)[:4]).wait()
        return [strided, column, every_other, parameter.detach(), gathered, reduced[own].clone(), turned]

    pieces = torch.cat([(torch.arange(8.0).view(2, 4).t() + rank).reshape(-1)[:4] for rank in range(3)])
    for rank, found in enumerate(run_virtual(work, 3)):
        strided, column, every_other, parameter, gathered, reduced, turned = found
        assert torch.equal(strided, torch.full((7,), 3.0))
        assert torch.equal(column, 3 * torch.arange(12.0).view(3, 4).t() + 3)
        assert torch.equal(every_other, torch.tensor([3.0, 0.0] * 5))
        assert torch.equal(parameter, torch.full((2, 2), 3.0))
        assert torch.equal(gathered, torch.tensor([0.0, 0.0, 1.0, 1.0, 2.0, 2.0]))
        assert torch.equal(reduced, 3 * torch.arange(6.0)[2 * rank : 2 * rank + 2] + 3)
        assert torch.equal(turned, pieces.view(3, 4))


# Many at once


def in_flight(comm: Communicator, order: list[int], name: str) -> list[torch.Tensor]:
    """Operations of three groups, with verbs of the backend between them, awaited in an order of each rank's own."""
    group = wrap(comm, name, chunk_bytes=16)
    half = [rank for rank in range(comm.size) if rank % 2 == comm.rank % 2]
    inner = group.split(half)
    found, works, others = [], [], []
    for number in range(len(order)):
        tensor = values(comm.rank, 10 + number, torch.float64, whole=True)
        found.append(tensor)
        if number % 5 == 1:
            works.append(inner.all_reduce(tensor))
        elif number % 5 == 2:
            works.append(group.broadcast(tensor, source=number % comm.size))
        elif number % 5 == 3:
            works.append(comm.all_reduce(tensor))
        else:
            works.append(group.all_reduce(tensor, "max" if number % 2 else "sum"))
        if number % 4 == 0:
            piece = torch.full((3,), float(comm.rank))
            others.append(group.send(piece, (comm.rank + 1) % comm.size, tag=number))
            found.append(torch.empty(3))
            others.append(group.recv(found[-1], (comm.rank - 1) % comm.size, tag=number))
    for number in order:
        works[number].wait()
    for work in works + others:
        work.wait()
    group.barrier()
    return found


def plain_in_flight(comm: Communicator, count: int) -> list[torch.Tensor]:
    half = comm.split([rank for rank in range(comm.size) if rank % 2 == comm.rank % 2])
    found = []
    for number in range(count):
        tensor = values(comm.rank, 10 + number, torch.float64, whole=True)
        found.append(tensor)
        if number % 5 == 1:
            half.all_reduce(tensor).wait()
        elif number % 5 == 2:
            comm.broadcast(tensor, source=number % comm.size).wait()
        elif number % 5 == 3:
            comm.all_reduce(tensor).wait()
        else:
            comm.all_reduce(tensor, "max" if number % 2 else "sum").wait()
        if number % 4 == 0:
            found.append(torch.full((3,), float((comm.rank - 1) % comm.size)))
    return found


@given(
    name=st.sampled_from(NAMES),
    ranks=st.integers(2, 6),
    orders=st.lists(st.permutations(range(11)), min_size=6, max_size=6),
)
def test_many_in_flight_may_be_awaited_in_any_order(name: str, ranks: int, orders: list[list[int]]) -> None:
    found = run_virtual(lambda c: in_flight(c, orders[c.rank], name), ranks)
    expected = run_virtual(lambda c: plain_in_flight(c, 11), ranks)
    for ours, plain in zip(found, expected, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(ours, plain, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_ranks_may_take_turns_of_their_own_between_issuing_and_waiting(name: str) -> None:
    """Messages of two operations between the same ranks are told apart by their tags, and not by their order."""

    def work(comm: VirtualCommunicator) -> list[torch.Tensor]:
        group = wrap(comm, name)
        found = [torch.full((12,), float(comm.rank + 10 * number)) for number in range(6)]
        works = []
        for number, tensor in enumerate(found):
            works.append(group.all_reduce(tensor))
            if comm.rank % 2 and number % 2:
                works[number - 1].wait()
        for each in reversed(works):
            each.wait()
        return found

    for found in run_virtual(work, 4):
        assert [tensor.tolist() for tensor in found] == [[6.0 + 40 * number] * 12 for number in range(6)]


def test_a_wait_on_the_backend_finishes_what_was_issued_before() -> None:
    """Rank 0 waits in a verb of the backend while rank 1 waits for an operation that needs rank 0."""

    def work(comm: VirtualCommunicator) -> float:
        group = wrap(comm, "ring")
        reduced, exchanged = torch.ones(8), torch.empty(3, dtype=torch.int64)
        first = group.all_reduce(reduced)
        if comm.rank == 0:
            group.all_to_all(exchanged, torch.arange(3)).wait()
            first.wait()
        else:
            first.wait()
            group.all_to_all(exchanged, torch.arange(3)).wait()
        return float(reduced.sum())

    assert run_virtual(work, 3) == [24.0] * 3


@pytest.mark.parametrize("name", ["ring", "hierarchical"])
def test_subgroups_number_their_members_and_share_the_order_of_issue(name: str) -> None:
    def work(comm: VirtualCommunicator) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...], float]:
        group = AlgorithmCommunicator(comm, name, state_topology(6, 2))  # type: ignore[arg-type]
        if comm.rank in (1, 2):
            group.all_reduce(torch.ones(4)).wait()
            return comm.ranks, (), 0.0
        part = group.split([5, 0, 4, 3])
        tensor = torch.full((5,), float(comm.rank))
        works = [part.all_reduce(tensor), group.all_reduce(torch.ones(4))]
        works[1].wait()
        works[0].wait()
        return part.ranks, part.topology.hosts, float(tensor[0])

    for rank, found in enumerate(run_virtual(work, 6)):
        if rank not in (1, 2):
            assert found == ((5, 0, 4, 3), ((0, 2), (1,), (3,)), 12.0)


# Bytes


def sent(comm: Communicator, name: str, hosts: int, numel: int) -> tuple[int, int, list[str]]:
    trace = Trace(comm.device, keep=True)
    topology = state_topology(comm.size, comm.size // hosts)
    # The trace is inside: it sees what travels.
    traced = TracedCommunicator(comm, trace)
    group = AlgorithmCommunicator(traced, name, topology, chunk_bytes=64)  # type: ignore[arg-type]
    group.all_reduce(torch.ones(numel)).wait()
    return trace.num_bytes["send"], trace.num_bytes["recv"], sorted(trace.num_operations)


PLACES = [(2, 1), (3, 1), (4, 1), (5, 1), (7, 1), (8, 1), (4, 2), (6, 3), (6, 2), (8, 4), (9, 3)]


@pytest.mark.some(5)
@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize(("ranks", "hosts"), PLACES)
def test_every_rank_sends_the_bytes_of_the_formula(name: Algorithm, ranks: int, hosts: int) -> None:
    if name == "hierarchical" and hosts == 1:
        hosts = ranks
    numel = 192 * ranks * ranks  # divided by slices, by halves, and by lanes
    found = run_virtual(lambda c: sent(c, name, hosts, numel), ranks)
    where = Placement(ranks=ranks, hosts=hosts)
    assert [each[0] for each in found] == [round(sent_bytes(name, 4 * numel, where, rank)) for rank in range(ranks)]
    assert sum(each[0] for each in found) == sum(each[1] for each in found)
    assert all(each[2] == ["recv", "send"] for each in found)


class Watched:
    """Counts the bytes that leave this rank's host."""

    def __init__(self, inner: Communicator, node_ranks: int) -> None:
        self._inner = inner
        self._node_ranks = node_ranks
        self.left = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def send(self, tensor: torch.Tensor, to: int, tag: int = 0) -> Any:
        if to // self._node_ranks != self._inner.rank // self._node_ranks:
            self.left += tensor.numel() * tensor.element_size()
        return self._inner.send(tensor, to, tag)


@covering(always={"place": [(6, 2)]}, place=[(4, 2), (6, 2), (6, 3), (8, 2), (4, 4)], name=ALGORITHMS)
def test_the_link_of_a_host_carries_the_bytes_of_the_formula(place: tuple[int, int], name: Algorithm) -> None:
    ranks, hosts = place
    numel, node_ranks = 2 * ranks * ranks * 12, ranks // hosts

    def work(comm: VirtualCommunicator) -> int:
        watched = Watched(comm, node_ranks)
        group = AlgorithmCommunicator(watched, name, state_topology(ranks, node_ranks))  # type: ignore[arg-type]
        group.all_reduce(torch.ones(numel)).wait()
        return watched.left

    left = run_virtual(work, ranks)
    by_host = [sum(left[node_ranks * host : node_ranks * (host + 1)]) for host in range(hosts)]
    assert max(by_host) == round(host_link_bytes(name, 4 * numel, Placement(ranks=ranks, hosts=hosts)))


@pytest.mark.parametrize(("ranks", "hosts"), [(4, 2), (6, 2), (6, 3), (4, 4)])
def test_slices_and_pieces_leave_a_host_once_for_all_of_its_ranks(ranks: int, hosts: int) -> None:
    node_ranks, length = ranks // hosts, 48

    def work(comm: VirtualCommunicator) -> list[int]:
        watched = Watched(comm, node_ranks)
        group = AlgorithmCommunicator(watched, "hierarchical", state_topology(ranks, node_ranks), chunk_bytes=64)  # type: ignore[arg-type]
        whole, piece = torch.full((ranks * length,), float(comm.rank)), torch.empty(length)
        group.reduce_scatter(piece, whole, "avg").wait()
        assert piece.eq((ranks - 1) / 2).all()
        scattered = watched.left
        group.all_gather(whole, piece + comm.rank).wait()
        assert torch.equal(whole.view(ranks, length)[:, 0], torch.arange(ranks) + (ranks - 1) / 2)
        return [scattered, watched.left - scattered]

    left = run_virtual(work, ranks)
    share = 4 * length * ranks * (hosts - 1) // hosts  # of the bytes in all
    for kind in range(2):
        by_host = [sum(left[rank][kind] for rank in range(node_ranks * h, node_ranks * (h + 1))) for h in range(hosts)]
        assert by_host == [share] * hosts


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_floats_are_rounded_once_a_round(dtype: torch.dtype) -> None:
    one, small = torch.tensor([256.0 if dtype == torch.bfloat16 else 2048.0], dtype=dtype), torch.ones(1, dtype=dtype)
    target = one.clone()
    combine(target, [small, small], "sum")  # added one by one in this dtype, each would be lost
    assert target.item() == one.item() + 2
    combine(target, [small * 2], "avg", 2)
    assert target.item() == (one.item() + 4) / 2


# What auto takes


def used(name: str, topology: Topology, numel: int, links: Wires) -> set[int]:
    """The peers of rank 0."""

    def work(comm: VirtualCommunicator) -> set[int]:
        peers: set[int] = set()

        class Peers(Watched):
            def send(self, tensor: torch.Tensor, to: int, tag: int = 0) -> Any:
                peers.add(to)
                return super().send(tensor, to, tag)

        group = AlgorithmCommunicator(Peers(comm, 1), name, topology)  # type: ignore[arg-type]
        group._links = links
        group.all_reduce(torch.ones(numel)).wait()
        return peers

    return run_virtual(work, topology.placement.ranks)[0]


def test_auto_takes_what_the_formulas_say_is_fastest() -> None:
    slow_start = Wires(inside=Wire(alpha_s=1.0, bandwidth=1e12))
    slow_wire = Wires(inside=Wire(alpha_s=1e-12, bandwidth=1e6), across=Wire(alpha_s=1e-12, bandwidth=1e3))
    flat, two_hosts = state_topology(8, 8), state_topology(8, 4)
    assert used("auto", flat, 8, slow_start) == used("halving_doubling", flat, 8, slow_start) == {1, 2, 4}
    assert used("ring", flat, 8, slow_wire) == {1}
    assert used("auto", two_hosts, 64, slow_wire) == used("hierarchical", two_hosts, 64, slow_wire) == {1, 2, 3, 4}


def test_auto_asks_a_measured_table_for_its_own_ranks_and_formulas_for_others() -> None:
    table = MeasuredTable(
        where=Placement(ranks=4, hosts=2), points={"native": [(8, 0.1), (4096, 9.0)], "tree": [(8, 0.2), (4096, 0.3)]}
    )

    def work(comm: VirtualCommunicator) -> list[tuple[int, int]]:
        trace = Trace(comm.device)
        traced = TracedCommunicator(comm, trace)
        group = AlgorithmCommunicator(traced, "auto", state_topology(4, 2), table=table)
        pair = group.split([comm.rank, comm.rank ^ 1] if comm.rank % 2 == 0 else [comm.rank ^ 1, comm.rank])
        found = []
        for each, numel in ((group, 2), (group, 1024), (pair, 2)):
            tensor = torch.full((numel,), float(comm.rank))
            before = Counter(trace.num_operations)
            each.all_reduce(tensor).wait()
            assert tensor.eq(sum(each.ranks)).all()
            counted = trace.num_operations - before
            found.append((counted["all_reduce"], counted["send"]))
        return found

    for rank, (small, large, of_pair) in enumerate(run_virtual(work, 4)):
        assert small == (1, 0)  # the backend's own
        assert large == (0, [2, 4, 4, 2][rank])  # a root sends once in its tree, and once as a leaf of the other
        assert of_pair == (0, 2)  # two ranks of one host: nothing is known of those


def test_a_table_is_read_by_the_first_rank_and_refused_on_all(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    row = {"part": "all_reduce", "ranks": 4, "hosts": 2, "arm": "ring", "size_bytes": 8, "median_ms": 1.0}
    path.write_text(json.dumps({"rows": [row]}))

    def work(comm: VirtualCommunicator) -> MeasuredTable:
        return share_table(str(path if comm.rank == 0 else tmp_path / "elsewhere"), comm, state_topology(4, 2))

    known = MeasuredTable(where=Placement(ranks=4, hosts=2), points={"ring": [(8, 0.001)]})
    assert run_virtual(work, 4) == [known] * 4
    path.write_text("{}")

    def refused(comm: VirtualCommunicator) -> str:
        with pytest.raises(UsageError) as caught:
            work(comm)
        return str(caught.value)

    assert all("comm.algorithm_table" in each and "no record" in each for each in run_virtual(refused, 4))


# Rounds


@pytest.mark.parametrize("ranks", range(1, 17))
def test_a_message_has_the_same_round_on_both_sides(ranks: int) -> None:
    """The rule that keeps ranks from waiting in a circle, and NCCL from mixing messages up."""
    for name in ALGORITHMS:
        for lanes in zip(*(rounds_of(name, rank, ranks) for rank in range(ranks)), strict=True):
            for this in zip(*lanes, strict=True):
                sends = [(rank, m.peer, m.start, m.stop) for rank, each in enumerate(this) for m in each.sends]
                receives = [
                    (m.peer, rank, m.start, m.stop) for rank, each in enumerate(this) for m in each.sums + each.copies
                ]
                assert sorted(sends) == sorted(receives)


def rounds_of(name: Algorithm, rank: int, ranks: int) -> list[list[Round]]:
    topology = from_names([number % 3 for number in range(ranks)])
    group = AlgorithmCommunicator(_Named(rank, ranks), name, topology)
    return group._all_reduce_rounds(name, (0, 3 * ranks + 1)) if ranks > 1 else []


class _Named(Communicator):
    """The numbers of a rank, and nothing that could talk."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, tuple(range(size)), CPU, backend="none")


def test_cutting_loses_nothing() -> None:
    for length in range(12):
        for parts in range(1, 6):
            spans = cut((3, 3 + length), parts)
            assert [spans[0][0], *(stop for _, stop in spans)] == [start for start, _ in spans] + [3 + length]
            assert max(b - a for a, b in spans) - min(b - a for a, b in spans) <= 1


# Topology


def test_hosts_are_found_by_their_names_and_stated_by_their_size() -> None:
    assert run_virtual(detect_topology, 3) == [Topology(hosts=((0, 1, 2),))] * 3
    assert state_topology(6, 2) == Topology(hosts=((0, 1), (2, 3), (4, 5)))
    assert from_names(["b", "a", "b"]) == Topology(hosts=((0, 2), (1,)))
    assert state_topology(6, 3).restrict([4, 1, 5]) == Topology(hosts=((0, 2), (1,)))
    with pytest.raises(UsageError, match="6 ranks on hosts of 4"):
        state_topology(6, 4)


# What goes wrong


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("rign", None), r"algorithm 'rign' is not one of ring, tree.*\n.*did you mean ring\?"),
        (("hierarchical", None), r"'hierarchical' with no topology(.|\n)*at least two hosts"),
        (("hierarchical", Topology(hosts=((0, 1, 2),))), "all 3 ranks on one host"),
        (("ring", Topology(hosts=((0, 1), (1, 2)))), "names each of them once"),
    ],
)
def test_what_cannot_work_is_refused_with_the_reason(arguments: tuple[Any, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        AlgorithmCommunicator(_Named(0, 3), *arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: c.all_reduce(torch.ones(2, dtype=torch.int64), "avg"), "avg of torch.int64"),
        (lambda c: c.all_reduce(torch.ones(2, dtype=torch.complex64), "max"), "no order"),
        (lambda c: c.reduce_scatter(torch.ones(2), torch.ones(3)), "2 times the piece"),
        (lambda c: c.all_gather(torch.ones(3), torch.ones(2)), "2 times the piece"),
        (lambda c: c.broadcast(torch.ones(3), 2), "rank 2 in a group of 2"),
        (lambda c: c.split([1 - c.rank]), "this one among them"),
    ],
)
def test_calls_that_break_the_contract_are_refused(call: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(RankFailedError, match=message):
        run_virtual(lambda c: call(wrap(c, "ring")), 2)


def test_sizes_that_differ_are_an_error() -> None:
    with pytest.raises(CommunicationError, match="differ"):
        run_virtual(lambda c: wrap(c, "ring").all_reduce(torch.ones(4 + 2 * c.rank)).wait(), 2)


def test_a_rank_that_does_not_come_is_a_verdict() -> None:
    with pytest.raises(StuckRankError, match="rank 2 has finished"):
        run_virtual(lambda c: None if c.rank == 2 else wrap(c, "ring").all_reduce(torch.ones(9)).wait(), 3)


# Real ranks


def on_real_ranks(comm: Communicator, name: str) -> list[torch.Tensor]:
    group = wrap(comm, name, chunk_bytes=4096)
    found = []
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for numel in (1, comm.size + 1, 30_001):
            found.append(values(comm.rank, numel, dtype))
            group.all_reduce(found[-1], "max" if dtype == torch.int64 else "sum").wait()
    whole, piece = values(comm.rank, 5_000 * comm.size, torch.float32), torch.empty(5_000)
    gathered = torch.empty_like(whole)
    works = [group.reduce_scatter(piece, whole), group.all_gather(gathered, whole[:5_000])]
    works.reverse()
    for work in works:
        work.wait()
    return [*found, piece, gathered]


@pytest.mark.some(3)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_real_ranks_give_the_bits_of_virtual_ones(gloo_pool: GlooPool, name: str, ranks: int) -> None:
    real = gloo_pool.run(on_real_ranks, name, ranks=ranks)
    virtual = run_virtual(lambda c: on_real_ranks(c, name), ranks)
    for ours, same in zip(real, virtual, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(ours, same, strict=True))


@pytest.mark.parametrize("name", ["ring", "tree", "hierarchical"])
def test_real_ranks_may_wait_in_any_order(gloo_pool: GlooPool, name: str) -> None:
    real = gloo_pool.run(in_flight_reversed_on_odd_ranks, name, ranks=3)
    expected = run_virtual(lambda c: plain_in_flight(c, 11), 3)
    for ours, plain in zip(real, expected, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(ours, plain, strict=True))


def in_flight_reversed_on_odd_ranks(comm: Communicator, name: str) -> list[torch.Tensor]:
    return in_flight(comm, list(range(11))[:: -1 if comm.rank % 2 else 1], name)


def die_before_the_last_round(comm: Communicator) -> None:
    group = wrap(comm, "ring")
    if comm.rank == 2:
        raise ValueError("a bad sample")
    group.all_reduce(torch.ones(1_000_000)).wait()


def test_a_real_rank_that_fails_is_an_error_on_the_others(gloo_pool: GlooPool) -> None:
    outcomes = gloo_pool.outcomes(die_before_the_last_round, ranks=3)
    assert isinstance(outcomes[2].error, ValueError)
    assert all(isinstance(outcomes[rank].error, CommunicationError) for rank in (0, 1))
