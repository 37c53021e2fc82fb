"""Linear layers whose products read numbers of 8 bits: twice the rate of bf16, and half the bytes.

    y  = x8 w8^T        x and w in e4m3: 4 significant bits, up to 448
    dx = g8 w8          the incoming gradient in e5m2 (3 bits, up to 57344), or in e4m3 with a scale for each row
    dw = g8^T x8        sums in fp32, results in the dtype of what came in

Before a tensor is cast it is multiplied by a scale, so that its largest number nearly fills the range; the product is
multiplied by the inverse scales. Two recipes: one scale for a *tensor*, or one for each *row* of an operand along the
contraction, which costs two casts of each tensor with scales of their own and forgives outliers. Scales are taken from
the numbers themselves, anew each time. What is not finite makes the scale nan, and so the result.

Cost for x of M rows and K numbers, w of N rows: three products of 2 M N K operations at the rate of fp8; read and
written besides, in bytes, with one scale: 6 M K for x (its maximum, the cast, a transposed copy), 6 M N for the
gradient, 8 N K for the weight, which is cast again in backward. Of x a layer keeps one byte a number for backward.

[Note: powers of two] Scales are powers of two, taken from the bits of the maximum. To multiply by one is exact, so the
cast rounds a number as if it were alone, whatever the maximum beside it, down to numbers 2^-14 of it (e4m3). So ranks
that have other parts of a batch or of a weight round the same numbers alike, and compiled code rounds as eager code.

[Note: experts] One kernel multiplies the rows of all experts, with a scale for each row in both recipes, so that ranks
round alike whatever rows they get. Gradients of an expert's weights are sums over its rows, whose number is no multiple
of 16: they are computed in the dtype of what came in.

[Note: layouts] The tensor cores of Hopper read both operands along the contraction. So backward needs transposed copies
of g8, w8 and x8. A compiler writes the cast and its transposed copy in one pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import Function
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from paceline.errors import UsageError
from paceline.models.experts import Experts, grouped_product, grouped_sums
from paceline.models.lora import mixed

MULTIPLE = 16  # of which all sizes of a product are multiples: what tensor cores take at once
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_HOPPER = (9, 0)
_TWO_TO_127, _NAN = 0x7F000000, 0x7FC00000  # the bits of fp32
_TOP = {E4M3: 8, E5M2: 15}  # the largest number is 1.75 times two to this power
# Whether a product may sum a few terms with 14 bits before it adds them in fp32. Outputs and the gradients of inputs,
# which are sums over a layer's width, bear it; the gradients of weights are sums over all tokens of a batch.
_FAST_OVER_WIDTH, _FAST_OVER_TOKENS = True, False


def float8_linear(x: Tensor, weight: Tensor, bias: Tensor | None, *, by_row: bool) -> Tensor:
    """Returns what ``F.linear`` would, from operands of 8 bits; from plain ones if x has no multiple of 16 rows."""
    rows = x.numel() // x.shape[-1]
    if rows == 0 or rows % MULTIPLE:
        return F.linear(x, weight, bias)
    run: Callable[..., Tensor] = _Float8Product.apply
    keeps = torch.is_grad_enabled() and weight.requires_grad
    y = run(x.reshape(rows, x.shape[-1]), weight, by_row, keeps).reshape(*x.shape[:-1], weight.shape[0])
    return y if bias is None else y + bias.to(y.dtype)


class Float8Linear(nn.Linear):
    """A linear layer that computes with operands of 8 bits. Mixed into the class of the layer that it replaces."""

    by_row: bool = False

    def forward(self, x: Tensor) -> Tensor:
        return float8_linear(x, self.weight, self.bias, by_row=self.by_row)


class _Float8Product(Function):
    """x (M, K) times the transpose of w (N, K). ``keeps``: whether a weight gradient will be asked for."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, by_row: bool, keeps: bool) -> Tensor:
        ctx.by_row, ctx.dtype = by_row, x.dtype
        if by_row:
            x8, x_inverse = _cast(x, E4M3, 1)
            w8, w_inverse = _cast(weight, E4M3, 1)
            ctx.save_for_backward(x, weight)
            return _product(x8, w8.t(), x_inverse, w_inverse.t(), x.dtype, fast=_FAST_OVER_WIDTH)
        x_scale, x_inverse = scales_of(_largest(x), E4M3)
        x8, x8_columns = _cast_both(x, x_scale, E4M3) if keeps else (round_to(x, x_scale, E4M3), None)
        w8, w_inverse = _cast(weight, E4M3, None)
        ctx.save_for_backward(x8_columns, x_inverse, weight, w_inverse)
        return _product(x8, w8.t(), x_inverse, w_inverse, x.dtype, fast=_FAST_OVER_WIDTH)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        for_x = for_weight = None
        if ctx.by_row:
            x, weight = ctx.saved_tensors
            if ctx.needs_input_grad[0]:
                g8, g_inverse = _cast(gradient, E4M3, 1)
                w8, w_inverse = _cast(weight, E4M3, 0)
                for_x = _product(g8, _by_columns(w8), g_inverse, w_inverse, ctx.dtype, fast=_FAST_OVER_WIDTH)
            if ctx.needs_input_grad[1]:
                g8, g_inverse = _cast(gradient, E4M3, 0)
                x8, x_inverse = _cast(x, E4M3, 0)
                g8, g_inverse, x8 = g8.t().contiguous(), g_inverse.t(), _by_columns(x8)
                for_weight = _product(g8, x8, g_inverse, x_inverse, weight.dtype, fast=_FAST_OVER_TOKENS)
            return for_x, for_weight, None, None
        x8_columns, x_inverse, weight, w_inverse = ctx.saved_tensors
        scale, inverse = scales_of(_largest(gradient), E5M2)
        g8, g8_columns = _cast_both(gradient, scale, E5M2)
        if ctx.needs_input_grad[0]:
            # One over a power of two, exactly, which a division need not be in compiled code: 2^(127 - n) from 2^n.
            w_scale = (_TWO_TO_127 - w_inverse.view(torch.int32)).view(torch.float32)
            _, w8_columns = _cast_both(weight, w_scale, E4M3)
            for_x = _product(g8, w8_columns.t(), inverse, w_inverse, ctx.dtype, fast=_FAST_OVER_WIDTH)
        if ctx.needs_input_grad[1]:
            for_weight = _product(g8_columns, x8_columns.t(), inverse, x_inverse, weight.dtype, fast=_FAST_OVER_TOKENS)
        return for_x, for_weight, None, None


def float8_grouped_product(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """Returns what ``grouped_product`` would, from operands of 8 bits. See [Note: experts]."""
    if len(rows) == 0:
        return grouped_product(rows, weights, counts)
    run: Callable[..., Tensor] = _Float8GroupedProduct.apply
    return run(rows, weights, counts)


class _Float8GroupedProduct(Function):
    """Rows (rows, inputs) times the transposes of weights (experts, outputs, inputs), expert by expert."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weights, counts)
        return _scaled_groups(rows, weights, counts, rows.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        rows, weights, counts = ctx.saved_tensors
        for_rows = for_weights = None
        if ctx.needs_input_grad[0]:
            for_rows = _scaled_groups(gradient, weights.transpose(1, 2), counts, rows.dtype)
        if ctx.needs_input_grad[1]:
            for_weights = grouped_sums(gradient.to(rows.dtype), rows, counts).to(weights.dtype)
        return for_rows, for_weights, None


def _scaled_groups(rows: Tensor, weights: Tensor, counts: Tensor, dtype: torch.dtype) -> Tensor:
    """Casts both operands with a scale for each row, and multiplies."""
    rows8, rows_inverse = _cast(rows, E4M3, -1)
    weights8, weights_inverse = _cast(weights, E4M3, -1)
    if rows.is_meta:
        return grouped_product(rows8, weights8, counts).to(dtype)
    found: Tensor = _multiply_groups(rows8, weights8, rows_inverse, weights_inverse, counts)
    return found if found.dtype == dtype else found.to(dtype)


def _run_groups(rows: Tensor, weights: Tensor, rows_inverse: Tensor, weights_inverse: Tensor, counts: Tensor) -> Tensor:
    """Multiplies numbers of 8 bits, and by their inverse scales; on a CPU in fp32."""
    if rows.device.type == "cpu":  # inverse scales are powers of two: to multiply by one first is as exact
        return grouped_product(rows.float() * rows_inverse, weights.float() * weights_inverse, counts).bfloat16()
    ends, scales = counts.cumsum(0).to(torch.int32), (rows_inverse.flatten(), weights_inverse.flatten(1))
    how: dict[str, Any] = {"offs": ends, "out_dtype": torch.bfloat16, "use_fast_accum": _FAST_OVER_WIDTH}
    found: Tensor = torch._scaled_grouped_mm(rows, weights.transpose(1, 2), *scales, **how)
    return found


# One operator, whose inside no compiler sees: torch's own kernel for groups has run here, and no compiled form of it.
_multiply_groups = torch.library.custom_op(
    "paceline::multiply_groups_of_8_bits",
    _run_groups,
    mutates_args=(),
    schema="(Tensor rows, Tensor weights, Tensor rows_inverse, Tensor weights_inverse, Tensor counts) -> Tensor",
)
_multiply_groups.register_fake(
    lambda rows, weights, *_: rows.new_empty(len(rows), weights.shape[1], dtype=torch.bfloat16)
)


def _by_columns(x: Tensor) -> Tensor:
    """Returns the same matrix, column after column in memory."""
    return x.t().contiguous().t()


def _product(a8: Tensor, b8: Tensor, a_inverse: Tensor, b_inverse: Tensor, dtype: torch.dtype, *, fast: bool) -> Tensor:
    """Returns a (rows in memory) times b (columns), times both inverse scales; on a CPU in fp32, of 8-bit numbers."""
    if a8.device.type == "cpu":
        return ((a8.float() @ b8.float()) * (a_inverse * b_inverse)).to(dtype)
    is_by_row = a_inverse.ndim > 0
    if is_by_row and not fast:
        # The kernel with scales of rows is slow with exact sums: the one for a tensor runs, and scales come after it.
        one = torch.ones((), dtype=torch.float32, device=a8.device)
        unscaled: Tensor = torch._scaled_mm(a8, b8, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
        return (unscaled * (a_inverse * b_inverse)).to(dtype)
    wide = torch.bfloat16 if is_by_row else dtype  # all that comes out with scales of rows
    found: Tensor = torch._scaled_mm(a8, b8, scale_a=a_inverse, scale_b=b_inverse, out_dtype=wide, use_fast_accum=fast)
    # A cast to its own dtype would return the product itself, for which torch 2.11 compiles gradients of zero.
    return found if found.dtype == dtype else found.to(dtype)


def _cast(x: Tensor, dtype: torch.dtype, dim: int | None) -> tuple[Tensor, Tensor]:
    """Returns x in a dtype of 8 bits, and the inverse scale: one, or with ``dim`` one for each row across that dim."""
    scale, inverse = scales_of(_largest(x, dim), dtype)
    return round_to(x, scale, dtype), inverse


def _largest(x: Tensor, dim: int | None = None) -> Tensor:
    # Of a tensor, rows first: a compiler takes their maxima where it makes them, in a norm or an activation.
    across = -1 if dim is None else dim
    found: Tensor = torch.linalg.vector_norm(x, math.inf, dim=across, keepdim=True)
    return found.amax() if dim is None else found


def _cast_both(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns x in a dtype of 8 bits, and its transposed copy; compilers make both in one pass."""
    x8 = round_to(x, scale, dtype)
    return x8, x8.t().contiguous()


def round_to(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns x times the scale in a dtype of 8 bits; what is outside its range is its largest number."""
    largest = torch.finfo(dtype).max
    return (x.float() * scale).clamp(-largest, largest).to(dtype).contiguous()  # rows in memory, whatever x was


def scales_of(largest: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns the largest power of two that keeps ``largest`` times it within the range of a dtype, and its inverse.

    Both stay normal numbers of fp32, also for zero; nan for what is not finite. See [Note: powers of two].
    """
    # The exponent in fp32, one more where the number is above 1.75 times its power of two.
    bits = largest.float().view(torch.int32)
    exponent = torch.bitwise_right_shift(bits + 0x1FFFFF, 23).clamp(_TOP[dtype] + 1, 254)
    inverse = torch.bitwise_left_shift(exponent - _TOP[dtype], 23)
    # Nan as bits: compilers compare constants to find what is computed twice, and the float is not equal to itself.
    scale = torch.where(largest.isfinite(), _TWO_TO_127 - inverse, _NAN)
    return scale.view(torch.float32), inverse.view(torch.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Float8Layers:
    """The linear layers and experts of a model by name: those that compute with 8 bits, and why others do not."""

    chosen: tuple[str, ...]
    left: dict[str, str]

    def __str__(self) -> str:
        reasons: dict[str, list[str]] = {}
        for name, reason in self.left.items():
            reasons.setdefault(reason, []).append(name)
        parts = [
            f"{', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''} ({reason})"
            for reason, names in reasons.items()
        ]
        rest = f"; in bf16: {', '.join(parts)}" if parts else ""
        return f"{len(self.chosen)} of {len(self.chosen) + len(self.left)} linear layers in fp8{rest}"


def choose_float8(model: nn.Module, blocks: Sequence[nn.Module]) -> Float8Layers:
    """Says which linear layers compute with 8 bits: those inside the blocks, whose sizes are multiples of 16.

    Experts too, on a CPU and on Hopper, the one generation for which every torch has the kernel.
    """
    inside = {id(module) for block in blocks for module in block.modules()}
    linears = {name: each for name, each in model.named_modules() if isinstance(each, (nn.Linear, Experts))}
    left: dict[str, str] = {}
    for name, module in linears.items():
        if id(module) not in inside:
            left[name] = "outside the blocks"
        elif any(size % MULTIPLE for size in _sizes(module)):
            left[name] = f"sizes that are no multiples of {MULTIPLE}"
        elif isinstance(module, Experts):
            if torch.cuda.is_available() and torch.cuda.get_device_capability() != _HOPPER:
                left[name] = "experts, for which torch has a kernel on Hopper alone"
        elif not hasattr(module, "float8_by_row") and not _is_plain(module):
            left[name] = "a forward of its own"
    # A tied weight is read by another module too: an embedding, or a layer that stays as it is.
    swapped = {id(module) for name, module in linears.items() if name not in left}
    read = {id(p) for each in model.modules() if id(each) not in swapped for p in each.parameters(recurse=False)}
    weights = {name: each.first if isinstance(each, Experts) else each.weight for name, each in linears.items()}
    left |= {n: "tied to another layer" for n, each in weights.items() if n not in left and id(each) in read}
    return Float8Layers(chosen=tuple(name for name in linears if name not in left), left=left)


def check_float8(model: nn.Module, blocks: Sequence[nn.Module], precision: str) -> None:
    """Raises UsageError where no layer would compute with 8 bits."""
    found = choose_float8(model, blocks)
    if not found.chosen:
        reasons = f": {found}" if found.left else ", for there is none"
        raise UsageError(
            f"precision = {precision!r}, and no linear layer of {type(model).__name__} can compute in fp8{reasons}\n"
            f"  these are the linear layers inside the model's blocks whose sizes are multiples of {MULTIPLE}\n"
            "  give the model a method blocks() that returns its repeated parts, or use precision = 'bf16_master'"
        )


def swap_linears(model: nn.Module, blocks: Sequence[nn.Module], *, by_row: bool) -> Float8Layers:
    """Makes the chosen layers compute with 8 bits, in place: parameters, names, hooks and state dict stay."""
    found = choose_float8(model, blocks)
    for name in found.chosen:
        module: Any = model.get_submodule(name)
        if isinstance(module, Experts):
            module.float8 = float8_grouped_product
            continue
        if not hasattr(module, "float8_by_row"):  # a layer that is split over ranks computes its products itself
            own: Any = type(module)
            module.__class__ = Float8Linear if own is nn.Linear else mixed(Float8Linear, own)
            module.by_row = by_row
        else:
            module.float8_by_row = by_row
        module.weight._paceline_float8 = not by_row
    return found


def travels_as_float8(parameter: nn.Parameter) -> bool:
    """Says whether nothing but products of 8 bits with one scale reads a parameter."""
    return getattr(parameter, "_paceline_float8", False)


def _sizes(module: nn.Linear | Experts) -> tuple[int, ...]:
    if isinstance(module, Experts):
        return (*module.first.shape[1:], *module.last.shape[1:])
    return module.in_features, module.out_features


def _is_plain(module: nn.Linear) -> bool:
    """Whether a call of the module is ``F.linear``: neither its class nor the object has another forward."""
    is_read_apart = isinstance(module, NonDynamicallyQuantizableLinear)  # by the attention that has it
    return type(module).forward is nn.Linear.forward and "forward" not in vars(module) and not is_read_apart
