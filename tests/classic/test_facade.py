"""The trainer of a plain script: what it computes against one process, and what it refuses."""

from __future__ import annotations

import copy
import functools
import itertools
import json
import math
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from covering import covering
from torch import nn

import paceline
from paceline.comm.base import Communicator
from paceline.comm.solo import SoloCommunicator
from paceline.comm.traced import TracedCommunicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.errors import CheckpointError, ConfigError, RankFailedError, TrainingError, UsageError
from paceline_classic.monitor import StepMetrics
from paceline_classic.trainer import DistributedConfig, DistributedTrainer

Batch = tuple[torch.Tensor, torch.Tensor]
ACCUMULATE = 4
CLIP = 0.05  # far below the norms here, so that clipping bites
TOLERANCE = 1e-12
# Samples of each microbatch, by group and rank: ragged everywhere, nothing at all in two places.
RAGGED = [[[3, 5, 1, 2], [4, 1, 1, 6]], [[2, 2, 7, 1], [1, 3, 0, 5]], [[1, 4, 2, 3], [6, 1, 2, 0]]]


def make_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)


@functools.cache
def make_groups(rows: tuple[tuple[tuple[int, ...], ...], ...]) -> list[list[list[Batch]]]:
    """Makes random batches of the sizes asked for: groups, ranks, microbatches."""
    generator = torch.Generator().manual_seed(2)

    def batch(size: int) -> Batch:
        inputs = torch.randn(size, 6, generator=generator, dtype=torch.float64)
        return inputs, torch.randint(3, (size,), generator=generator)

    return [[[batch(size) for size in rank] for rank in group] for group in rows]


def ragged(ranks: int) -> list[list[list[Batch]]]:
    """Deals the ragged microbatches to any number of ranks: 1 gets every other one, 3 repeat the first."""
    rows = tuple(tuple(tuple(group[rank % 2]) for rank in range(ranks)) for group in RAGGED)
    return make_groups(rows)


def alone(groups: Sequence[Sequence[Sequence[Batch]]], clip: float | None = CLIP) -> tuple[list[torch.Tensor], Any]:
    """Trains one process on each group as one batch; returns parameters and norms."""
    model, norms = make_model(), []
    optimizer = make_optimizer(model.parameters())
    for group in groups:
        batches = [batch for rank in group for batch in rank]
        inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
        F.cross_entropy(model(inputs), targets).backward()
        if clip is not None:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip)))
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()], norms


def make_trainer(comm: Communicator, folder: Path | str = "unused", **arguments: Any) -> DistributedTrainer:
    settings = {"gradient_accumulation_steps": ACCUMULATE, "gradient_clip_val": CLIP, **arguments}
    return DistributedTrainer(make_model(), comm=comm, checkpoint_dir=folder, **settings)


def values_of(trainer: DistributedTrainer) -> list[torch.Tensor]:
    return [p.detach().clone() for p in trainer.parameters()]


def assert_same(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor], tolerance: float = TOLERANCE) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=tolerance)


def solo() -> SoloCommunicator:
    return SoloCommunicator(torch.device("cpu"))


# What it computes.


@covering(
    criterion={
        "mean": nn.CrossEntropyLoss(),
        "function": F.cross_entropy,
        "sum": nn.CrossEntropyLoss(reduction="sum"),
        "partial-sum": functools.partial(F.cross_entropy, reduction="sum"),
    },
    ranks=[3, 1, 2],
)
def test_ragged_microbatches_make_the_update_of_one_process(ranks: int, criterion: Any) -> None:
    groups = ragged(ranks)

    def work(comm: Communicator) -> tuple[list[torch.Tensor], list[Any]]:
        trainer = make_trainer(comm)
        optimizer = make_optimizer(trainer.parameters())
        metrics = [
            trainer.train_step(batch=batch, optimizer=optimizer, criterion=criterion, step=step)
            for group in groups
            for step, batch in enumerate(group[comm.rank])
        ]
        return values_of(trainer), [dict(each) for each in metrics]

    expected, norms = alone(groups)
    for rank, (parameters, metrics) in enumerate(run_virtual(work, ranks)):
        assert_same(parameters, expected)
        assert [each["is_update"] for each in metrics] == [False, False, False, True] * len(groups)
        found = [each["grad_norm"] for each in metrics]
        assert found[:3] == [None] * 3
        assert found[3::4] == pytest.approx(norms, abs=TOLERANCE)
        assert min(norms) > CLIP
        assert [each["samples"] for each in metrics] == [len(b[0]) for group in groups for b in group[rank]]
        assert [each["step"] for each in metrics] == [0, 1, 2, 3] * len(groups)


def test_the_loss_is_this_microbatchs_mean_whatever_the_reduction() -> None:
    batch = ragged(1)[0][0][0]
    expected = F.cross_entropy(make_model()(batch[0]), batch[1]).item()
    for criterion in (nn.CrossEntropyLoss(), nn.CrossEntropyLoss(reduction="sum")):
        trainer = make_trainer(solo())
        metrics = trainer.train_step(batch, make_optimizer(trainer.parameters()), criterion)
        assert metrics["loss"] == pytest.approx(expected, abs=TOLERANCE)
        assert isinstance(metrics["loss"], float)


def test_without_accumulation_every_call_updates_and_without_clipping_the_norm_is_only_measured() -> None:
    groups = make_groups((((5,), (2,)), ((1,), (4,))))

    def work(comm: Communicator) -> tuple[list[torch.Tensor], list[Any]]:
        trainer = DistributedTrainer(make_model(), comm=comm)
        optimizer = make_optimizer(trainer.parameters())
        metrics = [trainer.train_step(group[comm.rank][0], optimizer, nn.CrossEntropyLoss(), 7) for group in groups]
        return values_of(trainer), metrics

    expected, _ = alone(groups, clip=None)
    for parameters, metrics in run_virtual(work, 2):
        assert_same(parameters, expected)
        assert [(each["is_update"], each["is_skipped"]) for each in metrics] == [(True, False)] * 2
        assert all(each["grad_norm"] > 0 for each in metrics)


def test_an_endless_limit_measures_the_norm_and_clips_nothing() -> None:
    groups = ragged(2)

    def work(comm: Communicator) -> tuple[list[torch.Tensor], float]:
        trainer = make_trainer(comm, gradient_clip_val=math.inf)
        optimizer = make_optimizer(trainer.parameters())
        metrics = [trainer.train_step(b, optimizer, F.cross_entropy) for group in groups for b in group[comm.rank]]
        return values_of(trainer), metrics[-1]["grad_norm"]

    expected, _ = alone(groups, clip=None)
    for parameters, norm in run_virtual(work, 2):
        assert_same(parameters, expected)
        assert norm > CLIP


def test_only_the_last_microbatch_of_a_group_communicates() -> None:
    def work(comm: Communicator) -> list[int]:
        trainer = make_trainer(comm)
        optimizer = make_optimizer(trainer.parameters())
        traced = trainer.engine.comm
        assert isinstance(traced, TracedCommunicator)
        counts = []
        for batch in [b for group in ragged(2) for b in group[comm.rank]]:
            before = traced.trace.num_operations.total()
            trainer.train_step(batch, optimizer, F.cross_entropy)
            counts.append(traced.trace.num_operations.total() - before)
        return counts[4:]  # the first group also agrees on the buckets

    for counts in run_virtual(work, 2):
        assert counts == [0, 0, 0, 2] * 2  # one bucket, and the number of samples


def test_flush_applies_a_last_group_that_is_not_full() -> None:
    groups = ragged(2)
    ends = [[rank[:count] for rank, count in zip(groups[2], (2, 1), strict=True)]]  # ranks may end differently here

    def work(comm: Communicator) -> tuple[list[torch.Tensor], list[bool], int]:
        trainer = make_trainer(comm)
        optimizer = make_optimizer(trainer.parameters())
        flushed = []
        for group in [groups[0], ends[0], groups[1]]:
            for batch in group[comm.rank]:
                trainer.train_step(batch, optimizer, F.cross_entropy)
            flushed.append(trainer.flush(optimizer))
        return values_of(trainer), flushed, trainer.num_updates

    expected, _ = alone([groups[0], ends[0], groups[1]])
    for parameters, flushed, num_updates in run_virtual(work, 2):
        assert_same(parameters, expected)
        assert flushed == [False, True, False]
        assert num_updates == 3


def test_without_a_flush_a_group_goes_on_over_the_end_of_an_epoch() -> None:
    groups = ragged(1)
    trainer = make_trainer(solo())
    optimizer = make_optimizer(trainer.parameters())
    batches = [b for group in groups for b in group[0]]
    for epoch in (batches[:6], batches[6:]):
        for step, batch in enumerate(epoch):
            trainer.train_step(batch, optimizer, F.cross_entropy, step)
    assert_same(values_of(trainer), alone(groups)[0])


@pytest.mark.parametrize("nothing", [None, (torch.empty(0, 6, dtype=torch.float64), torch.empty(0, dtype=torch.long))])
def test_a_rank_without_samples_takes_part(nothing: Any) -> None:
    groups = make_groups((((3, 2), (4, 1)),))

    def work(comm: Communicator) -> tuple[list[torch.Tensor], float]:
        trainer = make_trainer(comm, gradient_accumulation_steps=2)
        optimizer = make_optimizer(trainer.parameters())
        batches = groups[0][0] if comm.rank == 0 else [nothing, nothing]
        metrics = [trainer.train_step(batch, optimizer, nn.CrossEntropyLoss()) for batch in batches]
        return values_of(trainer), float(metrics[-1])

    expected, _ = alone([[groups[0][0]]])
    (first, loss), (second, no_loss) = run_virtual(work, 2)
    assert_same(first, expected)
    assert_same(second, expected)
    assert math.isfinite(loss)
    assert math.isnan(no_loss)


def test_parameters_that_no_optimizer_updates_do_not_pile_up_gradients() -> None:
    groups = ragged(1)
    norms = []
    for names in (("0.weight",), ("0.weight", "0.bias", "2.weight", "2.bias")):
        trainer = make_trainer(solo())
        chosen = [p for name, p in trainer.engine.named_parameters() if name in names]
        optimizer = torch.optim.SGD(chosen, lr=0.0)
        metrics = [trainer.train_step(b, optimizer, F.cross_entropy) for group in groups for b in group[0]]
        norms.append([each["grad_norm"] for each in metrics])
        assert all(p.grad is None for p in trainer.parameters())
    assert norms[0] == norms[1]


def test_the_learning_rate_is_the_one_that_was_used() -> None:
    trainer = make_trainer(solo(), gradient_accumulation_steps=1)
    optimizer = torch.optim.SGD(trainer.parameters(), lr=torch.tensor(0.5))
    batch = ragged(1)[0][0][0]
    first = trainer.train_step(batch, optimizer, F.cross_entropy)
    optimizer.param_groups[0]["lr"].fill_(0.25)
    second = trainer.train_step(batch, optimizer, F.cross_entropy)
    assert (first["learning_rate"], second["learning_rate"]) == (0.5, 0.25)


# The documented loops.


def documented_loop(comm: Communicator | None, folder: Path) -> tuple[list[float], dict[str, Any]]:
    torch.manual_seed(0)
    model = paceline.MLPClassifier(input_dim=12, hidden_dim=16, num_classes=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)  # before the trainer, as scripts have it
    criterion = nn.CrossEntropyLoss()
    rank = 0 if comm is None else comm.rank
    generator = torch.Generator().manual_seed(rank)
    centres = torch.randn(3, 12, generator=torch.Generator().manual_seed(9))
    targets = torch.randint(3, (64,), generator=generator)
    inputs = centres[targets] + 0.1 * torch.randn(64, 12, generator=generator)
    dataloader = list(zip(inputs.split(8), targets.split(8), strict=True))
    trainer = paceline.DistributedTrainer(
        model=model,
        strategy="ddp",
        gradient_accumulation_steps=4,
        gradient_clip_val=1.0,
        checkpoint_dir=folder,
        log_dir=str(folder / "logs"),
        comm=comm,
    )
    best_loss, losses = math.inf, []
    for epoch in range(3):
        total = 0.0
        for step, batch in enumerate(dataloader):
            metrics = trainer.train_step(batch=batch, optimizer=optimizer, criterion=criterion, step=step)
            total += metrics["loss"] * batch[0].size(0)
            assert metrics["compute_time"] + metrics["communication_time"] == pytest.approx(metrics["step_time"])
        avg_loss = total / 64
        trainer.save_checkpoint(epoch=epoch, optimizer=optimizer, loss=avg_loss, is_best=(avg_loss < best_loss))
        best_loss = min(best_loss, avg_loss)
        losses.append(avg_loss)
    return losses, trainer.get_performance_metrics()


def test_the_documented_loop_learns_on_two_ranks(tmp_path: Path) -> None:
    for losses, final_metrics in run_virtual(lambda comm: documented_loop(comm, tmp_path), 2):
        assert losses[-1] < losses[0]
        assert (
            f"{final_metrics['samples_per_second_per_gpu']:.1f} {final_metrics['communication_overhead_percent']:.1f}"
        )
        assert final_metrics["samples_per_second"] == 2 * final_metrics["samples_per_second_per_gpu"] > 0
        assert final_metrics["world_size"] == 2
        assert (final_metrics["total_steps"], final_metrics["total_updates"]) == (24, 6)
        assert final_metrics["total_samples"] == 3 * 64
        assert 0 < final_metrics["communication_overhead_percent"] <= 100
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "best",
        "logs",
        "step-00000002",
        "step-00000004",
        "step-00000006",
    ]


def test_a_log_dir_has_each_step_of_each_rank_and_curves(tmp_path: Path) -> None:
    def work(comm: Communicator) -> list[float]:
        trainer = DistributedTrainer(make_model(), comm=comm, log_dir=tmp_path)
        optimizer = make_optimizer(trainer.parameters())
        batches = [*ragged(2)[0][comm.rank], None]
        losses = [trainer.train_step(batch, optimizer, F.cross_entropy)["loss"] for batch in batches]
        trainer._calls.close()
        return losses[:-1]

    for rank, losses in enumerate(run_virtual(work, 2)):
        lines = (tmp_path / "trainer" / "records" / f"rank-{rank}.jsonl").read_text().splitlines()
        found = [line for line in map(json.loads, lines) if line["type"] == "step"]
        assert [(each["step"], each["loss"]) for each in found] == list(enumerate(losses, start=1))
        assert all(each["step_s"] > 0 for each in found)
    assert len(list((tmp_path / "trainer").glob("events.out.tfevents.*"))) == 1


def test_the_documented_loop_learns_without_a_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    losses, final_metrics = documented_loop(None, tmp_path)
    assert losses[-1] < losses[0]
    assert final_metrics["world_size"] == 1
    assert final_metrics["average_step_time"] > 0
    assert final_metrics["peak_memory_bytes"] > 0


def test_the_older_loop_takes_what_it_gets_for_the_loss() -> None:
    trainer = make_trainer(solo())
    optimizer = make_optimizer(trainer.parameters())
    for step, batch in enumerate(ragged(1)[0][0]):
        loss = trainer.train_step(batch=list(batch), optimizer=optimizer, criterion=nn.CrossEntropyLoss(), step=step)
        assert float(loss) == loss["loss"] == loss.item() > 0
        assert f"{loss:.3f}" == f"{loss['loss']:.3f}"
        assert f"{loss}" == str(loss)


def test_the_metrics_of_a_step_count_as_its_loss() -> None:
    steps = [StepMetrics({"loss": value, "samples": 8}) for value in (3.0, 1.5)]
    assert sum(steps) == 4.5
    assert sum(steps) / len(steps) == np.mean(steps) == 2.25
    assert (steps[0] + steps[1], steps[0] - 1, 1 - steps[1]) == (4.5, 2.0, -0.5)
    assert (2 * steps[0], steps[1] * 2, steps[0] / steps[1], 3 / steps[1]) == (6.0, 3.0, 2.0, 2.0)
    assert min(steps) is steps[1]
    assert steps[1] < 2 <= steps[0]
    assert steps[0] > 2 >= steps[1]
    assert round(StepMetrics({"loss": 0.126}), 2) == 0.13
    total = torch.zeros(())
    total += steps[0]
    assert total == 3.0
    assert isinstance(steps[0].item(), float)


def test_nothing_measured_is_zero_and_not_an_error() -> None:
    found = make_trainer(solo()).get_performance_metrics()
    zeros = {name for name, value in found.items() if value == 0}
    assert zeros == set(found) - {"world_size", "strategy", "peak_memory_bytes"}
    assert (found["world_size"], found["strategy"]) == (1, "ddp")


# Strategies, precision and memory.

STRATEGIES = ["ddp", "zero1", "zero2", "zero3", "fsdp"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_makes_the_updates_of_one_process(strategy: str) -> None:
    groups = ragged(2)

    def work(comm: Communicator) -> tuple[list[torch.Tensor], list[float]]:
        trainer = make_trainer(comm, strategy=strategy)
        optimizer = make_optimizer(trainer.parameters())
        metrics = [trainer.train_step(b, optimizer, F.cross_entropy) for group in groups for b in group[comm.rank]]
        return list(trainer.engine.full_state_dict().values()), [each["grad_norm"] for each in metrics[3::4]]

    expected, norms = alone(groups)
    for parameters, found in run_virtual(work, 2):
        assert_same(parameters, expected)
        assert found == pytest.approx(norms, abs=TOLERANCE)


class Blocks(nn.Module):
    """A small model of repeated blocks, with weights in fp32."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.enter = nn.Linear(6, 8)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)])
        self.leave = nn.Linear(8, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.enter(inputs.to(self.enter.weight.dtype))
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        output: torch.Tensor = self.leave(hidden)
        return output


@pytest.mark.some(1)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_the_usual_script_runs_with_everything_switched_on(
    strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sharded or not: mixed precision, accumulation, clipping, checkpointed activations, offload, saving."""
    loader = [b for group in ragged(2) for b in group[0]]
    monkeypatch.setattr("paceline_classic.config.bf16_instructions", lambda: ("bf16",))

    def work(comm: Communicator) -> dict[str, Any]:
        trainer = DistributedTrainer(
            model=Blocks(),
            strategy=strategy,
            mixed_precision=True,
            gradient_accumulation_steps=4,
            gradient_clip_val=1.0,
            enable_activation_checkpointing=True,
            cpu_offload=strategy == "fsdp",
            checkpoint_dir=str(tmp_path / "checkpoints"),
            log_dir=str(tmp_path / "logs"),
            comm=comm,
        )
        optimizer = torch.optim.AdamW(trainer.parameters(), lr=0.05)
        criterion, best, losses = nn.CrossEntropyLoss(), math.inf, []
        for epoch in range(4):
            total = 0.0
            for step, batch in enumerate(loader):
                metrics = trainer.train_step(batch=batch, optimizer=optimizer, criterion=criterion, step=step)
                total += metrics["loss"]
                assert metrics["compute_time"] > 0
            mean = total / len(loader)
            trainer.save_checkpoint(epoch=epoch, optimizer=optimizer, loss=mean, is_best=mean < best)
            best = min(best, mean)
            losses.append(mean)
        assert losses[-1] < 0.8 * losses[0]
        return trainer.get_performance_metrics()

    for final in run_virtual(work, 2):
        assert final["samples_per_second_per_gpu"] > 0
        assert 0 <= final["communication_overhead_percent"] <= 100
        assert (final["total_updates"], final["skipped_updates"]) == (12, 0)
    assert (tmp_path / "checkpoints" / "best" / "manifest.json").is_file()


@pytest.mark.parametrize("precision", ["bf16", "fp16", "bf16_master"])
def test_a_precision_by_name_computes_in_it_and_hands_the_criterion_what_it_can_use(precision: str) -> None:
    """The loss is summed in fp32, whatever the model computes in."""
    seen: list[torch.dtype] = []

    def criterion(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(outputs, targets)
        seen.append(loss.dtype)
        return loss

    trainer = DistributedTrainer(Blocks(), mixed_precision=precision, comm=solo())
    full = DistributedTrainer(Blocks(), comm=solo())
    batch = ragged(1)[0][0][0]
    found = trainer.train_step(batch, torch.optim.SGD(trainer.parameters(), lr=0.1), criterion)
    exact = full.train_step(batch, torch.optim.SGD(full.parameters(), lr=0.1), F.cross_entropy)
    assert seen == [torch.float32]
    assert found["loss"] != exact["loss"]
    assert found["loss"] == pytest.approx(exact["loss"], rel=0.02)
    assert found["grad_norm"] == pytest.approx(exact["grad_norm"], rel=0.05)


def test_a_checkpoint_of_a_strategy_is_taken_up_by_another(tmp_path: Path) -> None:
    groups = ragged(2)

    def save(comm: Communicator) -> None:
        trainer = make_trainer(comm, tmp_path, strategy="fsdp")
        optimizer = make_optimizer(trainer.parameters())
        for batch in [b for group in groups[:2] for b in group[comm.rank]]:
            trainer.train_step(batch, optimizer, F.cross_entropy)
        trainer.save_checkpoint(0, optimizer, 1.0)

    def resume(comm: Communicator, strategy: str) -> list[torch.Tensor]:
        trainer = make_trainer(comm, tmp_path, strategy=strategy)
        optimizer = make_optimizer(trainer.parameters())
        trainer.load_checkpoint(optimizer=optimizer)
        for batch in groups[2][comm.rank]:
            trainer.train_step(batch, optimizer, F.cross_entropy)
        return list(trainer.engine.full_state_dict().values())

    run_virtual(save, 2)
    expected, _ = alone(groups)
    for strategy in ("ddp", "zero1", "fsdp"):
        for found in run_virtual(lambda comm, strategy=strategy: resume(comm, strategy), 2):  # type: ignore[misc]
            assert_same(found, expected)


# Updates that are not finite.


def broken(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs * math.inf, targets)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_an_update_that_is_not_finite_on_one_rank_is_left_out_on_all(strategy: str) -> None:
    def work(comm: Communicator) -> None:
        trainer = DistributedTrainer(make_model(), strategy=strategy, comm=comm)
        optimizer = make_optimizer(trainer.parameters())
        batch = ragged(2)[0][comm.rank][0]
        trainer.train_step(batch, optimizer, F.cross_entropy)
        before = trainer.engine.full_state_dict()
        metrics = trainer.train_step(batch, optimizer, broken if comm.rank else F.cross_entropy)
        assert metrics["is_skipped"]
        assert math.isnan(metrics["grad_norm"])
        assert all(torch.equal(value, before[name]) for name, value in trainer.engine.full_state_dict().items())
        assert not trainer.train_step(batch, optimizer, F.cross_entropy)["is_skipped"]
        assert trainer.get_performance_metrics()["skipped_updates"] == 1

    run_virtual(work, 2)


def test_ten_updates_in_a_row_that_are_not_finite_end_the_run_and_name_the_place() -> None:
    def work(comm: Communicator) -> None:
        trainer = DistributedTrainer(make_model(), strategy="fsdp", comm=comm)
        optimizer = make_optimizer(trainer.parameters())
        inputs, targets = ragged(2)[0][comm.rank][0]
        if comm.rank:
            inputs = inputs.clone()
            inputs[0, 0] = math.nan
        for update in range(10):
            if update == 9:
                with pytest.raises(TrainingError) as failure:
                    trainer.train_step((inputs, targets), optimizer, F.cross_entropy)
                assert "10 updates in a row had gradients that are not finite, up to update 10" in str(failure.value)
                assert "the data of microbatch 0: 1 nan in 24 numbers of shape [4, 6], on rank 1" in str(failure.value)
            else:
                assert trainer.train_step((inputs, targets), optimizer, F.cross_entropy)["is_skipped"]

    run_virtual(work, 2)


def test_the_loss_scale_and_the_count_of_bad_updates_are_saved(tmp_path: Path) -> None:
    def make() -> tuple[DistributedTrainer, torch.optim.Optimizer]:
        trainer = DistributedTrainer(Blocks(), mixed_precision="fp16", comm=solo(), checkpoint_dir=tmp_path)
        return trainer, torch.optim.SGD(trainer.parameters(), lr=0.1)

    batch = ragged(1)[0][0][0]
    trainer, optimizer = make()
    for criterion in (F.cross_entropy, broken, broken):
        trainer.train_step(batch, optimizer, criterion)
    trainer.save_checkpoint(0, optimizer, 1.0)
    other, other_optimizer = make()
    other.load_checkpoint(optimizer=other_optimizer)
    assert trainer._state.scaler is not None
    assert other._state.scaler is not None
    assert other._state.scaler.state_dict() == trainer._state.scaler.state_dict()
    assert other._state.scaler.state_dict()["scale"] == 65536 / 4
    assert other._state.bad_steps.state_dict() == {"num_skipped": 2, "num_in_a_row": 2}


# The mapping.


def test_metrics_are_read_when_asked_for_and_once() -> None:
    calls = itertools.count(1)
    metrics = StepMetrics({"loss": lambda: next(calls) / 2, "samples": 3, "grad_norm": None})
    assert "loss" in metrics
    assert list(metrics) == ["loss", "samples", "grad_norm"]
    assert len(metrics) == 3
    assert next(calls) == 1  # nothing above has read the loss
    assert float(metrics) == metrics["loss"] == 1.0
    assert metrics == {"loss": 1.0, "samples": 3, "grad_norm": None}
    assert dict(metrics.items()) == metrics
    assert metrics.get("nothing") is None
    assert repr(metrics) == "StepMetrics({'loss': 1.0, 'samples': 3, 'grad_norm': None})"
    with pytest.raises(KeyError, match="nothing"):
        metrics["nothing"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_a_step_on_cuda_does_not_wait_for_the_device() -> None:
    trainer = DistributedTrainer(
        make_model(),
        gradient_accumulation_steps=2,
        gradient_clip_val=1.0,
        comm=SoloCommunicator(torch.device("cuda", 0)),
    )
    # A fused one: others cannot leave out a step by themselves, and the host has to look.
    optimizer = torch.optim.SGD(trainer.parameters(), lr=0.5, momentum=0.9, fused=True)
    batches = [tuple(t.pin_memory() for t in b) for group in ragged(1) for b in group[0]]
    for batch in batches[:4]:  # the first updates learn the order of gradients and allocate momentum
        trainer.train_step(batch, optimizer, nn.CrossEntropyLoss())
    torch.cuda.set_sync_debug_mode("error")
    try:
        metrics = [trainer.train_step(batch, optimizer, nn.CrossEntropyLoss()) for batch in batches[4:8]]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(each["step_time"] > 0 and math.isfinite(each["loss"]) for each in metrics)
    assert trainer.get_performance_metrics()["average_step_time"] > 0


# Checkpoints.


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_resumed_run_ends_where_an_uninterrupted_one_does(ranks: int, tmp_path: Path) -> None:
    groups = ragged(2)
    split = [[[b for rank in group for b in rank]] if ranks == 1 else group for group in groups]

    def save(comm: Communicator) -> tuple[Path, float]:
        trainer = make_trainer(comm, tmp_path)
        optimizer = make_optimizer(trainer.parameters())
        for batch in [b for group in groups[:2] for b in group[comm.rank]]:
            trainer.train_step(batch, optimizer, F.cross_entropy)
        torch.manual_seed(50 + comm.rank)
        return trainer.save_checkpoint(epoch=3, optimizer=optimizer, loss=torch.tensor(0.5, requires_grad=True)), float(
            torch.rand(1)
        )

    def resume(comm: Communicator) -> tuple[dict[str, Any], float, list[torch.Tensor], int]:
        trainer = make_trainer(comm, tmp_path, gradient_accumulation_steps=len(split[2][0]))
        optimizer = make_optimizer(trainer.parameters())
        trainer.train_step(groups[0][0][0], optimizer, F.cross_entropy)  # dropped by loading
        found = trainer.load_checkpoint(optimizer=optimizer)
        drawn = float(torch.rand(1))
        for batch in split[2][comm.rank]:
            trainer.train_step(batch, optimizer, F.cross_entropy)
        return found, drawn, values_of(trainer), trainer.num_updates

    saved = run_virtual(save, 2)
    assert {path for path, _ in saved} == {tmp_path / "step-00000002"}
    expected, _ = alone(groups)
    for rank, (found, drawn, parameters, num_updates) in enumerate(run_virtual(resume, ranks)):
        assert found == {"epoch": 3, "loss": 0.5, "step": 2}
        assert (drawn == saved[rank][1]) == (ranks == 2)  # random states continue at the same number of ranks
        assert_same(parameters, expected)
        assert num_updates == 3


def test_the_best_is_kept_beside_the_newest(tmp_path: Path) -> None:
    trainer = make_trainer(solo(), tmp_path, gradient_accumulation_steps=1)
    optimizer = make_optimizer(trainer.parameters())
    for epoch, (batch, is_best) in enumerate(zip(ragged(1)[0][0], (True, True, False), strict=False)):
        trainer.train_step(batch, optimizer, F.cross_entropy)
        trainer.save_checkpoint(epoch, optimizer, 1.0 / (epoch + 1), is_best)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["best", *(f"step-0000000{i}" for i in (1, 2, 3))]
    assert trainer.load_checkpoint(tmp_path / "best")["epoch"] == 1
    assert trainer.load_checkpoint(str(tmp_path)) == trainer.load_checkpoint() == {"epoch": 2, "loss": 1 / 3, "step": 3}


def test_samples_in_updates_are_counted_over_ranks_and_runs(tmp_path: Path) -> None:
    def work(comm: Communicator) -> None:
        trainer = make_trainer(comm, tmp_path)
        optimizer = make_optimizer(trainer.parameters())
        if any(tmp_path.iterdir()):
            trainer.load_checkpoint(optimizer=optimizer)
        for batch in ragged(2)[0][comm.rank]:
            trainer.train_step(batch, optimizer, F.cross_entropy)
        trainer.save_checkpoint(0, optimizer, 0.0)

    samples = sum(len(b[0]) for rank in ragged(2)[0] for b in rank)
    for run in (1, 2):
        run_virtual(work, 2)
        manifest = (tmp_path / f"step-0000000{run}" / "manifest.json").read_text()
        assert f'"position": {run * samples},' in manifest


def test_saving_within_a_group_warns_that_its_gradients_are_not_saved(tmp_path: Path) -> None:
    trainer = make_trainer(solo(), tmp_path)
    optimizer = make_optimizer(trainer.parameters())
    trainer.train_step(ragged(1)[0][0][0], optimizer, F.cross_entropy)
    with pytest.warns(UserWarning, match=r"1 of 4 microbatches are accumulated(.|\n)*trainer\.flush"):
        trainer.save_checkpoint(0, optimizer, 1.0)


def test_all_ranks_learn_that_saving_failed(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")

    def work(comm: Communicator) -> str:
        trainer = make_trainer(comm, tmp_path / "file")
        with pytest.raises(CheckpointError, match="file") as raised:
            trainer.save_checkpoint(0, make_optimizer(trainer.parameters()), 1.0)
        return str(raised.value)

    first, second = run_virtual(work, 2)
    assert first == second


def test_all_ranks_learn_that_loading_failed(tmp_path: Path) -> None:
    def save(comm: Communicator) -> None:
        trainer = make_trainer(comm, tmp_path)
        trainer.save_checkpoint(0, make_optimizer(trainer.parameters()), 1.0)

    def load(comm: Communicator) -> None:
        trainer = make_trainer(comm, tmp_path)
        wrong = torch.optim.SGD(list(trainer.parameters())[comm.rank :], lr=0.1)  # fits on rank 0 alone
        with pytest.raises(CheckpointError, match=r"^rank 1: (.|\n)*does not fit this model or optimizer"):
            trainer.load_checkpoint(optimizer=wrong)

    run_virtual(save, 2)
    run_virtual(load, 2)


def test_no_checkpoint_is_an_error_that_names_the_folder(tmp_path: Path) -> None:
    def work(comm: Communicator) -> None:
        trainer = make_trainer(comm, tmp_path / "none")
        for path in (None, tmp_path):
            with pytest.raises(
                CheckpointError, match="no checkpoint in .*start without loading".replace(".*", r"(.|\n)*")
            ):
                trainer.load_checkpoint(path)

    run_virtual(work, 2)


# What it refuses.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"strategy": "fdsp"}, r"strategy = 'fdsp' is unknown(.|\n)*did you mean fsdp\?"),
        ({"strategy": None}, "strategy = None is unknown"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps = 0"),
        ({"gradient_accumulation_steps": True}, "gradient_accumulation_steps = True"),
        ({"gradient_accumulation_steps": 2.0}, r"gradient_accumulation_steps = 2\.0"),
        ({"gradient_clip_val": 0}, "gradient_clip_val = 0"),
        ({"gradient_clip_val": -1.0}, r"gradient_clip_val = -1\.0"),
        ({"gradient_clip_val": math.nan}, "gradient_clip_val = nan"),
        ({"gradient_clip_val": "1"}, "gradient_clip_val = '1'"),
        ({"checkpoint_dir": None}, "checkpoint_dir is of type NoneType"),
        ({"log_dir": 3}, "log_dir is of type int"),
        (
            {"mixed_precision": "bf61"},
            r"mixed_precision = 'bf61'\n  it is True, False, or one of(.|\n)*did you mean bf16",
        ),
        ({"mixed_precision": 16}, "mixed_precision = 16"),
        ({"mixed_precision": ["bf16"]}, r"mixed_precision = \['bf16'\]"),
        ({"cpu_offload": True}, r"cpu_offload = True with strategy = 'ddp'(.|\n)*use strategy = 'fsdp'"),
        ({"cpu_offload": "yes"}, "cpu_offload is of type str"),
        ({"enable_activation_checkpointing": "full"}, "enable_activation_checkpointing is of type str"),
        ({"comm": 2}, "comm is of type int"),
        ({"checkpoint_folder": "a"}, r"checkpoint_folder is not an argument(.|\n)*did you mean checkpoint_dir\?"),
        ({"model": "mlp"}, "model is of type str"),
    ],
    ids=str,
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        DistributedTrainer(**{"model": make_model(), "comm": solo(), **arguments})


def test_all_problems_of_the_arguments_come_at_once() -> None:
    with pytest.raises(UsageError, match="DistributedTrainer: 4 problems"):
        DistributedTrainer(
            make_model(), strategy="fsqp", mixed_precision="fp9", gradient_accumulation_steps=0, gradient_clip_val=0
        )


def test_an_optimizer_of_other_parameters_is_refused_with_the_fix() -> None:
    trainer = make_trainer(solo())
    stranger = make_optimizer(make_model().parameters())
    for call in (trainer.flush, lambda o: trainer.train_step(ragged(1)[0][0][0], o, F.cross_entropy)):
        with pytest.raises(UsageError, match=r"4 of the optimizer's 4 tensors(.|\n)*trainer\.parameters\(\)"):
            call(stranger)
    with pytest.raises(UsageError, match="optimizer is of type int"):
        trainer.flush(3)  # type: ignore[arg-type]


def test_an_optimizer_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(solo())
    optimizer = make_optimizer(trainer.parameters())
    checked: list[Any] = []
    monkeypatch.setattr(trainer.engine, "check_optimizer", checked.append)
    for batch in ragged(1)[0][0]:
        trainer.train_step(batch, optimizer, F.cross_entropy)
    assert checked == [optimizer]


def test_another_optimizer_within_a_group_is_refused() -> None:
    trainer = make_trainer(solo())
    first, second = (make_optimizer(trainer.parameters()) for _ in range(2))
    batch = ragged(1)[0][0][0]
    trainer.train_step(batch, first, F.cross_entropy)
    with pytest.raises(UsageError, match="another optimizer came after 1 of 4 microbatches"):
        trainer.train_step(batch, second, F.cross_entropy)
    trainer.flush(first)
    trainer.train_step(batch, second, F.cross_entropy)


@pytest.mark.parametrize(
    ("batch", "criterion", "message"),
    [
        (torch.zeros(2, 6), F.cross_entropy, "batch is a Tensor"),
        ((torch.zeros(2, 6),), F.cross_entropy, "batch is a tuple of 1"),
        (("a", "b"), F.cross_entropy, "batch has no tensor"),
        ((torch.tensor(1.0), torch.tensor(1)), F.cross_entropy, "batch has a first tensor without dims"),
        (None, nn.CrossEntropyLoss(reduction="none"), "reduction = 'none'"),
        (None, functools.partial(F.cross_entropy, reduction="none"), "reduction = 'none'"),
        (None, lambda outputs, _: outputs.sum(1), r"criterion returned shape \[3\]"),
        (None, lambda *_: 0.5, "criterion returned float"),
    ],
)
def test_other_batches_and_losses_are_refused(batch: Any, criterion: Callable[..., Any], message: str) -> None:
    trainer = make_trainer(solo())
    optimizer = make_optimizer(trainer.parameters())
    with pytest.raises(UsageError, match=message):
        trainer.train_step(ragged(1)[0][0][0] if batch is None else batch, optimizer, criterion)


def test_one_module_on_two_virtual_ranks_is_refused() -> None:
    model = make_model()
    with pytest.raises(RankFailedError, match="parallelized already"):
        run_virtual(lambda comm: DistributedTrainer(model, comm=comm), 2)


# The settings.


def test_settings_have_the_documented_defaults() -> None:
    config = DistributedConfig()
    assert (config.world_size, config.backend, config.batch_size, config.epochs) == (4, "nccl", 64, 10)
    assert (config.learning_rate, config.model_dim, config.num_classes) == (0.001, 512, 10)
    assert config.dataset_size == 10000
    assert config == DistributedConfig(world_size=4)
    assert config != DistributedConfig(world_size=2)
    assert "world_size=4, backend='nccl'" in repr(config)


def test_settings_become_the_real_config() -> None:
    settings = DistributedConfig(num_classes=7, dataset_size=500)
    settings.world_size = np.int64(2)
    settings.epochs = 5
    settings.batch_size = 32
    settings.model_dim = 96
    settings.learning_rate = np.float32(0.5)
    config = settings.to_config()
    assert config.model.model_dump(include={"kind", "hidden_dim", "num_classes"}) == {
        "kind": "mlp",
        "hidden_dim": 96,
        "num_classes": 7,
    }
    data = config.data.model_dump(include={"kind", "samples", "features", "classes"})
    assert data == {"kind": "synthetic_classification", "samples": 500, "features": 784, "classes": 7}
    assert (config.parallel.ranks, config.train.global_batch, config.train.epochs) == (2, 32, 5)
    assert (config.optim.kind, config.optim.lr) == ("adamw", 0.5)
    assert type(settings.world_size) is int


@pytest.mark.parametrize(("backend", "expected"), [("nccl", "auto"), ("auto", "auto"), ("gloo", "gloo")])
def test_nccl_is_for_ranks_that_have_gpus(backend: str, expected: str) -> None:
    assert DistributedConfig(backend=backend).to_config().comm.backend == expected


def test_settings_survive_copies() -> None:
    config = DistributedConfig(epochs=3)
    assert copy.deepcopy(config) == pickle.loads(pickle.dumps(config)) == config


def test_a_typo_is_refused_with_what_was_meant() -> None:
    config = DistributedConfig()
    with pytest.raises(UsageError, match=r"wrold_size = 8 is not a setting(.|\n)*did you mean world_size\?"):
        config.wrold_size = 8  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match=r"num_class = 3 is not a setting(.|\n)*did you mean num_classes\?"):
        DistributedConfig(num_class=3)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *itertools.product(("world_size", "batch_size", "epochs", "dataset_size"), (0, -1, 2.5, "4", None, True)),
        *itertools.product(("model_dim", "num_classes"), (1, 512.0)),
        *itertools.product(("learning_rate",), (0, -0.1, math.nan, math.inf, "0.1", True)),
        *itertools.product(("backend",), ("mpi", None, ["nccl"])),
    ],
)
def test_wrong_values_are_refused_and_change_nothing(name: str, value: Any) -> None:
    config = DistributedConfig()
    with pytest.raises(UsageError, match=rf"^DistributedConfig: 1 problem\n\n{name} = ") as raised:
        setattr(config, name, value)
    assert "it is " in str(raised.value)
    assert config == DistributedConfig()


def test_all_wrong_settings_come_at_once() -> None:
    with pytest.raises(UsageError, match="DistributedConfig: 3 problems") as raised:
        DistributedConfig(epochs=5.0, backend="NCCL", lerning_rate=1)
    for text in ("write 5", "did you mean nccl?", "did you mean learning_rate?"):
        assert text in str(raised.value)


def test_settings_that_do_not_fit_together_are_told_by_the_config() -> None:
    with pytest.raises(ConfigError, match=r"world_size is parallel\.ranks(.|\n)*train\.global_batch = 64") as raised:
        DistributedConfig(world_size=3).to_config()
    assert len(raised.value.problems) == 1
