"""Which parameters travel together, and how large buckets should be: so that little is left to send after backward.

A collective has a latency alpha and a bandwidth W. A bucket of b bytes is on its way for alpha + b / W seconds. It
leaves when its last gradient is there and the bucket before it has arrived:

    end_k = max(ready_k, end_(k-1)) + alpha + b_k / W          exposed = end_last - end of backward

Few buckets save latency, many let communication begin while backward still runs. Buckets fill in the order in which
gradients arrive; the first one is small, because the sooner the link is busy the better. What is not exposed is hidden
behind backward, and free as far as communication leaves compute alone (``free``: 1 with network cards and cores to
spare, 0 where one core does both). A step loses exposed + (1 - free) hidden.

For P bytes that arrive evenly over t seconds, and a link that is slower than backward (P / W > t), k buckets expose
about k alpha + P / W - t + t / k: the best k is sqrt(t / alpha). On a faster link the last bucket alone counts.

Pure functions over plain values: no torch, nothing to mock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.cluster.costs import Wire
from paceline.plan.layout import Layout
from paceline.units import MIB

_SMALLEST_BYTES = MIB // 16
_LARGEST_BYTES = 256 * MIB
_LIKE = 0.01  # of backward: choices that differ by less are alike, and the one with the fewest collectives is taken
_WORTH = 0.02  # of backward: a change that promises less is not made
_LEAST_LATENCY_S = 1e-5
# Where only the link is known: a bucket is so large that latency is a tenth of its time, and no larger than two of them
# on their way should be.
_LATENCY_SHARE = 0.1
_LINK_BYTES = (MIB, 25 * MIB)
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


Sizes = Sequence[ParameterSize]
Order = Sequence[int]  # of parameters


def bucket_parameters(sizes: Sizes, arrival: Order, policy: BucketPolicy) -> list[tuple[int, ...]]:
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


def _with_short_tail(bucket: tuple[int, ...], sizes: Sizes, policy: BucketPolicy) -> list[tuple[int, ...]]:
    """Cuts a large last bucket in two worth a collective each: the step waits at least for what leaves last."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrivalTimes:
    """When gradients are there, by parameter, in seconds since backward began; and how long that takes."""

    moments_s: tuple[float, ...]
    backward_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketChoice:
    """The buckets that were chosen, and what a step loses with them and with the default, where one was timed."""

    policy: BucketPolicy
    num_buckets: int
    link: Wire
    backward_s: float | None = None
    free: float | None = None
    lost_s: float | None = None
    default_lost_s: float | None = None

    def detail(self) -> dict[str, float]:
        """Returns the choice as it is recorded: sizes in MiB, times in milliseconds."""
        known = {
            "bucket_mb": self.policy.bucket_bytes / MIB,
            "first_bucket_mb": self.policy.first_bucket_bytes / MIB,
            "buckets": self.num_buckets,
            "latency_ms": self.link.alpha_s * 1e3,
            "bandwidth_gb_s": self.link.bandwidth / 1e9,
        }
        times = {"backward_ms": self.backward_s, "lost_ms": self.lost_s, "default_lost_ms": self.default_lost_s}
        known |= {name: seconds * 1e3 for name, seconds in times.items() if seconds is not None}
        if self.free is not None:
            known["free_share"] = self.free
        return {name: float(f"{value:.4g}") for name, value in known.items()}


def choose_buckets(
    sizes: Sizes, arrival: Order, arrivals: ArrivalTimes, link: Wire, *, default: BucketPolicy, free: float = 1.0
) -> BucketChoice:
    """Returns the buckets with which a step loses least, filled as ``arrival`` says; ``default`` if it is alike."""
    total = sum(sizes[index].num_bytes for index in arrival)
    steps = range(int(math.log2(_LARGEST_BYTES // _SMALLEST_BYTES)) + 1)
    limits = [limit for step in steps if (limit := _SMALLEST_BYTES << step) < 2 * total] or [_SMALLEST_BYTES]
    pairs = [(limit, first) for limit in limits for first in limits if first <= limit]
    policies = [BucketPolicy(bucket_bytes=limit, first_bucket_bytes=first) for limit, first in pairs]
    found = {policy: bucket_parameters(sizes, arrival, policy) for policy in [default, *policies]}
    lost = {}
    for policy, buckets in found.items():
        exposed, hidden = exposed_and_hidden(buckets, sizes, arrivals, link)
        lost[policy] = exposed + (1 - free) * hidden
    least = min(lost.values())
    alike = [policy for policy in found if lost[policy] <= least + _LIKE * arrivals.backward_s]
    chosen = min(alike, key=lambda policy: (len(found[policy]), lost[policy]))
    if lost[default] <= lost[chosen] + _WORTH * arrivals.backward_s:
        chosen = default
    return BucketChoice(
        policy=chosen,
        num_buckets=len(found[chosen]),
        link=link,
        backward_s=arrivals.backward_s,
        free=free,
        lost_s=lost[chosen],
        default_lost_s=lost[default],
    )


def exposed_and_hidden(buckets: Sequence[Order], sizes: Sizes, times: ArrivalTimes, link: Wire) -> tuple[float, float]:
    """Returns the seconds of communication after backward and during it, with these buckets in this order."""
    end_s = total_s = 0.0
    for bucket in buckets:
        ready_s = max(times.moments_s[index] for index in bucket)
        took_s = link.seconds(sum(sizes[index].num_bytes for index in bucket))
        end_s, total_s = max(end_s, ready_s) + took_s, total_s + took_s
    exposed_s = max(0.0, end_s - times.backward_s)
    return exposed_s, max(0.0, total_s - exposed_s)


def free_share(buckets: Sequence[Order], sizes: Sizes, arrivals: ArrivalTimes, link: Wire, measured_s: float) -> float:
    """Returns which share of hidden communication was free in a backward pass that took so long with these buckets."""
    exposed_s, hidden_s = exposed_and_hidden(buckets, sizes, arrivals, link)
    slowed_s = measured_s - arrivals.backward_s - exposed_s
    return 1.0 - min(max(slowed_s / hidden_s, 0.0), 1.0) if hidden_s > 0 else 1.0


def choose_for_link(sizes: Sizes, arrival: Order, link: Wire) -> BucketChoice:
    """Returns buckets for a link of which alone something is known: latency is a tenth of a bucket's time."""
    low, high = _LINK_BYTES
    wanted = link.alpha_s * link.bandwidth * (1 - _LATENCY_SHARE) / _LATENCY_SHARE
    bucket_bytes = int(min(max(wanted, low), high))
    policy = BucketPolicy(bucket_bytes=bucket_bytes, first_bucket_bytes=min(Layout().first_bucket_bytes, low))
    return BucketChoice(policy=policy, num_buckets=len(bucket_parameters(sizes, arrival, policy)), link=link)


def fit_link(few: tuple[int, float], many: tuple[int, float], num_bytes: int) -> Wire | None:
    """Solves T = k alpha + P / W from two pairs of k buckets and seconds; None where both have as many buckets."""
    (num_few, few_s), (num_many, many_s) = few, many
    if num_many <= num_few or not num_bytes or not (math.isfinite(few_s) and math.isfinite(many_s)):
        return None
    # Whatever noise says, latency is not nothing, and some of the time was spent on the bytes.
    most_s = 0.9 * few_s / num_few
    alpha_s = min(max((many_s - few_s) / (num_many - num_few), _LEAST_LATENCY_S), most_s)
    return Wire(alpha_s=alpha_s, bandwidth=num_bytes / max(few_s - num_few * alpha_s, 1e-9))


def trial_policies(num_bytes: int, default: BucketPolicy) -> tuple[BucketPolicy, BucketPolicy]:
    """Returns the two policies that a link is measured with: the default's few buckets, and many small ones."""
    small = min(num_bytes // 32, default.bucket_bytes // 8)
    return default, BucketPolicy(bucket_bytes=small, first_bucket_bytes=small)
