"""Masters: the parameters that an optimizer updates, where the module computes with copies in another dtype.

    masters (as built)  --cast before the next forward-->  module's parameters (bf16)
    masters' gradients  <--cast as each one arrives-----   module's gradients (bf16)

An update is often smaller than the distance of two bf16 numbers and would be lost; gradients of many microbatches add
up in the masters' dtype for the same reason.
"""

from __future__ import annotations

import torch
from torch import nn

from paceline.engines.precision import kept_parameters


class Masters:
    """The masters of a module's parameters; a parameter that is kept as it was built is its own master."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        """Casts the module's floating point parameters to ``dtype`` in place; their former values are the masters."""
        self.module = module
        kept = kept_parameters(module)
        self.held = [parameter for _, parameter in module.named_parameters()]
        self.parameters = [p if p in kept or not p.is_floating_point() else _split(p, dtype) for p in self.held]
        self._pairs = [(p, m) for p, m in zip(self.held, self.parameters, strict=True) if p is not m]
        self._master_of = dict(self._pairs)
        self._seen_version = self._version()
        # Fused optimizers do not raise the version of what they update. So the masters also count as changed after a
        # backward pass that an update may follow.
        self.may_have_changed = False

    def has_copy(self, index: int) -> bool:
        """Whether the n-th parameter and its master are two things."""
        return self.parameters[index] is not self.held[index]

    @torch.no_grad()
    def refresh(self) -> None:
        """Casts the masters into the module's parameters if they may have changed."""
        version = self._version()
        if self.may_have_changed or version != self._seen_version:
            self.may_have_changed, self._seen_version = False, version
            # Through .data: for autograd the same values, cast again, are no change of what a forward pass has saved.
            torch._foreach_copy_([p.data for p, _ in self._pairs], [m.data for _, m in self._pairs])

    def follow(self) -> None:
        """Freezes and unfreezes the masters as the module's parameters are."""
        for parameter, master in self._pairs:
            master.requires_grad_(parameter.requires_grad)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Returns the module's state with the masters in the parameters' places."""
        state = self.module.state_dict(keep_vars=True)
        return {name: self._master_of.get(value, value) for name, value in state.items()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Loads a state into the module, and into the masters."""
        self.module.load_state_dict(state)
        for (name, parameter), master in zip(self.module.named_parameters(), self.parameters, strict=True):
            if master is not parameter:
                master.copy_(state[name])

    def _version(self) -> int:
        return sum(master._version for _, master in self._pairs)


def _split(parameter: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    """Gives a parameter's values to a master, and casts the parameter itself."""
    master = nn.Parameter(parameter.data, requires_grad=parameter.requires_grad)
    vars(master).update(vars(parameter))  # marks that users put there, for their optimizer's groups
    parameter.data = parameter.data.to(dtype)
    return master
