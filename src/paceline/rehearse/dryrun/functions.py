"""Functions of torch that behave otherwise on meta tensors than on a device, put right for a dry run.

``scaled_dot_product_attention`` has no fused kernel there. Here it is one kernel forward and one backward, which keep
what the fused ones keep: their inputs, the output and one number a row. ``rms_norm`` is fused on GPUs alone: it is put
down as the layer norm, which keeps its input too. ``max_pool2d`` keeps 8 bytes a number for where the largest was;
compiled for a GPU, one (``engines/pooling.py``). Autocast knows no meta device: the same functions cast here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._pytree import tree_map

from paceline.models.known_values import indexed

# Called for an attention kernel: ``(tensors, *, is_causal, is_back)``. These are query, key, value and all else that it
# reads; the last tensor is what it writes.
SeesAttention: TypeAlias = Callable[..., None]


def _named(owner: Any, names: str) -> set[Callable[..., Any]]:
    return {getattr(owner, name) for name in names.split()}


_GIVES_VALUES = (
    _named(torch.Tensor, "normal_ uniform_ fill_ zero_")
    | _named(nn.init, "normal_ uniform_ trunc_normal_ constant_ ones_ zeros_")
    | _named(nn.init, "kaiming_uniform_ kaiming_normal_ xavier_uniform_ xavier_normal_")
)
_IN_HALF = (
    _named(F, "linear bilinear conv1d conv2d conv3d scaled_dot_product_attention")
    | _named(F, "conv_transpose1d conv_transpose2d conv_transpose3d")
    | _named(torch, "conv1d conv2d conv3d matmul mm bmm addmm baddbmm einsum")
    | _named(torch.Tensor, "matmul __matmul__ mm bmm")
)
_IN_FULL = (
    _named(F, "layer_norm group_norm softmax log_softmax cross_entropy nll_loss mse_loss")
    | _named(torch, "softmax log_softmax layer_norm exp log pow rsqrt cumsum norm")
    | _named(torch.Tensor, "softmax log_softmax exp log pow rsqrt cumsum norm")
)


_POOLS = {F.max_pool2d, torch.max_pool2d}


class NoValues(TorchFunctionMode):
    """Leaves out what gives first values to tensors that have none: torch would work out their shapes in Python."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        kwargs = kwargs or {}
        if func in _GIVES_VALUES:
            tensor = kwargs.get("tensor", args[0] if args else None)
            if isinstance(tensor, torch.Tensor) and tensor.is_meta:
                return tensor
        return func(*args, **kwargs)


class MetaFunctions(TorchFunctionMode):
    """Runs attention as one kernel, and casts as autocast does if there is a dtype for it."""

    def __init__(
        self,
        seer: SeesAttention,
        autocast: torch.dtype | None = None,
        *,
        fuses_norms: bool = False,
        pools_in_bytes: bool = False,
    ) -> None:
        super().__init__()
        self._seer, self._autocast, self._pools_in_bytes = seer, autocast, pools_in_bytes
        self._fuses_norms = fuses_norms and hasattr(torch.ops.aten, "_fused_rms_norm")
        self._copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def back_on(self) -> contextlib.AbstractContextManager[object]:
        """Returns what makes it work where it does not: backward leaves modes behind, and blocks are computed again."""
        is_on = any(mode is self for mode in _get_current_function_mode_stack())  # type: ignore[no-untyped-call]
        return contextlib.nullcontext() if is_on else self

    def forget_copies(self) -> None:
        """Lets go of the parameters' copies, as autocast does when a forward ends."""
        self._copies.clear()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        kwargs = kwargs or {}
        if self._autocast is not None:
            if func in _IN_HALF:
                args, kwargs = tree_map(self._halve, (args, kwargs))
            elif func in _IN_FULL:
                args, kwargs = tree_map(_widen, (args, kwargs))
        if func is torch.Tensor.__getitem__:
            return func(*indexed(args))
        if func is F.scaled_dot_product_attention:
            return self._attend(func, *args, **kwargs)
        if func is F.rms_norm and self._fuses_norms:
            given = dict(zip(("input", "normalized_shape", "weight", "eps"), args, strict=False)) | kwargs
            return F.layer_norm(given["input"], given["normalized_shape"], given.get("weight"))
        if func in _POOLS and self._pools_in_bytes and not kwargs.get("return_indices"):
            names = ("kernel_size", "stride", "padding", "dilation", "ceil_mode")
            given = dict(zip(("input", *names), args, strict=False)) | kwargs
            defaults = {"stride": given["kernel_size"], "padding": 0, "dilation": 1, "ceil_mode": False}
            settings = [given.get(name, defaults.get(name)) for name in names]
            pooled: torch.Tensor = _MetaPool.apply(given["input"], settings)  # type: ignore[no-untyped-call]
            return pooled
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
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool, seer: SeesAttention
    ) -> torch.Tensor:
        # Fused kernels write their output so that heads lie side by side, as the queries do that come out of a product.
        same = value.shape[-1] == query.shape[-1]
        output = torch.empty_like(query) if same else query.new_empty(*query.shape[:-1], value.shape[-1])
        rows = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, rows)
        ctx.is_causal, ctx.seer = is_causal, seer
        seer([query, key, value, output], is_causal=is_causal, is_back=False)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, output, _ = ctx.saved_tensors
        found = (torch.empty_like(query), torch.empty_like(key), torch.empty_like(value))
        ctx.seer([query, key, value, output, gradient, *found], is_causal=ctx.is_causal, is_back=True)
        return *found, None, None


class _MetaPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, settings: list[Any]) -> torch.Tensor:
        pooled, where = torch.ops.aten.max_pool2d_with_indices(x, *map(_pair, settings))
        ctx.save_for_backward(torch.empty(where.shape, dtype=torch.int8, device=where.device))
        ctx.shape, ctx.settings = x.shape, settings
        found: torch.Tensor = pooled
        return found

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (where,) = ctx.saved_tensors
        x = gradient.new_empty(ctx.shape)
        back = torch.ops.aten.max_pool2d_with_indices_backward
        found: torch.Tensor = back(gradient, x, *map(_pair, ctx.settings), where.to(torch.int64))
        return found, None


def _pair(value: Any) -> Any:
    return [value, value] if type(value) is int else value


def _widen(value: Any) -> Any:
    is_half = isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if is_half else value
