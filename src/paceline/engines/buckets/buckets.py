"""Which parameters travel together.

A collective has a latency L and a bandwidth W; k buckets of P bytes in all cost k L + P / W. Few buckets save latency,
many let communication begin while backward still runs. Buckets fill in the order in which gradients arrive, so that
each can leave as early as possible; the first one is small, because the sooner the link is busy the better.

Pure functions over plain values: no torch, nothing to mock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.plan.layout import Layout

_LARGE_TAIL = 4  # times the first bucket's limit: below that, a collective's latency costs more than a cut saves


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketPolicy:
    """How large buckets are. Zero bytes put every parameter into a bucket of its own."""

    bucket_bytes: int
    first_bucket_bytes: int

    @classmethod
    def of(cls, layout: Layout) -> BucketPolicy:
        return cls(bucket_bytes=layout.bucket_bytes, first_bucket_bytes=layout.first_bucket_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSize:
    """What a policy needs to know of a parameter. ``kind`` tells apart what cannot share a buffer (dtype, device)."""

    num_bytes: int
    kind: str


def bucket_parameters(
    sizes: Sequence[ParameterSize], arrival: Sequence[int], policy: BucketPolicy
) -> list[tuple[int, ...]]:
    """Groups parameters (by index) into buckets, in the order in which the buckets will be complete.

    A bucket is closed when it has reached its limit; a parameter that alone reaches the limit of a full bucket travels
    alone. Each index of ``arrival`` is in exactly one bucket.
    """
    closed: list[tuple[int, ...]] = []
    open_buckets: dict[str, list[int]] = {}
    filled: dict[str, int] = {}
    for index in arrival:
        kind, num_bytes = sizes[index].kind, sizes[index].num_bytes
        if num_bytes >= policy.bucket_bytes:
            closed.append((index,))
            continue
        bucket = open_buckets.setdefault(kind, [])
        bucket.append(index)
        filled[kind] = filled.get(kind, 0) + num_bytes
        limit = policy.bucket_bytes if closed else min(policy.first_bucket_bytes, policy.bucket_bytes)
        if filled[kind] >= limit:
            closed.append(tuple(bucket))
            bucket.clear()
            filled[kind] = 0
    # What is still open ends with the backward pass, or stays as it is; whichever is complete first goes first.
    place = {index: order for order, index in enumerate(arrival)}
    closed += [tuple(bucket) for bucket in open_buckets.values() if bucket]

    def completed(bucket: tuple[int, ...]) -> int:
        return place[bucket[-1]]

    ordered = sorted(closed, key=completed)
    return sorted(ordered[:-1] + _with_short_tail(ordered[-1], sizes, policy), key=completed) if ordered else []


def _with_short_tail(
    bucket: tuple[int, ...], sizes: Sequence[ParameterSize], policy: BucketPolicy
) -> list[tuple[int, ...]]:
    """Cuts a large last bucket in two: the step waits at least for what leaves last, so that should be little.

    What is cut off its front must be worth a collective of its own.
    """
    limit = min(policy.first_bucket_bytes, policy.bucket_bytes)
    total = sum(sizes[index].num_bytes for index in bucket)
    if total <= _LARGE_TAIL * limit:
        return [bucket]
    cut, filled = len(bucket) - 1, sizes[bucket[-1]].num_bytes
    while cut > 1 and filled + sizes[bucket[cut - 1]].num_bytes <= limit:
        cut -= 1
        filled += sizes[bucket[cut]].num_bytes
    return [bucket[:cut], bucket[cut:]] if cut and total - filled >= limit else [bucket]


def arrival_order(observed: Sequence[int], num_parameters: int) -> list[int]:
    """Completes an observed arrival order: parameters that were not seen come last, latest defined first."""
    first_seen = list(dict.fromkeys(observed))
    unseen = sorted(set(range(num_parameters)) - set(first_seen), reverse=True)
    return first_seen + unseen
