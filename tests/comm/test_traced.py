"""The trace: what passed through a communicator, by kind, bytes, group and time; and that nothing is changed by it."""

from __future__ import annotations

import itertools
from typing import Any, NoReturn

import pytest
import torch

from paceline.clock import DeviceClock
from paceline.comm.algorithms.communicator import AlgorithmCommunicator
from paceline.comm.base import Communicator
from paceline.comm.solo import SoloCommunicator
from paceline.comm.traced import Trace, TracedCommunicator
from paceline.comm.virtual.communicator import VirtualCommunicator, run_virtual
from paceline.errors import CommunicationError

CPU = torch.device("cpu")


def every_verb(comm: Communicator) -> list[torch.Tensor]:
    """Calls each verb once, awaited in the order in which they are issued; the other rank does the same."""
    reduced, told = torch.full((3,), float(comm.rank)), torch.full((7,), float(comm.rank))
    piece, gathered = torch.empty(2, dtype=torch.float64), torch.empty(4, dtype=torch.bfloat16)
    exchanged, got = torch.empty(4, dtype=torch.int64), torch.empty(5, dtype=torch.uint8)
    comm.all_reduce(reduced, "max").wait()
    comm.reduce_scatter(piece, torch.arange(4.0, dtype=torch.float64), "avg").wait()
    comm.all_gather(gathered, torch.full((2,), comm.rank, dtype=torch.bfloat16)).wait()
    comm.broadcast(told, source=1).wait()
    comm.all_to_all(exchanged, torch.arange(4) + 10 * comm.rank, [2, 2], [2, 2]).wait()
    sent = comm.send(torch.full((5,), comm.rank, dtype=torch.uint8), to=1 - comm.rank, tag=2)
    comm.recv(got, source=1 - comm.rank, tag=2).wait()
    sent.wait()
    comm.barrier()
    return [reduced, piece, gathered, told, exchanged, got]


def traced(comm: VirtualCommunicator, *, keep: bool = True) -> TracedCommunicator:
    return TracedCommunicator(comm, Trace(comm.device, keep=keep))


def test_it_is_a_communicator_with_the_ranks_of_the_inner_one() -> None:
    def work(comm: VirtualCommunicator) -> tuple[int, int, tuple[int, ...], torch.device]:
        wrapped = traced(comm)
        assert isinstance(wrapped, Communicator)
        return wrapped.rank, wrapped.size, wrapped.ranks, wrapped.device

    assert run_virtual(work, 2) == [(rank, 2, (0, 1), CPU) for rank in range(2)]


def test_every_verb_gives_what_it_gives_without_a_trace() -> None:
    for ours, plain in zip(run_virtual(lambda c: every_verb(traced(c)), 2), run_virtual(every_verb, 2), strict=True):
        assert all(torch.equal(one, two) for one, two in zip(ours, plain, strict=True))


def test_kinds_bytes_and_groups_are_those_of_what_was_called() -> None:
    def work(comm: VirtualCommunicator) -> Trace:
        wrapped = traced(comm)
        every_verb(wrapped)
        return wrapped.trace

    expected = {
        "all_reduce": 3 * 4,
        "reduce_scatter": 4 * 8,  # the whole input
        "all_gather": 4 * 2,  # the whole output
        "broadcast": 7 * 4,
        "all_to_all": 4 * 8,
        "send": 5,
        "recv": 5,
        "barrier": 0,
    }
    for trace in run_virtual(work, 2):
        assert trace.num_bytes == expected
        assert trace.num_operations == dict.fromkeys(expected, 1)
        assert {operation.kind: operation.num_bytes for operation in trace.operations} == expected
        assert all(operation.group == (0, 1) for operation in trace.operations)


def test_operations_start_before_they_end_and_are_kept_in_the_order_of_their_ends() -> None:
    def work(comm: VirtualCommunicator) -> Trace:
        wrapped = traced(comm)
        every_verb(wrapped)
        return wrapped.trace

    for trace in run_virtual(work, 2):
        ends = [operation.end_s for operation in trace.operations]
        assert all(operation.start_s <= operation.end_s for operation in trace.operations)
        assert ends == sorted(ends)


def test_an_operation_spans_what_is_done_before_it_is_awaited() -> None:
    wrapped = TracedCommunicator(SoloCommunicator(CPU), Trace(CPU, keep=True))
    first = wrapped.all_reduce(torch.ones(1))
    second = wrapped.broadcast(torch.ones(1))
    second.wait()
    first.wait()
    broadcast, all_reduce = wrapped.trace.operations
    assert (broadcast.kind, all_reduce.kind) == ("broadcast", "all_reduce")
    assert all_reduce.start_s <= broadcast.start_s <= broadcast.end_s <= all_reduce.end_s


def test_waits_are_the_time_that_compute_stood_still() -> None:
    """On a CPU in the call, and once while it is waited for; within the operation, and handed over once."""
    wrapped = TracedCommunicator(SoloCommunicator(CPU), Trace(CPU, keep=True))
    works = [wrapped.all_reduce(torch.ones(1)) for _ in range(3)]
    calls = wrapped.trace.take_waits()
    assert len(calls) == 3
    for work in works:
        work.wait()
    wrapped.barrier()
    waits = wrapped.trace.take_waits()
    assert wrapped.trace.take_waits() == []
    assert len(waits) == len(wrapped.trace.operations) == 4
    for (start, end), operation in zip(waits, wrapped.trace.operations, strict=True):
        assert 0 <= end.seconds_since(start) <= operation.end_s - operation.start_s
    for (start, end), operation in zip(calls, wrapped.trace.operations, strict=False):
        assert operation.start_s <= float(start) <= float(end) <= operation.end_s  # type: ignore[arg-type]


def test_no_wait_is_timed_while_a_graph_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = Trace(torch.device("cuda"), clock=DeviceClock(CPU))  # trainers always name a clock
    comm = TracedCommunicator(SoloCommunicator(CPU), trace)
    for is_recorded, waits in ((True, 0), (False, 1)):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda now=is_recorded: now)
        comm.all_reduce(torch.ones(1)).wait()
        assert len(trace.waits) == waits


def test_a_second_wait_is_not_a_second_operation() -> None:
    wrapped = TracedCommunicator(SoloCommunicator(CPU), Trace(CPU, keep=True))
    work = wrapped.all_reduce(torch.ones(1))
    wrapped.trace.take_waits()
    work.wait()
    work.wait()
    assert len(wrapped.trace.operations) == len(wrapped.trace.take_waits()) == 1


def test_around_an_algorithm_it_takes_the_time_of_all_that_is_done_there_once() -> None:
    def work(comm: VirtualCommunicator) -> None:
        trace = Trace(comm.device, keep=True)
        whole = TracedCommunicator(AlgorithmCommunicator(TracedCommunicator(comm, trace), "ring"), trace, counts=False)
        every_verb(whole.split([1, 0]))
        assert "send" in trace.num_operations
        assert "all_reduce" not in trace.num_operations  # messages are what travels
        assert {operation.kind for operation in trace.operations} == set(trace.num_operations)
        waits = [(float(start), float(end)) for start, end in trace.take_waits()]  # type: ignore[arg-type]
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(waits))  # none inside another
        first, last = waits[0][0], waits[-1][1]
        assert all(first <= operation.start_s <= operation.end_s <= last for operation in trace.operations[:-1])

    run_virtual(work, 2)


def test_an_error_in_a_wait_ends_it() -> None:
    class Broken(SoloCommunicator):
        def issue(self, *_: Any) -> NoReturn:
            raise CommunicationError("gone")

    wrapped = TracedCommunicator(Broken(CPU), Trace(CPU))
    for _ in range(2):
        with pytest.raises(CommunicationError, match="gone"):
            wrapped.all_reduce(torch.ones(1))
    assert len(wrapped.trace.take_waits()) == 2


def test_subgroups_write_into_the_same_trace_under_their_own_ranks() -> None:
    def work(comm: VirtualCommunicator) -> list[tuple[str, tuple[int, ...]]]:
        wrapped = traced(comm)
        if comm.rank:
            group = wrapped.split([2, 1])
            assert group.ranks == (2, 1)
            group.all_reduce(torch.ones(2)).wait()
        wrapped.all_reduce(torch.ones(1)).wait()
        return [(operation.kind, operation.group) for operation in wrapped.trace.operations]

    world = ("all_reduce", (0, 1, 2))
    assert run_virtual(work, 3) == [[world], [("all_reduce", (2, 1)), world], [("all_reduce", (2, 1)), world]]


@pytest.mark.parametrize("keep", [False, True])
def test_totals_are_counted_as_operations_are_issued_and_single_ones_kept_on_request(keep: bool) -> None:
    wrapped = TracedCommunicator(SoloCommunicator(CPU), Trace(CPU, keep=keep))
    wrapped.all_reduce(torch.ones(4)).wait()
    wrapped.all_reduce(torch.ones(2))  # never awaited: it counts, but has no end
    assert wrapped.trace.num_operations == {"all_reduce": 2}
    assert wrapped.trace.num_bytes == {"all_reduce": 24}
    assert len(wrapped.trace.operations) == (1 if keep else 0)
