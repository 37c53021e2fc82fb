"""Functions of torch that behave otherwise on meta tensors than on a device, put right for a dry run.

``scaled_dot_product_attention`` has no fused kernel there: it would be taken apart into products and a softmax over all
pairs of tokens. Here it is one kernel forward and one backward, which keep what the fused ones keep: their inputs, the
output and one number a row. ``rms_norm`` is fused on GPUs alone, and keeps its input there: it is put down as the layer
norm, which does. Autocast knows no meta device: here the same functions cast their tensors, as on CUDA.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._pytree import tree_map


class SeesAttention(Protocol):
    """Is told of attention kernels."""

    def attention(self, tensors: list[torch.Tensor], *, is_causal: bool, is_back: bool) -> None:
        """A kernel runs: on query, key, value and all else that it reads; the last tensor is what it writes."""


_GIVES_VALUES = {
    torch.Tensor.normal_,
    torch.Tensor.uniform_,
    torch.Tensor.fill_,
    torch.Tensor.zero_,
    nn.init.normal_,
    nn.init.uniform_,
    nn.init.trunc_normal_,
    nn.init.kaiming_uniform_,
    nn.init.kaiming_normal_,
    nn.init.xavier_uniform_,
    nn.init.xavier_normal_,
    nn.init.constant_,
    nn.init.ones_,
    nn.init.zeros_,
}
_IN_HALF = {
    F.linear,
    F.bilinear,
    F.conv1d,
    F.conv2d,
    F.conv3d,
    F.conv_transpose1d,
    F.conv_transpose2d,
    F.conv_transpose3d,
    F.scaled_dot_product_attention,
    torch.conv1d,
    torch.conv2d,
    torch.conv3d,
    torch.matmul,
    torch.mm,
    torch.bmm,
    torch.addmm,
    torch.baddbmm,
    torch.einsum,
    torch.Tensor.matmul,
    torch.Tensor.__matmul__,
    torch.Tensor.mm,
    torch.Tensor.bmm,
}
_IN_FULL = {
    F.layer_norm,
    F.group_norm,
    F.softmax,
    F.log_softmax,
    F.cross_entropy,
    F.nll_loss,
    F.mse_loss,
    torch.softmax,
    torch.log_softmax,
    torch.layer_norm,
    torch.exp,
    torch.log,
    torch.pow,
    torch.rsqrt,
    torch.cumsum,
    torch.norm,
    torch.Tensor.softmax,
    torch.Tensor.log_softmax,
    torch.Tensor.exp,
    torch.Tensor.log,
    torch.Tensor.pow,
    torch.Tensor.rsqrt,
    torch.Tensor.cumsum,
    torch.Tensor.norm,
}


class NoValues(TorchFunctionMode):
    """Leaves out what gives first values to tensors that have none: torch would work out their shapes in Python."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Returns the tensor as it is, or calls the function."""
        del types
        kwargs = kwargs or {}
        if func in _GIVES_VALUES:
            tensor = kwargs.get("tensor", args[0] if args else None)
            if isinstance(tensor, torch.Tensor) and tensor.is_meta:
                return tensor
        return func(*args, **kwargs)


class MetaFunctions(TorchFunctionMode):
    """Runs attention as one kernel, and casts as autocast does if there is a dtype for it."""

    def __init__(self, seer: SeesAttention, autocast: torch.dtype | None = None, *, fuses_norms: bool = False) -> None:
        super().__init__()
        self._seer = seer
        self._fuses_norms = fuses_norms and hasattr(torch.ops.aten, "_fused_rms_norm")
        self._autocast = autocast
        self._copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def back_on(self) -> contextlib.AbstractContextManager[object]:
        """Returns what makes it work where it does not: backward leaves modes behind, and blocks are computed again."""
        is_on = any(mode is self for mode in _get_current_function_mode_stack())  # type: ignore[no-untyped-call]
        return contextlib.nullcontext() if is_on else self

    def forget_copies(self) -> None:
        """Lets go of the parameters' copies, as autocast does when a forward ends."""
        self._copies.clear()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls a function, with other tensors or another way."""
        del types
        kwargs = kwargs or {}
        if self._autocast is not None:
            if func in _IN_HALF:
                args, kwargs = tree_map(self._halve, (args, kwargs))
            elif func in _IN_FULL:
                args, kwargs = tree_map(_widen, (args, kwargs))
        if func is F.scaled_dot_product_attention:
            return self._attend(func, *args, **kwargs)
        if func is F.rms_norm and self._fuses_norms:
            return _norm(*args, **kwargs)
        return func(*args, **kwargs)

    def _halve(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.dtype != torch.float32 or not value.is_meta:
            return value
        if not (value.is_leaf and value.requires_grad):
            return value.to(self._autocast)
        kept = self._copies.get(id(value))  # a parameter is cast once in a forward
        if kept is None:
            kept = self._copies[id(value)] = (value, value.to(self._autocast))
        return kept[1]

    def _attend(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        given = dict(zip(names, args, strict=False)) | kwargs
        query = given["query"]
        if not query.is_meta or query.ndim < 3:
            return func(*args, **kwargs)
        inputs = (query, given["key"], given["value"])
        return _MetaAttention.apply(*inputs, bool(given.get("is_causal", False)), self._seer)  # type: ignore[no-untyped-call]


class _MetaAttention(torch.autograd.Function):
    """Fused attention, without values."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool, seer: SeesAttention
    ) -> torch.Tensor:
        # Fused kernels write their output so that heads lie side by side, as the queries do that come out of a product.
        output = torch.empty_like(query) if value.shape[-1] == query.shape[-1] else _new(query, value)
        rows = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, rows)
        ctx.is_causal, ctx.seer = is_causal, seer
        seer.attention([query, key, value, output], is_causal=is_causal, is_back=False)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, output, _ = ctx.saved_tensors
        found = (torch.empty_like(query), torch.empty_like(key), torch.empty_like(value))
        ctx.seer.attention([query, key, value, output, gradient, *found], is_causal=ctx.is_causal, is_back=True)
        return *found, None, None


def _norm(*args: Any, **kwargs: Any) -> torch.Tensor:
    given = dict(zip(("input", "normalized_shape", "weight", "eps"), args, strict=False)) | kwargs
    return F.layer_norm(given["input"], given["normalized_shape"], given.get("weight"))


def _new(query: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return query.new_empty(*query.shape[:-1], value.shape[-1])


def _widen(value: Any) -> Any:
    is_half = isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if is_half else value
