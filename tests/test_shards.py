"""Flat layouts: slots never overlap, tensors keep their strides, and shards cover the buffer exactly."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.shards import FlatLayout, flat_layout, round_up, row_major

SHAPES = st.lists(st.lists(st.integers(0, 4), max_size=4).map(tuple), max_size=8)
COUNTS = st.integers(1, 8)


@given(shapes=SHAPES, align=COUNTS, num_shards=COUNTS, tail=st.integers(0, 5))
def test_slots_follow_one_another_without_overlap(
    shapes: list[tuple[int, ...]], align: int, num_shards: int, tail: int
) -> None:
    layout = flat_layout(shapes, align=align, num_shards=num_shards, tail=tail)
    end = 0
    assert [slot.shape for slot in layout.slots] == shapes
    for slot, shape in zip(layout.slots, shapes, strict=True):
        assert slot.numel == math.prod(shape)
        assert slot.offset % align == 0
        assert end <= slot.offset < end + align
        end = slot.offset + slot.numel
    assert layout.length % num_shards == 0
    assert end + tail <= layout.length < end + tail + align + num_shards


@given(shapes=SHAPES, align=COUNTS, num_shards=COUNTS)
def test_shards_cover_every_element_once(shapes: list[tuple[int, ...]], align: int, num_shards: int) -> None:
    layout = flat_layout(shapes, align=align, num_shards=num_shards)
    ranges = [layout.shard_range(shard, num_shards) for shard in range(num_shards)]
    assert [element for start, end in ranges for element in range(start, end)] == list(range(layout.length))
    assert len({end - start for start, end in ranges}) == 1


@given(shape=st.lists(st.integers(0, 4), max_size=4))
def test_row_major_strides_are_those_of_torch(shape: list[int]) -> None:
    assert row_major(shape) == torch.empty(shape).stride()


@given(shapes=SHAPES, align=COUNTS, data=st.data())
def test_views_keep_values_and_strides_of_any_dense_tensor(
    shapes: list[tuple[int, ...]], align: int, data: st.DataObject
) -> None:
    """Each tensor in a dim order of its own: what is written through one view is not seen through another."""
    tensors = []
    for number, shape in enumerate(shapes):
        order = data.draw(st.permutations(range(len(shape))))
        turned = torch.full([shape[dim] for dim in order], float(number + 1))
        tensors.append(turned.permute(sorted(range(len(order)), key=order.__getitem__)))
    layout = flat_layout(
        [tuple(tensor.shape) for tensor in tensors], strides=[tensor.stride() for tensor in tensors], align=align
    )
    buffer = torch.zeros(layout.length)
    for slot, tensor in zip(layout.slots, tensors, strict=True):
        slot.view(buffer).copy_(tensor)
    for slot, tensor in zip(layout.slots, tensors, strict=True):
        view = slot.view(buffer)
        assert view.stride() == tensor.stride()
        assert torch.equal(view, tensor)
    assert buffer.count_nonzero() == sum(tensor.numel() for tensor in tensors)


def test_a_view_shares_memory_with_the_buffer_wherever_that_begins() -> None:
    layout = flat_layout([(2,), (2, 2)], align=4)
    buffer = torch.arange(20.0)[6:]
    view = layout.slots[1].view(buffer)
    view.zero_()
    assert buffer.tolist() == [6, 7, 8, 9, 0, 0, 0, 0, 14, 15, 16, 17, 18, 19]


def test_channels_last_weights_stay_channels_last() -> None:
    weight = torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last)
    layout = flat_layout([tuple(weight.shape)], strides=[weight.stride()])
    view = layout.slots[0].view(torch.empty(layout.length)).copy_(weight)
    assert view.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(view, weight)


def test_no_tensors_make_an_empty_buffer() -> None:
    assert flat_layout([]) == FlatLayout(slots=(), length=0)
    assert flat_layout([], tail=1, num_shards=4).length == 4


@given(value=st.integers(0, 1000), multiple=st.integers(1, 50))
def test_round_up_gives_the_least_multiple_that_is_not_below(value: int, multiple: int) -> None:
    result = round_up(value, multiple)
    assert result % multiple == 0
    assert value <= result < value + multiple


def test_a_length_that_does_not_divide_is_our_own_bug() -> None:
    with pytest.raises(AssertionError):
        flat_layout([(3,)]).shard_range(0, 2)
