"""The saver: when it saves, what it tells, and what it keeps."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from kept_records import Kept

from paceline.checkpoint import Retention, find_checkpoint, list_checkpoints, open_checkpoint
from paceline.checkpoint.find import retention_of
from paceline.checkpoint.storage import LocalFiles
from paceline.comm.base import Communicator
from paceline.comm.solo import SoloCommunicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.config import CheckpointConfig, config_from_dict
from paceline.errors import CheckpointError
from paceline.train.assemble import build_trainer
from paceline.train.survive.hooks import Saver
from paceline.train.trainer import EvaluateHook, Every, Trainer

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def fast_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda _: None)


def make_trainer(comm: Communicator, hooks: list[Any], sink: Kept | None = None, steps: int = 6) -> Trainer:
    config = config_from_dict(
        {
            "model": {"kind": "mlp", "hidden_dim": 8},
            "data": {"kind": "synthetic_classification", "samples": 48, "features": 4, "classes": 2},
            "train": {"steps": steps, "global_batch": 12},
        }
    )
    return build_trainer(config, comm, hooks=hooks, sink=sink)


def steps_in(folder: Path) -> list[int]:
    return [int(path.name[-8:]) for path in list_checkpoints(folder)]


@pytest.mark.parametrize("in_background", [False, True])
def test_it_saves_every_n_steps_and_at_the_end_and_tells_of_each(tmp_path: Path, in_background: bool) -> None:
    def work(comm: Communicator) -> list[tuple[int, bool]]:
        sink = Kept()
        saver = Saver(
            tmp_path, CheckpointConfig(every_steps=4, asynchronous=in_background, keep=99), about={"name": "tiny"}
        )
        make_trainer(comm, [saver], sink).run()
        assert saver.last_saved == 6
        for event in sink.events:
            assert event.name == "checkpoint"
            assert event.detail["folder"] == str(tmp_path)
            assert event.detail["bytes"] > 0
            assert 0 <= event.detail["stall_seconds"] <= event.detail["seconds"]
        return [(event.step, event.detail["background"]) for event in sink.events]

    assert run_virtual(work, 2) == [[(4, in_background), (6, False)]] * 2
    assert steps_in(tmp_path) == [4, 6]
    assert [open_checkpoint(path).manifest.about["reason"] for path in list_checkpoints(tmp_path)] == ["steps", "end"]


def test_it_saves_by_the_clock_of_rank_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(import_module("paceline.train.survive.hooks").time, "monotonic", lambda: now[0])
    saver = Saver(tmp_path, CheckpointConfig(every_minutes=1.0, at_end=False, keep=99, asynchronous=False), ask_every=2)

    def pass_time(*_: Any) -> None:
        now[0] += 25.0

    make_trainer(SoloCommunicator(CPU), [pass_time, saver], steps=8).run()
    assert steps_in(tmp_path) == [4, 8]  # 100 s at step 4, the first that is asked after 60; then again


def test_what_it_is_asked_for_before_an_end_is_there_when_it_returns(tmp_path: Path) -> None:
    saver = Saver(tmp_path, CheckpointConfig(at_end=False, asynchronous=True, keep=99))

    def stop(trainer: Trainer, result: Any) -> None:
        if result.step == 3:
            saver.save_now(trainer)
            assert steps_in(tmp_path) == [3]
            saver.save_now(trainer)  # once a step

    make_trainer(SoloCommunicator(CPU), [stop]).run()
    assert open_checkpoint(tmp_path / "step-00000003").manifest.about["reason"] == "preempted"


def test_the_best_is_kept_and_remembered_over_a_resume(tmp_path: Path) -> None:
    policy = CheckpointConfig(every_steps=1, keep=1, keep_best=1, asynchronous=False)
    losses = iter([0.9, 0.2, 0.5, 0.7, 0.4, 0.3])

    def measure(trainer: Trainer, _: Any) -> None:
        trainer.metrics = {"step": trainer.step, "eval_loss": next(losses)}

    first = make_trainer(SoloCommunicator(CPU), [measure, Saver(tmp_path, policy)], steps=4)
    first.run()
    assert steps_in(tmp_path) == [2, 4]
    second = make_trainer(SoloCommunicator(CPU), [measure, Saver(tmp_path, policy)], steps=6)
    second.load_state(open_checkpoint(tmp_path / "step-00000004"))
    assert second.best == {"metric": "eval_loss", "value": 0.2, "step": 2}
    second.run()
    assert steps_in(tmp_path) == [2, 6]
    assert open_checkpoint(tmp_path / "step-00000006").values["best"] == second.best == first.best


def test_an_evaluation_of_an_earlier_step_does_not_count_for_a_later_one(tmp_path: Path) -> None:
    saver = Saver(tmp_path, CheckpointConfig(every_steps=1, keep=99, asynchronous=False))
    make_trainer(SoloCommunicator(CPU), [Every(3, EvaluateHook(), at_end=False), saver], steps=4).run()
    found = [dict(open_checkpoint(path).manifest.metrics) for path in list_checkpoints(tmp_path)]
    assert [bool(metrics) for metrics in found] == [False, False, found[2] != {}, False]


def test_a_background_save_that_failed_stops_all_ranks_at_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = LocalFiles.write

    def broken(self: LocalFiles, path: Path, chunks: Any) -> Any:
        if path.name.startswith("rank-00001.f"):
            raise PermissionError(13, "Permission denied", str(path))
        return write(self, path, chunks)

    monkeypatch.setattr(LocalFiles, "write", broken)

    def work(comm: Communicator) -> tuple[str, int]:
        trainer = make_trainer(comm, [Saver(tmp_path, CheckpointConfig(every_steps=2, asynchronous=True, keep=99))])
        with pytest.raises(CheckpointError) as failure:
            trainer.run()
        return str(failure.value), trainer.step

    (first, step), (second, _) = run_virtual(work, 2)
    assert first == second
    assert "Permission denied" in first
    assert step == 4


def test_a_run_that_is_taken_up_further_back_has_a_line_of_its_own(tmp_path: Path) -> None:
    """Its newest checkpoint is its own, although a later step lies beside it; those go with its next saves."""

    def work(comm: Communicator, every: int, steps: int, start: str = "") -> None:
        policy = CheckpointConfig(every_steps=every, at_end=False, keep=3, asynchronous=False)
        trainer = make_trainer(comm, [Saver(tmp_path, policy)], steps=steps)
        if start:
            trainer.load_state(open_checkpoint(tmp_path / start))
        trainer.run()

    run_virtual(lambda comm: work(comm, 2, 6), 2)
    run_virtual(lambda comm: work(comm, 3, 3, "step-00000002"), 2)
    assert find_checkpoint("auto", tmp_path).name == "step-00000003"
    assert steps_in(tmp_path) == [6, 2, 3]  # 4 and 6 were left, and three are kept
    run_virtual(lambda comm: work(comm, 4, 4, "step-00000003"), 2)
    assert steps_in(tmp_path) == [2, 3, 4]
    lines = [open_checkpoint(path).manifest.line.turns for path in list_checkpoints(tmp_path)]
    assert lines == [((0, 0),), ((0, 0), (1, 2)), ((0, 0), (1, 2))]


@pytest.mark.parametrize(("worth", "expected"), [(1, True), (2**30, False)])
def test_what_is_large_is_saved_in_the_background(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, worth: int, expected: bool
) -> None:
    monkeypatch.setattr(import_module("paceline.train.survive.hooks"), "_WORTH_BYTES", worth)
    sink = Kept()
    make_trainer(
        SoloCommunicator(CPU), [Saver(tmp_path, CheckpointConfig(every_steps=2, asynchronous="auto", keep=99))], sink
    ).run()
    assert [(event.step, event.detail["background"]) for event in sink.events] == [
        (2, expected),
        (4, expected),
        (6, False),  # the last one is there when the run ends
    ]


def test_a_config_says_what_is_kept() -> None:
    config = CheckpointConfig(
        every_minutes=2.0, keep=3, keep_every=10, keep_best=2, best_metric="eval_accuracy", asynchronous=True
    )
    assert retention_of(config.model_dump()) == Retention(last=3, every=10, best=2, metric="eval_accuracy", mode="max")
    assert retention_of(CheckpointConfig().model_dump()) == Retention(last=2)
