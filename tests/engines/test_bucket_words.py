"""Buckets as they are recorded, the sizes that are tried, and slices that an optimizer updates on the host."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from paceline.cluster.costs import Wire
from paceline.engines.buckets.buckets import ArrivalTimes, BucketChoice, BucketPolicy, ParameterSize, choose_buckets
from paceline.engines.flat.shard import HostShard, SideStream, dense_stride, host_empty
from paceline.units import MIB

CHOICE = BucketChoice(
    policy=BucketPolicy(bucket_bytes=25 * MIB, first_bucket_bytes=MIB // 2),
    num_buckets=3,
    link=Wire(alpha_s=0.00012345678, bandwidth=12.5e9),
)


def test_a_choice_is_recorded_in_mib_milliseconds_and_gb_a_second() -> None:
    known = {"bucket_mb": 25.0, "first_bucket_mb": 0.5, "buckets": 3.0, "latency_ms": 0.1235, "bandwidth_gb_s": 12.5}
    assert CHOICE.detail() == known
    timed = replace(CHOICE, backward_s=0.25, lost_s=0.0, default_lost_s=0.0123456)
    assert timed.detail() == known | {"backward_ms": 250.0, "lost_ms": 0.0, "default_lost_ms": 12.35}
    assert replace(CHOICE, free=0.5).detail() == known | {"free_share": 0.5}


@pytest.mark.parametrize(
    ("count", "size", "expected"), [(16, 64 * MIB, 256 * MIB), (4, MIB, 4 * MIB), (2, MIB // 64, MIB // 16)]
)
def test_buckets_are_never_larger_than_the_largest_nor_smaller_than_the_smallest(
    count: int, size: int, expected: int
) -> None:
    """With so long a latency, as few buckets as may be lose least."""
    sizes = [ParameterSize(num_bytes=size, kind="float32")] * count
    arrivals = ArrivalTimes(moments_s=(0.0,) * count, backward_s=1.0)
    default = BucketPolicy(bucket_bytes=1, first_bucket_bytes=1)
    found = choose_buckets(sizes, range(count), arrivals, Wire(alpha_s=9.0, bandwidth=1e10), default=default)
    assert found.policy.bucket_bytes == expected
    assert found.policy.first_bucket_bytes <= found.policy.bucket_bytes
    assert found.num_buckets == -(-count * size // expected)
    assert found.lost_s is not None
    assert found.default_lost_s is not None
    assert found.lost_s < found.default_lost_s


def test_a_slice_goes_to_the_device_when_it_has_changed() -> None:
    mine, target = torch.arange(4.0), torch.zeros(4)
    shard = HostShard(mine, torch.float32, stays_on_device=False)
    mine.zero_()  # the slice is a copy
    shard.copy_to(target, may_have_changed=False).wait()
    assert (target.tolist(), shard.resident) == ([0.0, 1.0, 2.0, 3.0], None)
    shard.master.add_(1.0)
    shard.copy_to(target, may_have_changed=False)
    assert target.tolist() == [1.0, 2.0, 3.0, 4.0]


def test_a_slice_of_another_dtype_is_cast_once_for_each_change() -> None:
    target = torch.zeros(2, dtype=torch.bfloat16)
    shard = HostShard(torch.tensor([1.0, 2.0]), torch.bfloat16, stays_on_device=True)
    shard.copy_to(target, may_have_changed=False)
    first = shard.resident
    assert first is not None
    assert (first.dtype, target.tolist()) == (torch.bfloat16, [1.0, 2.0])
    shard.copy_to(target, may_have_changed=False)
    assert shard.resident is first
    shard.master.data.mul_(3.0)  # as a fused optimizer does: the version stays
    target.zero_()
    shard.copy_to(target, may_have_changed=False)
    assert target.tolist() == [1.0, 2.0]
    shard.copy_to(target, may_have_changed=True)
    assert target.tolist() == [3.0, 6.0]
    assert shard.resident is not first


def test_on_a_cpu_everything_runs_in_order() -> None:
    stream, done = SideStream(torch.device("cpu")), []
    target = torch.zeros(2)
    stream.copy(target, torch.ones(2))
    assert target.tolist() == [1.0, 1.0]
    assert stream.issue(lambda: done.append(1) or stream) is stream  # type: ignore[func-returns-value]
    assert done == [1]
    stream.wait()
    stream.finish()


def test_memory_of_the_host_is_pinned_only_for_a_device() -> None:
    plain = host_empty(3, torch.float16, torch.device("cpu"))
    assert (plain.shape, plain.dtype, plain.is_pinned()) == ((3,), torch.float16, False)
    assert host_empty(3, torch.float16, torch.device("meta")).is_meta


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.zeros(2, 3), (3, 1)),
        (torch.zeros(3, 2).t(), (1, 2)),
        (torch.zeros(2, 6)[:, ::2], (3, 1)),
        (torch.zeros(1, 3).expand(2, 3), (3, 1)),
        (torch.zeros(4, 3)[::2], (3, 1)),
        (torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last), (60, 1, 15, 3)),
        (torch.zeros(()), ()),
    ],
)
def test_strides_without_holes_and_overlap_are_kept(tensor: torch.Tensor, expected: tuple[int, ...]) -> None:
    assert dense_stride(tensor) == expected
