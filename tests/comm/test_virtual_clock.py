"""Clocks of virtual ranks: operations, waits, slow ranks, bubbles and overlap against arithmetic by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from paceline.comm.base import clock_of
from paceline.comm.traced import Trace, TracedCommunicator
from paceline.comm.virtual.clock import VirtualClock, VirtualTime
from paceline.comm.virtual.communicator import VirtualCommunicator, run_virtual
from paceline.engines.apply import parallelize
from paceline.engines.combined import CombinedParallel
from paceline.errors import UsageError
from paceline.schedule.measure import measure_schedule
from paceline.schedule.schedules import make_schedule
from paceline.train.loss import LossValue


def cost(kind: str, num_bytes: int, ranks: tuple[int, ...]) -> float:
    """One second for each byte, and nothing for agreeing."""
    del ranks
    return 0.0 if kind == "barrier" else float(num_bytes)


def clocked(comm: VirtualCommunicator) -> VirtualClock:
    assert comm.clock is not None
    return comm.clock


def run(work: Callable[[VirtualCommunicator], Any], ranks: int, **settings: Any) -> tuple[list[Any], VirtualTime]:
    timing = VirtualTime(**{"cost": cost, "measures": False} | settings)
    return run_virtual(work, ranks, timing=timing), timing


def bytes_of(number: int) -> torch.Tensor:
    return torch.zeros(number, dtype=torch.uint8)


def test_a_collective_ends_a_cost_after_its_last_member_came() -> None:
    def work(comm: VirtualCommunicator) -> list[float]:
        clock = clocked(comm)
        clock.spend(1.0 + comm.rank)
        operation = comm.all_reduce(bytes_of(10), "max")
        times = [clock.take()]
        clock.spend(4.0)
        operation.wait()
        return [*times, clock.take()]

    found, timing = run(work, 3)
    assert found == [[1.0, 13.0], [2.0, 13.0], [3.0, 13.0]]  # the last comes at 3, and ten bytes take 10
    assert [clock.wait_s for clock in timing.clocks] == [8.0, 7.0, 6.0]
    assert [clock.compute_s for clock in timing.clocks] == [5.0, 6.0, 7.0]
    assert {clock.communication_s for clock in timing.clocks} == {10.0}
    assert max(clock.now_s for clock in timing.clocks) == 13.0


def test_what_is_computed_meanwhile_hides_an_operation() -> None:
    def work(comm: VirtualCommunicator) -> float:
        operation = comm.all_reduce(bytes_of(10), "max")
        clocked(comm).spend(25.0)
        operation.wait()
        return clocked(comm).take()

    found, timing = run(work, 2)
    assert found == [25.0, 25.0]
    assert all(clock.wait_s == 0 for clock in timing.clocks)


def test_operations_of_a_group_come_one_behind_another_and_groups_do_not_wait_for_one_another() -> None:
    def work(comm: VirtualCommunicator) -> tuple[float, float, float]:
        other = comm.split([0, 1])
        first, second, aside = (each.all_reduce(bytes_of(10), "max") for each in (comm, comm, other))
        ends = []
        for operation in (aside, first, second):
            operation.wait()
            ends.append(clocked(comm).take())
        return tuple(ends)  # type: ignore[return-value]

    found, _ = run(work, 2)
    assert found == [(10.0, 10.0, 20.0)] * 2


def test_a_message_starts_when_both_sides_are_there() -> None:
    def work(comm: VirtualCommunicator) -> list[float]:
        clock = clocked(comm)
        ends = []
        if comm.rank == 0:
            sent = [comm.send(bytes_of(size), 1) for size in (3, 4)]
            clock.spend(1.0)
            for each in sent:
                each.wait()
                ends.append(clock.take())
        else:
            clock.spend(2.0)
            for size in (3, 4):
                comm.recv(bytes_of(size), 0).wait()
                ends.append(clock.take())
        return ends

    found, _ = run(work, 2)
    assert found == [[5.0, 9.0], [5.0, 9.0]]


def test_a_slow_rank_slows_all_and_a_slow_link_those_that_use_it() -> None:
    def work(comm: VirtualCommunicator) -> float:
        for _ in range(3):
            clocked(comm).spend(2.0)
            comm.all_reduce(bytes_of(1), "max").wait()
        return clocked(comm).take()

    assert run(work, 4)[0] == [9.0] * 4
    assert run(work, 4, slow={2: 1.5})[0] == [12.0] * 4
    assert run(work, 4, slow_links={1: 3.0})[0] == [15.0] * 4
    with pytest.raises(UsageError, match=r"slow = \{4: 2\}"):
        run(work, 4, slow={4: 2.0})


def test_what_carries_an_operation_out_is_nobodys_compute() -> None:
    def work(comm: VirtualCommunicator) -> None:
        tensor = torch.ones(50_000)
        with torch.no_grad():
            comm.all_reduce(tensor).wait()
            # A rank that waits may be the one that carries out: that work is the network's.
            for _ in range(20):
                comm.all_reduce(tensor, "max").wait()

    timing = VirtualTime(cost=cost, measures=True)
    run_virtual(work, 2, timing=timing)
    assert all(0 < clock.compute_s < clock.wait_s for clock in timing.clocks)
    first, second = timing.clocks
    assert first.now_s == pytest.approx(second.now_s, rel=1e-3)  # both end with the last operation


def test_marks_and_waits_of_a_trace_are_on_the_clock() -> None:
    def work(comm: VirtualCommunicator) -> list[float]:
        trace = Trace(comm.device, clock=clock_of(comm))
        traced = TracedCommunicator(comm, trace)
        clocked(comm).spend(5.0 * comm.rank)
        traced.all_reduce(bytes_of(10), "max").wait()
        return [end.seconds_since(start) for start, end in trace.take_waits()]

    found, _ = run(work, 2)
    assert [sum(waits) for waits in found] == [15.0, 10.0]


def test_spans_tell_compute_by_name_waits_and_operations() -> None:
    def work(comm: VirtualCommunicator) -> None:
        clock = clocked(comm)
        clock.spend(1.0)
        comm.all_reduce(bytes_of(2), "max").wait()
        clock.spend(1.0)
        clock.name("forward")

    _, timing = run(work, 2)
    rows = [(span.row, span.name, span.start_s, span.end_s) for span in timing.clocks[1].spans]
    assert sorted(rows) == [
        ("communication", "all_reduce", 1.0, 3.0),
        ("compute", "forward", 0.0, 1.0),
        ("compute", "forward", 3.0, 4.0),
        ("wait", "all_reduce", 1.0, 3.0),
    ]


# Bubbles: the real executor, with costs given by hand.

SECONDS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}


def chain_loss(model: Callable[..., Any], batch: torch.Tensor) -> LossValue:
    return LossValue(model(batch).square().sum(), float(len(batch)))


def pipeline_makespan(schedule: str, ranks: int, microbatches: int, chunks: int) -> tuple[float, VirtualTime]:
    """Returns how long the second step takes: the first one introduces the stages to one another."""

    def work(comm: VirtualCommunicator) -> tuple[float, float]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(ranks * chunks)))
        engine = parallelize(model, comm, "ddp", pipeline=ranks, schedule=schedule, chunks=chunks or 0)
        assert isinstance(engine, CombinedParallel)
        clock, batches = clocked(comm), [torch.ones(1, 2) for _ in range(microbatches)]

        def note(_: str) -> None:
            clock.spend(SECONDS[engine.pipeline.journal[-1].kind] / chunks)

        engine.run_microbatches(batches, chain_loss, 1.0, note)
        comm.barrier()
        start = clock.take()
        engine.run_microbatches(batches, chain_loss, 1.0, note)
        return start, clock.take()

    found, timing = run(work, ranks, cost=lambda *_: 0.0)
    return max(end for _, end in found) - found[0][0], timing


@pytest.mark.some(3)
@pytest.mark.parametrize(
    ("schedule", "chunks", "overhead"),
    [
        ("gpipe", 1, lambda p, m: (p - 1) / m),
        ("1f1b", 1, lambda p, m: (p - 1) / m),
        ("interleaved", 2, lambda p, m: (p - 1) / (2 * m)),
        ("zb-h1", 1, lambda p, m: (p - 1) / (3 * m)),
        ("zb-v", 2, lambda p, m: (p - 1) / (6 * m)),
    ],
)
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8)])
def test_the_bubble_on_the_clocks_is_that_of_the_formula(
    schedule: str, chunks: int, overhead: Callable[[int, int], float], ranks: int, microbatches: int
) -> None:
    makespan, _ = pipeline_makespan(schedule, ranks, microbatches, chunks)
    work_s = 3.0 * microbatches
    assert makespan == pytest.approx(work_s * (1 + overhead(ranks, microbatches)))
    assert makespan == pytest.approx(measure_schedule(make_schedule(schedule, ranks, microbatches, chunks)).makespan)


# Overlap: DDP's buckets travel while backward goes on.


class Spending(torch.autograd.Function):
    """Passes through; its backward takes a second of the rank's clock."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, clock: VirtualClock) -> torch.Tensor:
        ctx.clock = clock
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        ctx.clock.spend(1.0)
        return gradient, None


class Layer(nn.Module):
    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16, bias=False)
        self.clock = clock

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return Spending.apply(self.linear(inputs), self.clock)  # type: ignore[no-any-return, no-untyped-call]


@pytest.mark.parametrize(("bucket_kb", "exposed_s"), [(1, 0.5), (4, 2.0)])
def test_buckets_hide_behind_backward(bucket_kb: float, exposed_s: float) -> None:
    """Four layers of 1 KiB; a KiB travels in half a second, a layer's backward takes one."""

    def work(comm: VirtualCommunicator) -> tuple[float, torch.Tensor]:
        torch.manual_seed(0)
        clock = clocked(comm)
        model = nn.Sequential(*(Layer(clock) for _ in range(4)))
        mb = bucket_kb / 1024
        engine = parallelize(model, comm, "ddp", bucket_mb=mb, first_bucket_mb=mb)
        inputs = torch.full((2, 16), float(comm.rank))
        for _ in range(3):  # buckets are ordered by the first step
            for parameter in engine.parameters():
                parameter.grad = None
            comm.barrier()
            start = clock.take()
            engine(inputs).sum().backward()
            engine.clip_grad_norm_(float("inf"))
            took = clock.take() - start
        gradient = next(iter(engine.parameters())).grad
        assert gradient is not None
        return took, gradient.clone()

    found, _ = run(work, 2, cost=lambda _kind, num_bytes, _ranks: num_bytes // 1024 / 2)
    plain = run_virtual(_gradient, 2)
    assert [took for took, _ in found] == pytest.approx([4.0 + exposed_s] * 2)
    assert all(torch.equal(gradient, plain[0]) for _, gradient in found)


def _gradient(comm: VirtualCommunicator) -> torch.Tensor:
    """The same backward, without clocks."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(4)))
    engine = parallelize(model, comm, "ddp")
    engine(torch.full((2, 16), float(comm.rank))).sum().backward()
    gradient = next(iter(engine.parameters())).grad
    assert gradient is not None
    return gradient.clone()


def test_without_timing_there_is_no_clock() -> None:
    assert run_virtual(lambda comm: comm.clock, 2) == [None, None]
