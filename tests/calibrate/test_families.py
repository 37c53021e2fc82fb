"""Families of kernels, measured for a moment: every family has a rate at every size, and the host a price."""

from __future__ import annotations

import torch

from paceline.calibrate.kernels import measure_families
from paceline.calibrate.timing import Stopwatch
from paceline.cluster.kernels import MEMORY_FAMILIES


def test_all_families_are_measured_at_all_sizes() -> None:
    watch = Stopwatch(samples=2, most_s=0.01, shortest_s=1e-5)
    found = measure_families(torch.device("cpu"), (4096, 16384), watch)
    assert set(found.rates) == set(MEMORY_FAMILIES)
    for points in found.rates.values():
        sizes = [size for size, _ in points]
        assert len(points) == 2
        assert sizes == sorted(sizes)
        assert min(rate for _, rate in points) > 0
    assert min(found.operation_s, found.tensor_s) > 0
    assert found.step_s >= 0
    assert found.loop_s is not None
    assert {"pointwise 4 KiB", "optimizer 16 KiB", "operations"} <= set(found.spreads)
