"""A plain script with the trainer's other name and a monitor: every argument, and nothing but an import of paceline."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from paceline import DistributedMonitor, EnhancedDistributedTrainer
from paceline.comm.base import Communicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.records.report import summarize

CRITERION = nn.CrossEntropyLoss()


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3))


def make_batches(number: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    source = torch.Generator().manual_seed(5)
    inputs = torch.randn(number, 10, 6, generator=source)
    return [(each, each[:, :3].argmax(1)) for each in inputs]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of TensorBoard's reader, which only tests use
def test_a_script_with_every_argument_trains_saves_and_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("paceline_classic.config.bf16_instructions", tuple)
    model, loader = make_model(), make_batches(8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer = EnhancedDistributedTrainer(
            model=model,
            strategy="fsdp",
            mixed_precision=True,
            gradient_accumulation_steps=4,
            gradient_clip_val=1.0,
            enable_activation_checkpointing=True,
            cpu_offload=True,
            checkpoint_dir="./checkpoints",
            log_dir="./logs",
        )
    texts = [str(each.message) for each in told]
    for part in ("mixed_precision=True computes in fp32 here", "nothing to gain"):
        assert any(part in text for text in texts)
    monitor = DistributedMonitor(log_dir="./logs")
    means: list[float] = []
    for epoch in range(3):
        losses = []
        for step, batch in enumerate(loader):
            metrics = trainer.train_step(batch=batch, optimizer=optimizer, criterion=CRITERION, step=step)
            monitor.log_training_step(
                loss=metrics["loss"],
                batch_size=batch[0].size(0),
                step_time=metrics["compute_time"],
                comm_time=metrics["communication_time"],
            )
            losses.append(metrics["loss"])
        mean = sum(losses) / len(losses)
        is_best = mean < min(means, default=float("inf"))
        trainer.save_checkpoint(epoch=epoch, optimizer=optimizer, loss=mean, is_best=is_best)
        means.append(mean)
    monitor.close()
    assert means[-1] < means[0]
    numbers = trainer.get_performance_metrics()
    assert numbers["samples_per_second_per_gpu"] > 0
    assert 0 <= numbers["communication_overhead_percent"] < 100
    assert (tmp_path / "checkpoints" / "best").is_dir()
    written = (tmp_path / "logs" / "records" / "rank-0.jsonl").read_text().splitlines()
    lines = [line for line in map(json.loads, written) if line["type"] == "step"]
    assert [line["step"] for line in lines] == list(range(1, 25))
    assert lines[-1]["loss"] == metrics["loss"]
    reader = EventAccumulator("logs")
    reader.Reload()
    assert [each.step for each in reader.Scalars("train/loss")] == list(range(1, 25))
    assert {"time/step_s", "time/comm_s", "speed/samples_per_s"} <= set(reader.Tags()["scalars"])


@pytest.mark.parametrize(
    "strategy", ["fsdp", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("ddp", "zero1", "zero2"))]
)
def test_an_optimizer_of_the_models_own_parameters_is_adopted(strategy: str, tmp_path: Path) -> None:
    def work(comm: Communicator, when: str) -> list[float]:
        model = make_model()
        make: Callable[..., torch.optim.Optimizer] = lambda parameters: torch.optim.AdamW(parameters, lr=0.02)  # noqa: E731
        optimizer = make(model.parameters()) if when == "before" else None
        trainer = EnhancedDistributedTrainer(model, strategy, comm=comm, checkpoint_dir=tmp_path / when)
        optimizer = optimizer or make(model.parameters() if when == "after" else trainer.parameters())
        losses = [trainer.train_step(batch, optimizer, CRITERION)["loss"] for batch in make_batches(3)]
        trainer.save_checkpoint(0, optimizer, losses[-1])
        again = make(model.parameters())
        trainer.load_checkpoint(optimizer=again)
        return [*losses, *(trainer.train_step(batch, again, CRITERION)["loss"] for batch in make_batches(2))]

    expected = run_virtual(lambda comm: work(comm, "as told"), 2)
    for when in ("before", "after"):
        assert run_virtual(lambda comm, when=when: work(comm, when), 2) == expected


def test_ranks_log_to_files_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monitor = DistributedMonitor(log_dir=tmp_path)
    monitor.log_training_step(torch.tensor(2.5), batch_size=4, step_time=0.5, comm_time=0.1, step=7)
    monitor.close()
    (file,) = (tmp_path / "records").iterdir()
    first, line, end = (json.loads(line) for line in file.read_text().splitlines())
    assert (first["rank"], first["world_size"], first["type"]) == (1, 2, "run")
    assert (file.name, line["step"], line["samples_per_s"], line["loss_sum"]) == ("rank-1.jsonl", 7, 8.0, 10.0)
    assert (end["status"], end["step"]) == ("done", 7)


class OneGpu:
    """What is measured of a GPU."""

    def read(self) -> dict[str, float]:
        return {"hw.gpu.utilization/0": 0.75}


@pytest.mark.parametrize("gpus", [OneGpu(), None])
def test_a_monitor_measures_gpus_or_leaves_them_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: OneGpu | None
) -> None:
    monkeypatch.setattr("paceline_classic.monitor.open_gpus", lambda: (gpus, "no driver"))
    monitor = DistributedMonitor(log_dir=tmp_path)
    for _ in range(2):
        monitor.log_training_step(loss=0.5, batch_size=8, step_time=0.1, comm_time=0.01)
    monitor.close()
    lines = [json.loads(line) for line in (tmp_path / "records" / "rank-0.jsonl").read_text().splitlines()]
    measured = [line["detail"] for line in lines if line["type"] == "event"]
    assert measured == ([] if gpus is None else [{"hw.gpu.utilization/0": 0.75}])  # once a second
    summary = summarize(tmp_path)
    assert (summary.status, summary.steps, summary.final_loss) == ("done", 2, 0.5)
