"""Targets at the ends of documents, and positions that a run leaves out on purpose."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from paceline.data.order import ConsumedIds, DataOrder
from paceline.data.windows import IGNORED, RandomWindows, TokenBlocks, TokenSlice, check_part, split_tokens
from paceline.errors import DataError


class Counted:
    """Tokens 0, 1, 2, ..."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def read(self, starts: NDArray[np.int64], length: int) -> NDArray[np.int64]:
        return starts[:, None] + np.arange(length, dtype=np.int64)


def test_what_follows_an_end_is_no_target() -> None:
    inputs, targets = TokenBlocks(Counted(9), 4).read(np.array([0, 1]), 0)
    assert inputs.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert targets.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]
    inputs, targets = TokenBlocks(Counted(9), 4, end_token=5).read(np.array([0, 1]), 0)
    assert inputs.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert targets.tolist() == [[1, 2, 3, 4], [5, IGNORED, 7, 8]]
    assert TokenBlocks(Counted(9), 4, end_token=0).read(np.array([0]), 0)[1].tolist() == [[IGNORED, 2, 3, 4]]


@pytest.mark.parametrize(("length", "blocks"), [(0, 0), (1, 0), (4, 0), (5, 1), (8, 1), (9, 2)])
def test_a_block_has_a_successor_for_each_token(length: int, blocks: int) -> None:
    assert len(TokenBlocks(Counted(length), 4)) == blocks


def test_random_windows_lie_in_parts_of_their_own_and_are_drawn_anew_each_epoch() -> None:
    windows = RandomWindows(Counted(102), 4, seed=3)
    count = len(windows)
    assert count == 25
    first, second = (windows.starts(np.arange(count), epoch) for epoch in (0, 1))
    span, rest = divmod(102 - 4, count)
    bounds = np.cumsum([0] + [span + (index < rest) for index in range(count)])
    for starts in (first, second):
        assert ((bounds[:-1] <= starts) & (starts < bounds[1:])).all()
    assert (first != second).any()
    assert (first == windows.starts(np.arange(count), 0)).all()
    assert (first != RandomWindows(Counted(102), 4, seed=4).starts(np.arange(count), 0)).any()
    inputs, targets = windows.read(np.arange(count), 0)
    assert torch.equal(targets, inputs + 1)


@pytest.mark.parametrize(("share", "cut"), [(0.0, None), (0.1, 18), (0.25, 15), (0.5, 10)])
def test_tokens_are_cut_once(share: float, cut: int | None) -> None:
    tokens = Counted(20)
    train, rest = split_tokens(tokens, 1, share, "the text")
    if cut is None:
        assert (train, rest) == (tokens, None)
        return
    assert isinstance(rest, TokenSlice)
    assert (len(train), len(rest)) == (cut, 20 - cut)
    assert rest.read(np.array([0]), 1).tolist() == [[cut]]


@pytest.mark.parametrize(("tokens", "context", "is_right"), [(5, 4, True), (4, 4, False), (2, 1, True), (9, 0, False)])
def test_a_part_has_a_whole_window(tokens: int, context: int, is_right: bool) -> None:
    if is_right:
        check_part(tokens, context, "the part", 0.1)
        return
    with pytest.raises(DataError) as told:
        check_part(tokens, context, "the part", 0.1)
    if context < 1:
        assert str(told.value) == "data.context = 0\n  a sample has at least one token"
    else:
        assert str(told.value).startswith(
            "the part has 4 tokens with data.eval_fraction = 0.1, for a context of 4\n  one sample needs 5 tokens"
        )


@pytest.mark.parametrize(
    ("skips", "expected"),
    [
        ([], []),
        ([(4, 8)], [[4, 8]]),
        ([(4, 4)], []),
        ([(4, 8), (8, 12)], [[4, 12]]),
        ([(4, 8), (12, 16)], [[4, 8], [12, 16]]),
        ([(4, 8), (8, 8)], [[4, 8]]),
        ([(4, 8), (12, 16), (16, 20)], [[4, 8], [12, 20]]),
    ],
)
def test_positions_left_out_one_after_another_are_one(skips: list[tuple[int, int]], expected: list[list[int]]) -> None:
    consumed = ConsumedIds(DataOrder(length=64, global_batch=4, seed=0))
    for skip in skips:
        consumed.skip(*skip)
    assert consumed.state_dict()["skipped"] == expected


def test_what_was_consumed_is_kept_in_segments() -> None:
    order = DataOrder(length=64, global_batch=4, seed=0)
    consumed = ConsumedIds(order)
    for position in (0, 4, 12):
        consumed.note(position, position + 4, order.batch_at(position).indices)
    state = consumed.state_dict()
    assert [(each["first"], each["last"]) for each in state["segments"]] == [(0, 8), (12, 16)]
    assert state["count"] == 12
    again = ConsumedIds(order)
    again.load_state_dict(state)
    for each in (consumed, again):
        each.note(16, 20, order.batch_at(16).indices)
    assert consumed.state_dict() == again.state_dict()
    assert [(each["first"], each["last"]) for each in again.state_dict()["segments"]][-1][1] == 20
