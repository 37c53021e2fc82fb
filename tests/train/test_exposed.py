"""Exposed communication of every strategy: what a step's record says is all that the step stood still for."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from gloo_pool import GlooPool
from kept_records import Kept

from paceline.comm.base import Call, Communicator, Work, WrappedCommunicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.config import config_from_dict
from paceline.train.assemble import build_trainer

STEPS = 2  # engines learn in the first

GPT: dict[str, Any] = {
    "model": {"kind": "gpt", "layers": 2, "heads": 2, "width": 16, "context": 8},
    "data": {"kind": "synthetic_tokens", "samples": 64, "context": 8, "vocab_size": 16},
    "train": {"steps": STEPS, "global_batch": 8, "accumulate": 2},
}


class TimedWork:
    def __init__(self, inner: Work, owner: Timed) -> None:
        self.inner, self.owner, self.is_over = inner, owner, False

    def wait(self) -> None:
        if self.is_over:  # a second wait stands still for nothing
            self.inner.wait()
            return
        self.is_over = True
        self.owner.time(self.inner.wait)


class Timed(WrappedCommunicator):
    """Adds up the time inside a communicator by itself, below whatever else looks at it."""

    def __init__(self, inner: Communicator, seconds: list[float] | None = None) -> None:
        super().__init__(inner)
        self.seconds: list[float] = [] if seconds is None else seconds

    def time(self, call: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        found = call()
        self.seconds.append(time.perf_counter() - start)
        return found

    def issue(self, call: Call) -> Work:
        return TimedWork(self.time(lambda: self.inner.issue(call)), self)

    def barrier(self) -> None:
        self.time(self.inner.barrier)

    def split(self, ranks: Any) -> Timed:
        return Timed(self.inner.split(ranks), self.seconds)


def exposed_of(comm: Communicator, changes: dict[str, Any]) -> list[tuple[float, float, float, int]]:
    """Trains; returns for each step what the record says, what was spent below, the step, and how often it stood."""
    sink, timed = Kept(), Timed(comm)
    trainer = build_trainer(config_from_dict({**GPT, **changes}), timed, sink=sink, node_ranks=2)
    timed.seconds.clear()
    below: list[list[float]] = []
    for _ in trainer.steps():
        below.append(timed.seconds[:])
        timed.seconds.clear()
    trainer.flush(wait=True)
    pairs = zip(sink.steps, below, strict=True)
    return [(record.comm_s, sum(seconds), record.step_s, len(seconds)) for record, seconds in pairs]


def check(found: list[tuple[float, float, float, int]]) -> None:
    assert len(found) == STEPS
    for said, below, step_s, num_times in found:
        assert num_times >= 2  # a call and its wait
        assert below <= said <= step_s


CASES: dict[str, dict[str, Any]] = {
    **{name: {"parallel": {"strategy": name}} for name in ("ddp", "zero1", "zero2", "fsdp")},
    "hybrid": {"parallel": {"strategy": "hybrid", "shard_ranks": 2}},
    "hybrid, reshard": {"parallel": {"strategy": "fsdp", "reshard_after_forward": 2}},
    "ddp, no overlap": {"parallel": {"strategy": "ddp"}, "comm": {"overlap": False}},
    "ddp, ring": {"parallel": {"strategy": "ddp"}, "comm": {"algorithm": "ring"}},
    "fsdp, hierarchical": {
        "parallel": {"strategy": "fsdp", "node_ranks": 2},
        "comm": {"algorithm": "hierarchical", "backend": "gloo"},  # messages alone: threads share no segment
    },
    "ddp, topk": {"parallel": {"strategy": "ddp"}, "comm": {"compression": {"policy": "topk", "min_size": 8}}},
}


@pytest.mark.some(2)
@pytest.mark.parametrize("case", CASES)
def test_a_record_has_all_that_a_step_stood_still_for(case: str) -> None:
    for found in run_virtual(lambda comm: exposed_of(comm, CASES[case]), 4):
        check(found)


@pytest.mark.parametrize("case", ["ddp", "fsdp"])
def test_the_same_on_real_ranks(gloo_pool: GlooPool, case: str) -> None:
    for found in gloo_pool.run(exposed_of, CASES[case], ranks=2, group_timeout_s=60.0, timeout_s=120.0):
        check(found)
