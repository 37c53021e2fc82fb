"""Runs that were never made, for tests of what is shown of runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from made_records import END, RUN, STEP, write_records

from paceline.records.records import EvalRecord, EventRecord, Record


def steps_of(rank: int, first: int, last: int, slow: float = 1.0) -> list[Record]:
    """Returns steps whose loss is 1 / step; rank 1 takes ``slow`` times as long for its own work."""
    factor = slow if rank == 1 else 1.0
    return [
        replace(
            STEP,
            step=step,
            loss=1 / step,
            loss_sum=32 / step,
            forward_s=0.02 * factor,
            comm_s=0.03 - 0.02 * (factor - 1),
            step_s=0.1,
            time=RUN.time + 0.1 * step,
        )
        for step in range(first, last + 1)
    ]


def write_run(folder: Path, *, ranks: int = 2, steps: int = 40, is_done: bool = True, slow: float = 1.0) -> Path:
    """Writes the records of a run: steps, an evaluation, a checkpoint, an end."""
    for rank in range(ranks):
        run = replace(RUN, rank=rank, world_size=ranks, total_steps=steps, host="elsewhere")
        evaluation = EvalRecord(step=20, loss=0.5, accuracy=0.9, samples=9, seconds=0.1, time=RUN.time + 2)
        saved = EventRecord(name="checkpoint", step=20, detail={"path": "step-20"}, time=RUN.time + 2)
        end = replace(END, step=steps, time=RUN.time + 5)
        records = [*steps_of(rank, 1, steps, slow), evaluation, saved, *([end] if is_done else [])]
        write_records(folder, rank, run, *records)
    (folder / "config.yaml").write_text(f"name: {folder.name}\ntrain: {{steps: {steps}}}\n")
    return folder
