"""The trainer of virtual ranks and the analyzer: the usage that scripts have, and what they show."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from made_records import END, RUN, STEP, write_records

import paceline
from paceline.config import config_from_dict
from paceline.errors import RunFolderError, UsageError
from paceline.records.records import HostRecord, to_line
from paceline.records.summary import RunRecords
from paceline_classic.analysis import TrainingMetrics


def small(**settings: object) -> paceline.DistributedConfig:
    return paceline.DistributedConfig(dataset_size=60, batch_size=16, model_dim=16, epochs=2, **settings)


def test_the_usual_script_runs(tmp_path: Path) -> None:
    config = small()
    config.world_size = 2

    trainer = paceline.MockDistributedTrainer(config)
    trainer.setup_model_and_data()
    metrics = trainer.train()

    alone = paceline.MockDistributedTrainer(small(world_size=1)).train()

    analyzer = paceline.DistributedTrainingAnalyzer(metrics, baseline=alone)
    figure = analyzer.plot_training_metrics(tmp_path / "run.png")
    report = analyzer.generate_performance_report()

    assert metrics["epoch"] == [1, 2]
    assert all(0 <= (value or 0) <= 1 for value in metrics["accuracy"])
    assert (metrics["train_loss"][1] or 9) < (metrics["train_loss"][0] or 0)
    assert len(figure.axes) == 8
    titles = [axes.get_title("left") or axes.get_title() for axes in figure.axes]
    assert [title for title in titles if "utilisation" in title or "memory" in title or "balance" in title] == titles[
        4:7
    ]
    assert titles[7].startswith("bottleneck: ")
    assert (report.ranks, report.epochs, report.steps) == (2, 2, 6)
    assert report.final_accuracy == metrics["accuracy"][-1]
    assert report.speed_up == pytest.approx(metrics.samples_per_s / alone.samples_per_s)
    assert report.scaling_efficiency == pytest.approx((report.speed_up or 0) / 2)
    assert report.scaling == "strong scaling: one rank with the same global batch"
    assert "ddp on 2 ranks: 2 epochs, 6 steps" in str(report)
    assert (tmp_path / "run.png").stat().st_size > 1000


def test_four_gpus_are_simulated_by_default_with_utilisation_and_efficiency(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    trainer = paceline.MockDistributedTrainer(small(world_size=4))
    metrics = trainer.train("run")
    assert metrics.run.device == "a100-sxm-80gb"
    shares = [step.busy_s / (step.end_s - step.start_s) for own in trainer.simulation.steps for step in own]  # type: ignore
    assert metrics["gpu_utilization"][0] == pytest.approx(100 * sum(shares) / len(shares), rel=0.2), "of two epochs"
    assert dict(paceline.DistributedTrainingAnalyzer("run").metrics) == dict(metrics)

    analyzer = paceline.DistributedTrainingAnalyzer(metrics)
    analyzer.plot_training_metrics()
    assert (tmp_path / "training_metrics.png").stat().st_size > 1000
    assert "training_metrics.png" in capsys.readouterr().out
    report = analyzer.generate_performance_report()
    alone = paceline.MockDistributedTrainer(
        paceline.DistributedConfig(dataset_size=60, batch_size=4, model_dim=16, epochs=2, world_size=1)
    ).train()
    assert report.speed_up == pytest.approx(metrics.samples_per_s / alone.samples_per_s, rel=0.02)
    assert report.scaling_efficiency == pytest.approx((report.speed_up or 0) / 4)
    assert "%, modelled" in str(report)
    assert "weak scaling: one rank with the same batch of a rank" in str(report)


def test_a_config_for_gloo_is_simulated_on_processes_of_this_host() -> None:
    trainer = paceline.MockDistributedTrainer(small(world_size=2, backend="gloo"))
    assert (trainer.conditions.cluster, trainer.conditions.compute) == (None, "measured")
    asked = paceline.SimulatedTrainer(small(world_size=2), compute="measured")
    assert (asked.conditions.cluster, asked.conditions.compute) == (None, "measured")


def write_run(folder: Path, ranks: int, *, batch: int, step_s: float) -> Path:
    """Ten steps of one epoch, in which ranks wait for a tenth of the time."""
    for rank in range(ranks):
        steps = [
            replace(
                STEP, step=step, epoch=step / 10, samples=batch // ranks, step_s=step_s, comm_s=step_s / 10, time=step
            )
            for step in range(1, 11)
        ]
        run = replace(RUN, rank=rank, world_size=ranks, global_batch=batch, time=0.0)
        write_records(folder, rank, run, *steps, END)
    return folder


def test_a_baseline_on_two_ranks_counts_as_two(tmp_path: Path) -> None:
    run, base = write_run(tmp_path / "4", 4, batch=64, step_s=1.0), write_run(tmp_path / "2", 2, batch=64, step_s=1.6)
    report = paceline.DistributedTrainingAnalyzer(run, baseline=base).generate_performance_report()
    assert report.samples_per_s == pytest.approx(64.0)
    assert report.speed_up == pytest.approx(64 / (40 / 2))
    assert report.scaling_efficiency == pytest.approx(0.8)
    assert "speed-up             3.20 x of one rank, ideal 4 x" in str(report)
    assert "80.0 %, speed-up / ranks; strong scaling: a rank of 2 with the same global batch" in str(report)


def test_the_share_of_compute_is_what_ranks_did_not_wait(tmp_path: Path) -> None:
    metrics = paceline.DistributedTrainingAnalyzer(write_run(tmp_path, 2, batch=32, step_s=0.5)).metrics
    assert metrics["compute_share"] == pytest.approx([90.0])
    assert metrics["compute_time"] == pytest.approx([4.5])
    assert metrics["communication_time"] == pytest.approx([0.5])
    assert metrics["epoch_time"] == pytest.approx([5.0])
    assert metrics["throughput"] == pytest.approx([64.0])


def test_a_baseline_that_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    run, base = write_run(tmp_path / "4", 4, batch=512, step_s=1.0), write_run(tmp_path / "2", 2, batch=64, step_s=1.0)
    with pytest.raises(UsageError, match="global batch: 512 on 4 ranks against 64 on 2"):
        paceline.DistributedTrainingAnalyzer(run, baseline=base)


def test_efficiency_and_utilization_are_measured_or_absent(tmp_path: Path) -> None:
    for rank in (0, 1):
        steps = [replace(STEP, step=step, epoch=step / 10, step_s=1.0, comm_s=0.1, time=step) for step in range(1, 11)]
        write_records(tmp_path, rank, replace(RUN, rank=rank, time=0.0), *steps, END)
    report = paceline.DistributedTrainingAnalyzer(tmp_path).generate_performance_report()
    assert (report.speed_up, report.scaling_efficiency, report.gpu_utilization_percent) == (None, None, None)
    assert report.compute_percent == pytest.approx(90.0), "which is not an efficiency"
    assert "scaling efficiency   not known" in str(report)
    shown = [
        HostRecord(host="a", values={"hw.gpu.utilization/0": share, "hw.power/0": 9.0}, time=3.0)
        for share in (0.5, 0.7)
    ]
    (tmp_path / "records" / "host-a.jsonl").write_text("".join(map(to_line, shown)))
    report = paceline.DistributedTrainingAnalyzer(tmp_path).generate_performance_report()
    assert report.gpu_utilization_percent == pytest.approx(60.0)


def test_training_leaves_its_values_in_the_model_and_repeats(tmp_path: Path) -> None:
    trainer = paceline.SimulatedTrainer(small(world_size=2), compute="modelled", slow={1: 2.0})
    with pytest.raises(UsageError, match="no model yet"):
        _ = trainer.model
    with pytest.raises(UsageError, match="no time line"):
        trainer.write_trace(tmp_path / "trace.json")
    first = trainer.train(tmp_path / "run")
    values = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    assert dict(trainer.train()) == dict(first)
    assert all(torch.equal(value, values[name]) for name, value in trainer.model.state_dict().items())
    trainer.write_trace(tmp_path / "trace.json")
    assert (tmp_path / "trace.json").is_file()
    again = paceline.DistributedTrainingAnalyzer(tmp_path / "run").metrics
    assert dict(again) == dict(first)


def test_ranks_do_not_change_what_is_learned() -> None:
    curves = [
        paceline.SimulatedTrainer(_without_dropout(ranks), compute="modelled").train()["train_loss"] for ranks in (1, 4)
    ]
    assert curves[0] == pytest.approx(curves[1], rel=1e-4)


def _without_dropout(ranks: int):  # noqa: ANN202
    values = small(world_size=ranks).to_config().model_dump(mode="json", exclude_unset=True)
    values["model"]["dropout"] = 0.0
    return config_from_dict(values, source="test")


def test_bad_input_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="config is of type dict"):
        paceline.SimulatedTrainer({"world_size": 4})  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="no cluster is called 'dgx-h1000'"):
        paceline.SimulatedTrainer(small(), cluster="4x dgx-h1000")
    with pytest.raises(UsageError, match=r"slow = \{9: 2\}"):
        paceline.SimulatedTrainer(small(world_size=4), slow={9: 2.0})
    with pytest.raises(UsageError, match=r"slow_links = \{1: 0\}"):
        paceline.SimulatedTrainer(small(world_size=4), slow_links={1: 0.0})
    with pytest.raises(UsageError, match="4 ranks on 1x a100-sxm-80gb"):
        paceline.SimulatedTrainer(small(world_size=4), cluster="1x a100-sxm-80gb")
    with pytest.raises(UsageError, match="compute = 'guessed'"):
        paceline.SimulatedTrainer(small(), compute="guessed")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="metrics is of type list"):
        paceline.DistributedTrainingAnalyzer([])  # type: ignore[arg-type]
    with pytest.raises(RunFolderError, match="no run to report on in"):
        paceline.DistributedTrainingAnalyzer(tmp_path)
    with pytest.raises(UsageError, match="no steps"):
        TrainingMetrics(RunRecords.of([[RUN], [RUN]]))
