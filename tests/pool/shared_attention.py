"""Attention of whole rows, and the same by ranks that share them: outputs, gradients of queries, keys and values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from documents_alone import starts_of
from torch import Tensor

from paceline.comm.base import Call, Communicator, Work, WrappedCommunicator
from paceline.engines.sequence.part import SequenceRank
from paceline.models.attention import attention, use_part
from paceline.schedule.ring import Order, SequenceMethod, split_sequence


@dataclass(frozen=True, kw_only=True)
class AttentionCase:
    """What is drawn, and how attention is called. ``documents``: lengths of each row's."""

    length: int = 19
    keys: int = 0  # 0: attention of rows on themselves
    heads: int = 8
    kv_heads: int = 8
    width: int = 8
    is_causal: bool = True
    documents: tuple[tuple[int, ...], ...] = ()
    dropout: float = 0.0
    dtype: torch.dtype = torch.float64
    device: str = "cpu"
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert all(sum(row) == self.length for row in self.documents), "documents fill their rows"

    @property
    def batch(self) -> int:
        return len(self.documents) or 2

    def starts(self) -> Tensor | None:
        """Where the document of each token begins."""
        return starts_of(self.documents) if self.documents else None

    def draw(self) -> list[Tensor]:
        """Returns queries, keys, values and the gradient of the output: values that the dtype has, in float64."""
        generator = torch.Generator().manual_seed(0)
        keys = self.keys or self.length
        sizes = [(self.heads, self.length), (self.kv_heads, keys), (self.kv_heads, keys), (self.heads, self.length)]
        drawn = [torch.randn(self.batch, *size, self.width, generator=generator, dtype=torch.float64) for size in sizes]
        return [each.to(self.dtype).double() for each in drawn]


def attend_alone(case: AttentionCase) -> list[Tensor]:
    """Returns the output and the gradients in one process, in float64 on the CPU."""
    *inputs, gradient = case.draw()
    leaves = [each.requires_grad_() for each in inputs]
    out = attention(*leaves, is_causal=case.is_causal, documents=case.starts(), **case.options)
    return [each.detach() for each in (out, *torch.autograd.grad(out, leaves, gradient))]


def attend_together(
    comm: Communicator, case: AttentionCase, method: SequenceMethod, order: Order = "zigzag", seed: int = 0
) -> list[Tensor]:
    """Returns the same, of whole rows, as ranks have it that share them."""
    torch.manual_seed(seed)
    part = SequenceRank(comm, split_sequence(method, comm.size, case.heads, order=order))
    part.begin(case.length, case.starts(), beside=[case.keys] if case.keys else [])
    drawn = [each.to(case.device, case.dtype) for each in case.draw()]
    *leaves, gradient = [part.cut(each, 2).requires_grad_() for each in drawn]
    with use_part(part):
        asked = {"is_causal": case.is_causal, "documents": part.documents(), "dropout": case.dropout}
        out = attention(*leaves, **asked, **case.options)
        found = [out, *torch.autograd.grad(out, leaves, gradient)]
    return [part.join(each.detach(), 2).double().cpu() for each in found]


def largest_error(found: list[Tensor], expected: list[Tensor]) -> float:
    """Returns by how much any number is off, as a share of the largest one of its tensor."""
    pairs = zip(found, expected, strict=True)
    return max(float((ours - theirs).abs().max() / theirs.abs().max()) for ours, theirs in pairs)


class Noting(WrappedCommunicator):
    """Notes what is sent, of a group and of those split from it."""

    def __init__(self, inner: Communicator, sent: list[tuple[str, int]] | None = None) -> None:
        super().__init__(inner)
        self.sent = [] if sent is None else sent

    def issue(self, call: Call) -> Work:
        if call.kind == "all_to_all":
            assert call.splits is not None
            here = call.splits[1][self.rank] * call.tensor[:1].nbytes
            self.sent.append((call.kind, call.tensor.nbytes - here))
        elif call.kind != "recv":
            self.sent.append((call.kind, call.tensor.nbytes))
        return super().issue(call)

    def split(self, ranks: Any) -> Communicator:
        return Noting(self.inner.split(ranks), self.sent)


def what_is_sent(
    comm: Communicator, case: AttentionCase, method: SequenceMethod, documents: Tensor | None = None
) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """Returns what this rank sends in forward, and in backward: kind and bytes of each message to others."""
    noting = Noting(comm)
    rank = SequenceRank(noting, split_sequence(method, comm.size, case.heads))
    rank.begin(case.length, documents)
    leaves = [rank.cut(each, 2).to(case.device, case.dtype).requires_grad_() for each in case.draw()[:3]]
    with use_part(rank):
        out = attention(*leaves, is_causal=True, documents=rank.documents())
    forward = noting.sent[:]
    noting.sent.clear()
    out.sum().backward()
    return forward, noting.sent
