"""Records as lines of a log: each kind in words, warnings for what went wrong, and nothing for many numbers."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from made_records import END, RUN, STEP

from paceline.records import host
from paceline.records.host import HostSampler
from paceline.records.records import CommRecord, EvalRecord, EventRecord, HostRecord, Record
from paceline.records.sinks import LogSink, describe

SCORES = EvalRecord(step=10, loss=0.5, accuracy=0.972, samples=360, seconds=0.0125, time=2.0)
SENT = CommRecord(step=1, kind="all_reduce", group="data", ranks=2, calls=1, bytes=8, seconds=0.1, time=1.0)

LINES: list[tuple[Record, str]] = [
    (RUN, "rank 0 of 2 begins on node-1 (cuda:0): ddp, nccl, 1.2M parameters, 100 steps"),
    (replace(STEP, samples=64), "step 1: loss 0.2500, lr 0.0003, 100.0 ms, 320 samples/s"),
    (STEP, "step 1: loss 0.2500 of this rank's 32 of 64 samples, lr 0.0003, 100.0 ms, 320 samples/s"),
    (replace(STEP, loss=None), "step 1: no samples, lr 0.0003, 100.0 ms, 320 samples/s"),
    (SCORES, "evaluation after step 10: loss 0.5000, accuracy 0.9720"),
    (replace(SCORES, accuracy=None, metrics={"top5": 0.75}), "evaluation after step 10: loss 0.5000, top5 0.7500"),
    (END, "done after step 100 and 41.2 s"),
    (replace(END, status="failed", message="no room"), "failed after step 100 and 41.2 s: no room"),
    (SENT, ""),
    (HostRecord(host="a", values={}, time=1.0), ""),
    (EventRecord(name="histogram", step=1, detail={}, time=1.0), ""),
    (EventRecord(name="scalars", step=1, detail={"a": 1}, time=1.0), ""),
]


@pytest.mark.parametrize(("record", "line"), LINES)
def test_a_record_in_words(record: Record, line: str) -> None:
    assert describe(record, 64) == line


def test_without_a_global_batch_nothing_is_said_of_it() -> None:
    assert describe(STEP) == "step 1: loss 0.2500, lr 0.0003, 100.0 ms, 320 samples/s"


def test_a_log_has_a_line_for_each_and_warns_of_what_went_wrong() -> None:
    lines: list[tuple[int, str]] = []
    logger = SimpleNamespace(log=lambda level, _, line: lines.append((level, line)))
    sink = LogSink(logger)  # type: ignore[arg-type]
    names = ("checkpoint", "skipped", "straggler", "roll_back", "histogram", "restart")
    events = [EventRecord(name=name, step=3, detail={}, time=1.0) for name in names]
    sink.write(RUN, STEP, SENT)
    sink.write(*events)
    sink.flush()
    sink.close()
    levels = [level for level, _ in lines]
    info, warning = logging.INFO, logging.WARNING
    assert levels == [info, info, info, warning, warning, warning, info]
    assert "32 of 64 samples" in lines[1][1]
    assert all(" at step 3: " in line for _, line in lines[2:])


class Host:
    """A host whose counters and clock the test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.busy_s, self.idle_s = 100.0, 50.0, 150.0
        self.counters: dict[str, int] = {"io": 1000}
        monkeypatch.setattr(host, "_counters", lambda: dict(self.counters))
        monkeypatch.setattr(host, "time", SimpleNamespace(monotonic=lambda: self.now, time=lambda: 7.0))
        monkeypatch.setattr(psutil, "cpu_times", self.times)

    def times(self) -> Any:
        names = ("user", "system", "idle", "iowait", "guest", "guest_nice")
        values = (self.busy_s, 8.0, self.idle_s, 4.0, 5.0, 6.0)
        return _Times(zip(names, values, strict=True))


class _Times(tuple):  # type: ignore[type-arg]
    def __new__(cls, pairs: Any) -> _Times:
        known = list(pairs)
        self = super().__new__(cls, [value for _, value in known])
        vars(self).update(known)
        return self


def test_rates_and_shares_are_of_what_passed_since_the_last_look(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Host(monkeypatch)
    processes: dict[int, int] = {}
    sampler = HostSampler(lambda: processes)
    here.now, here.busy_s, here.idle_s = 104.0, 53.0, 159.0
    here.counters = {"io": 1800, "new": 5}
    found = sampler.look()
    values: Mapping[str, float] = found.values
    assert (values["io"], values["system.cpu.utilization"]) == (200.0, 0.25)
    assert "new" not in values  # there was none before
    assert values["system.memory.limit"] >= values["system.memory.usage"] > 0
    here.now, here.counters = 106.0, {"io": 1700, "new": 6}
    assert sampler.look().values.get("io") is None  # it went back: the counter is another one
    here.counters = {"io": 1800, "new": 16}
    here.now = 108.0
    again = sampler.look().values
    assert (again["io"], again["new"]) == (50.0, 5.0)
    assert "io" not in sampler.look().values  # no time has passed
    assert "system.cpu.utilization" not in again
