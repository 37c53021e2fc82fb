"""The running hash of consumed samples: by what was read and in which order, and by nothing else."""

from __future__ import annotations

from itertools import islice

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from recomputed import recompute

from paceline.data.order import ConsumedIds, DataOrder, extend_hash


def consume(order: DataOrder, start: int, steps: int, known: ConsumedIds | None = None) -> ConsumedIds:
    consumed = ConsumedIds(order)
    if known is not None:
        consumed.load_state_dict(known.state_dict())
    for batch in islice(order.batches(start), steps):
        consumed.note(batch.position, batch.next_position, batch.indices)
    return consumed


@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=40), st.data())
def test_the_hash_does_not_depend_on_where_batches_begin(numbers: list[int], data: st.DataObject) -> None:
    ids = np.array(numbers, dtype=np.int64)
    whole = extend_hash((0, 0), ids)
    cut = data.draw(st.integers(0, len(ids)))
    assert extend_hash(extend_hash((0, 0), ids[:cut]), ids[cut:]) == whole
    if len(set(numbers)) > 1:
        assert extend_hash((0, 0), ids[::-1].copy()) != whole or list(ids) == list(ids[::-1])
    assert extend_hash((0, 0), ids[:-1]) != whole
    assert extend_hash((0, 0), np.append(ids, ids[-1])) != whole


@given(
    length=st.integers(1, 60),
    batch=st.integers(1, 20),
    drop_last=st.booleans(),
    steps=st.integers(0, 90),
    cut=st.integers(0, 90),
)
def test_a_resumed_run_has_the_hash_of_the_whole_one(
    length: int, batch: int, drop_last: bool, steps: int, cut: int
) -> None:
    order = DataOrder(length=length, global_batch=min(batch, length), seed=5, drop_last=drop_last)
    whole = consume(order, 0, steps)
    first = consume(order, 0, min(cut, steps))
    position = order.position_of_step(min(cut, steps))
    second = consume(order, position, steps - min(cut, steps), first)
    assert second.state_dict() == whole.state_dict()
    state = whole.state_dict()
    assert recompute(state) == {"hash": state["hash"], "count": state["count"]}


def test_a_sample_that_was_lost_or_read_twice_shows() -> None:
    order = DataOrder(length=20, global_batch=4, seed=1)
    state = consume(order, 0, 3).state_dict()
    for wrong in (consume(order, 0, 2), consume(order, 4, 3), consume(order, 0, 4)):
        assert wrong.state_dict()["hash"] != state["hash"]
    consumed = ConsumedIds(order)
    for batch in islice(order.batches(0), 3):
        consumed.note(batch.position, batch.next_position, np.roll(batch.indices, 1))
    found = consumed.state_dict()
    assert recompute(found)["hash"] == state["hash"] != found["hash"]


def test_other_batches_from_some_step_on_are_a_segment_of_their_own() -> None:
    first, second = (DataOrder(length=30, global_batch=size, seed=2) for size in (4, 6))
    known = consume(first, 0, 3)
    later = ConsumedIds(second)
    later.load_state_dict(known.state_dict())
    for batch in islice(second.batches(12), 2):
        later.note(batch.position, batch.next_position, batch.indices)
    state = later.state_dict()
    assert [(each["first"], each["last"], each["global_batch"]) for each in state["segments"]] == [
        (0, 12, 4),
        (12, 24, 6),
    ]
    assert recompute(state) == {"hash": state["hash"], "count": 24}
    assert state["hash"] == consume(first, 0, 6).state_dict()["hash"]  # the same samples, in the same order
