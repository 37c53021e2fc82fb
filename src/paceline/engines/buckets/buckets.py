"""Which parameters travel together, and how large buckets should be: so that little is left to send after backward.

A collective has a latency alpha and a bandwidth W. A bucket of b bytes is on its way for alpha + b / W seconds. It
leaves when its last gradient is there and the bucket before it has arrived:

    end_k = max(ready_k, end_(k-1)) + alpha + b_k / W          exposed = end_last - end of backward

Few buckets save latency, many let communication begin while backward still runs. Buckets fill in the order in which
gradients arrive; the first one is small, because the sooner the link is busy the better. What is not exposed is hidden
behind backward, and free as far as communication leaves compute alone (``free``: 1 with network cards and cores to
spare, 0 where one core does both). A step loses exposed + (1 - free) hidden.

A large last bucket may be cut in two. The part that leaves before has its gradients sooner by what backward takes for
the s bytes of the other, so that a cut saves t s / P - alpha at most. On a CPU backward takes a hundred times as long
as on a GPU, and a collective ten times; there a cut is the default. On a GPU both are some 0.1 ms for the megabyte that
is cut off, so that a collective more saves nothing, and costs where ranks take turns.

For P bytes that arrive evenly over t seconds, and a link that is slower than backward (P / W > t), k buckets expose
about k alpha + P / W - t + t / k: the best k is sqrt(t / alpha). On a faster link the last bucket alone counts.

The policies are pure functions over plain values. ``BucketTuner`` measures what they need. First some passes of data
parallelism only watch: buckets are sent one by one when backward has ended. Passes take turns with few large buckets
and many small ones: the seconds of k buckets, k alpha + P / W, give latency and bandwidth. Then some passes overlap,
with the many small buckets: what they take longer than the formula says is what communication takes from compute. No
pass has a collective more. At the end ranks exchange what they saw, once, and each takes the same decision. The time of
a reduction is that of the rank that waited least. Where buckets cannot change any more when training begins (ZeRO), the
link is tried before, with messages of two sizes.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from paceline.clock import DeviceClock, Mark, seconds_between
from paceline.cluster.costs import Wire
from paceline.comm.base import Communicator
from paceline.plan.layout import Layout
from paceline.units import KIB, MIB

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
    """How large buckets are, and whether a large last one is cut. Zero bytes put every parameter into its own."""

    bucket_bytes: int
    first_bucket_bytes: int
    cuts_tail: bool = True

    @classmethod
    def of(cls, layout: Layout, comm: Communicator) -> BucketPolicy:
        cuts_tail = comm.device_kind == "cpu"  # not by times, which differ: the same on all ranks, in every run
        sizes = {"bucket_bytes": layout.bucket_bytes, "first_bucket_bytes": layout.first_bucket_bytes}
        return cls(**sizes, cuts_tail=cuts_tail)


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
    if not policy.cuts_tail:
        return ordered
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
    return first_seen + sorted(set(range(num_parameters)) - set(first_seen), reverse=True)


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
    policies = [
        BucketPolicy(bucket_bytes=limit, first_bucket_bytes=first, cuts_tail=cuts_tail)
        for limit, first in pairs
        for cuts_tail in (True, False)
    ]
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
    choice = BucketChoice(policy=chosen, num_buckets=len(found[chosen]), link=link, backward_s=arrivals.backward_s)
    return replace(choice, free=free, lost_s=lost[chosen], default_lost_s=lost[default])


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


_NUM_WATCHED = 5  # the first warms up; then many buckets and few, twice
_NUM_OVERLAPPED = 4  # the first warms up
_PROBE_BYTES = (16 * KIB, 8 * MIB)
_NUM_PROBES = 4  # of each size; the first warms up

_Time = Mark | float


@dataclass(slots=True)
class _TimedPass:
    """The marks of one backward pass: its begin, gradients as they arrived, its end, and when all was reduced."""

    policy: BucketPolicy
    num_buckets: int = 0
    begin: _Time | None = None  # a rank that joins a pass without samples has none
    arrived: dict[int, _Time] = field(default_factory=dict)
    end: _Time | None = None
    reduced: _Time | None = None


class BucketTuner:
    """Watches the first passes of an engine; then says how large its buckets should be."""

    def __init__(self, comm: Communicator, default: BucketPolicy, *, overlap: bool) -> None:
        self._comm = comm
        self._default = default
        self._overlap = overlap
        self._take = DeviceClock(comm.device).take
        self.start(())

    def start(self, sizes: Sequence[ParameterSize]) -> None:
        """Begins anew, for parameters of these sizes."""
        self._trials = trial_policies(sum(size.num_bytes for size in sizes), self._default)
        self._passes = [_TimedPass(self._default)]

    @property
    def is_watching(self) -> bool:
        """Whether the pass under way, or to come, only watches."""
        return len(self._passes) <= _NUM_WATCHED

    @property
    def policy(self) -> BucketPolicy:
        """The buckets of that pass."""
        return self._passes[-1].policy

    def begin(self) -> None:
        self._passes[-1].begin = self._take()
        self._passes[-1].arrived = {}

    def arrive(self, index: int) -> None:
        """Notes that a gradient is there; of one that comes several times the last counts."""
        self._passes[-1].arrived[index] = self._take()

    def end_backward(self) -> None:
        self._passes[-1].end = self._take()

    def end_watched(self, num_buckets: int) -> None:
        """Notes that all buckets of a watching pass are reduced; the next pass begins."""
        self._passes[-1].num_buckets, self._passes[-1].reduced = num_buckets, self._take()
        number = len(self._passes)
        self._passes.append(_TimedPass(self._trials[number % 2 if number < _NUM_WATCHED else 1]))

    def end_overlapped(self) -> bool:
        """Ends a pass with overlap; returns whether it was the last that is needed."""
        self._passes[-1].reduced = self._take()
        if len(self._passes) == _NUM_WATCHED + _NUM_OVERLAPPED:
            return True
        self._passes.append(_TimedPass(self._trials[1]))
        return False

    def choose(self, sizes: Sequence[ParameterSize], arrival: Sequence[int]) -> BucketChoice | None:
        """Agrees with the other ranks on the buckets; None: there is nothing to choose. A sync point, once a run."""
        mine = torch.tensor(self._row(arrival), dtype=torch.float64, device=self._comm.device)
        everyone = torch.empty(self._comm.size * mine.numel(), dtype=torch.float64, device=self._comm.device)
        self._comm.all_gather(everyone, mine).wait()
        columns = list(zip(*everyone.view(self._comm.size, -1).tolist(), strict=True))
        reduced_s = [min(column) for column in columns[: _NUM_WATCHED - 1]]
        backward_s, whole_s, *moments_s = (_known(statistics.fmean, each) for each in columns[_NUM_WATCHED - 1 :])
        link = self._fit(reduced_s, sum(sizes[index].num_bytes for index in arrival))
        if link is None or math.isnan(backward_s) or math.isnan(whole_s):
            return None
        moments = [backward_s] * len(sizes)
        for index, moment_s in zip(arrival, moments_s, strict=True):
            if not math.isnan(moment_s) and self._overlap:
                moments[index] = min(moment_s, backward_s)
        arrivals = ArrivalTimes(moments_s=tuple(moments), backward_s=backward_s)
        free = free_share(bucket_parameters(sizes, arrival, self._trials[1]), sizes, arrivals, link, whole_s)
        return choose_buckets(sizes, arrival, arrivals, link, default=self._default, free=free)

    def _row(self, arrival: Sequence[int]) -> list[float]:
        """Returns seconds, nan if not seen: of each reduction, backward, both overlapped, until each gradient."""
        watched, overlapped = self._passes[1:_NUM_WATCHED], self._passes[_NUM_WATCHED + 1 :]
        median = partial(_known, statistics.median)
        row = [_seconds(each.end, each.reduced) for each in watched]
        row.append(median(_seconds(each.begin, each.end) for each in watched))
        row.append(median(_seconds(each.begin, each.reduced) for each in overlapped))
        return row + [median(_seconds(each.begin, each.arrived.get(i)) for each in watched) for i in arrival]

    def _fit(self, reduced_s: Sequence[float], num_bytes: int) -> Wire | None:
        watched = list(zip(self._passes[1:_NUM_WATCHED], reduced_s, strict=True))
        (few, few_s), (many, many_s) = (
            min(((each, seconds) for each, seconds in watched if each.policy is trial), key=lambda pair: pair[1])
            for trial in self._trials
        )
        return fit_link((few.num_buckets, few_s), (many.num_buckets, many_s), num_bytes)


def probe_link(comm: Communicator) -> Wire:
    """Times reduce-scatters of two sizes, the same on all ranks. All ranks call it, and the device is waited for."""
    take = DeviceClock(comm.device).take
    seconds: list[float] = []
    for num_bytes in _PROBE_BYTES:
        length = num_bytes // 4 // comm.size
        whole = torch.zeros(length * comm.size, device=comm.device)
        times: list[tuple[_Time, _Time]] = []
        for _ in range(_NUM_PROBES):
            start = take()
            comm.reduce_scatter(whole[length * comm.rank : length * (comm.rank + 1)], whole).wait()
            times.append((start, take()))
        seconds.append(min(seconds_between(*pair) for pair in times[1:]))
    found = torch.tensor(seconds, dtype=torch.float64, device=comm.device)
    comm.all_reduce(found, "max").wait()
    small_s, large_s = found.tolist()
    small, large = _PROBE_BYTES
    bandwidth = (large - small) / max(large_s - small_s, 1e-9)
    return Wire(alpha_s=max(small_s - small / bandwidth, 0.0), bandwidth=bandwidth)


def _seconds(start: _Time | None, end: _Time | None) -> float:
    return math.nan if start is None or end is None else seconds_between(start, end)


def _known(middle: Callable[[list[float]], float], values: Iterable[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return middle(known) if known else math.nan
