"""What a kernel takes on a device: matrix products, attention, memory-bound work, and the host that launches them.

    product      2 m n k FLOPs at  ceiling x rate x k / (k + k_half) x filled;  at least its bytes over the bandwidth
    k_half       of A100 in bf16; elsewhere in proportion to FLOPs a byte: tiles come from memory and go back to it
    filled       tiles / (waves x multiprocessors), tiles of 128 x 128 outputs: the last wave stands partly empty
    attention    fused: 4 b s s' h FLOPs at ceiling x attention rate; unfused: two batched products, and the scores
                 are read and written as memory-bound work
    memory       bytes / (bandwidth x the share of it that streaming kernels reach)
    launches     kernels x the host's time for each: a device with less work than that waits

``rate`` stands for what a whole training step reaches of a ceiling that was measured on one product at a time: clocks
fall under load. Rates are fitted (predict/formulas/constants.py), ceilings and bandwidths are the catalog's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline.cluster.devices import Device

_TILE = 128
_BALANCE = 271.2e12 / 2.039e12  # FLOPs a byte of A100 SXM 80 GB in bf16


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRates:
    """What kernels reach of a device: see the top of this file."""

    matmul: float = 0.85
    k_half: float = 128.0
    attention: float = 0.45
    attention_half: float = 512.0
    memory: float = 0.85


def matmul_seconds(
    device: Device, rates: KernelRates, m: float, n: float, k: float, dtype: str, batch: int = 1
) -> float:
    """Returns how long ``batch`` products of (m, k) by (k, n) take."""
    if m <= 0 or n <= 0 or k <= 0:
        return 0.0
    tiles = batch * math.ceil(m / _TILE) * math.ceil(n / _TILE)
    waves = tiles / device.sm_count if device.sm_count else 1.0
    filled = waves / math.ceil(waves) if waves < 16 else 1.0
    k_half = rates.k_half * (1.0 if device.is_cpu else ceiling(device, dtype) / device.memory_bandwidth / _BALANCE)
    reached = ceiling(device, dtype) * rates.matmul * k / (k + k_half) * filled
    if device.is_cpu and device.emulates(dtype):  # by arithmetic alone, which no shape makes slower
        reached = ceiling(device, dtype)
    width = _BYTES[dtype]
    moved = batch * width * (m * k + k * n + m * n)
    return max(batch * 2.0 * m * n * k / reached, memory_seconds(device, rates, moved))


def attention_seconds(device: Device, rates: KernelRates, flops: float, seq_len: float, dtype: str) -> float:
    """Returns how long fused attention takes for so many FLOPs; short sequences fill its tiles less."""
    if device.is_cpu and device.emulates(dtype):  # which has no tiles, and computes what is masked as well
        return 2 * flops / (ceiling(device, dtype) * rates.attention)
    return flops / (ceiling(device, dtype) * rates.attention * seq_len / (seq_len + rates.attention_half))


def memory_seconds(device: Device, rates: KernelRates, num_bytes: float) -> float:
    """Returns how long kernels take that only move so many bytes."""
    return num_bytes / (device.memory_bandwidth * rates.memory)


def ceiling(device: Device, dtype: str) -> float:
    """Returns the most that products reach; four-bit ones twice what eight-bit ones do."""
    return 2.0 * device.ceiling("fp8") if dtype == "fp4" else device.ceiling(dtype)


_BYTES = {"fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2, "fp8": 1.5, "fp4": 1.25}
