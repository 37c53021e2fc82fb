"""What a kernel takes on a device, and the host that launches it: by fitted rates, and by what was measured there.

By fitted rates (predict/formulas/constants.py), where a device was not measured:

    product      2 m n k FLOPs at  ceiling x rate x k / (k + k_half) x filled;  at least its bytes over the bandwidth
    k_half       of A100 in bf16; elsewhere in proportion to FLOPs a byte: tiles come from memory and go back to it
    filled       tiles / (waves x multiprocessors), tiles of 128 x 128 outputs: the last wave stands partly empty
    attention    fused: 4 b s s' h FLOPs at ceiling x attention rate; unfused: two batched products, and the scores
                 are read and written as memory-bound work
    memory       bytes / (bandwidth x the share of it that streaming kernels reach)
    launches     kernels x the host's time for each: a device with less work than that waits

``rate`` is what a whole training step reaches of a ceiling that was measured on one product at a time: clocks fall
under load. On a device that ``paceline calibrate`` measured:

    product, attention       FLOPs / the rate of this shape, between the shapes that were timed
    single kernels           what this very one took, where ``calibrate --for`` has timed it
    all others               bytes read and written / the rate of this family of kernels at this size
    the host                 its time for each operation; a CPU computes itself, beside a GPU it runs ahead

What was not measured falls back: another family to ``pointwise``, that to the memory's bandwidth, a product to the
device's ceiling. The rate of a shape is the mean of the measured rates' logarithms, weighted by 1 / d^4, where d is the
distance of the sizes' logarithms. A processor's small products take a time that hardly depends on their sizes: the
library makes a plan for each call, more for some layouts than for others. So on a CPU

    seconds = floor + FLOPs / rate        floor: most of what the shortest measured product of the layout took,
                                          in whatever dtype

and it is this rate that lies between those of the measured shapes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, get_args

from paceline.cluster.costs import figure_between
from paceline.cluster.devices import Device, ShapeRate

TILE = 128
_KEYS = 64  # of a tile of FlashAttention, and of cuDNN's (arXiv 2307.08691)
_FITTED_TOKENS = 8192
# Forward and backward of causal attention on heads of 128: an H200 at 8,192 tokens (catalog/h200-measured.yaml), and an
# A100 at 16,384 by FlashAttention-2 (arXiv 2307.08691), are within a tenth of these.
_ALONE = (0.70, 0.65)
_BALANCE = 271.2e12 / 2.039e12  # FLOPs a byte of A100 SXM 80 GB in bf16


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRates:
    matmul: float = 0.85
    k_half: float = 128.0
    attention: float = 0.45
    attention_half: float = 512.0
    memory: float = 0.85


def matmul_seconds(
    device: Device, rates: KernelRates, m: float, n: float, k: float, dtype: str, batch: float = 1
) -> float:
    """Returns how long ``batch`` products of (m, k) by (k, n) take."""
    if m <= 0 or n <= 0 or k <= 0:
        return 0.0
    tiles = batch * math.ceil(m / TILE) * math.ceil(n / TILE)
    waves = tiles / device.sm_count if device.sm_count else 1.0
    filled = waves / math.ceil(waves) if waves < 16 else 1.0
    k_half = rates.k_half * (1.0 if device.is_cpu else ceiling(device, dtype) / device.memory_bandwidth / _BALANCE)
    reached = ceiling(device, dtype) * rates.matmul * k / (k + k_half) * filled
    if device.is_cpu and device.emulates(dtype):  # by arithmetic alone, which no shape makes slower
        reached = ceiling(device, dtype)
    moved = batch * _BYTES[dtype] * (m * k + k * n + m * n)
    return max(batch * 2.0 * m * n * k / reached, memory_seconds(device, rates, moved))


def attention_seconds(device: Device, rates: KernelRates, flops: float, seq_len: float, dtype: str) -> float:
    """Returns how long fused attention takes for so many FLOPs; short sequences fill its tiles less."""
    if device.is_cpu and device.emulates(dtype):  # which has no tiles, and computes what is masked as well
        return 2 * flops / (ceiling(device, dtype) * rates.attention)
    return flops / (ceiling(device, dtype) * rates.attention * seq_len / (seq_len + rates.attention_half))


def long_attention_seconds(
    device: Device, rates: KernelRates, flops: float, seq_len: float, dtype: str, *, is_back: bool
) -> float:
    """Returns the same for kernels of today: rates were fitted on runs of up to ``_FITTED_TOKENS``, and what a longer
    sequence takes beyond that runs at the share of the ceiling that such kernels reach alone."""
    is_known = device.is_cpu or dtype not in ("fp16", "bf16") or seq_len <= _FITTED_TOKENS
    fitted = 1.0 if is_known else _FITTED_TOKENS / seq_len
    near = attention_seconds(device, rates, fitted * flops, fitted * seq_len, dtype)
    return near + (1 - fitted) * flops / (ceiling(device, dtype) * _ALONE[is_back])


def todays_attention_seconds(
    device: Device, rates: KernelRates, flops: float, seq_len: float, dtype: str, *, is_back: bool
) -> float:
    """Returns what fused attention takes in libraries of 2025 and later, on Hopper: as it was measured alone."""
    filled = seq_len / (seq_len + rates.attention_half) * (1 + rates.attention_half / _FITTED_TOKENS)
    return flops / (ceiling(device, dtype) * _ALONE[is_back] * filled)


def memory_seconds(device: Device, rates: KernelRates, num_bytes: float) -> float:
    return num_bytes / (device.memory_bandwidth * rates.memory)


def ceiling(device: Device, dtype: str) -> float:
    """Returns the most that products reach; four-bit ones twice what eight-bit ones do."""
    return 2.0 * device.ceiling("fp8") if dtype == "fp4" else device.ceiling(dtype)


_BYTES = {"fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2, "fp8": 1.5, "fp4": 1.25}

# By what was measured.

MemoryFamily: TypeAlias = Literal[
    "pointwise", "curve", "curve_backward", "norm", "norm_backward", "softmax", "reduction", "strided", "convert",
    "embedding", "embedding_backward", "optimizer", "random",
]  # fmt: skip
Family: TypeAlias = Literal["matmul", "attention", "attention_backward"] | MemoryFamily
MEMORY_FAMILIES: tuple[MemoryFamily, ...] = get_args(MemoryFamily)
# Kernels that a compiler puts into one, and goes through memory once for all of them.
FUSED: frozenset[str] = frozenset(
    ("pointwise", "curve", "curve_backward", "norm", "norm_backward", "convert", "strided", "reduction", "random")
)
# What two kinds of kernels reach on a GPU: of the ceiling, the convolution of an image's few channels, which its units
# go through as if they were 32; of a reduction's rate, the gradient of a pooling, where each number looks for itself in
# all windows around it. Fitted to one step of a ResNet-50 in bf16 on an H200, which has no record in bench/results.
_FEW_CHANNELS = 0.054
_POOLING_BACKWARD = 0.28
_FLOOR = 0.9
# A kernel that has next to nothing to do, with the pause before the next one: 1.5 and 1.5 us in a profile of GPT-124M.
_SHORTEST_S = 3e-6
ATTENTION_BACKWARD = 2.5  # FLOPs of fused attention's backward, over those of its forward


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One call of a kernel. ``sizes``: (rows, inner, columns) of ``batch`` products, or (batch, heads, queries, head
    size) of attention; ``keys``: where these are not as many as the queries. ``layout`` says which operands are
    transposed: nn, nt, tn. ``reads`` and ``writes``: (number of the tensor, bytes). ``tensors``: how many a kernel over
    lists has, which the host goes through one by one.
    """

    name: str
    family: Family
    dtype: str = "fp32"
    sizes: tuple[int, ...] = ()
    keys: int = 0
    batch: int = 1
    layout: str = ""
    is_causal: bool = True
    tensors: int = 1
    reads: tuple[tuple[int, int], ...] = ()
    writes: tuple[tuple[int, int], ...] = ()
    phase: str = "forward"

    @property
    def num_bytes(self) -> int:
        return sum(size for _, size in self.reads) + sum(size for _, size in self.writes)

    @property
    def flops(self) -> float:
        """Floating point operations of a product, or of attention, causal in half; 0 for what memory binds."""
        if self.family == "matmul":
            return 2.0 * self.batch * math.prod(self.sizes)
        if self.family.startswith("attention"):
            batch, heads, length, size = self.sizes
            forward = 4.0 * batch * heads * length * (self.keys or length) * size / (2 if self.is_causal else 1)
            return forward * (ATTENTION_BACKWARD if self.family == "attention_backward" else 1.0)
        return 0.0

    @property
    def label(self) -> str:
        """What a device's table of single kernels knows it by: all that decides what it takes."""
        sizes = "x".join(map(str, self.sizes)) + (f"x{self.keys}" if self.keys else "")
        batch = f"{self.batch} of" if self.batch > 1 else ""
        rest = "" if self.is_causal else "whole", f"{self.tensors} tensors" if self.tensors > 1 else ""
        told = (self.name, self.dtype, batch, sizes, self.layout, *rest, f"{self.num_bytes} bytes")
        return " ".join(filter(None, told))

    @property
    def is_convolution(self) -> bool:
        return "convolution" in self.name

    @property
    def is_batch_norm(self) -> bool:
        return "batch_norm" in self.name

    @property
    def has_few_channels(self) -> bool:
        """Whether a convolution reads channels that do not fill the rows of a tensor unit, which are 8 numbers long."""
        if not self.is_convolution or self.dtype == "fp32":
            return False
        return self.sizes[2 if self.name.endswith("backward") else 1] % 8 != 0


def work_seconds(device: Device, operation: Operation) -> float:
    if device.kernels and (known := device.kernels.get(operation.label)):
        return known
    if operation.family == "matmul":
        measured = matmul_rate(device, operation.sizes, operation.dtype, operation.layout)
        rate = measured or device.ceiling(operation.dtype)
        if device.is_cpu:
            return operation.flops / rate
        if operation.has_few_channels:
            rate = _FEW_CHANNELS * device.ceiling(operation.dtype)
        least = operation.num_bytes / (device.memory_bandwidth * device.memory_share)
        is_turned = operation.layout == "channels first" and operation.dtype in ("bf16", "fp16")  # and turned back
        turned = 2 * operation.num_bytes / memory_rate(device, "strided", operation.num_bytes) if is_turned else 0.0
        return max(operation.flops / rate, least) + turned
    if operation.family in ("attention", "attention_backward"):
        found = attention_rate(device, operation.sizes, operation.family, operation.dtype)
        computed = operation.flops * (1.0 if device.is_cpu else _in_tiles(operation))
        return computed / (found or 0.4 * device.ceiling(operation.dtype))
    share = _POOLING_BACKWARD if operation.name == "max_pool2d_with_indices_backward" and not device.is_cpu else 1.0
    through = operation.num_bytes / (share * memory_rate(device, operation.family, operation.num_bytes))
    return through if device.is_cpu else max(through, _by_number(device, operation), _SHORTEST_S)


def _by_number(device: Device, operation: Operation) -> float:
    """Seconds of a kernel that looks for the place of each number: in 16 bits what it takes in 32, which was timed."""
    if operation.layout != "strided":
        return 0.0
    is_reduction = operation.family == "reduction"
    most = max((size for _, size in (operation.reads if is_reduction else operation.writes)), default=0)
    in_full = most * (4 / _BYTES[operation.dtype] if operation.dtype in ("bf16", "fp16") else 1) * (2 - is_reduction)
    return in_full / memory_rate(device, operation.family if is_reduction else "strided", in_full)


def _in_tiles(operation: Operation) -> float:
    """Scores that attention computes over those that count: whole tiles of queries and of keys (197 tokens are 256)."""
    queries = operation.sizes[2]
    keys = operation.keys or queries
    return math.ceil(queries / TILE) * TILE / queries * (math.ceil(keys / _KEYS) * _KEYS / keys)


def memory_rate(device: Device, family: str, num_bytes: float) -> float:
    points = device.memory_rates.get(family) or device.memory_rates.get("pointwise")
    if not points:
        return device.memory_bandwidth * device.memory_share
    return figure_between(points, num_bytes)


def host_seconds(device: Device, operation: Operation, *, is_compiled: bool = False) -> float:
    each = device.compiled_launch_s if is_compiled else device.operation_s or device.launch_s
    return each + (operation.tensors - 1) * device.tensor_s


def matmul_rate(device: Device, sizes: tuple[int, ...], dtype: str, layout: str = "") -> float | None:
    """Returns FLOP per second of a product, by those of its ``layout`` if any; None for a dtype without any."""
    known = [each for each in device.shapes if each.kind == "matmul" and each.dtype == dtype]
    same = [each for each in known if each.layout == layout] if layout else []
    found = same or known
    if not device.is_cpu or any(each.sizes == sizes for each in found) or not found:
        return _between(found, sizes)
    layouts = {each.layout for each in found}
    others = [each for each in device.shapes if each.kind == "matmul" and each.layout in layouts]
    floor = _FLOOR * min(_flops(each.sizes) / each.flops for each in others)
    above = [replace(each, flops=_flops(each.sizes) / (_flops(each.sizes) / each.flops - floor)) for each in found]
    rate = _between(above, sizes)
    assert rate is not None
    return _flops(sizes) / (floor + _flops(sizes) / rate)


def attention_rate(
    device: Device, sizes: tuple[int, ...], kind: str = "attention", dtype: str = "fp32"
) -> float | None:
    """Returns FLOP per second of causal attention, counted as half of the square; None where it was not measured."""
    known = [each for each in device.shapes if each.kind == kind]
    known = known or [each for each in device.shapes if each.kind == "attention"]
    merged = [replace(each, sizes=(each.sizes[0] * each.sizes[1], *each.sizes[2:])) for each in known]
    rows, length = sizes[0] * sizes[1], sizes[2]
    if known and length > (longest := max(each.sizes[2] for each in known)):
        # Tiles of longer sequences are as full as those of the longest that were timed, and fewer rows are enough.
        most = max(each.sizes[0] * each.sizes[1] for each in known if each.sizes[2] == longest)
        rows, length = max(rows, min(most, rows * length // longest)), longest
    rate = _between(merged, (rows, length, *sizes[3:]))
    if rate is None or not (device.is_cpu and device.emulates(dtype)):  # else slower by as much as products are
        return rate
    return rate * device.ceiling(dtype) / device.ceiling("fp32")


def _flops(sizes: Sequence[int]) -> float:
    return 2.0 * math.prod(sizes)


def _between(known: Sequence[ShapeRate], sizes: Sequence[int]) -> float | None:
    if not known:
        return None
    total = weights = 0.0
    for each in known:
        distance = math.dist([math.log(size) for size in each.sizes], [math.log(max(1, size)) for size in sizes])
        if distance < 1e-9:
            return each.flops
        weight = distance**-4
        total += weight * math.log(each.flops)
        weights += weight
    return math.exp(total / weights)
