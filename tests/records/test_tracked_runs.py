"""What a run remembers of its trackers, and the user's own sinks: without any tracker library."""

from __future__ import annotations

import builtins
import json
import logging
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from made_records import END, RUN, STEP

from paceline.records import trackers
from paceline.records.trackers import MlflowSink, TrackedRun, TrackioSink, WandbSink, open_tracker


def run_in(folder: Path, config: dict[str, Any] | None = None, told: list[tuple[int, str]] | None = None) -> TrackedRun:
    lines = [] if told is None else told
    return TrackedRun(folder=folder, config=config or {}, tell=lambda level, words: lines.append((level, words)))


def test_a_run_remembers_what_each_tracker_calls_it(tmp_path: Path) -> None:
    run = run_in(tmp_path / "first")
    run.folder.mkdir()
    assert (run.name, run.identity("wandb")) == ("first", None)
    run.remember("wandb", "w1")
    run.remember("mlflow", "m1")
    run.remember("wandb", "w2")
    again = run_in(tmp_path / "first")
    assert [again.identity(name) for name in ("wandb", "mlflow", "trackio")] == ["w2", "m1", None]
    assert json.loads((run.folder / ".trackers.json").read_text()) == {"wandb": "w2", "mlflow": "m1"}
    assert [path.name for path in run.folder.iterdir()] == [".trackers.json"]


@pytest.mark.parametrize("text", ["", "[]", '{"wandb": 3}', "{", '{"wandb": null}'])
def test_what_cannot_be_read_is_no_identity(text: str, tmp_path: Path) -> None:
    (tmp_path / ".trackers.json").write_text(text)
    assert run_in(tmp_path).identity("wandb") is None


class OwnSink:
    """A sink of the user's own."""

    def __init__(self, run: TrackedRun) -> None:
        self.run = run

    def write(self, *_: object) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


def half_a_sink(_: TrackedRun) -> object:
    return SimpleNamespace(write=print, flush=None)


def test_the_user_s_own_sink_is_opened_with_the_run(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    made = open_tracker(f"{__name__}:OwnSink", run)
    assert isinstance(made, OwnSink)
    assert made.run is run
    with pytest.raises(TypeError, match="made a SimpleNamespace without flush, close: a sink has write, flush, close"):
        open_tracker(f"{__name__}:half_a_sink", run)


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_a_library_that_is_missing_is_named_with_the_way_to_get_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ModuleNotFoundError, match=rf"^{name} is not installed \(pip install 'paceline\[{name}\]'\)$"):
        open_tracker(name, run_in(tmp_path))


def test_another_library_that_is_missing_is_told_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = builtins.__import__

    def lacking(name: str, *args: Any, **options: Any) -> Any:
        if name == "trackio":
            raise ModuleNotFoundError("No module named 'gradio'", name="gradio")
        return known(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", lacking)
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'gradio'$"):
        open_tracker("trackio", run_in(tmp_path))


class Library(SimpleNamespace):
    """A tracker's library: it keeps what it is called with."""

    def __init__(self, **known: Any) -> None:
        self.calls: list[tuple[str, Any]] = []
        super().__init__(**known)

    def note(self, name: str, result: Any = None) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            self.calls.append((name, {**options, "in": args} if options and args else options or args))
            return result

        return call


def fill(sink: Any, status: str = "done") -> None:
    sink.write(RUN, replace(STEP, step=3, loss=float("nan")))
    sink.write(replace(END, status=status, step=4))
    sink.flush()
    sink.close()
    sink.close()  # a second time does nothing


@pytest.mark.parametrize(("status", "code"), [("done", 0), ("failed", 1), ("stopped", 1)])
def test_wandb_gets_numbers_by_step_and_how_it_ended(
    status: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lib = Library()
    own = SimpleNamespace(id="w7", define_metric=lib.note("metric"), log=lib.note("log"), finish=lib.note("finish"))
    settings = SimpleNamespace(mode="online", project="", api_key="key", base_url="")
    module = SimpleNamespace(
        setup=lambda: SimpleNamespace(settings=settings), init=lib.note("init", own), Settings=lambda **given: given
    )
    monkeypatch.setitem(sys.modules, "wandb", module)
    told: list[tuple[int, str]] = []
    run = run_in(tmp_path, {"a": 1}, told)
    fill(WandbSink(run), status)
    began = dict(lib.calls[0][1])
    assert {name: began[name] for name in ("project", "name", "id", "mode", "resume", "config")} == {
        "project": "paceline", "name": tmp_path.name, "id": None, "mode": None, "resume": "allow", "config": {"a": 1}
    }  # fmt: skip
    assert (run.identity("wandb"), told) == ("w7", [])
    assert [each for each in lib.calls if each[0] == "metric"] == [
        ("metric", ("step",)),
        ("metric", {"step_metric": "step", "in": ("*",)}),
    ]
    logged = [each[1][0] for each in lib.calls if each[0] == "log"]
    assert [each["step"] for each in logged] == [3]
    assert logged[0]["train/grad_norm"] == STEP.grad_norm
    assert lib.calls[-1] == ("finish", {"exit_code": code})
    assert [each[0] for each in lib.calls].count("finish") == 1
    WandbSink(run)  # resumed
    assert dict(lib.calls[-3][1])["id"] == "w7"


HOST = "https://api.wandb.ai"
LOGIN = "machine api.wandb.ai\nlogin u\npassword p\n"
LOGINS: list[tuple[dict[str, Any], str, bool]] = [
    ({"mode": "online", "base_url": HOST}, "", True),
    ({"mode": "online", "base_url": HOST, "identity_token_file": "f"}, "", False),
    ({"mode": "online", "base_url": HOST}, LOGIN, False),
    ({"mode": "online", "base_url": "https://own.host"}, LOGIN, True),
    ({"mode": "online", "base_url": HOST}, "nonsense here\n", True),
    ({"mode": "disabled", "base_url": HOST}, "", False),
]


@pytest.mark.parametrize(("settings", "logins", "is_offline"), LOGINS)
def test_wandb_stays_offline_without_a_login(
    settings: dict[str, Any], logins: str, is_offline: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    if logins:
        (tmp_path / ".netrc").write_text(logins)
        (tmp_path / ".netrc").chmod(0o600)
    lib = Library()
    made = SimpleNamespace(id="w", define_metric=lib.note("metric"))
    known = SimpleNamespace(project="mine", api_key="", **settings)
    module = SimpleNamespace(
        setup=lambda: SimpleNamespace(settings=known), init=lib.note("init", made), Settings=lambda **given: given
    )
    monkeypatch.setitem(sys.modules, "wandb", module)
    told: list[tuple[int, str]] = []
    WandbSink(run_in(tmp_path, {}, told))
    began = dict(lib.calls[0][1])
    assert (began["mode"], began["project"]) == ("offline" if is_offline else None, "mine")
    words = f"wandb has no login: offline; later: wandb sync {tmp_path}/wandb/offline-run-*"
    assert told == ([(logging.WARNING, words)] if is_offline else [])


def mlflow_with(lib: Library, *, has_address: bool = True, experiment: Any = None) -> Any:
    made = SimpleNamespace(info=SimpleNamespace(run_id="r1"))
    client = SimpleNamespace(
        update_run=lib.note("update_run"),
        get_experiment_by_name=lib.note("by_name", experiment),
        create_experiment=lib.note("create_experiment", "e1"),
        create_run=lib.note("create_run", made),
        log_param=lib.note("log_param"),
        log_batch=lib.note("log_batch"),
        set_terminated=lib.note("terminated"),
    )
    variables = SimpleNamespace(MLFLOW_EXPERIMENT_NAME=SimpleNamespace(get=lambda: ""))
    return SimpleNamespace(
        is_tracking_uri_set=lambda: has_address, MlflowClient=lambda: client, environment_variables=variables
    )


@pytest.mark.parametrize(
    ("status", "told", "experiment"),
    [("done", "FINISHED", None), ("stopped", "KILLED", "e7"), ("failed", "FAILED", None)],
)
def test_mlflow_gets_settings_numbers_and_how_it_ended(
    status: str, told: str, experiment: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lib = Library()
    known = None if experiment is None else SimpleNamespace(experiment_id=experiment)
    monkeypatch.setitem(sys.modules, "mlflow", mlflow_with(lib, experiment=known))
    monkeypatch.setitem(sys.modules, "mlflow.entities", SimpleNamespace(Metric=lambda *given: given))
    run = run_in(tmp_path, {"train": {"steps": 3, "why": "x" * 600}, "name": "n"})
    fill(MlflowSink(run), status)
    calls = {name: given for name, given in lib.calls if name != "log_param"}
    assert ("create_experiment" in calls) == (experiment is None)
    assert calls["create_run"] == {"run_name": tmp_path.name, "in": (experiment or "e1",)}
    params = [given for name, given in lib.calls if name == "log_param"]
    assert params == [("r1", "train.steps", "3"), ("r1", "train.why", "x" * 500), ("r1", "name", "n")]
    sent = {name: figures for name, *figures in calls["log_batch"]["metrics"]}
    assert sent["train/grad_norm"] == [STEP.grad_norm, int(STEP.time * 1e3), 3]
    assert "train/loss" not in sent  # it is no number
    assert calls["terminated"] == ("r1", told)
    lib.calls.clear()
    fill(MlflowSink(run_in(tmp_path)), status)  # goes on
    assert lib.calls[0] == ("update_run", {"status": "RUNNING", "in": ("r1",)})
    assert "create_run" not in dict(lib.calls)


def test_mlflow_without_a_place_for_runs_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", mlflow_with(Library(), has_address=False))
    monkeypatch.setitem(sys.modules, "mlflow.entities", SimpleNamespace(Metric=None))
    monkeypatch.setattr(trackers, "find_spec", lambda _: None)
    with pytest.raises(Exception, match=r"MLFLOW_TRACKING_URI is not set.*pip install mlflow"):
        MlflowSink(run_in(tmp_path))
    monkeypatch.setattr(trackers, "find_spec", lambda _: object())  # a database of its own
    assert MlflowSink(run_in(tmp_path))


def test_trackio_goes_on_under_the_name_it_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lib = Library()
    made = SimpleNamespace(log=lib.note("log"), finish=lib.note("finish"))
    monkeypatch.setitem(sys.modules, "trackio", SimpleNamespace(init=lib.note("init", made)))
    run = run_in(tmp_path, {"a": 1})
    fill(TrackioSink(run))
    first = dict(lib.calls[0][1])
    assert (first["project"], first["name"], first["config"]) == ("paceline", tmp_path.name, {"a": 1})
    assert (run.identity("trackio"), lib.calls[-1][0]) == (tmp_path.name, "finish")
    run.remember("trackio", "older")
    TrackioSink(run)
    assert dict(lib.calls[-1][1])["name"] == "older"
