"""When a run is saved and why, which losses are spikes, and how often ranks ask one another: rule by rule."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.checkpoint.manifest import State
from paceline.comm.solo import SoloCommunicator
from paceline.config import CheckpointConfig
from paceline.config.sections import RecoveryConfig
from paceline.errors import CheckpointError
from paceline.train.survive import hooks
from paceline.train.survive.hooks import Saver, next_ask
from paceline.train.survive.recovery import GoBack, GoOn, Stop, find_spike, on_bad_steps, on_spike

INF, NAN = math.inf, math.nan


class Writer:
    """Keeps what it is asked to write, and fails when it is told to."""

    made: list[Writer]
    fails = False

    def __init__(self, folder: Path, *_: Any) -> None:
        self.folder, self.saved, self.calls = folder, list[tuple[State, bool]](), list[str]()
        Writer.made.append(self)

    def save(self, state: State, *, in_background: bool) -> None:
        if Writer.fails:
            raise CheckpointError("the disk is full\n  and more")
        self.saved.append((state, in_background))

    def finish(self) -> None:
        self.calls.append("finish")

    def reserve(self, _: Any, worth: int) -> bool:
        self.calls.append(f"reserve {worth}")
        return True

    def reports(self) -> list[tuple[int, dict[str, Any]]]:
        return []


@pytest.fixture
def writers(monkeypatch: pytest.MonkeyPatch) -> list[Writer]:
    Writer.made, Writer.fails = [], False
    monkeypatch.setattr(hooks, "CheckpointWriter", Writer)
    return Writer.made


def make_trainer() -> Any:
    notes: list[tuple[str, Any, int]] = []
    meter = SimpleNamespace(enter=lambda _: None, start=lambda: None)
    parts = SimpleNamespace(meter=meter, engine=SimpleNamespace(world=SoloCommunicator(torch.device("cpu"))))
    made = SimpleNamespace(
        parts=parts, step=0, metrics={}, best=None, line=None, notes=notes, collect_state=lambda: None
    )
    made.note = lambda name, detail, step=0: notes.append((name, detail, step))
    made.state = lambda: State(step=made.step, position=0)
    return made


def run(
    config: CheckpointConfig, folder: Path, steps: int = 8, scores: dict[int, float] | None = None, **options: Any
) -> Any:
    """Takes so many steps, of which some are evaluated; returns the trainer."""
    trainer, saver = make_trainer(), Saver(folder, config, {"name": "a"}, ask_every=2, **options)
    for step in range(1, steps + 1):
        trainer.step = step
        if scores and step in scores:
            trainer.metrics = {"step": step, "eval_loss": scores[step], "eval_accuracy": scores[step]}
        saver(trainer, SimpleNamespace(step=step, is_last=step == steps, steps_per_epoch=3))  # type: ignore[arg-type]
    return trainer


def saved(writers: list[Writer]) -> list[tuple[int, str]]:
    return [(state.step, state.about["reason"]) for each in writers for state, _ in each.saved]


SCORES = {2: 3.0, 3: 2.0, 4: 2.0, 5: NAN, 6: 1.0, 7: 4.0}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [(8, "end")]),
        ({"at_end": False}, []),
        ({"every_steps": 3}, [(3, "steps"), (6, "steps"), (8, "end")]),
        ({"every_steps": 4, "at_end": False}, [(4, "steps"), (8, "steps")]),
        ({"every_steps": 4}, [(4, "steps"), (8, "end")]),
        ({"every_epochs": 1}, [(3, "epochs"), (6, "epochs"), (8, "end")]),
        ({"every_epochs": 2}, [(6, "epochs"), (8, "end")]),
        ({"every_steps": 2, "every_epochs": 1}, [(2, "steps"), (3, "epochs"), (4, "steps"), (6, "steps"), (8, "end")]),
        ({"keep_best": 1, "at_end": False}, [(2, "best"), (3, "best"), (6, "best")]),
        ({"keep_best": 1, "at_end": False, "best_metric": "eval_accuracy"}, [(2, "best"), (7, "best")]),
        ({"keep_best": 1, "at_end": False, "best_mode": "max"}, [(2, "best"), (7, "best")]),
        ({"keep_best": 0, "at_end": False}, []),
        ({"every_minutes": 1e-9, "at_end": False}, [(2, "minutes"), (4, "minutes"), (6, "minutes"), (8, "minutes")]),
        ({"every_minutes": 1e9, "at_end": False}, []),
    ],
)
def test_a_run_is_saved_when_it_is_time_to(
    options: dict[str, Any], expected: list[tuple[int, str]], writers: list[Writer], tmp_path: Path
) -> None:
    trainer = run(CheckpointConfig(asynchronous=False, **options), tmp_path, scores=SCORES)
    assert saved(writers) == expected
    bests = [step for step, reason in expected if reason == "best"]
    if bests:
        assert trainer.best["step"] == bests[-1]
        last = writers[0].saved[-1][0].values["best"]
        assert (last["step"], last["value"]) == (bests[-1], SCORES[bests[-1]])
    assert all(state.about["name"] == "a" for each in writers for state, _ in each.saved)


@pytest.mark.parametrize(("asked", "worth"), [("auto", 2**25), (True, 0)])
def test_saves_before_the_end_are_written_in_the_background(
    asked: Any, worth: int, writers: list[Writer], tmp_path: Path
) -> None:
    run(CheckpointConfig(asynchronous=asked, every_steps=3), tmp_path)
    assert [background for _, background in writers[0].saved] == [True, True, False]
    assert writers[0].calls == [f"reserve {worth}", "finish"]


@pytest.mark.parametrize(
    ("steps", "on_full_disk", "is_told"), [(8, "warn", True), (3, "warn", False), (8, "stop", False)]
)
def test_a_full_disk_ends_a_run_that_may_not_go_on(
    steps: int, on_full_disk: Any, is_told: bool, writers: list[Writer], tmp_path: Path
) -> None:
    Writer.fails = True
    config = CheckpointConfig(asynchronous=False, every_steps=3, at_end=steps == 3)
    if not is_told:
        with pytest.raises(CheckpointError, match="the disk is full"):
            run(config, tmp_path, steps, on_full_disk=on_full_disk)
        return
    trainer = run(config, tmp_path, steps, on_full_disk=on_full_disk)
    reason = {"reason": "the disk is full"}
    assert trainer.notes == [("not_saved", reason, 3), ("not_saved", reason, 6)]
    assert len(writers) == 1


def test_a_step_is_saved_once_and_again_after_the_run_went_back(writers: list[Writer], tmp_path: Path) -> None:
    trainer, saver = make_trainer(), Saver(tmp_path, CheckpointConfig(asynchronous=False, every_steps=2))
    for step in (2, 4):
        trainer.step = step
        saver(trainer, SimpleNamespace(step=step, is_last=False, steps_per_epoch=3))  # type: ignore[arg-type]
    saver.save(trainer, "steps")
    assert (saver.last_saved, writers[0].calls) == (4, [])
    saver.save(trainer, "preempted")  # it is there: what is being written is waited for
    assert writers[0].calls == ["finish"]
    for step in (3, 4):
        trainer.step = step
        saver(trainer, SimpleNamespace(step=step, is_last=False, steps_per_epoch=3))  # type: ignore[arg-type]
    assert saved(writers) == [(2, "steps"), (4, "steps"), (4, "steps")]
    trainer.step = 5
    saver.save_now(trainer)
    assert (saved(writers)[-1], writers[0].calls[-2:]) == ((5, "preempted"), ["finish", "finish"])


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(10.0, 7), (0.1, 7), (0.099, 8), (0.05, 8), (0.01, 16), (1e-4, 1006), (0.0, 1007), (-1.0, 1007)],
)
def test_ranks_ask_again_after_a_tenth_of_a_second(seconds: float, expected: int) -> None:
    assert next_ask(seconds, 7) == expected


@pytest.mark.parametrize(
    ("by", "losses", "loss", "times"),
    [
        ("factor", [2.0, 2.0], 6.0, None),
        ("factor", [2.0, 2.0], 6.5, 3.25),
        ("factor", [2.0], 99.0, None),
        ("factor", [2.0, NAN], 99.0, None),
        ("factor", [2.0, 2.0], NAN, INF),
        ("factor", [-2.0, -2.0], 2.0, None),
        ("factor", [-2.0, -2.0], 2.5, 3.25),
        ("factor", [0.0, 0.0], 0.0, None),
        ("factor", [0.0, 0.0], 0.1, INF),
        ("factor", [9.0, 9.0, 9.0, 1.0, 1.0, 1.0, 1.0], 4.0, 4.0),
        ("deviations", [1.0, 2.0, 3.0, 4.0], 2.5 + 3 * 1.4826, None),
        ("deviations", [1.0, 2.0, 3.0, 4.0], 2.5 + 4 * 1.4826, 4.0),
        ("deviations", [1.0, 1.0], 1.0, None),
        ("deviations", [1.0, 1.0], 1.1, INF),
    ],
)
def test_a_spike_lies_above_the_threshold(by: Any, losses: list[float], loss: float, times: float | None) -> None:
    policy = RecoveryConfig(spike_by=by, spike_window=4, spike_threshold=3.01 if by == "deviations" else 3.0)
    found = find_spike(policy, losses, loss)
    assert (found and found.times) == (times if times is None else pytest.approx(times, rel=1e-3))


def test_what_is_done_is_what_the_policy_says() -> None:
    spike = find_spike(RecoveryConfig(spike_window=4), [2.0, 2.0], 8.0)
    assert spike is not None
    assert str(spike) == "8 after a median of 2"

    def reaction(choice: Any, number: int = 0, has: bool = True) -> object:
        return on_spike(RecoveryConfig(on_spike=choice), spike, num_roll_backs=number, has_checkpoint=has)

    what = "the loss jumped to 8 after a median of 2"
    assert [reaction(choice) for choice in ("ignore", "note", "stop")] == [
        GoOn(),
        GoOn(is_noted=True),
        Stop(reason=what),
    ]
    assert reaction("roll_back", 2) == GoBack(reason=what, skips_data=True)
    assert reaction("lower_rate") == GoBack(reason=what, skips_data=False, rate_factor=0.5)
    assert reaction("roll_back", has=False) == Stop(reason=f"{what}, and there is no checkpoint yet to go back to")
    often = f"{what}, after the run went back recovery.max_roll_backs = 3 times"
    assert reaction("roll_back", 3) == Stop(reason=often)

    def of_bad(choice: Any, row: int) -> object:
        policy = RecoveryConfig(on_nan=choice)
        return on_bad_steps(policy, num_in_a_row=row, limit=3, num_roll_backs=0, has_checkpoint=True)

    assert [of_bad("skip", row) for row in (2, 3)] == [GoOn(), Stop()]
    assert of_bad("stop", 1) == Stop(reason="recovery.on_nan = stop")
    told = "3 steps in a row had gradients that are not finite"
    assert [of_bad("roll_back", row) for row in (2, 3)] == [GoOn(), GoBack(reason=told, skips_data=True)]
