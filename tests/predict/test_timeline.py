"""The event core: streams in order, overlap, and a pipeline beside its closed form."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import UsageError
from paceline.predict.replay.timeline import StageSeconds, Timeline, pipeline_seconds, walk_pipeline


def test_work_waits_for_its_stream_and_for_what_it_needs() -> None:
    timeline = Timeline()
    gathered = timeline.add("link", 2.0)
    computed = timeline.add("compute", 3.0, after=(gathered,))
    timeline.add("link", 2.0)
    last = timeline.add("compute", 1.0)
    assert (computed.start, computed.end, last.end) == (2.0, 5.0, 6.0)
    assert timeline.end == 6.0
    assert timeline.busy("link") == 4.0
    assert timeline.idle("compute") == 2.0


def test_communication_behind_compute_costs_only_what_is_left_over() -> None:
    timeline = Timeline()
    for _ in range(4):
        done = timeline.add("compute", 1.0)
        timeline.add("link", 0.8, after=(done,))
    assert timeline.end == pytest.approx(4.8)


@given(st.integers(1, 6), st.integers(1, 12), st.floats(0.1, 5.0), st.floats(0.1, 5.0))
def test_equal_stages_take_what_the_closed_form_says(ranks: int, batches: int, forward: float, backward: float) -> None:
    stages = [StageSeconds(forward, backward)] * ranks
    walked = walk_pipeline(stages, batches).end
    assert walked == pytest.approx((batches + ranks - 1) * (forward + backward))
    assert pipeline_seconds(stages, batches) == pytest.approx(walked)


def test_a_slow_last_stage_sets_the_pace() -> None:
    stages = [StageSeconds(1.0, 2.0)] * 3 + [StageSeconds(1.5, 3.0)]
    assert walk_pipeline(stages, 8).end == pytest.approx(pipeline_seconds(stages, 8)) == pytest.approx(8 * 4.5 + 9)


def test_chunks_divide_the_fill_and_messages_lengthen_it() -> None:
    stages = [StageSeconds(1.0, 2.0)] * 4
    assert pipeline_seconds(stages, 8, chunks=3) == pytest.approx(8 * 3 + 9 / 3)
    assert pipeline_seconds(stages, 8, message=0.1) == pytest.approx(8 * 3 + 9 + 6 * 0.1)
    assert walk_pipeline(stages, 8, message=0.1).end >= pipeline_seconds(stages, 8, message=0.1) - 1e-9


def test_a_pipeline_without_stages_is_refused() -> None:
    with pytest.raises(UsageError, match="0 stages, 4 microbatches"):
        walk_pipeline([], 4)
