"""The moving average of parameters: what one process would have, on every rank its part of it."""

from __future__ import annotations

import functools
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from saved_runs import save_now

from paceline.checkpoint import open_checkpoint
from paceline.comm.base import Communicator
from paceline.comm.solo import SoloCommunicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.config import Config, config_from_dict
from paceline.errors import ConfigError
from paceline.train.assemble import build_trainer
from paceline.train.trainer import Trainer

DECAY = 0.75


@pytest.fixture(autouse=True)
def fast_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda _: None)


def make_config(ranks: int = 1, parallel: dict[str, Any] | None = None, **train: Any) -> Config:
    model = {"kind": "gpt", "layers": 1, "heads": 2, "width": 8, "context": 4, "tied": True, "dropout": 0.0}
    return config_from_dict(
        {
            "model": model,
            "data": {"kind": "synthetic_tokens", "samples": 32, "vocab_size": 11, "context": 4, "eval_fraction": 0.2},
            "train": {"steps": 4, "global_batch": 12, "dtype": "float64", "ema_decay": DECAY, **train},
            "parallel": {"ranks": ranks, **(parallel or {})},
        }
    )


def averaged(trainer: Trainer) -> dict[str, torch.Tensor]:
    """The whole average, on every rank."""
    assert trainer.parts.average is not None
    with trainer.parts.average.in_place():
        return trainer.parts.engine.full_state_dict()


@functools.cache
def alone() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """What a plain loop has after four steps: parameters, and their average by hand."""
    trainer = build_trainer(make_config(), SoloCommunicator(torch.device("cpu")))
    average = {name: value.clone() for name, value in trainer.parts.engine.full_state_dict().items()}
    for _ in trainer.steps():
        for name, value in trainer.parts.engine.full_state_dict().items():
            average[name] = DECAY * average[name] + (1 - DECAY) * value
    return trainer.parts.engine.full_state_dict(), average


@pytest.mark.parametrize(
    ("ranks", "parallel"),
    [pytest.param(2, {"strategy": "zero2"}, marks=pytest.mark.exhaustive), (3, {"strategy": "fsdp"})],
)
def test_ranks_average_what_they_hold_and_go_on_exactly(tmp_path: Path, ranks: int, parallel: dict[str, Any]) -> None:
    parameters, average = alone()

    def work(comm: Communicator) -> None:
        first, second = (build_trainer(make_config(ranks, parallel), comm) for _ in range(2))
        list(islice(first.steps(), 2))
        second.load_state(save_now(first, tmp_path))
        list(first.steps())
        list(second.steps())
        assert first.parts.average is not None
        held = sum(shard.tensor.numel() for shard in first.parts.average.shards())
        assert held == sum(parameter.numel() for parameter in first.parts.engine.parameters())
        ours, theirs = averaged(first), averaged(second)
        for name, value in average.items():
            torch.testing.assert_close(ours[name], value)
            assert torch.equal(ours[name], theirs[name]), name
        for name, value in first.parts.engine.full_state_dict().items():  # they are back in their place
            torch.testing.assert_close(value, parameters[name])

    run_virtual(work, ranks)
    checkpoint = open_checkpoint(tmp_path / "step-00000002")

    def other(comm: Communicator) -> dict[str, torch.Tensor]:
        trainer = build_trainer(make_config(comm.size), comm)
        trainer.load_state(checkpoint)
        list(trainer.steps())
        return averaged(trainer)

    for name, value in run_virtual(other, 2)[0].items():
        torch.testing.assert_close(value, average[name])


def test_the_average_is_evaluated_when_asked() -> None:
    def loss(**train: Any) -> tuple[float, Trainer]:
        trainer = build_trainer(make_config(**train), SoloCommunicator(torch.device("cpu")))
        list(trainer.steps())
        found = trainer.evaluate()
        assert found is not None
        return found.loss, trainer

    (plain, first), (of_average, second) = loss(), loss(ema_eval=True)
    assert plain != of_average
    first.parts.engine.load_full_state_dict(averaged(first))
    found = first.evaluate()
    assert found is not None
    assert found.loss == of_average
    states = first.parts.engine.full_state_dict(), averaged(second)
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_a_checkpoint_without_an_average_begins_one(tmp_path: Path) -> None:
    comm = SoloCommunicator(torch.device("cpu"))
    first = build_trainer(make_config(ema_decay=None), comm)
    list(islice(first.steps(), 2))
    second = build_trainer(make_config(), comm)
    second.load_state(save_now(first, tmp_path))
    found, parameters = averaged(second), first.parts.engine.full_state_dict()
    assert all(torch.equal(found[name], parameters[name]) for name in parameters)


def test_an_evaluation_needs_an_average() -> None:
    with pytest.raises(ConfigError, match=r"ema_eval = true without train\.ema_decay"):
        make_config(ema_decay=None, ema_eval=True)
