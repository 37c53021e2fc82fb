"""Sinks keep every record, in order, once."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from paceline.records.records import (
    EndRecord,
    EvalRecord,
    EventRecord,
    Record,
    RunRecord,
    StepRecord,
    read_records,
    to_line,
)
from paceline.records.sinks import Fanout, JsonlSink, Sink, Strided, TensorBoardSink


class _Clock:
    """Time that passes when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class _ListSink:
    """Keeps what it is told, and may refuse to close."""

    def __init__(self, *, error: Exception | None = None) -> None:
        self.records: list[Record] = []
        self.calls: list[str] = []
        self._error = error

    def write(self, *records: Record) -> None:
        self.records += records

    def flush(self) -> None:
        self.calls.append("flush")

    def close(self) -> None:
        self.calls.append("close")
        if self._error is not None:
            raise self._error


def test_steps_reach_the_file_once_a_second(tmp_path: Path, step_record: StepRecord) -> None:
    path, clock = tmp_path / "records" / "rank-0.jsonl", _Clock()
    sink = JsonlSink(path, clock=clock)
    records = [replace(step_record, step=step) for step in range(1, 5)]
    sink.write(records[0])
    clock.now += 0.9
    sink.write(records[1])
    assert list(read_records(path)) == []
    clock.now += 0.1
    sink.write(records[2])
    assert list(read_records(path)) == records[:3]
    clock.now += 0.9
    sink.write(records[3])
    assert list(read_records(path)) == records[:3]
    sink.flush()
    assert list(read_records(path)) == records
    sink.close()


def test_all_but_steps_are_written_through_with_the_steps_before_them(
    tmp_path: Path,
    run_record: RunRecord,
    step_record: StepRecord,
    eval_record: EvalRecord,
    event_record: EventRecord,
    end_record: EndRecord,
) -> None:
    path = tmp_path / "rank-0.jsonl"
    sink = JsonlSink(path, clock=_Clock())
    written: list[Record] = []
    for record in (run_record, event_record, eval_record, end_record):
        sink.write(step_record)
        sink.write(record)
        written += [step_record, record]
        assert list(read_records(path)) == written
    sink.close()


def test_many_records_at_once_are_kept_or_written_through_together(
    tmp_path: Path, step_record: StepRecord, event_record: EventRecord
) -> None:
    path, clock = tmp_path / "rank-0.jsonl", _Clock()
    sink = JsonlSink(path, clock=clock)
    steps = [replace(step_record, step=step) for step in range(1, 7)]
    sink.write(*steps[:2])
    assert list(read_records(path)) == []
    sink.write(steps[2], event_record, steps[3])
    assert list(read_records(path)) == [*steps[:3], event_record, steps[3]]
    clock.now += 1.0
    sink.write(*steps[4:])
    assert list(read_records(path)) == [*steps[:3], event_record, *steps[3:]]
    sink.close()


def test_strided_passes_on_every_nth_step_at_times_apart_and_all_other_records(
    step_record: StepRecord, event_record: EventRecord
) -> None:
    steps = [replace(step_record, step=step, time=100.0 + 0.1 * step) for step in range(1, 11)]
    at_once, one_by_one = _ListSink(), _ListSink()
    Strided(at_once, 2, least_s=0.3).write(*steps[:5], event_record, *steps[5:])
    strided = Strided(one_by_one, 2, least_s=0.3)
    for record in (*steps[:5], event_record, *steps[5:]):
        strided.write(record)
    assert at_once.records == one_by_one.records == [steps[0], steps[3], event_record, steps[7]]
    strided.close()
    assert one_by_one.records[-1] == steps[9]  # the last one too


def test_closing_writes_the_rest_and_may_be_repeated(tmp_path: Path, step_record: StepRecord) -> None:
    path = tmp_path / "rank-0.jsonl"
    sink = JsonlSink(path, clock=_Clock())
    sink.write(step_record)
    sink.close()
    sink.close()
    assert list(read_records(path)) == [step_record]
    with pytest.raises(ValueError, match=r"rank-0\.jsonl is closed"):
        sink.write(step_record)


@pytest.mark.parametrize("cut", [1, 100, 10_000])
def test_a_resumed_run_appends_behind_the_last_whole_record(
    tmp_path: Path, event_record: EventRecord, step_record: StepRecord, cut: int
) -> None:
    path = tmp_path / "rank-0.jsonl"
    long_event = replace(event_record, detail={"text": "x" * 20_000})
    path.write_text(to_line(event_record) + to_line(long_event)[:-cut])
    sink = JsonlSink(path)
    sink.write(step_record)
    sink.close()
    assert list(read_records(path)) == [event_record, step_record]


def test_a_file_with_only_half_a_line_starts_anew(tmp_path: Path, step_record: StepRecord) -> None:
    path = tmp_path / "rank-0.jsonl"
    path.write_text('{"type":"ru')
    sink = JsonlSink(path)
    sink.write(step_record)
    sink.close()
    assert path.read_text() == to_line(step_record)


def test_several_threads_write_whole_lines(tmp_path: Path, step_record: StepRecord) -> None:
    path = tmp_path / "rank-0.jsonl"
    sink = JsonlSink(path, flush_every_s=0.0)

    def write(worker: int) -> None:
        for step in range(200):
            sink.write(replace(step_record, step=step, count=worker))

    threads = [Thread(target=write, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sink.close()
    found = [(record.count, record.step) for record in read_records(path) if isinstance(record, StepRecord)]
    assert sorted(found) == [(worker, step) for worker in range(4) for step in range(200)]
    assert [step for worker, step in found if worker == 0] == list(range(200))


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # threads of the test runner, if it has any
def test_a_forked_process_does_not_write_kept_records_again(tmp_path: Path, step_record: StepRecord) -> None:
    path = tmp_path / "rank-0.jsonl"
    sink = JsonlSink(path, clock=_Clock())
    sink.write(step_record)
    child = os.fork()
    if child == 0:
        del sink  # what a file object with a buffer of its own would take as a reason to write it
        os._exit(0)
    os.waitpid(child, 0)
    sink.close()
    assert list(read_records(path)) == [step_record]


def test_a_detail_that_is_not_json_is_refused_before_anything_is_written(
    tmp_path: Path, event_record: EventRecord
) -> None:
    path = tmp_path / "rank-0.jsonl"
    sink = JsonlSink(path)
    with pytest.raises(TypeError, match="JSON"):
        sink.write(replace(event_record, detail={"path": path}))
    sink.close()
    assert path.read_bytes() == b""


@pytest.mark.parametrize("failing", [0, 1])
def test_fanout_writes_to_each_and_closes_all(failing: int) -> None:
    first, second = (_ListSink(error=RuntimeError("full") if number == failing else None) for number in range(2))
    fanout: Sink = Fanout([first, second])
    end = EndRecord(status="done", step=1, seconds=1.0, message="", time=0.0)
    fanout.write(end)
    fanout.flush()
    with pytest.raises(RuntimeError, match="full"):
        fanout.close()
    assert first.records == second.records == [end]
    assert first.calls == second.calls == ["flush", "close"]


def _scalars(folder: Path) -> dict[str, list[tuple[int, float, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder), purge_orphaned_data=True)
    accumulator.Reload()
    return {
        tag: [(event.step, event.wall_time, event.value) for event in accumulator.Scalars(tag)]
        for tag in accumulator.Tags()["scalars"]
    }


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of TensorBoard's reader, which only tests use
def test_tensorboard_gets_the_scalars(tmp_path: Path, step_record: StepRecord, eval_record: EvalRecord) -> None:
    sink = TensorBoardSink(tmp_path / "tensorboard")
    bare = replace(step_record, step=2, loss=None, grad_norm=None, time=1_700_000_002.5)
    for record in (step_record, bare, eval_record, replace(eval_record, step=20, accuracy=None)):
        sink.write(record)
    sink.flush()
    sink.close()
    sink.close()
    scalars = _scalars(tmp_path / "tensorboard")
    assert scalars["train/loss"] == [(1, 1_700_000_001.5, 0.25)]
    assert [step for step, _, _ in scalars["train/lr"]] == [1, 2]
    assert [value for _, _, value in scalars["time/comm_s"]] == pytest.approx([0.025, 0.025])
    assert [step for step, _, _ in scalars["eval/accuracy"]] == [10]
    assert [value for _, _, value in scalars["eval/accuracy"]] == pytest.approx([0.972])
    assert [step for step, _, _ in scalars["eval/loss"]] == [10, 20]
    assert set(scalars) == {
        *("train/loss", "train/grad_norm", "train/lr", "train/epoch"),
        *("time/step_s", "time/data_s", "time/forward_s", "time/backward_s", "time/comm_s", "time/optimizer_s"),
        *("eval/loss", "eval/accuracy", "eval/seconds", "speed/samples_per_s", "memory/peak_bytes"),
    }


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_draws_one_curve_of_a_resumed_run(tmp_path: Path, step_record: StepRecord) -> None:
    for steps, lr in ((range(1, 6), 1.0), (range(4, 7), 2.0)):
        sink = TensorBoardSink(tmp_path)
        for step in steps:
            sink.write(replace(step_record, step=step, lr=lr))
        sink.close()
    found = [(step, value) for step, _, value in _scalars(tmp_path)["train/lr"]]
    assert found == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0), (5, 2.0), (6, 2.0)]


def test_lines_are_readable_by_any_strict_json_reader(tmp_path: Path, step_record: StepRecord) -> None:
    path = tmp_path / "rank-0.jsonl"
    sink = JsonlSink(path)
    sink.write(replace(step_record, loss=float("nan")))
    sink.close()
    payload: dict[str, Any] = json.loads(path.read_text())
    assert payload["loss"] == "nan"


class _SmallDisk:
    """A file on a disk that takes so many bytes more."""

    def __init__(self, file: Any, space: int) -> None:
        self.file, self.space = file, space

    def write(self, content: memoryview) -> int:
        taken = min(len(content), self.space)
        if not taken:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.space -= taken
        return int(self.file.write(content[:taken]))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


@pytest.mark.parametrize("waits", [False, True])
def test_a_full_disk_has_whole_lines(tmp_path: Path, event_record: EventRecord, waits: bool) -> None:
    path = tmp_path / "rank-0.jsonl"
    sink = JsonlSink(path, waits_for_space=waits)
    sink.write(event_record)
    disk = _SmallDisk(sink._file, 20)
    sink._file = disk  # type: ignore[assignment]
    if waits:
        sink.write(event_record)
    else:
        with pytest.raises(OSError, match="No space left"):
            sink.write(event_record)
    assert list(read_records(path)) == [event_record]
    disk.space = 10**6
    sink.write(event_record)
    assert list(read_records(path)) == [event_record] * (3 if waits else 2)
    sink.close()


def test_a_place_without_space_is_gone_on_without() -> None:
    full = _ListSink(error=OSError(errno.ENOSPC, "No space left on device"))
    Fanout([full], goes_on_when_full=True).close()
    with pytest.raises(OSError, match="denied"):
        Fanout([_ListSink(error=OSError(errno.EACCES, "denied"))], goes_on_when_full=True).close()
