"""Whole epochs with the trainer for plain scripts, and what ``True`` means for its arguments."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

import paceline
from paceline.comm.base import Communicator
from paceline.comm.solo import SoloCommunicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.doctor.findings import DoctorInputs
from paceline.doctor.machine import half_precision
from paceline.errors import UsageError
from paceline_classic.trainer import DistributedTrainer

CRITERION = nn.CrossEntropyLoss()


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def batches(*sizes: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(size, 6, generator=generator) for size in sizes]
    return [(each, each[:, :3].argmax(1)) for each in inputs]


def right(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
    return (outputs.argmax(1) == targets).sum(), len(targets)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_evaluation_is_exact_over_ragged_shares(strategy: str) -> None:
    data = batches(4, 3, 5, 1)

    def work(comm: Communicator) -> tuple[Any, Any]:
        trainer = DistributedTrainer(model(), strategy, comm=comm)
        share = data[:3] if comm.rank == 0 else data[3:]
        means = {"right": right, "same": lambda outputs, targets: right(outputs, targets)[0] / len(targets)}
        return trainer.evaluate(share, CRITERION, means), trainer.predict(share)

    found = run_virtual(work, 2)
    inputs, targets = (torch.cat(parts) for parts in zip(*data, strict=True))
    with torch.no_grad():
        outputs = model()(inputs)
    accuracy = (outputs.argmax(1) == targets).double().mean().item()
    expected = {"loss": CRITERION(outputs, targets).item(), "right": accuracy, "same": accuracy, "samples": 13}
    assert found[0][0] == pytest.approx(expected, rel=1e-6)
    assert found[0][0] == found[1][0]
    assert torch.allclose(torch.cat([part for _, part in found]), outputs, atol=1e-6)


def fit(comm: Communicator, folder: Path, *, epochs: int, patience: int | None = None, resume: bool = False) -> Any:
    trainer = DistributedTrainer(model(), "zero1", comm=comm, checkpoint_dir=folder, keep_checkpoints=2)
    optimizer = torch.optim.AdamW(trainer.parameters(), lr=0.05)
    data = batches(4, 4, 3)[: 3 - comm.rank]
    held_out = [(inputs, (targets + 1) % 3) for inputs, targets in data]  # which gets worse as it learns
    rest = {"eval_loader": held_out, "patience": patience} if patience else {}
    history = trainer.fit(data, optimizer, CRITERION, epochs, resume=resume, **rest)
    return history, trainer.engine.full_state_dict(), trainer.fit_state


def test_a_fit_that_goes_on_is_the_fit_that_never_stopped(tmp_path: Path) -> None:
    whole = run_virtual(lambda comm: fit(comm, tmp_path / "a", epochs=4), 2)
    run_virtual(lambda comm: fit(comm, tmp_path / "b", epochs=2), 2)
    later = run_virtual(lambda comm: fit(comm, tmp_path / "b", epochs=4, resume=True), 2)
    assert whole[0][0] == whole[1][0]
    assert later[0][0] == whole[0][0][2:]
    assert later[0][2] == whole[0][2]
    assert all(torch.equal(value, whole[0][1][name]) for name, value in later[0][1].items())
    assert [row["loss"] for row in whole[0][0]] == sorted((row["loss"] for row in whole[0][0]), reverse=True)
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["best", "step-00000009", "step-00000012"]


def test_a_fit_without_gain_ends_early_also_after_a_resume(tmp_path: Path) -> None:
    (history, _, state), _ = run_virtual(lambda comm: fit(comm, tmp_path, epochs=9, patience=2), 2)
    assert [row["epoch"] for row in history] == [0, 1, 2]
    assert state["without_gain"] == 2
    assert run_virtual(lambda comm: fit(comm, tmp_path, epochs=9, patience=2, resume=True), 2)[0][0] == []
    trainer = DistributedTrainer(model(), comm=SoloCommunicator(torch.device("cpu")))
    with pytest.raises(UsageError, match="patience = 0"):
        trainer.fit([], torch.optim.SGD(trainer.parameters()), CRITERION, patience=0)


def fit_plain(comm: Communicator, folder: Path, *, epochs: int = 2, resume: bool = False, **options: Any) -> Any:
    """Fits as a script of one process does: the same DataLoader on all ranks. Returns also what this rank has seen."""
    seen: list[int] = []
    inputs = torch.randn(22, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    whole = TensorDataset(inputs, inputs[:, :3].argmax(1))
    trainer = DistributedTrainer(model().double(), "ddp", comm=comm, checkpoint_dir=folder)
    trainer.engine.module.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    optimizer = torch.optim.AdamW(trainer.parameters(), lr=0.05)
    history = trainer.fit(
        DataLoader(whole, batch_size=7, **options),
        optimizer,
        CRITERION,
        epochs,
        resume=resume,
        eval_loader=DataLoader(whole, 5),
    )
    found = trainer.evaluate(DataLoader(whole, 5), CRITERION)
    return history, trainer.engine.full_state_dict(), sum(seen), found


def test_a_plain_dataloader_is_shared_out_and_the_numbers_are_those_of_one_process(tmp_path: Path) -> None:
    history, state, seen, found = run_virtual(lambda comm: fit_plain(comm, tmp_path / "1"), 1)[0]
    for ranks in (2, 4):  # the last batch of an epoch has one sample
        shared = run_virtual(lambda comm, ranks=ranks: fit_plain(comm, tmp_path / str(ranks)), ranks)  # type: ignore[misc]
        for each in shared:
            assert [row["loss"] for row in each[0]] == pytest.approx([row["loss"] for row in history], abs=1e-12)
            assert each[3] == pytest.approx(found, abs=1e-12)
            for name, value in state.items():
                torch.testing.assert_close(each[1][name], value, rtol=0, atol=1e-12)
        assert sum(each[2] for each in shared) == seen  # the same work, in parts
        assert max(each[2] for each in shared) < 0.7 * seen


def test_a_shuffled_dataloader_is_shared_out_in_an_order_that_a_resume_keeps(tmp_path: Path) -> None:
    options: dict[str, Any] = {"shuffle": True, "drop_last": True}
    whole = run_virtual(lambda comm: fit_plain(comm, tmp_path / "a", epochs=4, **options), 2)
    run_virtual(lambda comm: fit_plain(comm, tmp_path / "b", epochs=2, **options), 2)
    later = run_virtual(lambda comm: fit_plain(comm, tmp_path / "b", epochs=4, resume=True, **options), 2)
    assert later[0][0] == whole[0][0][2:]
    assert all(torch.equal(value, whole[0][1][name]) for name, value in later[0][1].items())


def test_shares_that_ranks_made_themselves_are_not_shared_out_again(tmp_path: Path) -> None:
    data = [torch.cat(parts) for parts in zip(*batches(12), strict=True)]
    whole = TensorDataset(*data)

    def work(comm: Communicator) -> list[int]:
        trainer = DistributedTrainer(model(), comm=comm, checkpoint_dir=tmp_path)
        mine = Subset(whole, range(comm.rank, 12, 2))
        sampled = DataLoader(whole, 3, sampler=DistributedSampler(whole, comm.size, comm.rank))
        loaders = [DataLoader(mine, 3), sampled, DataLoader(mine, 3) if comm.rank else [tuple(data)]]
        return [int(trainer.evaluate(loader, CRITERION)["samples"]) for loader in loaders]

    assert run_virtual(work, 2) == [[12, 12, 18]] * 2


class TwoParts(nn.Module):
    """No repeated blocks, and two parts with layers inside."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.features = nn.Sequential(nn.Linear(6, 8), nn.Tanh())
        self.head = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.features(inputs))
        return result


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_parts_are_checkpointed_by_size_where_there_are_no_blocks(strategy: str) -> None:
    def losses(comm: Communicator, checkpoints: bool) -> list[float]:
        trainer = paceline.EnhancedDistributedTrainer(
            TwoParts(), strategy, enable_activation_checkpointing=checkpoints, comm=comm
        )
        optimizer = torch.optim.SGD(trainer.parameters(), lr=0.1)
        return [trainer.train_step(batch, optimizer, CRITERION)["loss"] for batch in batches(4, 4, 4)]

    assert run_virtual(lambda comm: losses(comm, True), 2) == run_virtual(lambda comm: losses(comm, False), 2)


def test_nothing_to_gain_by_checkpointing_is_told_and_trains() -> None:
    with pytest.warns(UserWarning, match="nothing to gain in Sequential"):
        trainer = DistributedTrainer(
            model(), enable_activation_checkpointing=True, comm=SoloCommunicator(torch.device("cpu"))
        )
    optimizer = torch.optim.SGD(trainer.parameters(), lr=0.1)
    assert trainer.train_step(batches(4)[0], optimizer, CRITERION)["loss"] > 0


@pytest.mark.parametrize(("instructions", "name"), [((), "fp32"), (("amx_bf16",), "bf16")])
def test_mixed_precision_on_a_cpu_is_decided_by_what_the_processor_has(
    instructions: tuple[str, ...], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline_classic.config.bf16_instructions", lambda: instructions)
    monkeypatch.setattr("paceline.doctor.machine.bf16_instructions", lambda: instructions)
    import warnings

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer = DistributedTrainer(model(), mixed_precision=True, comm=SoloCommunicator(torch.device("cpu")))
    assert trainer.engine.precision.name == name
    assert [bool(re.search("no bf16 instructions", str(each.message))) for each in told] == [True] * (name == "fp32")
    (found,) = half_precision(DoctorInputs(environment={}))
    assert found.status == ("ok" if instructions else "note")
