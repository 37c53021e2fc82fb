"""Events are told in words, whatever their detail holds."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.records.event_words import MOST_CHARACTERS, event_name, event_text
from paceline.records.records import EventRecord

SAVED = {"folder": "x", "seconds": 0.25, "stall_seconds": 0.002, "bytes": 3 * 2**20, "background": True}
BACK = {"from_step": 1040, "reason": "the loss is nan", "skipped_samples": 640, "rate_scale": 0.5, "number": 1}


def event(name: str, **detail: Any) -> EventRecord:
    return EventRecord(name=name, step=7, detail=detail, time=1.0)


@pytest.mark.parametrize(
    ("told", "text"),
    [
        (event("checkpoint", **SAVED), "3.0 MiB saved to x in 250.0 ms, in the background; training waited 2.0 ms"),
        (
            event("roll_back", **BACK),
            "back from step 1,040: the loss is nan; 640 samples are left out; learning rate x 0.5 (roll-back 1)",
        ),
        (
            event("skipped", grad_norm="inf", in_a_row=2),
            "the update was left out: the gradient norm is inf; 2 in a row",
        ),
        (event("restart", number=1, of=3, reason="rank 1 was killed"), "restart 1 of 3: rank 1 was killed"),
        (event("microbatch", microbatch=4, reason="out of memory"), "out of memory: 4 samples at a time from here on"),
        (event("straggler", rank=2, lost_s=0.1, sentence="rank 2 is the last"), "rank 2 is the last"),
        (event("early_stop", note="no gain in\n5 evaluations"), "no gain in 5 evaluations"),
        (event("my_own", beam_size=4, path="x"), "beam size 4, path x"),
    ],
)
def test_an_event_is_told_in_words(told: EventRecord, text: str) -> None:
    assert event_text(told) == text


@pytest.mark.parametrize("detail", [{}, {"bytes": [1]}, {"bytes": "many", "folder": None}, {"seconds": 10**400}])
@pytest.mark.parametrize("name", ["checkpoint", "roll_back", "skipped", "buckets", "first_step", "attempt"])
def test_a_detail_of_other_values_is_told_by_its_fields(name: str, detail: dict[str, Any]) -> None:
    text = event_text(event(name, **detail))
    assert all(key in text for key in detail)
    assert len(text) <= MOST_CHARACTERS


def test_names_are_read_as_words() -> None:
    assert [event_name(name) for name in ("roll_back", "not_saved", "checkpoint")] == [
        "roll-back",
        "not saved",
        "checkpoint",
    ]
