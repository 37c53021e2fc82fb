"""Runs that are fed on a GPU: the numbers of a run that is not, and exact resumes; bytes and channels last train."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kept_records import Kept
from saved_runs import losses_until

from paceline.checkpoint import find_checkpoint, open_checkpoint
from paceline.comm.base import Communicator
from paceline.comm.solo import SoloCommunicator
from paceline.config import CheckpointConfig, Config, config_from_dict
from paceline.data.loader import EvalLoader, TrainLoader
from paceline.train import assemble
from paceline.train.assemble import build_trainer, loader_options
from paceline.train.survive.hooks import Saver
from paceline.train.trainer import Trainer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

STEPS = 8


def solo() -> Communicator:
    return SoloCommunicator(torch.device("cuda", 0))


def tokens() -> Config:
    return config_from_dict(
        {
            "model": {"kind": "gpt", "layers": 2, "heads": 2, "width": 32, "context": 16, "dropout": 0.1},
            "data": {"kind": "synthetic_tokens", "samples": 100, "context": 16, "vocab_size": 64},
            "train": {"steps": STEPS, "global_batch": 12, "accumulate": 3},
        }
    )


def images(strategy: str, **data: Any) -> Config:
    sizes = {"kind": "synthetic_images", "samples": 40, "size": 16, "classes": 3, **data}
    return config_from_dict(
        {
            "model": {"kind": "resnet", "width": 16, "stem": "small"},
            "data": sizes,
            "train": {"steps": STEPS, "global_batch": 8, "precision": "bf16"},
            "optim": {"kind": "sgd", "lr": 0.02},
            "parallel": {"strategy": strategy},
            "memory": {"offload": [] if strategy == "ddp" else ["optimizer"]},  # else one rank has no shards
        }
    )


def losses(trainer: Trainer, saver: Saver | None = None, end: int = STEPS) -> list[float]:
    found = losses_until(trainer, end, saver)
    evaluation = trainer.evaluate()
    assert evaluation is not None
    return [*found, evaluation.loss]


def unfed(monkeypatch: pytest.MonkeyPatch) -> None:
    def plain(*args: Any) -> Any:
        options, _ = loader_options(*args)
        return replace(options, device=None, workers=0), None

    monkeypatch.setattr(assemble, "loader_options", plain)


def test_feeding_changes_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    fed = losses(build_trainer(tokens(), solo()))
    unfed(monkeypatch)
    # Kernels that add up in any order differ in the last bits; another batch, or dropout, would differ in the first.
    assert fed == pytest.approx(losses(build_trainer(tokens(), solo())), rel=1e-5)


def test_a_run_that_is_fed_resumes_exactly(tmp_path: Path) -> None:
    whole = losses(build_trainer(tokens(), solo()))
    saver = Saver(tmp_path, CheckpointConfig(every_steps=1, asynchronous=False))
    losses(build_trainer(tokens(), solo()), saver, end=3)
    resumed = build_trainer(tokens(), solo())
    resumed.load_state(open_checkpoint(find_checkpoint("auto", tmp_path)))
    assert losses(resumed) == pytest.approx(whole[3:], rel=1e-5)


def test_batches_are_on_the_device_and_the_choice_is_recorded() -> None:
    sink = Kept()
    trainer = build_trainer(tokens(), solo(), sink=sink)
    parts = trainer.parts
    assert isinstance(parts.loader, TrainLoader)
    assert isinstance(parts.eval_loader, EvalLoader)
    step = next(iter(parts.loader.steps(0, 1)))
    assert all(tensor.is_cuda for microbatch in step.microbatches for tensor in microbatch or ())
    assert all(tensor.is_cuda for batch in parts.eval_loader for tensor in batch or ())
    trainer.run()
    (event,) = [event for event in sink.events if event.name == "loader"]
    assert event.detail["workers"] == 0
    assert "in memory" in event.detail["reason"]


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])
def test_bytes_train_with_channels_last(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = build_trainer(images(strategy, dtype="uint8"), solo())
    module = trainer.parts.engine.module
    if strategy == "ddp":
        weights = [each for each in module.parameters() if each.ndim == 4]
        assert all(each.is_contiguous(memory_format=torch.channels_last) for each in weights)
    last = losses(trainer)
    first = losses(build_trainer(images(strategy, dtype="uint8").with_values("model", channels_last=False), solo()))
    floats = losses(build_trainer(images(strategy), solo()))
    assert last == pytest.approx(first, rel=0.1)
    assert last[:3] == pytest.approx(floats[:3], rel=0.1)
    unfed(monkeypatch)
    assert losses(build_trainer(images(strategy, dtype="uint8"), solo())) == pytest.approx(last, rel=0.1)
