"""Checkpoints of CUDA tensors: copied to pinned memory in the background, and gone on from bit by bit."""

from __future__ import annotations

import threading
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.checkpoint import CheckpointWriter, State, open_checkpoint, verify_checkpoint
from paceline.checkpoint.storage import LocalFiles
from paceline.comm.base import Communicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.config import CheckpointConfig, Config, config_from_dict
from paceline.shards import Shard, whole_region
from paceline.train.assemble import build_trainer
from paceline.train.survive.hooks import Saver
from paceline.train.trainer import Trainer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture
def held_writes(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """No byte is written until the event is set."""
    may_write, write = threading.Event(), LocalFiles.write

    def wait_and_write(self: LocalFiles, path: Path, chunks: Any) -> Any:
        assert may_write.wait(120)
        return write(self, path, chunks)

    monkeypatch.setattr(LocalFiles, "write", wait_and_write)
    return may_write


def make_config(ranks: int, strategy: str, **train: Any) -> Config:
    """A model whose kernels give the same bits every time: matrix products, no attention."""
    return config_from_dict(
        {
            "model": {"kind": "mlp", "hidden_dim": 64, "dropout": 0.1},
            "data": {"kind": "synthetic_classification", "samples": 48, "features": 16, "classes": 5},
            "train": {"steps": 6, "global_batch": 12, **train},
            "optim": {"lr": 0.01, "clip_norm": 1.0},
            "parallel": {"ranks": ranks, "strategy": strategy, "device": "cuda"},
        }
    )


def whole_state(trainer: Trainer) -> dict[str, torch.Tensor]:
    engine, optimizer = trainer.parts.engine, trainer.parts.optimizer
    moments = engine.full_optimizer_state(optimizer)["state"]
    named = {f"{number} {key}": value for number, by_key in moments.items() for key, value in by_key.items()}
    return {**engine.full_state_dict(), **{name: each.cpu() for name, each in named.items() if torch.is_tensor(each)}}


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def test_the_copy_is_pinned_and_of_the_step(tmp_path: Path, held_writes: threading.Event) -> None:
    def work(comm: Communicator) -> None:
        values = torch.arange(1_000_000.0, device=comm.device)
        shard = Shard(name="model/w", region=whole_region(values.shape), tensor=values)
        writer = CheckpointWriter(tmp_path, comm)
        state = State(step=1, position=0, shards=[shard])
        assert writer.reserve(state)
        writer.save(state, in_background=True)
        assert writer._stage.buffer.is_pinned()
        for _ in range(50):
            values.add_(1.0)
        held_writes.set()
        writer.finish()

    run_virtual(work, 1, device="cuda")
    path = tmp_path / "step-00000001"
    verify_checkpoint(path)
    assert torch.equal(open_checkpoint(path).read("model/w"), torch.arange(1_000_000.0))


@pytest.mark.parametrize(
    ("ranks", "strategy", "train"),
    [(1, "ddp", {"precision": "bf16_master"}), (2, "fsdp", {}), (2, "zero2", {"precision": "fp16"})],
)
def test_a_run_goes_on_from_what_was_saved_while_it_trained(
    tmp_path: Path, held_writes: threading.Event, ranks: int, strategy: str, train: dict[str, Any]
) -> None:
    """Steps 4 to 6 are trained before a byte of step 3 is written."""
    config = make_config(ranks, strategy, **train)

    def work(comm: Communicator) -> None:
        saver = Saver(tmp_path, CheckpointConfig(every_steps=100, asynchronous=True, keep=99))
        first, second = build_trainer(config, comm), build_trainer(config, comm)
        steps = first.steps()
        list(islice(steps, 3))
        at_save = whole_state(first)
        saver.save(first, "asked")
        list(steps)
        first.flush(wait=True)
        held_writes.set()
        saver.finish()
        second.load_state(open_checkpoint(tmp_path / "step-00000003"))
        assert_same(whole_state(second), at_save)
        list(second.steps())
        second.flush(wait=True)
        assert_same(whole_state(second), whole_state(first))

    run_virtual(work, ranks, device="cuda")
    verify_checkpoint(tmp_path / "step-00000003")


def test_what_a_gpu_saved_other_ranks_on_it_read(tmp_path: Path) -> None:
    def save(comm: Communicator) -> dict[str, torch.Tensor]:
        trainer = build_trainer(make_config(2, "fsdp"), comm)
        list(islice(trainer.steps(), 2))
        Saver(tmp_path, CheckpointConfig(keep=99, asynchronous=False)).save(trainer, "asked")
        return whole_state(trainer)

    saved = run_virtual(save, 2, device="cuda")[0]

    def load(comm: Communicator) -> dict[str, torch.Tensor]:
        trainer = build_trainer(make_config(3, "zero2"), comm)
        trainer.load_state(open_checkpoint(tmp_path / "step-00000002"))
        return trainer.parts.engine.full_state_dict()

    for found in run_virtual(load, 3, device="cuda"):
        assert all(torch.equal(found[name], saved[name]) for name in found)
