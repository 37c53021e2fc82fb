"""Many steps against half and half: the same bits under every strategy, with dropout, a loss scale and compression."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from recomputed import recompute
from saved_runs import save_now

from paceline.checkpoint import open_checkpoint
from paceline.comm.base import Communicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.config import Config, config_from_dict
from paceline.train.assemble import build_trainer
from paceline.train.trainer import Trainer

LONG, SHORT = 20, 4
SOME = ["ddp, topk", "zero2, fp16", "fsdp", "pipeline"]

CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp, topk": (2, {"comm": {"compression": {"policy": "topk", "ratio": 0.1, "min_size": 64}}}),
    "ddp, bf16 masters": (2, {"train": {"precision": "bf16_master"}}),
    "ddp, powersgd": (2, {"comm": {"compression": {"policy": "powersgd", "factor_rank": 1, "min_size": 64}}}),
    "ddp, fp16, topk": (
        2,
        {
            "train": {"precision": "fp16", "loss_scale": 2.0**22},
            "comm": {"compression": {"policy": "topk", "ratio": 0.1, "min_size": 64, "error_feedback": False}},
        },
    ),
    "zero2, fp16": (2, {"parallel": {"strategy": "zero2"}, "train": {"precision": "fp16", "loss_scale": 2.0**22}}),
    "fsdp": (3, {"parallel": {"strategy": "fsdp"}}),
    "fsdp, fp16": (2, {"parallel": {"strategy": "fsdp"}, "train": {"precision": "fp16", "loss_scale": 2.0**22}}),
    "hybrid, powersgd": (
        4,
        {
            "parallel": {"strategy": "hybrid", "shard_ranks": 2},
            "comm": {"compression": {"policy": "powersgd", "factor_rank": 1, "min_size": 64}},
        },
    ),
    "pipeline": (2, {"parallel": {"pipeline": 2}}),
    "pipeline, fp16": (2, {"parallel": {"pipeline": 2}, "train": {"precision": "fp16", "loss_scale": 2.0**22}}),
    "pipeline of zero2": (4, {"parallel": {"pipeline": 2, "strategy": "zero2"}}),
}


def make_config(ranks: int, case: dict[str, Any], steps: int = LONG) -> Config:
    sections: dict[str, dict[str, Any]] = {
        "model": {"kind": "gpt", "layers": 2, "heads": 2, "width": 8, "context": 4, "tied": True, "dropout": 0.2},
        "data": {"kind": "synthetic_tokens", "samples": 52, "vocab_size": 11, "context": 4},
        "train": {"steps": steps, "global_batch": 24, "accumulate": 2},
        "optim": {"lr": 0.01, "clip_norm": 1.0, "schedule": {"kind": "cosine", "warmup": 4}},
        "parallel": {"ranks": ranks},
    }
    return config_from_dict({name: {**sections.get(name, {}), **case.get(name, {})} for name in {**sections, **case}})


def outcome(trainer: Trainer) -> dict[str, Any]:
    """All that a run continues from, as this rank has it."""
    engine, compressor = trainer.parts.engine, trainer.parts.compressor
    state = trainer.parts.optimizer.state_dict()["state"]
    moments = {f"{number} {key}": value for number, by_key in state.items() for key, value in by_key.items()}
    return {
        **engine.full_state_dict(),
        **{name: value for name, value in moments.items() if isinstance(value, torch.Tensor)},
        **{f"owed {name}": value for name, value in ({} if compressor is None else compressor.residuals).items()},
        **{f"factor {name}": value for name, value in ({} if compressor is None else compressor.factors).items()},
        "scaler": None if trainer.scaler is None else trainer.scaler.state_dict(),
        "consumed": trainer.consumed.state_dict(),
        "skipped": trainer.bad_steps.state_dict(),
    }


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("case", "steps"),
    [*((case, SHORT) for case in SOME), *(pytest.param(c, LONG, marks=pytest.mark.exhaustive) for c in CASES)],
)
def test_half_and_half_are_the_whole(case: str, steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda _: None)
    ranks, changes = CASES[case]
    config = make_config(ranks, changes, steps)

    def run(comm: Communicator) -> None:
        whole, second = build_trainer(config, comm), build_trainer(config, comm)
        first = build_trainer(config, comm) if steps == LONG else whole  # the short ones save on their way
        half = restarted(first)
        list(islice(half, steps // 2))
        checkpoint = save_now(first, tmp_path)
        list(half if first is whole else restarted(whole))
        random = torch.get_rng_state()
        second.load_state(checkpoint)
        assert second.step == steps // 2
        list(second.steps())
        for trainer in (whole, second):
            trainer.flush(wait=True)
            if trainer.parts.compressor is not None:
                trainer.parts.compressor.apply_ended_pass()
        assert torch.equal(torch.get_rng_state(), random)
        ours, theirs = outcome(second), outcome(whole)
        assert ours.keys() >= theirs.keys()
        for name, value in theirs.items():
            is_same = torch.equal(ours[name], value) if isinstance(value, torch.Tensor) else ours[name] == value
            assert is_same, name

    def restarted(trainer: Trainer) -> Any:
        """Steps from the random numbers that a fresh process would start with."""
        torch.manual_seed(trainer.parts.engine.random_stream)
        return trainer.steps()

    run_virtual(run, ranks)
    consumed = open_checkpoint(tmp_path / f"step-{steps // 2:08d}").values["consumed"]
    assert recompute(consumed) == {"hash": consumed["hash"], "count": consumed["count"]}


@pytest.mark.exhaustive  # test_resizing.py compares samples and hashes by default
def test_the_hash_of_consumed_samples_is_that_of_any_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda _: None)

    def run(comm: Communicator, load: Path | None, until: int) -> dict[str, Any]:
        trainer = build_trainer(make_config(comm.size, {}), comm)
        if load is not None:
            trainer.load_state(open_checkpoint(load))
        for result in trainer.steps():
            if result.step == until:
                break
        save_now(trainer, tmp_path / f"{comm.size} from {0 if load is None else 1}")
        assert trainer.consumed.state_dict()["count"] == trainer.position
        return trainer.consumed.state_dict()

    whole = run_virtual(lambda comm: run(comm, None, 5), 1)[0]
    part = run_virtual(lambda comm: run(comm, None, 3), 3)
    assert part[0] == part[1] == part[2]
    later = run_virtual(lambda comm: run(comm, tmp_path / "3 from 0" / "step-00000003", 5), 2)
    assert later == [whole, whole]
