"""Channels last: the same run within rounding under every strategy, and checkpoints that either layout reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from saved_runs import losses_until

from paceline.checkpoint import find_checkpoint, open_checkpoint
from paceline.comm.base import Communicator
from paceline.comm.solo import SoloCommunicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.config import CheckpointConfig, Config, config_from_dict, layout_of
from paceline.train.assemble import build_trainer, keeps_channels_last
from paceline.train.survive.hooks import Saver

STEPS = 2


def config(channels_last: Any, **parallel: Any) -> Config:
    return config_from_dict(
        {
            "model": {"kind": "resnet", "width": 4, "stem": "small", "norm": "group", "channels_last": channels_last},
            "data": {"kind": "synthetic_images", "samples": 16, "size": 4, "classes": 3, "eval_fraction": 0.0},
            "train": {"steps": STEPS, "global_batch": 4, "dtype": "float64"},
            "optim": {"kind": "sgd", "lr": 0.05, "momentum": 0.9},
            "parallel": parallel,
        }
    )


@pytest.mark.some(1)  # the others go on in the other order below
@pytest.mark.parametrize("strategy", ["fsdp", "ddp", "zero1"])
def test_every_strategy_computes_the_same(strategy: str) -> None:
    def run(comm: Communicator, channels_last: bool) -> list[float]:
        trainer = build_trainer(config(channels_last, ranks=2, strategy=strategy), comm)
        return losses_until(trainer, STEPS)

    last, first = (run_virtual(lambda comm, how=how: run(comm, how), 2) for how in (True, False))
    for one, other in zip(last, first, strict=True):
        assert one == pytest.approx(other, rel=1e-9)


def test_parameters_lie_in_that_order() -> None:
    model = build_trainer(config(True), SoloCommunicator(torch.device("cpu"))).parts.engine.module
    weights = [each for each in model.parameters() if each.ndim == 4]
    assert weights
    assert all(each.is_contiguous(memory_format=torch.channels_last) for each in weights)


@pytest.mark.some(1)
@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
@pytest.mark.parametrize(("before", "after"), [(True, False), (False, True)])
def test_a_run_goes_on_in_the_other_order(
    before: bool, after: bool, strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.fsync", lambda _: None)
    comm = SoloCommunicator(torch.device("cpu"))
    whole = losses_until(build_trainer(config(before, strategy=strategy), comm), STEPS)
    saver = Saver(tmp_path, CheckpointConfig(every_steps=1, asynchronous=False))
    losses_until(build_trainer(config(before, strategy=strategy), comm), 1, saver)
    resumed = build_trainer(config(after, strategy=strategy), comm)
    resumed.load_state(open_checkpoint(find_checkpoint("auto", tmp_path)))
    assert losses_until(resumed, STEPS) == pytest.approx(whole[1:], rel=1e-9)


@pytest.mark.parametrize(
    ("asked", "precision", "device", "expected"),
    [
        ("auto", "bf16", "cuda", True),
        ("auto", "bf16_master", "cuda", True),
        ("auto", "fp32", "cuda", False),
        ("auto", "bf16", "cpu", False),
        (True, "fp32", "cpu", True),
        (False, "bf16", "cuda", False),
    ],
)
def test_auto_is_for_half_precision_on_cuda(asked: Any, precision: str, device: str, expected: bool) -> None:
    made = config(asked).with_values("train", precision=precision, dtype="float32")
    assert keeps_channels_last(made, layout_of(made), torch.device(device)) is expected


def test_other_models_have_none() -> None:
    made = config_from_dict({"model": {"kind": "mlp"}, "data": {"kind": "digits"}})
    assert not keeps_channels_last(made, layout_of(made), torch.device("cuda"))
