"""Where the boxes and arrows of scripts/draw_architecture.py lie: the rooms in rows, and the ways between them.

Arrows run down in gaps between boxes, and sideways on lanes in the gutters between rows. All arrows to one room share a
trunk: one gap in every row, one lane in every gutter.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from typing import NamedTuple

WIDTH, MARGIN, TOP = 1180, 56, 92
BOX_HEIGHT, GUTTER = 56, 42  # of a row of boxes, and of the space below it where arrows run

# The rooms from the top down, an empty line between rows: left edge, width, name, what is in it.
ROWS = """
56 1068 cli one file for each command: parse, call, print

56 400 view the live page, the report

56 184 verify many ranks = one process
264 184 launch runs on other machines
472 250 calibrate measures this device
780 344 doctor checks this machine

350 260 run starts, watches, restarts ranks

56 250 rehearse real engines without machines
904 220 chaos faults on purpose

350 260 train the step and the loop around it

350 260 engines ddp, zero, fsdp, pipeline, combined
654 220 checkpoint saved whole, read by any ranks
904 220 records what a run writes, reports

56 250 search the best layout; makes the plan
350 260 comm how bytes move between ranks
654 220 models reference models
904 220 data samples and their order

56 250 predict memory and time of a step
780 220 health judges hangs and deaths

56 250 config what was asked for
350 260 cluster devices, links and their costs

56 250 plan Layout, its rules, Plan

56 250 schedule pipeline schedules as data
"""

Arrow = tuple[str, str]  # importer, imported


class Room(NamedTuple):
    name: str
    words: str
    row: int
    left: int
    width: int

    @property
    def middle(self) -> float:
        return self.left + self.width / 2

    @property
    def top(self) -> int:
        return TOP + self.row * (BOX_HEIGHT + GUTTER)


def read_rows() -> dict[str, Room]:
    rooms = {}
    for row, lines in enumerate(ROWS.strip().split("\n\n")):
        for line in lines.splitlines():
            left, width, name, words = line.split(maxsplit=3)
            rooms[name] = Room(name, words, row, int(left), int(width))
    return rooms


ROOMS = read_rows()


def crossings(arrows: set[Arrow]) -> dict[tuple[int, str], float]:
    """Where the trunk of arrows to a room crosses each row on its way: (row, room) -> x.

    A trunk takes the gap between boxes that is nearest to a line from its highest source to its room. Trunks that share
    a gap stand side by side, in the order of their rooms.
    """
    shared: dict[tuple[int, int, int], list[tuple[float, str, float]]] = defaultdict(list)
    for end in [ROOMS[name] for name in sorted({target for _, target in arrows})]:
        sources = [ROOMS[a] for a, b in sorted(arrows) if b == end.name]
        highest = min(room.row for room in sources)
        starts = [room.middle for room in sources if room.row == highest]
        wish = (sum(starts) / len(starts) + 2 * end.middle) / 3
        for row in range(highest + 1, end.row):
            boxes = sorted((room.left, room.left + room.width) for room in ROOMS.values() if room.row == row)
            edges = [MARGIN, *(x for box in boxes for x in box), WIDTH - MARGIN]
            gaps = [gap for gap in zip(edges[::2], edges[1::2], strict=True) if gap[1] - gap[0] > 16]
            left, right = min(gaps, key=lambda gap: max(gap[0] - wish, wish - gap[1]))
            wish = min(max(wish, left + 14), right - 14)  # on from here it goes straight down where it can
            shared[row, left, right].append((end.middle, end.name, wish))
    found = {}
    for (row, left, right), trunks in shared.items():
        step = min(14.0, (right - left) / (len(trunks) + 1))
        half = step * (len(trunks) + 1) / 2
        centre = min(max(sum(x for _, _, x in trunks) / len(trunks), left + half), right - half)
        for number, (_, name, _) in enumerate(sorted(trunks)):
            found[row, name] = centre + step * (number + 1) - half
    return found


def source_ports(arrows: set[Arrow], cross: dict[tuple[int, str], float]) -> dict[Arrow, float]:
    """Where each arrow leaves its room: side by side at the bottom, ordered by where they go next."""
    ports = {}
    for room in ROOMS.values():
        heading = {b: cross.get((room.row + 1, b), ROOMS[b].middle) for a, b in arrows if a == room.name}
        targets = sorted(heading, key=lambda name: (heading[name], name))
        straight = [number for number, name in enumerate(targets) if heading[name] == room.middle]
        centre = straight[0] if straight else (len(targets) - 1) / 2
        for number, name in enumerate(targets):
            is_wide = room.width > 500  # so that every arrow can go straight down
            ports[room.name, name] = heading[name] if is_wide else room.middle + 40 * (number - centre)
    return ports


class Turn(NamedTuple):
    """An arrow's way through the gutter below a row: from x to x, on the lane of its trunk."""

    row: int
    target: str
    start: float
    end: float


def turns_of(arrow: Arrow, cross: dict[tuple[int, str], float], start: float) -> list[Turn]:
    target, turns = ROOMS[arrow[1]], []
    for row in range(ROOMS[arrow[0]].row, target.row):
        end = cross.get((row + 1, target.name), target.middle)
        turns.append(Turn(row, target.name, start, end))
        start = end
    return turns


def crossings_by_order(turns: list[Turn]) -> Counter[tuple[str, str]]:
    """How often lines cross in a gutter where the lane of one trunk is above that of another, by these two."""
    found: Counter[tuple[str, str]] = Counter()
    for lane in turns:
        left, right = sorted((lane.start, lane.end))
        for other in turns:
            if other.target != lane.target:  # a lower one comes down through the lane; a higher one goes on down
                found[lane.target, other.target] += left < other.start < right
                found[other.target, lane.target] += left < other.end < right
    return found


def best_order(targets: frozenset[str], crossings: Counter[tuple[str, str]]) -> tuple[str, ...]:
    """The order of lanes, from above, with the fewest crossings; of several, the first by name."""

    @functools.cache
    def best(left: frozenset[str]) -> tuple[int, tuple[str, ...]]:
        orders = []
        for top in left:
            below, order = best(left - {top})
            orders.append((below + sum(crossings[top, each] for each in order), (top, *order)))
        return min(orders, default=(0, ()))

    return best(targets)[1]


def lanes_of(turns: list[Turn]) -> dict[tuple[int, str], float]:
    """The height of each trunk's lane in each gutter, such that as few lines cross as possible."""
    lanes = {}
    for row in {turn.row for turn in turns}:
        here = [turn for turn in turns if turn.row == row and turn.end != turn.start]
        found = crossings_by_order(here)
        best = best_order(frozenset(turn.target for turn in here), found)
        for number, target in enumerate(best):
            middle = TOP + (row + 1) * (BOX_HEIGHT + GUTTER) - GUTTER / 2 - 3
            lanes[row, target] = middle + min(9.0, (GUTTER - 18) / len(best)) * (number - (len(best) - 1) / 2)
    return lanes


def ways_of(arrows: set[Arrow]) -> dict[Arrow, list[Turn]]:
    cross = crossings(arrows)
    ports = source_ports(arrows, cross)
    return {arrow: turns_of(arrow, cross, ports[arrow]) for arrow in sorted(arrows)}
