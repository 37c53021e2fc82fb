"""Picture of lesson 2: a ring between hosts uses one network card of each, and NCCL has a ring for each card."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from paceline.cluster.devices import load_cluster
from paceline.cluster.wires import algorithm_cost, wire_cost
from pictures_svg import MARGIN, WIDTH, Picture

DEVICES, HOSTS = 4, 2
CLUSTER, NUM_BYTES = "10x dgx-h100", 10**9
COLOURS = "abcd"
_GPU, _STEP = 44.0, 84.0
_LANE = 8.0  # between the lines of two rings


def ring(first: int) -> list[tuple[int, int]]:
    """Returns the members of a ring, (host, device) each: in every host it begins with device ``first``."""
    return [(host, (first + place) % DEVICES) for host in range(HOSTS) for place in range(DEVICES)]


def crossings(members: Sequence[tuple[int, int]]) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Returns where a ring passes from host to host: who sends, and who receives."""
    return [(a, b) for a, b in zip(members, [*members[1:], members[0]], strict=True) if a[0] != b[0]]


def draw_cards() -> str:
    """Draws cards.svg."""
    cluster, ranks = load_cluster(CLUSTER), tuple(range(load_cluster(CLUSTER).devices))
    assert cluster.between is not None
    card = cluster.between.reached / cluster.between.cards / 1e9
    picture = Picture(
        "Between hosts: one ring, and a ring for each network card",
        "Each GPU has a network card. A single ring leaves a host through one card, and the others are idle. NCCL cuts "
        "a tensor into as many parts as there are cards: each goes round a ring of its own, which leaves by another "
        "card.",
        "rings of two hosts; times of paceline.cluster for " + CLUSTER,
    )
    half = (WIDTH - 2 * MARGIN) / 2
    seconds = (
        algorithm_cost(cluster, "ring", "all_reduce", NUM_BYTES, ranks),
        wire_cost(cluster, len(ranks))("all_reduce", NUM_BYTES, ranks),
    )
    bottom = 0.0
    for place, (name, rings) in enumerate((("one ring", [ring(0)]), ("a ring for each card", [*map(ring, range(4))]))):
        left, y = MARGIN + place * half, picture.top + 12
        picture.text(left, y, name, "name ink")
        _draw_hosts(picture, left, y + 16, rings)
        words = f"1 GB on {CLUSTER}, whose cards move {card:g} GB/s: {seconds[place] * 1e3:.1f} ms"
        bottom = picture.paragraph(left, y + 306, words, half)
    return picture.svg(bottom + 10)


def _draw_hosts(picture: Picture, x: float, y: float, rings: Sequence[Sequence[tuple[int, int]]]) -> None:
    """Draws two hosts, one above the other, with their cards in between."""
    tops = (y, y + 184)
    used = {end for members in rings for crossing in crossings(members) for end in crossing}
    for host, top in enumerate(tops):
        picture.box(x, top, 4 * _STEP + 4, 88, "panel", rx=6)
        picture.text(x + 4 * _STEP - 2, top + (80 if host == 0 else 18), f"host {host}", "tiny soft end")
        for device in range(DEVICES):
            gpu_y, card_y = (top + 8, top + 92) if host == 0 else (top + 36, top - 16)
            picture.box(x + 22 + device * _STEP, gpu_y, _GPU, _GPU, "none", rx=3)
            words_y = gpu_y + (12 if host == 0 else 40)
            picture.text(x + 22 + device * _STEP + _GPU / 2, words_y, f"GPU {device}", "tiny ink mid")
            kinds = "g" if (host, device) in used else "g s0"
            picture.box(x + 22 + device * _STEP + 6, card_y, _GPU - 12, 12, kinds, rx=2, says=f"network card {device}")
    for number, members in enumerate(rings):
        _draw_ring(picture, x, tops, members, number)


def _draw_ring(
    picture: Picture, x: float, tops: tuple[float, float], members: Sequence[tuple[int, int]], number: int
) -> None:
    """Draws the lines of a ring: a lane inside each host, and one over two cards where it changes the host."""
    colour = COLOURS[number]

    def place(member: tuple[int, int]) -> tuple[float, float]:
        host, device = member
        lane = tops[host] + (28 if host == 0 else 46) + number * _LANE * 0.6
        return x + 22 + device * _STEP + _GPU / 2 + (number - 1.5) * _LANE, lane

    for one, other in pairwise(members):
        (x1, y1), (x2, y2) = place(one), place(other)
        if one[0] != other[0]:
            continue
        if x1 < x2:
            picture.band(x1, y1, x2, y2, colour)
        else:  # the last device of a host, and its first
            picture.band(x1, y1, x + 4 * _STEP, y1, colour)
            picture.band(x + 4, y2, x2, y2, colour)
    for sender, receiver in crossings(members):
        ends = [(place(member)[0], tops[member[0]] + (104 if member[0] == 0 else -16)) for member in (sender, receiver)]
        for begin, end in ((place(sender), ends[0]), (ends[0], ends[1]), (ends[1], place(receiver))):
            picture.band(*begin, *end, colour)
