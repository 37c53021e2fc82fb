"""Runs with compressed gradients: they learn, and go on from a checkpoint with the same and with other ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from saved_runs import save_now

from paceline.checkpoint import open_checkpoint
from paceline.comm.base import Communicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.config import Config, config_from_dict
from paceline.errors import ConfigError
from paceline.train.assemble import build_trainer
from paceline.train.trainer import Trainer

STEPS = 4
DIGITS = {"kind": "digits"}


def make_config(compression: dict[str, Any], **train: Any) -> Config:
    return config_from_dict(
        {
            "model": {"kind": "mlp", "hidden_dim": 32, "dropout": 0.0},
            "data": {"kind": "synthetic_classification", "samples": 240, "features": 64, "classes": 10},
            "train": {"steps": STEPS, "global_batch": 24, **train},
            "optim": {"lr": 5e-3},
            "comm": {"compression": {"min_size": 64, **compression}},
        }
    )


def run_steps(trainer: Trainer, until: int) -> None:
    for result in trainer.steps():
        if result.step == until:
            break


@pytest.mark.some(1)
@pytest.mark.parametrize(
    "compression",
    [{"policy": "topk", "ratio": 0.05}, {"policy": "randomk", "ratio": 0.1}, {"policy": "powersgd", "factor_rank": 2}],
    ids=lambda compression: compression["policy"],
)
def test_a_run_that_stops_goes_on_as_if_it_had_not(compression: dict[str, Any], tmp_path: Path) -> None:
    config = make_config(compression)

    def work(comm: Communicator) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        whole, first, second = (build_trainer(config, comm) for _ in range(3))
        run_steps(whole, STEPS)
        run_steps(first, STEPS // 2)
        second.load_state(save_now(first, tmp_path))
        run_steps(second, STEPS)
        return whole.parts.engine.full_state_dict(), second.parts.engine.full_state_dict()

    for expected, found in run_virtual(work, 3):
        assert all(torch.equal(expected[name], found[name]) for name in expected)


def hybrid(compression: dict[str, Any], **train: Any) -> Config:
    parallel = {"parallel": {"strategy": "hybrid", "shard_ranks": 2}}
    return config_from_dict(make_config(compression, **train).model_dump(mode="json", exclude_unset=True) | parallel)


@pytest.mark.some(1)
@pytest.mark.parametrize("policy", ["topk", "powersgd"])
def test_a_hybrid_run_goes_on_as_if_it_had_not_stopped_and_as_data_parallelism(policy: str, tmp_path: Path) -> None:
    chosen = {"policy": policy}

    def work(comm: Communicator) -> None:
        whole, first, second = (build_trainer(hybrid(chosen), comm) for _ in range(3))
        other = build_trainer(make_config(chosen), comm)
        run_steps(whole, STEPS)
        run_steps(first, STEPS // 2)
        checkpoint = save_now(first, tmp_path)
        second.load_state(checkpoint)
        other.load_state(checkpoint)
        place = "compression/residual/"
        owed = {name: checkpoint.read(place + name) for name in checkpoint.shapes(place)}
        assert owed
        assert all(rows.shape[0] == 2 for rows in owed.values())
        assert other.parts.compressor is not None
        for name, residual in other.parts.compressor.residuals.items():
            torch.testing.assert_close(residual, owed[name].mean(0))
        run_steps(second, STEPS)
        run_steps(other, STEPS)
        expected, found = whole.parts.engine.full_state_dict(), second.parts.engine.full_state_dict()
        assert all(torch.equal(expected[name], found[name]) for name in expected)

    run_virtual(work, 4)


def test_the_search_for_a_microbatch_owes_nothing() -> None:
    def work(comm: Communicator) -> tuple[int, int]:
        trainer = build_trainer(hybrid({"policy": "topk"}, microbatch="auto"), comm)
        assert trainer.parts.compressor is not None
        trainer.parts.compressor.apply_ended_pass()
        return trainer.parts.compressor.step, sum(each.nbytes for each in trainer.parts.compressor.held())

    assert run_virtual(work, 4) == [(0, 0)] * 4


OWING = make_config({"policy": "topk", "ratio": 0.05})


@pytest.fixture(scope="module")
def owed_by_three(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, torch.Tensor]]]:
    """The checkpoint of three ranks, and what each of them owes."""
    folder = tmp_path_factory.mktemp("owing")

    def before(comm: Communicator) -> dict[str, torch.Tensor]:
        trainer = build_trainer(OWING, comm)
        run_steps(trainer, STEPS // 2)
        save_now(trainer, folder)
        assert trainer.parts.compressor is not None
        return trainer.parts.compressor.residuals

    found = run_virtual(before, 3)
    return folder / f"step-{STEPS // 2:08d}", found


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_other_ranks_owe_the_model_the_same(
    ranks: int, owed_by_three: tuple[Path, list[dict[str, torch.Tensor]]]
) -> None:
    path, found = owed_by_three

    def after(comm: Communicator) -> dict[str, torch.Tensor]:
        trainer = build_trainer(OWING, comm)
        trainer.load_state(open_checkpoint(path))
        assert trainer.parts.compressor is not None
        residuals = {name: each.clone() for name, each in trainer.parts.compressor.residuals.items()}
        run_steps(trainer, STEPS)
        return residuals

    later = run_virtual(after, ranks)
    for name in found[0]:
        owed = torch.stack([residuals[name] for residuals in found]).mean(0)
        torch.testing.assert_close(torch.stack([residuals[name] for residuals in later]).mean(0), owed)
        assert owed.norm() > 0


@pytest.mark.exhaustive
def test_top_k_with_feedback_reaches_the_accuracy_of_the_plain_run() -> None:
    def work(comm: Communicator, compression: dict[str, Any]) -> float:
        config = make_config(compression, steps=150, global_batch=60)
        trainer = build_trainer(config_from_dict({**config.model_dump(exclude_unset=True), "data": DIGITS}), comm)
        run_steps(trainer, 150)
        result = trainer.evaluate()
        assert result is not None
        assert trainer.parts.eval_loader is not None
        trainer.parts.eval_loader.close()
        assert result.accuracy is not None
        return result.accuracy

    (plain, _) = run_virtual(lambda comm: work(comm, {"policy": "none", "min_size": 1024}), 2)
    (compressed, _) = run_virtual(lambda comm: work(comm, {"policy": "topk", "ratio": 0.05}), 2)
    assert plain > 0.9
    assert compressed > plain - 0.02


def test_a_policy_that_is_unknown_or_out_of_range_is_explained() -> None:
    with pytest.raises(ConfigError, match="did you mean"):
        make_config({"policy": "topkk"})
    with pytest.raises(ConfigError, match=r"comm\.compression\.ratio"):
        make_config({"policy": "topk", "ratio": 0})
