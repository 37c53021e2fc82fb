"""Parameters of which ranks hold different parts along one dim: their names and shapes in the whole model.

    whole   | expert 0 | expert 1 | expert 2 | expert 3 |      rank 1 of 2   | expert 2 | expert 3 |

Engines compute with a rank's part. States, gradients and checkpoints are those of the whole model: parts are put
together along the experts' ranks, one tensor at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from paceline.comm.base import Communicator
from paceline.engines.flat.optimizer_state import numbered_parameters
from paceline.engines.flat.shard_layout import full_shape
from paceline.engines.groups import expert_dim
from paceline.engines.tensor.layout import Split, SplitParts


class ExpertParts(SplitParts):
    """The parts that this rank holds, by the names of their parameters; of most models, none."""

    def __init__(self, module: nn.Module, comm: Communicator) -> None:
        """Takes the ranks that hold different experts."""
        splits: dict[str, Split] = {}
        for name, parameter in module.named_parameters() if comm.size > 1 else ():
            dim = expert_dim(parameter)
            if dim is not None:
                shape = list(full_shape(parameter))
                shape[dim] *= comm.size
                splits[name] = Split(shape=tuple(shape), dim=dim)
        super().__init__(splits, comm)

    def __bool__(self) -> bool:
        return bool(self.splits)

    def whole_states(
        self, optimizer: torch.optim.Optimizer, packed: dict[str, Any], names: Mapping[int, str]
    ) -> dict[str, Any]:
        """Returns an optimizer's state dict with whole tensors; all ranks call it. ``names``: by parameters' ids."""
        return self._change(optimizer, packed, names, self.whole)

    def own_states(
        self, optimizer: torch.optim.Optimizer, packed: dict[str, Any], names: Mapping[int, str]
    ) -> dict[str, Any]:
        """Returns an optimizer's state dict with this rank's parts of whole tensors."""
        return self._change(optimizer, packed, names, self.part)

    def _change(
        self, optimizer: torch.optim.Optimizer, packed: dict[str, Any], names: Mapping[int, str], change: Any
    ) -> dict[str, Any]:
        if not self:
            return packed
        known = {number: names[id(each)] for number, each in numbered_parameters(optimizer, packed).items()}
        states = {
            number: {key: change(known[number], value) for key, value in values.items()} if number in known else values
            for number, values in packed["state"].items()
        }
        return {**packed, "state": states}
