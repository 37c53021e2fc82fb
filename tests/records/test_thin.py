"""Records of long runs: what is added up, what stays as it is, and that whoever reads along loses nothing."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
from made_records import END, RUN, STEP, write_records

from paceline.records.facts import find_goodput
from paceline.records.records import (
    CommRecord,
    EventRecord,
    GrowingFile,
    HostRecord,
    Record,
    SpanRecord,
    StepRecord,
    parse_line,
    read_records,
    to_line,
)
from paceline.records.report import headline, summarize
from paceline.records.sinks import JsonlSink
from paceline.records.summary import open_run, split_attempts
from paceline.records.thin import TAIL, lengths_of, lines_kept, percentile, thin_lines
from paceline.run.records import append_event, end_records, mark_records
from paceline.view.runs import ShownRun

KEPT = 64


def made(first: int, last: int, *, rank: int = 0, time: float = 0.0) -> list[Record]:
    """Returns steps that differ in all that is added up."""
    return [
        replace(
            STEP,
            step=step,
            position=64 * step,
            loss=1 / step + rank,
            loss_sum=32 * (1 / step + rank),
            samples=32 - step % 3,
            step_s=0.1 + 0.01 * (step % 7) + (3.0 if step == 333 else 0.0),
            comm_s=0.01 * (step % 5),
            grad_norm=math.inf if step == 50 else 2.0,
            time=RUN.time + time + 0.2 * step,
        )
        for step in range(first, last + 1)
    ]


def thinned(records: Sequence[Record], most: int = KEPT) -> list[Record]:
    data = thin_lines("".join(map(to_line, records)).encode(), most)
    assert data is not None
    return [parse_line(line) for line in data.splitlines()]


def steps_in(records: Sequence[Record]) -> list[StepRecord]:
    return [each for each in records if isinstance(each, StepRecord)]


def test_old_steps_are_added_up_and_sums_stay() -> None:
    before = [RUN, *made(1, 1000), END]
    after = thinned(before)
    steps = steps_in(after)
    assert len(steps) <= 2 * KEPT
    assert steps[:3] == before[1:4]  # the first as they were, and the last
    assert steps[-TAIL:] == before[-1 - TAIL : -1]
    assert [each.step for each in steps] == sorted(each.step for each in steps)
    assert sum(each.steps for each in steps) == 1000
    spans = [each for each in steps if isinstance(each, SpanRecord)]
    assert {each.steps for each in spans[1:-1]} == {16}
    assert all(each.step % 16 == 0 for each in spans[:-1])
    for name in ("samples", "count", "loss_sum"):
        assert sum(getattr(each, name) for each in steps) == pytest.approx(sum(getattr(e, name) for e in before[1:-1]))
    assert sum(each.step_s * each.steps for each in steps) == pytest.approx(
        sum(each.step_s for each in steps_in(before)), rel=1e-12
    )
    assert max(each.slowest_s for each in spans) == max(each.step_s for each in steps_in(before))
    assert sum(each.num_skipped for each in steps) == 1
    assert all(each.least_loss < each.loss < each.most_loss for each in spans)  # type: ignore[operator]
    again = thinned(after)  # nothing more to add up
    assert steps_in(again) == steps


def test_percentiles_of_all_steps_are_kept_to_a_few_percent() -> None:
    before = steps_in(made(1, 3000))
    lengths = lengths_of(steps_in(thinned([RUN, *before])))
    ordered = sorted(each.step_s for each in before)
    for share in (0.5, 0.9, 0.99, 1.0):
        assert percentile(lengths, share) == pytest.approx(ordered[math.ceil(share * 3000) - 1], rel=0.03)
    assert percentile({}, 0.5) == 0.0


def test_no_line_reaches_over_a_step_that_the_run_went_back_to() -> None:
    second = replace(RUN, time=RUN.time + 1000)
    before = [RUN, *made(1, 437), *made(431, 500), second, *made(461, 900, time=1000.0)]
    after = thinned(before)
    old, new = (find_goodput(split_attempts(each)) for each in (before, after))
    assert new.repeated_steps == old.repeated_steps == 7 + 40
    assert new.useful_s == pytest.approx(old.useful_s)
    assert new.repeated_s == pytest.approx(old.repeated_s)


def test_a_run_that_goes_back_into_a_line_keeps_the_part_before(tmp_path: Path) -> None:
    path = tmp_path / "records" / "rank-0.jsonl"
    with contextlib.closing(JsonlSink(path, most=KEPT, flush_every_s=0.0)) as sink:
        sink.write(RUN)
        for step in [*made(1, 700), *made(431, 500)]:  # 431 to 480 are in lines of 8 by then
            sink.write(step)
    found = find_goodput(split_attempts(list(read_records(path))))
    assert (found.repeated_steps, found.skipped_steps) == (270, 1)
    assert found.useful_s == pytest.approx(sum(each.step_s for each in steps_in(made(1, 500))), rel=0.01)


def test_events_stay_and_communication_is_added_up() -> None:
    comm = CommRecord(step=1, kind="all_reduce", group="world", ranks=2, calls=3, bytes=10, seconds=0.5, time=1.0)
    event = EventRecord(name="checkpoint", step=5, detail={"path": "x"}, time=2.0)
    every = [[step, replace(comm, step=step.step), replace(event, step=step.step)] for step in steps_in(made(1, 600))]
    after = thinned([RUN, *chain.from_iterable(every), END])
    sent = [each for each in after if isinstance(each, CommRecord)]
    assert (sum(each.calls for each in sent), sum(each.bytes for each in sent)) == (1800, 6000)
    assert len(sent) < 100
    saved = [each.step for each in after if isinstance(each, EventRecord) and each.name == "checkpoint"]
    assert saved == list(range(1, 601))


def test_samples_of_a_host_are_averaged() -> None:
    before = [HostRecord(host="a", values={"x": float(n)}, time=float(n)) for n in range(1, 1001)]
    after = [each for each in thinned(list(before)) if isinstance(each, HostRecord)]
    assert len(after) <= 2 * KEPT
    assert sum(each.samples for each in after) == 1000
    assert sum(each.samples * each.values["x"] for each in after) == pytest.approx(1000 * 1001 / 2)
    assert after[-TAIL:] == before[-TAIL:]


def test_a_line_that_cannot_be_read_stays_for_whoever_tells_of_it(tmp_path: Path) -> None:
    path = write_records(tmp_path, 0, RUN, *made(1, 300))
    lines = path.read_bytes().splitlines(keepends=True)
    lines[100] = b'{"type":"step","schema":1,"step":"x"}\n'
    data = thin_lines(b"".join(lines), KEPT)
    assert data is not None
    assert lines[100] in data


def test_whoever_follows_a_file_gets_every_step_once(tmp_path: Path) -> None:
    path = tmp_path / "records" / "rank-0.jsonl"
    with contextlib.closing(JsonlSink(path, most=KEPT, flush_every_s=0.0)) as sink:
        sink.write(RUN)
        quick, slow, page = GrowingFile(path), GrowingFile(path), ShownRun(tmp_path)
        list(slow.lines())
        seen: list[int] = []
        for number, step in enumerate(made(1, 1500)):
            sink.write(step)
            if number % 7 == 0:
                seen += [each.step for each in steps_in([parse_line(line) for line in quick.lines()])]
            if number % 100 == 0:
                while page.look():
                    pass
        sink.write(END)
        seen += [each.step for each in steps_in([parse_line(line) for line in quick.lines()])]
        while page.look():
            pass
    assert seen == list(range(1, 1501))
    late = [parse_line(line) for line in slow.lines()]  # was behind for more than what stays as it is
    assert steps_in(late)[-1].step == 1500
    assert not any(isinstance(each, SpanRecord) for each in late)  # a tracker gets no step twice
    kept = steps_in(list(read_records(path)))
    assert len(kept) <= 2 * KEPT
    assert page.columns.steps.tolist() == [each.step for each in kept]
    assert page.state().status == "done"
    assert path.stat().st_size < 200_000
    assert not list(tmp_path.rglob("*.partial"))


def test_an_event_that_another_process_adds_is_not_lost(tmp_path: Path) -> None:
    path = tmp_path / "records" / "rank-0.jsonl"
    with contextlib.closing(JsonlSink(path, most=KEPT, flush_every_s=0.0)) as sink:
        sink.write(RUN)
        for number, step in enumerate(made(1, 400)):
            sink.write(step)
            if number % 40 == 0:
                assert append_event(tmp_path, 0, "straggler", {"sentence": str(number)})
    end_records(tmp_path, mark_records(tmp_path / "none", [0]), "failed", "killed")
    records = list(read_records(path))
    told = [each.detail["sentence"] for each in records if isinstance(each, EventRecord) and each.name == "straggler"]
    assert told == [str(number) for number in range(0, 400, 40)]
    assert records[-1].step == 400  # type: ignore[union-attr]


def test_a_report_of_added_up_records_says_the_same(tmp_path: Path) -> None:
    for folder, most in ((tmp_path / "whole", None), (tmp_path / "thin", KEPT)):
        for rank in (0, 1):
            path = folder / "records" / f"rank-{rank}.jsonl"
            with contextlib.closing(JsonlSink(path, most=most, flush_every_s=0.0)) as sink:
                sink.write(replace(RUN, rank=rank), *made(1, 900, rank=rank), replace(END, step=900))
                sink.write(*made(901, 901, rank=rank))
    whole, thin = (summarize(tmp_path / name) for name in ("whole", "thin"))
    assert (thin.steps, thin.final_loss, thin.status) == (whole.steps, whole.final_loss, whole.status)
    assert thin.samples_per_s == pytest.approx(whole.samples_per_s, rel=0.02)
    assert thin.comm_share == pytest.approx(whole.comm_share, rel=1e-9)
    for mine, other in zip(thin.ranks, whole.ranks, strict=True):
        assert (mine.steps, mine.samples, mine.memory_bytes) == (other.steps, other.samples, other.memory_bytes)
        assert mine.loss == pytest.approx(other.loss, rel=1e-12)
        assert mine.total_s == pytest.approx(other.total_s, rel=1e-12)
    assert len(open_run(tmp_path / "thin").steps.rows) <= 2 * KEPT
    (told,) = [note for name, _, note in headline(thin) if name == "steps"]
    assert re.fullmatch(r"older ones in lines of up to 16 each; one took p50 1\d\d.\d ms, p90 .*, p100 3.\d* s", told)
    assert not any(note for name, _, note in headline(whole) if name == "steps")


def test_how_many_lines_are_kept() -> None:
    assert [lines_kept("auto", ranks) for ranks in (1, 32, 64, 512, 4096)] == [4096, 1024, 512, 64, 64]
    assert [lines_kept("all", 512), lines_kept(1000, 512), lines_kept("auto", "auto")] == [None, 1000, 4096]
