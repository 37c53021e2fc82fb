"""One record of each type, to be changed with ``dataclasses.replace``."""

from __future__ import annotations

import pytest

from paceline.monitor.records import EndRecord, EvalRecord, EventRecord, RunRecord, StepRecord


@pytest.fixture
def run_record() -> RunRecord:
    return RunRecord(
        rank=0,
        world_size=2,
        local_rank=0,
        device="cuda:0",
        host="node-1",
        pid=4321,
        python="3.11.7",
        torch="2.13.0",
        paceline="0.1.0",
        num_parameters=1_234_567,
        strategy="ddp",
        backend="nccl",
        global_batch=64,
        microbatch=16,
        accumulate=2,
        total_steps=100,
        time=1_700_000_000.25,
    )


@pytest.fixture
def step_record() -> StepRecord:
    return StepRecord(
        step=1,
        epoch=0.5,
        position=64,
        loss=0.25,
        loss_sum=8.0,
        count=32,
        lr=3e-4,
        grad_norm=1.5,
        samples=32,
        step_s=0.1,
        data_s=0.01,
        forward_s=0.02,
        backward_s=0.03,
        comm_s=0.025,
        optimizer_s=0.01,
        samples_per_s=320.0,
        memory_bytes=2**20,
        time=1_700_000_001.5,
    )


@pytest.fixture
def eval_record() -> EvalRecord:
    return EvalRecord(step=10, loss=0.5, accuracy=0.972, samples=360, seconds=0.0125, time=1_700_000_002.0)


@pytest.fixture
def event_record() -> EventRecord:
    return EventRecord(name="checkpoint", step=10, detail={"path": "step-10", "bytes": [1, 2]}, time=1_700_000_003.0)


@pytest.fixture
def end_record() -> EndRecord:
    return EndRecord(status="done", step=100, seconds=41.25, message="", time=1_700_000_041.25)
