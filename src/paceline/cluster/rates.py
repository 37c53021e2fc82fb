"""What rate a shape runs at on a device that was measured: between the shapes that ``paceline calibrate`` timed.

The rate is the mean of the measured rates' logarithms, weighted by 1 / d^4, where d is the distance of the sizes'
logarithms: at a measured shape it is what was measured, and far from all of them about the mean of the nearest.

A processor's small products take a time that hardly depends on their sizes: the library makes a plan for each call, and
that more for some layouts than for others. So on a CPU

    seconds = floor + FLOPs / rate        floor: most of what the shortest measured product of the layout took

and it is this rate that lies between those of the measured shapes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from paceline.cluster.devices import Device, ShapeRate

_FLOOR = 0.9


def matmul_rate(device: Device, sizes: tuple[int, int, int], dtype: str, layout: str = "") -> float | None:
    """Returns FLOP per second of a product of (rows, inner, columns); None where none of this dtype was measured.

    ``layout`` says which operand is transposed: nn, nt, tn. Products measured in it count alone, where there are any.
    """
    known = [each for each in device.shapes if each.kind == "matmul" and each.dtype == dtype]
    same = [each for each in known if each.layout == layout] if layout else []
    found = same or known
    if not device.is_cpu or any(each.sizes == sizes for each in found) or not found:
        return _between(found, sizes)
    floor = _FLOOR * min(_flops(each.sizes) / each.flops for each in found)
    above = [replace(each, flops=_flops(each.sizes) / (_flops(each.sizes) / each.flops - floor)) for each in found]
    rate = _between(above, sizes)
    assert rate is not None
    return _flops(sizes) / (floor + _flops(sizes) / rate)


def attention_rate(device: Device, sizes: tuple[int, int, int, int], kind: str = "attention") -> float | None:
    """Returns FLOP per second of causal attention (batch, heads, sequence, head size), counted as half of the square.

    Batch and heads are one size here: both are so many of the same. ``attention_backward`` is counted as 2.5 times the
    forward. None where neither was measured.
    """
    known = [each for each in device.shapes if each.kind == kind]
    known = known or [each for each in device.shapes if each.kind == "attention"]
    return _between([_merged(each) for each in known], (sizes[0] * sizes[1], *sizes[2:]))


def _flops(sizes: Sequence[int]) -> float:
    return 2.0 * math.prod(sizes)


def _merged(shape: ShapeRate) -> ShapeRate:
    batch, heads, *rest = shape.sizes
    return ShapeRate(kind=shape.kind, dtype=shape.dtype, sizes=(batch * heads, *rest), flops=shape.flops)


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
