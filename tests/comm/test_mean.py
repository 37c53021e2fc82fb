"""Means over the samples of all ranks."""

from __future__ import annotations

import pytest
import torch

from paceline.comm.base import Communicator
from paceline.comm.objects import mean
from paceline.comm.virtual.communicator import run_virtual
from paceline.errors import UsageError


def test_a_mean_weighs_every_sample_alike() -> None:
    losses = [torch.tensor([1.0, 2.0, 6.0]), torch.tensor([3.0]), torch.tensor([])]

    def work(comm: Communicator) -> float:
        mine = losses[comm.rank]
        return mean(mine.sum(), len(mine), comm)

    assert run_virtual(work, ranks=3) == [3.0] * 3
    assert run_virtual(lambda comm: mean(2.0**24 + 1, 1, comm), ranks=1) == [2.0**24 + 1], "no float32 on the way"


def test_a_mean_of_nothing_and_of_several_numbers_is_refused() -> None:
    def work(comm: Communicator) -> None:
        with pytest.raises(UsageError, match="a mean over 0 samples of 2 ranks"):
            mean(0.0, 0, comm)
        with pytest.raises(UsageError, match=r"sum over the samples first"):
            mean(torch.ones(2), 2, comm)

    run_virtual(work, ranks=2)
