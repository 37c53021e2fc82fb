"""The GPU benchmark on a CPU: arms that train the same, rows that compare them, and curves of losses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from measures.losses import compare_losses
from paceline.cluster.devices import Peaks
from paceline_bench.gpu import arms as arms_module
from paceline_bench.gpu import loops
from paceline_bench.gpu.arms import StepWork, arms_of, bench_gpu, make_rows, select_arms
from paceline_bench.gpu.loops import ArmTurn, GpuArm, GpuWorkload, all_workloads, run_arm, workloads_on

pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # of CPUs without bf16 instructions
TINY, IMAGES = all_workloads()["gpt-tiny"], all_workloads()["resnet-tiny"]


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loops without a compiler, which takes longer than all they do."""
    monkeypatch.setattr(loops, "_compile", lambda function, *_: function)


def losses_of(workload: GpuWorkload, arm: str, folder: Path, steps: int = 4) -> list[float]:
    file = str(workload.config_file(folder))
    return run_arm(arm, workload.model, "cpu", file, steps).losses


@pytest.mark.exhaustive
@pytest.mark.usefixtures("eager")
def test_plain_loops_and_the_engine_train_the_same_gpt(tmp_path: Path) -> None:
    ours = losses_of(TINY, "paceline engine", tmp_path, steps=8)
    assert ours[-1] < 0.985 * ours[0]
    for arm, bound in (("plain autocast", 1e-3), ("plain autocast graphs", 1e-3), ("plain masters", 1e-2)):
        assert losses_of(TINY, arm, tmp_path, steps=8) == pytest.approx(ours, rel=bound), arm


@pytest.mark.usefixtures("eager")
@pytest.mark.exhaustive
def test_plain_loops_and_the_engine_train_the_same_images(tmp_path: Path) -> None:
    ours = losses_of(IMAGES, "paceline engine", tmp_path)
    assert ours[0] != ours[-1]
    for arm in ("plain autocast", "plain autocast channels last"):
        assert losses_of(IMAGES, arm, tmp_path) == pytest.approx(ours, rel=5e-3), arm


@pytest.mark.usefixtures("eager")
def test_an_arm_tells_all_that_a_row_needs(tmp_path: Path) -> None:
    file = str(TINY.config_file(tmp_path))
    turn = run_arm("plain masters", "gpt-tiny", "cpu", file, 3)
    assert len(turn.step_s) == len(turn.losses) == 3
    assert min(turn.step_s) > 0
    assert (turn.samples, turn.peak_bytes) == (4, None)


def test_every_model_has_its_arms() -> None:
    names = {model: [arm.name for arm in arms_of(workload)] for model, workload in workloads_on("cuda").items()}
    for arms in names.values():
        assert {"plain autocast", "paceline engine", "paceline train", "accelerate", "lightning fabric"} <= set(arms)
    assert "paceline train fp8" in names["gpt-1.1b"]
    assert "torchao fp8" in names["gpt-1.1b"]
    assert "plain masters graphs" in names["gpt-10m"]
    assert "plain autocast channels last" in names["resnet50"]


def test_the_configs_are_those_that_were_promised(tmp_path: Path) -> None:
    def facts(model: str) -> tuple[Any, ...]:
        workload = all_workloads()[model]
        config = workload.config(workload.config_file(tmp_path), 7)
        assert (config.train.steps, config.parallel.ranks) == (7, 1)
        return (
            config.train.global_batch,
            getattr(config.data, "context", None),
            getattr(config.data, "vocab_size", None),
        )

    assert facts("gpt-124m") == (32, 1024, 50304)
    assert facts("gpt-1.1b") == (8, 2048, 32000)
    assert facts("gpt-10m") == (64, None, None)
    assert facts("resnet50") == (256, None, None)


def test_a_config_that_ships_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(replace(TINY).config_file(tmp_path).read_text())
    assert replace(TINY, shipped="mine.yaml").config_file(tmp_path) == tmp_path / "mine.yaml"


def test_words_select_arms_beside_the_plain_loops() -> None:
    assert [arm.name for arm in select_arms(TINY, ["paceline train"])] == [
        *("plain autocast", "plain masters", "plain autocast graphs", "plain masters graphs"),
        *("paceline train", "paceline train fp8"),
    ]
    assert [arm.name for arm in select_arms(TINY, ["plain masters", "engine"])] == [
        *("plain masters", "plain masters graphs", "paceline engine", "paceline engine fp8")
    ]


def turn_of(step_s: float, first_step_s: float = 9.0, loss: float = 2.0) -> ArmTurn:
    """A turn whose warm-up took longer, and which began at the fifth second."""
    steps, at = [7.0, 7.0, step_s], first_step_s + 5.0
    return ArmTurn(step_s=steps, losses=[3.0, loss], peak_bytes=100, first_step_at=at, samples=4, started_at=5.0)


def test_rows_are_compared_with_the_best_plain_loop_round_by_round() -> None:
    arms = [
        GpuArm(name="plain autocast", kind="plain", is_plain=True),
        GpuArm(name="plain masters", kind="masters", is_plain=True),
        GpuArm(name="accelerate", kind="accelerate"),
        GpuArm(name="torchao fp8", kind="fp8"),
        GpuArm(name="paceline train", kind="train"),
        GpuArm(name="paceline train fp8", kind="fp8", precision="fp8"),
    ]
    turns = {
        "plain autocast": [turn_of(2.0), turn_of(4.0)],
        "plain masters": [turn_of(1.0), turn_of(2.0)],
        "accelerate": [],
        "torchao fp8": [turn_of(0.8), turn_of(1.6)],
        "paceline train": [turn_of(0.9, 30.0), turn_of(1.8, 7.0, loss=1.5)],
        "paceline train fp8": [turn_of(0.4), turn_of(0.8)],
    }
    work = StepWork(flops=1e12, items=16, peaks=Peaks(sheet=8e12, measured=4e12))
    rows = {
        row["arm"]: row for row in make_rows(TINY, arms, turns, {"accelerate": "accelerate is not installed"}, work)
    }
    ours = rows["paceline train"]
    assert (ours["peer"], ours["ratio"], rows["plain autocast"]["ratio"]) == ("plain masters", 0.9, 2.0)
    assert (ours["first_step_s"], ours["second_start_s"], ours["loss"]) == (30.0, 7.0, 1.5)
    assert (ours["step_ms"], ours["rounds_ms"]) == (1350.0, [900.0, 1800.0])
    assert ours["tokens_per_s"] == round(4 * 16 / 1.35, 1)
    assert (ours["mfu"], ours["mfu_measured"]) == (round(4 / 1.35 / 8, 4), round(4 / 1.35 / 4, 4))
    assert (rows["paceline train fp8"]["ratio"], rows["paceline train fp8"]["fp8_ratio"]) == (0.4, 0.5)
    assert rows["accelerate"] == {
        "model": "gpt-tiny",
        "arm": "accelerate",
        "is_plain": False,
        "error": "accelerate is not installed",
    }


def test_an_arm_that_fails_leaves_its_reason_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def run(arm: GpuArm, *_: Any) -> ArmTurn:
        asked.append(arm.name)
        if arm.name == "paceline engine":
            raise OSError("out of\n  memory")
        return ArmTurn(step_s=[0.1] * 6, losses=[1.0] * 6, peak_bytes=None, first_step_at=0.0, samples=4)

    monkeypatch.setattr(arms_module, "_take_turn", run)
    rows = bench_gpu(TINY, 2, None, ["plain autocast", "paceline engine"], lambda _: None)
    found = {row["arm"]: row.get("error") for row in rows}
    assert found["paceline engine"] == "out of memory"
    assert found["plain autocast"] is None
    assert asked.count("paceline engine") == 1
    assert asked.count("plain autocast") == 2


def test_curves_are_compared_at_equal_steps_and_at_equal_time() -> None:
    slow = ArmTurn(
        step_s=[9.0, *[2.0] * 99], losses=[4.0] * 50 + [2.0] * 50, peak_bytes=0, first_step_at=0.0, samples=1
    )
    fast = replace(slow, step_s=[9.0, *[1.0] * 99], losses=[4.0] * 50 + [2.01] * 50)
    rows = compare_losses("gpt", ["bf16_master", "fp8"], [slow, fast])
    assert [row["step"] for row in rows] == [*range(10, 101, 10)]
    last = rows[-1]
    assert (last["loss"], last["other_loss"], last["difference"]) == (2.01, 2.0, 0.005)
    # 99 s after its first step fp8 has made 100; bf16 has made 50, and stands at its first losses.
    assert (last["seconds"], last["other_step_then"], last["other_loss_then"]) == (99.0, 50, 4.0)
    assert last["difference_then"] == round(2.01 / 4.0 - 1, 5)
