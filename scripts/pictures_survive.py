"""Where a snapshot lives, and from where the state comes after a loss.

Which hosts have copies of a part is asked of the function that decides about it (``comm/control/kept.py``).
"""

from __future__ import annotations

from collections.abc import Collection

from paceline.comm.control.kept import places_of_copies
from pictures_svg import MARGIN, WIDTH, Picture

HOSTS = 3
# What is lost: the hosts, how many copies there are, and in words.
LOSSES = (
    ((), 1, "a rank, two ranks, or a keeper"),
    ((1,), 1, "host 1, with its memory"),
    ((1, 2), 1, "hosts 1 and 2 at once, one copy"),
    ((1, 2), 2, "hosts 1 and 2 at once, copies: 2"),
)
_COLOURS = "acd"
_WIDE, _TALL = 176.0, 132.0
_CELL, _HIGH = 20.0, 18.0


def holders(part: int, copies: int) -> list[int]:
    """Returns the hosts that hold the part of a host: itself first."""
    return [part, *places_of_copies(part, HOSTS, copies)]


def sources(lost: Collection[int], copies: int) -> list[int | None]:
    """Returns from which host each part is read; None: nobody that is left has it."""
    return [next((each for each in holders(part, copies) if each not in lost), None) for part in range(HOSTS)]


def draw_survive() -> str:
    """Draws three hosts with what each keeps, and a row for each loss."""
    picture = Picture(
        "A snapshot in memory: where it lives, and what survives",
        "Every rank writes its part into the memory of its host. The keeper of the next host copies it. Letters A, B "
        "and C are the parts of hosts 0, 1 and 2; ranks go on meanwhile.",
        "comm/control/kept.py",
    )
    gap = (WIDTH - 2 * MARGIN - HOSTS * _WIDE) / (HOSTS - 1)
    top = picture.top + 6
    for host in range(HOSTS):
        _host(picture, host, MARGIN + host * (_WIDE + gap), top)
    for host in range(HOSTS - 1):
        x, y = MARGIN + host * (_WIDE + gap) + _WIDE, top + 82
        picture.arrow(x + 3, y, x + gap - 3, y)
        picture.text(x + gap / 2, y - 8, f"copy of {chr(65 + host)}", "tiny soft mid")
    way = top + _TALL + 14
    first, last = MARGIN + _WIDE / 2, MARGIN + (HOSTS - 1) * (_WIDE + gap) + _WIDE / 2
    picture.line(last, top + _TALL, last, way, "edge")
    picture.line(last, way, first, way, "edge")
    picture.arrow(first, way, first, top + _TALL)
    picture.text((first + last) / 2, way - 4, f"copy of {chr(64 + HOSTS)}", "tiny soft mid")
    return picture.svg(_losses(picture, way + 36))


def _host(picture: Picture, host: int, x: float, y: float) -> None:
    picture.box(x, y, _WIDE, _TALL, "panel", rx=8)
    picture.text(x + 12, y + 20, f"host {host}", "name ink")
    picture.text(x + _WIDE - 12, y + 20, "ranks train", "tiny soft end")
    picture.arrow(x + _WIDE - 40, y + 26, x + _WIDE - 40, y + 50)
    picture.text(x + _WIDE - 48, y + 42, "behind a step", "tiny soft end")
    picture.box(x + 10, y + 54, _WIDE - 20, 68, "none", rx=6)
    picture.text(x + 20, y + 70, "keeper: /dev/shm", "tiny ink")
    kept = [part for part in range(HOSTS) if host in holders(part, 1)]
    for place, part in enumerate(sorted(kept, key=lambda each: each != host)):
        _part(picture, part, x + 20 + 70 * place, y + 78, is_read=True)
        picture.text(x + 46 + 70 * place, y + 92, "own" if part == host else "copy", "tiny ink")
    picture.text(x + 20, y + 115, "it outlives the ranks", "tiny soft")


def _part(picture: Picture, part: int, x: float, y: float, *, is_read: bool) -> None:
    picture.box(x, y, _CELL, _HIGH, _COLOURS[part] if is_read else f"{_COLOURS[part]} thin", rx=3)
    picture.text(x + _CELL / 2, y + 13.5, chr(65 + part), "small on bold mid" if is_read else "small soft mid")


def _losses(picture: Picture, y: float) -> float:
    columns = (MARGIN, MARGIN + 236, MARGIN + 500)
    for x, words in zip(
        columns, ("what is lost", "what is left of the hosts' memory", "the run goes on from"), strict=True
    ):
        picture.text(x, y, words, "small bold ink")
    for lost, copies, words in LOSSES:
        y += 34
        found = sources(lost, copies)
        picture.text(columns[0], y, words)
        for host in range(HOSTS):
            x = columns[1] + 82 * host
            picture.box(x, y - 17, 76, 25, "panel", rx=4)
            if host in lost:
                picture.text(x + 38, y, "lost", "tiny soft mid")
                continue
            kept = sorted(
                (part for part in range(HOSTS) if host in holders(part, copies)), key=lambda each: each != host
            )
            for place, part in enumerate(kept):
                _part(picture, part, x + 4 + 24 * place, y - 13.5, is_read=found[part] == host)
        answer = "the newest checkpoint on disk" if None in found else _answer(lost)
        picture.text(columns[2], y, answer)
        picture.line(MARGIN, y + 15, WIDTH - MARGIN, y + 15)
    return picture.legend(MARGIN, y + 42, [("a", "read"), ("a thin", "kept, and not needed")])


def _answer(lost: Collection[int]) -> str:
    if not lost:
        return "memory: each host reads its own"
    left = HOSTS - len(lost)
    return f"memory, on {left} host{'s' if left > 1 else ''} or with spare ones"
