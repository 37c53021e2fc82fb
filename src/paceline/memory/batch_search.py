"""The largest microbatch that fits, from a few trials: pure functions, what they need to know comes as values.

What a pass holds grows with its samples along a line that starts no lower than what is there without it. So one trial
bounds all larger ones: extra(n) <= extra(tried) x n / tried. Two trials give the line itself, and the search goes up to
where it ends: it meets an out-of-memory error only where memory does not grow along a line.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One size that was tried: its peak in bytes (None: out of memory), and whether all ranks found that it fits."""

    samples: int
    peak_bytes: int | None
    fits: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a search found: the largest size that fits, or None; and what was tried."""

    samples: int | None
    trials: tuple[Trial, ...]


def microbatch_sizes(samples_per_rank: int) -> list[int]:
    """Lists the microbatches that a rank's samples of a step can be cut into evenly, smallest first."""
    return [size for size in range(1, samples_per_rank + 1) if samples_per_rank % size == 0]


def search_microbatch(
    sizes: Sequence[int],
    measure: Callable[[int], int | None],
    *,
    base_bytes: int,
    limit_bytes: int,
    first: int,
    agree: Callable[[int], int] = lambda value: value,
) -> Found:
    """Finds the largest of ``sizes`` whose peak stays within the limit.

    ``measure`` runs a trial and returns its peak, or None where memory ran out. ``base_bytes`` is held without any
    pass. ``first`` is where to begin, from an estimate. ``agree`` returns the smallest of what all ranks pass to it: so
    all of them go the same way, each by numbers of its own.
    """
    best: int | None = None
    ceiling = max(sizes) + 1
    trials: list[Trial] = []
    size = agree(_at_most(sizes, first) or sizes[0])
    while size:
        peak = measure(size)
        fits = bool(agree(int(peak is not None and peak <= limit_bytes)))
        trials.append(Trial(samples=size, peak_bytes=peak, fits=fits))
        if fits:
            best = size
        else:
            ceiling = size
        reach = _reach(trials, base_bytes, limit_bytes)
        if not fits:  # on some rank: at least one size down, whatever this rank could hold
            reach = min(reach, size - 1)
        among = [each for each in sizes if (best or 0) < each < ceiling]
        size = agree(_at_most(among, reach) or (among[0] if among and best is None else 0))
    return Found(samples=best, trials=tuple(trials))


def _reach(trials: Sequence[Trial], base_bytes: int, limit_bytes: int) -> int:
    """Returns how many samples fit, by the last trial: above the base, or along the line to the one before it.

    A line is followed for a few times its length only: where memory comes in large pieces it may look flat.
    """
    last = trials[-1]
    if last.peak_bytes is None:
        return last.samples // 2
    extra = max(last.peak_bytes - base_bytes, 1)
    bound = max(limit_bytes - base_bytes, 0) * last.samples // extra
    before = next((each for each in trials[-2::-1] if each.peak_bytes and each.samples < last.samples), None)
    if before is None or before.peak_bytes is None or not last.fits:
        return bound
    slope = max(last.peak_bytes - before.peak_bytes, 1) / (last.samples - before.samples)
    line = last.samples + int((limit_bytes - last.peak_bytes) / slope)
    return max(bound, min(line, 4 * last.samples))


def _at_most(sizes: Sequence[int], bound: int) -> int:
    return max((size for size in sizes if size <= bound), default=0)
