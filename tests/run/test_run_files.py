"""The small print of logs, folders and locations: which line goes where, what is held, and what is said once."""

from __future__ import annotations

import io
import logging
import os
import sys
import threading
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import made_records
import pytest
from made_records import write_records

from paceline.config import Config, load_config
from paceline.errors import LaunchError
from paceline.run import folder as folders
from paceline.run import location as locations
from paceline.run import worker
from paceline.run.folder import check_folder, claim_folder, find_write_error, is_in_use, is_taken, name_of
from paceline.run.location import RunLocation, RunOptions, RunResult, claim_run, how_to_continue, read_result, runs_of
from paceline.run.logs import log, rank_logs, run_log, say, tell
from paceline.run.observe import _first_line, live_progress, sampling
from paceline.run.worker import RankRunner, StartTimes, make_hooks, process_age
from paceline.train.survive.recovery import StopRequest

# Logs


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "logs").mkdir()
    return tmp_path


def text_of(folder: Path, name: str) -> str:
    path = folder / "logs" / f"{name}.log"
    return path.read_text() if path.exists() else ""


def test_warnings_reach_the_terminal_where_nobody_else_shows_them(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with rank_logs(run, 1, "info", owns_output=False):
        assert root.level == logging.INFO
        logging.getLogger("own").info("a line")
        logging.getLogger("own").warning("a warning")
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn("by Python", stacklevel=1)
    shown = sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert "rank 1 WARNING own: a warning" in shown
    assert "by Python" in shown
    assert "a line" not in shown
    assert "rank 1 INFO own: a line" in text_of(run, "rank-1")
    assert ("a line" in text_of(run, "run"), "a warning" in text_of(run, "run")) == (False, True)
    assert (root.handlers, root.level) == ([], logging.getLogger().level)
    logging.getLogger("own").warning("afterwards")
    assert "afterwards" not in text_of(run, "rank-1")
    own = logging.StreamHandler(io.StringIO())
    monkeypatch.setattr(root, "handlers", [own])  # the user's code shows them
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with rank_logs(run, 1, "warning", owns_output=False):
        logging.getLogger("own").warning("once")
        logging.getLogger("own").info("not asked for")
    assert sys.stderr.getvalue() == ""  # type: ignore[attr-defined]
    assert own.stream.getvalue() == "once\n"
    assert "not asked for" not in text_of(run, "rank-1")


def test_rank_0_tells_the_log_of_the_run_more_than_others(run: Path) -> None:
    for rank in (0, 1):
        with rank_logs(run, rank, "debug", owns_output=True):
            logging.getLogger("own").info("of rank %d", rank)
            logging.getLogger("own").debug("in detail")
    assert [line.split(" ", 2)[2] for line in text_of(run, "run").splitlines()] == ["rank 0 INFO own: of rank 0"]


def test_a_thread_without_a_name_is_one_too(run: Path) -> None:
    with rank_logs(run, 0, "info", owns_output=True):
        error = ValueError("bad")
        threading.excepthook(threading.ExceptHookArgs((ValueError, error, None, None)))
        logging.captureWarnings(True)
    assert "rank 0 ERROR paceline: uncaught exception in a thread\nValueError: bad" in text_of(run, "run")


def test_the_log_of_a_run_is_closed_after_it(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("paceline")
    before = list(logger.handlers)
    with run_log(run, who="launcher b"):
        log(logging.INFO, "hello")
        tell(logging.INFO, "a line")
        tell(logging.WARNING, "a warning")
        say("something")
        (handler,) = [each for each in logger.handlers if each not in before]
    assert logger.handlers == before
    assert handler.stream is None  # type: ignore[attr-defined]
    assert capsys.readouterr().err == "paceline: a warning\npaceline: something\n"
    lines = [line.split(" ", 2)[2] for line in text_of(run, "run").splitlines()]
    assert lines == [
        f"launcher b INFO paceline: the run in {run} is started by process {os.getpid()}",
        "launcher b INFO paceline: hello",
        "launcher b INFO paceline: a line",
        "launcher b WARNING paceline: a warning",
        "launcher b INFO paceline: something",
        "launcher b INFO paceline: the run is done",
    ]
    with pytest.raises(KeyError), run_log(run):
        raise KeyError
    assert text_of(run, "run").endswith("launcher ERROR paceline: the run has ended: KeyError\n")


# Folders


def test_a_folder_is_taken_by_anything_in_it(tmp_path: Path) -> None:
    assert not is_taken(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    assert [is_taken(tmp_path / name) for name in ("", "file", "dangling", "none")] == [True, True, True, False]


def test_a_folder_says_who_uses_it(tmp_path: Path) -> None:
    path = tmp_path / "run"
    assert not is_in_use(path)
    with claim_folder(path, "name: run\n", "plan", name="asked") as claimed:
        assert is_in_use(path)
        assert (path / ".lock").read_text() == f"{os.getpid()} on {os.uname().nodename}\n"
        assert (name_of(path), name_of(tmp_path / "other")) == ("asked", "other")
        with pytest.raises(folders.RunFolderError, match=f"a run is going on in {path}: process {os.getpid()} on "):
            claim_folder(path, "name: run\n", resume=True)
        assert claimed.is_new
    assert not is_in_use(path)
    assert sorted(each.name for each in path.iterdir()) == [
        ".lock",
        ".name",
        "checkpoints",
        "config.yaml",
        "logs",
        "plan.json",
        "records",
    ]
    with claim_folder(path, "name: run\n", resume=True) as claimed:
        assert not claimed.is_new
        claimed.write_prediction("later")
        assert (path / ".prediction.json").read_text() == "later"
        assert not (path / ".plan.json").exists()
    folders.adopt_config(path)
    assert (path / "prediction.json").read_text() == "later"
    folders.adopt_config(path)


def test_a_folder_that_was_replaced_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with claim_folder(path, "name: run\n") as claimed:
        assert not claimed.is_gone()
        (path / ".lock").unlink()
        assert claimed.is_gone()
    with claim_folder(tmp_path / "two", "name: run\n") as claimed:
        claimed.path.rename(tmp_path / "moved")
        assert claimed.is_gone()
        claimed.path.mkdir()
        assert claimed.is_gone()


def test_partial_folders_go_when_they_are_old_and_their_process_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("psutil.pid_exists", lambda pid: pid == 7)
    made = {".run.8": 61, ".run.9.old": 61, ".run.10": 60, ".run.7": 99, ".run.x": 99, ".other.8": 99}
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    for name, age in made.items():
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (1000.0 - age, 1000.0 - age))
    folders._remove_leftovers(tmp_path / "run")
    assert sorted(each.name for each in tmp_path.iterdir()) == [".other.8", ".run.10", ".run.7", ".run.x"]


def test_a_place_that_cannot_be_written_is_found_beforehand(tmp_path: Path) -> None:
    assert find_write_error(tmp_path / "a" / "b") is None
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    assert find_write_error(tmp_path / "file" / "b") is not None
    with pytest.raises(folders.RunFolderError, match=f"{tmp_path / 'file'} is a file"):
        check_folder(tmp_path / "file" / "b")


# Locations


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.chdir(tmp_path)
    return load_config(None, ["model.kind=mlp", "data.kind=digits", "name=mine"])


def test_the_newest_checkpoint_has_several_names(config: Config) -> None:
    del config
    assert [RunOptions(resume=name).resume for name in ("last", "latest", "auto", "best", None)] == [
        *["auto"] * 3,
        "best",
        None,
    ]
    Path("last").mkdir()
    assert [RunOptions(resume=name).resume for name in ("last", "latest")] == ["last", "auto"]


def test_runs_of_a_name_are_found_newest_first(config: Config) -> None:
    for number, name in enumerate(("mine", "mine-2", "mine-x", "mine-3", "other-2", "mine-4")):
        path = Path("runs") / name
        path.mkdir(parents=True)
        if name != "mine-4":
            (path / "config.yaml").touch()
            os.utime(path / "config.yaml", (number, number))
        if name in ("mine-2", "mine-4"):
            (path / ".name").write_text("mine")
    assert [path.name for path in runs_of(config)] == ["mine-2", "mine"]  # mine-3 is somebody's own name
    (Path("runs/mine-3") / ".name").write_text("mine")
    assert [path.name for path in runs_of(config)] == ["mine-3", "mine-2", "mine"]


def test_a_numbered_run_keeps_its_checkpoints_apart(config: Config) -> None:
    place = RunLocation(folder=Path("runs/mine-2"))
    assert place.named_config(config).name == "mine-2"
    assert place.named_config(config.with_values("checkpoint", folder="ck/")).checkpoint.folder == "ck/mine-2"
    assert RunLocation(folder=Path("runs/mine")).named_config(config) is config


def test_something_that_every_rank_finds_is_said_once(
    config: Config, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    claim_run(RunLocation(folder=Path("runs/mine")), config)[0].__exit__()
    for rank, is_said in (("1", False), ("0", True)):
        monkeypatch.setenv("RANK", rank)
        place = locations.locate_run(config, force=False, resume=None)
        assert (place.folder, place.takes_number) == (Path("runs/mine-2"), True)
        assert (capsys.readouterr().err != "") is is_said
    with pytest.raises(folders.RunFolderError, match="exists already"):
        locations.locate_run(config, force=False, resume=None, may_number=False)
    assert not locations.locate_run(config, force=True, resume=None).takes_number


def test_how_to_go_on_is_told_where_there_is_a_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "my run"
    assert how_to_continue(folder) == ""
    (folder / "step-00000012").mkdir(parents=True)
    (folder / "step-00000012" / "manifest.json").touch()
    found = how_to_continue(folder)
    assert found in ("", f"to go on from step 12:  paceline train '{folder}/config.yaml' --resume auto")


def test_a_result_is_that_of_the_last_attempt(tmp_path: Path, config: Config) -> None:
    run, step, end = made_records.RUN, made_records.STEP, made_records.END
    write_records(tmp_path, 0, run, step, replace(end, step=1))
    found = read_result(tmp_path, config)
    assert (found.last_step, found.has_trained, found.folder) == (1, True, tmp_path)
    write_records(tmp_path, 0, run, step, replace(end, step=1), replace(run, time=run.time + 9), replace(end, step=5))
    found = read_result(tmp_path, config)
    assert (found.last_step, found.has_trained) == (5, False)
    assert found.facts()["folder"] == tmp_path
    assert len(found.charts()) == 1
    write_records(tmp_path, 0, run, step, replace(end, status="failed", step=1))
    with pytest.raises(LaunchError, match="the ranks left before the run was done: it is failed, at step 1\n"):
        read_result(tmp_path, config)
    gone: Any = RunResult(folder=tmp_path / "gone", config=config, summary=found.summary, last_step=1)
    assert gone.charts() == []


# Beside and inside a rank


def test_samples_of_a_host_are_written_once_more_at_the_end(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, str]] = []
    with sampling(run, None, dict, lambda *line: told.append(line)):
        pass
    assert not (run / "records").exists()
    (run / "records").mkdir()
    monkeypatch.setattr("socket.gethostname", lambda: "a host/7")
    with sampling(run, 60.0, dict, lambda *line: told.append(line)):
        assert list((run / "records").iterdir()) == []
    assert [path.name for path in (run / "records").iterdir()] == ["host-a_host_7.jsonl"]
    assert len((run / "records" / "host-a_host_7.jsonl").read_text().splitlines()) == 1
    told.clear()
    monkeypatch.setattr("paceline.run.observe.JsonlSink", lambda *_, **__: (_ for _ in ()).throw(OSError("full")))
    with sampling(run, 60.0, dict, lambda *line: told.append(line)):
        pass
    assert told[-1] == (logging.WARNING, "this host is not sampled any more: OSError: full")


def test_errors_of_trackers_are_one_line() -> None:
    assert _first_line(LaunchError("one\ntwo")) == "one"
    assert _first_line(ValueError("one\ntwo")) == "ValueError: one"
    assert _first_line(LaunchError("")) == "LaunchError"
    assert _first_line(ValueError()) == "ValueError"


def test_progress_that_is_not_shown_reads_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_records(tmp_path, 0, replace(made_records.RUN, time=4e9), replace(made_records.END, time=4e9))
    with live_progress(tmp_path, is_shown=False):
        pass
    assert capsys.readouterr().out == ""


def test_laps_are_what_passed_since_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    times = StartTimes(7.0)
    for part, at in (("processes", 10.0), ("joining", 10.5), ("step", 12.0)):
        now[0] = at
        times.lap(part)
    assert times.parts == {"processes": 3.0, "joining": 0.5, "step": 1.5}


def test_the_age_of_a_process_is_counted_from_the_start_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = os.sysconf("SC_CLK_TCK")
    stat = tmp_path / "stat"
    stat.write_text(f"7 (a (b) c) S {' '.join('0' for _ in range(18))} {50 * ticks} 0\n")
    monkeypatch.setattr(worker, "Path", lambda _: stat)
    monkeypatch.setattr("time.clock_gettime", lambda _: 80.0)
    assert process_age(7) == 30.0
    monkeypatch.setattr("time.clock_gettime", lambda _: 49.0)
    assert process_age(7) == 0.0


@pytest.mark.parametrize(("level", "every", "kinds"), [("info", 5, 2), ("error", 5, 1)])
def test_records_go_to_a_file_to_the_log_and_to_the_screen(
    run: Path, config: Config, level: str, every: int, kinds: int
) -> None:
    (run / "records").mkdir(exist_ok=True)
    logger = logging.getLogger("paceline")
    before = logger.level
    logger.setLevel(level.upper())
    try:
        asked = config.with_values("monitor", log_every=every)
        sinks = RankRunner(run, 0)._open_sinks(asked, 2)
        assert len(sinks._sinks) == kinds  # type: ignore[attr-defined]
        sinks.close()
        seen: Any = type("View", (), {"write": print, "flush": print, "close": lambda _: None})()
        shown = RankRunner(run, 0, view=seen)._open_sinks(asked, 2)
        assert shown._sinks[-1] is seen  # type: ignore[attr-defined]
        shown.close()
    finally:
        logger.setLevel(before)


def test_a_step_is_evaluated_saved_and_agreed_on_in_this_order(run: Path, config: Config) -> None:
    asked = config.with_values("train", eval_every=7).with_values("parallel", ranks=4, strategy="zero1")
    every, saver, consensus = make_hooks(asked, run, StopRequest())
    assert [type(each).__name__ for each in (every, saver, consensus)] == ["Every", "Saver", "ConsensusHook"]
    assert folders.checkpoint_folder(asked, run) == run / "checkpoints"
    assert folders.checkpoint_folder(asked.with_values("checkpoint", folder="ck"), run) == Path("ck")
