"""Images of bytes: normalised on the device as the data ask for, for every loss and every way to train."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from paceline.comm.solo import SoloCommunicator
from paceline.config import config_from_dict
from paceline.data.datasets import DataShape
from paceline.data.registry import build_data
from paceline.errors import DataError
from paceline.train.assemble import build_trainer
from paceline.train.loss import Normalise, build_loss
from paceline.verify.case import ConfigCase, Settings
from paceline.verify.certificate import certify

IMAGES = torch.arange(2 * 3 * 4 * 4, dtype=torch.uint8).view(2, 3, 4, 4)
MEAN, STD = (10.0, 20.0, 30.0), (2.0, 4.0, 8.0)


def by_hand(images: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    mean, std = (torch.tensor(each, dtype=torch.float64).view(1, 3, 1, 1) for each in (MEAN, STD))
    return ((images.double() - mean) / std).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_only_images_of_bytes_are_changed(dtype: torch.dtype) -> None:
    mask, floats = torch.ones(2, 4, 4, dtype=torch.uint8), torch.ones(2, 3, 4, 4)
    images, same_mask, same_floats, name = Normalise(MEAN, STD)((IMAGES, mask, floats, "name"), dtype)
    assert images.dtype == dtype
    assert torch.allclose(images, by_hand(IMAGES, dtype), atol=1e-5)
    assert same_mask is mask
    assert same_floats is floats
    assert name == "name"


def test_one_number_serves_all_channels_and_strides_stay() -> None:
    last = IMAGES.contiguous(memory_format=torch.channels_last)
    found = Normalise([128.0], [32.0])(last, torch.float32)
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(found, (IMAGES.float() - 128) / 32)


def test_images_of_other_channels_are_refused() -> None:
    with pytest.raises(DataError, match="images of 4 channels, and 3 numbers"):
        Normalise(MEAN, STD)(IMAGES.permute(0, 3, 1, 2), torch.float32)


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(48, 4, dtype=dtype)
        self.seen: list[torch.Tensor] = []

    def forward(self, images: torch.Tensor) -> Any:
        self.seen.append(images)
        return self.linear(images.flatten(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_loss_gives_the_model_normalised_images_in_its_dtype(dtype: torch.dtype) -> None:
    shape = DataShape(kind="classes", channels=3, size=4, classes=4, mean=MEAN, std=STD)
    loss, plain = build_loss("auto", shape, dtype=dtype), build_loss("auto", DataShape(kind="classes", classes=4))
    model, targets = Model(dtype), torch.tensor([1, 3])
    assert loss.elements_per_sample == plain.elements_per_sample == 1.0
    expected = plain(model, (by_hand(IMAGES, dtype), targets))
    assert torch.allclose(loss(model, (IMAGES, targets)).total, expected.total)
    assert loss.score(model, (IMAGES, targets)).correct is not None
    assert all(each.dtype == dtype for each in model.seen)


def test_a_loss_of_ones_own_gets_them_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_bytes_loss.py").write_text(
        "def loss(model, batch):\n    images, targets = batch\n    return model(images).sum(), len(targets)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    loss = build_loss("own_bytes_loss:loss", DataShape(kind="custom", mean=MEAN, std=STD))
    value = loss(lambda images: images, (IMAGES, torch.tensor([0, 1])))
    assert torch.allclose(value.total, by_hand(IMAGES).sum())


@pytest.mark.parametrize(
    "asked",
    [
        {"mean": (1.0,)},
        {"std": (1.0,)},
        {"mean": (1.0, 2.0), "std": (1.0,)},
        {"mean": (1.0,), "std": (0.0,)},
        {"mean": 128.0, "std": 32.0},
        {"mean": (), "std": ()},
        {"mean": ("a",), "std": ("b",)},
        {"mean": (1.0, 2.0), "std": (1.0, 2.0), "channels": 3},
    ],
)
def test_a_shape_that_says_half_of_it_is_refused(asked: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="a mean and a positive deviation"):
        DataShape(kind="custom", **asked)


class BytesOfMyOwn:
    def __init__(self) -> None:
        self.shape = {"kind": "classes", "channels": 3, "size": 4, "classes": 2, "mean": [1, 2, 3], "std": [4, 5, 6]}

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return torch.full((3, 4, 4), index, dtype=torch.uint8), index % 2


def test_a_users_data_set_says_it_in_its_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.imports.import_from_path", lambda *_: BytesOfMyOwn)
    config = config_from_dict(
        {
            "model": {"kind": "mlp", "hidden_dim": 4},
            "data": {"kind": "factory", "factory": "mine:BytesOfMyOwn", "eval_fraction": 0.0},
        }
    )
    data = build_data(config.data, None, 0)
    assert data.shape.mean == [1, 2, 3]


@pytest.mark.parametrize("dtype", ["uint8", "float32"])
def test_a_run_on_bytes_learns_as_one_on_floats(dtype: str) -> None:
    config = config_from_dict(
        {
            "model": {"kind": "resnet", "depth": 18, "width": 4, "stem": "small", "norm": "group"},
            "data": {"kind": "synthetic_images", "samples": 24, "size": 8, "classes": 3, "dtype": dtype},
            "train": {"steps": 4, "global_batch": 8},
            "optim": {"kind": "sgd", "lr": 0.1},
        }
    )
    trainer = build_trainer(config, SoloCommunicator(torch.device("cpu")))
    losses = [result.loss for result in trainer.steps()]
    evaluation = trainer.evaluate()
    assert evaluation is not None
    # Both start at the same weights, and see the same images but for rounding.
    assert losses[0] == pytest.approx(_FIRST_LOSS.setdefault("loss", losses[0]), rel=0.01)
    assert np.isfinite([*losses, evaluation.loss]).all()


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.exhaustive), "bf16_master"])
def test_a_model_that_is_compiled_whole_normalises_what_it_trains_on(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))

    def run(compiles: str) -> tuple[list[float | None], float]:
        config = config_from_dict(
            {
                "model": {"kind": "mlp", "hidden_dim": 4, "dropout": 0.0, "compile": compiles},
                "data": {"kind": "synthetic_images", "samples": 24, "size": 4, "classes": 3, "dtype": "uint8"},
                "train": {"steps": 3, "global_batch": 8, "precision": precision},
                "optim": {"kind": "sgd", "lr": 0.1},
            }
        )
        trainer = build_trainer(config, SoloCommunicator(torch.device("cpu")))
        called = count_calls(trainer.parts.loss, monkeypatch)
        losses = [result.loss for result in trainer.steps()]
        assert len(called) == (0 if compiles == "whole" else 3)
        evaluation = trainer.evaluate()
        assert evaluation is not None
        return losses, evaluation.loss

    plain, whole = run("none"), run("whole")
    assert whole[0] == pytest.approx(plain[0], rel=1e-5)
    assert whole[1] == pytest.approx(plain[1], rel=1e-5)


def count_calls(loss: Any, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Counts how often a loss normalises a batch itself."""
    called: list[torch.Tensor] = []
    inner = loss._normalise

    def normalise(batch: Any, dtype: torch.dtype) -> Any:
        called.append(batch[0])
        return inner(batch, dtype)

    monkeypatch.setattr(loss, "_normalise", normalise)
    return called


_FIRST_LOSS: dict[str, float] = {}


def test_verification_compares_runs_on_the_same_floats() -> None:
    config = config_from_dict(
        {
            "model": {"kind": "mlp", "hidden_dim": 4, "dropout": 0.0},
            "data": {"kind": "synthetic_images", "samples": 12, "size": 2, "classes": 3, "dtype": "uint8"},
            "train": {"dtype": "float64"},
        }
    )
    case = ConfigCase(config, batch=4)
    images, targets = case.make_batch(0)
    assert images.dtype == torch.float64
    assert images.abs().max() < 10
    assert case.make_loss()(case.make_model(), (images, targets)).total.isfinite()
    found = certify(case, Settings.of(ranks=2, steps=2))
    assert found.passed, found.divergence
