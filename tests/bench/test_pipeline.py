"""The pipeline benchmark on a GPT of a few weights: what is compared with what, and that all of it agrees."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from measures.features import FEATURES, FeatureProtocol, _check_losses, _row, _train
from measures.modelled import ModelledGPUs, model_features
from measures.pipeline import (
    TOLERANCE,
    PipelineWorkload,
    _measure,
    _with_losses,
    bench_bubbles,
    ideal_overhead,
    make_workload,
)
from measures.pipeline_arms import pipeline_arms
from paceline.comm.base import Communicator
from paceline.comm.solo import SoloCommunicator
from paceline.errors import TrainingError, UsageError
from paceline_bench.arms import BenchWorkload, select
from paceline_bench.engines import MeasuredArm, check_losses
from paceline_bench.timing import Turns

if TYPE_CHECKING:
    from gloo_pool import GlooPool

NANO = BenchWorkload(model="gpt-nano", batch=4, context=4, tied=False)
SHORT = PipelineWorkload(workload=NANO, microbatches=4, protocol=Turns(rounds=1, steps_per_turn=1, warm_up=2))
FEW = FeatureProtocol(steps=1, warm_up=1)
RECORD = Path(__file__).parents[2] / "bench" / "results" / "engines-h200.json"


def test_every_schedule_has_torchs_of_the_same_kind_as_its_peer() -> None:
    arms = pipeline_arms()
    by_name = {arm.name: arm for arm in arms}
    assert len(by_name) == len(arms) == 15
    for arm in arms:
        assert by_name[arm.peer].runner == "torch"
        assert by_name[arm.peer].schedule == arm.schedule


ARMS = select(pipeline_arms(), ["gpipe", "1f1b", "zb-v"])  # one stage a rank, and two; backward whole, and in parts


def measure_arms(comm: Communicator) -> list[MeasuredArm]:
    return _measure(comm, SHORT, ARMS)


@pytest.mark.exhaustive
def test_arms_train_the_same_model(gloo_pool: GlooPool) -> None:
    by_rank = gloo_pool.run(measure_arms, ranks=2, group_timeout_s=60.0, timeout_s=150.0)
    measured = [_with_losses(each) for each in zip(*by_rank, strict=True)]
    check_losses(NANO, measured, TOLERANCE)
    assert [each.timing.arm for each in measured] == [arm.name for arm in ARMS]
    assert all(len(each.losses) == 2 and each.losses[1] < each.losses[0] for each in measured)


def train_features(comm: Communicator) -> list[Any]:
    return [_train(comm, feature, NANO, 4, FEW) for feature in FEATURES if feature.ranks == comm.size]


@pytest.mark.exhaustive
def test_every_feature_trains_the_same_and_holds_its_share(gloo_pool: GlooPool) -> None:
    alone = _row(FEATURES[0], NANO, 4, [_train(SoloCommunicator(torch.device("cpu")), FEATURES[0], NANO, 4, FEW)])
    by_rank = gloo_pool.run(train_features, ranks=2, group_timeout_s=60.0, timeout_s=150.0)
    spread = [feature for feature in FEATURES if feature.ranks == 2]
    rows = [_row(feature, NANO, 4, each) for feature, each in zip(spread, zip(*by_rank, strict=True), strict=True)]
    _check_losses([alone, *rows])
    held = {row["feature"]: max(row["tensor_bytes"]) for row in [alone, *rows]}
    assert held["pipeline, 1f1b"] < 0.6 * held["one rank"]
    # All of so small a model is one bucket, whole when it is counted; besides, a number for each parameter is told.
    assert held["zero2"] < held["ddp"] + 1024
    assert [row["kind"] for row in [alone, *rows]] == ["measured, 1 CPU rank", *["measured, 2 CPU ranks"] * 4]
    # A worker of the pool may have had more memory before, and a forked one counts its peak anew.
    assert all(
        peak > 0.9 * start > 0
        for row in rows
        for peak, start in zip(row["peak_rss_bytes"], row["start_rss_bytes"], strict=True)
    )
    with pytest.raises(TrainingError, match="ddp ends with the loss"):
        _check_losses([alone, {**rows[2], "loss": alone["loss"] * 1.001}])


def test_bubbles_meet_their_formulas() -> None:
    rows = bench_bubbles()
    assert len(rows) == 5 * 7 * 3
    known = [row for row in rows if row["overhead_formula"] is not None]
    assert all(row["overhead"] == pytest.approx(row["overhead_formula"], abs=2e-6) for row in known)
    assert all(row["bubble"] == pytest.approx(row["bubble_formula"], abs=2e-6) for row in known)
    assert {row["schedule"] for row in rows if row["overhead_formula"] is None} == {"zb-v"}
    assert ideal_overhead("1f1b", 4, 8) == pytest.approx(3 / 8)
    assert ideal_overhead("zb-v", 4, 5) is None


def test_four_gpus_are_modelled_from_what_one_was_measured_at() -> None:
    given = ModelledGPUs()
    record = json.loads(RECORD.read_text())["rows"]
    (measured,) = (row for row in record if (row["model"], row["arm"]) == ("gpt-124m", "plain loop bf16"))
    assert (given.step_ms, given.workload.batch) == (measured["median_ms"], measured["batch_per_rank"])
    rows = {row["feature"]: row for row in model_features(given)}
    assert all(row["kind"] == "on the virtual clock, modelled" and row["inputs"]["gpus"] == 4 for row in rows.values())
    one, ddp, pipe = rows["one GPU"], rows["ddp"], rows["pipeline, 1f1b"]
    assert ddp["step_ms"] == pytest.approx(one["step_ms"] / 4 + ddp["collectives_ms"], abs=1e-3)
    # All of the work over four GPUs, and what these are idle.
    assert pipe["step_ms"] * (1 - pipe["bubble"]) == pytest.approx(one["step_ms"] / 4, rel=1e-3)
    assert rows["zero2"]["state_bytes"] == pytest.approx(7 / 16 * ddp["state_bytes"], rel=1e-6)
    assert ddp["state_bytes"] / 4 < pipe["state_bytes"] < ddp["state_bytes"]
    assert rows["ddp shared memory"]["samples_per_s"] is None


def test_a_workload_that_cannot_be_is_told_before_anything_runs() -> None:
    assert make_workload("gpt-nano", 8, 4, rounds=2).protocol.rounds == 2
    with pytest.raises(UsageError, match=r"--context 65: gpt-nano reads 64 tokens at most"):
        make_workload("gpt-nano", 65, 4)
    with pytest.raises(UsageError, match="there is no GPT size 'gpt-nanu'"):
        make_workload("gpt-nanu", 8, 4)
