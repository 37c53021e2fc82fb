"""How the rows of a batch are cut among ranks that share each sequence, and which of their tokens meet."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from paceline.comm.base import Communicator
from paceline.engines.sequence.exchange import pick_tokens
from paceline.engines.sequence.ring import RingCall, Turn
from paceline.models.block_attention import Block, join_blocks, numbers_of, places_of
from paceline.models.document_attention import first_tokens
from paceline.schedule.ring import (
    Meet,
    SequenceSplit,
    Share,
    cut_parts,
    deal,
    deal_documents,
    halves_of,
    meets_of,
    sent_ahead,
    tokens_of,
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """Rows of one length, and where their tokens are. How many a rank has depends on the length alone.

    Where there are documents, each row is cut in its own way, and a ring takes the rows of a batch behind one another:
    its documents and tokens are counted through them.
    """

    length: int
    places: tuple[Tensor, ...]  # of each rank, (tokens,), or (batch, tokens) with documents
    shares: tuple[Share, ...]  # of each rank of the ring; without documents all rows are alike
    documents: Tensor | None  # of all tokens, (batch, length): where their document begins
    own_documents: Tensor | None  # of this rank's tokens
    calls: dict[tuple[int, bool, bool, float], RingCall] = field(default_factory=dict)  # once they are asked for

    @property
    def counts(self) -> list[int]:
        """How many tokens of a row each rank has."""
        return [each.shape[-1] for each in self.places]


def cut_rows(length: int, split: SequenceSplit, rank: int, device: torch.device, documents: Tensor | None) -> Rows:
    """Cuts rows of one length; ``documents`` (batch, length) says for each token where its document begins."""
    if documents is None:
        dealt = [deal(length, split.ring, split.order)]
    else:
        starts = [row.nonzero().flatten().tolist() for row in first_tokens(documents.cpu())]
        dealt, documents = deal_documents(length, split.ring, starts), documents.to(device)
    places, shares = list[Tensor](), list[Share]()
    for rows in zip(*dealt, strict=True):
        whole = [numbers_of([each for part in share for each in part.pieces], device) for share in rows]
        own = whole[0] if documents is None else torch.stack(whole)
        places += own.tensor_split(split.ulysses, -1)
        tokens = own.shape[-1]
        shares.append([part.moved(row * length, row * tokens) for row, share in enumerate(rows) for part in share])
    mine = None if documents is None else pick_tokens(documents, 1, places[rank])
    return Rows(length=length, places=tuple(places), shares=tuple(shares), documents=documents, own_documents=mine)


def ring_call(
    ring: Communicator, rows: Rows, of_keys: Rows, is_causal: bool, joins: bool, scale: float, device: torch.device
) -> RingCall:
    """Returns what a rank of a ring does in one attention; ``joins``: one kernel takes all blocks of a turn."""
    if rows.documents is not None:
        return _packed_call(ring, rows.shares, is_causal, joins, scale, device)
    own, shares, size = rows.shares[ring.rank], of_keys.shares, ring.size
    home = slice(0, tokens_of(shares[ring.rank]))
    turns = [
        Turn(_blocks(meets_of(own, source, is_causal)), away, tokens_of(source), home)
        for away, source in ((each, shares[ring.rank - each]) for each in range(1, size))
    ]
    mine = Block(slice(0, tokens_of(own)), home, is_causal)
    return RingCall(ring, scale, ([mine], []), turns, [*range(1, size), size - 1], slice(None), True)


def _packed_call(
    ring: Communicator, shares: Sequence[Share], is_causal: bool, joins: bool, scale: float, device: torch.device
) -> RingCall:
    """Returns the same for packed documents, where what others need of those that were cut goes straight to them."""

    def joined(blocks: list[Block]) -> list[Block]:
        return join_blocks(blocks, device) if joins else blocks

    rank, size, cuts = ring.rank, ring.size, [cut_parts(share) for share in shares]
    turns, sizes = list[Turn](), list[int]()
    for away in range(1, size):
        meets = [meets_of(cuts[each], cuts[each - away], is_causal) for each in range(size)]
        if not any(meets):
            continue
        sizes.append(max(sum(meet.keys for meet in each) for each in meets))
        to = [slice(meet.other.begin, meet.other.begin + meet.keys) for meet in meets[(rank + away) % size]]
        begins = accumulate((meet.keys for meet in meets[rank]), initial=0)
        blocks = joined(_blocks(meets[rank], begins))
        turns.append(Turn(blocks, away, sum(meet.keys for meet in meets[rank]), places_of(to, device)))
    halves = halves_of(shares[rank]) if turns else (shares[rank], [])
    own = [joined([Block(part.places, part.places, is_causal) for part in half]) for half in halves]
    cut = places_of([part.places for part in shares[rank] if not part.is_whole], device)
    ahead = sent_ahead(sizes, max(map(tokens_of, shares)))
    return RingCall(ring, scale, (own[0], own[1]), turns, ahead, cut)


def _blocks(meets: Sequence[Meet], begins: Iterable[int] = itertools.repeat(0)) -> list[Block]:
    """Returns which queries meet which keys of another share; ``begins``: where keys of each document do there."""
    return [
        Block(slice(queries.start, queries.stop), slice(begin, begin + keys), False)
        for meet, begin in zip(meets, begins, strict=False)
        for queries, keys in meet.pairs
    ]
