"""Profiles of ranks: one time line by corrected clocks, what it says, and real ranks."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from paceline.chrome_trace import TRACKS, span, write_events
from paceline.config import load_config, run_checks
from paceline.errors import UsageError
from paceline.schedule.clock import time_in_all
from paceline_bench.profile.hook import profiled_config
from paceline_bench.profile.merge import (
    ANCHOR,
    Operator,
    RankProfile,
    RankSpans,
    TraceSpan,
    beside,
    merged_events,
    place_rank,
    summarize_profile,
)

Call = Callable[..., Any]


def spans_of(rank: int, ahead_s: float, **tracks: list[TraceSpan]) -> RankSpans:
    """A rank whose clock is so far ahead; the spans are given on the clock of rank 0."""
    moved = {
        name: [replace(each, start_s=each.start_s + ahead_s, end_s=each.end_s + ahead_s) for each in own]
        for name, own in tracks.items()
    }
    operators = (Operator(name="aten::mm", calls=2, host_s=0.5, device_s=0.0),)
    return RankSpans(
        rank=rank,
        device="cpu",
        ahead_s=ahead_s,
        clock_error_s=1e-4,
        anchor_s=1.0 + ahead_s,
        tracks=moved,
        operators=operators,
    )


def two_ranks() -> list[RankProfile]:
    """A step from 1 s to 3 s: rank 0 waits from 2.0 s on for rank 1, which comes at 2.4 s; both leave at 2.5 s."""
    step = [TraceSpan(name="step 4", start_s=1.0, end_s=3.0)]
    phases = [TraceSpan(name="data", start_s=1.0, end_s=1.2), TraceSpan(name="forward", start_s=1.2, end_s=3.0)]
    ways = [TraceSpan(name="all_reduce", start_s=start, end_s=2.5, num_bytes=8, ranks=(0, 1)) for start in (1.8, 2.4)]
    waits = [TraceSpan(name="wait", start_s=start, end_s=2.5) for start in (2.0, 2.4)]
    memory = {"Device Type": 0, "Total Allocated": 4096}
    trace = {
        "traceEvents": [
            {"ph": "M", "name": "thread_name", "pid": 7, "tid": 8, "args": {"name": "thread 8 (python)"}},
            {"ph": "X", "cat": "user_annotation", "name": ANCHOR, "pid": 7, "tid": 8, "ts": 5e6, "dur": 1},
            {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 7, "tid": 8, "ts": 5.5e6, "dur": 1e5},
            {
                "ph": "i",
                "cat": "cpu_instant_event",
                "name": "[memory]",
                "pid": 7,
                "tid": 8,
                "ts": 5.6e6,
                "args": memory,
            },
        ]
    }
    return [
        place_rank(
            spans_of(rank, ahead, steps=step, phases=phases, collectives=[ways[rank]], waits=[waits[rank]]), trace
        )
        for rank, ahead in ((0, 0.0), (1, 50.0))
    ]


def test_clocks_are_corrected_and_every_rank_has_its_tracks() -> None:
    events = merged_events(two_ranks())
    named = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert named == ["rank 0 (cpu)", "rank 1 (cpu)"]
    ways = {event["pid"]: event for event in events if event["name"] == "all_reduce"}
    assert [ways[rank]["ts"] for rank in (0, 1)] == pytest.approx([0.8e6, 1.4e6])
    assert [ways[rank]["ts"] + ways[rank]["dur"] for rank in (0, 1)] == pytest.approx([1.5e6, 1.5e6])
    assert ways[0]["args"] == {"bytes": 8, "ranks": [0, 1]}
    products = [event for event in events if event["name"] == "aten::mm"]
    assert [event["ts"] for event in products] == pytest.approx([0.5e6, 0.5e6]), (
        "by the anchor, at 1 s on rank 0's clock"
    )
    assert all(event["tid"] > max(TRACKS.values()) for event in products)
    assert [event["args"] for event in events if event["ph"] == "C"] == [{"bytes": 4096}] * 2


def test_waiting_for_a_late_rank_is_told_from_the_network() -> None:
    found = summarize_profile(two_ranks())
    first, second = found.ranks
    assert (first.communication_s, first.exposed_s, first.hidden_s) == pytest.approx((0.7, 0.5, 0.2))
    assert (first.late_rank_s, first.network_s) == pytest.approx((0.4, 0.1))
    assert (second.exposed_s, second.late_rank_s, second.network_s) == pytest.approx((0.1, 0.0, 0.1))
    assert (first.data_s, first.peak_bytes, first.peak_phase) == (pytest.approx(0.2), 4096, "forward")
    assert found.idle["waiting for a late rank"] == pytest.approx(0.4 / 4)
    assert found.operators[0].calls == 4
    assert any("aten::mm" in line for line in found.lines())
    assert json.loads(json.dumps(found.to_json()))["ranks"][0]["hidden_s"] == pytest.approx(0.2)


def test_kernels_of_collectives_are_hidden_where_others_compute() -> None:
    kernels = {"ncclDevKernel_AllReduce": (1.0, 2.0), "gemm": (1.5, 2.5)}
    trace = {
        "traceEvents": [
            {"ph": "X", "cat": "user_annotation", "name": ANCHOR, "pid": 1, "tid": 1, "ts": 0.0, "dur": 0},
            *(
                {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": 7, "ts": start * 1e6, "dur": 1e6}
                for name, (start, _) in kernels.items()
            ),
        ]
    }
    rank = place_rank(spans_of(0, 0.0, steps=[TraceSpan(name="step 4", start_s=2.0, end_s=4.0)]), trace)
    (found,) = summarize_profile([rank]).ranks
    assert (found.communication_s, found.exposed_s, found.device_idle_s) == pytest.approx((1.0, 0.5, 0.5))
    assert [each.name for each in summarize_profile([rank]).kernels] == ["ncclDevKernel_AllReduce", "gemm"]


def test_lengths_of_intervals_count_time_once() -> None:
    assert time_in_all([(0, 2), (1, 3), (5, 6), (7, 7)]) == 4
    assert time_in_all([(0, 2), (5, 6)], [(1, 5.5)]) == 1.5


def test_another_time_line_is_laid_beside(tmp_path: Path) -> None:
    path = tmp_path / "simulated.json.gz"
    write_events(path, [*merged_events(two_ranks())[:2], span(0, "phases", "forward", 0.0, 1.0)])
    assert json.loads(gzip.decompress(path.read_bytes()))["displayTimeUnit"] == "ms"
    both = beside([span(0, "steps", "step 1", 0.0, 1.0)], path)
    assert [event["pid"] for event in both] == [0, 1, 1, 1]
    assert both[1]["args"]["name"] == "simulated.json.gz: rank 0 (cpu)"
    no_zip = gzip.compress(b"[]")[:10] + b"\xff" * 20
    for content in (b"", b"[1]", b'{"events": 1}', b'[{"pid": []}]', b'[{"args": 1}]', no_zip):
        bad = tmp_path / ("bad.json.gz" if content is no_zip else "bad.json")
        bad.write_bytes(content)
        with pytest.raises(UsageError, match="it is a trace of"):
            beside([], bad)


def test_a_trace_without_the_anchor_and_virtual_ranks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no event"):
        place_rank(spans_of(0, 0.0), {"traceEvents": []})
    config = load_config("configs/digits.yaml", ["comm.backend=virtual"])
    with pytest.raises(UsageError, match="virtual ranks share one process"):
        profiled_config(config, 3, tmp_path)


def test_spans_pass_through_json() -> None:
    spans = two_ranks()[1].spans
    assert RankSpans.from_json(json.loads(json.dumps(asdict(spans)))) == spans


def test_a_profile_is_shorter_than_the_warmup_of_its_config(tmp_path: Path) -> None:
    config = load_config("configs/gpt_pydoc.yaml", ["parallel.ranks=2", "checkpoint.every_epochs=1"])
    short = profiled_config(config, 5, tmp_path)
    assert (short.train.steps, short.optim.schedule.warmup, short.checkpoint.every_epochs) == (8, 0.0, None)
    assert run_checks(short) == []
