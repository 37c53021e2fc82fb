"""The largest microbatch that fits, from a few trials: pure functions, what they need to know comes as values.

What a pass holds grows with its samples along a line that starts no lower than what is there without it. So one trial
bounds all larger ones: extra(n) <= extra(tried) x n / tried. Two trials give the line itself, and the search goes up to
where it ends: it runs out of memory only where memory does not grow along a line.

A trial that goes over the limit, but not out of memory, ends the search: the line between it and the one before says
what fits. Trying again would not, since a process on a CPU keeps what it once had.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

_MOST_GROWTH = 4  # from one trial to the next: where memory comes in large pieces a line may look flat
_OUT_OF_MEMORY, _OVER, _FITS = 0, 1, 2


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


class _Point(NamedTuple):
    samples: int
    peak_bytes: int


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
    best, ceiling = 0, max(sizes) + 1
    points = [_Point(0, base_bytes)]
    trials: list[Trial] = []
    size = agree(_at_most(sizes, first) or sizes[0])
    while size:
        peak = measure(size)
        outcome = agree(_OUT_OF_MEMORY if peak is None else _FITS if peak <= limit_bytes else _OVER)
        trials.append(Trial(samples=size, peak_bytes=peak, fits=outcome == _FITS))
        if outcome == _FITS:
            best = size
        else:
            ceiling = size
        between = [each for each in sizes if best < each < ceiling]
        if outcome == _OUT_OF_MEMORY:  # on some rank: there is nothing to go by but that
            size = _at_most(between, size // 2) or (between[0] if between else 0)
            continue
        assert peak is not None
        points.append(_Point(size, peak))
        reach = _reach(points, limit_bytes)
        if outcome == _OVER:
            return Found(samples=agree(_at_most(between, reach)) or best or None, trials=tuple(trials))
        within = [each for each in between if each <= reach]
        size = agree(_at_most(within, _MOST_GROWTH * size) or (within[0] if within else 0))
    return Found(samples=best or None, trials=tuple(trials))


def _reach(points: Sequence[_Point], limit_bytes: int) -> int:
    """Returns how many samples fit, by the line through the last two points, or that from the base if it goes further.

    The second may do so where the last step was short and its memory came in one large piece.
    """
    last = points[-1]
    starts = points[0], points[-2]
    slopes = [max(last.peak_bytes - start.peak_bytes, 1) / (last.samples - start.samples) for start in starts]
    return max(last.samples + int((limit_bytes - last.peak_bytes) // slope) for slope in slopes)


def _at_most(sizes: Sequence[int], bound: int) -> int:
    return max((size for size in sizes if size <= bound), default=0)
