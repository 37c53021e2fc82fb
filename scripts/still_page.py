"""The page of ``paceline learn play`` without a server, for the site: each lesson, and one setting moved from there.

Its answers and curves come with it. They are computed when the book is built (docs/conf.py), so that they are those of
the code beside them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from paceline.plan.layout import STRATEGIES
from paceline_course.play import PRESETS, PlayInputs, answer_for, curves_for, page_with


def still_page() -> str:
    """Returns the page as one file."""
    return page_with({"still": [_still(replace(PlayInputs(), **changes)) for _, changes in PRESETS]})


def _still(lesson: PlayInputs) -> dict[str, Any]:
    """Returns the curves of a lesson, and the answers under what differs from it: ``gpus=64``."""
    curves = curves_for(lesson)
    moved: list[tuple[str, Any]] = [(name, int(point["at"])) for name, points in curves.items() for point in points]
    moved += [("strategy", each) for each in STRATEGIES]
    answers = {
        "" if getattr(lesson, name) == value else f"{name}={value}": replace(lesson, **{name: value})
        for name, value in moved
    }
    return {"curves": curves, "answers": {key: answer_for(inputs) for key, inputs in answers.items()}}
