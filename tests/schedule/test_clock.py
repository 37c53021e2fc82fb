"""The clock that events advance: streams in order, and overlap."""

from __future__ import annotations

import pytest

from paceline.schedule.clock import Timeline


def test_work_waits_for_its_stream_and_for_what_it_needs() -> None:
    timeline = Timeline()
    gathered = timeline.add("link", 2.0)
    computed = timeline.add("compute", 3.0, after=(gathered,))
    timeline.add("link", 2.0)
    last = timeline.add("compute", 1.0)
    assert (gathered, computed, last) == (2.0, 5.0, 6.0)
    assert timeline.end == 6.0
    assert timeline.busy("link") == 4.0
    assert timeline.idle("compute") == 2.0


def test_communication_behind_compute_costs_only_what_is_left_over() -> None:
    timeline = Timeline()
    for _ in range(4):
        done = timeline.add("compute", 1.0)
        timeline.add("link", 0.8, after=(done,))
    assert timeline.end == pytest.approx(4.8)
