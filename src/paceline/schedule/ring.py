"""How ranks share each sequence: who holds which tokens, and the ring on which keys and values travel, as data.

Of N ranks of a ring each holds one share of every row. In zigzag order a row is cut into 2 N chunks, and rank r holds
chunks r and 2 N - 1 - r, so that causal attention is the same work for all in every step:

    8 chunks, held by the ranks      0 1 2 3 3 2 1 0

In step s, rank r has the keys and values of rank r - s, and sends them to rank r + 1 meanwhile. Of the chunk pairs it
computes those in which the keys come first: of later ranks' keys its later queries meet all, and of earlier ranks' all
its queries meet the first chunk. Chunks differ by at most one token, and so do the shares of a row. Packed documents
are cut so one by one, unless the work is even where the row is cut as a whole. Where none is longer than a share, a row
may be cut in order instead: of a share, the last document alone reaches into the next one, and nothing else travels.

A share may be held by several ranks, as neighbouring pieces of it: those exchange tokens for heads before the ring
(Ulysses). Rank numbers run through the pieces of a share first.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal, TypeAlias, get_args

from paceline.errors import UsageError

SequenceMethod: TypeAlias = Literal["ring", "ulysses", "both", "gather"]
Order: TypeAlias = Literal["zigzag", "contiguous"]
SEQUENCE_METHODS: tuple[SequenceMethod, ...] = get_args(SequenceMethod)
ORDERS: tuple[Order, ...] = get_args(Order)
Meeting: TypeAlias = Literal["all", "diagonal", "first_keys", "later_queries", "nothing"]
"""Which of a rank's queries meet which keys: on the diagonal, those up to their own place."""
Share: TypeAlias = list[tuple[range, bool]]
"""The places of a rank of the ring in a row, in order: its chunks, and whether each is the later of two."""
_UNEVEN = 1.05  # the most work of a rank over the mean, up to which packed rows are cut as a whole
_KEYS_OF_A_PASS = 1024  # that all queries of a rank meet while keys and values travel on once, between GPUs of a node


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSplit:
    """How ranks share each sequence: ``ring`` shares of each row, each of them held by ``ulysses`` ranks."""

    method: SequenceMethod
    ring: int
    ulysses: int = 1
    order: Order = "zigzag"

    @property
    def ranks(self) -> int:
        return self.ring * self.ulysses


def split_sequence(
    method: SequenceMethod, ranks: int, heads: int, *, order: Order = "zigzag", node_ranks: int = 0
) -> SequenceSplit:
    """Returns how a method spreads sequences over ranks. Raises UsageError where heads do not divide among them.

    ``both`` makes the largest Ulysses groups among which there is a ring, and which lie inside a node.
    """
    if method in ("ring", "gather"):
        return SequenceSplit(method=method, ring=ranks, order=order)
    sizes = ulysses_sizes(ranks, heads)
    if method == "both":
        node = node_ranks or ranks
        ulysses = max(size for size in sizes if size == 1 or (size < ranks and node % size == 0))
        return SequenceSplit(method=method, ring=ranks // ulysses, ulysses=ulysses, order=order)
    if ranks not in sizes:
        raise UsageError(
            f"method ulysses with {heads} heads on {ranks} ranks for each sequence\n"
            "  each rank takes as many whole heads as the others: the ranks divide the heads\n"
            f"  take {max(sizes)} ranks, or method ring"
        )
    return SequenceSplit(method=method, ring=1, ulysses=ranks, order=order)


def ulysses_sizes(ranks: int, heads: int) -> list[int]:
    """Returns of how many ranks a Ulysses group may be, the smallest first."""
    return [size for size in range(1, ranks + 1) if ranks % size == 0 and heads % size == 0]


def deal(length: int, ranks: int, order: Order = "zigzag", documents: Sequence[int] = ()) -> list[Share]:
    """Cuts a row for each rank of a ring; ``documents`` are the places where documents begin, in order."""
    if order == "contiguous" or ranks == 1:
        return [[(each, False)] for each in _pieces(length, ranks)]
    whole = _zigzag(ranks, (0, length))
    if len(documents) < 2:
        return whole
    works = _works(whole, documents)
    return whole if max(works) * ranks <= _UNEVEN * sum(works) else _zigzag(ranks, (*documents, length))


def order_of(length: int, ranks: int, rows: Sequence[Sequence[int]], order: Order = "zigzag") -> Order:
    """Returns in which order packed rows are cut, all of a batch alike; each row says where its documents begin."""
    share = length // ranks
    if ranks < 3 or any(end - start > share for row in rows for start, end in pairwise((*row, length))):
        return order
    shares = deal(length, ranks, "contiguous")
    works = [sum(each) for each in zip(*(_works(shares, row) for row in rows), strict=True)]
    more = (max(works) - sum(works) / ranks) / (share * len(rows))  # keys of a query, on the rank with the most work
    return "contiguous" if more <= _KEYS_OF_A_PASS * (ranks - 1) else order


def _pieces(length: int, number: int) -> list[range]:
    size, more = divmod(length, number)
    bounds = accumulate((size + (place < more) for place in range(number)), initial=0)
    return [range(*each) for each in pairwise(bounds)]


def _zigzag(ranks: int, bounds: Sequence[int]) -> list[Share]:
    """Deals the 2 N chunks of each part of a row. Tokens that are left over go to one rank after another."""
    shares: list[Share] = [[] for _ in range(ranks)]
    turn = 0
    for start, end in pairwise(bounds):
        size, more = divmod(end - start, 2 * ranks)
        place = start
        for chunk in range(2 * ranks):
            rank, is_later = min(chunk, 2 * ranks - 1 - chunk), chunk >= ranks
            has_left_over = (rank - turn) % ranks + ranks * is_later < more
            shares[rank].append((range(place, place := place + size + has_left_over), is_later))
        turn = (turn + more) % ranks
    return shares


def _works(shares: Sequence[Share], documents: Sequence[int]) -> list[int]:
    """Returns how many keys the queries of each share meet, in causal attention inside documents."""
    ended = list(accumulate((_triangle(end - start) for start, end in pairwise(documents)), initial=0))

    def before(place: int) -> int:
        document = max(bisect_left(documents, place) - 1, 0)
        return ended[document] + _triangle(place - documents[document])

    return [sum(before(each.stop) - before(each.start) for each, _ in share) for share in shares]


def _triangle(length: int) -> int:
    return length * (length + 1) // 2


def documents_of(share: Share, documents: Sequence[int]) -> dict[int, tuple[int, int, int]]:
    """Returns which documents have tokens in a share: by where they begin in the row, where these begin in the share.

    Of three numbers, the first two are where its tokens begin in the earlier chunk and in the later one, and the third
    is where they end. What a share has of a document lies together: in between, it has all that there is.
    """
    found: dict[int, tuple[int, int, int]] = {}
    count = 0
    for chunk, is_later in share:
        place = chunk.start
        while place < chunk.stop:
            number = bisect_right(documents, place)
            end = min(documents[number] if number < len(documents) else chunk.stop, chunk.stop)
            begin, _, last = found.get(documents[number - 1], (count, count, count))
            count, place = count + end - place, end
            found[documents[number - 1]] = (begin, last if is_later else count, count)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class RingStep:
    """One step of one rank: whose keys and values it has, and what it computes. It passes them on but in the last."""

    number: int
    rank: int
    source: int
    meets: Meeting
    chunk_pairs: tuple[tuple[int, int], ...]  # of queries and keys; two equal ones are a half, on the diagonal

    @property
    def work(self) -> float:
        """What is computed, in chunk pairs; of one on the diagonal, half."""
        is_half = self.meets == "diagonal"
        return sum(0.5 if is_half and query == key else 1.0 for query, key in self.chunk_pairs)


def ring_schedule(ranks: int, order: Order = "zigzag", *, is_causal: bool = True) -> list[list[RingStep]]:
    """Returns the steps of each rank, as many as there are ranks."""
    return [
        [_step(number, rank, (rank - number) % ranks, ranks, order, is_causal=is_causal) for number in range(ranks)]
        for rank in range(ranks)
    ]


def _step(number: int, rank: int, source: int, ranks: int, order: Order, *, is_causal: bool) -> RingStep:
    meets: Meeting = "all"
    if is_causal and source == rank:
        meets = "diagonal"
    elif is_causal and order == "zigzag":
        meets = "first_keys" if source < rank else "later_queries"
    elif is_causal and source > rank:
        meets = "nothing"
    queries, keys = (chunks_of(each, ranks, order) for each in (rank, source))
    pairs = tuple((query, key) for query in queries for key in keys if key <= query or not is_causal)
    return RingStep(number=number, rank=rank, source=source, meets=meets, chunk_pairs=pairs)


def chunks_of(rank: int, ranks: int, order: Order) -> tuple[int, ...]:
    """Returns the chunks of a row that a rank holds, of 2 N in zigzag order and of N in the other."""
    return (rank, 2 * ranks - 1 - rank) if order == "zigzag" else (rank,)


def render_ring(ranks: int, order: Order = "zigzag", *, is_causal: bool = True) -> str:
    """Returns the schedule as text: a row a rank, a column a step, in each cell the chunk pairs that are computed."""
    rows = ring_schedule(ranks, order, is_causal=is_causal)
    cells = [
        [f"rank {row[0].rank}: {' '.join(map(str, chunks_of(row[0].rank, ranks, order)))}"]
        + [f"kv {step.source}: {' '.join(_pair(step, *pair) for pair in step.chunk_pairs) or '-'}" for step in row]
        for row in rows
    ]
    cells.insert(0, ["chunks", *(f"step {number}" for number in range(ranks))])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    work = [[step.work for step in row] for row in rows]
    longest = sum(map(max, zip(*work, strict=True)))
    share = sum(map(sum, work)) / (ranks * longest)
    legend = "kv 3: 7-4 7/7 is: with keys and values of rank 3, queries of chunk 7 meet keys of chunk 4, and half of 7"
    head = f"{order}, {'causal' if is_causal else 'not causal'}: each rank computes {share:.0%} of the time"
    return "\n".join([head, legend, "", *lines])


def _pair(step: RingStep, query: int, key: int) -> str:
    return f"{query}/{key}" if step.meets == "diagonal" and query == key else f"{query}-{key}"
