"""``paceline bench scaling``: which rows there are, what they are compared with, and real ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from paceline.cluster.devices import load_cluster
from paceline.config import load_config, run_checks
from paceline.config.train_checks import short_run
from paceline.errors import UsageError
from paceline_bench.output import show_table
from paceline_bench.scaling import ScalingCase, bench_scaling, cases, config_of, draw_rows, own_strategy, with_speed_up


def told(text: str) -> None:
    del text


def test_ranks_beyond_the_machine_are_simulated_and_far_ones_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline_bench.scaling.usable_cores", lambda: (0, 1))
    found = cases([1, 2, 4], ["ddp"], [32], ["weak"], gpus=0, to=5)
    assert [(each.kind, each.ranks, each.global_batch) for each in found] == [
        ("measured", 1, 32),
        ("measured", 2, 64),
        ("simulated", 4, 128),
        ("simulated", 1, 32),
        ("predicted", 1, 32),
        ("predicted", 2, 64),
        ("predicted", 4, 128),
    ]
    (alone,) = cases([4], ["fsdp"], [32], ["strong"], gpus=4, to=0)
    assert (alone.kind, alone.global_batch) == ("measured", 32)
    with pytest.raises(UsageError, match="give --predict-to 64"):
        cases([64], ["ddp"], [64], ["strong"], gpus=0, to=0)


@pytest.mark.exhaustive
def test_speed_up_is_against_the_fewest_ranks_of_the_same_kind(tmp_path: Path) -> None:
    same = {"mode": "strong", "strategy": "ddp", "batch": 64}
    rates = (("measured", 2, 30.0), ("measured", 1, 20.0), ("predicted", 2, 300.0), ("predicted", 4, 500.0))
    rows = [{**same, "kind": kind, "ranks": ranks, "samples_per_s": rate} for kind, ranks, rate in rates]
    found = list(with_speed_up([*rows, {**same, "kind": "simulated", "ranks": 8, "error": "no"}]))
    assert [row.get("speed_up") for row in found] == [1.5, 1.0, 2.0, pytest.approx(500 / 150), None]
    assert [row.get("efficiency") for row in found][:2] == [0.75, 1.0]
    draw_rows(found, tmp_path / "scaling.svg", "test")
    assert "speed-up" in (tmp_path / "scaling.svg").read_text()


@pytest.mark.exhaustive
def test_simulated_and_predicted_rows_are_real_and_a_case_that_cannot_run_says_why() -> None:
    config = load_config("configs/digits.yaml", ["parallel.device=cpu"])
    one = ScalingCase(kind="simulated", mode="strong", strategy="ddp", batch=64, ranks=2)
    todo = [one, ScalingCase(kind="predicted", mode="strong", strategy="ddp", batch=64, ranks=16)]
    todo.append(ScalingCase(kind="simulated", mode="strong", strategy="ddp", batch=64, ranks=3))
    rows = bench_scaling(config, todo, 6, load_cluster("1x dgx-h100"), told)
    assert [row["kind"] for row in rows] == ["simulated", "predicted", "simulated"]
    assert all(row["samples_per_s"] > 0 for row in rows[:2])
    assert "multiple of parallel.ranks = 3" in rows[2]["error"]


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
def test_measured_rows_come_from_real_ranks() -> None:
    config = load_config("configs/digits.yaml", ["parallel.device=cpu"])
    todo = [ScalingCase(kind="measured", mode="weak", strategy="ddp", batch=32, ranks=ranks) for ranks in (1, 2)]
    rows = bench_scaling(config, todo, 8, None, told)
    assert [row["ideal"] for row in rows] == [1, 2]
    assert rows[1]["efficiency"] == pytest.approx(rows[1]["samples_per_s"] / rows[0]["samples_per_s"] / 2)


SHIPPED = [
    path for path in sorted(Path("configs").glob("*.yaml")) if path.stem not in ("text_classification", "gpt_long")
]  # no model here; one rank shares no sequence


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_config_may_be_measured_for_a_few_steps(path: Path) -> None:
    config = load_config(path, ["data.path=null"] if path.stem == "nanogpt_shakespeare" else [])  # its text is not here
    assert run_checks(short_run(config, 6)) == []
    case = ScalingCase(kind="measured", mode="weak", strategy=own_strategy(config), batch=8, ranks=4)
    for ranks in {4, config.parallel.tensor}:
        assert run_checks(short_run(config_of(config, replace(case, ranks=ranks)), 6)) == []


def test_a_case_that_cannot_run_says_what_is_wrong_with_its_values() -> None:
    config = load_config("configs/digits.yaml", ["parallel.device=cpu", "optim.groups={a: {lr: 1.0}}"])
    muon = config.with_values("optim", kind="muon")
    case = ScalingCase(kind="simulated", mode="strong", strategy="ddp", batch=64, ranks=1)
    (row,) = bench_scaling(muon, [case], 6, None, told)
    assert row["error"] == "optim.groups.a: lr = 1 with optim.kind = muon"


def test_the_ranks_of_a_pipeline_are_its_stages_with_four_microbatches_each() -> None:
    config = load_config("configs/gpt_pipeline.yaml", ["parallel.stage_layers=[2, 2]"])
    assert own_strategy(config) == "pipeline"
    case = ScalingCase(kind="predicted", mode="strong", strategy="pipeline", batch=64, ranks=4)
    four, alone = config_of(config, case), config_of(config, replace(case, ranks=1))
    assert (four.parallel.pipeline, four.parallel.stage_layers, four.train.accumulate) == (4, None, 16)
    assert (alone.parallel.pipeline, alone.train.accumulate) == (1, None)
    spread = config_of(config, replace(case, strategy="fsdp"))
    assert (spread.parallel.pipeline, spread.parallel.strategy) == (1, "fsdp")


def test_one_table_has_rate_efficiency_communication_and_memory_of_every_strategy(
    capsys: pytest.CaptureFixture[str],
) -> None:
    small = ["parallel.device=cpu", "model.layers=2", "model.width=16", "model.context=8", "data.eval_fraction=0.001"]
    config = load_config("configs/gpt_pydoc.yaml", small)
    one = ScalingCase(kind="predicted", mode="strong", strategy="ddp", batch=8, ranks=2)
    todo = [replace(one, strategy=strategy) for strategy in ("ddp", "fsdp", "pipeline")]
    todo.append(replace(one, kind="simulated", strategy="pipeline"))
    rows = bench_scaling(config, todo, 6, load_cluster("1x dgx-h100"), told)  # its warmup is of 20 steps
    assert [row.get("error") for row in rows] == [None] * 4
    for row in rows:
        assert (row["unit"], row["units_per_s"]) == ("tokens", pytest.approx(8 * row["samples_per_s"]))
        assert 0 < row["comm_share"] < 1
        assert row["memory_bytes"] > 0
    show_table("scaling", rows)
    shown = capsys.readouterr().out
    assert all(title in shown for title in ("rate", "efficiency", "communication", "memory"))
