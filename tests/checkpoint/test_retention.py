"""Which checkpoints are kept: a pure policy."""

from __future__ import annotations

import math
from typing import Literal

from hypothesis import given
from hypothesis import strategies as st

from paceline.checkpoint.find import Retention, Saved, steps_to_remove


def removed(policy: Retention, values: dict[int, float | None], newest: int | None = None) -> list[int]:
    saved = [Saved(step=step, value=value) for step, value in values.items()]
    return steps_to_remove(saved, max(values) if newest is None else newest, policy)


def test_the_newest_are_kept() -> None:
    steps = dict.fromkeys(range(1, 6))
    assert removed(Retention(last=2), steps) == [1, 2, 3]
    assert removed(Retention(last=9), steps) == []
    assert removed(Retention(), steps) == []
    assert removed(Retention(last=1), steps) == [1, 2, 3, 4]


def test_the_one_just_written_is_kept_also_where_later_steps_lie() -> None:
    """A run that was taken up further back."""
    assert removed(Retention(last=1), dict.fromkeys([2, 8, 9]), newest=2) == [8, 9]


def test_every_so_many_steps_one_is_kept() -> None:
    assert removed(Retention(last=1, every=4), dict.fromkeys(range(1, 11))) == [1, 2, 3, 5, 6, 7, 9]


def test_the_best_are_kept_by_less_or_more() -> None:
    values = {1: 0.5, 2: 0.1, 3: None, 4: 0.9, 5: math.nan, 6: 0.3}
    assert removed(Retention(last=1, best=2), values) == [1, 3, 4, 5]
    assert removed(Retention(last=1, best=2, mode="max"), values) == [2, 3, 5]


def test_of_equals_the_later_one_is_the_best() -> None:
    assert removed(Retention(last=1, best=1), {1: 0.5, 2: 0.5, 3: 0.7}) == [1]


def test_those_that_were_left_go_before_all_others() -> None:
    """The run went back to step 8, and has saved step 10 since."""
    left = [Saved(step=step, value=0.0, is_left=True) for step in (12, 16)]
    saved = [Saved(step=4), Saved(step=8), Saved(step=10), *left]
    assert steps_to_remove(saved, 10, Retention(last=2)) == [4, 12, 16]
    assert steps_to_remove(saved, 10, Retention(last=4)) == [12]
    assert steps_to_remove(saved, 10, Retention(last=1, every=4, best=2)) == [12, 16]


def test_a_damaged_one_takes_no_place() -> None:
    saved = [Saved(step=1, value=0.5), Saved(step=2), Saved(step=3, is_damaged=True), Saved(step=4)]
    assert steps_to_remove(saved, 4, Retention(last=2)) == [1]  # 2 and 4 are good; 3 lies between them
    assert steps_to_remove(saved, 4, Retention(last=1, best=1)) == [2, 3]
    others = [Saved(step=step, is_damaged=True) for step in (1, 2, 3)]
    assert steps_to_remove([*others, Saved(step=4)], 4, Retention(last=2)) == []
    assert steps_to_remove([*others, Saved(step=4)], 4, Retention(last=1, every=1)) == [1, 2, 3]


@given(
    good=st.sets(st.integers(0, 40)),
    left=st.sets(st.integers(0, 40)),
    damaged=st.sets(st.integers(0, 40)),
    last=st.integers(1, 5),
    newest=st.integers(0, 40),
)
def test_so_many_good_ones_are_left(good: set[int], left: set[int], damaged: set[int], last: int, newest: int) -> None:
    steps = good | left | damaged | {newest}
    whole = {step for step in steps if step == newest or step not in damaged}
    saved = [Saved(step=step, is_left=step in left - {newest}, is_damaged=step not in whole) for step in steps]
    kept = steps - set(steps_to_remove(saved, newest, Retention(last=last)))
    assert newest in kept
    assert len(kept & whole) >= min(last, len(whole))
    of_the_line = whole - left - {newest}
    if kept & whole & left - {newest}:  # only where the line itself has too few
        assert of_the_line <= kept


@given(
    steps=st.dictionaries(st.integers(0, 50), st.none() | st.floats(), min_size=1),
    last=st.none() | st.integers(1, 5),
    every=st.none() | st.integers(1, 10),
    best=st.integers(0, 3),
    mode=st.sampled_from(["min", "max"]),
    data=st.data(),
)
def test_something_is_always_left(
    steps: dict[int, float | None],
    last: int | None,
    every: int | None,
    best: int,
    mode: Literal["min", "max"],
    data: st.DataObject,
) -> None:
    newest = data.draw(st.sampled_from(sorted(steps)))
    policy = Retention(last=last, every=every, best=best, mode=mode)
    gone = removed(policy, steps, newest)
    assert newest not in gone
    assert gone == sorted(set(gone) & set(steps))
    left = set(steps) - set(gone)
    assert len(left) >= min(last or len(steps), len(steps))
