"""Predicted beside measured: arms are what they say, real steps are timed, and one that fails loses no other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from measures.predict import PredictArm, arms_on, bench_predict, clusters, config_of, measure_steps, only
from measures.tables import show_table
from paceline.cluster.devices import Cluster, load_cluster
from paceline.comm.solo import SoloCommunicator
from paceline.errors import UsageError
from paceline_bench.arms import check_words

ALONE = PredictArm(model="mlp", strategy="ddp")


def test_arms_cover_engines_and_backends_and_each_has_a_config() -> None:
    on_cpu, on_cuda = arms_on("cpu"), arms_on("cuda")
    assert {(arm.strategy, arm.backend) for arm in on_cpu} == {
        (strategy, backend) for strategy in ("ddp", "zero1", "fsdp") for backend in ("gloo", "shared_memory")
    }
    assert [arm.is_compiled for arm in on_cuda] == [False] * 4 + [True] * 4
    for arm in on_cpu:
        config = config_of(arm, "cpu")
        assert (config.parallel.strategy, config.parallel.ranks) == (arm.strategy, 2)
        assert (config.comm.backend == "gloo") == (arm.backend == "gloo")
    assert config_of(on_cuda[-1], "cuda").model.compile


def test_arms_are_chosen_by_words() -> None:
    assert {arm.backend for arm in only(arms_on("cpu"), ["mlp"], ["gloo"])} == {"gloo"}
    assert only(arms_on("cpu"), ["mlp"], []) == [arm for arm in arms_on("cpu") if arm.model == "mlp"]
    with pytest.raises(UsageError, match="--arms pipes: no arm is called so"):
        check_words([arm.name for arm in arms_on("cpu")], ["pipes"])


def test_real_steps_are_timed() -> None:
    found = measure_steps(SoloCommunicator(torch.device("cpu")), config_of(ALONE, "cpu"), "none", 3)
    assert (found["num_steps"], found["measured_peak_bytes"]) == (3, None)
    assert found["measured_ms"] > 0


def test_an_arm_that_fails_leaves_its_error_and_the_others_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    told: list[str] = []

    def cluster_of(arm: PredictArm) -> Cluster:
        if arm.strategy == "ddp":
            raise UsageError("no such machine\n  one is needed")
        return load_cluster("cpu-host")

    rows = list(bench_predict([ALONE, ALONE], "cpu", cluster_of, steps=3, tell=told.append))
    assert [row["error"] for row in rows] == ["UsageError: no such machine"] * 2
    assert len(told) == 2
    good = {"model": "mlp", "arm": "ddp", "predicted_ms": 1.0, "measured_ms": 2.0, "step_error": -0.5}
    show_table("predict", [*rows, good | {"measured_peak_bytes": None}])
    shown = capsys.readouterr().out
    assert "no such machine" in shown
    assert "step time: off by 50.0 % on average, 50.0 % at most" in shown


def test_gloo_has_a_link_of_its_own(tmp_path: Path) -> None:
    found = clusters("cpu", None, tmp_path / "none.yaml", lambda _: None)
    gloo, shared = (
        found.of(PredictArm(model="mlp", strategy="ddp", backend=each, ranks=2)) for each in ("gloo", "shared_memory")
    )
    assert (gloo.node.inside.kind, shared.node.inside.kind) == ("loopback", "shared_memory")
    assert gloo.devices == shared.devices == 2
