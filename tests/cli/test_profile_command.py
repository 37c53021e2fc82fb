"""``paceline profile`` on real ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Call = Callable[..., Any]

pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")


def profile(project: Path, call: Call, *arguments: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    called = call("profile", *arguments, "--output", "t.json", "--json")
    assert called.code == 0, called
    return json.loads(called.out), json.loads((project / "t.json").read_text())["traceEvents"]


def names(events: list[dict[str, Any]], category: str, rank: int) -> set[str]:
    return {event["name"] for event in events if event.get("cat") == category and event["pid"] == rank}


def test_real_ranks_leave_one_time_line(project: Path, call: Call) -> None:
    found, events = profile(project, call, "tiny.yaml", "--steps", "2")
    assert (found["steps"], len(found["ranks"])) == (2, 2)
    assert all(each["communication_s"] > 0 and each["peak_bytes"] > 0 for each in found["ranks"])
    for rank in (0, 1):
        assert names(events, "steps", rank) == {"step 4", "step 5"}
        assert names(events, "phases", rank) == {"data", "forward", "backward", "optimizer"}
        assert "all_reduce" in names(events, "collectives", rank)
        assert "aten::addmm" in names(events, "cpu_op", rank)
    # Nobody leaves an all-reduce before the last has come, on clocks that are right.
    ways = [[e for e in events if e.get("cat") == "collectives" and e["pid"] == rank] for rank in (0, 1)]
    error_us = 2e6 * found["clock_error_s"]
    for one, other in zip(*ways, strict=True):
        assert one["ts"] + one["dur"] >= other["ts"] - error_us
        assert other["ts"] + other["dur"] >= one["ts"] - error_us
    assert not (project / "runs").exists()


@pytest.mark.exhaustive
def test_a_pipeline_shows_the_actions_of_its_schedule(project: Path, call: Call) -> None:
    (project / "gpt.yaml").write_text(
        "name: gpt\nmodel: {kind: gpt, size: gpt-nano, context: 16}\n"
        "data: {kind: synthetic_tokens, samples: 64, context: 16, vocab_size: 64}\n"
        "train: {steps: 3, microbatch: 2, accumulate: 4}\n"
        "parallel: {ranks: 2, device: cpu, threads: 1, pipeline: 2}\nmonitor: {tensorboard: false}\n"
    )
    found, events = profile(project, call, "gpt.yaml", "--steps", "1")
    assert {"F0.0", "F0.3", "B0.0"} <= names(events, "actions", 0)
    assert {"F", "B"} <= set(found["actions"])
