"""A mean over the samples of all ranks, exact for any share of them."""

from __future__ import annotations

import math

import torch

from paceline.comm.base import Communicator, control_device
from paceline.errors import UsageError


def mean(total: float | torch.Tensor, count: float | torch.Tensor, comm: Communicator) -> float:
    """Returns the sum of ``total`` over all ranks by the sum of ``count``: the same number on every rank.

    ``total`` is a *sum* over this rank's samples (or tokens), of which there are ``count``, perhaps none. All ranks
    call it. A mean of the ranks' means would weigh the samples of a small batch more. Added up in float64.

    Raises UsageError where no rank has a sample, or what is given is not one number.
    """
    values = [torch.as_tensor(value).detach() for value in (total, count)]
    if any(value.numel() != 1 for value in values):
        shapes = [list(value.shape) for value in values]
        raise UsageError(
            f"a mean of tensors of the shapes {shapes[0]} and {shapes[1]}\n"
            "  a total and a count are one number each\n  sum over the samples first: total=losses.sum()"
        )
    device = control_device(comm)
    sums = torch.stack([value.reshape(()).to(device, torch.float64) for value in values])
    comm.all_reduce(sums).wait()
    added, samples = sums.tolist()
    if samples == 0 or math.isnan(samples):
        raise UsageError(
            f"a mean over {samples:g} samples of {comm.size} ranks\n  it needs at least one\n"
            "  check that the loader has batches, and that count is added up"
        )
    return float(added / samples)
