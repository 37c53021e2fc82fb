"""Attention on a ring: keys and values travel from rank to rank, the next ones while a rank computes on those it has.

With K + V of B bytes on each of N ranks, and gradients that add up in float32 at least, a rank sends in messages:

    forward     N-1 of B
    backward    N-1 of B, and N-1 of the gradients of K and V, which follow them around and end where these are at home

Of packed documents, a rank sends the keys and values that a rank needs straight to it, and gets their gradients back:
of those documents alone of which both have a part. Messages are as many as ranks with which it shares documents, and
everyone knows their sizes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from paceline.comm.base import Communicator, Work, unwatched
from paceline.models.block_attention import Block, Tokens, attend_block, block_gradients

_KEYS, _GRADIENTS = 0, 1  # tags of messages
UnderWay: TypeAlias = tuple[Tensor, list[Work]]


@dataclass(frozen=True, slots=True)
class Turn:
    """What a rank computes on keys and values of the rank that is so far away, and how many tokens of these come."""

    blocks: Sequence[Block]
    away: int
    arriving: int
    sent: Tokens  # to the rank that is as far away on the other side


@dataclass(frozen=True, slots=True)
class RingCall:
    """What a rank does in one attention. Blocks of turns count tokens among those that are ``cut``."""

    comm: Communicator
    scale: float
    own: tuple[Sequence[Block], Sequence[Block]]  # in backward, the second ones are computed while gradients travel
    turns: Sequence[Turn]
    ahead: Sequence[
        int
    ]  # how many turns' messages were sent when a rank computes on its own keys, in the first turn ...
    cut: Tokens  # those whose documents other ranks have parts of
    passes_on: bool = False  # to the next rank what came from the last one

    def travel(self, own: Tensor) -> Iterator[tuple[Turn | None, Tensor]]:
        """Yields at first the own keys and values, and then each turn with those of its source."""
        pair, under_way, sent = own, deque[UnderWay](), 0
        for number, last in enumerate(self.ahead):
            for turn in self.turns[sent:last]:
                given, away = (pair, 1) if self.passes_on else (own[:, :, turn.sent], turn.away)
                under_way.append(self.swap(given, turn.arriving, away, _KEYS))
            sent = last
            yield self.turns[number - 1] if number else None, pair
            if under_way:
                pair = _arrived(under_way.popleft())

    def swap(self, sent: Tensor, arriving: int, away: int, tag: int) -> UnderWay:
        """Sends (batch, heads, tokens, size) so many ranks further, and receives from as many ranks before.

        Where messages are carried out in the order of their issue, ranks that all sent first would wait in a circle: of
        those ``away`` apart, every second one receives first.
        """
        rank, size = self.comm.rank, self.comm.size
        sent = sent.contiguous()
        received = sent.new_empty(*sent.shape[:2], arriving, sent.shape[3])
        ways = [
            (run, each, peer % size)
            for run, each, peer in ((self.comm.send, sent, rank + away), (self.comm.recv, received, rank - away))
            if each.numel()
        ]
        ordered = ways if rank // abs(away) % 2 == 0 else ways[::-1]
        with unwatched():
            return received, [run(tensor, peer, tag) for run, tensor, peer in ordered]

    def bring_home(self, gradients: Tensor, turn: Turn) -> UnderWay:
        """Sends gradients of a turn's keys and values home, or to the next rank, which adds to them; receives such."""
        is_between = self.passes_on and turn.away < len(self.turns)
        arriving = self.turns[turn.away].arriving if is_between else _count(turn.sent)
        return self.swap(gradients, arriving, 1 if self.passes_on else -turn.away, _GRADIENTS)


class RingAttention(torch.autograd.Function):
    """Attention (batch, heads, queries, head_dim) of a rank's queries on the keys of all. All call it alike."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, call: RingCall) -> Tensor:
        ctx.call, widths, cut = call, [key.shape[3], value.shape[3]], call.cut
        dtype = torch.promote_types(query.dtype, torch.float32)
        out = query.new_empty(*query.shape[:3], value.shape[3])
        lse = query.new_empty(query.shape[:3], dtype=dtype)
        for turn, pair in call.travel(torch.cat((key[:, :, cut], value[:, :, cut]), -1)):
            if turn is None:
                for block in chain(*call.own):
                    own = query[:, :, block.queries], key[:, :, block.keys], value[:, :, block.keys]
                    out[:, :, block.queries], lse[:, :, block.queries] = attend_block(block, call.scale, *own)
                far, far_out, far_lse = query[:, :, cut], out[:, :, cut].to(dtype), lse[:, :, cut]
                continue
            for block in turn.blocks:
                keys, values = torch.split(pair[:, :, block.keys], widths, -1)
                found = attend_block(block, call.scale, far[:, :, block.queries], keys, values)
                _merge(far_out, far_lse, block.queries, *found)
        if call.turns:
            out[:, :, cut], lse[:, :, cut] = far_out.to(out.dtype), far_lse
        ctx.save_for_backward(query, key, value, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        call: RingCall = ctx.call
        query, key, value, out, lse = ctx.saved_tensors
        grad = grad.contiguous()  # an expanded one has strides that no kernel takes
        cut, widths = call.cut, [key.shape[3], value.shape[3]]
        found = [torch.empty_like(each) for each in (query, key, value)]

        def own(blocks: Sequence[Block]) -> None:
            for block in blocks:
                mine = query[:, :, block.queries], key[:, :, block.keys], value[:, :, block.keys]
                others = out[:, :, block.queries], lse[:, :, block.queries], grad[:, :, block.queries]
                places = block.queries, block.keys, block.keys
                gradients = block_gradients(block, call.scale, *mine, others)
                for total, tokens, each in zip(found, places, gradients, strict=True):
                    total[:, :, tokens] = each.to(total.dtype)

        far, far_out, far_lse, far_grad = (each[:, :, cut] for each in (query, out, lse, grad))
        pair = torch.cat((key[:, :, cut], value[:, :, cut]), -1)
        of_query, of_pair = (torch.zeros_like(each, dtype=lse.dtype) for each in (far, pair))
        coming = deque[tuple[Turn, UnderWay]]()
        for turn, theirs in call.travel(pair):
            if turn is None:
                own(call.own[0])
                continue
            gradients = torch.zeros_like(theirs, dtype=lse.dtype)
            for block in turn.blocks:
                keys, values = torch.split(theirs[:, :, block.keys], widths, -1)
                at = block.queries
                these = far_out[:, :, at], far_lse[:, :, at], far_grad[:, :, at]
                mine, *of_keys = block_gradients(block, call.scale, far[:, :, block.queries], keys, values, these)
                _add(of_query, block.queries, mine)
                for total, each in zip(torch.split(gradients, widths, -1), of_keys, strict=True):
                    _add(total, block.keys, each)
            if call.passes_on and coming:  # what the ranks before have added for this source
                gradients += _arrived(coming.popleft()[1])
            coming.append((turn, call.bring_home(gradients, turn)))
            _take(coming, of_pair, key.shape[2])
        own(call.own[1])
        _take(coming, of_pair, 0)
        for total, more in zip(found, (of_query, *torch.split(of_pair, widths, -1)), strict=True):
            total[:, :, cut] = (total[:, :, cut] + more).to(total.dtype)
        return *found, None


def _take(coming: deque[tuple[Turn, UnderWay]], total: Tensor, most: int) -> None:
    """Adds gradients that others sent, the first ones first, until what is to come has at most so many tokens."""
    while coming and sum(_count(turn.sent) for turn, _ in coming) > most:
        turn, gradients = coming.popleft()
        _add(total, turn.sent, _arrived(gradients))


def _arrived(under_way: UnderWay) -> Tensor:
    received, works = under_way
    with unwatched():
        while works:
            works.pop().wait()
    return received


def _count(tokens: Tokens) -> int:
    return tokens.stop - tokens.start if isinstance(tokens, slice) else len(tokens)


def _add(total: Tensor, tokens: Tokens, found: Tensor) -> None:
    if isinstance(tokens, slice):
        total[:, :, tokens].add_(found)
    else:
        total.index_add_(2, tokens, found.to(total.dtype))


def _merge(out: Tensor, lse: Tensor, tokens: Tokens, found: Tensor, found_lse: Tensor) -> None:
    """Adds the result on more keys to that of some queries, in the dtype of sums: both weights add up to 1."""
    found_lse = found_lse.to(lse.dtype)
    both = torch.logaddexp(lse[:, :, tokens], found_lse)
    merged = out[:, :, tokens].lerp_(found.to(out.dtype), (found_lse - both).exp_()[..., None])
    if not isinstance(tokens, slice):  # else it is in place
        out[:, :, tokens] = merged
    lse[:, :, tokens] = both
