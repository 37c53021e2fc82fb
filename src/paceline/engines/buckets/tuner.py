"""What a run measures to find the size of its buckets, and how its ranks agree on it.

First some passes of data parallelism only watch: buckets are sent one by one when backward has ended. Passes take
turns with few large buckets and many small ones: the seconds of k buckets, k alpha + P / W, give latency and bandwidth.
Then some passes overlap, with the many small buckets: what they take longer than the formula says is what communication
takes from compute. No pass has a collective more. At the end ranks exchange what they saw, once, and each takes the
same decision. The time of a reduction is that of the rank that waited least.

Where buckets cannot change any more when training begins (ZeRO), the link is tried before, with messages of two sizes.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from paceline.clock import DeviceClock, Mark, seconds_between
from paceline.cluster.costs import Wire
from paceline.comm.base import Communicator
from paceline.engines.buckets.buckets import (
    ArrivalTimes,
    BucketChoice,
    BucketPolicy,
    ParameterSize,
    bucket_parameters,
    choose_buckets,
    fit_link,
    free_share,
    trial_policies,
)
from paceline.units import KIB, MIB

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
        self._trials = (default, default)
        self._passes = [_TimedPass(default)]

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
        overlapped = bucket_parameters(sizes, arrival, self._trials[1])
        free = free_share(overlapped, sizes, arrivals, link, whole_s)
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
