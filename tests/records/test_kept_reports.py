"""Whole reports of made-up runs, compared with those that are kept beside this file: every number and every word.

See ``tests/pool/kept_texts.py`` for how to keep other ones.
"""

from __future__ import annotations

import io
import random
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from kept_texts import check_kept, shown
from made_records import END, RUN, STEP, write_records
from rich.console import Console

from paceline.records.comparison import compare_runs
from paceline.records.event_words import event_name, event_text
from paceline.records.records import CommRecord, EvalRecord, EventRecord, HostRecord, Record
from paceline.records.report import render, summarize

KEPT = Path(__file__).parent / "kept"
START = 1_700_000_000.0

# One of each event that a run may tell, with and without what may be left out.
EVENTS: list[tuple[str, dict[str, Any]]] = [
    ("first_step", {"seconds": 7.5, "data": 1.25, "compile": 4.5, "step": 1.75}),
    ("checkpoint", {"bytes": 3 * 2**20, "folder": "checkpoints/step-10", "seconds": 0.5, "stall_seconds": 0.125}),
    ("checkpoint", {"bytes": 2**30, "folder": "x", "seconds": 2.0, "background": 1, "stall_seconds": 0.25}),
    ("skipped", {"in_a_row": 1, "grad_norm": "nan", "loss_scale": 1024.0}),
    ("skipped", {"in_a_row": 3, "grad_norm": "inf"}),
    ("spike", {"loss": 9.5, "median": 2.25}),
    ("preempted", {"signal": "SIGTERM", "ranks_asked": 1}),
    ("attempt", {"number": 2}),
    ("restart", {"number": 1, "of": 3, "reason": "rank 1 was killed"}),
    ("resume", {"checkpoint": "step-10"}),
    ("microbatch", {"reason": "memory ran out", "microbatch": 8}),
    ("fallback", {"backend": "gloo", "instead_of": "shared_memory", "reason": "no room in /dev/shm"}),
    ("buckets", {"buckets": 3, "bucket_mb": 25.0, "lost_ms": 1.5, "default_lost_ms": 2.5}),
    ("buckets", {"buckets": 1, "bucket_mb": 25.0}),
    ("loader", {"workers": 2, "reason": "a sample takes long"}),
    ("compiled", {"what": "12 blocks", "seconds": 31.0}),
    ("cuda_graphs", {"used": 1, "why": "the host is slower than the device"}),
    ("cuda_graphs", {"used": 0, "why": "it was not asked for"}),
    ("settings", {"NCCL_ALGO": "Ring", "OMP_NUM_THREADS": 1}),
    ("not_saved", {"reason": "the disk is full"}),
]


def records_of(rank: int, ranks: int, seed: int, *, num_steps: int, fill: float) -> list[Record]:
    """Returns what a rank of a run may have recorded; ``fill`` is how full its memory is."""
    chance = random.Random(100 * seed + rank)
    capacity = 80 * 2**30
    run = replace(RUN, rank=rank, world_size=ranks, local_rank=rank, device=f"cuda:{rank}", total_steps=num_steps)
    run = replace(run, unit="tokens", units_per_sample=512.0, flops_per_sample=3e9, peak_flops=9.89e14, compute="bf16")
    run = replace(run, time=START, measured_peak_flops=7e14)
    told: list[Record] = [run]
    told += [EventRecord(name=name, step=0, detail=detail, time=START + 1) for name, detail in EVENTS[:1]]
    for step in range(1, num_steps + 1):
        parts = {name: chance.uniform(0.01, 0.1) for name in ("data_s", "forward_s", "backward_s", "comm_s")}
        took = sum(parts.values()) + 0.02 + (1.5 if step == 1 else 0.0) + (0.2 if rank == 1 else 0.0)
        loss, time = 4.0 / (1 + step) + chance.uniform(0, 0.1), START + 2 * step
        memory = int(capacity * fill) - step * 2**20
        made = replace(STEP, step=step, epoch=step / 10, position=64 * step, loss=loss, loss_sum=32 * loss, time=time)
        made = replace(made, step_s=took, optimizer_s=0.02, host_s=0.7 * took, **parts)
        made = replace(made, samples_per_s=32 / took, flops_per_s=9.6e10 / took, mfu=0.35 + 0.01 * (step % 3))
        told.append(replace(made, memory_bytes=memory, peak_bytes=memory, allocated_bytes=memory // 2))
        told.append(comm_record(step, ranks, time))
        if step % 5 == 0 and rank == 0:
            scores = {"samples": 128, "seconds": 0.75, "metrics": {"top5": 0.75}}
            told.append(EvalRecord(step=step, loss=1.1 * loss, accuracy=0.5 + step / 100, time=time, **scores))
            detail = {"bytes": 2**28, "folder": f"checkpoints/step-{step}", "seconds": 0.5, "stall_seconds": 0.125}
            told.append(EventRecord(name="checkpoint", step=step, detail=detail, time=time))
        if step % 4 == 0:
            values = {"cpu_percent": 40.0 + step, "gpu0_percent": 90.0 - step}
            told.append(HostRecord(host=f"node-{rank}", values=values, time=time))
    return [*told, replace(END, step=num_steps, seconds=2.5 * num_steps, time=START + 2.5 * num_steps)]


def comm_record(step: int, ranks: int, time: float) -> CommRecord:
    return CommRecord(
        step=step, kind="all_reduce", group="data", ranks=ranks, calls=3, bytes=2**24, seconds=0.02, time=time
    )


def well(folder: Path) -> Path:
    """Four ranks, thirty steps, nothing wrong."""
    for rank in range(4):
        write_records(folder, rank, *records_of(rank, 4, 1, num_steps=30, fill=0.5))
    return folder


def unwell(folder: Path) -> Path:
    """A rank without records, one that lost the last steps, memory nearly full, updates left out, a roll-back."""
    for rank in (0, 1, 3):
        told = records_of(rank, 4, 2, num_steps=20, fill=0.97)
        events = [EventRecord(name=name, step=7, detail=detail, time=START + 15) for name, detail in EVENTS[1:]]
        back = {"step": 5, "reason": "3 losses in a row were not finite", "number": 1, "rate_scale": 0.5}
        events += [EventRecord(name="roll_back", step=8, detail=back, time=START + 16)]
        told = [*told[:12], *events, *told[12:]]
        if rank == 3:
            told = told[:-9]
        if rank == 0:
            told[-1] = replace(END, status="failed", step=20, message="rank 2 was killed", time=START + 60)
        write_records(folder, rank, *told)
    return folder


def short(folder: Path) -> Path:
    """One rank on a CPU, two steps, ended by a signal."""
    run = replace(RUN, world_size=1, device="cpu", backend="solo", total_steps=50, num_trained=1000)
    steps = [replace(STEP, step=step, step_s=0.5 + step, grad_norm=None) for step in (1, 2)]
    write_records(folder, 0, run, *steps, replace(END, status="stopped", step=2, message="ended by SIGINT"))
    return folder


RUNS = {"well": well, "unwell": unwell, "short": short}


def drawn(summary: Any, width: int) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False, color_system=None, legacy_windows=False)
    console.print(render(summary))
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


@pytest.mark.parametrize("name", RUNS)
def test_a_report_says_what_it_said(name: str, tmp_path: Path) -> None:
    summary = summarize(RUNS[name](tmp_path / name))
    check_kept(KEPT / f"report-{name}.txt", f"{drawn(summary, 80)}\n\n{drawn(summary, 140)}")
    check_kept(KEPT / f"summary-{name}.json", shown(asdict(summary)).replace(str(tmp_path), ""))


def test_a_comparison_says_what_it_said(tmp_path: Path) -> None:
    runs = {name: summarize(make(tmp_path / name)) for name, make in RUNS.items()}
    found = {f"{first} {second}": asdict(compare_runs(runs[first], runs[second])) for first in runs for second in runs}
    check_kept(KEPT / "comparisons.json", shown(found).replace(str(tmp_path), ""))


def test_events_say_what_they_said() -> None:
    events = [EventRecord(name=name, step=3, detail=detail, time=START) for name, detail in EVENTS]
    check_kept(KEPT / "events.txt", "\n".join(f"{event_name(each.name)}: {event_text(each)}" for each in events))
