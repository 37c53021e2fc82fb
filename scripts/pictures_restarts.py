"""The states of a run that may be started again, and what is decided after each kind of failure.

What the table says is asked of the decision itself (``health/diagnosis.py``), with the defaults of ``recovery``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.config.sections import RecoveryConfig
from paceline.health.diagnosis import FailedAttempt, Restart, after_failure
from paceline.health.exit_codes import DONE, FAILED, HUNG, MEANINGS, PREEMPTED, REFUSED
from paceline.health.failure import FailureKind
from pictures_svg import MARGIN, WIDTH, Picture

KINDS: Mapping[FailureKind, str] = {
    "killed": "a rank was killed, or left without a word",
    "error": "a rank raised an error, after its first step",
    "lost": "ranks lost their connection, and all hosts are there",
    "hang": "ranks stood still: a verdict",
    "mistake": "an error of the program: TypeError and the like",
    "out_of_memory": "memory ran out",
    "full_disk": "the disk is full or read-only",
    "refused": "a rank refused what was asked for",
}
_WIDE, _TALL = 176.0, 64.0


def decided(kind: FailureKind, *, num_before: int = 0) -> tuple[str, str]:
    """Returns what follows a failure, and the exit code where the run ends; ``num_before`` others came before it."""
    attempts = [
        FailedAttempt(first_step=10 * number, kind=kind, rank=1, step=10 * number + 9, message="it failed")
        for number in range(num_before + 1)
    ]
    found = after_failure(RecoveryConfig(), attempts)
    if isinstance(found, Restart):
        return f"restart {found.number}", ""
    code = found.exit_code(HUNG if kind == "hang" else REFUSED if kind == "refused" else FAILED)
    return "stop", f"{code}: {MEANINGS[code]}"


def _state(picture: Picture, x: float, y: float, kind: str, name: str, words: Sequence[str]) -> None:
    picture.box(x, y, _WIDE, _TALL, f"{kind} thin", rx=8)
    picture.text(x + _WIDE / 2, y + 22, name, "name ink mid")
    for number, line in enumerate(words):
        picture.text(x + _WIDE / 2, y + 39 + 14 * number, line, "tiny ink mid")


def draw_restarts() -> str:
    """Draws the way from one attempt to the next, and the table of decisions."""
    picture = Picture(
        "One attempt after another: who decides, and what follows",
        "The launcher of every host runs this loop, on one host as on many. Nobody else starts ranks again.",
        "health/diagnosis.py",
    )
    xs = [MARGIN, MARGIN + _WIDE + 112, MARGIN + 2 * (_WIDE + 112)]
    top, low = picture.top + 12, picture.top + 140
    _state(picture, xs[0], top, "a", "ranks train", ["an agent of each host has", "started them: one attempt"])
    _state(picture, xs[1], top, "e", "an attempt ended", ["its launcher collects what", "ranks and ledgers tell"])
    _state(picture, xs[2], top, "d", "launchers settle", ["the first who saw the cause", "tells it, for all hosts"])
    _state(picture, xs[2], low, "f", "after_failure()", ["a pure function of all", "attempts that have failed"])
    _state(picture, xs[1], low, "c", "restart", ["from the newest", "whole checkpoint"])
    _state(picture, xs[0], low, "g", "ended", [f"exit code {DONE}, or the one", f"below; {PREEMPTED}: made room"])
    middle, under = top + _TALL / 2, low + _TALL / 2
    picture.arrow(xs[0] + _WIDE, middle, xs[1], middle)
    picture.text((xs[0] + _WIDE + xs[1]) / 2, middle - 18, "a rank dies, hangs,", "tiny soft mid")
    picture.text((xs[0] + _WIDE + xs[1]) / 2, middle - 6, "or hosts change", "tiny soft mid")
    picture.arrow(xs[1] + _WIDE, middle, xs[2], middle)
    picture.arrow(xs[2] + _WIDE / 2, top + _TALL, xs[2] + _WIDE / 2, low)
    picture.text(xs[2] + _WIDE / 2 - 8, (top + _TALL + low) / 2 + 4, "a failure", "tiny soft end")
    picture.arrow(xs[2] + 24, top + _TALL, xs[1] + _WIDE - 24, low)
    picture.text(xs[1] + _WIDE + 30, top + _TALL + 30, "hosts came or went:", "tiny soft end")
    picture.text(xs[1] + _WIDE + 30, top + _TALL + 42, "not charged", "tiny soft end")
    picture.arrow(xs[2], under, xs[1] + _WIDE, under)
    picture.arrow(xs[1] + 24, low, xs[0] + _WIDE - 24, top + _TALL)
    picture.arrow(xs[0] + _WIDE / 2, top + _TALL, xs[0] + _WIDE / 2, low)
    picture.text(xs[0] + _WIDE / 2 + 8, (top + _TALL + low) / 2 + 14, "done, or made room", "tiny soft")
    way = low + _TALL + 18
    picture.line(xs[2] + _WIDE / 2, low + _TALL, xs[2] + _WIDE / 2, way, "edge")
    picture.line(xs[2] + _WIDE / 2, way, xs[0] + _WIDE / 2, way, "edge")
    picture.arrow(xs[0] + _WIDE / 2, way, xs[0] + _WIDE / 2, low + _TALL)
    picture.text((xs[1] + _WIDE / 2), way - 5, "stop", "tiny soft mid")
    return picture.svg(_table(picture, way + 34) + 14)


def _table(picture: Picture, y: float) -> float:
    columns = (MARGIN, MARGIN + 350, MARGIN + 450)
    spent = RecoveryConfig().max_restarts
    for x, words in zip(columns, ("what ended the attempt", "first time", "exit code in the end"), strict=True):
        picture.text(x, y, words, "small bold ink")
    for kind, words in KINDS.items():
        y += 22
        first, code = decided(kind)
        _, last = decided(kind, num_before=spent)
        picture.text(columns[0], y, words)
        picture.text(columns[1], y, first)
        picture.text(columns[2], y, code or last)
    picture.line(MARGIN, y + 10, WIDTH - MARGIN, y + 10)
    return y + 14
