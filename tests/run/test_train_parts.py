"""The parts of ``paceline train`` around the ranks: where a run lives, what is shown, how a rank leaves torchrun."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import made_records as records
import pytest
import torch
from made_records import write_records

from paceline.checkpoint.manifest import Manifest, manifest_text
from paceline.checkpoint.tensors import encode
from paceline.checkpoint.tools.listing import list_folder
from paceline.cli.train import _next_steps, show_result
from paceline.comm.solo import SoloCommunicator
from paceline.config import Config, load_config
from paceline.errors import CheckpointError, LaunchError
from paceline.health.failure import Failure
from paceline.records.records import EventRecord, to_line
from paceline.run import processes, worker
from paceline.run.decide import decide_run
from paceline.run.folder import RunFolder, adopt_config, claim_folder
from paceline.run.location import RunLocation, claim_run, find_start, locate_run, read_result
from paceline.run.observe import live_progress

RUN = replace(records.RUN, world_size=1, device="x", backend="gloo", total_steps=4, time=4e9)
STEP = replace(records.STEP, step=4, samples_per_s=0.5, time=4e9)
END = replace(records.END, step=4, time=4e9)


@pytest.fixture
def config(project: Path) -> Config:
    return load_config(project / "tiny.yaml")


@pytest.fixture
def run(project: Path) -> Path:
    """The folder of a run with a checkpoint."""
    path = project / "runs" / "tiny"
    with claim_folder(path, "name: tiny\n"):
        (path / "checkpoints" / "step-00000003").mkdir()
        empty = manifest_text(Manifest(step=3, position=0, world=0, tensors={}, files={}))
        (path / "checkpoints" / "step-00000003" / "manifest.json").write_text(empty)
    return path


# Where a run lives


@pytest.mark.usefixtures("run")
@pytest.mark.parametrize(
    "resume", ["auto", "runs/tiny", "runs/tiny/checkpoints", "runs/tiny/checkpoints/step-00000003"]
)
def test_a_checkpoint_of_its_own_continues_a_run(config: Config, project: Path, resume: str) -> None:
    place = locate_run(config, force=False, resume=resume)
    checkpoint = project / "runs" / "tiny" / "checkpoints" / "step-00000003"
    assert place == RunLocation(folder=Path("runs/tiny"), checkpoint=checkpoint, is_continued=True)


@pytest.mark.usefixtures("run")
def test_the_checkpoint_of_another_run_starts_a_new_one(config: Config, project: Path) -> None:
    other = config.model_copy(update={"name": "fork"})
    place = locate_run(other, force=False, resume="runs/tiny")
    assert (place.folder, place.is_continued) == (Path("runs/fork"), False)
    with claim_folder(project / "runs" / "fork", "name: fork\n"):
        pass
    second = locate_run(other, force=False, resume="runs/tiny")
    assert (second.folder, second.is_continued) == (Path("runs/fork-2"), False)
    assert not locate_run(other, force=True, resume="runs/tiny").is_continued


def saved(folder: Path, step: int, best: int | None = None) -> Path:
    """Leaves an empty checkpoint in a folder."""
    path = folder / f"step-{step:08d}"
    path.mkdir(parents=True)
    values = {} if best is None else {"best": encode({"metric": "eval_loss", "value": 1.0, "step": best}, "best")}
    whole = Manifest(step=step, position=0, world=0, tensors={}, files={}, values=values)
    (path / "manifest.json").write_text(manifest_text(whole))
    return path


def start(config: Config, *, force: bool = False, resume: str | None = None) -> tuple[Path, Config]:
    """Locates and claims a run as ``train`` does; returns its folder and the config in it."""
    claimed, _ = claim_run(locate_run(config, force=force, resume=resume), config, force=force)
    with claimed:
        adopt_config(claimed.path)
        return claimed.path, load_config(claimed.path / "config.yaml")


def test_runs_of_one_name_number_themselves(config: Config, capsys: pytest.CaptureFixture[str]) -> None:
    taken = [start(config) for _ in range(3)]
    assert [path.name for path, _ in taken] == ["tiny", "tiny-2", "tiny-3"]
    assert [each.name for _, each in taken] == ["tiny", "tiny-2", "tiny-3"]
    assert "runs/tiny exists: this run is runs/tiny-3" in capsys.readouterr().err
    assert start(config, force=True)[0].name == "tiny"
    assert (Path("runs/tiny-3/config.yaml")).is_file()


def test_a_run_that_took_the_number_meanwhile_is_left_alone(config: Config) -> None:
    place = locate_run(config, force=False, resume=None)
    start(config)
    claimed, moved = claim_run(place, config)
    with claimed:
        assert (claimed.path.name, moved.folder.name, moved.named_config(config).name) == ("tiny-2", "tiny-2", "tiny-2")


def test_the_newest_run_of_a_name_is_continued(config: Config, capsys: pytest.CaptureFixture[str]) -> None:
    for number, (path, _) in enumerate([start(config) for _ in range(3)]):
        os.utime(path / "config.yaml", (number, number))
        if number < 2:
            saved(path / "checkpoints", 3 + number)
    start(config.model_copy(update={"name": "tiny-9"}))  # somebody's own name: another run
    saved(Path("runs/tiny-9/checkpoints"), 9)
    place = locate_run(config, force=False, resume="auto")
    assert (place.folder, place.is_continued) == (Path("runs/tiny-2"), True)
    assert place.checkpoint is not None
    assert place.checkpoint.name == "step-00000004"
    assert "continuing runs/tiny-2: the last one with a checkpoint of 3 runs named tiny" in capsys.readouterr().err
    assert start(config, resume="auto")[1].name == "tiny-2"
    own = locate_run(config, force=False, resume="runs/tiny/checkpoints/step-00000003")
    assert (own.folder, own.is_continued) == (Path("runs/tiny"), True)


def test_a_run_that_was_ended_before_its_first_step_begins(config: Config, capsys: pytest.CaptureFixture[str]) -> None:
    first, _ = start(config)
    place = locate_run(config, force=False, resume="auto")
    assert (place.folder, place.checkpoint, place.is_continued) == (first, None, True)
    assert f"no checkpoint in {first} yet: starting from the beginning" in capsys.readouterr().err
    (first / "checkpoints" / "step-00000003").mkdir(parents=True)  # a save that did not end: steps were trained
    with pytest.raises(CheckpointError, match="no checkpoint in runs/tiny"):
        locate_run(config, force=False, resume="auto")
    (first / "checkpoints" / "step-00000003").rmdir()
    (first / "records").mkdir(exist_ok=True)
    (first / "records" / "rank-0.jsonl").write_text(to_line(records.STEP) + "\n")
    with pytest.raises(CheckpointError, match="no checkpoint in runs/tiny"):
        locate_run(config, force=False, resume="auto")
    assert locate_run(config, force=False, resume="auto", may_begin=True).folder == first


def test_hosts_begin_a_run_that_is_not_there(config: Config) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint in runs/tiny"):
        locate_run(config, force=False, resume="auto")
    place = locate_run(config, force=False, resume="auto", may_begin=True)
    assert (place.folder, place.is_continued) == (Path("runs/tiny"), False)


def test_a_run_that_keeps_its_checkpoints_elsewhere_is_continued(config: Config) -> None:
    elsewhere = config.with_values("checkpoint", folder="./ck")
    first, _ = start(elsewhere)
    saved(Path("ck"), 5)
    for resume in ("ck/step-00000005", "ck", "auto"):
        place = locate_run(elsewhere, force=False, resume=resume)
        assert (place.folder, place.is_continued) == (first, True)
    assert [each.step for each in list_folder(first, 0.0)] == [5]
    second, written = start(elsewhere)  # whose checkpoints must not push out those of the first
    assert (second.name, written.checkpoint.folder) == ("tiny-2", "./ck/tiny-2")
    saved(Path("ck/tiny-2"), 7)
    assert locate_run(elsewhere, force=False, resume="ck/tiny-2/step-00000007").folder == second
    assert find_start(written, second, "auto", print).name == "step-00000007"


def test_the_best_checkpoint_is_continued(config: Config) -> None:
    path, _ = start(config)
    saved(path / "checkpoints", 4)
    with pytest.raises(CheckpointError, match="has no best checkpoint"):
        locate_run(config, force=False, resume="best")
    saved(path / "checkpoints", 8, best=6)
    with pytest.raises(CheckpointError, match="of step 6, was not kept"):
        locate_run(config, force=False, resume="best")
    best = saved(path / "checkpoints", 6)
    place = locate_run(config, force=False, resume="best")
    assert (place.checkpoint, place.is_continued) == (best.absolute(), True)


def test_without_a_checkpoint_there_is_nothing_to_resume(config: Config) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint in runs/tiny"):
        locate_run(config, force=False, resume="auto")


def test_what_is_expected_of_a_resumed_run_waits_until_it_is_set_up(run: Path) -> None:
    with claim_folder(run, "name: tiny\n", resume=True) as claimed:
        claimed.write_prediction("first\n")
        assert not (run / "prediction.json").exists()
        adopt_config(run)
    assert (run / "prediction.json").read_text() == "first\n"
    with claim_folder(run, "name: tiny\n", resume=True) as claimed:
        claimed.write_prediction("refused\n")
        claimed.discard()
    assert (run / "prediction.json").read_text() == "first\n"
    assert not (run / ".prediction.json").exists()


# What is shown


def test_ranks_that_left_too_early_without_an_error_are_no_success(config: Config, run: Path) -> None:
    write_records(run, 0, RUN, STEP)
    with pytest.raises(LaunchError, match=r"left before the run was done: it is unfinished, at step 4\n.*logs"):
        read_result(run, config)


def test_a_run_with_nothing_left_to_do_still_gives_its_summary_as_json(
    config: Config, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_records(run, 0, RUN, STEP, END, RUN, END)
    show_result(read_result(run, config), as_json=True)
    shown = capsys.readouterr()
    assert json.loads(shown.out)["status"] == "done"
    assert shown.err.startswith("nothing left to do: the checkpoint is of step 4")


@pytest.mark.parametrize(
    ("change", "longer"),
    [
        ({"steps": None, "epochs": 15}, "train.epochs=30"),
        ({"steps": None, "epochs": 0.5}, "train.epochs=1"),
        ({"steps": None}, "train.epochs=2"),
        ({"steps": 200}, "train.steps=400"),
    ],
)
def test_the_way_on_fits_the_run(config: Config, run: Path, change: dict[str, float | None], longer: str) -> None:
    changed = config.model_copy(update={"train": config.train.model_copy(update=change)})
    command = f"  paceline train {run}/config.yaml {longer} --resume auto"
    assert _next_steps(run, changed)[0].rstrip().partition("  #")[0] == command


def test_a_run_without_a_checkpoint_cannot_go_on(config: Config, run: Path) -> None:
    (run / "checkpoints" / "step-00000003").rename(run / "checkpoints" / ".step-00000003.123")
    assert not [line for line in _next_steps(run, config) if "--resume" in line]


def test_a_folder_with_spaces_is_quoted(config: Config) -> None:
    lines = _next_steps(Path("my runs/tiny"), config)
    assert any(line.startswith("  paceline report 'my runs/tiny'") for line in lines)


def test_progress_leaves_out_failures_and_older_attempts(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    event = EventRecord(name="saved", step=4, detail={"folder": str(Path.cwd() / "runs" / "x")}, time=4e9)
    old = replace(RUN, time=1.0, strategy="older")
    failed = replace(END, status="failed", message="rank 0")
    write_records(run, 0, old, RUN, STEP, event, replace(RUN, total_steps=0), failed)
    with live_progress(run, is_shown=True):
        pass
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "ddp on 1 rank (gloo, x)   1.2M parameters   global batch 64   4 steps",
        "step 4   saved   folder runs/x",
        "step 4/4   epoch 0.50   loss 0.2500   640 samples/s",
    ]
    with live_progress(run, is_shown=False):
        pass
    assert capsys.readouterr().out == ""


# How a rank leaves torchrun


class LeftError(Exception):
    """In place of the end of this process."""


@pytest.fixture
def leave(
    run: Path, project: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Failure, RunFolder | None], SimpleNamespace]:
    """Lets a rank leave with a failure; returns its exit code and what torchrun reads."""
    codes: list[int] = []

    def stay(code: int) -> None:
        codes.append(code)
        raise LeftError

    monkeypatch.setattr(processes, "leave_process", stay)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(project / "error.json"))
    marks = worker.records.mark_records(run, [0, 1])

    def call(failure: Failure, claimed: RunFolder | None = None) -> SimpleNamespace:
        with pytest.raises(LeftError):
            worker._leave_launcher(failure, run, claimed, marks)
        detail = json.loads((project / "error.json").read_text())["message"]["extraInfo"]
        return SimpleNamespace(code=codes[-1], text=detail["py_callstack"], timestamp=int(detail["timestamp"]))

    return call


def test_rank_0_under_a_launcher_holds_the_folder_that_it_claims(config: Config) -> None:
    """Else the folder of a run that is refused would stay."""
    comm = SoloCommunicator(torch.device("cpu"))
    decision, location = decide_run(config, comm=comm), locate_run(config, force=False, resume=None)
    claimed, found, _ = worker._claim_together(comm, location, decision, (), force=False)
    assert claimed is not None
    with claimed:
        assert claimed.path == found.folder
        claimed.discard()
    assert not found.folder.exists()


RAISED = Failure(rank=1, cause="raised", message="ValueError: bad", traceback="Traceback of it", time=100.9)


def test_a_rank_under_torchrun_tells_its_own_failure(
    leave: Callable[..., SimpleNamespace], run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "records" / "rank-1.jsonl").write_text(to_line(RUN))
    left = leave(RAISED)
    assert (left.code, left.timestamp) == (1, 100)
    assert left.text == "rank 1 failed: ValueError: bad\n\nTraceback of it"
    assert capsys.readouterr().err == f"paceline: {left.text}\n"
    assert '"message":"rank 1 failed: ValueError: bad"' in (run / "records" / "rank-1.jsonl").read_text()


def test_a_consequence_comes_after_its_cause_in_the_words_of_torchrun(
    leave: Callable[..., SimpleNamespace], capsys: pytest.CaptureFixture[str]
) -> None:
    left = leave(Failure(rank=0, cause="lost", message="another rank is gone\n  [pair.cc] GLHF", time=100.1))
    assert left.timestamp > leave(RAISED).timestamp
    assert capsys.readouterr().err.splitlines()[0] == "paceline: rank 0 failed: another rank is gone"


def test_what_is_refused_is_told_once_and_takes_the_new_folder_along(
    leave: Callable[..., SimpleNamespace], project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused = Failure(rank=0, cause="raised", message="too many ranks", time=100.0, is_refusal=True)
    with claim_folder(project / "runs" / "new", "name: new\n") as claimed:
        assert leave(refused, claimed).code == leave(replace(refused, rank=1)).code == 2
    assert not (project / "runs" / "new").exists()
    assert capsys.readouterr().err == "paceline: too many ranks\n"
