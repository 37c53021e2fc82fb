"""What attention over several ranks costs besides computing, and the way of sharing sequences that costs the least.

With l tokens on each of N ranks, K + V of B bytes each, compute of C seconds in forward and 2.5 C in backward:

    ring       (N-1) max(0, send(B) - C/N)  +  N max(0, send(B) + send(gradients of B) - 2.5 C/N)
    ulysses    all-to-all of Q, K, V and the output, in forward and in backward
    both       the ring of N/U ranks, with K and V of U ranks that have 1/U of the heads each; and all-to-all among U
    gather     an all-gather of K and V, and their gradients back; and what the mask of causal attention leaves undone

Gradients of K and V travel in four bytes at least.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import gcd
from typing import TypeAlias

from paceline.cluster.kernels import ATTENTION_BACKWARD
from paceline.plan.layout import Layout
from paceline.schedule.ring import SequenceMethod, SequenceSplit, split_sequence, ulysses_sizes

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
    pair = 2 * work.bytes(heads // size, split.ring)
    links = [(rank, ranks[(place + size) % len(ranks)]) for place, rank in enumerate(ranks)]
    keys = max(cost("send", pair, link) for link in links)
    gradients = max(cost("send", pair * max(4, work.itemsize) // work.itemsize, link) for link in links)
    step_s = work.compute_s / split.ring
    forward = (split.ring - 1) * max(0.0, keys - step_s)
    return exchanged + forward, exchanged + split.ring * max(0.0, keys + gradients - ATTENTION_BACKWARD * step_s)


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
