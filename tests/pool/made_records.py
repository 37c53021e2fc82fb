"""One plausible record of each kind that most tests of records need, to be changed with ``dataclasses.replace``.

A test replaces the fields that it is about, so that it shows which those are.
"""

from __future__ import annotations

from pathlib import Path

from paceline.records.records import EndRecord, Record, RunRecord, StepRecord, to_line

RUN = RunRecord(
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
STEP = StepRecord(
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
END = EndRecord(status="done", step=100, seconds=41.25, message="", time=1_700_000_041.25)


def write_records(folder: Path, rank: int, *records: Record) -> Path:
    """Writes what a rank of the run in ``folder`` recorded, in place of what was there; returns the file."""
    path = folder / "records" / f"rank-{rank}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(map(to_line, records)))
    return path
