"""Bandwidths of collectives, and the records that they are derived from."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from paceline.comm.solo import SoloCommunicator
from paceline.comm.traced import Trace, TracedCommunicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.plan.layout import Layout, groups_of, names_of
from paceline.records.meter import StepMeter
from paceline.records.records import CommRecord, parse_line, to_line

RECORD = CommRecord(
    step=7, kind="all_reduce", group="world", ranks=4, calls=2, bytes=8_000, seconds=0.5, time=1_700_000_000.0
)


@pytest.mark.parametrize(
    ("kind", "ranks", "expected"),
    [
        ("all_reduce", 2, 1.0),
        ("all_reduce", 8, 1.75),
        ("all_gather", 4, 0.75),
        ("reduce_scatter", 4, 0.75),
        ("broadcast", 4, 1.0),
        ("all_reduce", 1, 0.0),
    ],
)
def test_bus_bandwidth_counts_what_a_link_carries(kind: str, ranks: int, expected: float) -> None:
    record = replace(RECORD, kind=kind, ranks=ranks)
    assert record.bus_bandwidth == expected * record.bandwidth


def test_bandwidths_are_bytes_over_seconds() -> None:
    assert RECORD.bandwidth == 16_000
    assert RECORD.bus_bandwidth == 24_000
    assert parse_line(to_line(RECORD)) == RECORD


def test_a_meter_adds_up_operations_by_kind_and_group() -> None:
    def work(comm: object) -> list[CommRecord]:
        trace = Trace(torch.device("cpu"))
        traced = TracedCommunicator(comm, trace)  # type: ignore[arg-type]
        layout = Layout(strategy="hybrid", data=4, shard_ranks=2)
        meter = StepMeter(torch.device("cpu"), trace, groups=names_of(groups_of(layout, traced.rank)))
        pair = traced.split([0, 1] if traced.rank < 2 else [2, 3])
        for _ in range(3):
            traced.all_reduce(torch.ones(10)).wait()
        pair.all_reduce(torch.ones(5)).wait()
        assert meter.drain_comm(3) == []  # less than a second has passed
        found = meter.drain_comm(3, wait=True)
        assert meter.drain_comm(3, wait=True) == []  # each operation is in one record
        return found

    for records in run_virtual(work, 4):
        by_group = {record.group: record for record in records if record.kind == "all_reduce"}
        assert by_group["world"].calls == 3
        assert by_group["world"].bytes == 120
        assert by_group["world"].ranks == 4
        assert by_group["world"].seconds > 0
        assert by_group["shard"].calls == 1
        assert by_group["shard"].ranks == 2


def test_a_world_of_one_has_no_communication() -> None:
    trace = Trace(torch.device("cpu"))
    comm = TracedCommunicator(SoloCommunicator(torch.device("cpu")), trace)
    meter = StepMeter(torch.device("cpu"), trace)
    comm.all_reduce(torch.ones(10)).wait()
    assert meter.drain_comm(1, wait=True) == []


def test_totals_wait_for_the_device() -> None:
    class Slow:
        """A mark that the device has not passed."""

        is_reached = False

        def is_past(self) -> bool:
            return self.is_reached

        def seconds_since(self, earlier: object) -> float:
            del earlier
            return 2.0

    class Clock:
        last = Slow()

        def take(self) -> Slow:
            return self.last

        mark = take

    clock = Clock()
    trace = Trace(torch.device("cpu"), clock=clock)  # type: ignore[arg-type]
    trace.adds_up = True
    trace.finish(trace.issue("all_reduce", 8, (0, 1)))
    assert trace.take_totals() == []
    clock.last.is_reached = True
    (total,) = trace.take_totals()
    assert (total.calls, total.num_bytes, total.seconds) == (1, 8, 2.0)
