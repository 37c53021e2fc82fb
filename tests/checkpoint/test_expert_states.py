"""Checkpoints of mixtures: written by any experts' ranks, read by any others, the optimizer's state with the weights.

An expert is a slice of one logical tensor. Of what was saved at one number of ranks nothing may depend on it: each
slice is at its expert's place, with its own moments, and the next step is that of one process.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from trained_gpt import change_manifest
from typer.testing import CliRunner

from paceline.checkpoint import open_checkpoint
from paceline.checkpoint.tools.audit import audit
from paceline.checkpoint.tools.listing import compare
from paceline.checkpoint.writer import CheckpointWriter
from paceline.cli.app import app
from paceline.comm.virtual.communicator import VirtualCommunicator, run_virtual
from paceline.config import config_from_dict
from paceline.engines.tensor.layout import ExpertParts
from paceline.errors import CheckpointError, RankFailedError
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


@pytest.mark.some(2)
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


@pytest.mark.some(2)
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("first", ["experts", "shards of experts", "zero"])
def test_the_next_step_is_the_same_to_the_last_bit_at_the_same_ranks(first: str, kind: str, tmp_path: Path) -> None:
    path = saved(LAYOUTS[first], tmp_path / "first", kind)
    expected = run(config_of(LAYOUTS[first], kind), tmp_path / "through")
    found = run(config_of(LAYOUTS[first], kind), tmp_path / "second", path)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.some(1)
@pytest.mark.parametrize("kind", ["masters", "muon"])
@pytest.mark.parametrize(("first", "second"), [("experts", "an expert a rank"), ("shards of experts", "ddp")])
def test_masters_and_muons_state_move_with_their_experts(first: str, second: str, kind: str, tmp_path: Path) -> None:
    path = saved(LAYOUTS[first], tmp_path / "first", kind)
    again = carried(path, LAYOUTS[second], tmp_path / "second", kind)
    found = compare(open_checkpoint(path), open_checkpoint(again))
    assert (found.tensors, found.only_left, found.only_right, found.other_shape) == ((), (), (), ())


# Bugs of other projects and those that would be easy to make, planted.


def test_one_rank_s_experts_are_not_saved_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank says that its experts are the first ones: KempnerForge #202 kept those of one rank."""

    def of_the_first(parts: Any, name: str, region: Any) -> Any:
        split = parts.splits.get(name)
        if split is None:
            return region
        shape = (split.shape[0], *region.shape[1:])
        return replace(region, shape=shape, cuts=(*region.cuts, (0, split.spans(0, 2))))

    monkeypatch.setattr(ExpertParts, "region", of_the_first)
    with pytest.raises(RankFailedError, match=r"cannot write .*experts\.\w+: "):
        saved(LAYOUTS["experts"], tmp_path)
    assert not list(tmp_path.glob("checkpoints/step-*"))


def test_experts_of_one_rank_as_if_they_were_all_fit_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(ExpertParts, "region", lambda _, __, region: region)
        path = saved(LAYOUTS["experts"], tmp_path / "first")
    with pytest.raises(RankFailedError, match=r"experts\.first: \[2, 16, 8\] is saved, \[4, 16, 8\] is here"):
        run(config_of(LAYOUTS["one"]), tmp_path / "second", path)


def test_experts_that_no_file_has_are_not_left_at_random_values(tmp_path: Path) -> None:
    path = saved(LAYOUTS["experts"], tmp_path / "first")

    def drop(found: dict[str, Any]) -> None:
        found["tensors"]["model/layers.0.mlp.experts.first"]["pieces"].pop()

    change_manifest(path, drop)
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.experts\.first"):
        open_checkpoint(path)


def swapped(found: dict[str, Any], name: str) -> None:
    """Says of two ranks' pieces that each has what the other one has."""
    first, second = found["tensors"][name]["pieces"]
    first["file"], second["file"] = second["file"], first["file"]


@pytest.mark.parametrize(
    "name",
    ["model/layers.0.mlp.experts.first", "optimizer/layers.1.mlp.experts.last/exp_avg"],
    ids=["weights", "moments"],
)
def test_experts_and_moments_that_changed_places_show(name: str, tmp_path: Path) -> None:
    """Both are whole to every check of sizes: the comparison and the next step tell."""
    path = saved(LAYOUTS["experts"], tmp_path / "first")
    right = run(config_of(LAYOUTS["one"]), tmp_path / "right", path)
    moved = carried(path, LAYOUTS["an expert a rank"], tmp_path / "moved")
    assert not compare(open_checkpoint(path), open_checkpoint(moved)).tensors
    change_manifest(path, lambda found: swapped(found, name))
    assert [each.name for each in compare(open_checkpoint(path), open_checkpoint(moved)).tensors] == [name]
    wrong = run(config_of(LAYOUTS["one"]), tmp_path / "wrong", path)
    layer = name.partition("/")[2].removesuffix("/exp_avg")
    assert float((wrong[layer] - right[layer]).abs().max()) > 1e-6


def test_tools_show_reshard_and_compare_a_mixture(tmp_path: Path) -> None:
    path = saved(LAYOUTS["shards of experts"], tmp_path / "first")

    def call(*words: object) -> Any:
        result = CliRunner().invoke(app, ["checkpoint", *map(str, words), "--json"])
        assert result.exit_code == 0, (words, result.output, result.exception)
        return json.loads(result.output)

    shown = {each["name"]: each for each in call("inspect", path, "--tensors", "*experts*")["tensors"]}
    assert shown["model/layers.0.mlp.experts.first"]["shape"] == [EXPERTS, 16, 8]
    assert call("verify", path)["is_good"]
    for place, options in enumerate((("--ranks", 3), ("--ranks", 4, "--pipeline", 2), ("--ranks", 2, "--tensor", 2))):
        call("reshard", path, tmp_path / f"moved-{place}", *options)
        assert call("diff", path, tmp_path / f"moved-{place}")["is_same_state"]
    out = tmp_path / "whole.safetensors"
    call("export", path, out, "--optimizer")
    call("import", out, tmp_path / "start")
    assert call("verify", tmp_path / "start")["is_good"]
    names = [each["name"] for each in call("inspect", tmp_path / "start", "--tensors", "*experts*")["tensors"]]
    assert sorted(names) == sorted(shown)
