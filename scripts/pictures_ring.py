"""Picture of lesson 10: who computes which pairs of a query and a key in ring attention, and how long the turns take.

The places of each rank are those of ``paceline.schedule.ring``, by which the engine cuts sequences.
"""

from __future__ import annotations

from paceline.schedule.ring import Order, deal
from pictures_svg import MARGIN, WIDTH, Picture

RANKS, TOKENS = 4, 8  # a token of the picture is a chunk of a sequence
COLOURS, TURNS = "abcd", ("", "s3", "s2", "s1")
_CELL = 25.0
_SIDE = TOKENS * _CELL
_ROW = 20.0


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
