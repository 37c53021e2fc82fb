"""Precision policies: in which dtype parameters are kept, computed with, and reduced.

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
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.utils._pytree import tree_map

from paceline.engines.float8 import float8_linear
from paceline.errors import Problem, UsageError

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
        dtype = self.param_dtype
        if dtype is None:
            return arguments

        def cast(value: Any) -> Any:
            return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

        return tree_map(cast, arguments)

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
    """Returns the policy of a name; a policy of the user's own is passed through.

    ``auto``, where there is a device: bf16 with masters on a GPU that computes in bf16, else fp32.
    """
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
    problem = precision_problem(precision, device)
    if problem is not None:
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
        found, needed = (
            ".".join(map(str, each)) for each in (torch.cuda.get_device_capability(device), _FLOAT8_CAPABILITY)
        )
        problem = f"the GPU has compute capability {found}, and tensor cores have such numbers from {needed} on"
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
    """Says whether a module's own parameters stay as they were built, whatever ``param_dtype`` is.

    Norms with running statistics compute with weights in the dtype of those, and a tenth of a small difference would be
    lost in bf16.
    """
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
