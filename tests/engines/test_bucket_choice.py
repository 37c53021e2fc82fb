"""Which size of buckets loses least: the formula, and what is chosen by it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.cluster.costs import Wire
from paceline.engines.buckets.buckets import (
    ArrivalTimes,
    BucketPolicy,
    ParameterSize,
    bucket_parameters,
    choose_buckets,
    choose_for_link,
    exposed_and_hidden,
    fit_link,
    free_share,
    trial_policies,
)
from paceline.plan.layout import Layout
from paceline.units import MIB

DEFAULT = BucketPolicy(bucket_bytes=Layout().bucket_bytes, first_bucket_bytes=Layout().first_bucket_bytes)
ORDER = list(reversed(range(64)))


def evenly(num: int, num_bytes: int, backward_s: float) -> tuple[list[ParameterSize], ArrivalTimes]:
    """Parameters of one size, whose gradients arrive one after another, last defined first."""
    moments = tuple(backward_s * (num - index) / num for index in range(num))
    sizes = [ParameterSize(num_bytes=num_bytes, kind="float32")] * num
    return sizes, ArrivalTimes(moments_s=moments, backward_s=backward_s)


def test_exposed_is_what_comes_after_backward_and_hidden_what_comes_before() -> None:
    sizes = [ParameterSize(num_bytes=100, kind="float32")] * 3
    arrivals = ArrivalTimes(moments_s=(3.0, 2.0, 1.0), backward_s=3.0)
    link = Wire(alpha_s=0.5, bandwidth=100.0)
    # 1 .. 2.5, 2.5 .. 4, 4 .. 5.5: of 4.5 seconds 2.5 come after the third.
    assert exposed_and_hidden([(2,), (1,), (0,)], sizes, arrivals, link) == pytest.approx((2.5, 2.0))
    # All at once: nothing before the end of backward.
    assert exposed_and_hidden([(2, 1, 0)], sizes, arrivals, link) == pytest.approx((3.5, 0.0))
    # A bucket leaves when its last gradient is there: 3 .. 5.5, and the other behind it.
    assert exposed_and_hidden([(2, 0), (1,)], sizes, arrivals, link) == pytest.approx((4.0, 0.0))


def test_a_link_with_latency_gets_few_buckets_and_one_without_gets_many() -> None:
    sizes, arrivals = evenly(64, MIB, backward_s=1.0)
    slow = choose_buckets(sizes, ORDER, arrivals, Wire(alpha_s=0.2, bandwidth=1e10), default=DEFAULT)
    assert slow.num_buckets <= 2
    quick = choose_buckets(sizes, ORDER, arrivals, Wire(alpha_s=1e-5, bandwidth=64 * MIB / 1.0), default=DEFAULT)
    assert quick.num_buckets >= 16
    assert quick.lost_s is not None
    assert quick.default_lost_s is not None
    assert quick.lost_s < 0.5 * quick.default_lost_s


def test_the_best_number_of_buckets_on_a_slow_link_is_the_root_of_backward_over_latency() -> None:
    """The formula at the top of the file, for gradients that arrive evenly and a link slower than backward."""
    sizes, arrivals = evenly(64, MIB, backward_s=1.0)
    link = Wire(alpha_s=1 / 64, bandwidth=64 * MIB / 4.0)

    def lost(num: int) -> float:
        limit = BucketPolicy(bucket_bytes=64 // num * MIB, first_bucket_bytes=64 // num * MIB)
        return exposed_and_hidden(bucket_parameters(sizes, ORDER, limit), sizes, arrivals, link)[0]

    assert min((1, 2, 4, 8, 16, 32, 64), key=lost) == 8
    assert lost(8) == pytest.approx(8 / 64 + 4.0 - 1.0 + 1 / 8, rel=0.01)


def test_what_takes_compute_away_is_not_hidden() -> None:
    """The same times, but nothing is free: then the fewest collectives are best."""
    sizes, arrivals = evenly(64, MIB, backward_s=1.0)
    link, small = Wire(alpha_s=0.01, bandwidth=64 * MIB / 0.9), BucketPolicy(bucket_bytes=MIB, first_bucket_bytes=MIB)
    free = choose_buckets(sizes, ORDER, arrivals, link, default=small, free=1.0)
    busy = choose_buckets(sizes, ORDER, arrivals, link, default=small, free=0.0)
    assert busy.num_buckets == 1 < free.num_buckets
    assert busy.lost_s == pytest.approx(0.91, rel=0.01)


def test_the_free_share_is_what_measuring_shows() -> None:
    sizes, arrivals = evenly(4, MIB, backward_s=1.0)
    link, alone = Wire(alpha_s=0.0, bandwidth=MIB / 0.2), [(3,), (2,), (1,), (0,)]
    exposed, hidden = exposed_and_hidden(alone, sizes, arrivals, link)
    assert (exposed, hidden) == pytest.approx((0.2, 0.6))
    assert free_share(alone, sizes, arrivals, link, 1.2) == pytest.approx(1.0)
    assert free_share(alone, sizes, arrivals, link, 1.5) == pytest.approx(0.5)
    assert free_share(alone, sizes, arrivals, link, 9.0) == 0.0
    assert free_share(alone, sizes, arrivals, link, 0.9) == 1.0
    assert free_share([(3, 2, 1, 0)], sizes, arrivals, link, 9.0) == 1.0  # nothing was hidden, so nothing is known


def test_the_default_stays_unless_another_is_clearly_better() -> None:
    sizes, arrivals = evenly(64, MIB, backward_s=1.0)
    fast = Wire(alpha_s=1e-5, bandwidth=1e11)  # whatever is done, under a thousandth of backward is exposed
    assert choose_buckets(sizes, ORDER, arrivals, fast, default=DEFAULT).policy is DEFAULT


@given(
    num=st.integers(1, 40),
    kib=st.integers(1, 5000),
    backward_s=st.floats(1e-4, 2.0),
    alpha_s=st.floats(1e-6, 0.1),
    bandwidth=st.floats(1e6, 1e12),
    free=st.floats(0.0, 1.0),
)
def test_no_choice_loses_more_than_the_default(
    num: int, kib: int, backward_s: float, alpha_s: float, bandwidth: float, free: float
) -> None:
    sizes, arrivals = evenly(num, kib * 1024, backward_s)
    link, order = Wire(alpha_s=alpha_s, bandwidth=bandwidth), list(reversed(range(num)))
    choice = choose_buckets(sizes, order, arrivals, link, default=DEFAULT, free=free)
    assert choice.lost_s is not None
    assert choice.default_lost_s is not None
    assert choice.lost_s <= choice.default_lost_s
    assert choice.policy.first_bucket_bytes <= choice.policy.bucket_bytes
    assert choice.num_buckets == len(bucket_parameters(sizes, order, choice.policy))
    assert choice == choose_buckets(sizes, order, arrivals, link, default=DEFAULT, free=free)  # on every rank the same


def test_two_numbers_of_buckets_give_latency_and_bandwidth() -> None:
    link = Wire(alpha_s=0.002, bandwidth=5e8)
    few, many = (3, link.seconds(1e8, rounds=3)), (40, link.seconds(1e8, rounds=40))
    found = fit_link(few, many, 10**8)
    assert found is not None
    assert (found.alpha_s, found.bandwidth) == pytest.approx((link.alpha_s, link.bandwidth))


def test_noise_does_not_make_a_link_that_cannot_be() -> None:
    quicker_in_many = fit_link((2, 0.2), (30, 0.1), 10**8)
    assert quicker_in_many is not None
    assert quicker_in_many.alpha_s == pytest.approx(1e-5)
    all_latency = fit_link((4, 0.1), (5, 0.3), 10**8)
    assert all_latency is not None
    assert all_latency.bandwidth == pytest.approx(1e8 / 0.01)
    assert all_latency.seconds(1e8, rounds=4) == pytest.approx(0.1)
    assert fit_link((2, 0.1), (2, 0.2), 10**8) is None
    assert fit_link((2, 0.1), (3, 0.2), 0) is None


def test_trials_have_few_buckets_and_many() -> None:
    sizes, _ = evenly(64, MIB, 1.0)
    few, many = (bucket_parameters(sizes, ORDER, policy) for policy in trial_policies(64 * MIB, DEFAULT))
    assert len(few) == 5
    assert len(many) == 32


@pytest.mark.parametrize(
    ("alpha_s", "bandwidth", "expected"), [(1e-3, 1e9, 9e6), (1e-6, 1e9, MIB), (1e-2, 1e10, 25 * MIB)]
)
def test_for_a_link_alone_latency_is_a_tenth_of_a_bucket(alpha_s: float, bandwidth: float, expected: float) -> None:
    sizes, _ = evenly(64, MIB, 1.0)
    choice = choose_for_link(sizes, ORDER, Wire(alpha_s=alpha_s, bandwidth=bandwidth))
    assert choice.policy.bucket_bytes == pytest.approx(expected, rel=1e-6)
    assert choice.num_buckets == len(bucket_parameters(sizes, ORDER, choice.policy))
    assert set(choice.detail()) == {"bucket_mb", "first_bucket_mb", "buckets", "latency_ms", "bandwidth_gb_s"}
