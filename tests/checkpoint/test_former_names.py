"""Checkpoints of the classifier from before its layers had the names of today."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import paceline
from paceline.comm.base import Communicator
from paceline.comm.virtual.communicator import run_virtual


class Earlier(paceline.MLPClassifier):
    """The classifier with its Flatten in the row of layers, so that weights are layers.1, layers.4 and layers.7."""

    def __init__(self, *widths: int) -> None:
        super().__init__(*widths, dropout=0.0)
        self.layers = nn.Sequential(self.flatten, *self.layers)
        del self.flatten

    def forward(self, inputs: torch.Tensor) -> Any:
        return self.layers(inputs)

    def _load_from_state_dict(self, *args: Any) -> None:
        nn.Module._load_from_state_dict(self, *args)


def test_a_checkpoint_with_the_former_names_goes_on_as_if_it_never_stopped(tmp_path: Path) -> None:
    def train(comm: Communicator, model: nn.Module, steps: range, strategy: str) -> list[float]:
        trainer = paceline.DistributedTrainer(model, strategy, comm=comm, checkpoint_dir=tmp_path)
        optimizer = torch.optim.AdamW(trainer.parameters(), lr=0.1)
        if steps.start:
            trainer.load_checkpoint(optimizer=optimizer)
        losses = []
        for step in steps:
            inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
            batch = inputs, inputs[:, :3].argmax(1)
            losses.append(trainer.train_step(batch, optimizer, F.cross_entropy)["loss"])
        if not steps.start:
            trainer.save_checkpoint(0, optimizer, losses[-1])
        return losses

    def earlier(comm: Communicator, last: int) -> list[float]:
        torch.manual_seed(0)
        return train(comm, Earlier(6, 8, 3), range(last), "fsdp")

    def today(comm: Communicator) -> list[float]:
        torch.manual_seed(1)  # other values, which loading replaces
        return train(comm, paceline.MLPClassifier(6, 8, 3, dropout=0.0), range(3, 6), "ddp")

    straight = run_virtual(lambda comm: earlier(comm, 6), 2)[0]
    run_virtual(lambda comm: earlier(comm, 3), 2)
    (tmp_path / "step-00000006").rename(tmp_path.parent / "not-this-one")
    torch.testing.assert_close(run_virtual(today, 1)[0], straight[3:], rtol=1e-5, atol=1e-6)
