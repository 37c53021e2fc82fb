"""The parts of a step add up to the step, and waiting for others is told apart from working."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.clock import CudaMark
from paceline.comm.base import DONE, Call, Work
from paceline.comm.ledger.ledger import Ledger
from paceline.comm.solo import SoloCommunicator
from paceline.comm.traced import Trace, TracedCommunicator
from paceline.free_memory import peak_memory_bytes
from paceline.records.meter import StepMeter, _host_seconds
from paceline.records.records import StepRecord

CPU = torch.device("cpu")


class Clock:
    """Time that passes only when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("paceline.clock.time", made)
    return made


class SlowCommunicator(SoloCommunicator):
    """A communicator whose operations take their time when they are waited for."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(CPU)
        self._clock = clock
        self.seconds = 0.0

    def issue(self, call: Call) -> Work:
        super().issue(call)
        clock, seconds = self._clock, self.seconds

        class Slow:
            def wait(self) -> None:
                clock.now += seconds
                DONE.wait()

        return Slow()


def make_facts(step: int = 1, *, samples: int = 8, **changes: Any) -> Any:
    numbers = {"loss_sum": torch.tensor(6.0), "count": 4.0, "grad_norm": torch.tensor(2.5), "loss_scale": None}
    outcome: Any = SimpleNamespace(**(numbers | changes))
    return SimpleNamespace(step=step, epoch=0.5, position=16, lr=0.1, samples=samples, outcome=outcome)


class Stage:
    """A meter on a clock of ours, and a communicator that it watches."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._slow = SlowCommunicator(clock)
        self.trace = Trace(CPU)
        self._comm = TracedCommunicator(self._slow, self.trace)
        self.meter = StepMeter(CPU, self.trace)

    def work(self, seconds: float) -> None:
        self.clock.now += seconds

    def communicate(self, seconds: float) -> None:
        self._slow.seconds = seconds
        self._comm.all_reduce(torch.zeros(1)).wait()

    def record(self) -> StepRecord:
        (record,) = self.meter.drain()
        return record


@pytest.fixture
def stage(clock: Clock) -> Stage:
    return Stage(clock)


def test_phases_get_the_time_that_passed_in_them(stage: Stage) -> None:
    stage.meter.start()
    for phase, seconds in [("data", 1.0), ("forward", 2.0), ("backward", 4.0), ("optimizer", 8.0)]:
        stage.work(seconds)
        stage.meter.lap(phase)
    stage.work(16.0)
    stage.meter.finish(make_facts())
    record = stage.record()
    assert (record.data_s, record.forward_s, record.backward_s, record.optimizer_s) == (1.0, 2.0, 4.0, 8.0)
    assert record.comm_s == 0.0
    assert record.step_s == 31.0  # what no phase has is part of the step all the same


def test_phases_of_several_microbatches_add_up(stage: Stage) -> None:
    stage.meter.start()
    for seconds in (1.0, 2.0, 4.0):
        stage.work(seconds)
        stage.meter.lap("forward")
        stage.work(10 * seconds)
        stage.meter.lap("backward")
    stage.meter.finish(make_facts())
    record = stage.record()
    assert (record.forward_s, record.backward_s, record.step_s) == (7.0, 70.0, 77.0)


@pytest.mark.parametrize("phase", ["data", "forward", "backward", "optimizer"])
def test_communication_is_taken_out_of_the_phase_it_fell_into(stage: Stage, phase: str) -> None:
    stage.meter.start()
    for each in ("data", "forward", "backward", "optimizer"):
        stage.work(1.0)
        if each == phase:
            stage.communicate(0.25)
            stage.work(1.0)
            stage.communicate(0.5)
        stage.meter.lap(each)
    stage.meter.finish(make_facts())
    record = stage.record()
    expected = {f"{each}_s": 2.0 if each == phase else 1.0 for each in ("data", "forward", "backward", "optimizer")}
    assert {name: getattr(record, name) for name in expected} == expected
    assert record.comm_s == 0.75
    assert record.step_s == 5.75


def test_communication_after_the_last_phase_belongs_to_its_own_step(stage: Stage) -> None:
    """It must not be taken out of the next step's data, which it has nothing to do with."""
    stage.meter.start()
    stage.meter.lap("optimizer")
    stage.communicate(3.0)
    stage.meter.finish(make_facts())
    assert stage.record().comm_s == 3.0
    stage.work(1.0)
    stage.meter.lap("data")
    stage.meter.finish(make_facts(2))
    record = stage.record()
    assert (record.data_s, record.comm_s) == (1.0, 0.0)


def test_a_step_begins_where_the_last_one_ended(stage: Stage) -> None:
    stage.meter.start()
    stage.work(1.0)
    stage.meter.finish(make_facts(1))
    stage.work(2.0)
    stage.meter.lap("data")
    stage.meter.finish(make_facts(2))
    first, second = stage.meter.drain()
    assert (first.step_s, second.step_s, second.data_s) == (1.0, 2.0, 2.0)


def test_what_happens_before_a_start_does_not_count(stage: Stage) -> None:
    """An evaluation and its waits lie between two steps."""
    stage.meter.start()
    stage.meter.finish(make_facts(1))
    stage.work(50.0)
    stage.communicate(7.0)
    stage.meter.lap("data")
    stage.communicate(7.0)
    stage.meter.start()
    stage.work(1.0)
    stage.meter.lap("forward")
    stage.meter.finish(make_facts(2))
    _, record = stage.meter.drain()
    assert (record.step_s, record.data_s, record.forward_s, record.comm_s) == (1.0, 0.0, 1.0, 0.0)


events = st.lists(
    st.tuples(
        st.sampled_from(["data", "forward", "backward", "optimizer"]),
        st.floats(0.0, 10.0),
        st.lists(st.floats(0.0, 3.0), max_size=3),
    ),
    max_size=12,
)


@given(events, st.floats(0.0, 5.0))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])  # each example starts a meter of its own
def test_parts_add_up_to_the_step(
    clock: Clock, laps: list[tuple[str, float, list[float]]], other_seconds: float
) -> None:
    stage = Stage(clock)
    stage.meter.start()
    for phase, seconds, waits in laps:
        stage.work(seconds)
        for wait in waits:
            stage.communicate(wait)
        stage.meter.lap(phase)
    stage.work(other_seconds)
    stage.meter.finish(make_facts())
    record = stage.record()
    parts = [record.data_s, record.forward_s, record.backward_s, record.optimizer_s, record.comm_s]
    assert sum(parts) + other_seconds == pytest.approx(record.step_s, abs=1e-9)
    assert record.comm_s == pytest.approx(sum(sum(waits) for _, _, waits in laps), abs=1e-9)
    for phase in ("data", "forward", "backward", "optimizer"):
        expected = sum(seconds for each, seconds, _ in laps if each == phase)
        assert getattr(record, f"{phase}_s") == pytest.approx(expected, abs=1e-9)


# Numbers.


def test_numbers_of_the_step_are_passed_on(stage: Stage) -> None:
    stage.meter.start()
    stage.work(2.0)
    stage.meter.finish(make_facts(3))
    record = stage.record()
    assert (record.step, record.epoch, record.position, record.lr, record.samples) == (3, 0.5, 16, 0.1, 8)
    assert (record.loss, record.loss_sum, record.count, record.grad_norm) == (1.5, 6.0, 4, 2.5)
    assert record.samples_per_s == 4.0
    assert record.memory_bytes == peak_memory_bytes(CPU) > 0


def test_memory_of_the_second_step_counts(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the worst moment of the first step Adam has no moments; runs of a few steps told that moment's bytes."""
    peak = [5]
    monkeypatch.setattr("paceline.records.meter.peak_memory_bytes", lambda _: peak[0])
    found = []
    for step in (7, 8, 9, 50, 51):  # a run that goes on begins with another step than the first
        stage.meter.finish(make_facts(step))
        found.append(stage.record().memory_bytes)
        peak[0] += 1
    assert found == [5, 6, 6, 6, 9]


def test_a_rank_without_samples_has_no_loss(stage: Stage) -> None:
    stage.meter.finish(make_facts(loss_sum=torch.zeros(()), count=0.0, samples=0))
    record = stage.record()
    assert (record.loss, record.count, record.samples_per_s) == (None, 0, 0.0)


@pytest.mark.parametrize("count", [3, 3.0, torch.tensor(3), torch.tensor(3.0, dtype=torch.float64)])
def test_a_count_may_be_of_any_kind(stage: Stage, count: Any) -> None:
    stage.meter.finish(make_facts(count=count))
    record = stage.record()
    assert (record.loss, record.count) == (2.0, 3)
    assert type(record.count) is int


def test_a_loss_keeps_its_precision(stage: Stage) -> None:
    value = 1.0 + 2.0**-40
    stage.meter.finish(make_facts(loss_sum=torch.tensor(value, dtype=torch.float64), count=1.0))
    assert stage.record().loss == value


# When records come.


class Device:
    """Says how far the device has come."""

    def __init__(self) -> None:
        self.passed = 0

    def mark(self, number: int) -> Any:
        device = self

        class Mark:
            def is_past(self) -> bool:
                return number <= device.passed

            def seconds_since(self, earlier: Any) -> float:
                del earlier
                return 1.0

        return Mark()


def test_records_come_when_the_device_is_past_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that lags behind: nothing is waited for unless asked."""
    device, numbers = Device(), iter(range(100))
    lagging = SimpleNamespace(take=lambda: device.mark(next(numbers)))
    monkeypatch.setattr("paceline.records.meter.DeviceClock", lambda _: lagging)
    meter = StepMeter(CPU, Trace(CPU))  # takes mark 0
    for step in (1, 2, 3):
        meter.finish(make_facts(step))  # takes marks 1, 2, 3
    assert list(meter.drain()) == []
    device.passed = 2
    assert [record.step for record in meter.drain()] == [1, 2]
    assert list(meter.drain()) == []
    assert [record.step for record in meter.drain(wait=True)] == [3]


def drained(clock: Clock, monkeypatch: pytest.MonkeyPatch, *, begins: float, step_s: float, steps: int) -> list[int]:
    """Returns the steps after which a rank drains whose run began at a time, and whose steps take a time."""
    monkeypatch.setattr("paceline.records.meter.time", SimpleNamespace(time=clock.perf_counter))
    clock.now = begins
    meter, found = Stage(clock).meter, []
    meter.start()
    for step in range(1, steps + 1):
        clock.now += step_s
        if meter.finish(make_facts(step)):
            found.append(step)
            assert len(list(meter.drain())) == step - (found[-2] if len(found) > 1 else 0)
    return found


def test_ranks_drain_after_the_same_steps_whatever_their_clocks_say(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = drained(clock, monkeypatch, begins=100.0, step_s=0.012, steps=200)
    assert first == [1, 32, 64, 96, 128, 160, 192]  # about half a second of steps each
    assert drained(clock, monkeypatch, begins=100.3, step_s=0.0125, steps=200) == first


@pytest.mark.parametrize(("step_s", "every"), [(1e-4, 64), (0.03, 16), (0.2, 2), (0.4, 1), (30.0, 1)])
def test_many_steps_are_drained_at_once_but_not_for_long(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, step_s: float, every: int
) -> None:
    found = drained(clock, monkeypatch, begins=100.0, step_s=step_s, steps=256)
    assert found[-4:] == [256 - 3 * every, 256 - 2 * every, 256 - every, 256]


def test_a_ledger_knows_the_phase_of_every_microbatch_and_what_steps_took() -> None:
    ledger = Ledger(rank=0, world=1)
    device = torch.device("cpu")
    meter = StepMeter(device, Trace(device), ledger)
    laps = ["data", "forward", "backward", "forward", "backward", "optimizer"]
    seen: list[list[str]] = []
    for number in (1, 2):
        meter.start()
        seen.append([])
        for lap in laps:
            seen[-1].append(ledger.reader().pulse().phase)
            meter.lap(lap)
        meter.finish(make_facts(number))
    assert seen[1] == laps  # the order is known from the step before
    records = list(meter.drain(wait=True))
    times = ledger.reader().times()
    assert times.steps == 2
    assert times.step_s == pytest.approx(sum(record.step_s for record in records), abs=1e-8)
    assert times.phases["backward"] == pytest.approx(sum(record.backward_s for record in records), abs=1e-8)
    assert times.own_s <= times.step_s + 1e-8


# How good a step was.


class Reached(CudaMark):
    """A mark that a device has come by, or not; without a device."""

    def __init__(self, *, is_past: bool) -> None:
        self._is_past = is_past

    def is_past(self) -> bool:
        return self._is_past


@pytest.mark.parametrize(("is_past", "host_s"), [(True, 0.5), (False, 0.0)])
def test_the_host_is_blamed_where_the_device_had_nothing_left_to_do(is_past: bool, host_s: float) -> None:
    laps = [(phase, Reached(is_past=is_past), 0) for phase in ("forward", "backward")]
    laps.append(("optimizer", Reached(is_past=False), 0))
    assert _host_seconds(laps, 0.5) == host_s


def test_without_a_device_nobody_waits_for_the_host(stage: Stage) -> None:
    assert _host_seconds([("backward", 1.0, 0), ("optimizer", 2.0, 0)], 0.5) is None
    stage.meter.finish(make_facts())
    assert stage.record().host_s is None


def test_steps_are_rated_against_the_peak_of_the_device(stage: Stage) -> None:
    stage.meter.rate_against(100.0, 1600.0)
    stage.meter.start()
    stage.work(2.0)
    stage.meter.finish(make_facts(samples=8))
    record = stage.record()
    assert (record.flops_per_s, record.mfu) == (400.0, 0.25)
    stage.meter.rate_against(100.0, None)
    stage.work(1.0)
    stage.meter.finish(make_facts(2, samples=8))
    record = stage.record()
    assert (record.flops_per_s, record.mfu) == (800.0, None)
    stage.meter.finish(make_facts(3, samples=0))  # nor of a rank without samples
    assert stage.record().flops_per_s is None
