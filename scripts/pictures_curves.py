"""The curves of ``paceline learn play`` as a picture: memory and speed of a rank under three strategies."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

from paceline.units import GIB
from paceline_course.play import PlayInputs, curves_for
from pictures_svg import MARGIN, WIDTH, Picture

Points = Sequence[Mapping[str, float]]
SETTINGS = {"d": PlayInputs(strategy="ddp"), "b": PlayInputs(strategy="zero1"), "a": PlayInputs(strategy="fsdp")}
_ROWS = {"gpus": "GPUs", "context": "tokens S of a sample", "batch": "samples B of a step"}
_LEFT, _TALL = 52.0, 96.0


def draw_play_curves() -> str:
    """Draws play-curves.svg."""
    usual = PlayInputs()
    picture = Picture(
        "Memory and speed of a GPU, as one setting moves",
        f"A GPT of 7 billion parameters on {usual.cluster_text}: {usual.gpus} GPUs, {usual.batch} samples of "
        f"{usual.context:,} tokens in a step, a microbatch of {usual.microbatch}. One of these moves, and the others "
        "stay. The grey line is what a device may hold. paceline learn play draws the same for your own settings.",
        "curves_for of paceline_course.play",
    )
    names = [(kind, inputs.strategy) for kind, inputs in SETTINGS.items()]
    y = picture.legend(MARGIN, picture.top + 8, names) + 4
    curves = {kind: curves_for(inputs) for kind, inputs in SETTINGS.items()}
    room = (WIDTH - 2 * MARGIN - 24) / 2
    for name, words in _ROWS.items():
        lines = {kind: found[name] for kind, found in curves.items()}
        _draw(picture, MARGIN, y, room, f"GiB of a rank, by {words}", lines, "memory", GIB)
        _draw(picture, MARGIN + room + 24, y, room, f"tokens/s of a GPU, by {words}", lines, "tokens_per_s", 1.0)
        y += _TALL + 56
    return picture.svg(y)


def _draw(
    picture: Picture, x: float, y: float, room: float, title: str, lines: Mapping[str, Points], key: str, unit: float
) -> None:
    """Draws one plot: its lines by powers of two from left to right, and from 0 upwards."""
    points = [point for line in lines.values() for point in line]
    ends = [math.log2(of(point["at"] for point in points)) for of in (min, max)]
    budget = points[0]["budget"] / unit
    top = 2 * budget if key == "memory" else 1.1 * max(point[key] / unit for point in points)
    picture.text(x, y + 12, title, "small bold ink")
    bottom, left, wide = y + 22 + _TALL, x + _LEFT, room - _LEFT - 12

    def place(point: Mapping[str, float]) -> tuple[float, float]:
        across = left + wide * (math.log2(point["at"]) - ends[0]) / (ends[1] - ends[0])
        return across, bottom - _TALL * point[key] / unit / top

    for share in (0.0, 0.5, 1.0):
        at = bottom - _TALL * share
        picture.line(left, at, left + wide, at)
        picture.text(left - 6, at + 4, f"{share * top:,.0f}", "tiny soft end")
    if key == "memory":
        picture.band(left, bottom - _TALL * budget / top, left + wide, bottom - _TALL * budget / top, "g", 2)
    longest = max(lines.values(), key=len)
    for point in longest[:: math.ceil(len(longest) / 5)]:
        picture.text(place(point)[0], bottom + 16, f"{point['at']:,.0f}", "tiny soft mid")
    for kind, line in lines.items():
        inside = [place(point) for point in line if point[key] / unit <= top]
        for start, end in pairwise(inside):
            picture.band(*start, *end, kind)
