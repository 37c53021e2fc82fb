"""The time line of a simulated run: for Chrome and Perfetto as a file, and for a console as a few rows of letters.

The file is in the trace event format: open chrome://tracing or ui.perfetto.dev and load it. Every rank has two rows,
what it computes and waits for, and what is on its way for it. It begins with the first step: set-up is no part of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from paceline.comm.virtual.clock import ClockSpan, VirtualClock
from paceline.errors import RunFolderError
from paceline.rehearse.simulate.recording import StepBounds

LETTERS = {"data": "d", "forward": "F", "backward": "B", "optimizer": "U", "evaluation": "e"}
LEGEND = "F forward  B backward  U update  d data  e evaluation  . waiting  = communication"
_WIDTH = 64


def trace_events(clocks: Sequence[VirtualClock], steps: Sequence[Sequence[StepBounds]]) -> list[dict[str, Any]]:
    """Returns the spans of all ranks as trace events, in the order of ranks and times, from the first step on."""
    zero_s = min((bounds[0].start_s for bounds in steps if bounds), default=0.0)
    events: list[dict[str, Any]] = [_name("process_name", 0, "simulated run")]
    for clock, bounds in zip(clocks, steps, strict=True):
        compute, network = 2 * clock.rank, 2 * clock.rank + 1
        events.append(_name("thread_name", compute, f"rank {clock.rank}"))
        events.append(_name("thread_name", network, f"rank {clock.rank} network"))
        events += [_event(f"step {each.step}", "step", compute, each.start_s, each.end_s, zero_s) for each in bounds]
        later = [span for span in clock.spans if span.end_s > zero_s]
        for span in sorted(later, key=lambda each: (each.start_s, each.end_s, each.row)):
            row = network if span.row == "communication" else compute
            name = f"wait for {span.name}" if span.row == "wait" else span.name
            event = _event(name, span.row, row, max(span.start_s, zero_s), span.end_s, zero_s)
            if span.row == "communication":
                event["args"] = {"bytes": span.num_bytes, "ranks": list(span.ranks)}
            events.append(event)
    return events


def write_trace(path: Path, clocks: Sequence[VirtualClock], steps: Sequence[Sequence[StepBounds]]) -> None:
    """Writes the trace. Raises RunFolderError if it cannot be written."""
    text = json.dumps({"traceEvents": trace_events(clocks, steps), "displayTimeUnit": "ms"}, separators=(",", ":"))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise RunFolderError(
            f"cannot write the trace {path}: {error.strerror or error}\n  give a file in a folder that can be written"
        ) from error


def draw_step(clocks: Sequence[VirtualClock], steps: Sequence[Sequence[StepBounds]], *, most: int = 8) -> list[str]:
    """Draws the last step of the first ``most`` ranks: two rows each, a letter for what took most of its time."""
    if not steps or not all(steps):
        return []
    start_s = min(bounds[-1].start_s for bounds in steps)
    end_s = max(bounds[-1].end_s for bounds in steps)
    if end_s <= start_s:
        return []
    lines = []
    for clock in clocks[:most]:
        spans = [span for span in clock.spans if span.end_s > start_s and span.start_s < end_s]
        own = [(LETTERS.get(span.name, "?") if span.row == "compute" else ".", span) for span in spans]
        compute = _row([each for each in own if each[1].row != "communication"], start_s, end_s)
        network = _row([("=", span) for span in spans if span.row == "communication"], start_s, end_s)
        lines += [f"rank {clock.rank:<3} |{compute}|", f"{'':8} |{network}|"]
    if len(clocks) > most:
        lines.append(f"and {len(clocks) - most} ranks more: see the trace")
    return lines


def _row(spans: Iterable[tuple[str, ClockSpan]], start_s: float, end_s: float) -> str:
    cell_s = (end_s - start_s) / _WIDTH
    shares: list[dict[str, float]] = [{} for _ in range(_WIDTH)]
    for letter, span in spans:
        first = max(0, int((span.start_s - start_s) / cell_s))
        last = min(_WIDTH - 1, int((span.end_s - start_s) / cell_s))
        for cell in range(first, last + 1):
            low, high = start_s + cell * cell_s, start_s + (cell + 1) * cell_s
            share = min(high, span.end_s) - max(low, span.start_s)
            if share > 0:
                shares[cell][letter] = shares[cell].get(letter, 0.0) + share
    return "".join(max(sorted(share), key=lambda letter: share[letter]) if share else " " for share in shares)


def _event(name: str, category: str, row: int, start_s: float, end_s: float, zero_s: float) -> dict[str, Any]:
    return {
        "name": name,
        "cat": category,
        "ph": "X",
        "pid": 0,
        "tid": row,
        "ts": round((start_s - zero_s) * 1e6, 3),
        "dur": round((end_s - start_s) * 1e6, 3),
    }


def _name(what: str, row: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": 0, "tid": row, "args": {"name": name}}
