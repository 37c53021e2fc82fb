"""Regions: what two holders of one tensor have in common, against numpy arrays of element numbers."""

from __future__ import annotations

import itertools
import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from paceline.shards import Region, common_runs, memory_order, whole_region

Element = np.ndarray


def elements(region: Region) -> Element:
    """The numbers (in row-major order of the whole) of a region's elements, in its own order."""
    whole = np.arange(math.prod(region.shape)).reshape(region.shape)
    for dim, spans in region.cuts:
        whole = np.concatenate([whole.take(range(a, b), axis=dim) for a, b in spans], axis=dim)
    ordered = whole if region.order is None else whole.transpose(region.order)
    return ordered.reshape(-1)[region.begin : region.end]


@st.composite
def regions(draw: st.DrawFn, shape: tuple[int, ...]) -> Region:
    """A region as tensor parallelism, experts and flat slices make them: parts of some dims, then an interval."""
    cuts = []
    for dim in draw(st.sets(st.integers(0, len(shape) - 1), max_size=3)) if shape else ():
        bounds = sorted(draw(st.sets(st.integers(0, shape[dim]), min_size=2, max_size=6)) | {0, shape[dim]})
        pairs = list(itertools.pairwise(bounds))
        cuts.append((dim, tuple(pairs[draw(st.integers(0, 1)) :: 2]) or (pairs[0],)))
    order = memory_order(shape, [draw(st.integers(1, 9)) for _ in shape]) if draw(st.booleans()) else None
    part = Region(shape=shape, begin=0, end=0, cuts=tuple(cuts), order=order)
    first, last = sorted(draw(st.tuples(*[st.integers(0, math.prod(part.local_shape))] * 2)))
    return Region(shape=shape, begin=first, end=last, cuts=tuple(cuts), order=order)


@given(st.data())
def test_runs_are_what_two_regions_have_in_common(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 6), max_size=4)))
    ours, theirs = data.draw(regions(shape)), data.draw(regions(shape))
    mine, saved = elements(ours), elements(theirs)
    filled = np.full(ours.size, -1)
    runs = common_runs(ours, theirs)
    for a, b, length in zip(*(part.tolist() for part in runs), strict=True):
        assert length > 0
        assert (filled[a : a + length] == -1).all()  # none twice
        filled[a : a + length] = saved[b : b + length]
    expected = np.where(np.isin(mine, saved), mine, -1)
    assert filled.tolist() == expected.tolist()
    assert (np.diff(runs.theirs) > 0).all()  # as a file is read


def test_whole_slices_and_rows_are_single_runs() -> None:
    whole = whole_region((8, 5))
    assert [len(part) for part in common_runs(whole.narrow(3, 29), whole.narrow(10, 40))] == [1, 1, 1]
    rows = Region(shape=(8, 5), cuts=((0, ((2, 6),)),), begin=0, end=20)
    assert common_runs(whole, rows) == (np.array([10]), np.array([0]), np.array([20]))
    columns = Region(shape=(8, 5), cuts=((1, ((1, 3),)),), begin=0, end=16)
    assert len(common_runs(whole, columns).length) == 8


def test_the_order_of_memory_ignores_dims_of_one() -> None:
    assert memory_order((3, 1, 2), (2, 2, 1)) is None
    assert memory_order((3, 1, 2), (2, 99, 1)) is None
    assert memory_order((2, 3, 4, 5), (60, 1, 15, 3)) == (0, 2, 3, 1)
    assert memory_order((), ()) is None


def test_one_of_all_parts_has_the_first_element() -> None:
    whole = whole_region((4, 6))
    assert [whole.narrow(a, a + 8).has_first for a in (0, 8, 16)] == [True, False, False]
    cut = [Region(shape=(4, 6), cuts=((1, (span,)),), begin=0, end=12) for span in ((0, 3), (3, 6))]
    assert [part.has_first for part in cut] == [True, False]
    assert [whole.is_whole_part, cut[0].is_whole_part, whole.narrow(0, 5).is_whole_part] == [True, True, False]
