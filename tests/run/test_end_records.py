"""The end of an attempt, written for ranks that could not write it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import made_records as records
import pytest
from made_records import write_records

from paceline.records.records import EndRecord, EventRecord, Record, read_records
from paceline.run.records import end_records, mark_records, open_attempts

RUN = replace(records.RUN, time=100.0)
STEP = replace(records.STEP, step=4, time=101.0)
END = replace(records.END, step=4, seconds=1.0, time=102.0)
FIRST = {0: (0, 0), 1: (0, 0)}  # there was no file
RESUME = EventRecord(name="resume", step=9, detail={}, time=103.0)


def last(path: Path) -> Record:
    return list(read_records(path))[-1]


def test_an_attempt_without_an_end_gets_one_with_the_step_it_came_to(tmp_path: Path) -> None:
    path = write_records(tmp_path, 0, RUN, STEP, replace(STEP, step=5))
    assert open_attempts(tmp_path, FIRST) == [0]
    end_records(tmp_path, FIRST, "failed", "rank 1 was killed")
    end = last(path)
    assert isinstance(end, EndRecord)
    assert (end.status, end.step, end.message) == ("failed", 5, "rank 1 was killed")
    assert end.seconds == pytest.approx(end.time - RUN.time)
    assert open_attempts(tmp_path, FIRST) == []


def test_an_end_that_is_there_stays_the_only_one(tmp_path: Path) -> None:
    path = write_records(tmp_path, 0, RUN, STEP, END)
    before = path.read_bytes()
    end_records(tmp_path, FIRST, "failed", "x")
    assert path.read_bytes() == before


def test_the_last_attempt_counts(tmp_path: Path) -> None:
    path = write_records(tmp_path, 0, RUN, STEP, END)
    marks = mark_records(tmp_path, [0])
    later = write_records(tmp_path / "later", 0, replace(RUN, time=3.0), RESUME)  # a clock that went back
    path.write_bytes(path.read_bytes() + later.read_bytes())
    end_records(tmp_path, marks, "stopped", "x")
    end = last(path)
    assert isinstance(end, EndRecord)
    assert (end.status, end.step) == ("stopped", 9)


def test_a_file_that_was_thinned_belongs_to_the_attempt(tmp_path: Path) -> None:
    path = write_records(tmp_path, 0, RUN, *[STEP] * 9)
    marks = mark_records(tmp_path, [0])
    path.replace(tmp_path / "old")
    write_records(tmp_path, 0, RUN, STEP)
    assert open_attempts(tmp_path, marks) == [0]


def test_an_attempt_of_another_time_is_left_alone(tmp_path: Path) -> None:
    """Rank 1 was killed in an attempt on two ranks; the next, on one, is none of its business."""
    path = write_records(tmp_path, 1, RUN, STEP)
    end_records(tmp_path, mark_records(tmp_path, [0, 1]), "failed", "x")
    assert last(path) == STEP


def test_a_half_written_line_does_not_grow_into_the_end(tmp_path: Path) -> None:
    path = write_records(tmp_path, 0, RUN, STEP)
    with path.open("a") as file:
        file.write('{"type":"step","sche')
    end_records(tmp_path, FIRST, "failed", "x")
    assert isinstance(last(path), EndRecord)


@pytest.mark.parametrize("content", [None, "", '{"type":"ru'])
def test_a_rank_that_never_began_has_no_end(tmp_path: Path, content: str | None) -> None:
    path = write_records(tmp_path, 0)
    path.unlink()
    if content is not None:
        path.write_text(content)
    end_records(tmp_path, FIRST, "failed", "x")
    assert (path.read_text() if path.exists() else None) == content
