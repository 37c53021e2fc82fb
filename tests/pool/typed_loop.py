"""A loop whose types a checker knows: run by nobody, read by mypy. Lines with ``# wrong`` are errors to it."""

from __future__ import annotations

from typing import assert_type

import torch
from torch import Tensor, nn

import paceline


class Net(nn.Module):
    """A module with a signature and a method of its own."""

    def forward(self, x: Tensor, scale: float = 1.0) -> tuple[Tensor, int]:
        return x * scale, len(x)

    def generate(self, length: int) -> str:
        return "a" * length


def train(comm: paceline.Communicator, anything: nn.Module) -> None:
    engine = paceline.parallelize(Net(), comm, "fsdp")
    assert_type(engine, paceline.Engine[Net])
    assert_type(engine.module.generate(3), str)
    assert_type(engine(torch.ones(2), scale=2.0), tuple[Tensor, int])
    assert_type(engine.train(), paceline.Engine[Net])
    engine("text")  # wrong
    engine.module.generat(3)  # wrong
    paceline.parallelize(Net(), comm, "fdsp")  # wrong
    paceline.verify(Net, lambda _: None, print, strategy="zero4")  # wrong
    assert_type(paceline.parallelize(nn.Linear(3, 4), comm, "auto")(torch.ones(3)), Tensor)
    paceline.parallelize(anything, comm)(1, two=2)
    paceline.Run(comm, "mine", engine)
    paceline.Run(comm, "mine", trackers=["wandb"])  # wrong
    paceline.save("checkpoints", engine, step=1)
    takes_any(engine)


def takes_any(engine: paceline.Engine) -> None:
    engine(3)
