"""A checkpoint of any mesh and strategy, read by any other: each tensor is whole, and each rank gets its part of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from saved_runs import save_now

from paceline.checkpoint import Checkpoint, open_checkpoint, verify_checkpoint
from paceline.comm.base import Communicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.config import Config, config_from_dict
from paceline.train.assemble import build_trainer
from paceline.train.trainer import Trainer

MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "ddp 3": (3, {}),
    "zero1 2": (2, {"strategy": "zero1"}),
    "zero2 3": (3, {"strategy": "zero2"}),
    "fsdp 4": (4, {"strategy": "fsdp"}),
    "hybrid 2 x 2": (4, {"strategy": "hybrid", "shard_ranks": 2}),
    "pipeline 2 x tensor 2": (4, {"pipeline": 2, "tensor": 2}),
    "tensor 2 x fsdp 2": (4, {"tensor": 2, "strategy": "fsdp"}),
    "pipeline 2 x zero2 2": (4, {"pipeline": 2, "strategy": "zero2"}),
}


@pytest.fixture(autouse=True)
def fast_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda _: None)


def make_config(precision: str = "fp32", **parallel: Any) -> Config:
    """A tied model whose parts do not divide evenly, and that a step has given moments."""
    model = {"kind": "gpt", "layers": 2, "heads": 2, "width": 12, "context": 4, "tied": True}
    return config_from_dict(
        {
            "model": {**model, "vocab_size": 17},
            "data": {"kind": "synthetic_tokens", "samples": 48, "vocab_size": 17, "context": 4},
            "train": {"steps": 2, "global_batch": 24, "accumulate": 2, "precision": precision},
            "optim": {"lr": 0.01},
            "parallel": parallel,
        }
    )


def step(trainer: Trainer) -> None:
    next(trainer.steps())


def whole_state(trainer: Trainer) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    engine = trainer.parts.engine
    return engine.full_state_dict(), engine.full_optimizer_state(trainer.parts.optimizer)


def put_together(checkpoint: Checkpoint) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Reads the parameters of a checkpoint and what its optimizer keeps, each tensor whole."""
    model, optimizer = (
        {name: checkpoint.read(prefix + name) for name in checkpoint.shapes(prefix)}
        for prefix in ("model/", "optimizer/")
    )
    return model, optimizer


def assert_holds(checkpoint: Any, model: dict[str, torch.Tensor], optimizer: dict[str, Any]) -> None:
    """The checkpoint, put together, is what the engines say that they have together."""
    parameters, saved = checkpoint
    assert set(parameters) <= set(model)  # a tied parameter has one name here
    for name, value in parameters.items():
        assert torch.equal(value, model[name]), name
    moments = sorted(float(state["exp_avg"].double().sum()) for state in optimizer["state"].values())
    ours = [value for name, value in saved.items() if name.endswith("/exp_avg")]
    assert sorted(float(each.double().sum()) for each in ours) == pytest.approx(moments, abs=1e-12)
    assert len(saved) == 2 * len(moments)


SOME = ["ddp 3", "fsdp 4", "pipeline 2 x tensor 2"]
PAIRS = [
    pytest.param(before, after, marks=() if before in SOME else pytest.mark.exhaustive)
    for before, after in zip(MESHES, [*list(MESHES)[4:], *list(MESHES)[:4]], strict=True)
]


@pytest.mark.some(1)
@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_what_one_mesh_saves_another_reads(before: str, after: str, tmp_path: Path) -> None:
    ranks, parallel = MESHES[before]

    def save(comm: Communicator) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        trainer = build_trainer(make_config(ranks=ranks, **parallel), comm)
        step(trainer)
        save_now(trainer, tmp_path)
        return whole_state(trainer)

    model, optimizer = run_virtual(save, ranks)[0]
    checkpoint = open_checkpoint(tmp_path / "step-00000001")
    verify_checkpoint(checkpoint.path)
    assert checkpoint.manifest.world == ranks
    whole = put_together(checkpoint)
    assert_holds(whole, model, optimizer)
    others, other_parallel = MESHES[after]

    def load(comm: Communicator) -> None:
        trainer = build_trainer(make_config(ranks=others, **other_parallel), comm)
        trainer.load_state(open_checkpoint(checkpoint.path))
        found, moments = whole_state(trainer)
        assert all(torch.equal(found[name], model[name]) for name in model)
        assert_holds(whole, found, moments)
        step(trainer)

    run_virtual(load, others)


def test_what_all_ranks_hold_is_written_once_and_shared_out(tmp_path: Path) -> None:
    def save(comm: Communicator) -> int:
        trainer = build_trainer(wide(ranks=3), comm)
        step(trainer)
        save_now(trainer, tmp_path)
        return sum(p.numel() * p.element_size() for p in trainer.parts.engine.parameters())

    parameters = run_virtual(save, 3)[0]
    manifest = open_checkpoint(tmp_path / "step-00000001").manifest
    sizes = {
        rank: sum(file.num_bytes for name, file in manifest.files.items() if name.startswith(f"rank-{rank:05d}.f"))
        for rank in range(3)
    }
    assert sum(sizes.values()) < 3 * parameters * 1.1  # parameters and two moments
    assert max(sizes.values()) < 1.2 * min(sizes.values())


def wide(**parallel: Any) -> Config:
    return config_from_dict(
        {
            "model": {"kind": "mlp", "hidden_dim": 256},
            "data": {"kind": "synthetic_classification", "samples": 24, "features": 64, "classes": 8},
            "train": {"steps": 2, "global_batch": 12},
            "parallel": parallel,
        }
    )


def test_masters_of_half_precision_are_what_is_saved(tmp_path: Path) -> None:
    """Whoever computes in bf16, or in fp32, goes on from the same masters."""

    def save(comm: Communicator) -> dict[str, torch.Tensor]:
        trainer = build_trainer(make_config("bf16_master", ranks=2, strategy="zero2"), comm)
        step(trainer)
        save_now(trainer, tmp_path)
        return trainer.parts.engine.full_state_dict()

    masters = run_virtual(save, 2)[0]

    def load(comm: Communicator, precision: str, strategy: str) -> None:
        trainer = build_trainer(make_config(precision, ranks=comm.size, strategy=strategy), comm)
        trainer.load_state(open_checkpoint(tmp_path / "step-00000001"))
        found = trainer.parts.engine.full_state_dict()
        assert all(torch.equal(found[name], masters[name]) for name in masters)
        held = next(iter(trainer.parts.engine.module.parameters()))
        if strategy == "ddp":  # the module's own parameters follow
            assert held.dtype is (torch.bfloat16 if precision == "bf16_master" else torch.float32)
            assert torch.equal(held.float(), found[next(iter(masters))].to(held.dtype).float())

    run_virtual(lambda comm: load(comm, "bf16_master", "ddp"), 1)
    run_virtual(lambda comm: load(comm, "fp32", "fsdp"), 3)
