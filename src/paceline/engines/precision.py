"""Precision policies: in which dtype parameters are kept, computed with, and reduced; and the masters that some need.

    name          module computes in      optimizer updates    gradients travel in
    fp32          as built                the parameters       as built
    bf16, fp16    autocast                the parameters       as built
    bf16_master   bf16 parameters         fp32 masters         fp32
    fp8, fp8_row  as bf16_master, and linear layers inside the blocks with operands of 8 bits (``float8.py``)

Autocast keeps parameters as they were built and casts them operator by operator. With masters the module holds bf16
parameters, which are cast once a step from the fp32 masters that the optimizer updates: fewer casts, and half the bytes
to gather. The loss of an fp16 run is scaled, because small gradients would vanish in that dtype.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from paceline.engines.float8 import float8_linear
from paceline.errors import Problem, UsageError
from paceline.shards import load_own_state

_FLOAT8_CAPABILITY = (8, 9)  # of the first GPUs whose tensor cores have numbers of 8 bits: Ada, and Hopper


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Which dtypes a run uses; None means as the model was built."""

    name: str = "fp32"
    autocast_dtype: torch.dtype | None = None
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    scales_loss: bool = False
    float8: Literal["tensor", "row"] | None = None  # linear layers read operands of 8 bits, with a scale for each

    def context(self, device: torch.device) -> contextlib.AbstractContextManager[object]:
        """Returns what a forward pass, and the loss that follows, runs in."""
        if self.autocast_dtype is None or device.type == "meta":  # which torch does not cast on
            return contextlib.nullcontext()
        return torch.autocast(device.type, self.autocast_dtype)

    def cast_inputs(self, arguments: Any) -> Any:
        """Returns the arguments of a forward pass with floating point tensors in the parameters' dtype."""

        def cast(value: Any) -> Any:
            is_cast = isinstance(value, Tensor) and value.is_floating_point()
            return value.to(self.param_dtype) if is_cast else value

        return arguments if self.param_dtype is None else tree_map(cast, arguments)

    def cast_buffers(self, module: nn.Module) -> None:
        """Puts the floating point buffers of a module into ``buffer_dtype``, if there is one."""
        for owner in module.modules() if self.buffer_dtype is not None else ():
            for name, buffer in owner._buffers.items():
                if buffer is not None and buffer.is_floating_point():
                    owner._buffers[name] = buffer.to(self.buffer_dtype)


PRECISIONS = {
    policy.name: policy
    for policy in (
        Precision(),
        Precision(name="bf16", autocast_dtype=torch.bfloat16),
        Precision(name="fp16", autocast_dtype=torch.float16, scales_loss=True),
        Precision(name="bf16_master", param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        Precision(name="fp8", param_dtype=torch.bfloat16, reduce_dtype=torch.float32, float8="tensor"),
        Precision(name="fp8_row", param_dtype=torch.bfloat16, reduce_dtype=torch.float32, float8="row"),
    )
}


def precision_named(precision: str | Precision, device: torch.device | None = None) -> Precision:
    """Returns a policy by name, or the user's own; ``auto``: bf16 with masters on a GPU that has bf16, else fp32."""
    if isinstance(precision, Precision):
        return precision
    if precision == "auto" and device is not None:
        precision = "bf16_master" if device.type == "cuda" and has_bf16(device) else "fp32"
    if precision not in PRECISIONS:
        raise UsageError(f"precision = {precision!r} is unknown\n  it is one of {', '.join(PRECISIONS)}, or auto")
    return PRECISIONS[precision]


def mixed_precision(device: torch.device) -> Precision:
    """Returns what "mixed precision" means on a device: bf16, which needs no loss scale, or fp16 on older GPUs."""
    return PRECISIONS["bf16" if has_bf16(device) else "fp16"]


def check_precision(precision: Precision, device: torch.device) -> None:
    """Raises UsageError where the device cannot compute in the policy's dtype."""
    if problem := precision_problem(precision, device):
        raise UsageError(str(problem))


def precision_problem(precision: Precision, device: torch.device) -> Problem | None:
    """Returns why a device cannot compute in the policy's dtype; None: it can. A small product is tried, both ways."""
    dtype = precision.autocast_dtype or precision.param_dtype
    if dtype is None or device.type == "meta":
        return None
    name = "fp8" if precision.float8 else str(dtype).removeprefix("torch.")
    other = "fp16" if dtype is torch.bfloat16 and device.type == "cuda" else "bf16"
    problem, is_nvidia = "", device.type == "cuda" and not torch.version.hip
    if precision.float8 and is_nvidia and torch.cuda.get_device_capability(device) < _FLOAT8_CAPABILITY:
        (major, minor), needed = torch.cuda.get_device_capability(device), ".".join(map(str, _FLOAT8_CAPABILITY))
        problem = f"the GPU has compute capability {major}.{minor}, and tensor cores have such numbers from {needed} on"
        other = "bf16_master"
    elif dtype is torch.bfloat16 and not has_bf16(device):
        problem = "its tensor cores have no such format, and torch would emulate it slowly"
    else:
        try:
            _try_product(precision, dtype, device)
        except (RuntimeError, UserWarning) as error:
            problem = str(error).splitlines()[0]
    if not problem:
        return None
    return Problem(
        what=f"precision = {precision.name!r} on {device}: {name} does not work there: {problem}",
        rule="the device must compute forward and backward in the dtype of the policy",
        fix=f"use precision = {other!r}, or 'fp32'",
    )


def keeps_dtype(module: nn.Module) -> bool:
    """Whether parameters stay as built: with running statistics, norms would lose small differences in bf16."""
    return isinstance(module, nn.modules.batchnorm._NormBase) and module.running_mean is not None


def kept_parameters(module: nn.Module) -> set[nn.Parameter]:
    """Returns the parameters that ``param_dtype`` does not apply to."""
    return {p for owner in module.modules() if keeps_dtype(owner) for p in owner.parameters(recurse=False)}


def has_bf16(device: torch.device) -> bool:
    """Says whether a device computes in bf16: not whether that is fast on a CPU, nor what a GPU emulates."""
    return device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)


def _try_product(precision: Precision, dtype: torch.dtype, device: torch.device) -> None:
    weight = torch.ones(32, 32, device=device, requires_grad=True)
    left, right = (weight, weight) if precision.param_dtype is None else (weight.to(dtype), weight.to(dtype))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # torch warns where it switches autocast off
        # A CPU without bf16 instructions computes all the same, another way, and says so once. Large enough a product
        # makes it do so here, and not in the middle of a run.
        warnings.filterwarnings("ignore", message="mkldnn_matmul failed", category=UserWarning)
        with precision.context(device):
            product = left @ right
            if precision.float8:
                product = product + float8_linear(left, right, None, by_row=precision.float8 == "row")
        product.float().sum().backward()  # type: ignore[no-untyped-call]


class Masters:
    """What an optimizer updates where the module computes with copies in another dtype.

        masters (as built)  --cast before the next forward-->  module's parameters (bf16)
        masters' gradients  <--cast as each one arrives-----   module's gradients (bf16)

    An update is often smaller than the distance of two bf16 numbers, and would be lost; so would sums of gradients. An
    optimizer that gets the module's parameters too writes both: the cast is fused into its update, and on one rank a
    gradient stays at the module's parameter unless it is added to others.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype | None) -> None:
        """Casts floating point parameters to ``dtype``, if any, in place; their former values are the masters."""
        self.module = module
        kept = kept_parameters(module)
        self._master_of: dict[nn.Parameter, nn.Parameter] = {}
        for parameter in module.parameters() if dtype is not None else ():
            if parameter not in kept and parameter.is_floating_point():
                master = nn.Parameter(parameter.data, requires_grad=parameter.requires_grad)
                vars(master).update(vars(parameter))  # marks that users put there, for their optimizer's groups
                parameter.data = parameter.data.to(dtype)
                self._master_of[parameter] = master
        self.parameters = [self._master_of.get(parameter, parameter) for parameter in module.parameters()]
        self._pairs = list(self._master_of.items())
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

    def norms_left(self, norm_type: float) -> Sequence[Tensor]:
        """Returns the norms of gradients that were left at the module's parameters, which are read once."""
        left = [p.grad for p, _ in self._pairs if p.grad is not None] if self.is_cast_fused else []
        return torch._foreach_norm(left, norm_type, dtype=torch.float32) if left else ()

    @torch.no_grad()
    def collect_gradients(self) -> None:
        """Brings the gradients that were left at the module's parameters to their masters."""
        for parameter, master in self._pairs if self.is_cast_fused else ():
            if parameter.grad is not None:
                hand_over(parameter, master)

    @torch.no_grad()
    def refresh(self) -> None:
        """Casts the masters into the module's parameters if they may have changed."""
        version = self._version()
        if self._pairs and (self.may_have_changed or version != self._seen_version):
            self.may_have_changed, self._seen_version = False, version
            # Through .data: for autograd the same values, cast again, are no change of what a forward pass has saved.
            torch._foreach_copy_([p.data for p, _ in self._pairs], [m.data for _, m in self._pairs])

    def follow(self) -> None:
        """Freezes and unfreezes the masters as the module's parameters are."""
        for parameter, master in self._pairs:
            master.requires_grad_(parameter.requires_grad)

    def state_dict(self) -> dict[str, Tensor]:
        """Returns the module's state with the masters in the parameters' places."""
        state = self.module.state_dict(keep_vars=True)
        return {n: self._master_of.get(v, v) if isinstance(v, nn.Parameter) else v for n, v in state.items()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        load_own_state(self.module, state)
        for name, parameter in self.module.named_parameters():
            if parameter in self._master_of:
                self._master_of[parameter].copy_(state[name])

    def _version(self) -> int:
        return sum(master._version for _, master in self._pairs)


def hand_over(parameter: Tensor, master: nn.Parameter) -> None:
    """Makes a parameter's gradient that of its master, in the dtype of that, or adds it to the one it has."""
    gradient, parameter.grad = parameter.grad, None
    if gradient is not None and master.grad is not None:
        master.grad.add_(gradient)
    elif gradient is not None:
        master.grad = gradient.to(master.dtype)
