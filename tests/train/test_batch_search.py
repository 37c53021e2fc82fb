"""The search for a microbatch: always the largest that fits, in few trials, and never over the limit on a line."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.mesh import divisors
from paceline.train.survive.memory import search_microbatch


def test_sizes_cut_evenly() -> None:
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
    assert divisors(1) == [1]


@given(
    samples=st.integers(1, 512),
    fixed=st.integers(0, 5000),
    slope=st.integers(1, 300),
    limit=st.integers(1, 40_000),
    first=st.integers(1, 600),
)
def test_memory_along_a_line(samples: int, fixed: int, slope: int, limit: int, first: int) -> None:
    sizes, base = divisors(samples), 1000

    def peak(size: int) -> int:
        return base + fixed + slope * size

    found = search_microbatch(sizes, peak, base_bytes=base, limit_bytes=limit, first=first)
    fitting = [size for size in sizes if peak(size) <= limit]
    over = [each for each in found.trials if not each.fits]
    assert over == [] or found.trials == tuple(over[:1]), "went over by itself"
    if over and fixed:  # by a bold first: what is fixed cannot be told from what grows
        assert found.samples is None or found.samples <= over[0].samples
    elif fixed == 0 or len(found.trials) > 2:
        assert found.samples == max(fitting, default=None)
    elif found.samples is not None:  # one trial alone stops where the next size might be too large
        assert found.samples in fitting
    assert len({each.samples for each in found.trials}) == len(found.trials)


@given(samples=st.integers(1, 512), largest=st.integers(1, 600), first=st.integers(1, 600))
def test_only_whether_it_fits_is_known(samples: int, largest: int, first: int) -> None:
    """Memory that runs out where the peaks so far gave no warning."""
    sizes = divisors(samples)
    found = search_microbatch(
        sizes, lambda size: 2 * size if size <= largest else None, base_bytes=0, limit_bytes=10**9, first=first
    )
    assert found.samples == max(size for size in sizes if size <= largest)


def test_where_nothing_fits() -> None:
    found = search_microbatch([1, 2, 4], lambda size: 100 * size, base_bytes=0, limit_bytes=99, first=4)
    assert found.samples is None
    assert [(each.samples, each.fits) for each in found.trials] == [(4, False)]
    found = search_microbatch([1, 2, 4], lambda _: None, base_bytes=0, limit_bytes=99, first=4)
    assert found.samples is None
    assert [each.samples for each in found.trials] == [4, 2, 1]


def test_over_the_limit_the_line_says_what_fits() -> None:
    """A process on a CPU keeps what it once had: a smaller trial afterwards would show the same peak."""
    highest = 0

    def peak(size: int) -> int:
        nonlocal highest
        highest = max(highest, 1000 + 10 * size + (5000 if size > 8 else 0))
        return highest

    found = search_microbatch(divisors(64), peak, base_bytes=1000, limit_bytes=4000, first=4)
    assert found.samples == 8
    assert [each.samples for each in found.trials] == [4, 16]


def test_few_trials_for_a_large_step() -> None:
    found = search_microbatch(
        divisors(4096), lambda size: 10_000 + 7 * size, base_bytes=9000, limit_bytes=20_000, first=1
    )
    assert found.samples == 1024
    assert len(found.trials) <= 6


def run_together(peaks: list[Callable[[int], int | None]], limit: int, first: list[int]) -> list[int | None]:
    """Runs the search of several ranks in step: what one of them passes to ``agree`` waits for the others."""
    import threading

    sizes, ranks = divisors(64), len(peaks)
    values, results = [0] * ranks, [0] * ranks
    barrier = threading.Barrier(ranks)
    found: list[int | None] = [None] * ranks

    def work(rank: int) -> None:
        def agree(value: int) -> int:
            values[rank] = value
            barrier.wait()
            results[rank] = min(values)
            barrier.wait()
            return results[rank]

        found[rank] = search_microbatch(
            sizes, peaks[rank], base_bytes=0, limit_bytes=limit, first=first[rank], agree=agree
        ).samples

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    return found


@pytest.mark.parametrize("first", [[1, 1, 1], [64, 2, 8], [4, 64, 64]])
def test_ranks_agree_on_what_the_smallest_can_hold(first: list[int]) -> None:
    peaks: list[Callable[[int], int | None]] = [
        lambda size: 10 * size,
        lambda size: 25 * size,
        lambda size: 12 * size if size <= 16 else None,
    ]
    assert run_together(peaks, limit=420, first=first) == [16, 16, 16]
    assert run_together(peaks, limit=240, first=first) == [8, 8, 8]
    assert run_together(peaks, limit=20, first=first) == [None, None, None]
    assert run_together([lambda _: 1, lambda _: None], limit=20, first=first[:2]) == [None, None]
