"""Pictures of lessons 1 and 2: what collectives do, and the messages of a ring and of two trees.

The cells of ``collectives.svg`` are what virtual ranks end with: a number has one bit for each element of each rank, so
that a sum says what is in it. Ring and trees are the rounds of ``comm/algorithms/rounds.py``, carried out on sets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from paceline import run_virtual
from paceline.cluster.costs import Tree, double_tree
from paceline.comm.algorithms.rounds import (
    Round,
    cut,
    ring_all_gather,
    ring_reduce_scatter,
    tree_broadcast,
    tree_reduce,
)
from paceline.comm.base import Communicator
from pictures_svg import MARGIN, Picture

RANKS = 4
COLOURS = "abcd"
Parts = frozenset[tuple[int, int]]  # (rank, element) whose sum a cell holds; empty: nothing
Table = list[list[Parts]]


def _mark(rank: int, element: int) -> float:
    return float(2 ** (RANKS * rank + element))


def _parts(value: float) -> Parts:
    bits = int(value)
    return frozenset((place // RANKS, place % RANKS) for place in range(RANKS * RANKS) if bits >> place & 1)


@dataclass(frozen=True, slots=True)
class Collective:
    """One panel: a verb, and what it does to the four cells of each rank."""

    name: str
    words: str
    work: Callable[[Communicator, torch.Tensor], None]
    holds: Callable[[int, int], bool]  # whether a rank's element is there before


def _broadcast(comm: Communicator, cells: torch.Tensor) -> None:
    comm.broadcast(cells, source=0).wait()


def _all_reduce(comm: Communicator, cells: torch.Tensor) -> None:
    comm.all_reduce(cells).wait()


def _reduce_scatter(comm: Communicator, cells: torch.Tensor) -> None:
    mine = torch.zeros(1, dtype=cells.dtype)
    comm.reduce_scatter(mine, cells.clone()).wait()
    cells.zero_()
    cells[comm.rank] = mine[0]


def _all_gather(comm: Communicator, cells: torch.Tensor) -> None:
    mine = cells[comm.rank : comm.rank + 1].clone()
    comm.all_gather(cells, mine).wait()


def _all_to_all(comm: Communicator, cells: torch.Tensor) -> None:
    arrived = torch.zeros_like(cells)
    comm.all_to_all(arrived, cells.clone()).wait()
    cells.copy_(arrived)


def _send(comm: Communicator, cells: torch.Tensor) -> None:
    if comm.rank == 0:
        comm.send(cells, to=1).wait()
    elif comm.rank == 1:
        comm.recv(cells, source=0).wait()


COLLECTIVES = (
    Collective("broadcast", "all get what rank 0 has", _broadcast, lambda rank, _: rank == 0),
    Collective("all-reduce", "all get the sum", _all_reduce, lambda *_: True),
    Collective("reduce-scatter", "each gets its slice of the sum", _reduce_scatter, lambda *_: True),
    Collective("all-gather", "all get the slices of all", _all_gather, lambda rank, element: rank == element),
    Collective("all-to-all", "slice j of each rank goes to rank j", _all_to_all, lambda *_: True),
    Collective("send and recv", "one rank hands over to another", _send, lambda rank, _: rank == 0),
)


def run_collective(collective: Collective) -> tuple[Table, Table]:
    """Runs a collective on virtual ranks; returns what each cell holds before and after."""

    def work(comm: Communicator) -> tuple[list[float], list[float]]:
        marks = [_mark(comm.rank, each) if collective.holds(comm.rank, each) else 0.0 for each in range(RANKS)]
        cells = torch.tensor(marks, dtype=torch.float64)
        collective.work(comm, cells)
        return marks, cells.tolist()

    found = run_virtual(work, ranks=RANKS)
    before, after = ([[_parts(value) for value in each[side]] for each in found] for side in (0, 1))
    return before, after


def draw_collectives() -> str:
    """Draws collectives.svg."""
    picture = Picture(
        "Six ways in which four ranks exchange a tensor of four elements",
        "Each row of cells is the memory of one rank: on the left before the call, on the right after it. A colour is "
        "the rank that a value comes from; a cell with four stripes is the sum of the values of all ranks.",
        "virtual ranks run each collective",
    )
    for number, collective in enumerate(COLLECTIVES):
        left, top = MARGIN + (number % 2) * 384, picture.top + (number // 2) * 178
        before, after = run_collective(collective)
        picture.box(left, top, 368, 166, "panel", rx=8)
        picture.text(left + 12, top + 22, collective.name, "name ink")
        picture.text(left + 356, top + 22, collective.words, "small soft end")
        for rank in range(RANKS):
            picture.text(left + 12, top + 52 + 31 * rank, f"rank {rank}", "tiny soft")
        _draw_table(picture, left + 52, top + 36, before)
        picture.arrow(left + 199, top + 97, left + 219, top + 97, size=5)
        _draw_table(picture, left + 224, top + 36, after)
    end = picture.top + 3 * 178 + 16
    ranks = [(COLOURS[rank], f"from rank {rank} ({'ABCD'[rank]}0 to {'ABCD'[rank]}3)") for rank in range(RANKS)]
    last = picture.legend(MARGIN, end, [*ranks, ("none", "holds nothing of this call")])
    return picture.svg(last)


def _draw_table(picture: Picture, x: float, y: float, table: Table) -> None:
    for rank, cells in enumerate(table):
        for place, parts in enumerate(cells):
            left, top = x + 34 * place, y + 31 * rank
            _draw_cell(picture, left, top, 32, 25, [source for source, _ in sorted(parts)])
            if parts:
                picture.text(left + 16, top + (14 if len(parts) > 1 else 17), _label(parts), "small bold on mid")


def _label(parts: Parts) -> str:
    elements = {element for _, element in parts}
    assert len(elements) == 1, "a sum is of the same element of several ranks"
    return f"{'ABCD'[min(parts)[0]] if len(parts) == 1 else 'Σ'}{elements.pop()}"


def _draw_cell(picture: Picture, x: float, y: float, width: float, height: float, sources: Sequence[int]) -> None:
    """Draws a cell in equal stripes of its sources."""
    if not sources:
        picture.box(x, y, width, height, "none", rx=2)
    is_sum = len(sources) > 1
    if is_sum:  # the sum's name stands above the stripes
        picture.box(x, y, width, height, "g")
    tall = 7 if is_sum else height
    for place, source in enumerate(sources):
        each = width / len(sources)
        picture.box(x + place * each, y + height - tall, each, tall, COLOURS[source])


# Messages of the algorithms, carried out on sets of ranks.

Held = list[list[frozenset[int]]]  # by rank and slice: the ranks whose values are summed there


@dataclass(frozen=True, slots=True)
class Moved:
    """A message: slice ``piece`` goes from a rank to another."""

    sender: int
    receiver: int
    piece: int


def carry_out(programs: Sequence[Sequence[Round]], slices: int) -> list[tuple[Held, list[Moved]]]:
    """Carries out the rounds of all ranks, one element a slice; returns what is held after each, and what moved."""
    held: Held = [[frozenset({rank})] * slices for rank in range(len(programs))]
    found: list[tuple[Held, list[Moved]]] = [([list(row) for row in held], [])]
    for number in range(len(programs[0])):
        before, moved = [list(row) for row in held], list[Moved]()
        for rank, program in enumerate(programs):
            for message in program[number].sends:
                moved += [Moved(rank, message.peer, piece) for piece in range(message.start, message.stop)]
            for message in program[number].sums:
                for piece in range(message.start, message.stop):
                    assert not held[rank][piece] & before[message.peer][piece], "a value is added twice"
                    held[rank][piece] |= before[message.peer][piece]
            for message in program[number].copies:
                for piece in range(message.start, message.stop):
                    held[rank][piece] = before[message.peer][piece]
        found.append(([list(row) for row in held], moved))
    assert all(parts == frozenset(range(len(programs))) for row in held for parts in row), "the sums are not complete"
    return found


def ring_programs(ranks: int) -> list[list[Round]]:
    """Returns the rounds of each rank of a ring all-reduce."""
    slices = cut((0, ranks), ranks)
    return [ring_reduce_scatter(rank, slices) + ring_all_gather(rank, slices) for rank in range(ranks)]


def draw_ring() -> str:
    """Draws ring.svg."""
    picture = Picture(
        "A ring all-reduce of four ranks, round by round",
        "Rows are ranks, columns are the four slices of the tensor. A cell has one stripe for each rank whose values "
        "it sums. In each round every rank sends one slice to the next rank: an outlined cell has just arrived. After "
        "three rounds each rank has one finished slice (reduce-scatter); three more spread them (all-gather).",
        "the rounds of comm/algorithms/rounds.py",
    )
    states = carry_out(ring_programs(RANKS), RANKS)
    tall = 218
    for number, (held, moved) in enumerate(states):
        row, column = (0, number) if number < RANKS else (1, number - RANKS + 1)
        left, top = MARGIN + column * 190, picture.top + row * tall
        kind = "reduce-scatter" if number < RANKS else "all-gather"
        picture.text(left + 22, top + 16, f"round {number}: {kind}" if number else "start", "small bold ink")
        _draw_ring_state(picture, left, top + 36, held, moved)
    left, top = MARGIN, picture.top + tall + 44
    for rank in range(RANKS):
        _draw_cell(picture, left, top + 26 * rank, 8, 16, [rank])
        picture.text(left + 16, top + 13 + 26 * rank, f"values of rank {rank}", "small ink")
    picture.box(left, top + 104, 14, 16, "edge")
    picture.text(left + 22, top + 117, "just arrived", "small ink")
    return picture.svg(picture.top + 2 * tall + 8)


def _draw_ring_state(picture: Picture, x: float, y: float, held: Held, moved: Sequence[Moved]) -> None:
    wide, tall, pitch = 34, 22, 42
    for rank, row in enumerate(held):
        picture.text(x + 4, y + 15 + pitch * rank, str(rank), "small soft")
        for piece, sources in enumerate(row):
            left, top = x + 20 + (wide + 4) * piece, y + pitch * rank
            picture.box(left, top, wide, tall, "none")
            for source in sources:
                picture.box(left + source * wide / RANKS, top, wide / RANKS, tall, COLOURS[source])
    for each in moved:
        middle = x + 20 + (wide + 4) * each.piece + wide / 2
        start, end = y + pitch * each.sender + tall, y + pitch * each.receiver
        picture.box(middle - wide / 2, end, wide, tall, "edge")
        if end > start:
            picture.arrow(middle, start + 1, middle, end - 2)
        else:  # from the last rank to the first: out below, in above
            picture.line(middle, start + 1, middle, start + 13, "edge dash")
            picture.arrow(middle, end - 15, middle, end - 2, "edge dash")


TREE_RANKS = 8


def draw_tree() -> str:
    """Draws tree.svg."""
    trees = double_tree(TREE_RANKS)
    height = max(tree.height for tree in trees)
    picture = Picture(
        "A tree all-reduce: two trees, each with half of the tensor",
        "Eight ranks. Values are summed on the way up to the root, and the sum goes back down the same edges. A number "
        f"on an edge is the round of that message, up (↑) and down (↓). There are {2 * height} rounds; a rank "
        "that passes values on in one tree is a leaf of the other, so that no rank sends much more than the others.",
        "the trees of cluster/costs.py and the rounds of comm/algorithms/rounds.py",
    )
    for number, (tree, words) in enumerate(zip(trees, ("first half", "second half"), strict=True)):
        left = MARGIN + number * 384
        picture.box(left, picture.top, 368, 62 * (height + 1) + 32, "panel", rx=8)
        picture.text(left + 12, picture.top + 22, f"{words} of the tensor", "name ink")
        _draw_one_tree(picture, left + 26, picture.top + 52, tree)
    y = picture.top + 62 * (height + 1) + 62
    y = picture.legend(MARGIN, y, [("a", "root: has the whole sum first"), ("f", "adds and passes on"), ("g", "leaf")])
    picture.text(MARGIN, y + 6, "The same all-reduce as a ring and as two trees, counted from the messages", "name ink")
    for place, line in enumerate(_comparison(trees)):
        picture.text(MARGIN, y + 30 + 20 * place, line, "small ink")
    return picture.svg(y + 30 + 20 * 2)


def _rounds_of(tree: Tree, rank: int) -> tuple[int, int]:
    """Returns the rounds in which a rank sends to its parent and receives from it, counted from 1."""
    up = next(number for number, each in enumerate(tree_reduce(rank, tree, (0, 1))) if each.sends)
    down = next(number for number, each in enumerate(tree_broadcast(rank, tree, (0, 1))) if each.copies)
    return up + 1, tree.height + down + 1


def _draw_one_tree(picture: Picture, x: float, y: float, tree: Tree) -> None:
    places = {rank: (x + 45 * rank, y + 62 * tree.depths[rank]) for rank in range(TREE_RANKS)}
    for rank, parent in enumerate(tree.parents):
        if parent >= 0:
            (x1, y1), (x2, y2) = places[rank], places[parent]
            picture.line(x1, y1, x2, y2)
    for rank, parent in enumerate(tree.parents):
        if parent >= 0:
            (x1, y1), (x2, y2) = places[rank], places[parent]
            up, down = _rounds_of(tree, rank)
            middle, level = (x1 * 0.55 + x2 * 0.45), (y1 * 0.55 + y2 * 0.45)
            picture.box(middle - 20, level - 9, 40, 15, "panel", rx=3)
            picture.text(middle, level + 3, f"↑{up} ↓{down}", "tiny ink mid")
    for rank, (left, top) in places.items():
        kind = "a" if tree.parents[rank] < 0 else "f" if tree.children(rank) else "g"
        picture.box(left - 13, top - 13, 26, 26, kind, rx=13)
        picture.text(left, top + 4.5, str(rank), "small bold on mid")


def _comparison(trees: Sequence[Tree]) -> list[str]:
    """Counts rounds, and the most that a rank sends, in sizes of the tensor."""
    ring = ring_programs(TREE_RANKS)
    ring_sent = max(sum(len(each.sends) for each in program) for program in ring) / TREE_RANKS
    tree_sent = max(
        sum(
            len(each.sends) / len(trees)
            for tree in trees
            for each in (*tree_reduce(rank, tree, (0, 1)), *tree_broadcast(rank, tree, (0, 1)))
        )
        for rank in range(TREE_RANKS)
    )
    rounds = max(2 * tree.height for tree in trees)
    return [
        f"ring: {len(ring[0])} rounds; a rank sends at most {ring_sent:g} times the tensor: better for large tensors",
        f"two trees: {rounds} rounds; a rank sends at most {tree_sent:g} times the tensor: better for small tensors",
    ]
