"""The logs of ranks and of a run: lines with time, rank, level and message, of everything that speaks."""

from __future__ import annotations

import io
import logging
import re
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from made_records import END, RUN, STEP

from paceline.records.records import CommRecord, EvalRecord, EventRecord
from paceline.records.sinks import LogSink
from paceline.run.logs import append_line, log, rank_logs, run_log, say

LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} (?P<rest>.*)")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "logs").mkdir()
    root = logging.getLogger()
    before = root.handlers[:], root.level, sys.excepthook, threading.excepthook
    yield tmp_path
    assert (root.handlers, root.level, sys.excepthook, threading.excepthook) == before


def lines(folder: Path, name: str) -> list[str]:
    """Returns the lines of a log without their times."""
    found = [LINE.fullmatch(line) for line in (folder / "logs" / f"{name}.log").read_text().splitlines()]
    return [each["rest"] for each in found if each is not None]


@pytest.mark.filterwarnings("default::FutureWarning")
def test_a_rank_logs_what_its_code_says(folder: Path) -> None:
    with rank_logs(folder, 1, "info", owns_output=False):
        logging.getLogger("user.code").info("read %d files", 3)
        logging.getLogger("user.code").debug("not asked for")
        logging.getLogger("user.code").error("it is late")
        warnings.warn("old name", FutureWarning, stacklevel=1)
    first, second, third, *_ = lines(folder, "rank-1")
    assert (first, second) == ("rank 1 INFO user.code: read 3 files", "rank 1 ERROR user.code: it is late")
    assert third.startswith("rank 1 WARNING py.warnings: ")
    assert third.endswith("FutureWarning: old name")
    assert [line.split()[2] for line in lines(folder, "run")] == ["ERROR", "WARNING"]  # of rank 1, no more than these


def test_rank_0_has_all_its_lines_in_the_log_of_the_run(folder: Path) -> None:
    with rank_logs(folder, 0, "debug", owns_output=False):
        logging.getLogger("user.code").info("hello")
        logging.getLogger("user.code").debug("in its own")
    assert lines(folder, "run") == ["rank 0 INFO user.code: hello"]
    assert lines(folder, "rank-0")[1] == "rank 0 DEBUG user.code: in its own"


def test_uncaught_exceptions_are_logged_with_their_lines(folder: Path) -> None:
    def fail() -> None:
        raise ValueError("in a thread")

    with rank_logs(folder, 0, "info", owns_output=False):
        thread = threading.Thread(target=fail, name="loader")
        thread.start()
        thread.join()
        sys.excepthook(KeyError, KeyError("x"), None)
    text = (folder / "logs" / "rank-0.log").read_text()
    assert "rank 0 ERROR paceline: uncaught exception in thread loader\nTraceback" in text
    assert "ValueError: in a thread" in text
    assert "rank 0 CRITICAL paceline: uncaught exception\nKeyError: 'x'" in text


def test_output_that_is_the_log_gets_the_lines(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = io.StringIO()
    monkeypatch.setattr(sys, "stderr", output)
    with rank_logs(folder, 2, "info", owns_output=True):
        logging.getLogger("user.code").info("hello")
    assert output.getvalue().endswith(" rank 2 INFO user.code: hello\n")
    assert not (folder / "logs" / "rank-2.log").exists()


def test_virtual_ranks_are_told_apart(folder: Path) -> None:
    with rank_logs(folder, 0, "info", owns_output=False):
        thread = threading.Thread(target=lambda: logging.getLogger("net").info("built"), name="rank-3")
        thread.start()
        thread.join()
    assert lines(folder, "rank-0") == ["rank 3 INFO net: built"]


def test_the_log_of_a_run_has_what_its_launcher_says(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with run_log(folder):
        logging.disable(logging.CRITICAL)  # as while torch's agent runs
        try:
            say("rank 1 was killed; restarting")
        finally:
            logging.disable(logging.NOTSET)
    assert "launcher INFO paceline: rank 1 was killed; restarting" in lines(folder, "run")
    assert capsys.readouterr().err == "paceline: rank 1 was killed; restarting\n"
    assert lines(folder, "run")[-1] == "launcher INFO paceline: the run is done"


def test_the_log_of_a_run_has_why_it_ended(folder: Path) -> None:
    with pytest.raises(RuntimeError), run_log(folder):
        raise RuntimeError("rank 1 failed")
    assert lines(folder, "run")[-1] == "launcher ERROR paceline: the run has ended: rank 1 failed"


def test_the_terminal_shows_the_log_where_asked(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "logs" / "run.log").write_text("of an attempt before\n")
    with run_log(folder, is_shown=True):
        append_line(folder / "logs" / "run.log", "rank 0", logging.INFO, "a \x1b[31mred\x1b[0m line")
        deadline, seen = time.monotonic() + 60, ""
        while "red" not in seen and time.monotonic() < deadline:  # while the run goes on
            time.sleep(0.01)
            seen += capsys.readouterr().err
    shown = seen + capsys.readouterr().err
    assert "rank 0 INFO paceline: a \\x1b[31mred\\x1b[0m line\n" in shown
    assert "attempt before" not in shown
    assert shown.endswith("the run is done\n")


def test_a_log_that_cannot_be_written_stops_nobody(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    with run_log(gone), rank_logs(gone, 0, "info", owns_output=False):
        log(logging.WARNING, "nobody reads this")
        append_line(gone / "logs" / "rank-0.log", "watch", logging.ERROR, "nor this")
    assert not (gone / "logs" / "rank-0.log").exists()


def test_records_are_lines_for_people(folder: Path) -> None:
    comm = CommRecord(step=1, kind="all_reduce", group="world", ranks=2, calls=1, bytes=8, seconds=0.1, time=1.0)
    own = {"top5": 0.875}
    evaluation = EvalRecord(step=2, loss=0.5, accuracy=0.75, samples=8, seconds=0.1, time=1.0, metrics=own)
    late = EventRecord(name="straggler", step=2, detail={"rank": 1, "note": "two\nlines"}, time=1.0)
    with rank_logs(folder, 0, "info", owns_output=False):
        LogSink(logging.getLogger("paceline")).write(RUN, replace(STEP, loss=None), STEP, comm, evaluation, late, END)
    assert [line.removeprefix("rank 0 ") for line in lines(folder, "rank-0")] == [
        "INFO paceline: rank 0 of 2 begins on node-1 (cuda:0): ddp, nccl, 1.2M parameters, 100 steps",
        "INFO paceline: step 1: no samples, lr 0.0003, 100.0 ms, 320 samples/s",
        "INFO paceline: step 1: loss 0.2500 of this rank's 32 of 64 samples, lr 0.0003, 100.0 ms, 320 samples/s",
        "INFO paceline: evaluation after step 2: loss 0.5000, accuracy 0.7500, top5 0.8750",
        "WARNING paceline: straggler at step 2: two lines",
        "INFO paceline: done after step 100 and 41.2 s",
    ]
