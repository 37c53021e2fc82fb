"""What a rank knows that shares each sequence with others: its part of the rows, and how attention reaches the rest.

    method     sends in forward, with l tokens on each of N ranks                 holds besides its own
    ring       N-1 times its K and V, while it computes                           K and V of another rank
    ulysses    (N-1)/N of its Q, K, V and output, before it computes and after    nothing
    both       Ulysses in groups of neighbours, and a ring among these
    gather     N-1 times its K and V, before it computes                          all K and V, a mask of l x N l

Where there are fewer heads of keys than ranks of a Ulysses group, as many are made of them as the ranks need.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from math import gcd
from typing import Any, Unpack, cast

import torch
from torch import Tensor

from paceline.comm.base import Communicator
from paceline.engines.sequence.exchange import exchange, gather_tokens, pick_tokens
from paceline.engines.sequence.ring import RingAttention
from paceline.engines.sequence.rows import Rows, cut_rows, ring_call
from paceline.errors import UsageError
from paceline.models.attention import Asked
from paceline.models.block_attention import attend_dropped, takes_segments
from paceline.models.document_attention import attend_documents, attend_masked, repeat_heads
from paceline.schedule.ring import SequenceSplit


class SequenceRank:
    """One of the ranks that share each sequence: a ``SequencePart`` (models/attention.py).

    Whoever has a batch calls ``begin`` on all ranks with the same lengths and documents, then ``cut``. What attention
    is asked then is about these rows; a copy may be about others. Dropout of weights takes the way of ``gather``: it
    goes by places, equal for any number of ranks that draw alike from torch's generator of the CPU.
    """

    def __init__(self, comm: Communicator, split: SequenceSplit, *, is_compiled: bool = False) -> None:
        """Makes the groups of the ring and of Ulysses. All ranks call it; ``is_compiled``: models that call it are."""
        if comm.size != split.ranks:
            raise UsageError(f"{split} on a group of {comm.size} ranks: it is for {split.ranks}")
        share, piece = divmod(comm.rank, split.ulysses)
        self.comm, self.split = comm, split
        self._ulysses = comm.split(range(share * split.ulysses, (share + 1) * split.ulysses))
        self._ring = comm.split(range(piece, comm.size, split.ulysses))
        self._rows: list[Rows] = []
        self.is_asked, self.is_placed = False, is_compiled  # whether a model called attention; may know positions
        # No compiler follows a conversation between ranks. Not bound: a copy has rows of its own.
        self._attend: Any = cast("Any", torch.compiler).disable(type(self)._ask) if is_compiled else type(self)._ask

    def begin(self, length: int, documents: Tensor | None = None, *, beside: Sequence[int] = ()) -> None:
        """Cuts rows of ``length`` tokens; ``beside`` are lengths of other sequences of the model, an encoder's say.

        ``documents`` are those of the whole rows, as ``attention`` takes them. They are read on the host. Raises
        UsageError for rows shorter than the ranks, and for lengths that ranks could not tell apart by their tokens.
        """
        ranks, found = self.comm.size, list[Rows]()
        for each in dict.fromkeys((length, *beside)):
            if each < ranks:
                what = f"a sequence of {each} tokens on {ranks} ranks"
                rule = "each rank holds one token or more of it"
                raise UsageError(f"{what}\n  {rule}\n  take fewer ranks for a sequence, or longer ones")
            own = documents if each == length else None
            found.append(cut_rows(each, self.split, self.comm.rank, self.comm.device, own))
            if any(set(found[-1].counts) & set(other.counts) for other in found[:-1]):
                what = f"sequences of {length} and {each} tokens beside one another, on {ranks} ranks"
                rule = "ranks tell sequences apart by how many tokens of each they have"
                fix = f"pad both to one length, or one of them by {2 * ranks} tokens"
                raise UsageError(f"{what}\n  {rule}\n  {fix}")
        self._rows = found

    def length(self, tokens: int) -> int:
        return self._of(tokens).length

    def cut(self, tensor: Tensor, dim: int = 1) -> Tensor:
        """Returns this rank's tokens of whole rows, along ``dim``; the first dim is that of the batch."""
        rows = _found({each.length: each for each in self._rows}, tensor.shape[dim])
        return pick_tokens(tensor, dim, rows.places[self.comm.rank])

    def join(self, tensor: Tensor, dim: int = 1) -> Tensor:
        """Returns whole rows of what each rank has for its tokens: the inverse of ``cut``. All ranks call it."""
        return self._join(self._of(tensor.shape[dim]), tensor, dim)

    def _join(self, rows: Rows, tensor: Tensor, dim: int) -> Tensor:
        order = torch.cat(rows.places, -1).argsort(-1)
        return pick_tokens(gather_tokens(self.comm, rows.counts, tensor, dim), dim, order)

    def positions(self, length: int, device: torch.device) -> Tensor:
        if not torch.compiler.is_compiling():
            self.is_placed = True
        return self._of(length).places[self.comm.rank].to(device)

    def documents(self) -> Tensor | None:
        return self._rows[0].own_documents if self._rows else None

    def _of(self, tokens: int) -> Rows:
        return _found({each.counts[self.comm.rank]: each for each in self._rows}, tokens)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **asked: Unpack[Asked]) -> Tensor:
        return cast("Tensor", self._attend(self, query, key, value, asked))

    def _ask(self, query: Tensor, key: Tensor, value: Tensor, asked: Asked) -> Tensor:
        self.is_asked = True
        rows, of_keys = (self._of(each.shape[2]) for each in (query, key))
        check_asked(asked, rows, of_keys, self.split, query.shape[1])
        device = query.device.type
        plain: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if device != "meta" and torch.is_autocast_enabled(device):
            if query.dtype != torch.float64:  # as autocast does for SDPA
                query, key, value = (each.to(torch.get_autocast_dtype(device)) for each in (query, key, value))
            plain = torch.autocast(device, enabled=False)
        with plain:
            return self._attend_rows(query, key, value, rows, of_keys, asked)

    def _attend_rows(
        self, query: Tensor, key: Tensor, value: Tensor, rows: Rows, of_keys: Rows, asked: Asked
    ) -> Tensor:
        comm, ring, is_causal = self._ulysses, self._ring, asked["is_causal"]
        scale = query.shape[3] ** -0.5 if asked["scale"] is None else asked["scale"]
        if asked["dropout"] or self.split.method == "gather":
            return self._attend_gathered(query, key, value, rows, of_keys, asked, scale)
        first, heads = ring.rank * comm.size, key.shape[1] * comm.size // gcd(key.shape[1], comm.size)
        counts, others = (each.counts[first : first + comm.size] for each in (rows, of_keys))
        key, value = repeat_heads(key, heads), repeat_heads(value, heads)
        query, key, value = exchange(comm, (counts, others, others), query, key, value, to_heads=True)
        if ring.size == 1:
            mixed = attend_documents(query, key, value, rows.documents, is_causal, scale=scale)
        else:
            mixed = self._attend_on_ring(query, key, value, rows, of_keys, is_causal, scale)
        return exchange(comm, (counts,), mixed, to_heads=False)[0]

    def _attend_on_ring(
        self, query: Tensor, key: Tensor, value: Tensor, rows: Rows, of_keys: Rows, is_causal: bool, scale: float
    ) -> Tensor:
        is_flat, batch = rows.documents is not None, len(query)
        kept = of_keys.length, is_causal, takes_segments(query), scale
        if kept not in rows.calls:
            rows.calls[kept] = ring_call(self._ring, rows, of_keys, *kept[1:], query.device)
        if is_flat:  # the tokens of all rows behind one another
            query, key, value = (each.transpose(0, 1).flatten(1, 2)[None] for each in (query, key, value))
        mixed: Tensor = RingAttention.apply(query, key, value, rows.calls[kept])  # type: ignore[no-untyped-call]
        return mixed.view(mixed.shape[1], batch, -1, mixed.shape[3]).transpose(0, 1) if is_flat else mixed

    def _attend_gathered(
        self, query: Tensor, key: Tensor, value: Tensor, rows: Rows, of_keys: Rows, asked: Asked, scale: float
    ) -> Tensor:
        mask, dropout = asked["mask"], asked["dropout"]
        key, value = self._join(of_keys, key, 2), self._join(of_keys, value, 2)
        own, places = rows.places[self.comm.rank], torch.arange(of_keys.length, device=query.device)
        masks = [] if mask is None else [mask]
        if asked["is_causal"]:
            masks.append(own.view(-1, 1, query.shape[2], 1) >= places)
        if mask is None and rows is of_keys and rows.documents is not None and rows.own_documents is not None:
            masks.append(rows.own_documents[:, None, :, None] == rows.documents[:, None, None])
        mask = masks[0] & masks[1] if len(masks) > 1 else next(iter(masks), None)
        if not dropout:
            return attend_masked(query, key, value, mask, False, dropout, scale)
        queries = rows.length * torch.arange(len(query), device=own.device)[:, None] + own
        return attend_dropped(query, key, value, mask, dropout, scale, queries)


def check_asked(asked: Asked, rows: Rows, of_keys: Rows, split: SequenceSplit, heads: int) -> None:
    """Raises UsageError for what the method cannot do, and for what is not about the rows that were cut."""
    mask, documents, known = asked["mask"], asked["documents"], rows.own_documents
    is_fit = mask is None or (mask.shape[-1] == of_keys.length and mask.shape[-2] in (1, *rows.counts))
    if mask is not None and (split.method != "gather" or not is_fit):
        raise UsageError(
            f"attention with a mask {list(mask.shape)} on rows of {of_keys.length} tokens, by method {split.method}\n"
            "  a mask or bias is for a rank's queries and all keys, which method gather alone brings together\n"
            "  cut it along its queries and take method gather, or say is_causal and documents without a mask"
        )
    if heads % split.ulysses:
        raise UsageError(
            f"attention with {heads} heads on {split.ulysses} ranks that share them out\n"
            "  each takes as many whole heads as the others\n  take method ring, or fewer ranks for a sequence"
        )
    if rows is not of_keys and (asked["is_causal"] or rows.documents is not None or of_keys.documents is not None):
        raise UsageError(
            f"attention of {rows.length} tokens on {of_keys.length} others, causal or with rows cut by documents\n"
            "  what comes first, and which documents there are, is known inside one sequence\n"
            "  leave out is_causal, and give rows without packed documents"
        )
    is_known = documents is known or (documents is None and mask is not None)
    if not is_known and (documents is None or known is None or not torch.equal(documents, known)):
        given = ["not given" if each is None else "given" for each in (documents, known)]
        raise UsageError(
            f"documents {given[0]} for attention, and {given[1]} for cutting the rows; or others\n"
            "  attention stays inside the documents by which rows were cut, counted in whole rows\n"
            "  pass those of the whole rows where they are cut, and what documents() returns then to attention"
        )


def _found(rows: Mapping[int, Rows], tokens: int) -> Rows:
    if tokens in rows:
        return rows[tokens]
    raise UsageError(
        f"{tokens} tokens of each row on this rank, where there are {', '.join(map(str, rows)) or 'no rows yet'}\n"
        "  ranks share the rows that were cut among them, whole and in part\n"
        "  cut all that has something for each token, before the model is called"
    )
