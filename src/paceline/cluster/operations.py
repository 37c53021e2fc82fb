"""What one operation of torch takes on a device that was measured.

    product, attention       FLOPs / the rate of this shape, between those that were measured (cluster/rates.py)
    all others               bytes read and written / the rate of this family of kernels at this size
    the host                 its time for each operation; a CPU computes itself, beside a GPU it runs ahead

What was not measured falls back: another family to ``pointwise``, that to the memory's bandwidth, a product to the
device's ceiling. Families are kernels that are alike in how they go through memory; a CPU's differ by a factor of ten.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from paceline.cluster.devices import Device
from paceline.cluster.rates import attention_rate, matmul_rate

MemoryFamily: TypeAlias = Literal[
    "pointwise",
    "curve",
    "curve_backward",
    "norm",
    "norm_backward",
    "softmax",
    "reduction",
    "strided",
    "convert",
    "embedding",
    "embedding_backward",
    "optimizer",
    "random",
]
Family: TypeAlias = Literal["matmul", "attention", "attention_backward"] | MemoryFamily
MEMORY_FAMILIES: tuple[MemoryFamily, ...] = get_args(MemoryFamily)
# Kernels that a compiler puts into one, and goes through memory once for all of them.
FUSED: frozenset[str] = frozenset({"pointwise", "curve", "curve_backward", "norm", "norm_backward", "convert"}) | {
    "strided",
    "reduction",
    "random",
}
_BACKWARD_FLOPS = 2.5  # of attention, over its forward


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One call of a kernel. ``sizes``: (rows, inner, columns) of a product, (batch, heads, queries, head size) of
    attention; ``batch`` counts equal products. ``layout`` says which operands are transposed: nn, nt, tn.

    ``reads`` and ``writes`` are what it goes through: (number of the tensor, bytes). ``tensors`` is how many a kernel
    over lists has, which the host goes through one by one.
    """

    name: str
    family: Family
    dtype: str = "fp32"
    sizes: tuple[int, ...] = ()
    batch: int = 1
    layout: str = ""
    is_causal: bool = True
    tensors: int = 1
    reads: tuple[tuple[int, int], ...] = ()
    writes: tuple[tuple[int, int], ...] = ()
    phase: str = "forward"

    @property
    def num_bytes(self) -> int:
        """Bytes read and written."""
        return sum(size for _, size in self.reads) + sum(size for _, size in self.writes)

    @property
    def flops(self) -> float:
        """Floating point operations of a product or of attention; 0 for what memory binds."""
        if self.family == "matmul":
            return 2.0 * self.batch * math.prod(self.sizes)
        if self.family.startswith("attention"):
            batch, heads, length, size = self.sizes
            forward = 4.0 * batch * heads * length**2 * size / (2 if self.is_causal else 1)
            return forward * (_BACKWARD_FLOPS if self.family == "attention_backward" else 1.0)
        return 0.0


def work_seconds(device: Device, operation: Operation) -> float:
    """Returns what a kernel takes once it runs."""
    if operation.family == "matmul":
        sizes = (operation.sizes[0], operation.sizes[1], operation.sizes[2])
        rate = matmul_rate(device, sizes, operation.dtype, operation.layout) or device.ceiling(operation.dtype)
        least = operation.num_bytes / (device.memory_bandwidth * device.memory_share) if not device.is_cpu else 0.0
        return max(operation.flops / rate, least)
    if operation.family in ("attention", "attention_backward"):
        batch, heads, length, size = operation.sizes
        found = attention_rate(device, (batch, heads, length, size), operation.family)
        return operation.flops / (found or 0.4 * device.ceiling(operation.dtype))
    return operation.num_bytes / memory_rate(device, operation.family, operation.num_bytes)


def memory_rate(device: Device, family: str, num_bytes: float) -> float:
    """Returns bytes per second of a family of kernels: between measured sizes along a line of logarithms."""
    points = device.memory_rates.get(family) or device.memory_rates.get("pointwise")
    if not points:
        return device.memory_bandwidth * device.memory_share
    place = bisect_left([size for size, _ in points], num_bytes)
    if place == 0:
        return points[0][1]
    if place == len(points):
        return points[-1][1]
    (low, first), (high, second) = points[place - 1], points[place]
    share = math.log(num_bytes / low) / math.log(high / low)
    return first * math.pow(second / first, share)


def host_seconds(device: Device, operation: Operation, *, is_compiled: bool = False) -> float:
    """Returns what it takes the host to get an operation going."""
    each = device.compiled_launch_s if is_compiled else device.operation_s or device.launch_s
    return each + (operation.tensors - 1) * device.tensor_s
