"""Comparisons and scaling as they are drawn, the text of metrics, and lines of the console: every word is kept.

See ``tests/pool/kept_texts.py`` for how to keep other ones.
"""

from __future__ import annotations

import io
import math
import os
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kept_texts import check_kept
from made_records import END, RUN, STEP, write_records
from rich.console import Console

from paceline.errors import UsageError
from paceline.records.comparison import compare_runs, draw_comparison, draw_scaling, scaling_between, scaling_of
from paceline.records.prometheus import metrics_text
from paceline.records.records import CommRecord, EvalRecord, EventRecord, HostRecord, Record, to_line
from paceline.records.report import RunSummary, summarize
from paceline.records.sinks import scalars

KEPT = Path(__file__).parent / "kept"


def drawn(*parts: Any) -> str:
    console = Console(file=io.StringIO(), width=140, force_terminal=False, color_system=None, legacy_windows=False)
    for part in parts:
        console.print(part)
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


def summary_of(folder: Path, name: str, *, step: dict[str, Any] | None = None, **run: Any) -> RunSummary:
    """Returns the summary of a run of eight steps, with other values of its first record and of its steps."""
    first = replace(RUN, world_size=1, **run)
    steps = [replace(STEP, step=number, **(step or {})) for number in range(1, 9)]
    write_records(folder / name, 0, first, *steps, replace(END, step=8))
    return replace(summarize(folder / name), world_size=run.get("ranks", 1))


def summaries(folder: Path) -> Iterator[tuple[str, RunSummary]]:
    plain = summary_of(folder, "plain")
    yield "plain", plain
    changes: dict[str, dict[str, Any]] = {
        "faster": {"samples_per_s": 480.0, "final_loss": 0.125, "seconds": 20.0},
        "slower": {"samples_per_s": 160.0, "final_loss": 0.5, "comm_share": 0.75},
        "alike": {"samples_per_s": 321.0, "final_loss": 0.2501},
        "just alike": {"seconds": 40.0},
        "not finite": {"final_loss": math.nan, "test_loss": math.inf},
        "scored": {"test_loss": 0.5, "test_accuracy": 0.75, "mfu": 0.25},
        "scored better": {"test_loss": 0.25, "test_accuracy": 0.875, "mfu": 0.5},
        "shorter": {"steps": 4, "seconds": 1.0, "goodput": None},
    }
    for name, values in changes.items():
        yield name, replace(plain, name=name, **values)


def test_comparisons_are_drawn_as_they_were(tmp_path: Path) -> None:
    known = dict(summaries(tmp_path))
    names = list(known)
    pairs = [("plain", name) for name in names] + [(name, "plain") for name in names[1:4]]
    pairs += [("scored", "scored better"), ("scored better", "scored"), ("not finite", "plain")]
    parts = [draw_comparison(compare_runs(known[first], known[second])) for first, second in pairs]
    check_kept(KEPT / "drawn-comparisons.txt", drawn(*parts))


def test_scaling_is_drawn_as_it_was(tmp_path: Path) -> None:
    base = summary_of(tmp_path, "one")
    made: list[RunSummary] = []
    for strategy, ranks, batch, rate in (
        ("ddp", 1, 64, 100.0),
        ("ddp", 2, 64, 180.0),
        ("ddp", 4, 256, 400.0),
        ("ddp", 8, 100, 400.0),
        ("fsdp", 2, 64, 150.0),
        ("fsdp", 4, 128, 330.0),
        ("zero1", 2, 64, 150.0),
        ("zero2", 2, 64, 150.0),
        ("zero2", 2, 64, 160.0),
    ):
        values: dict[str, Any] = {"strategy": strategy, "world_size": ranks, "global_batch": batch}
        made.append(replace(base, name=f"{strategy}-{ranks}", samples_per_s=rate, **values))
    made.append(replace(base, name="no rate", samples_per_s=None))
    check_kept(KEPT / "drawn-scaling.txt", drawn(*draw_scaling(scaling_of(made))))
    assert draw_scaling(()) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "strong"),
        ({"world_size": 4}, "strong"),
        ({"world_size": 4, "global_batch": 128}, "weak"),
        ({"world_size": 2, "global_batch": 128}, "global batch: 128 on 2 ranks against 64 on 2"),
        ({"world_size": 1}, "ranks: 1 against 2, which are more"),
        ({"num_parameters": 5}, "parameters: 5 against 1,234,567"),
        ({"compute": "bf16"}, "strong"),  # the other does not say
        ({"peak_flops": 2e12}, "device peak: 2e+12 FLOP/s against 1e+12 FLOP/s"),
        ({"backend": "virtual"}, "ranks: simulated against real"),
    ],
)
def test_runs_that_differ_in_more_than_their_ranks_are_not_scaled(changes: dict[str, Any], words: str) -> None:
    base = replace(RUN, peak_flops=1e12)
    run = replace(base, **changes)
    if words in ("strong", "weak"):
        assert scaling_between(run, base) == words
        return
    with pytest.raises(UsageError) as told:
        scaling_between(run, base)
    assert str(told.value).splitlines()[0] == f"these runs differ in more than their ranks: {words}"
    batches = f"train.global_batch={run.global_batch}, or this one with train.global_batch=64 or {32 * run.world_size}"
    assert str(told.value).endswith(batches)


# The text of /metrics.

RECORDS: list[Record] = [
    replace(RUN, unit="tokens", units_per_sample=512.0),
    replace(STEP, flops_per_s=1e12, mfu=0.5, allocated_bytes=5, reserved_bytes=7),
    CommRecord(step=1, kind="all_reduce", group="data", ranks=2, calls=2, bytes=8, seconds=0.5, time=1.0),
    CommRecord(step=1, kind="all_gather", group="data", ranks=2, calls=1, bytes=16, seconds=0.5, time=1.0),
    EvalRecord(step=1, loss=0.5, accuracy=0.25, samples=4, seconds=1.0, time=1_700_000_009.0, metrics={"top5": 0.75}),
    EventRecord(name="scalars", step=1, detail={"own/a": 3, "own/b": "text"}, time=1.0),
    HostRecord(host="n1", values={"system.cpu.utilization": 0.5}, time=1.0),
]


def test_metrics_say_what_they_said(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write_records(run, 0, *RECORDS)
    write_records(run, 1, replace(RUN, rank=1), replace(STEP, loss=None, grad_norm=None), END)
    (run / "records" / "host-n1.jsonl").write_text(to_line(RECORDS[-1]))
    plain = re.sub(r"e\+0(?=\d\d)", "e+", metrics_text([run]))  # prometheus-client 0.20 writes 1e+012
    check_kept(KEPT / "metrics.txt", plain)
    numbers = [f"{name} {value:g}" for record in (*RECORDS, END) for name, value in scalars(record)]
    check_kept(KEPT / "scalars.txt", "\n".join(numbers))


@pytest.mark.parametrize(
    ("quiet_s", "has_ended", "is_there"),
    [(0, True, True), (500, True, True), (700, True, False), (700, False, True), (90_000, False, False)],
)
def test_series_leave_some_time_after_a_run_has_ended(
    quiet_s: float, has_ended: bool, is_there: bool, tmp_path: Path
) -> None:
    path = write_records(tmp_path / "run", 0, RUN, STEP, *([END] if has_ended else []))
    then = time.time() - quiet_s
    os.utime(path, (then, then))
    assert ("paceline_step{" in metrics_text([tmp_path / "run"])) == is_there


@pytest.mark.parametrize("extra", [-1, 0, 1, 400])
def test_of_a_long_file_the_first_line_and_the_last_ones_are_read(extra: int, tmp_path: Path) -> None:
    """A line that is cut in half at the beginning of what is read does not count; the whole first one does."""
    path = write_records(tmp_path / "run", 0, replace(RUN, total_steps=77))
    first = path.read_text()
    step = to_line(replace(STEP, step=1))
    event = to_line(EvalRecord(step=1, loss=0.5, accuracy=None, samples=4, seconds=1.0, time=1.0))
    room = 2**18 + extra - len(first) - len(event)
    path.write_text(first + event + step * (room // len(step)) + " " * (room % len(step) - 1) + "\n")
    assert path.stat().st_size == 2**18 + extra
    text = metrics_text([tmp_path / "run"])
    assert re.search(r"^paceline_steps_planned\{.*\} 77\.0$", text, re.MULTILINE)
    assert ("paceline_eval_loss{" in text) == (extra < len(first))
