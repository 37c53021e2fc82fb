"""A run as it is shown while it goes on: plain lines, a bar on a terminal, a cell of a notebook; by a clock of ours.

See ``tests/pool/kept_texts.py`` for how to keep other ones.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kept_texts import check_kept
from made_records import END, RUN, STEP
from rich.console import Console

from paceline.records import console as views
from paceline.records import sinks
from paceline.records.console import ProgressView, format_loss, parameters_text
from paceline.records.facts import find_goodput
from paceline.records.records import EndRecord, EvalRecord, EventRecord, HostRecord, Record, to_line
from paceline.records.report import RunSummary, plain_tables, summarize
from paceline.records.sinks import JsonlSink
from paceline.records.summary import RunRecords, StepTable, middle, split_attempts, worst_end
from paceline.units import format_percent

KEPT = Path(__file__).parent / "kept"
SCORES = EvalRecord(step=2, loss=0.5, accuracy=0.972, samples=360, seconds=0.0125, time=2.0, metrics={"top5": 0.0001})


class Clock:
    """Seconds that pass when the test says so."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def event(name: str, **detail: Any) -> EventRecord:
    return EventRecord(name=name, step=3, detail=detail, time=1.0)


def story() -> Iterator[tuple[float, Record]]:
    """Yields records of a run, and when they come."""
    gpt = replace(RUN, unit="tokens", units_per_sample=512.0, flops_per_sample=3e9, peak_flops=1e12, total_steps=100)
    yield 0.0, replace(gpt, num_trained=1000)
    for number in range(1, 7):
        made = replace(
            STEP, step=number, position=64 * number, epoch=number / 10, step_s=0.5 * number, loss=4.0 / number
        )
        yield 3.0 * number, replace(made, loss=None) if number == 5 else made
        if number == 2:
            yield 6.5, SCORES
            yield 6.5, event("first_step", seconds=3.0)
            yield 6.5, event("straggler", sentence="rank 1 is late")
            yield 6.5, event("own", note="as it was said")
            yield 6.5, event("attempt", number=2)
    yield 19.0, replace(END, status="failed", message="no room\nTraceback", step=6)
    yield 20.0, replace(RUN, world_size=1, device="cpu", backend="solo", total_steps=2)
    yield 20.1, replace(STEP, step=1, position=3, step_s=1.0, loss=2e4)
    yield 20.2, replace(STEP, step=2, position=6, step_s=1.0, loss=2e-5)
    yield 20.3, replace(SCORES, accuracy=None)
    yield 21.0, END


def shown(view: ProgressView, clock: Clock) -> None:
    for then, record in story():
        clock.now = then
        view.write(record)
    view.flush()
    view.close()


@pytest.mark.parametrize(("every_s", "after_s"), [(5.0, 0.0), (0.0, 0.0), (3.0, 7.0), (5.0, 30.0)])
def test_plain_lines_say_what_they_said(every_s: float, after_s: float) -> None:
    clock, stream = Clock(), io.StringIO()
    console = Console(file=stream, width=100, force_terminal=False, color_system=None, legacy_windows=False)
    shown(ProgressView(console, plain_every_s=every_s, after_s=after_s, clock=clock), clock)
    assert console.file is stream
    if after_s > 21:
        assert stream.getvalue() == ""
        return
    lines = "\n".join(line.rstrip() for line in stream.getvalue().splitlines())
    check_kept(KEPT / f"view-{every_s:g}-{after_s:g}.txt", lines)


def test_a_cell_of_a_notebook_has_a_bar_and_the_last_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[float, str]] = []
    monkeypatch.setattr(views, "is_notebook", lambda: True)
    monkeypatch.setattr(views, "cell_display", lambda: "cell")
    monkeypatch.setattr(views, "show_bar", lambda _, share, text: drawn.append((share, text)))
    clock = Clock()
    shown(ProgressView(clock=clock), clock)
    told = "\n".join(f"{share:.3f} of {text}\n" for share, text in drawn)
    check_kept(KEPT / "view-cell.txt", "\n".join(line.rstrip() for line in told.splitlines()))


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (None, "-"),
        (0.0, "0.0000"),
        (1e-3, "0.0010"),
        (9.99e-4, "9.990e-04"),
        (-5e-4, "-5.000e-04"),
        (9999.0, "9999.0000"),
        (1e4, "1.000e+04"),
        (float("inf"), "inf"),
        (float("nan"), "nan"),
    ],
)
def test_a_loss_is_written_so_that_it_can_be_read(loss: float | None, text: str) -> None:
    assert format_loss(loss) == text


def test_shares_and_parameters_in_words() -> None:
    assert (format_percent(None), format_percent(0.972)) == ("-", "97.2 %")
    words = [parameters_text(1000, trained) for trained in (None, 1000, 0, 10)]
    rest = ["", "", ", 0 of them trained", ", 10 of them trained"]
    assert words == [f"1.0k parameters{each}" for each in rest]


# Files of records that are made shorter.


def test_older_steps_are_added_up_once_in_each_period(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def thin(data: bytes, most: int) -> bytes | None:
        asked.append(len(data.splitlines()))
        assert most == 8
        return None

    monkeypatch.setattr(sinks, "thin_lines", thin)
    sink = JsonlSink(tmp_path / "a.jsonl", most=8, flush_every_s=0.0)
    sink.write(RUN)
    for step in range(1, 13):
        sink.write(replace(STEP, step=step))
    sink.close()
    assert asked == [5, 9, 13]
    hosts = JsonlSink(tmp_path / "b.jsonl", most=8, flush_every_s=0.0)
    asked.clear()
    for _ in range(9):
        hosts.write(HostRecord(host="a", values={}, time=1.0))
    hosts.close()
    assert asked == [4, 8]
    asked.clear()
    whole = JsonlSink(tmp_path / "c.jsonl", flush_every_s=0.0)
    whole.write(*(replace(STEP, step=step) for step in range(1, 13)))
    whole.close()
    assert asked == []


# Sums over ranks and attempts.


@pytest.mark.parametrize(
    ("values", "weights", "share", "expected"),
    [
        ([3.0, 1.0, 2.0], [1, 1, 1], 0.5, 2.0),
        ([1.0, 2.0], [1, 1], 0.5, 1.5),
        ([1.0, 2.0], [1, 3], 0.5, 2.0),
        ([1.0, 2.0], [3, 1], 0.5, 1.0),
        ([1.0, 2.0], [2, 2], 0.5, 2.0),
        ([1.0, 2.0, 3.0], [1, 1, 1], 0.0, 1.0),
        ([1.0, 2.0, 3.0], [1, 1, 1], 1.0, 3.0),
        ([5.0, 4.0, 3.0, 2.0, 1.0, 6.0, 7.0, 8.0, 9.0, 10.0], [1] * 10, 0.1, 2.0),
    ],
)
def test_the_middle_of_values_that_count_several_times(
    values: list[float], weights: list[int], share: float, expected: float
) -> None:
    assert middle(values, weights, share) == expected


def end(status: Any) -> EndRecord:
    return replace(END, status=status)


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ([], None),
        ([end("done"), end("done")], "done"),
        ([end("done"), end("stopped")], "stopped"),
        ([end("done"), None], None),
        ([end("failed"), None], "failed"),
        ([end("stopped"), end("failed"), end("done")], "failed"),
    ],
)
def test_the_worst_end_counts(ends: list[EndRecord | None], expected: str | None) -> None:
    found = worst_end(ends)
    assert (found and found.status) == expected


def test_a_table_of_steps_adds_up_ranks() -> None:
    rows = [
        {rank: replace(STEP, step=step, step_s=1.0 + rank, comm_s=0.5, samples=8 * (1 + rank)) for rank in (0, 1)}
        for step in (1, 2)
    ]
    table = StepTable([{}, *rows])
    assert (len(table), table.took_s, table.step_s, table.samples_per_s) == (2, 4.0, 2.0, 12.0)
    assert (table.mean_s("comm_s"), table.mean_s("step_s")) == (1.0, 3.0)
    totals = table.totals()
    assert (totals.steps, totals.samples, totals.total_s, totals.compute_s) == (4, 48, 6.0, 4.0)
    assert (totals.comm_share, totals.efficiency(2, 4.0), totals.efficiency(2, 0.0)) == (2.0 / 6.0, 0.5, 0.0)
    assert [len(each) for each in (table.only({2}), table.last(1), table.without_warm_up())] == [1, 1, 1]
    assert (len(table.of_rank(1)), len(table.of_rank(2))) == (2, 0)
    empty = StepTable([])
    assert (empty.step_s, empty.samples_per_s, empty.totals().loss, empty.totals().comm_share) == (
        None,
        None,
        None,
        0.0,
    )


def run_at(time: float, *records: Record) -> list[Record]:
    return [replace(RUN, time=time), *records]


def step_at(number: int, time: float, seconds: float = 1.0) -> Record:
    return replace(STEP, step=number, time=time, step_s=seconds)


def test_goodput_is_the_share_of_steps_that_count() -> None:
    first = run_at(0.0, step_at(1, 2.0), step_at(2, 3.0), replace(SCORES, time=4.0, seconds=0.5))
    second = run_at(10.0, step_at(2, 12.0), step_at(3, 13.0, 2.0), event("roll_back"), replace(END, time=15.0))
    found = find_goodput(split_attempts([*first, *second]))
    assert (found.wall_s, found.useful_s, found.repeated_s) == (4.0 + 6.0 + 5.0, 4.0, 1.0)
    assert (found.down_s, found.evaluation_s) == (8.0, 0.5)
    assert (found.restarts, found.roll_backs, found.repeated_steps, found.skipped_steps) == (1, 1, 1, 0)
    assert found.lost_share == 9.0 / 13.0
    ended = find_goodput(split_attempts([*first, replace(END, time=5.0), *second]))
    assert (ended.restarts, ended.down_s) == (0, 0.0)
    failed = find_goodput(split_attempts([*first, replace(END, status="failed", time=5.0), *second]))
    assert (failed.restarts, failed.down_s) == (1, 8.0)
    nothing = find_goodput(split_attempts(run_at(0.0)))
    assert (nothing.share, nothing.lost_share) == (0.0, 0.0)


def summary(folder: Path) -> RunSummary:
    (folder / "records").mkdir(parents=True)
    lines = "".join(map(to_line, [RUN, *(replace(STEP, step=step) for step in range(1, 9)), END]))
    (folder / "records" / "rank-0.jsonl").write_text(lines)
    return summarize(folder)


def test_goodput_is_told_where_something_was_lost(tmp_path: Path) -> None:
    found = summary(tmp_path / "run")
    assert found.goodput is not None
    assert found.to_json()["goodput"]["share"] == found.goodput.share
    assert replace(found, goodput=None).to_json()["goodput"] is None

    def told(**changes: Any) -> list[tuple[str, ...]]:
        changed = replace(found, goodput=replace(found.goodput, **changes))  # type: ignore[type-var]
        return [row for table in plain_tables(changed) if table.title.startswith("goodput") for row in table.rows]

    assert told() == []
    names = ["steps that count", "steps made again", "down", "waiting for saves"]
    assert [row[0] for row in told(restarts=1)] == names
    assert told(restarts=1, saving_s=2.5)[-1] == ("waiting for saves", "2.5 s", "checkpoints and snapshots")
    assert [row[2] for row in told(repeated_steps=1200, roll_backs=2)][1:] == [
        "1,200 steps",
        "0 restarts, 2 roll-backs",
        "checkpoints and snapshots",
    ]
    assert told(skipped_steps=3)[-1] == ("updates left out", "", "3 steps were not finite")
    assert len(told(skipped_steps=3)) == 5


def test_the_last_attempt_of_the_lowest_rank_counts() -> None:
    alone = replace(RUN, world_size=1, rank=0)
    both = [replace(RUN, world_size=2, rank=rank) for rank in (0, 1)]
    steps = [replace(STEP, step=step) for step in (1, 2, 3)]
    found = RunRecords.of([[alone, *steps[:2], both[0], *steps[2:]], [both[1], *steps[2:]]])
    assert [sorted(row) for row in found.steps.rows] == [[0], [0], [0, 1]]
    assert (found.of_rank(1).absent_steps, found.of_rank(0).absent_steps) == (2, 0)
    assert (found.of_rank(1).steps, found.of_rank(0).steps, found.run.world_size) == (1, 3, 2)
