"""Attention over several ranks is that of one process in float64, forward and backward; planted bugs are seen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from covering import covering
from gloo_pool import GlooPool
from shared_attention import AttentionCase, attend_alone, attend_together, largest_error
from torch import Tensor

from paceline.comm.base import Communicator
from paceline.comm.virtual.communicator import run_virtual
from paceline.engines.sequence import ring
from paceline.engines.sequence import rows as cuts
from paceline.engines.sequence.part import SequenceRank
from paceline.errors import RankFailedError, UsageError
from paceline.models.attention import attention, current_part, positions, use_part
from paceline.models.block_attention import attend_dropped
from paceline.schedule.ring import SEQUENCE_METHODS, Order, SequenceMethod, split_sequence

TOLERANCE = 1e-10
PACKED = ((7, 1, 11), (2, 2, 2, 2, 2, 2, 2, 5))
CASES = {
    "causal": AttentionCase(),
    "bidirectional": AttentionCase(is_causal=False, length=32),
    "grouped heads": AttentionCase(kv_heads=2, length=16),
    "three heads of keys": AttentionCase(heads=24, kv_heads=3),
    "documents": AttentionCase(documents=PACKED, kv_heads=4),
    "documents, bidirectional": AttentionCase(documents=PACKED, is_causal=False),
    "a token a rank": AttentionCase(length=8, kv_heads=1),
    "cross attention": AttentionCase(is_causal=False, length=13, keys=40, kv_heads=2),
}


def error(case: AttentionCase, ranks: int, method: SequenceMethod, order: Order = "zigzag") -> float:
    expected = attend_alone(case)
    everyone = run_virtual(lambda comm: attend_together(comm, case, method, order), ranks)
    return max(largest_error(found, expected) for found in everyone)


@covering(always={"method": ["ring"]}, method=SEQUENCE_METHODS, ranks=[1, 2, 3, 4, 8], case=CASES)
def test_ranks_compute_what_one_process_does(method: SequenceMethod, ranks: int, case: AttentionCase) -> None:
    if method == "ulysses" and case.heads % ranks:
        case = replace(case, heads=24, kv_heads=3)
    assert error(case, ranks, method) < TOLERANCE


DEALT = {
    "short": ((5, 3, 6, 2, 4, 4), (1, 6, 6, 1, 6, 4)),
    "long and short": ((13, 1, 1, 2, 3, 4), (4, 20)),
    "one by one": ((3, 3, 3, 3, 3, 3, 3, 3),),
    "all alike": ((1,) * 24, (24,)),
}


@covering(
    documents=DEALT, ring=[(2, "ring", 8), (3, "ring", 8), (4, "ring", 8), (8, "both", 2)], is_causal=[True, False]
)
def test_documents_are_dealt_whole_or_in_pieces(
    documents: Any, ring: tuple[int, SequenceMethod, int], is_causal: bool
) -> None:
    ranks, method, heads = ring
    case = AttentionCase(length=24, documents=documents, heads=heads, kv_heads=2, is_causal=is_causal)
    assert error(case, ranks, method) < TOLERANCE


def test_a_row_may_be_cut_in_order() -> None:
    assert error(CASES["causal"], 4, "ring", "contiguous") < TOLERANCE


@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_values_may_be_wider_than_keys(method: SequenceMethod) -> None:
    def share(comm: Communicator) -> list[Tensor]:
        rank = SequenceRank(comm, split_sequence(method, comm.size, 4))
        rank.begin(12)
        leaves = [rank.cut(each.detach(), 2).requires_grad_() for each in inputs]
        with use_part(rank):
            out = attention(*leaves, is_causal=True, scale=0.3)
        return [rank.join(each.detach(), 2) for each in (out, *torch.autograd.grad(out.sum(), leaves))]

    inputs = [torch.randn(1, 4, 12, width, dtype=torch.float64, requires_grad=True) for width in (8, 8, 6)]
    alone = attention(*inputs, is_causal=True, scale=0.3)
    expected = [alone.detach(), *torch.autograd.grad(alone.sum(), inputs)]
    assert max(largest_error(found, expected) for found in run_virtual(share, 2)) < TOLERANCE


@covering(method=SEQUENCE_METHODS, ranks=[1, 2, 4], documents={"none": (), "packed": PACKED})
def test_dropped_weights_are_the_same_on_any_number_of_ranks(
    method: SequenceMethod, ranks: int, documents: Any
) -> None:
    case = AttentionCase(kv_heads=2, documents=documents, dropout=0.4)
    (expected,) = run_virtual(lambda comm: attend_together(comm, case, "gather"), 1)
    for found in run_virtual(lambda comm: attend_together(comm, case, method), ranks):
        assert largest_error(found, expected) < TOLERANCE
    (other,) = run_virtual(lambda comm: attend_together(comm, case, "gather", seed=1), 1)
    assert largest_error(other, expected) > 0.1


def test_dropout_keeps_the_mean_and_drops_as_often_as_asked() -> None:
    query, value = torch.zeros(1, 2, 300, 8, dtype=torch.float64), torch.ones(1, 2, 300, 8, dtype=torch.float64)
    out = attend_dropped(query, query, value, None, 0.25, 1.0, torch.arange(300)[None])
    assert out.mean().item() == pytest.approx(1, abs=0.01)  # each is the share of 300 equal weights that stay, / 0.75
    spread = (0.25 / 0.75 / 300) ** 0.5
    assert out[..., 0].std().item() == pytest.approx(spread, rel=0.2)


@pytest.mark.parametrize("is_additive", [True, False])
def test_gather_takes_a_mask_or_bias_with_its_gradient(is_additive: bool) -> None:
    def share(comm: Communicator) -> list[Tensor]:
        rank = SequenceRank(comm, split_sequence("gather", comm.size, 4))
        rank.begin(11)
        leaves = [rank.cut(each.detach(), 2).requires_grad_() for each in inputs]
        own = rank.cut(mask.detach(), 2).requires_grad_(is_additive)
        with use_part(rank):
            out = attention(*leaves, mask=own)
        out.sum().backward()
        return [rank.join(each, 2) for each in (out.detach(), own.grad if is_additive else own)]

    inputs = [torch.randn(2, 4, 11, 8, dtype=torch.float64) for _ in range(3)]
    mask = torch.randn(2, 4, 11, 11, dtype=torch.float64).requires_grad_() if is_additive else torch.rand(11, 11) > 0.4
    mask = mask if is_additive else (mask | torch.eye(11, dtype=torch.bool)).expand(2, 1, 11, 11)
    alone = attention(*inputs, mask=mask)
    if is_additive:
        alone.sum().backward()
    expected = [alone.detach(), mask.grad if is_additive else mask]
    for found in run_virtual(share, 3):
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("documents", [(), ((23, 1, 40), (64,)), ((30, 10, 3, 3, 3, 3, 12),)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_numbers_add_up_in_float32(dtype: torch.dtype, documents: Any) -> None:
    case = AttentionCase(length=64, dtype=dtype, documents=documents)
    assert error(case, 4, "ring") < 3 * max(error(case, 4, "gather"), 1e-6)


@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_autocast_narrows_what_attention_reads(method: SequenceMethod) -> None:
    def share(comm: Communicator) -> list[Tensor]:
        rank = SequenceRank(comm, split_sequence(method, comm.size, 4))
        rank.begin(12)
        leaves = [rank.cut(each.detach(), 2).requires_grad_() for each in inputs]
        with use_part(rank), torch.autocast("cpu", torch.bfloat16):
            out = attention(*leaves, is_causal=True)
        assert out.dtype == torch.bfloat16
        out.float().sum().backward()
        return [rank.join(each.detach(), 2) for each in (out, *(leaf.grad for leaf in leaves if leaf.grad is not None))]

    inputs = [torch.randn(1, 4, 12, 8, requires_grad=True) for _ in range(3)]
    with torch.autocast("cpu", torch.bfloat16):
        alone = attention(*inputs, is_causal=True)
    expected = [alone.detach(), *torch.autograd.grad(alone.float().sum(), inputs)]
    for found in run_virtual(share, 2):
        assert [each.dtype for each in found] == [each.dtype for each in expected]
        assert largest_error([each.float() for each in found], [each.float() for each in expected]) < 0.02


@pytest.mark.parametrize(("ranks", "method"), [(2, "ring"), (4, "both")])
def test_real_ranks(gloo_pool: GlooPool, ranks: int, method: SequenceMethod) -> None:
    case = AttentionCase(kv_heads=2, documents=PACKED)
    expected = attend_alone(case)
    everyone = gloo_pool.run(attend_together, case, method, ranks=ranks)
    assert max(largest_error(found, expected) for found in everyone) < TOLERANCE


def test_positions_and_documents_are_those_of_whole_rows() -> None:
    case = AttentionCase(documents=PACKED)

    def share(comm: Communicator) -> list[Tensor]:
        rank = SequenceRank(comm, split_sequence("both", comm.size, 4))
        rank.begin(19, case.starts())
        with use_part(rank):
            assert current_part() is rank
            places, own = positions(rank.cut(torch.zeros(2, 19)).shape[1], comm.device), rank.documents()
        assert current_part() is None
        assert own is not None
        return [rank.join(each) for each in (places, own)]

    for places, own in run_virtual(share, 4):
        assert torch.equal(places, torch.arange(19).expand(2, 19))
        assert torch.equal(own, case.starts())


# Bugs that others had: the comparison sees them.


def without_rescaling(out: Tensor, lse: Tensor, tokens: slice, found: Tensor, found_lse: Tensor) -> None:
    out[:, :, tokens] += found
    lse[:, :, tokens] = torch.logaddexp(lse[:, :, tokens], found_lse)


def keeping_gradients(swap: Callable[..., Any]) -> Callable[..., Any]:
    """Gradients of keys and values stay where they are computed, but on the last rank."""

    def kept(self: Any, sent: Tensor, arriving: int, away: int, tag: int) -> Any:
        received, works = swap(self, sent, arriving, away, tag)
        if tag and self.comm.rank < self.comm.size - 1:
            return (sent if sent.shape == received.shape else torch.zeros_like(received)), works
        return received, works

    return kept


MEETS = cuts.meets_of


@pytest.mark.parametrize("bug", ["merge", "gradients", "blocks"])
@pytest.mark.parametrize("case", ["causal", "documents"])
def test_a_bug_in_the_ring_is_seen(case: str, bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if bug == "merge":
        monkeypatch.setattr(ring, "_merge", without_rescaling)
    elif bug == "gradients":
        monkeypatch.setattr(ring.RingCall, "swap", keeping_gradients(ring.RingCall.swap))
    else:  # every rank's keys are taken to come first
        monkeypatch.setattr(cuts, "meets_of", lambda *shares: MEETS(*shares[:2], is_causal=False))
    assert error(CASES[case], 3, "ring") > 1e-2


def test_places_counted_in_a_rank_s_own_tokens_are_seen() -> None:
    """A model that turns queries and keys by their places, and takes those of its tokens in the rank."""

    def turned(inputs: list[Tensor], places: Tensor) -> list[Tensor]:
        angles = (places[:, None] * torch.tensor([1.0, 0.1], dtype=torch.float64)).repeat(1, 2)
        return [each * angles.cos() + each.roll(2, -1) * angles.sin() for each in inputs[:2]] + inputs[2:]

    def share(comm: Communicator, is_planted: bool) -> Tensor:
        rank = SequenceRank(comm, split_sequence("ring", comm.size, 2))
        rank.begin(12)
        own = [rank.cut(each, 2) for each in inputs]
        with use_part(rank):
            places = torch.arange(own[0].shape[2]) if is_planted else positions(own[0].shape[2], comm.device)
            return rank.join(attention(*turned(own, places), is_causal=True), 2)

    inputs = list(torch.randn(3, 1, 2, 12, 4, dtype=torch.float64))
    expected = [attention(*turned(inputs, torch.arange(12)), is_causal=True)]
    assert largest_error([run_virtual(lambda comm: share(comm, False), 3)[0]], expected) < TOLERANCE
    assert largest_error([run_virtual(lambda comm: share(comm, True), 3)[0]], expected) > 1e-2


# What is refused.


def refusal(ask: Callable[[SequenceRank], Any], method: SequenceMethod = "ring", heads: int = 4) -> str:
    def share(comm: Communicator) -> None:
        with pytest.raises(UsageError) as caught:
            ask(SequenceRank(comm, split_sequence(method, comm.size, heads)))
        raise caught.value

    with pytest.raises(RankFailedError) as failed:
        run_virtual(share, 2)
    return str(failed.value)


def ask_attention(rank: SequenceRank, heads: int = 4, **asked: Any) -> Tensor:
    rank.begin(8, asked.pop("cut_by", None))
    with use_part(rank):
        return attention(*torch.randn(3, 1, heads, 4, 8), **asked)


STARTS = torch.tensor([[0, 0, 0, 3, 3, 3, 3, 3]])
REFUSED: dict[str, tuple[Callable[[SequenceRank], Any], str]] = {
    "a mask": (lambda rank: ask_attention(rank, mask=torch.ones(4, 8)), "by method ring"),
    "documents that were not cut by": (
        lambda rank: ask_attention(rank, documents=STARTS[:, :4]),
        "not given for cutting",
    ),
    "no documents": (lambda rank: ask_attention(rank, cut_by=STARTS), "documents not given for attention"),
    "documents counted in a rank": (
        lambda rank: ask_attention(rank, cut_by=STARTS, documents=torch.tensor([[0, 0, 2, 2]])),
        "counted in whole rows",
    ),
    "too short": (lambda rank: rank.begin(1), "a sequence of 1 tokens on 2 ranks"),
    "lengths that look alike": (lambda rank: rank.begin(8, beside=[9]), "pad both to one length"),
    "rows that were not cut": (lambda rank: rank.cut(torch.zeros(1, 9)), "no rows yet"),
    "a mask of whole rows": (lambda rank: ask_attention(rank, mask=torch.ones(8, 8)), "cut it along its queries"),
    "a mask and more": (lambda rank: ask_attention(rank, mask=torch.ones(4, 8), is_causal=True), "mask and is_causal"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused(name: str) -> None:
    ask, message = REFUSED[name]
    assert message in refusal(ask, "gather" if name == "a mask of whole rows" else "ring")


def test_heads_that_do_not_divide_are_refused() -> None:
    assert "3 heads on 2 ranks" in refusal(lambda rank: ask_attention(rank, heads=3), "ulysses")


@pytest.mark.parametrize(("documents", "is_causal"), [(None, True), (STARTS, False)])
def test_what_comes_first_in_another_sequence_is_not_known(documents: Tensor | None, is_causal: bool) -> None:
    def ask(rank: SequenceRank) -> None:
        rank.begin(8, documents, beside=[20])
        with use_part(rank):
            attention(torch.randn(1, 4, 4, 8), *torch.randn(2, 1, 4, 10, 8), is_causal=is_causal)

    assert "attention of 8 tokens on 20 others" in refusal(ask)


def test_numbers_of_documents_in_place_of_where_they_begin_are_refused() -> None:
    numbers = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]])
    with pytest.raises(UsageError, match=r"documents\[0\] = \[0, 0, 0, 1\] up to token 3: these are not places"):
        attention(*torch.randn(3, 1, 2, 8, 4), is_causal=True, documents=numbers)
    assert "documents[0] = [0, 0, 0, 1] up to token 3" in refusal(lambda rank: rank.begin(8, numbers))
    assert torch.equal(torch.searchsorted(numbers, numbers), STARTS)  # as the message says
