"""Measures what memory binds, family by family and size by size, and what the host pays for each operation.

    seconds of a kernel  =  what a call takes  -  what a call on next to nothing takes        (a GPU: the call's alone)
    host, an operation   =  a training step of a small transformer on next to nothing / its operations; on a CPU, where
                            no device hides what else the host does in a step

Bytes are those that a dry run counts (rehearse/dryrun/operators.py), so that what is measured is what is priced later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F

from paceline.calibrate.loop import measure_loop, recorded
from paceline.calibrate.sampling import Stopwatch
from paceline.cluster.kernels import MEMORY_FAMILIES, MemoryFamily
from paceline.comm.solo import SoloCommunicator
from paceline.engines.apply import parallelize
from paceline.models.gpt import GPT, gpt_config
from paceline.train.step import update_if_finite
from paceline.units import KIB

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
    """Measures all families at tensors of so many bytes."""
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
    if device.type != "cpu":
        operation_s = _operation(device, watch, tensor_s)
        return FamilyFigures(rates=rates, operation_s=operation_s, tensor_s=tensor_s, spreads=watch.spreads)
    watch.meet()
    loop = measure_loop(tensor_s, rounds=3 * watch.samples)
    return FamilyFigures(
        rates=rates,
        operation_s=loop.operation_s,
        tensor_s=tensor_s,
        step_s=loop.step_s,
        loop_s=loop.loop_s,
        spreads=watch.spreads | {"operations": loop.spread},
    )


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
