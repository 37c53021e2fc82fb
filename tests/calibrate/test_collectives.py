"""A ring is found again in its own times."""

from __future__ import annotations

import pytest

from paceline.calibrate.machine import SIZES, fit_ring, ring_seconds


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize(("latency", "bandwidth"), [(1e-5, 2e9), (3.4e-6, 230e9), (1e-3, 1e8)])
def test_a_fit_finds_the_ring_that_took_these_times(ranks: int, latency: float, bandwidth: float) -> None:
    points = [(size, ring_seconds(size, ranks, latency, bandwidth)) for size in SIZES]
    assert fit_ring(points, ranks) == pytest.approx((latency, bandwidth))


def test_small_messages_count_as_much_as_large_ones() -> None:
    points = [(size, 1.1 * ring_seconds(size, 4, 1e-4, 1e9)) for size in SIZES[:3]]
    points += [(size, 0.9 * ring_seconds(size, 4, 1e-4, 1e9)) for size in SIZES[3:]]
    latency, bandwidth = fit_ring(points, 4)
    off = [abs(ring_seconds(size, 4, latency, bandwidth) / took - 1) for size, took in points]
    assert max(off) < 0.12


def test_times_that_are_no_line_still_give_a_link() -> None:
    falling = [(4096, 1.0), (2**20, 0.5), (2**24, 0.1)]
    latency, bandwidth = fit_ring(falling, 2)
    assert latency > 0
    assert bandwidth > 0
