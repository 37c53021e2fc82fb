"""Buckets: every parameter in exactly one, in the order of arrival, within the limits, of one kind."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.comm.dry.communicator import DryWorld
from paceline.engines.buckets.buckets import BucketPolicy, ParameterSize, arrival_order, bucket_parameters
from paceline.plan.layout import Layout
from paceline.units import MIB

KINDS = ("float32", "bfloat16", "int8")
SIZES = st.builds(ParameterSize, num_bytes=st.integers(0, 40), kind=st.sampled_from(KINDS))
POLICIES = st.builds(BucketPolicy, bucket_bytes=st.integers(0, 60), first_bucket_bytes=st.integers(0, 60))

Case = tuple[list[ParameterSize], list[int]]


@st.composite
def arrivals(draw: st.DrawFn) -> Case:
    sizes = draw(st.lists(SIZES, max_size=25))
    order = draw(st.permutations(range(len(sizes))))
    return sizes, order[: draw(st.integers(0, len(order)))]


def sizes_of(*num_bytes: int, kind: str = "float32") -> list[ParameterSize]:
    return [ParameterSize(num_bytes=size, kind=kind) for size in num_bytes]


def fits(size: ParameterSize, policy: BucketPolicy) -> bool:
    return size.num_bytes < policy.bucket_bytes


def first_limit(policy: BucketPolicy) -> int:
    return min(policy.first_bucket_bytes, policy.bucket_bytes)


@given(case=arrivals(), policy=POLICIES)
def test_every_index_is_in_exactly_one_bucket(case: Case, policy: BucketPolicy) -> None:
    sizes, arrival = case
    buckets = bucket_parameters(sizes, arrival, policy)
    assert sorted(index for bucket in buckets for index in bucket) == sorted(arrival)
    assert all(buckets)


@given(case=arrivals(), policy=POLICIES)
def test_the_order_of_arrival_is_kept_and_kinds_never_mix(case: Case, policy: BucketPolicy) -> None:
    """Those that travel alone leave the others' row; in it, buckets of a kind follow one another as they arrive."""
    sizes, arrival = case
    buckets = bucket_parameters(sizes, arrival, policy)
    assert all(len({sizes[index].kind for index in bucket}) == 1 for bucket in buckets)
    for kind in KINDS:
        together = [i for bucket in buckets for i in bucket if sizes[i].kind == kind and fits(sizes[i], policy)]
        assert together == [i for i in arrival if sizes[i].kind == kind and fits(sizes[i], policy)]


@given(case=arrivals(), policy=POLICIES)
def test_a_bucket_exceeds_its_limit_by_its_last_parameter_at_most(case: Case, policy: BucketPolicy) -> None:
    sizes, arrival = case
    buckets = bucket_parameters(sizes, arrival, policy)
    for number, bucket in enumerate(buckets):
        limit = policy.bucket_bytes if number else first_limit(policy)
        assert len(bucket) == 1 or sum(sizes[index].num_bytes for index in bucket[:-1]) < limit


@given(case=arrivals(), policy=POLICIES)
def test_a_parameter_as_large_as_a_bucket_travels_alone(case: Case, policy: BucketPolicy) -> None:
    sizes, arrival = case
    buckets = bucket_parameters(sizes, arrival, policy)
    assert all((index,) in buckets for index in arrival if not fits(sizes[index], policy))


@given(case=arrivals(), policy=POLICIES)
def test_a_bucket_is_closed_only_when_it_has_reached_a_limit(case: Case, policy: BucketPolicy) -> None:
    """No more buckets than the limits ask for: of each kind, only the last one may be smaller."""
    sizes, arrival = case
    buckets = bucket_parameters(sizes, arrival, policy)
    for kind in KINDS:
        shared = [b for b in buckets if sizes[b[0]].kind == kind and fits(sizes[b[0]], policy)]
        for bucket in shared[:-1]:
            assert sum(sizes[index].num_bytes for index in bucket) >= first_limit(policy)


@given(case=arrivals(), policy=POLICIES)
def test_buckets_come_in_the_order_in_which_they_will_be_complete(case: Case, policy: BucketPolicy) -> None:
    sizes, arrival = case
    place = {index: order for order, index in enumerate(arrival)}
    completed = [place[bucket[-1]] for bucket in bucket_parameters(sizes, arrival, policy)]
    assert completed == sorted(completed)


def test_the_first_bucket_is_small_and_the_others_fill_up() -> None:
    sizes, policy = sizes_of(1, 1, 1, 1, 1, 1, 1, 1), BucketPolicy(bucket_bytes=3, first_bucket_bytes=1)
    assert bucket_parameters(sizes, [7, 6, 5, 4, 3, 2, 1, 0], policy) == [(7,), (6, 5, 4), (3, 2, 1), (0,)]


def test_an_oversize_parameter_goes_past_a_bucket_that_is_still_filling() -> None:
    policy = BucketPolicy(bucket_bytes=4, first_bucket_bytes=4)
    assert bucket_parameters(sizes_of(2, 9, 1, 2, 0), range(5), policy) == [(1,), (0, 2, 3), (4,)]


def test_what_is_cut_off_the_front_of_the_last_bucket_is_worth_a_collective() -> None:
    policy = BucketPolicy(bucket_bytes=6, first_bucket_bytes=1)
    assert bucket_parameters(sizes_of(0, 5), [0, 1], policy) == [(0, 1)]
    assert bucket_parameters(sizes_of(1, 3, 4), [0, 1, 2], policy) == [(0,), (1,), (2,)]


def test_zero_bytes_put_every_parameter_into_a_bucket_of_its_own() -> None:
    policy = BucketPolicy(bucket_bytes=0, first_bucket_bytes=0)
    assert bucket_parameters(sizes_of(4, 0, 4), [2, 0, 1], policy) == [(2,), (0,), (1,)]


def test_no_parameters_make_no_buckets() -> None:
    assert bucket_parameters([], [], BucketPolicy.of(Layout(), DryWorld(2).rank(0))) == []


@given(num_parameters=st.integers(0, 12), data=st.data())
def test_an_observed_order_is_completed(num_parameters: int, data: st.DataObject) -> None:
    """First sights first, in their order; then what was not seen, latest defined first."""
    observed = data.draw(st.lists(st.integers(0, num_parameters - 1), max_size=20)) if num_parameters else []
    order = arrival_order(observed, num_parameters)
    assert sorted(order) == list(range(num_parameters))
    seen = len(set(observed))
    assert order[:seen] == [index for i, index in enumerate(observed) if index not in observed[:i]]
    assert order[seen:] == sorted(order[seen:], reverse=True)


def test_a_large_last_bucket_leaves_a_short_tail() -> None:
    """The step waits at least for the last bucket: what arrives last travels in a small one."""
    sizes = [ParameterSize(num_bytes=10, kind="float32") for _ in range(20)]
    policy = BucketPolicy(bucket_bytes=1000, first_bucket_bytes=30)
    assert [len(bucket) for bucket in bucket_parameters(sizes, range(20), policy)] == [3, 14, 3]
    small = BucketPolicy(bucket_bytes=1000, first_bucket_bytes=60)
    assert [len(bucket) for bucket in bucket_parameters(sizes, range(20), small)] == [6, 14]


def test_on_a_gpu_the_last_bucket_stays_whole() -> None:
    """A collective more would cost as much there as the gradients that leave sooner can save."""
    sizes = [ParameterSize(num_bytes=MIB, kind="float32") for _ in range(12)]
    cut, whole = (BucketPolicy.of(Layout(), DryWorld(2, kind).rank(0)) for kind in ("cpu", "cuda"))
    assert [len(bucket) for bucket in bucket_parameters(sizes, range(12), cut)] == [1, 10, 1]
    assert [len(bucket) for bucket in bucket_parameters(sizes, range(12), whole)] == [1, 11]
