"""A function of outputs and targets as a loss: what it returns is weighed by how it reduces."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from paceline.errors import UsageError
from paceline.train.loss import OutputLoss

INPUTS, TARGETS = torch.tensor([1.0, 2.0, 6.0]), torch.zeros(3)


@pytest.mark.parametrize(
    "function",
    [nn.L1Loss(), nn.L1Loss(reduction="sum"), lambda outputs, targets: ((outputs - targets).abs().sum(), 3.0)],
    ids=["mean", "sum", "sum and count"],
)
def test_a_mean_a_sum_and_a_pair_weigh_alike(function: Any) -> None:
    loss = OutputLoss(function, may_count=True)
    value = loss(lambda inputs: inputs, (INPUTS, TARGETS))
    assert (float(value.total), value.count) == (9.0, 3.0)
    assert loss.mean is not None
    assert loss.mean.item() == 3.0


def test_a_loss_that_is_not_one_number_is_refused_with_its_name() -> None:
    batch = (INPUTS, TARGETS)
    with pytest.raises(
        UsageError, match=r"loss_fn returned shape \[3\]\n.*\n  return loss.mean\(\), or \(sum, count\)"
    ):
        OutputLoss(lambda outputs, _: outputs, "loss_fn", may_count=True)(lambda inputs: inputs, batch)
    with pytest.raises(UsageError, match="criterion returned tuple"):
        OutputLoss(lambda outputs, _: (outputs.sum(), 3))(lambda inputs: inputs, batch)
    with pytest.raises(UsageError, match="reduction = 'none'"):
        OutputLoss(nn.L1Loss(reduction="none"))
