"""One record of each type, to be changed with ``dataclasses.replace``."""

from __future__ import annotations

import pytest
from made_records import END, RUN, STEP

from paceline.records.records import EndRecord, EvalRecord, EventRecord, RunRecord, StepRecord


@pytest.fixture
def run_record() -> RunRecord:
    return RUN


@pytest.fixture
def step_record() -> StepRecord:
    return STEP


@pytest.fixture
def eval_record() -> EvalRecord:
    return EvalRecord(step=10, loss=0.5, accuracy=0.972, samples=360, seconds=0.0125, time=1_700_000_002.0)


@pytest.fixture
def event_record() -> EventRecord:
    return EventRecord(name="checkpoint", step=10, detail={"path": "step-10", "bytes": [1, 2]}, time=1_700_000_003.0)


@pytest.fixture
def end_record() -> EndRecord:
    return END
