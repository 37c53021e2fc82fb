"""What ranks that share sequences send: as many messages and bytes as the formulas say, and not in a circle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from shared_attention import AttentionCase, what_is_sent

from paceline.comm.base import Call, Communicator, Work, WrappedCommunicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.engines.sequence.part import SequenceRank
from paceline.models.attention import attention, use_part
from paceline.schedule.ring import SequenceMethod, cut_parts, deal_documents, meets_of, split_sequence

LENGTH, HEADS, KV_HEADS, WIDTH = 48, 8, 4, 8


def sent(
    ranks: int, method: SequenceMethod, dtype: torch.dtype, documents: torch.Tensor | None = None, who: int = -1
) -> tuple[list[Any], list[Any]]:
    """Returns what a rank sends in forward, and in backward; by default the last."""
    case = AttentionCase(length=LENGTH, heads=HEADS, kv_heads=KV_HEADS, width=WIDTH, dtype=dtype)
    return run_virtual(lambda comm: what_is_sent(comm, case, method, documents), ranks)[who]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_ring_sends_keys_and_values_to_all_others_and_gradients_home(ranks: int, dtype: torch.dtype) -> None:
    forward, backward = sent(ranks, "ring", dtype)
    pair = 2 * 2 * KV_HEADS * LENGTH // ranks * WIDTH * dtype.itemsize  # K and V of two rows
    assert forward == [("send", pair)] * (ranks - 1)
    gradients = pair * max(4, dtype.itemsize) // dtype.itemsize
    assert sorted(backward) == sorted([("send", pair), ("send", gradients)] * (ranks - 1))


def token_bytes(itemsize: int) -> int:
    return 2 * KV_HEADS * WIDTH * itemsize  # of K and V


def test_whole_documents_do_not_travel() -> None:
    starts = torch.arange(LENGTH).div(6, rounding_mode="floor").mul(6).expand(2, -1)  # two of six tokens for each rank
    assert sent(4, "ring", torch.float32, starts) == ([], [])


def test_of_a_document_that_is_cut_a_rank_has_what_its_queries_need() -> None:
    starts = torch.tensor([[0] * 32 + [32] * 8 + [40] * 8] * 2)
    rows = deal_documents(LENGTH, 4, [[0, 32, 40]] * 2)

    def needed(rank: int, of: int) -> int:
        return sum(meet.keys for dealt in rows for meet in meets_of(cut_parts(dealt[rank]), cut_parts(dealt[of])))

    for rank in range(4):
        others = [(rank + away) % 4 for away in range(1, 4)]
        forward, backward = sent(4, "ring", torch.bfloat16, starts, who=rank)
        keys = [needed(other, rank) * token_bytes(2) for other in others]
        assert forward == [("send", each) for each in keys if each]
        gradients = [needed(rank, other) * token_bytes(4) for other in others]
        assert sorted(backward) == sorted(("send", each) for each in keys + gradients if each)


def test_ulysses_exchanges_all_but_a_rank_s_own_part() -> None:
    forward, backward = sent(4, "ulysses", torch.float32)
    query, key = (2 * heads * LENGTH // 4 * WIDTH * 4 * 3 // 4 for heads in (HEADS, KV_HEADS))
    assert forward == [("all_to_all", each) for each in (query, key, key, query)]
    assert backward == [("all_to_all", each) for each in (query, query, key, key)]


def test_both_exchange_in_groups_and_send_among_them() -> None:
    forward, backward = sent(8, "both", torch.float32)
    query = 2 * HEADS * LENGTH // 8 * WIDTH * 4 * 3 // 4
    key = 2 * KV_HEADS * LENGTH // 8 * WIDTH * 4 * 3 // 4
    pair = 2 * 2 * (KV_HEADS // 4) * LENGTH // 2 * WIDTH * 4
    assert forward == [("all_to_all", each) for each in (query, key, key)] + [("send", pair), ("all_to_all", query)]
    assert [kind for kind, _ in backward].count("send") == 2


def test_gather_sends_keys_and_values_to_each_other_rank() -> None:
    forward, backward = sent(4, "gather", torch.float32)
    key = 2 * KV_HEADS * LENGTH // 4 * WIDTH * 4 * 3
    assert forward == backward == [("all_to_all", key)] * 2


@pytest.mark.parametrize("size", [0, 11, 16])
@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8])
def test_where_messages_go_one_by_one_some_rank_receives_first(ranks: int, size: int) -> None:
    """A rank of a group with one stream carries out its messages in the order of their issue."""

    class Ordered(WrappedCommunicator):
        def __init__(self, inner: Communicator) -> None:
            super().__init__(inner)
            self.calls: list[tuple[str, int]] = []

        def issue(self, call: Call) -> Work:
            self.calls.append((call.kind, call.peer))
            return super().issue(call)

        def split(self, ranks: Any) -> Communicator:
            return self if len(ranks) == self.size else self.inner.split(ranks)

    def share(comm: Communicator) -> list[tuple[str, int]]:
        noting = Ordered(comm)
        rank = SequenceRank(noting, split_sequence("ring", ranks, 2))
        rank.begin(16, torch.arange(16).div(size, rounding_mode="floor").mul(size)[None] if size else None)
        leaves = [rank.cut(torch.randn(1, 2, 16, 4), 2).requires_grad_() for _ in range(3)]
        with use_part(rank):
            attention(*leaves, is_causal=bool(size), documents=rank.documents()).sum().backward()
        return noting.calls

    waiting = [calls[:] for calls in run_virtual(share, ranks)]
    assert any(waiting)
    is_moving = True
    while is_moving:  # a message goes where it is the next of both its ranks
        is_moving = False
        for rank, calls in enumerate(waiting):
            if calls and calls[0][0] == "send":
                to = calls[0][1]
                if waiting[to] and waiting[to][0] == ("recv", rank):
                    calls.pop(0)
                    waiting[to].pop(0)
                    is_moving = True
    assert not any(waiting)
