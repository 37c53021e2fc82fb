"""Snapshots that are taken while training goes on are those of their step, and a run goes on from them exactly."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.checkpoint import open_checkpoint, verify_checkpoint
from paceline.checkpoint.storage import snapshots_in
from paceline.comm.base import Communicator
from paceline.comm.control.kept import ROOT, Kept
from paceline.comm.control.wire import Address
from paceline.comm.virtual.communicator import run_virtual
from paceline.config import Config, config_from_dict
from paceline.config.sections import RecoveryConfig
from paceline.records.event_words import ELSEWHERE
from paceline.train.assemble import build_trainer
from paceline.train.step import StepResult
from paceline.train.survive import snapshots as module
from paceline.train.survive.hooks import ConsensusHook
from paceline.train.survive.recovery import StopRequest
from paceline.train.survive.snapshots import Snapshots
from paceline.train.trainer import Hook, Trainer

CUDA = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
)
States = dict[int, dict[str, torch.Tensor]]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    kept = Kept(tmp_path / ROOT)
    kept.make(secrets.token_hex(32).encode())
    kept.write_keepers(0, [Address(str(tmp_path / "keeper"))])
    return kept.root


def make_config(ranks: int, strategy: str, device: str, **train: Any) -> Config:
    """A model whose kernels give the same bits every time: matrix products, no attention."""
    return config_from_dict(
        {
            "model": {"kind": "mlp", "hidden_dim": 64, "dropout": 0.1},
            "data": {"kind": "synthetic_classification", "samples": 240, "features": 16, "classes": 5},
            "train": {"steps": 12, "global_batch": 12, **train},
            "optim": {"lr": 0.01, "clip_norm": 1.0},
            "parallel": {"ranks": ranks, "strategy": strategy, "device": device},
        }
    )


def whole_state(trainer: Trainer) -> dict[str, torch.Tensor]:
    engine, optimizer = trainer.parts.engine, trainer.parts.optimizer
    moments = engine.full_optimizer_state(optimizer)["state"]
    named = {f"{number} {key}": value for number, by_key in moments.items() for key, value in by_key.items()}
    tensors = {**engine.full_state_dict(), **{name: each for name, each in named.items() if torch.is_tensor(each)}}
    return {name: each.detach().cpu().clone() for name, each in tensors.items()}


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def train(
    comm: Communicator,
    config: Config,
    root: Path,
    every: int = 4,
    *,
    resume: int | None = None,
    extra: Sequence[Hook] = (),
) -> States:
    """Trains to the end, with snapshots; returns the states of the steps behind which one is taken, and the last."""
    states, snapshots = States(), Snapshots(root, every)

    def look(trainer: Trainer, result: StepResult) -> None:
        if result.step % every == 0:
            states[result.step] = whole_state(trainer)
        if result.step % every == 2:
            snapshots.join()  # steps are shorter than the time that it takes: else the next one would wait

    hooks = [look, snapshots, ConsensusHook(StopRequest(), lambda _: None, RecoveryConfig(), snapshots), *extra]
    trainer = build_trainer(config, comm, hooks=hooks)
    if resume is not None:
        trainer.load_state(open_checkpoint(snapshots_in(root) / f"step-{resume:08d}"))
        assert_same(whole_state(trainer), states.setdefault(resume, whole_state(trainer)))
    trainer.run()
    snapshots.join()
    return states


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize(
    ("ranks", "strategy", "settings"),
    [
        (1, "ddp", {}),
        (1, "ddp", {"precision": "bf16_master"}),
        (1, "ddp", {"ema_decay": 0.9}),
        (2, "ddp", {}),
        (2, "zero2", {}),
        (3, "fsdp", {}),
    ],
)
def test_a_snapshot_is_the_state_of_its_step_whatever_comes_after(
    root: Path, device: str, ranks: int, strategy: str, settings: dict[str, Any]
) -> None:
    config = make_config(ranks, strategy, device, **settings)
    states = run_virtual(lambda comm: train(comm, config, root), ranks, device=device)[0]
    path = snapshots_in(root) / "step-00000008"
    verify_checkpoint(path)
    again = run_virtual(lambda comm: train(comm, config, root, resume=8), ranks, device=device)[0]
    assert_same(again[8], states[8])
    assert_same(again[12], states[12])


@pytest.mark.parametrize("share", [0, 1, 2, 3])
@pytest.mark.parametrize("settings", [{}, {"cuda_graphs": True}, {"precision": "bf16_master", "cuda_graphs": True}])
@pytest.mark.parametrize("device", [CUDA])
def test_what_is_copied_directly_and_what_by_the_device_is_of_one_step(
    root: Path, device: str, settings: dict[str, Any], share: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "count_direct", lambda sizes, *_: share * len(sizes) // 3)
    config = make_config(1, "ddp", device, **settings)
    states = run_virtual(lambda comm: train(comm, config, root), 1, device=device)[0]
    again = run_virtual(lambda comm: train(comm, config, root, resume=8), 1, device=device)[0]
    assert_same(again[8], states[8])
    assert_same(again[12], states[12])


def test_as_much_is_copied_directly_as_the_passes_have_time_for() -> None:
    sizes = [10, 20, 30, 40]
    assert module.count_direct(sizes, 4, 0.1) == 4  # all, beside a tenth of a step
    assert module.count_direct(sizes, 4, 1.0) == 3  # 70 of 100 would have fitted
    assert [module.count_direct(sizes, 3, took) for took in (0.5, 0.6, 0.8)] == [3, 3, 3]  # good enough to stay
    assert module.count_direct(sizes, 2, 0.1) == 4  # the bus is faster than it was
    assert module.count_direct(sizes, 3, 0.9) == 2  # or slower
    assert module.count_direct(sizes, 4, 50.0) == 0


def test_files_of_the_snapshot_before_the_last_are_written_over(root: Path) -> None:
    inodes: dict[int, list[int]] = {}

    def look(*_: object) -> None:
        for file in root.glob(".step-*/rank-00000.*.safetensors"):
            inodes.setdefault(int(file.parent.name[6:14]), []).append(file.stat().st_ino)

    config = make_config(1, "ddp", "cpu", steps=20)
    run_virtual(lambda comm: train(comm, config, root, extra=[look]), 1)
    found = {step: set(numbers) for step, numbers in inodes.items()}
    assert sorted(found) == [4, 8, 12, 16]
    assert found[4] == found[12] != found[8] == found[16]
    verify_checkpoint(snapshots_in(root) / "step-00000016")


def test_a_file_that_is_written_over_by_a_shorter_one_ends_where_that_does(tmp_path: Path) -> None:
    storage = module.HostMemory()
    storage.write(tmp_path / "file", [b"long ago"])
    storage.write(tmp_path / "file", [b"now"])
    assert (tmp_path / "file").read_bytes() == b"now"


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_a_snapshot_is_read_by_other_numbers_of_ranks(root: Path, device: str) -> None:
    states = run_virtual(lambda comm: train(comm, make_config(3, "fsdp", device), root), 3, device=device)[0]
    config = make_config(2, "zero2", device)
    again = run_virtual(lambda comm: train(comm, config, root, resume=8), 2, device=device)[0]
    assert_same(again[8], states[8])


def test_ranks_that_cannot_keep_a_snapshot_go_on_without(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: Kept, num_bytes: int) -> None:
        raise OSError(28, f"{num_bytes} bytes are needed, and none are free")

    monkeypatch.setattr(Kept, "check_room", full)
    notes: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setattr(Trainer, "note", lambda _, name, detail, **__: notes.append((name, detail)))
    states = run_virtual(lambda comm: train(comm, make_config(2, "ddp", "cpu"), root), 2)[0]
    assert sorted(states) == [4, 8, 12]
    assert {name for name, _ in notes} == {"no_snapshots"}
    reasons = {detail["reason"] for _, detail in notes} - {ELSEWHERE}  # of a rank that had not failed yet itself
    assert reasons
    assert all("none are free" in each for each in reasons)
    assert len(notes) == 2  # one of each rank, and no other attempt
