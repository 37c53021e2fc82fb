"""Training in mixed precision under every strategy: against one process of the same policy, and taken up again."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from covering import covering
from gloo_pool import GlooPool
from kept_records import Kept
from saved_runs import save_now

from paceline.checkpoint import Checkpoint
from paceline.comm.base import Communicator
from paceline.comm.solo import SoloCommunicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.config import Config, config_from_dict
from paceline.errors import UsageError
from paceline.records.records import StepRecord
from paceline.train.assemble import build_trainer
from paceline.train.trainer import Trainer

CPU = torch.device("cpu")
PRECISIONS = ["bf16", "fp16", "bf16_master"]
STRATEGIES = ["ddp", "zero1", "zero2", "fsdp", "hybrid"]
PARTS = 4  # microbatches that a global batch is always cut into, so that each part has the same gradients anywhere


def make_config(strategy: str = "ddp", ranks: int = 1, clip: float | None = 1.0, **train: Any) -> Config:
    return config_from_dict(
        {
            "model": {"kind": "gpt", "width": 16, "layers": 1, "heads": 2, "vocab_size": 13, "context": 8},
            "data": {"kind": "synthetic_tokens", "samples": 24, "context": 8, "vocab_size": 13, "eval_fraction": 0.25},
            "parallel": {"strategy": strategy} | ({"shard_ranks": 2} if strategy == "hybrid" else {}),
            "optim": {"kind": "sgd", "lr": 0.25, "momentum": 0.5, "schedule": {"kind": "constant"}, "clip_norm": clip},
            "train": {"steps": 2, "global_batch": 8, "accumulate": PARTS // ranks, "seed": 2} | train,
        }
    )


def train(
    comm: Communicator, config: Config, *, state: Checkpoint | None = None, steps: int | None = None
) -> tuple[dict[str, torch.Tensor], list[StepRecord], Trainer, float]:
    """Trains from a state, for some steps; returns parameters, records, trainer, and the loss on the other data."""
    sink = Kept()
    trainer = build_trainer(config, comm, sink=sink)
    if state is not None:
        trainer.load_state(state)
    results = trainer.steps()
    for result in results:
        if steps is not None and result.step == steps:
            break
    results.close()  # type: ignore[attr-defined]
    trainer.flush(wait=True)
    evaluation = trainer.evaluate()
    assert evaluation is not None
    skipped = [event.step for event in sink.events if event.name == "skipped"]
    assert skipped == [record.step for record in sink.steps if record.is_skipped]
    return trainer.parts.engine.full_state_dict(), sink.steps, trainer, evaluation.loss


@functools.cache
def alone(clip: float | None, precision: str) -> tuple[dict[str, torch.Tensor], list[StepRecord], float]:
    """One process of a policy, which several strategies are compared with."""
    state, records, _, loss = train(SoloCommunicator(CPU), make_config(clip=clip, precision=precision))
    return state, records, loss


@covering(strategy=STRATEGIES, policy=["fp16, clipped", "fp16", "bf16_master", "bf16"])
def test_every_strategy_trains_as_one_process_of_the_same_policy(strategy: str, policy: str) -> None:
    """Half precision gradients of each part are the same; only the order of their fp32 sum is another.

    The last digit of a norm that is summed in another order moves every parameter, and some of them over the edge to
    the next number of half precision.
    """
    precision, _, clipped = policy.partition(", ")
    clip, tolerance = (0.5, 1e-4) if clipped else (None, 1e-6)
    expected, records, loss = alone(clip, precision)
    assert not any(record.is_skipped for record in records)
    config = make_config(strategy, PARTS, clip, precision=precision)
    for found, theirs, _, found_loss in run_virtual(lambda comm: train(comm, config), PARTS):
        for name, value in expected.items():
            assert value.dtype is torch.float32
            torch.testing.assert_close(found[name], value, rtol=0, atol=tolerance, msg=name)
        norms = [record.grad_norm for record in records]
        assert [record.grad_norm for record in theirs] == pytest.approx(norms, rel=1e-4)
        assert found_loss == pytest.approx(loss, rel=1e-4)


def train_on_real_ranks(comm: Communicator, strategy: str, precision: str) -> dict[str, torch.Tensor]:
    return train(comm, make_config(strategy, comm.size, None, precision=precision))[0]


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("strategy", "precision"), [("ddp", "bf16_master"), ("zero1", "fp16"), ("fsdp", "bf16_master")]
)
def test_real_ranks_train_as_one_process_of_the_same_policy(gloo_pool: GlooPool, strategy: str, precision: str) -> None:
    expected, _, _ = alone(None, precision)
    for found in gloo_pool.run(train_on_real_ranks, strategy, precision, ranks=2):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-4, msg=name)


def test_precisions_are_different_and_close() -> None:
    """Guards the test above."""
    losses = {precision: alone(None, precision)[2] for precision in ("fp32", *PRECISIONS)}
    assert len(set(losses.values())) == 4
    assert all(loss == pytest.approx(losses["fp32"], rel=0.02) for loss in losses.values())


@pytest.mark.some(1)  # test_scaler.py has all strategies
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])
def test_the_loss_scale_is_taken_up_where_it_stood(strategy: str, tmp_path: Path) -> None:
    """The scale starts far too large: steps are left out until it fits, and the run is cut in the middle of that."""
    config = make_config(strategy, 2, precision="fp16", loss_scale=2.0**22, steps=8)

    def run(comm: Communicator) -> None:
        whole, records, _, _ = train(comm, config)
        _, first, trainer, _ = train(comm, config, steps=3)
        found, second, _, _ = train(comm, config, state=save_now(trainer, tmp_path))
        assert [r.is_skipped for r in records[:3]] == [True] * 3  # cut among bad steps
        assert sum(not record.is_skipped for record in records) >= 3
        scales = [record.loss_scale for record in records]
        assert scales[:4] == [2.0**22, 2.0**21, 2.0**20, 2.0**19]
        assert [record.loss_scale for record in (*first, *second)] == scales
        assert [record.is_skipped for record in (*first, *second)] == [record.is_skipped for record in records]
        assert all(torch.equal(found[name], value) for name, value in whole.items())

    run_virtual(run, 2)


def test_a_state_without_a_scale_starts_one_and_one_with_it_is_ignored_where_nothing_is_scaled(tmp_path: Path) -> None:
    plain, scaled = make_config(steps=2), make_config(steps=2, precision="fp16", loss_scale=8.0)
    state = save_now(train(SoloCommunicator(CPU), plain)[2], tmp_path)
    assert "scaler" not in state.values
    trainer = build_trainer(scaled, SoloCommunicator(CPU))
    trainer.load_state(state)
    assert trainer.scaler is not None
    assert trainer.scaler.scale.item() == 8.0
    other = save_now(train(SoloCommunicator(CPU), scaled)[2], tmp_path / "scaled")
    assert "scaler" in other.values
    build_trainer(plain, SoloCommunicator(CPU)).load_state(other)


def test_records_tell_the_scale_of_each_step() -> None:
    records = train(SoloCommunicator(CPU), make_config(precision="fp16", loss_scale=1024.0, steps=2))[1]
    assert [record.loss_scale for record in records] == [1024.0, 1024.0]
    assert [record.loss_scale for record in train(SoloCommunicator(CPU), make_config(steps=2))[1]] == [1.0, 1.0]


def test_a_precision_that_the_device_cannot_do_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("not implemented for 'Half'")

    monkeypatch.setattr("paceline.engines.precision._try_product", fail)
    with pytest.raises(UsageError, match="precision = 'fp16' on cpu: float16 does not work there"):
        build_trainer(make_config(precision="fp16"), SoloCommunicator(CPU))
