"""With which numbers a case computes, and on which device: in float64, or with a precision of an engine.

``Alone`` is the oracle: plain torch in one process, with the same numbers. How close an engine must come to it depends
on them. In float64 nothing is left but the order of sums, and a judge says how many digits that costs. In bf16 a number
has 8 significant bits: one that is rounded the other way, in another kernel or for another batch, is off by 2^-8, and
what follows from it too. So in bf16 the whole move of a tensor is compared with the move that it should have made, by
their norms. A rank that is left out, or counted twice, is off by more than a tenth.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.utils._pytree import tree_map

from paceline.engines.precision import PRECISIONS

State = dict[str, torch.Tensor]
# Of the norm of a tensor's move. Compiled kernels keep in float32 what others round to bf16 one after another.
BF16_SHARE, COMPILED_SHARE = 0.02, 0.06
# Layers of batch norm, one behind the other, divide by the spread of a few small images, of which rounding is a part;
# and one process has all images at once, in other kernels. That every rank counts, these models show in float64.
BATCH_NORMS_SHARE = 0.25
# Of the largest move of all tensors: what gets a gradient of nothing but rounding moves by it, each time elsewhere.
BF16_REST = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """The device and the precision of a case: ``float64``, or a name of ``paceline.engines.precision``."""

    device: str = "cpu"
    precision: str = "float64"
    is_compiled: bool = False
    casts_buffers: bool = False  # with bf16_master: for a model that adds a buffer to what it computes

    @property
    def is_exact(self) -> bool:
        return self.precision == "float64"

    @property
    def dtype(self) -> torch.dtype:
        """What models are built in, and their inputs."""
        return torch.float64 if self.is_exact else torch.float32

    @property
    def eps(self) -> float:
        """That of AdamW. With a small one a number steps as far as any other if its gradient is not nearly zero.

        Where rounding decides which way, compiled kernels, which round elsewhere, go another one. So there it is large:
        an update is a share of its gradient, and no further off.
        """
        return 1.0 if self.is_compiled else 1e-3

    @property
    def options(self) -> dict[str, Any]:
        """What ``parallelize`` is told."""
        compiled = {"compile": True} if self.is_compiled else {}
        if self.is_exact:
            return compiled
        casts = self.casts_buffers and self.precision == "bf16_master"
        precision = replace(PRECISIONS[self.precision], buffer_dtype=torch.bfloat16) if casts else self.precision
        return {"precision": precision, **compiled}

    def put(self, tree: Any) -> Any:
        """Returns inputs on the device, floating-point ones in the dtype that models are built in."""

        def move(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            return value.to(self.device, self.dtype if value.is_floating_point() else None)

        return tree_map(move, tree)

    def assert_trained(self, found: State, alone: Alone, *, rtol: float, atol: float) -> None:
        """Compares what an engine has trained with what one process has; the tolerances are those of float64."""
        wanted, found = to_host(alone.state()), to_host({key: found[key] for key in alone.state()})
        if self.is_exact:
            torch.testing.assert_close(found, wanted, rtol=rtol, atol=atol)
            return
        share = BATCH_NORMS_SHARE if alone.has_batch_norms else COMPILED_SHARE if self.is_compiled else BF16_SHARE
        moves = {key: distance(wanted[key], alone.before[key]) for key in wanted}
        largest = max(moves.values())
        for key, move in moves.items():
            allowed = share * move + BF16_REST * largest
            off = distance(found[key], wanted[key])
            assert off <= allowed, f"{key}: off by {off:.3g} after a move of {move:.3g}; allowed are {allowed:.3g}"

    def assert_outputs(self, found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
        """Compares what a module returns without training."""
        found, wanted = to_host(found), to_host(wanted)
        if self.is_exact:
            torch.testing.assert_close(found, wanted, rtol=1e-14, atol=1e-15)
            return
        assert len(found) == len(wanted)
        for ours, theirs in zip(found, wanted, strict=True):
            assert distance(ours, theirs) <= BF16_SHARE * distance(theirs, torch.zeros_like(theirs))


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """The norm of the difference; what is not finite is the same in both, or infinitely far."""
    assert one.shape == other.shape, f"the shape is {tuple(one.shape)} in place of {tuple(other.shape)}"
    one, other = one.double().cpu(), other.double().cpu()
    if torch.equal(one.nan_to_num(), other.nan_to_num()) and torch.equal(one.isfinite(), other.isfinite()):
        return 0.0
    found = float((one - other).norm())
    return math.inf if math.isnan(found) else found


def to_host(tree: Any) -> Any:
    """Returns a tree of values with all tensors on the CPU."""
    return tree_map(lambda leaf: leaf.detach().cpu() if isinstance(leaf, torch.Tensor) else leaf, tree)


class Alone:
    """A module of torch in one process.

    ``bf16`` is torch's autocast. With ``bf16_master`` the parameters are in bf16, gradients are added up in float32,
    and an optimizer updates masters in float32, which are cast to the parameters. Layers with running statistics stay
    in float32, as torch's kernels for GPUs want it.
    """

    def __init__(self, module: nn.Module, numbers: Numbers) -> None:
        self.module, self.numbers = module, numbers
        self.before = {key: value.detach().cpu().clone() for key, value in module.state_dict().items()}
        self.masters: dict[str, nn.Parameter] = {}
        if numbers.precision == "bf16_master":
            kept = {each for layer in module.modules() if has_statistics(layer) for each in layer.parameters(False)}
            for name, parameter in module.named_parameters():
                if parameter in kept:
                    continue
                master = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
                self.masters[name] = master
                parameter.data = parameter.data.to(torch.bfloat16)
            for layer in module.modules() if numbers.casts_buffers else ():
                layer._buffers.update(tree_map(to_bf16, layer._buffers))

    @property
    def has_batch_norms(self) -> bool:
        return sum(isinstance(each, _BatchNorm) for each in self.module.modules()) > 1

    def parameters(self) -> list[nn.Parameter]:
        """What the optimizer updates."""
        held = (self.masters.get(name, parameter) for name, parameter in self.module.named_parameters())
        return [each for each in held if each.requires_grad]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.masters:
            args, kwargs = tree_map(to_bf16, (args, kwargs))
        is_autocast = self.numbers.precision == "bf16"
        with torch.autocast(self.numbers.device, torch.bfloat16) if is_autocast else contextlib.nullcontext():
            return self.module(*args, **kwargs)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]
        for name, parameter in self._with_masters():
            if parameter.grad is not None:
                gradient, master = parameter.grad.float(), self.masters[name]
                master.grad = gradient if master.grad is None else master.grad + gradient
                parameter.grad = None

    @torch.no_grad()
    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Steps, and forgets the gradients."""
        optimizer.step()
        optimizer.zero_grad()
        for name, parameter in self._with_masters():
            parameter.copy_(self.masters[name])

    def state(self) -> State:
        """The state of the module, with the masters in the parameters' places."""
        found = {key: value.detach() for key, value in self.module.state_dict().items()}
        held = {parameter: name for name, parameter in self.module.named_parameters()}
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            if name in found and held[parameter] in self.masters:
                found[name] = self.masters[held[parameter]].detach()
        return found

    def _with_masters(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, each) for name, each in self.module.named_parameters() if name in self.masters]


def has_statistics(layer: nn.Module) -> bool:
    return isinstance(layer, _NormBase) and layer.running_mean is not None


def to_bf16(value: Any) -> Any:
    is_cast = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.to(torch.bfloat16) if is_cast else value
