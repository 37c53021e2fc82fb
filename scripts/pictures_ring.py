"""Pictures of lesson 10: who computes which pairs of a query and a key in ring attention, and how long that takes.

The places of each rank are those of ``paceline.schedule.ring``, by which the engine cuts sequences and deals documents.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate, pairwise

from paceline.schedule.ring import Order, Share, deal, deal_documents
from pictures_svg import MARGIN, WIDTH, Picture

RANKS, TOKENS = 4, 8  # a token of the picture is a chunk of a sequence
COLOURS, TURNS = "abcd", ("", "s3", "s2", "s1")
_CELL = 25.0
_SIDE = TOKENS * _CELL
_ROW = 20.0
DOCUMENTS = (13, 4, 3, 8, 2, 10, 3, 5)  # tokens of each, in a row


def owners(order: Order) -> list[int]:
    """Returns the rank of each chunk."""
    shares = deal(TOKENS, RANKS, order)
    rank_of = {chunk: rank for rank, (part,) in enumerate(shares) for piece in part.pieces for chunk in piece}
    return [rank_of[chunk] for chunk in range(TOKENS)]


def turns(order: Order) -> list[list[float]]:
    """Returns for each rank what it computes in each turn, in whole pairs of chunks; a chunk with itself is a half."""
    found, of = [[0.0] * RANKS for _ in range(RANKS)], owners(order)
    for query in range(TOKENS):
        for key in range(query + 1):
            found[of[query]][(of[query] - of[key]) % RANKS] += 0.5 if key == query else 1.0
    return found


def draw_ring_attention() -> str:
    """Draws ring-attention.svg."""
    picture = Picture(
        f"Ring attention: {RANKS} ranks share one sequence",
        "A row is a query, a column a key, and a causal query sees the keys up to its own place. The colour is the "
        "rank that computes a pair. The paler it is, the later is the turn of the ring in which the rank has the keys.",
        "paceline.schedule.ring",
    )
    legend = [(COLOURS[rank], f"rank {rank}") for rank in range(RANKS)]
    paler = [(f"g {TURNS[turn]}".strip(), f"turn {turn + 1}") for turn in range(RANKS)]
    y = picture.legend(MARGIN, picture.top + 8, [*legend, *paler])
    orders: tuple[tuple[Order, str], ...] = (("contiguous", "contiguous order"), ("zigzag", "zigzag order"))
    half = (WIDTH - 2 * MARGIN) / 2
    for place, (order, name) in enumerate(orders):
        left = MARGIN + place * half
        picture.text(left + 44, y + 14, name, "name ink")
        _draw_pairs(picture, left + 44, y + 26, order)
    top = y + 26 + _SIDE + 48
    scale = (WIDTH - 2 * MARGIN - 52) / sum(map(max, zip(*turns("contiguous"), strict=True)))
    for order, name in orders:
        top = _draw_time(picture, top, order, name, scale)
    return picture.svg(top)


def _draw_pairs(picture: Picture, x: float, y: float, order: Order) -> None:
    of = owners(order)
    for query in range(TOKENS):
        top = y + query * _CELL
        picture.text(x - 8, top + 17, f"rank {of[query]}", "tiny soft end")
        for key in range(query + 1):
            kinds = f"{COLOURS[of[query]]} {TURNS[(of[query] - of[key]) % RANKS]}".strip()
            if key < query:
                picture.box(x + key * _CELL, top, _CELL - 1, _CELL - 1, kinds)
            else:
                picture.triangle(x + key * _CELL, top, _CELL - 1, kinds)
    picture.text(x + _SIDE / 2, y + _SIDE + 16, "keys", "tiny soft mid")


def _draw_time(picture: Picture, y: float, order: Order, name: str, scale: float) -> float:
    """Draws a row for each rank: what it computes in each turn, and in grey how long it waits."""
    works = turns(order)
    longest = [max(turn) for turn in zip(*works, strict=True)]
    words = f"{sum(longest):g} units of time; evenly shared they would be {sum(map(sum, works)) / RANKS:g}"
    picture.text(MARGIN, y, name, "name ink")
    picture.text(WIDTH - MARGIN, y, words, "small soft end")
    left = MARGIN + 52
    for rank, mine in enumerate(works):
        top, x = y + 10 + rank * _ROW, left
        picture.text(MARGIN, top + 13, f"rank {rank}", "tiny soft")
        for turn, work in enumerate(mine):
            colour = f"{COLOURS[rank]} {TURNS[turn]}".strip()
            for begin, end, kinds in ((0.0, work, colour), (work, longest[turn], "none")):
                if end > begin:
                    picture.box(x + begin * scale, top, (end - begin) * scale - 1, _ROW - 3, kinds)
            x += longest[turn] * scale
    return y + 10 + RANKS * _ROW + 30


def row_shares() -> dict[str, list[Share]]:
    """Returns the shares of a packed row, cut as one text and dealt document by document."""
    tokens, starts = sum(DOCUMENTS), [0, *accumulate(DOCUMENTS[:-1])]
    return {
        "the row in zigzag order": deal(tokens, RANKS),
        "documents one by one": deal_documents(tokens, RANKS, [starts])[0],
    }


def token_ranks(shares: Sequence[Share]) -> list[int]:
    """Returns the rank of each token of the row."""
    rank_of = {
        token: rank for rank, share in enumerate(shares) for part in share for each in part.pieces for token in each
    }
    return [rank_of[token] for token in range(sum(DOCUMENTS))]


def document_pairs(of: Sequence[int]) -> list[tuple[int, int]]:
    """Returns all pairs of a query and a key: those of one document, keys first."""
    assert len(of) == sum(DOCUMENTS)
    starts = [0, *accumulate(DOCUMENTS)]
    return [
        (query, key)
        for start, end in pairwise(starts)
        for query in range(start, end)
        for key in range(start, query + 1)
    ]


def work_and_keys(of: Sequence[int]) -> list[tuple[int, int, int]]:
    """Returns for each rank its pairs with own keys, those with others' keys, and how many others' keys it needs."""
    found = []
    for rank in range(RANKS):
        mine = [(query, key) for query, key in document_pairs(of) if of[query] == rank]
        others = [key for _, key in mine if of[key] != rank]
        found.append((len(mine) - len(others), len(others), len(set(others))))
    return found


def draw_document_deal() -> str:
    """Draws document-deal.svg."""
    picture = Picture(
        f"Packed documents: {RANKS} ranks share one row",
        "A row is a query, a column a key, and attention stays inside each document. The colour is the rank that "
        "computes a pair; it is paler where another rank has the key, which must travel.",
        "paceline.schedule.ring",
    )
    y = picture.legend(MARGIN, picture.top + 8, [(COLOURS[rank], f"rank {rank}") for rank in range(RANKS)])
    ways = {name: token_ranks(shares) for name, shares in row_shares().items()}
    half, cell = (WIDTH - 2 * MARGIN) / 2, 6.5
    side = cell * sum(DOCUMENTS)
    for place, (name, of) in enumerate(ways.items()):
        left = MARGIN + place * half
        picture.text(left, y + 14, name, "name ink")
        _draw_documents(picture, left, y + 26, cell, of)
    top = y + 26 + side + 48
    scale = (WIDTH - 2 * MARGIN - 52 - 170) / max(
        own + others for of in ways.values() for own, others, _ in work_and_keys(of)
    )
    for name, of in ways.items():
        top = _draw_work(picture, top, name, of, scale)
    return picture.svg(top)


def _draw_documents(picture: Picture, x: float, y: float, cell: float, of: Sequence[int]) -> None:
    boxes = defaultdict[str, list[tuple[float, float, float, float]]](list)
    for query, key in document_pairs(of):
        kinds = COLOURS[of[query]] + ("" if of[key] == of[query] else " s1")
        boxes[kinds].append((x + key * cell, y + query * cell, cell - 1, cell - 1))
    for kinds, places in sorted(boxes.items()):
        picture.boxes(places, kinds)
    picture.text(x + cell * len(of) / 2, y + cell * len(of) + 16, "keys", "tiny soft mid")


def _draw_work(picture: Picture, y: float, name: str, of: Sequence[int], scale: float) -> float:
    """Draws a row for each rank: its pairs, and how many keys come to it from other ranks."""
    found = work_and_keys(of)
    most, mean = max(own + others for own, others, _ in found), len(document_pairs(of)) / RANKS
    picture.text(MARGIN, y, name, "name ink")
    picture.text(
        WIDTH - MARGIN, y, f"the slowest rank computes {most} pairs; evenly shared: {mean:g}", "small soft end"
    )
    for rank, (own, others, keys) in enumerate(found):
        top, left = y + 10 + rank * _ROW, MARGIN + 52
        picture.text(MARGIN, top + 13, f"rank {rank}", "tiny soft")
        for begin, width, kinds in ((0, own, COLOURS[rank]), (own, others, f"{COLOURS[rank]} s1")):
            if width:
                picture.box(left + begin * scale, top, width * scale - 1, _ROW - 3, kinds)
        words = "needs no key of another rank" if not keys else f"needs {keys} key{'s' * (keys > 1)} of other ranks"
        picture.text(left + (own + others) * scale + 8, top + 13, words, "tiny soft")
    return y + 10 + RANKS * _ROW + 30
