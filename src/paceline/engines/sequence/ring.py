"""Attention on a ring: keys and values travel from rank to rank, the next ones while a rank computes on those it has.

With K + V of B bytes on each of N ranks, and gradients that add up in float32 at least, a rank sends in messages:

    forward     N-1 of B
    backward    N-1 of B, and N of the gradients of K and V, which follow them around and end where these are at home

Where documents are short and rows are cut in order, a rank sends the keys and values of its last document to the next
rank, gets their gradients back, and that is all.

What travels of two ranks differs in size where their shares do; everyone knows the sizes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from paceline.comm.base import Communicator, Work, unwatched
from paceline.models.block_attention import Block, Tokens, attend_block, block_gradients
from paceline.schedule.ring import RingStep

_KEYS, _GRADIENTS = 0, 1  # tags of messages


@dataclass(frozen=True, slots=True, kw_only=True)
class RingCall:
    """What a rank does in one attention: the steps of its schedule, and by source the blocks and how many tokens."""

    comm: Communicator
    steps: Sequence[RingStep]
    blocks: Mapping[int, Sequence[Block]]
    tokens: Sequence[int]
    scale: float
    travels: Sequence[Tensor] | None = None  # by source, the places of what is sent to the next rank alone; None: all

    def travel(self, pair: Tensor) -> Iterator[tuple[RingStep, Tensor, Tensor]]:
        """Yields each step with keys and values of its source, and what is on its way for the next one meanwhile."""
        for step in self.steps:
            arriving, works = pair, list[Work]()
            if step is not self.steps[-1]:
                sent = pair if self.travels is None else pair[:, :, self.travels[self.comm.rank]]
                arriving, works = self.pass_on(sent, step, _KEYS)
            yield step, pair, arriving
            _wait(works)
            pair = arriving

    def pass_on(self, sent: Tensor, step: RingStep, tag: int) -> tuple[Tensor, list[Work]]:
        """Sends (batch, heads, tokens, size) to the next rank, and receives what the next step is about from the last.

        After the last step, it goes home to its source. Where messages are carried out in the order of their issue,
        ranks that all sent first would wait in a circle: of those ``away`` apart, every second one receives first.
        """
        comm, is_last = self.comm, step is self.steps[-1]
        away, source = (step.number, comm.rank) if is_last else (-1, (step.source - 1) % comm.size)
        received = sent.new_empty(*sent.shape[:2], self.tokens[source], sent.shape[3])
        to, come = (comm.rank - away) % comm.size, (comm.rank + away) % comm.size
        ways = [
            (run, each, peer)
            for run, each, peer in ((comm.send, sent, to), (comm.recv, received, come))
            if each.numel()
        ]
        ordered = ways if comm.rank // abs(away) % 2 == 0 else ways[::-1]
        with unwatched():
            return received, [run(tensor, peer, tag) for run, tensor, peer in ordered]


class RingAttention(torch.autograd.Function):
    """Attention (batch, heads, queries, head_dim) of a rank's queries on the keys of all. All call it alike."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, call: RingCall) -> Tensor:
        ctx.call, widths = call, [key.shape[3], value.shape[3]]
        dtype = torch.promote_types(query.dtype, torch.float32)
        out = query.new_zeros(*query.shape[:3], value.shape[3], dtype=dtype)
        lse = query.new_full(query.shape[:3], -torch.inf, dtype=dtype)
        for step, pair, _ in call.travel(torch.cat((key, value), -1)):
            for block in call.blocks[step.source]:
                keys, values = torch.split(pair[:, :, block.keys], widths, -1)
                found = attend_block(block, call.scale, query[:, :, block.queries], keys, values)
                _merge(out, lse, block.queries, *found)
        result = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, result, lse)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        call: RingCall = ctx.call
        query, key, value, out, lse = ctx.saved_tensors
        grad = grad.contiguous()  # an expanded one has strides that no kernel takes
        own, widths = torch.cat((key, value), -1), [key.shape[3], value.shape[3]]
        of_query = torch.zeros_like(query, dtype=lse.dtype)
        of_pair, following = torch.zeros_like(own, dtype=lse.dtype), list[Work]()
        for step, pair, arriving in call.travel(own):
            found = list[tuple[Tokens, tuple[Tensor, ...]]]()
            for block in call.blocks[step.source]:
                keys, values = torch.split(pair[:, :, block.keys], widths, -1)
                mine = query[:, :, block.queries], keys, values
                others = out[:, :, block.queries], lse[:, :, block.queries], grad[:, :, block.queries]
                of_mine, *of_keys = block_gradients(block, call.scale, *mine, others)
                _add(of_query, block.queries, of_mine)
                found.append((block.keys, tuple(of_keys)))
            _wait(following)  # what the ranks before have added for this source
            for tokens, gradients in found:
                for total, each in zip(torch.split(of_pair, widths, -1), gradients, strict=True):
                    _add(total, tokens, each)
            if call.travels is not None and step is not call.steps[-1]:
                home, of_pair = of_pair, torch.zeros_like(arriving, dtype=lse.dtype)
            elif call.comm.size > 1:
                of_pair, following = call.pass_on(of_pair, step, _GRADIENTS)
        _wait(following)
        if call.travels is not None:
            of_pair = home.index_add_(2, call.travels[call.comm.rank], of_pair)
        of_key, of_value = torch.split(of_pair.to(key.dtype), widths, -1)
        return of_query.to(query.dtype), of_key, of_value, None


def _wait(works: list[Work]) -> None:
    with unwatched():
        while works:
            works.pop().wait()


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
