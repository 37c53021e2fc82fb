"""Picture of lesson 11: tokens, what a router chooses, rows on their way to the ranks of their experts, and back.

Tokens and router are small and drawn by a seed; an all-to-all on virtual ranks carries the tokens' numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paceline import run_virtual
from paceline.comm.base import Communicator
from pictures_svg import MARGIN, WIDTH, Picture

RANKS, EXPERTS, TOKENS = 2, 4, 6  # tokens of a rank
COLOURS = "abcd"
_CELL, _STEP, _SEED = 34.0, 62.0, 6
_ROWS = (
    "tokens, and the expert that the router chose",
    "sorted by expert",
    "after the all-to-all",
    "back, in the first order",
)


@dataclass(frozen=True, slots=True)
class Journey:
    """The numbers of the tokens on one rank, in each of the rows of the picture."""

    own: list[int]
    by_expert: list[int]
    arrived: list[int]
    home: list[int]


def choices() -> list[int]:
    """Returns the expert of each token of all ranks."""
    generator = torch.Generator().manual_seed(_SEED)
    tokens = torch.randn(RANKS * TOKENS, 8, generator=generator)
    router = torch.randn(EXPERTS, 8, generator=generator)
    return [int(each) for each in (tokens @ router.T).argmax(-1)]


def travel(comm: Communicator) -> Journey:
    """Sends the numbers of this rank's tokens to the ranks of their experts, and brings them back."""
    chosen = torch.tensor(choices()).chunk(comm.size)[comm.rank]
    own = torch.arange(TOKENS) + comm.rank * TOKENS
    order = chosen.argsort(stable=True)
    counts = chosen.bincount(minlength=EXPERTS)
    arriving = torch.empty_like(counts)
    comm.all_to_all(arriving, counts).wait()
    sent, taken = (each.view(comm.size, -1).sum(1).tolist() for each in (counts, arriving))
    arrived, back = own.new_empty(sum(taken)), torch.empty_like(own)
    comm.all_to_all(arrived, own[order], taken, sent).wait()
    comm.all_to_all(back, arrived, sent, taken).wait()
    home = torch.empty_like(own)
    home[order] = back
    return Journey(*(each.tolist() for each in (own, own[order], arrived, home)))


def draw_experts() -> str:
    """Draws experts.svg."""
    picture = Picture(
        f"Experts over ranks: {EXPERTS} experts on {RANKS} ranks",
        "A square is a token, in the colour of its expert. Rank 0 holds experts 0 and 1, rank 1 experts 2 and 3. "
        "Pieces differ in size: the ranks exchange the counts first, and one has more rows than the other.",
        "an all-to-all on virtual ranks",
    )
    y = picture.legend(MARGIN, picture.top + 8, [(COLOURS[each], f"expert {each}") for each in range(EXPERTS)]) + 14
    journeys, half = run_virtual(travel, ranks=RANKS), (WIDTH - 2 * MARGIN) / RANKS
    places: list[dict[int, float]] = []
    for row in range(len(_ROWS)):
        top = y + row * (_CELL + _STEP) + 22
        places.append({})
        for rank, journey in enumerate(journeys):
            tokens = (journey.own, journey.by_expert, journey.arrived, journey.home)[row]
            left = MARGIN + rank * half + 8 + (40 if rank else 0)
            for place, token in enumerate(tokens):
                places[row][token] = left + place * _CELL
            _draw_row(picture, left, top, tokens)
            if row == 0:
                picture.text(left, top - 26, f"rank {rank}", "name ink")
    for row in range(len(_ROWS) - 1):
        top = y + row * (_CELL + _STEP) + 22 + _CELL
        for token, x in places[row].items():
            kinds = "wire" if abs(x - places[row + 1][token]) < half / 2 else "wire red"
            picture.line(x + _CELL / 2, top + 2, places[row + 1][token] + _CELL / 2, top + _STEP - 2, kinds)
    for row, words in enumerate(_ROWS):  # above the lines
        picture.text(MARGIN, y + row * (_CELL + _STEP) + 14, words, "small soft halo")
    return picture.svg(y + len(_ROWS) * (_CELL + _STEP))


def _draw_row(picture: Picture, left: float, top: float, tokens: list[int]) -> None:
    chosen = choices()
    for place, token in enumerate(tokens):
        picture.box(left + place * _CELL, top, _CELL - 3, _CELL, COLOURS[chosen[token]], rx=3)
        picture.text(left + place * _CELL + (_CELL - 3) / 2, top + 22, str(token), "small on mid")
