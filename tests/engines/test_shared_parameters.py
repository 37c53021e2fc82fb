"""``TensorRegion.share``: parameters get gradients summed over ranks, and stay as they are where none is wanted."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from paceline.comm.virtual.communicator import run_virtual
from paceline.engines.nodes import TensorRegion


def test_parameters_are_wrapped_only_where_gradients_are_wanted() -> None:
    def work(comm: Any) -> list[bool]:
        region = TensorRegion(comm, is_sequence=False)
        trained, frozen = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2), requires_grad=False)
        (shared,) = region.share(trained)
        (shared.sum() * (comm.rank + 1)).backward()
        assert trained.grad is not None
        assert trained.grad.tolist() == [3.0, 3.0]
        same = [region.share(frozen)[0] is frozen]
        with torch.no_grad():
            same.append(region.share(trained)[0] is trained)
        return [*same, shared is trained, region.share(frozen, trained)[1] is trained]

    assert run_virtual(work, 2) == 2 * [[True, True, False, False]]
