"""How ranks share each sequence: who holds which tokens, and the ring on which keys and values travel, as data.

Of N ranks of a ring each holds one share of every row, all as many tokens, but for one. In zigzag order a row is cut
into 2 N chunks, and rank r holds chunks r and 2 N - 1 - r, so that causal attention is the same work for all in every
step:

    8 chunks, held by the ranks      0 1 2 3 3 2 1 0

In step s, rank r has the keys and values of rank r - s. Of the chunk pairs it computes those in which the keys come
first: of later ranks' keys its later queries meet all, and of earlier ranks' all its queries meet the first chunk. A
row that is one document goes around: in each step, a rank sends what it has to rank r + 1.

Packed documents are dealt one by one, the longest first. One with more work than a share should have is cut in zigzag,
for as few shares as can be; the others go whole to the share with the least work so far that has room. The last ones,
the shortest, fill the shares, and some are cut in order for that. Keys and values of whole documents do not travel;
those of the others are sent in step s straight to rank r + s, as far as its queries come after them.

A share may be held by several ranks, as neighbouring pieces of it: those exchange tokens for heads before the ring
(Ulysses). Rank numbers run through the pieces of a share first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple, TypeAlias, get_args

from paceline.errors import UsageError

SequenceMethod: TypeAlias = Literal["ring", "ulysses", "both", "gather"]
Order: TypeAlias = Literal["zigzag", "contiguous"]
SEQUENCE_METHODS: tuple[SequenceMethod, ...] = get_args(SequenceMethod)
ORDERS: tuple[Order, ...] = get_args(Order)
Meeting: TypeAlias = Literal["all", "diagonal", "first_keys", "later_queries", "nothing"]
"""Which of a rank's queries meet which keys: on the diagonal, those up to their own place."""
_KEYS_OF_A_PASS = 1024  # that a query meets while keys and values of a token travel, between GPUs of a node
_MOST = (1, 2, 3, 4, 6, 8)  # of a document in a share, in quarters of a share's mean work: one of these is taken
_LIGHT = 8  # a document with less than this part of that is cut in order, if it must be


@dataclass(frozen=True, slots=True)
class Part:
    """What a share has of a document: pieces of the row in order, which follow one another in the share."""

    document: int  # where it begins in the row
    pieces: tuple[range, ...]
    begin: int  # in the share
    is_whole: bool = False

    @property
    def tokens(self) -> int:
        return sum(map(len, self.pieces))

    @property
    def places(self) -> slice:
        return slice(self.begin, self.begin + self.tokens)

    def moved(self, places: int, tokens: int) -> Part:
        """Returns the same part where so many places of rows, and tokens of the rank, come before."""
        return replace(self, document=self.document + places, begin=self.begin + tokens)


Share: TypeAlias = list[Part]
"""The tokens of a rank of the ring in a row, in their order on the rank: documents of several ranks come first."""


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
            f"  take {max(sizes)} rank{'s' if max(sizes) > 1 else ''}, or method ring"
        )
    return SequenceSplit(method=method, ring=1, ulysses=ranks, order=order)


def ulysses_sizes(ranks: int, heads: int) -> list[int]:
    """Returns of how many ranks a Ulysses group may be, the smallest first."""
    return [size for size in range(1, ranks + 1) if ranks % size == 0 and heads % size == 0]


def deal(length: int, ranks: int, order: Order = "zigzag") -> list[Share]:
    """Cuts a row that is one document for each rank of a ring."""
    cut = _zigzag if order == "zigzag" else _in_order
    return [[Part(0, pieces, 0)] for pieces in cut(0, _sizes(length, ranks))]


def deal_documents(length: int, ranks: int, rows: Sequence[Sequence[int]]) -> list[list[Share]]:
    """Cuts each packed row of a batch for each rank; a row says where its documents begin, in order.

    Of several ways, in which fewer or more documents are cut, the one that takes the least time is taken.
    """
    documents = [
        (end - start, row, start) for row, starts in enumerate(rows) for start, end in pairwise((*starts, length))
    ]
    documents.sort(key=lambda each: (-each[0], *each[1:]))
    works = [_triangle(tokens) for tokens, *_ in documents]
    dealers = list[_Dealer]()
    for most in (max(1, quarters * sum(works) // (4 * ranks)) for quarters in _MOST):
        dealers.append(_Dealer(length, ranks, len(rows)))
        for document in documents:
            dealers[-1].deal(*document, most=most)
        if most >= works[0]:  # with more, all would be dealt alike
            break
    return min(dealers, key=_Dealer.cost).shares()


class _Dealer:
    """Deals documents to ranks, and counts what attention inside them takes."""

    def __init__(self, length: int, ranks: int, rows: int) -> None:
        self.rooms = [_sizes(length, ranks) for _ in range(rows)]
        self.works = [0] * ranks  # pairs of a query and a key
        self.arriving = [0] * ranks  # keys of other ranks
        self.dealt = [[list[Part]() for _ in range(ranks)] for _ in range(rows)]

    def deal(self, tokens: int, row: int, start: int, *, most: int) -> None:
        """Deals a document to shares, none of which gets more work by it than ``most`` if there is room."""
        rooms, work = self.rooms[row], _triangle(tokens)
        most_ranks = min(len(rooms), tokens)
        if work <= most and (whole := [rank for rank, room in enumerate(rooms) if room >= tokens]):
            self._give(row, start, [min(whole, key=self.works.__getitem__)], [(range(start, start + tokens),)])
            return
        for number in range(min(most_ranks, -(-work // most)), most_ranks + 1):
            sizes = _sizes(tokens, number)
            fit = sorted((self.works[rank], rank) for rank, room in enumerate(rooms) if room >= sizes[-1])[:number]
            ranks = sorted((rank for _, rank in fit), key=lambda rank: -rooms[rank])
            if len(ranks) == number and all(rooms[rank] >= size for rank, size in zip(ranks, sizes, strict=True)):
                self._give(row, start, ranks, _zigzag(start, sizes))
                return
            if work * _LIGHT < most:
                break
        found, left = list[tuple[int, int]](), tokens
        for room, rank in sorted(((room, rank) for rank, room in enumerate(rooms)), reverse=True):
            found.append((min(room, left), rank))
            left -= found[-1][0]
        found = sorted(each for each in found if each[0])  # of the smallest piece alone, the keys travel far
        self._give(row, start, [rank for _, rank in found], _in_order(start, [size for size, _ in found]))

    def _give(self, row: int, start: int, ranks: Sequence[int], cut: Sequence[tuple[range, ...]]) -> None:
        for rank, pieces in zip(ranks, cut, strict=True):
            part = Part(start, pieces, 0, len(ranks) == 1)
            self.dealt[row][rank].append(part)
            self.rooms[row][rank] -= part.tokens
            self.works[rank] += sum(_triangle(each.stop - start) - _triangle(each.start - start) for each in pieces)
            self.arriving[rank] += pieces[-1].stop - start - part.tokens

    def cost(self) -> int:
        return max(self.works) + _KEYS_OF_A_PASS * max(self.arriving)

    def shares(self) -> list[list[Share]]:
        return [
            [_placed(sorted(parts, key=lambda part: (part.is_whole, part.document))) for parts in row]
            for row in self.dealt
        ]


def _placed(parts: Sequence[Part]) -> Share:
    """Returns parts behind one another."""
    begins = accumulate((part.tokens for part in parts), initial=0)
    return [replace(part, begin=begin) for part, begin in zip(parts, begins, strict=False)]


def _sizes(tokens: int, number: int) -> list[int]:
    size, more = divmod(tokens, number)
    return [size + (place < more) for place in range(number)]


def _in_order(start: int, sizes: Sequence[int]) -> list[tuple[range, ...]]:
    return [(range(*each),) for each in pairwise(accumulate(sizes, initial=start))]


def _zigzag(start: int, sizes: Sequence[int]) -> list[tuple[range, ...]]:
    """Cuts an early and a late chunk for each size; the late ones in the opposite order."""
    early = _in_order(start, [size // 2 for size in sizes])
    late = _in_order(early[-1][0].stop, [size - size // 2 for size in reversed(sizes)])[::-1]
    return [tuple(each for each in (*first, *last) if each) for first, last in zip(early, late, strict=True)]


def _triangle(length: int) -> int:
    return length * (length + 1) // 2


class Meet(NamedTuple):
    """Of a document that two shares have: what the first one's queries need of the other's keys."""

    own: Part
    other: Part
    keys: int  # from the other part's beginning, that travel
    pairs: list[tuple[range, int]]  # queries, counted in their share, and how many of these keys they meet


def meets_of(own: Sequence[Part], other: Sequence[Part], is_causal: bool = True) -> list[Meet]:
    """Returns what queries of a share meet of another one's keys."""
    parts, found = {part.document: part for part in other}, list[Meet]()
    for part in own:
        if part.document in parts and (pairs := _pairs(part, parts[part.document], is_causal)):
            found.append(Meet(part, parts[part.document], pairs[-1][1], pairs))
    return found


def _pairs(own: Part, other: Part, is_causal: bool) -> list[tuple[range, int]]:
    found, end = list[tuple[range, int]](), own.begin
    for piece in own.pieces:
        keys = sum(len(each) for each in other.pieces if each.start < piece.start or not is_causal)
        begin, end = end, end + len(piece)
        if found and found[-1][1] == keys:
            begin = found.pop()[0].start
        found.append((range(begin, end), keys))
    return [(queries, keys) for queries, keys in found if keys]


def cut_parts(share: Share) -> Share:
    """Returns the parts of documents that other ranks have parts of, counted among these tokens alone."""
    return _placed([part for part in share if not part.is_whole])


def halves_of(share: Share) -> tuple[list[Part], list[Part]]:
    """Returns parts of a share with at most half of its own work, and the others.

    In backward a rank computes the first ones while keys come to it, and the others while gradients are on their way.
    """
    works = [_triangle(part.tokens) for part in share]
    number = sum(2 * work <= sum(works) for work in accumulate(works))
    return share[:number], share[number:]


def sent_ahead(sizes: Sequence[int], most: int) -> list[int]:
    """Returns how many messages were sent when a rank computes on what it has, on the first one, and so on.

    One more than it needs, and more while those that it does not need yet have ``most`` tokens together.
    """
    found, sent = list[int](), 0
    for number in range(len(sizes) + 1):
        while sent < len(sizes) and (sent <= number or sum(sizes[number : sent + 1]) <= most):
            sent += 1
        found.append(sent)
    return found


def tokens_of(parts: Sequence[Part]) -> int:
    return sum(part.tokens for part in parts)


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
