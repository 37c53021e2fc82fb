"""Masters: what an optimizer updates where a module computes with copies in another dtype."""

from __future__ import annotations

import torch
from torch import nn

from paceline.engines.precision import kept_parameters
from paceline.shards import load_own_state


class Masters:
    """What an optimizer updates where the module computes with copies in another dtype.

        masters (as built)  --cast before the next forward-->  module's parameters (bf16)
        masters' gradients  <--cast as each one arrives-----   module's gradients (bf16)

    An update is often smaller than the distance of two bf16 numbers and would be lost; gradients of many microbatches
    add up in the masters' dtype for the same reason. An optimizer that gets the module's parameters too writes both:
    the cast is fused into its update, and on one rank a gradient stays at the module's parameter unless it is added to
    others.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        """Casts the module's floating point parameters to ``dtype`` in place; their former values are the masters."""
        self.module = module
        kept = kept_parameters(module)
        held = [parameter for _, parameter in module.named_parameters()]
        self.parameters = [p if p in kept or not p.is_floating_point() else _split_off(p, dtype) for p in held]
        self._pairs = [(p, m) for p, m in zip(held, self.parameters, strict=True) if p is not m]
        self._master_of = dict(self._pairs)
        self._seen_version = self._version()
        # Fused optimizers do not raise the version of what they update. So the masters also count as changed after a
        # backward pass that an update may follow.
        self.may_have_changed = False
        self.is_cast_fused = False  # into the update of an optimizer that writes the module's parameters too

    @property
    def can_fuse_cast(self) -> bool:
        """Whether there are masters, all of them in fp32, and the module's parameters in bf16."""
        dtypes = {(master.dtype, parameter.dtype) for parameter, master in self._pairs}
        return dtypes == {(torch.float32, torch.bfloat16)}

    def fuse_cast(self) -> dict[nn.Parameter, nn.Parameter]:
        """Returns the module's parameters by their masters, for an optimizer that updates both."""
        self.is_cast_fused = self.can_fuse_cast
        return {master: parameter for parameter, master in self._pairs} if self.is_cast_fused else {}

    def expect_update(self) -> None:
        """Notes that an update of the masters may follow, of which the module's parameters know nothing yet."""
        self.may_have_changed |= not self.is_cast_fused

    def gradients_left(self) -> list[torch.Tensor]:
        """Returns the gradients that were left at the module's parameters."""
        return [p.grad for p, _ in self._pairs if p.grad is not None] if self.is_cast_fused else []

    @torch.no_grad()
    def collect_gradients(self) -> None:
        """Brings the gradients that were left at the module's parameters to their masters."""
        for parameter, master in self._pairs:
            if parameter.grad is not None:
                hand_over(parameter, master)

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
        load_own_state(self.module, state)
        for (name, parameter), master in zip(self.module.named_parameters(), self.parameters, strict=True):
            if master is not parameter:
                master.copy_(state[name])

    def _version(self) -> int:
        return sum(master._version for _, master in self._pairs)


def hand_over(parameter: torch.Tensor, master: nn.Parameter) -> None:
    """Makes a parameter's gradient that of its master, in the dtype of that, or adds it to the one it has."""
    gradient, parameter.grad = parameter.grad, None
    if gradient is not None and master.grad is not None:
        master.grad.add_(gradient)
    elif gradient is not None:
        master.grad = gradient.to(master.dtype)


def norm_of(whole: list[torch.Tensor], half: list[torch.Tensor], norm_type: float) -> torch.Tensor:
    """Returns the norm of gradients of which some are in half precision: these are read as they are, once."""
    norms = [*torch._foreach_norm(half, norm_type, dtype=torch.float32)]
    norms += torch._foreach_norm(whole, norm_type) if whole else []
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    return total


def _split_off(parameter: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    """Gives a parameter's values to a master, and casts the parameter itself."""
    master = nn.Parameter(parameter.data, requires_grad=parameter.requires_grad)
    vars(master).update(vars(parameter))  # marks that users put there, for their optimizer's groups
    parameter.data = parameter.data.to(dtype)
    return master
