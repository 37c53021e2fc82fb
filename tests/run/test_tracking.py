"""Trackers: fed from the files of records, by threads that cannot stop or slow a run."""

from __future__ import annotations

import importlib.util
import logging
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made_records import END, RUN, STEP

from paceline.config import Config, config_from_dict
from paceline.errors import ConfigError
from paceline.records.records import CommRecord, EventRecord, HostRecord, Record, StepRecord, to_line
from paceline.run import observe as module
from paceline.run.logs import run_log, tell
from paceline.run.observe import tracking

COMM = CommRecord(step=2, kind="all_reduce", group="world", ranks=2, calls=1, bytes=100, seconds=0.5, time=1.0)
HOST = HostRecord(host="n1", values={"system.cpu.utilization": 0.5}, time=RUN.time + 1)


def config_of(*trackers: str, tensorboard: bool = False) -> Config:
    return config_from_dict(
        {
            "model": {"kind": "mlp"},
            "data": {"kind": "digits"},
            "train": {"steps": 10},
            "monitor": {"trackers": list(trackers), "tensorboard": tensorboard, "log_every": 1},
        }
    )


def append(folder: Path, name: str, *records: Record) -> None:
    path = folder / "records" / f"{name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(map(to_line, records))


def steps(first: int, last: int) -> list[Record]:
    return [replace(STEP, step=number, loss=1 / number, time=RUN.time + number) for number in range(first, last + 1)]


class Notes(list[str]):
    def __call__(self, level: int, text: str) -> None:
        assert level == logging.WARNING
        self.append(text)


@contextmanager
def tracked(folder: Path, *trackers: str, tensorboard: bool = False) -> Iterator[Notes]:
    notes = Notes()
    with tracking(
        folder, (config := config_of(*trackers, tensorboard=tensorboard)).monitor, config.model_dump(mode="json"), notes
    ):
        yield notes


class Kept:
    """A sink of the user's own."""

    made: list[Kept] = []  # noqa: RUF012

    def __init__(self, run: Any) -> None:
        self.run = run
        self.records: list[Record] = []
        self.is_closed = False
        Kept.made.append(self)

    def write(self, *records: Record) -> None:
        self.records += records

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def own_sink(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Makes a module of the user's own, and returns the import path of its ``Sink``."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(body: str) -> str:
        name = f"own_sink_{abs(hash(body))}"
        (tmp_path / f"{name}.py").write_text(body)
        return f"{name}:Sink"

    return make


def test_a_sink_of_ones_own_gets_rank_0_and_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "open_tracker", lambda name, run: Kept(run) if name == "mine:Sink" else None)
    Kept.made.clear()
    append(tmp_path, "rank-0", RUN, *steps(1, 3))  # of an attempt that was tracked before
    with tracked(tmp_path, "mine:Sink") as notes:
        append(tmp_path, "rank-0", RUN, *steps(4, 5), COMM, END)
        append(tmp_path, "rank-1", RUN, *steps(4, 5))
        append(tmp_path, "host-n1", HOST)
    (sink,) = Kept.made
    assert sink.records == [RUN, *steps(4, 5), COMM, END, HOST]
    assert sink.is_closed
    assert notes == []


def test_a_sink_is_imported_by_its_path(tmp_path: Path, own_sink: Callable[[str], str]) -> None:
    body = """
class Sink:
    def __init__(self, run): self.path = run.folder / "seen.txt"
    def write(self, *records): self.add("".join(f"{type(each).__name__} " for each in records))
    def add(self, text): self.path.write_text((self.path.read_text() if self.path.exists() else "") + text)
    def flush(self): pass
    def close(self): self.add("closed")
"""
    with tracked(tmp_path, own_sink(body)) as notes:
        append(tmp_path, "rank-0", RUN, *steps(1, 1))
    assert notes == []
    assert (tmp_path / "seen.txt").read_text() == "RunRecord StepRecord closed"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("def Sink(run): raise OSError('no network')", "does not track this run: OSError: no network"),
        ("def Sink(run): return object()", "without write, flush, close"),
        ("Sink = 3", "cannot be called"),
        ("", "Sink"),
    ],
)
def test_a_tracker_that_cannot_be_opened_is_noted(
    tmp_path: Path, own_sink: Callable[[str], str], body: str, expected: str
) -> None:
    with tracked(tmp_path, own_sink(body)) as notes:
        append(tmp_path, "rank-0", RUN)
    assert len(notes) == 1
    assert expected in notes[0]


def test_what_a_tracker_warns_of_is_on_the_terminal_and_in_the_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "logs").mkdir()
    with run_log(tmp_path), tracking(tmp_path, config_of("nowhere:Sink").monitor, {}, tell):
        append(tmp_path, "rank-0", RUN)
    words = "nowhere:Sink does not track this run: monitor.trackers = 'nowhere:Sink': there is no module 'nowhere'"
    assert capsys.readouterr().err == f"paceline: {words}\n"
    assert words in (tmp_path / "logs" / "run.log").read_text()


def test_a_tracker_that_fails_is_noted_with_what_it_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(Kept):
        def write(self, *_: Record) -> None:
            raise ConnectionError("gone\nfor good")

    monkeypatch.setattr(module, "open_tracker", lambda _, run: Failing(run))
    monkeypatch.setattr(module, "_LOOK_S", 0.01)
    with tracked(tmp_path, "mine:Sink") as notes:
        append(tmp_path, "rank-0", RUN, *steps(1, 2))
    assert notes == [
        "mine:Sink fails: ConnectionError: gone",
        "mine:Sink did not get 3 records; they are in the run's folder",
    ]


def test_a_tracker_that_hangs_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()

    class Hanging(Kept):
        def write(self, *_: Record) -> None:
            release.wait(60)

    monkeypatch.setattr(module, "open_tracker", lambda _, run: Hanging(run))
    monkeypatch.setattr(module, "_END_S", 0.2)
    with tracked(tmp_path, "mine:Sink") as notes:
        append(tmp_path, "rank-0", RUN)
    release.set()
    assert len(notes) == 1
    assert "did not end within" in notes[0]


def test_a_run_that_was_refused_is_not_tracked(tmp_path: Path) -> None:
    with tracked(tmp_path, tensorboard=True) as notes:
        append(tmp_path, "host-n1", HOST)
    assert notes == []
    assert not (tmp_path / "tensorboard").exists()


def test_steps_are_thinned_out(tmp_path: Path) -> None:
    quick = [replace(STEP, step=number, time=RUN.time + number / 100) for number in range(1, 101)]
    append(tmp_path, "rank-0", replace(RUN, total_steps=20_000), *quick)
    source = module._Source(tmp_path / "records" / "rank-0.jsonl", every=10, offset=0)

    def read(*, is_last: bool = False) -> list[int]:
        return [record.step for record in source.read(is_last=is_last) if isinstance(record, StepRecord)]

    assert read() == [1, 60, 100]  # of the first 100 every 100th for the curve, and every 10th half a second later
    assert read() == []
    append(tmp_path, "rank-0", *[replace(STEP, step=number, time=RUN.time + 2) for number in range(110, 112)])
    assert read() == [110]
    assert read(is_last=True) == [111]


@pytest.mark.parametrize(("total", "least"), [(1, 1), (3, 3), (9, 9), (184, 184), (345, 173), (5000, 200)])
def test_trackers_get_a_curve_of_a_quick_run_with_its_first_and_last_step(
    tmp_path: Path, total: int, least: int
) -> None:
    quick = [replace(STEP, step=number, time=RUN.time + number / 1000) for number in range(1, total + 1)]
    append(tmp_path, "rank-0", replace(RUN, total_steps=total), *quick, END)
    source = module._Source(tmp_path / "records" / "rank-0.jsonl", every=10, offset=0)
    found = source.read(is_last=False)
    numbers = [record.step for record in found if isinstance(record, StepRecord)]
    assert (numbers[0], numbers[-1], found[-1]) == (1, total, END)
    assert len(numbers) >= least
    assert source.read(is_last=True) == []


def _tags(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(each.step, each.value) for each in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@pytest.mark.filterwarnings("ignore")
def test_tensorboard_has_all_ranks_and_hosts(tmp_path: Path) -> None:
    scalars = EventRecord(name="scalars", step=2, detail={"mine/value": 7.0}, time=RUN.time + 2)
    with tracked(tmp_path, tensorboard=True) as notes:
        append(tmp_path, "rank-0", RUN, *steps(1, 2), COMM, scalars)
        append(tmp_path, "rank-1", replace(RUN, rank=1), *steps(1, 2))
        append(tmp_path, "host-n1", HOST)
    assert notes == []
    first = _tags(tmp_path / "tensorboard")
    assert first["train/loss"] == [(1, 1.0), (2, 0.5)]
    assert first["comm/world/all_reduce/bus_bytes_per_s"] == [(2, 200.0)]
    assert first["mine/value"] == [(2, 7.0)]
    assert _tags(tmp_path / "tensorboard" / "rank-1")["train/loss"] == [(1, 1.0), (2, 0.5)]
    assert _tags(tmp_path / "tensorboard" / "host-n1")["host/system.cpu.utilization"] == [(2, 0.5)]


@pytest.mark.filterwarnings("ignore")
def test_tensorboard_drops_steps_that_are_made_again(tmp_path: Path) -> None:
    with tracked(tmp_path, tensorboard=True):
        append(tmp_path, "rank-0", RUN, *steps(1, 5), RUN, *[replace(each, loss=9.0) for each in steps(3, 4)])
    assert _tags(tmp_path / "tensorboard")["train/loss"] == [(1, 1.0), (2, 0.5), (3, 9.0), (4, 9.0)]


def test_an_unknown_tracker_is_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean wandb"):
        config_of("wandbb")


def _needs(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is not installed")


def _twice(folder: Path, tracker: str) -> None:
    """Tracks a run, and the run again after it was resumed."""
    with tracked(folder, tracker) as notes:
        append(folder, "rank-0", RUN, *steps(1, 3), COMM)
        append(folder, "host-n1", HOST)
    assert notes == [] or all("no login" in note for note in notes)
    with tracked(folder, tracker) as notes:
        append(folder, "rank-0", RUN, *steps(3, 4), END)
    assert notes == [] or all("no login" in note for note in notes)


@_needs("wandb")
@pytest.mark.filterwarnings("ignore")
def test_wandb_keeps_a_run_offline_without_a_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))  # no netrc
    monkeypatch.setattr(module, "_END_S", 60.0)
    run = tmp_path / "run"
    _twice(run, "wandb")
    files = sorted(run.glob("wandb/offline-run-*/*.wandb"))
    assert len(files) == 2
    assert len({path.name for path in files}) == 1  # the same run, in two parts
    assert b"train/loss" in files[0].read_bytes()


@_needs("mlflow")
@pytest.mark.filterwarnings("ignore")
def test_mlflow_goes_on_with_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mlflow

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    mlflow.set_tracking_uri((tmp_path / "store").as_uri())
    monkeypatch.setattr(module, "_END_S", 60.0)
    _twice(tmp_path / "run", "mlflow")
    client = mlflow.MlflowClient()
    place = client.get_experiment_by_name("paceline")
    assert place is not None
    (run,) = client.search_runs([place.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "run"
    assert run.data.params["train.steps"] == "10"
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert sorted((each.step, each.value) for each in history) == [
        (1, 1.0),
        (2, 0.5),
        (3, 1 / 3),
        (3, 1 / 3),
        (4, 0.25),
    ]
    assert "host/n1/system.cpu.utilization" in run.data.metrics


@_needs("trackio")
@pytest.mark.filterwarnings("ignore")
def test_trackio_goes_on_with_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "store"))
    monkeypatch.setattr(module, "_END_S", 60.0)
    _twice(tmp_path / "run", "trackio")
    (database,) = (tmp_path / "store").glob("*.db")
    with sqlite3.connect(database) as connection:
        rows = connection.execute("select distinct run_name from metrics").fetchall()
    assert rows == [("run",)]


@_needs("mlflow")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(importlib.util.find_spec("sqlalchemy") is not None, reason="mlflow has its local database")
def test_mlflow_without_a_place_for_runs_says_what_to_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mlflow

    monkeypatch.setattr(mlflow, "is_tracking_uri_set", lambda: False)
    with tracked(tmp_path / "run", "mlflow") as notes:
        append(tmp_path / "run", "rank-0", RUN)
    (note,) = notes
    assert note.startswith("mlflow does not track this run: MLFLOW_TRACKING_URI is not set")
