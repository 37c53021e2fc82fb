"""How the rows of a batch are cut among ranks that share each sequence, and which of their tokens meet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor

from paceline.comm.base import Communicator
from paceline.engines.sequence.exchange import pick_tokens
from paceline.engines.sequence.ring import RingCall
from paceline.models.block_attention import Block, Segments, Tokens
from paceline.models.document_attention import first_tokens
from paceline.schedule.ring import Meeting, Order, SequenceSplit, deal, documents_of, order_of, ring_schedule

Documents: TypeAlias = Mapping[int, tuple[int, int, int]]
"""Of a share, as ``documents_of`` says it; documents and tokens are counted through the rows of a batch."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """Rows of one length, and where their tokens are. How many a rank has depends on the length alone.

    Where there are documents, each row is cut in its own way, and a ring takes the rows of a batch behind one another.
    """

    length: int
    order: Order
    places: tuple[Tensor, ...]  # of each rank, (tokens,), or (batch, tokens) with documents
    shares: tuple[Documents, ...]  # of each rank of the ring; without documents all rows are alike
    documents: Tensor | None  # of all tokens, (batch, length): where their document begins
    own_documents: Tensor | None  # of this rank's tokens
    is_in_order: bool = False  # because of short documents: none reaches further than into the next share
    calls: dict[tuple[int, bool, bool, float], RingCall] = field(default_factory=dict)  # once they are asked for

    @property
    def counts(self) -> list[int]:
        """How many tokens of a row each rank has."""
        return [each.shape[-1] for each in self.places]


def cut_rows(length: int, split: SequenceSplit, rank: int, device: torch.device, documents: Tensor | None) -> Rows:
    """Cuts rows of one length; ``documents`` (batch, length) says for each token where its document begins."""
    starts = [[0]] if documents is None else [row.nonzero().flatten().tolist() for row in first_tokens(documents.cpu())]
    order = split.order if documents is None else order_of(length, split.ring, starts, split.order)
    places, shares = list[Tensor](), list[Documents]()
    for dealt in zip(*(deal(length, split.ring, order, each) for each in starts), strict=True):
        tokens, found = sum(len(chunk) for chunk, _ in dealt[0]), dict[int, tuple[int, int, int]]()
        for row, (share, begins) in enumerate(zip(dealt, starts, strict=True)):
            for start, (first, middle, last) in documents_of(share, begins).items():
                found[start + row * length] = first + row * tokens, middle + row * tokens, last + row * tokens
        shares.append(found)
        whole = [torch.cat([torch.arange(chunk.start, chunk.stop) for chunk, _ in share]) for share in dealt]
        own = (whole[0] if documents is None else torch.stack(whole)).to(device)
        places += own.tensor_split(split.ulysses, -1)
    documents = None if documents is None else documents.to(device)
    mine = None if documents is None else pick_tokens(documents, 1, places[rank])
    return Rows(
        length=length,
        order=order,
        places=tuple(places),
        shares=tuple(shares),
        documents=documents,
        own_documents=mine,
        is_in_order=order != split.order,
    )


def blocks_of(meets: Meeting, own: Documents, source: Documents) -> list[Block]:
    """Returns which queries of a share meet which keys of another one, document by document."""
    blocks = []
    for document in sorted(own.keys() & source.keys()) if meets != "nothing" else ():
        (first, middle, last), (begin, half, end) = own[document], source[document]
        queries = slice(middle if meets == "later_queries" else first, last)
        keys = slice(begin, half if meets == "first_keys" else end)
        if queries.start < queries.stop and keys.start < keys.stop:
            blocks.append(Block(queries, keys, meets == "diagonal"))
    return blocks


def ring_call(
    ring: Communicator, rows: Rows, of_keys: Rows, is_causal: bool, joins: bool, scale: float, device: torch.device
) -> RingCall:
    """Returns what a rank of a ring does in one attention; ``joins``: one kernel takes all blocks of a step."""
    steps = ring_schedule(ring.size, rows.order, is_causal=is_causal)[ring.rank]
    own, shares, travels = rows.shares[ring.rank], list(of_keys.shares), None
    tokens = [max(end for *_, end in share.values()) for share in shares]
    if is_causal and rows.is_in_order:
        steps, reached = steps[:2], [_reaching(*pair, device) for pair in zip(shares, [*shares[1:], {}], strict=True)]
        travels, shares[ring.rank - 1] = [each for each, _ in reached], reached[ring.rank - 1][1]
        tokens = [len(each) for each in travels]
    found = {step.source: blocks_of(step.meets, own, shares[step.source]) for step in steps}
    blocks = {source: join_blocks(each, device) if joins else each for source, each in found.items()}
    return RingCall(comm=ring, steps=steps, blocks=blocks, tokens=tokens, scale=scale, travels=travels)


def _reaching(own: Documents, after: Documents, device: torch.device) -> tuple[Tensor, Documents]:
    """Returns the tokens of a share whose document goes on in the next one, and these documents, counted in them."""
    tokens, counted = list[int](), dict[int, tuple[int, int, int]]()
    for document in sorted(own.keys() & after.keys()):
        first, _, last = own[document]
        counted[document] = len(tokens), len(tokens), len(tokens) + last - first
        tokens += range(first, last)
    return torch.tensor(tokens, dtype=torch.int64, device=device), counted


def join_blocks(blocks: Sequence[Block], device: torch.device) -> list[Block]:
    """Returns blocks as one, for a kernel that takes all of them; they are alike on the diagonal or off it."""
    if len(blocks) < 2:
        return list(blocks)
    queries, query_bounds, most_queries = _join([block.queries for block in blocks], device)
    keys, key_bounds, most_keys = _join([block.keys for block in blocks], device)
    segments = Segments(query_bounds, key_bounds, most_queries, most_keys)
    return [Block(queries, keys, blocks[0].is_diagonal, segments)]


def _join(pieces: Sequence[Any], device: torch.device) -> tuple[Tokens, Tensor, int]:
    """Returns the tokens of all slices, where each begins and ends among them, and the most of one."""
    sizes = [each.stop - each.start for each in pieces]
    bounds = torch.tensor([0, *accumulate(sizes)], dtype=torch.int32, device=device)
    if all(before.stop == after.start for before, after in pairwise(pieces)):
        return slice(pieces[0].start, pieces[-1].stop), bounds, max(sizes)
    return torch.cat([torch.arange(each.start, each.stop) for each in pieces]).to(device), bounds, max(sizes)
