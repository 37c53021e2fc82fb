"""Losses that jump and gradients that are not finite on virtual ranks: the run goes back, on all of them alike."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kept_records import Kept

from paceline.checkpoint import find_checkpoint, list_checkpoints, open_checkpoint
from paceline.checkpoint.tools.audit import check_samples
from paceline.comm.base import Communicator
from paceline.comm.solo import SoloCommunicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.config import CheckpointConfig, Config, config_from_dict
from paceline.config.sections import RecoveryConfig
from paceline.errors import PreemptedError, RankFailedError, TrainingError
from paceline.records.records import EventRecord, Record, StepRecord
from paceline.train.assemble import build_trainer
from paceline.train.loss import CrossEntropy, LossValue
from paceline.train.survive.hooks import ConsensusHook, Saver, _PendingSum, next_ask
from paceline.train.survive.recovery import StopRequest
from paceline.train.trainer import Trainer

STEPS, BATCH = 14, 8


def make_config(**train: Any) -> Config:
    return config_from_dict(
        {
            "model": {"kind": "mlp", "hidden_dim": 8, "dropout": 0.0},
            "data": {"kind": "synthetic_classification", "features": 5, "classes": 3, "samples": 400},
            "train": {"steps": STEPS, "global_batch": BATCH, "dtype": "float64", **train},
            "optim": {"kind": "sgd", "lr": 0.01},
        }
    )


class Jumpy(CrossEntropy):
    """A loss that is multiplied by something at some calls, on every rank."""

    def __init__(self, factors: dict[int, float]) -> None:
        super().__init__(1.0)
        self.factors, self.calls = factors, 0

    def __call__(self, model: Any, batch: Any) -> LossValue:
        self.calls += 1
        value = super().__call__(model, batch)
        return LossValue(value.total * self.factors.get(self.calls, 1.0), value.count)


def train(folder: Path, policy: RecoveryConfig, loss: Callable[[], Jumpy], config: Config | None = None) -> list[Any]:
    """Trains on two ranks with a checkpoint every four steps; returns trainer and records of each."""

    def rank(comm: Communicator) -> tuple[Trainer, list[Record]]:
        saver = Saver(folder, CheckpointConfig(every_steps=4, at_end=False, keep=99, asynchronous=False))
        hooks = [saver, ConsensusHook(StopRequest(), saver.save_now, policy)]
        trainer = build_trainer(config or make_config(), comm, hooks=hooks)
        object.__setattr__(trainer.parts, "loss", loss())
        trainer.losses = policy
        trainer.find_checkpoint = lambda: find_checkpoint("auto", folder)
        sink = trainer.sink = Kept()
        trainer.run()
        return trainer, sink.records

    return run_virtual(rank, 2)


def steps(records: list[Record]) -> list[int]:
    return [each.step for each in records if isinstance(each, StepRecord)]


def event(records: list[Record], name: str) -> EventRecord:
    return next(each for each in records if isinstance(each, EventRecord) and each.name == name)


def policy(**settings: Any) -> RecoveryConfig:
    return RecoveryConfig(**{"spike_window": 4, "spike_threshold": 5.0, **settings})


def test_a_spike_is_left_behind_with_the_data_since_the_checkpoint(tmp_path: Path) -> None:
    found = train(tmp_path, policy(on_spike="roll_back"), lambda: Jumpy({10: 100.0}))
    for trainer, records in found:
        # Step 10 jumps; it is known behind step 11; the checkpoint is of step 8.
        assert steps(records) == [*range(1, 12), *range(9, STEPS + 1)]
        told = event(records, "roll_back")
        assert (told.step, told.detail["from_step"], told.detail["number"]) == (8, 11, 1)
        assert told.detail["skipped_samples"] == 2 * BATCH
        assert "the loss jumped to" in told.detail["reason"]
        assert (trainer.step, trainer.position, trainer.num_roll_backs) == (STEPS, (STEPS + 2) * BATCH, 1)
    saved = check_samples(open_checkpoint(list_checkpoints(tmp_path)[-1]).manifest)
    assert saved.is_good, saved.problems
    assert f"positions {8 * BATCH} to {10 * BATCH} were left out by a roll-back, as it noted" in saved.finding


def test_a_lower_rate_sees_the_same_data(tmp_path: Path) -> None:
    found = train(tmp_path, policy(on_spike="lower_rate", rate_factor=0.25), lambda: Jumpy({10: 100.0}))
    for trainer, records in found:
        assert trainer.position == STEPS * BATCH
        rates = [each.lr for each in records if isinstance(each, StepRecord)]
        assert rates == pytest.approx([0.01] * 11 + [0.0025] * 6)
    reopened = open_checkpoint(list_checkpoints(tmp_path)[-1])
    trainer = build_trainer(make_config(), _solo())
    trainer.load_state(reopened)
    assert (trainer.rate_scale, trainer.num_roll_backs) == (0.25, 1)


def _solo() -> Communicator:
    return SoloCommunicator(torch.device("cpu"))


def test_a_spike_can_be_noted_or_end_the_run(tmp_path: Path) -> None:
    for _, records in train(tmp_path / "note", policy(on_spike="note"), lambda: Jumpy({10: 100.0})):
        assert steps(records) == list(range(1, STEPS + 1))
        assert event(records, "spike").step == 10
    with pytest.raises(RankFailedError) as caught:
        train(tmp_path / "stop", policy(on_spike="stop"), lambda: Jumpy({10: 100.0}))
    assert isinstance(caught.value.__cause__, TrainingError)
    assert "at step 10" in str(caught.value.__cause__)


def test_gradients_that_are_not_finite_send_the_run_back(tmp_path: Path) -> None:
    loss = lambda: Jumpy(dict.fromkeys((9, 10, 11), float("nan")))  # noqa: E731
    found = train(tmp_path, policy(on_nan="roll_back"), loss, make_config(max_bad_steps=3))
    for trainer, records in found:
        assert event(records, "roll_back").detail["skipped_samples"] == 3 * BATCH
        assert (trainer.step, trainer.position) == (STEPS, (STEPS + 3) * BATCH)
        assert trainer.bad_steps.num_in_a_row == 0


def test_a_run_goes_back_only_so_often(tmp_path: Path) -> None:
    always = policy(on_spike="lower_rate", max_roll_backs=2)
    with pytest.raises(RankFailedError, match=r"after the run went back recovery.max_roll_backs = 2 times"):
        train(tmp_path, always, lambda: Jumpy(dict.fromkeys(range(10, 100), 100.0)))


@pytest.mark.parametrize("step_s", [1e-9, 0.0003, 0.004, 0.099, 0.1, 0.3, 20.0])
def test_ranks_ask_one_another_ten_times_a_second_at_most_and_never_rarely(step_s: float) -> None:
    num_steps = next_ask(step_s, 7) - 7 + 1  # from one ask to the next
    assert 1 <= num_steps <= 1001
    assert num_steps * step_s >= 0.1 or num_steps > 1000
    assert (num_steps - 1) * step_s < 0.1


@pytest.mark.parametrize("asked", [0, 1])
def test_a_wish_of_one_rank_stops_all_after_the_same_step(asked: int) -> None:
    stopped: dict[int, int] = {}

    def rank(comm: Communicator) -> None:
        request, saved = StopRequest(), []

        def wish(trainer: Trainer, _: Any) -> None:
            if trainer.step == 3 and comm.rank == asked:
                request.ask(15)

        consensus = ConsensusHook(request, lambda trainer: saved.append(trainer.step), RecoveryConfig())
        trainer = build_trainer(make_config(steps=5000), comm, hooks=[wish, consensus])
        with pytest.raises(PreemptedError, match="the state is saved"):
            trainer.run()
        stopped[comm.rank] = trainer.step
        assert saved == [trainer.step]

    run_virtual(rank, 2)
    assert stopped[0] == stopped[1] > 3


@pytest.mark.parametrize("step", [STEPS - 1, STEPS])
def test_a_wish_at_the_end_of_a_run_lets_it_end(step: int) -> None:
    """It is heard behind the last step, or not at all: nothing is left to go on with."""

    def rank(comm: Communicator) -> None:
        request, saved = StopRequest(), []

        def wish(trainer: Trainer, _: Any) -> None:
            if trainer.step == step:
                request.ask(15)

        consensus = ConsensusHook(request, lambda trainer: saved.append(trainer.step), RecoveryConfig())
        trainer = build_trainer(make_config(steps=STEPS), comm, hooks=[wish, consensus])
        trainer.run()
        assert (trainer.step, saved) == (STEPS, [])

    run_virtual(rank, 2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
def test_on_cuda_a_sum_is_read_while_the_next_step_computes() -> None:
    values, stream = torch.tensor([1.0, 0.5, 6.0, 2.0], dtype=torch.float64, device="cuda"), torch.cuda.current_stream()
    pending = _PendingSum(3, 24, values, SoloCommunicator(values.device).all_reduce(values), stream.record_event())
    torch.cuda._sleep(1_000_000_000)  # the next step
    done = stream.record_event()
    assert pending.read() == [1.0, 0.5, 6.0, 2.0]
    assert not done.query()
