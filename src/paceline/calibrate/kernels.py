"""Measures what one rank computes: products by shape and layout, attention, memory, and launches eager and compiled.

FLOPs are counted as 2 m k n for a product of (m x k) by (k x n), and 2 b h s^2 d for causal attention, forward: half of
the full square; backward 2.5 times that. A linear layer of r rows from i to o features is three products: its forward
(r, i, o) with the weights transposed (nt), the gradient of its input (r, o, i) with neither (nn), and that of its
weights (o, r, i) with the first one transposed (tn). Bytes are those that a dry run counts
(rehearse/dryrun/operators.py). What memory binds is measured family by family and size by size:

    seconds of a kernel  =  what a call takes  -  what a call on next to nothing takes        (a GPU: the call's alone)
    host, an operation   =  a training step of a small transformer on next to nothing / its operations
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import resources
from itertools import cycle
from typing import Any, Literal

import torch
import torch.nn.functional as F

from paceline.bounded_yaml import load_shipped
from paceline.calibrate.timing import Stopwatch, measure_loop, recorded
from paceline.cluster.detect import bf16_instructions
from paceline.cluster.devices import ShapeRate
from paceline.cluster.kernels import ATTENTION_BACKWARD, MEMORY_FAMILIES, MemoryFamily
from paceline.comm.solo import SoloCommunicator
from paceline.engines.apply import parallelize
from paceline.models.gpt import GPT, gpt_config
from paceline.train.step import update_if_finite
from paceline.units import KIB, MIB

_DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_COLD_BYTES, _MOST_COPIES = 64 * MIB, 64
_CHAIN = 100  # operations in a row, few enough that a device's queue does not fill
_COMPILED_PAIRS = 10
Call = Callable[[], object]
_ROW = 512  # elements of a row, where kernels go row by row
_TINY_BYTES = 2 * KIB  # one row
_TENSORS, _FEW_TENSORS = 32, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyFigures:
    """Bytes per second by family: (bytes, rate) in growing order. Host seconds of an operation, and of each further
    tensor of an operation over lists; on a CPU also of a step besides, and of the loop around it."""

    rates: Mapping[str, tuple[tuple[int, float], ...]]
    operation_s: float
    tensor_s: float
    step_s: float = 0.0
    loop_s: float | None = None
    spreads: dict[str, float] = field(default_factory=dict)


def measure_families(device: torch.device, sizes: tuple[int, ...], watch: Stopwatch) -> FamilyFigures:
    watch = replace(watch, spreads={})
    rates: dict[str, tuple[tuple[int, float], ...]] = {}
    for family in MEMORY_FAMILIES:
        points = []
        # A GPU's calls return before the kernel runs; and the embedding's backward clears its table however few rows.
        is_counted = device.type == "cpu" and family != "embedding_backward"
        empty = watch.time(make_call(family, device, _TINY_BYTES)) if is_counted else 0.0
        for size in sizes:
            call = make_call(family, device, size)
            counted = sum(each.num_bytes for each in recorded(call))
            seconds = watch.time(call, f"{family} {size // KIB} KiB")
            points.append((counted, counted / max(seconds - empty, 0.1 * seconds)))
        rates[family] = tuple(points)
    tensor_s = _tensor(device, watch)
    if device.type == "cpu":
        watch.meet()
        host = measure_loop(tensor_s, rounds=3 * watch.samples)._asdict()
        watch.spreads["operations"] = host.pop("spread")
    else:
        host = {"operation_s": _operation(device, watch, tensor_s)}
    return FamilyFigures(rates=rates, tensor_s=tensor_s, spreads=watch.spreads, **host)


def make_call(family: MemoryFamily, device: torch.device, num_bytes: int) -> Call:
    """Returns a call of a kernel of this family, over a tensor of so many bytes."""
    rows = max(1, num_bytes // (4 * _ROW))
    values, gradient = (torch.randn(rows, _ROW, device=device) for _ in range(2))
    weight, aten = torch.ones(_ROW, device=device), torch.ops.aten
    match family:
        case "pointwise":
            return lambda: values * gradient
        case "curve":
            return lambda: F.silu(values)
        case "curve_backward":
            return lambda: aten.silu_backward(gradient, values)
        case "norm":
            return lambda: torch.native_layer_norm(values, [_ROW], weight, None, 1e-5)
        case "norm_backward":
            _, mean, scale = torch.native_layer_norm(values, [_ROW], weight, None, 1e-5)
            arguments = (gradient, values, [_ROW], mean, scale, weight, None, [True, True, False])
            return lambda: aten.native_layer_norm_backward(*arguments)
        case "softmax":
            return lambda: torch.log_softmax(values, dim=-1)
        case "reduction":
            return lambda: values.mean(dim=-1)
        case "strided":  # heads and positions change places, as around attention
            heads = values.view(-1, _ROW // 64, 64).transpose(0, 1)
            return lambda: heads.clone(memory_format=torch.contiguous_format)
        case "convert":
            return lambda: values.to(torch.bfloat16)
        case "embedding":
            table, tokens = torch.randn(4096, _ROW, device=device), torch.randint(0, 4096, (rows,), device=device)
            return lambda: F.embedding(tokens, table)
        case "embedding_backward":
            tokens = torch.randint(0, 1024, (rows,), device=device)
            return lambda: aten.embedding_dense_backward(gradient, tokens, 1024, -1, False)
        case "optimizer":
            return _optimizer_step(device, num_bytes)
        case "random":  # what dropout draws: a processor makes the numbers one after another
            return lambda: values.bernoulli_(0.9)


def _optimizer_step(device: torch.device, num_bytes: int, tensors: int = 1) -> Call:
    shape = (max(1, num_bytes // (4 * _ROW)), _ROW)
    parameters = [torch.randn(shape, device=device, requires_grad=True) for _ in range(tensors)]
    for each in parameters:
        each.grad = torch.randn_like(each)
    return torch.optim.AdamW(parameters, lr=1e-6, fused=True).step


def _operation(device: torch.device, watch: Stopwatch, tensor_s: float) -> float:
    """Times a training step whose kernels have nothing to do: dispatch, autograd, the engine, the optimizer."""
    model = GPT(gpt_config(None, layers=4, heads=2, width=8, context=4, vocab_size=8)).to(device)
    engine = parallelize(model, SoloCommunicator(device), "ddp")
    optimizer = torch.optim.AdamW(engine.parameters(), lr=1e-6, fused=True)
    tokens = torch.zeros(1, 4, dtype=torch.int64, device=device)

    def step() -> None:
        logits = engine(tokens)
        F.cross_entropy(logits.view(-1, 8), tokens.view(-1)).backward()  # type: ignore[no-untyped-call]
        update_if_finite(optimizer, engine.clip_grad_norm_(float("inf")), 1.0)
        optimizer.zero_grad(set_to_none=True)

    step()
    found = recorded(step)
    seconds = watch.time_host(step, "operations")
    lists = sum(each.tensors - 1 for each in found) * tensor_s
    return max(seconds - lists, 0.5 * seconds) / len(found)


def _tensor(device: torch.device, watch: Stopwatch) -> float:
    """Times the optimizer's update of many empty tensors; on a CPU less one of few, as steps are priced besides."""
    many = watch.time_host(_optimizer_step(device, _TINY_BYTES, _TENSORS), "tensors of a list")
    if device.type != "cpu":
        return many / _TENSORS
    few = watch.time_host(_optimizer_step(device, _TINY_BYTES, _FEW_TENSORS))
    return max(many - few, 0.1 * many) / (_TENSORS - _FEW_TENSORS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """What is measured: (rows, inner, columns) of products by dtype, (rows, inputs, outputs) of linear layers in
    ``linear_dtype``, (batch, heads, sequence, head size) of attention, the bytes of a tensor that goes through memory,
    and of those that families of kernels go through; none: no families."""

    products: dict[str, tuple[tuple[int, int, int], ...]]
    attention: tuple[tuple[int, int, int, int], ...]
    stream_bytes: int
    linears: tuple[tuple[int, int, int], ...] = ()
    linear_dtype: str = "fp32"
    family_bytes: tuple[int, ...] = ()


def shapes_for(kind: Literal["cpu", "all_cores", "cuda"]) -> Shapes:
    """Returns what is measured on a device (shapes.yaml); on a processor bf16 like fp32 where it has instructions."""
    table = load_shipped(resources.files("paceline.calibrate").joinpath("shapes.yaml").read_text())[kind]
    products = {dtype: _sizes(shapes) for dtype, shapes in table["products"].items()}
    if kind == "cpu" and bf16_instructions():
        products = dict.fromkeys(products, products["fp32"])
    return Shapes(
        products=products,
        attention=_sizes(table["attention"]),
        stream_bytes=table["stream_mib"] * MIB,
        linears=tuple((rows, *features) for rows in table["rows"] for features in table["features"]),
        linear_dtype=table["linear_dtype"],
        family_bytes=tuple(size * KIB for size in table["family_kib"]),
    )


def _sizes(rows: list[list[int]]) -> Any:
    return tuple(map(tuple, rows))


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelFigures:
    """What one rank measured; ``spreads`` by name. ``compiled_launch_s`` is None where nothing could be compiled,
    ``families`` where no sizes of them were asked for."""

    rates: tuple[ShapeRate, ...]
    memory_bandwidth: float
    launch_s: float
    compiled_launch_s: float | None
    families: FamilyFigures | None = None
    spreads: dict[str, float] = field(default_factory=dict)


def measure_kernels(device: torch.device, shapes: Shapes, watch: Stopwatch, *, with_compiled: bool) -> KernelFigures:
    """Measures one device. Where several ranks do so at once, each gets what is left to it, as in a run."""
    watch = replace(watch, spreads={})
    rates = (
        *_products(device, shapes, watch),
        *_linears(device, shapes, watch),
        *attention_rates(device, shapes, watch),
    )
    first, second, out = (torch.ones(shapes.stream_bytes // 4, device=device) for _ in range(3))
    stream = watch.time(partial(torch.add, first, second, out=out), "memory")
    launch = watch.time_host(_eager_chain(device), "launches")
    families = measure_families(device, shapes.family_bytes, watch) if shapes.family_bytes else None
    compiled = _compiled_launch(device, watch) if with_compiled else None
    return KernelFigures(
        rates=rates,
        memory_bandwidth=3 * shapes.stream_bytes / stream,
        launch_s=launch / (2 * _CHAIN),
        compiled_launch_s=compiled,
        families=families,
        spreads=watch.spreads | (families.spreads if families else {}),
    )


def _random(device: torch.device, dtype: str, *sizes: int) -> torch.Tensor:
    return torch.randn(sizes, device=device).to(_DTYPES[dtype])


def _products(device: torch.device, shapes: Shapes, watch: Stopwatch) -> Iterator[ShapeRate]:
    for dtype, products in shapes.products.items():
        for rows, inner, columns in products:
            left, right = _random(device, dtype, rows, inner), _random(device, dtype, inner, columns)
            out = torch.empty(rows, columns, device=device, dtype=left.dtype)
            with _tf32(dtype == "tf32"):
                seconds = watch.time(partial(torch.mm, left, right, out=out), f"{dtype} {rows}x{inner}x{columns}")
            flops = 2.0 * rows * inner * columns / seconds
            yield ShapeRate(kind="matmul", dtype=dtype, sizes=(rows, inner, columns), flops=flops)


def _linears(device: torch.device, shapes: Shapes, watch: Stopwatch) -> Iterator[ShapeRate]:
    """Measures the three products of each linear layer, with operands as a training step has them."""
    dtype = shapes.linear_dtype
    for rows, inner, outer in shapes.linears:
        inputs, weight = _random(device, dtype, rows, inner), _random(device, dtype, outer, inner)
        gradient = _random(device, dtype, rows, outer)
        for layout, sizes, left, right in (
            ("nt", (rows, inner, outer), inputs, weight.t()),
            ("nn", (rows, outer, inner), gradient, weight),
            ("tn", (outer, rows, inner), gradient.t(), inputs),
        ):
            seconds = watch.time(_by_turns(left, right), f"{dtype} {'x'.join(map(str, sizes))} {layout}")
            flops = 2.0 * rows * inner * outer / seconds
            yield ShapeRate(kind="matmul", dtype=dtype, sizes=sizes, flops=flops, layout=layout)


def _by_turns(left: torch.Tensor, right: torch.Tensor) -> Callable[[], object]:
    """Multiplies with one copy of the second operand after another: on a CPU what was read in another step is no
    longer in its cache, and what was computed just before is."""
    if left.device.type != "cpu":
        return lambda: torch.mm(left, right)
    num_copies = max(1, min(_MOST_COPIES, _COLD_BYTES // (right.numel() * right.element_size())))
    turns = cycle([right.clone() for _ in range(num_copies)])  # clone keeps the layout
    return lambda: torch.mm(left, next(turns))


@contextmanager
def _tf32(is_allowed: bool) -> Iterator[None]:
    """Allows or forbids TF32 in products for a while; no-op on a CPU."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = is_allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def attention_rates(device: torch.device, shapes: Shapes, watch: Stopwatch) -> Iterator[ShapeRate]:
    dtype = "bf16" if device.type == "cuda" else "fp32"
    for sizes in shapes.attention:
        batch, heads, length, size = sizes
        query, key, value = parts = [_random(device, dtype, *sizes) for _ in range(3)]
        name, flops = f"attention {'x'.join(map(str, sizes))}", 2.0 * batch * heads * length**2 * size
        attend = partial(F.scaled_dot_product_attention, query, key, value, is_causal=True)
        yield ShapeRate(kind="attention", dtype=dtype, sizes=sizes, flops=flops / watch.time(attend, name))
        needed = [each.requires_grad_() for each in parts]
        out = attend()
        backward = partial(torch.autograd.grad, out, needed, torch.randn_like(out), retain_graph=True)
        rate = ATTENTION_BACKWARD * flops / watch.time(backward, f"{name} backward")
        yield ShapeRate(kind="attention_backward", dtype=dtype, sizes=sizes, flops=rate)


def _eager_chain(device: torch.device) -> Callable[[], None]:
    """Returns a chain of operations on tiny tensors, forward and backward: its time is that of the launches."""
    start = torch.ones(8, device=device, requires_grad=True)

    def run() -> None:
        value = start
        for _ in range(_CHAIN):
            value = value * 1.0
        torch.autograd.grad(value, start, torch.ones_like(value))

    return run


def _compiled_launch(device: torch.device, watch: Stopwatch) -> float | None:
    """Returns the host's time of one kernel of a compiled block of small products, which cannot be fused."""
    weight = torch.eye(16, device=device)

    def block(value: torch.Tensor) -> torch.Tensor:
        for _ in range(_COMPILED_PAIRS):
            value = torch.relu(value @ weight)
        return value

    start = torch.ones(16, 16, device=device)
    try:
        compiled = torch.compile(block)
        with torch.no_grad():
            compiled(start)
            seconds = watch.time_host(lambda: compiled(start))
    except Exception:  # no compiler, no Triton, a Python too new: a device is worth measuring all the same
        return None
    return seconds / (2 * _COMPILED_PAIRS)
