"""A replay as a trace for chrome://tracing and ui.perfetto.dev: one process a rank, one track a stream.

Times are microseconds. The same replay gives the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.errors import UsageError
from paceline.predict.replay.replayed import RankTimes, Replay


def trace_text(replay: Replay) -> str:
    """Returns the trace as JSON. Raises UsageError for a replay that kept no spans."""
    if not any(each.spans for each in replay.times):
        raise UsageError("this replay kept no spans\n  a trace shows them\n  replay(..., keeps_spans=True)")
    events = [event for process, times in enumerate(replay.times) for event in _events(process, times)]
    about = {"name": replay.name, "cluster": replay.cluster, "step_s": replay.seconds, "binds": replay.binds}
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}) + "\n"


def write_trace(replay: Replay, path: Path) -> None:
    """Writes the trace. Raises UsageError where it cannot be written."""
    text = trace_text(replay)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"the trace cannot be written to {path}: {error.strerror}") from error


def _events(process: int, times: RankTimes) -> Iterator[dict[str, Any]]:
    name = f"rank {times.rank}, stage {times.stage}" + (f", {times.slowed:g}x as slow" if times.slowed != 1 else "")
    yield {"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}}
    tracks = list(dict.fromkeys(_track(span.stream) for span in times.spans))
    order = sorted(tracks, key=lambda track: (track != "compute", track))
    for number, track in enumerate(order):
        yield {"ph": "M", "pid": process, "tid": number, "name": "thread_name", "args": {"name": track}}
    for span in times.spans:
        track = _track(span.stream)
        yield {
            "ph": "X",
            "pid": process,
            "tid": order.index(track),
            "name": span.name,
            "cat": span.stream.removeprefix("compute ") if track == "compute" else track,
            "ts": round(span.start * 1e6, 3),
            "dur": round((span.end - span.start) * 1e6, 3),
        }


def _track(stream: str) -> str:
    return "compute" if stream.startswith("compute") else stream
