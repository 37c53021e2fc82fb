"""Checkpoints of mixtures: written by any experts' ranks, read by any others, the optimizer's state with the weights.

An expert is a slice of one logical tensor. Of what was saved at one number of ranks nothing may depend on it: each
slice is at its expert's place, with its own moments, and the next step is that of one process.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from paceline.checkpoint import open_checkpoint
from paceline.checkpoint.find import verify_checkpoint
from paceline.checkpoint.manifest import Manifest
from paceline.checkpoint.read import Checkpoint
from paceline.checkpoint.tools.audit import audit
from paceline.checkpoint.tools.listing import compare
from paceline.checkpoint.writer import CheckpointWriter
from paceline.cli.app import app
from paceline.comm.virtual.communicator import VirtualCommunicator, run_virtual
from paceline.config import config_from_dict
from paceline.engines.tensor.layout import ExpertParts
from paceline.errors import CheckpointError
from paceline.run.worker import make_hooks
from paceline.train.assemble import build_trainer
from paceline.train.survive.recovery import StopRequest

EXPERTS, SAVED, STEPS = 4, 2, 3
MODEL: dict[str, Any] = {"kind": "gpt", "layers": 2, "heads": 2, "width": 8, "mlp_width": 8, "context": 8}
MODEL |= {"experts": EXPERTS, "active": 2, "shared_experts": 1}
OPTIMIZERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "adamw": ({"kind": "adamw", "lr": 0.01}, {"dtype": "float64"}),
    "masters": ({"kind": "adamw", "lr": 0.01}, {"precision": "bf16_master"}),
    "muon": ({"kind": "muon", "lr": 0.01}, {"dtype": "float64"}),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {"ranks": 1},
    "ddp": {"ranks": 2, "strategy": "ddp"},
    "experts": {"ranks": 2, "strategy": "ddp", "expert": 2},
    "an expert a rank": {"ranks": 4, "strategy": "fsdp", "expert": 4},
    "shards of experts": {"ranks": 4, "strategy": "fsdp", "expert": 2},
    "zero": {"ranks": 4, "strategy": "zero2", "expert": 2},
    "stages": {"ranks": 4, "strategy": "ddp", "pipeline": 2, "expert": 2},
    "tensor": {"ranks": 4, "strategy": "fsdp", "tensor": 2, "expert": 2},
}


def config_of(layout: dict[str, Any], kind: str = "adamw", steps: int = STEPS, **model: Any) -> Any:
    optim, train = OPTIMIZERS[kind]
    values = {
        "name": "run",
        "model": {**MODEL, **model},
        "data": {"kind": "synthetic_tokens", "samples": 32, "vocab_size": 16, "context": 8},
        "train": {"steps": steps, "global_batch": 8, "seed": 3, **train},
        "optim": optim,
        "parallel": {**layout, "device": "cpu"},
        "comm": {"backend": "virtual"},
        "checkpoint": {"every_steps": SAVED},
    }
    return config_from_dict(values)


def run(config: Any, folder: Path, start: Path | None = None) -> dict[str, torch.Tensor]:
    """Trains to the end, from a checkpoint if there is one; returns the weights of the last step."""

    def work(comm: VirtualCommunicator) -> dict[str, torch.Tensor]:
        trainer = build_trainer(config, comm, hooks=make_hooks(config, folder, StopRequest()))
        if start is not None:
            trainer.load_state(open_checkpoint(start))
        trainer.run()
        return {name: value.clone() for name, value in trainer.parts.engine.full_state_dict().items()}

    return run_virtual(work, config.parallel.ranks)[0]


def saved(layout: dict[str, Any], folder: Path, kind: str = "adamw", **model: Any) -> Path:
    """Returns the checkpoint of a run before its last step."""
    run(config_of(layout, kind, SAVED, **model), folder)
    return folder / "checkpoints" / f"step-{SAVED:08d}"


def carried(start: Path, layout: dict[str, Any], folder: Path, kind: str = "adamw") -> Path:
    """Returns what other ranks save of a checkpoint that they have read."""
    config = config_of(layout, kind)

    def work(comm: VirtualCommunicator) -> None:
        trainer = build_trainer(config, comm)
        trainer.load_state(open_checkpoint(start))
        CheckpointWriter(folder, comm).save(trainer.collect_state())

    run_virtual(work, config.parallel.ranks)
    return folder / f"step-{SAVED:08d}"


@pytest.mark.some(4)
@pytest.mark.parametrize("second", LAYOUTS)
@pytest.mark.parametrize("first", LAYOUTS)
def test_a_run_goes_on_at_other_numbers_of_experts_ranks(first: str, second: str, tmp_path: Path) -> None:
    path = saved(LAYOUTS[first], tmp_path / "first")
    assert audit(path).is_good
    whole = open_checkpoint(path).manifest.tensors
    for name in ("model/layers.0.mlp.experts.first", "optimizer/layers.0.mlp.experts.first/exp_avg"):
        assert whole[name].shape == (EXPERTS, 16, 8)
    alone = run(config_of(LAYOUTS["one"]), tmp_path / "alone")
    found = run(config_of(LAYOUTS[second]), tmp_path / "second", path)
    torch.testing.assert_close(found, alone, rtol=1e-10, atol=1e-10)


@pytest.mark.some(3)
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("first", ["experts", "shards of experts", "zero"])
def test_the_next_step_is_the_same_to_the_last_bit_at_the_same_ranks(first: str, kind: str, tmp_path: Path) -> None:
    path = saved(LAYOUTS[first], tmp_path / "first", kind)
    expected = run(config_of(LAYOUTS[first], kind), tmp_path / "through")
    found = run(config_of(LAYOUTS[first], kind), tmp_path / "second", path)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.some(2)
@pytest.mark.parametrize("kind", ["masters", "muon"])
@pytest.mark.parametrize(("first", "second"), [("experts", "an expert a rank"), ("shards of experts", "ddp")])
def test_masters_and_muons_state_move_with_their_experts(first: str, second: str, kind: str, tmp_path: Path) -> None:
    path = saved(LAYOUTS[first], tmp_path / "first", kind)
    again = carried(path, LAYOUTS[second], tmp_path / "second", kind)
    found = compare(open_checkpoint(path), open_checkpoint(again))
    assert not (found.tensors or found.only_left or found.only_right or found.other_shape)
