"""What attention over several ranks costs besides computing, and the way of sharing sequences that costs the least.

With l tokens on each of N ranks, K + V of B bytes each, compute of C seconds in forward and 2.5 C in backward:

    ring       N-1 messages of B in forward; in backward N-1 of B and N-1 of their gradients; what computing does not
               hide
    ulysses    all-to-all of Q, K, V and the output, in forward and in backward
    both       the ring of N/U ranks, with K and V of U ranks that have 1/U of the heads each; and all-to-all among U
    gather     an all-gather of K and V, and their gradients back; and what the mask of causal attention leaves undone

Gradients of K and V travel in four bytes at least. Of packed documents, that of a ring travels which the engine sends
(schedule/ring.py), and ranks wait for the one with the most work.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from math import gcd
from typing import NamedTuple, TypeAlias

from paceline.cluster.kernels import ATTENTION_BACKWARD
from paceline.plan.layout import Layout
from paceline.schedule.ring import (
    SequenceMethod,
    SequenceSplit,
    cut_parts,
    deal_documents,
    halves_of,
    meets_of,
    sent_ahead,
    split_sequence,
    tokens_of,
    ulysses_sizes,
)

WireCost: TypeAlias = Callable[[str, int, tuple[int, ...]], float]  # of a kind, bytes and the ranks of a group


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionWork:
    """One attention of the model, over whole rows, and how long a rank computes its share of it in forward."""

    batch: int
    tokens: int  # of a row
    heads: int
    kv_heads: int
    width: int  # of a head
    itemsize: int
    compute_s: float
    is_causal: bool = True
    documents: tuple[int, ...] = (0,)  # where they begin in a row, which do not see one another

    def bytes(self, heads: int, ranks: int) -> int:
        """Returns the bytes of one of Q, K, V and the output on one of so many ranks."""
        return self.batch * -(-self.tokens // ranks) * heads * self.width * self.itemsize


def sequence_seconds(work: AttentionWork, split: SequenceSplit, ranks: Sequence[int], cost: WireCost) -> float:
    """Returns how long ``ranks`` wait for one another in one attention, forward and backward."""
    return sum(sequence_waits(work, split, ranks, cost))


def sequence_waits(
    work: AttentionWork, split: SequenceSplit, ranks: Sequence[int], cost: WireCost
) -> tuple[float, float]:
    """Returns how long ``ranks`` wait for one another in the forward of one attention, and in its backward."""
    size = split.ulysses
    if split.method == "gather":
        whole = 2 * work.bytes(work.kv_heads, 1)
        undone = work.compute_s if work.is_causal else 0.0
        forward = undone + cost("all_gather", whole, tuple(ranks))
        return forward, ATTENTION_BACKWARD * undone + cost("reduce_scatter", whole, tuple(ranks))
    heads = work.kv_heads * size // gcd(work.kv_heads, size)
    exchanged = 0.0
    if size > 1:
        groups = [tuple(ranks[first : first + size]) for first in range(0, len(ranks), size)]
        for each in (work.heads, heads, heads, work.heads):
            num_bytes = work.bytes(each, len(ranks))
            exchanged += max(cost("all_to_all", num_bytes, group) for group in groups)
    if split.ring == 1:
        return exchanged, exchanged
    links = [(rank, ranks[(place + size) % len(ranks)]) for place, rank in enumerate(ranks)]
    token_bytes = 2 * work.batch * (heads // size) * work.width

    latency_s = max(cost("send", 1, link) for link in links)

    @cache
    def send(itemsize: int, tokens: int) -> float:
        """Returns what the bytes of a message take."""
        return max(cost("send", tokens * token_bytes * itemsize, link) for link in links) - latency_s if tokens else 0.0

    forward, backward = _ring_waits(work, split.ring, latency_s, send)
    return exchanged + forward, exchanged + backward


class _Turn(NamedTuple):
    """What a rank computes on keys of another one, in means of all its work, for how many tokens keys come and go."""

    work: float
    arriving: int
    sent: int


class _Load(NamedTuple):
    """What a rank computes on its own keys, in two parts, and then in turns."""

    own: tuple[float, float]
    turns: Sequence[_Turn]


class _Wire(NamedTuple):
    """What messages between ranks of a ring take: before their bytes, and for keys and values, or their gradients."""

    latency_s: float
    keys: Callable[[int], float]
    gradients: Callable[[int], float]
    is_shared: bool  # messages are for several ranks at once: what each takes before its bytes is not in others' way

    def after(self, free: float, now: float, seconds: float) -> float:
        """Returns when the bytes of one more message have moved, where the wire is free from some time on."""
        begin = max(free, now + self.latency_s) if self.is_shared else max(free, now) + self.latency_s
        return begin + seconds if seconds else free


def _ring_waits(
    work: AttentionWork, size: int, latency_s: float, send: Callable[[int, int], float]
) -> tuple[float, float]:
    """Returns by how much the last rank ends later than one with the mean work that waits for nothing."""
    is_packed, back_s = len(work.documents) > 1, ATTENTION_BACKWARD * work.compute_s
    if is_packed:
        loads, ahead = _packed_loads(work, size)
    else:
        tokens = -(-work.tokens // size)
        loads = [_Load((1 / size, 0.0), [_Turn(1 / size, tokens, tokens)] * (size - 1))]
        ahead = [*range(1, size), size - 1]
    wire = _Wire(latency_s, partial(send, work.itemsize), partial(send, max(4, work.itemsize)), is_packed)
    forward = max(_end(load, ahead, work.compute_s, wire) for load in loads)
    backward = max(_end(load, ahead, back_s, wire, is_back=True) for load in loads)
    return max(0.0, forward - work.compute_s), max(0.0, backward - back_s)


def _end(load: _Load, ahead: Sequence[int], compute_s: float, wire: _Wire, *, is_back: bool = False) -> float:
    """Returns when a rank has computed, and all has come and gone."""
    now, come, gone, arrivals = 0.0, 0.0, 0.0, list[float]()
    first, last = load.own if is_back else (sum(load.own), 0.0)
    for number, sent in enumerate(ahead):
        for turn in load.turns[len(arrivals) : sent]:
            come = wire.after(come, now, wire.keys(turn.arriving))
            gone = wire.after(gone, now, wire.keys(turn.sent))
            arrivals.append(come if turn.arriving else 0.0)
        turn = load.turns[number - 1] if number else _Turn(first, 0, 0)
        now = max(now, arrivals[number - 1] if number else 0.0) + turn.work * compute_s
        if is_back:
            come = wire.after(come, now, wire.gradients(turn.sent))
            gone = wire.after(gone, now, wire.gradients(turn.arriving))
    return max(now + last * compute_s, come, gone)


def _packed_loads(work: AttentionWork, size: int) -> tuple[list[_Load], list[int]]:
    """Returns the loads of ranks by the engine's deal, and of how many turns messages are sent ahead."""
    (shares,) = deal_documents(work.tokens, size, [work.documents])
    cuts = [cut_parts(share) for share in shares]
    owns = [
        [sum(part.tokens * (part.tokens + 1) // 2 for part in half) for half in halves_of(share)] for share in shares
    ]
    turns, sizes = [list[_Turn]() for _ in shares], list[int]()
    for away in range(1, size):
        meets = [meets_of(cuts[rank], cuts[rank - away]) for rank in range(size)]
        if any(meets):
            tokens = [sum(meet.keys for meet in each) for each in meets]
            sizes.append(max(tokens))
            for rank, each in enumerate(meets):
                pairs = sum(len(queries) * keys for meet in each for queries, keys in meet.pairs)
                turns[rank].append(_Turn(pairs, tokens[rank], tokens[(rank + away) % size]))
    mean = (sum(map(sum, owns)) + sum(turn.work for each in turns for turn in each)) / size
    loads = [
        _Load((own[0] / mean, own[1] / mean), [turn._replace(work=turn.work / mean) for turn in each])
        for own, each in zip(owns, turns, strict=True)
    ]
    return loads, sent_ahead(sizes, max(map(tokens_of, shares)))


def typical_documents(tokens: int, mean: int, seed: int = 0) -> tuple[int, ...]:
    """Returns where documents begin in a row whose lengths are spread as those of texts are (lognormal, sigma 1)."""
    drawn, starts = random.Random(seed), [0]  # nosec B311  # lengths of texts
    while (end := starts[-1] + max(64, int(drawn.lognormvariate(0, 1) * mean / 1.65))) < tokens:
        starts.append(end)
    return tuple(starts)


def share_of_pairs(tokens: int, documents: Sequence[int]) -> float:
    """Returns how much of attention in whole rows there is inside documents."""
    return sum((end - start) ** 2 for start, end in pairwise((*documents, tokens))) / tokens**2


def choose_split(work: AttentionWork, ranks: Sequence[int], cost: WireCost, node_ranks: int = 0) -> SequenceSplit:
    """Returns the split with the least waits, of those that a method makes: Ulysses, a ring of such groups, a ring.

    Of equals that with the larger groups: a rank has fewer, longer rows to compute on. ``node_ranks``: neighbours in a
    node, of which groups of a ring are.
    """
    number = len(ranks)
    methods: list[SequenceMethod] = ["ulysses"] if number in ulysses_sizes(number, work.heads) else []
    splits = [split_sequence(each, number, work.heads, node_ranks=node_ranks) for each in (*methods, "both", "ring")]
    return min(splits, key=lambda split: sequence_seconds(work, split, ranks, cost))


def sequence_split(work: AttentionWork, layout: Layout, ranks: Sequence[int], cost: WireCost) -> SequenceSplit:
    """Returns how a layout's ranks share sequences: by its method, or by the one with the least waits."""
    node_ranks = max(1, layout.node_ranks // layout.tensor)
    if layout.context_method == "auto":
        return choose_split(work, ranks, cost, node_ranks)
    return split_sequence(layout.context_method, layout.context_ranks, work.heads, node_ranks=node_ranks)
