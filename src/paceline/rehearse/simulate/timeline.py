"""The time line of a simulated run: for Chrome and Perfetto as a file, and for a console as a few rows of letters.

The file is in the trace event format: open chrome://tracing or ui.perfetto.dev and load it. Every rank has the rows of
a profiled one: its steps, what it computes and waits for, and what is on its way for it. It begins with the first step:
set-up is no part of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from paceline.chrome_trace import Event, name_process, name_tracks, span, write_events
from paceline.comm.virtual.clock import ClockSpan, VirtualClock
from paceline.rehearse.simulate.recording import StepBounds

LETTERS = {"data": "d", "forward": "F", "backward": "B", "optimizer": "U", "evaluation": "e"}
LEGEND = "F forward  B backward  U update  d data  e evaluation  . waiting  = communication"
_WIDTH = 64
_ROWS = {"compute": "phases", "wait": "waits", "communication": "collectives"}


def trace_events(clocks: Sequence[VirtualClock], steps: Sequence[Sequence[StepBounds]]) -> list[Event]:
    """Returns the spans of all ranks as trace events, in the order of ranks and times, from the first step on."""
    zero_s = min((bounds[0].start_s for bounds in steps if bounds), default=0.0)
    events: list[Event] = []
    for clock, bounds in zip(clocks, steps, strict=True):
        events += name_process(clock.rank, f"rank {clock.rank}, simulated")
        events += name_tracks(clock.rank, ("steps", *_ROWS.values()))
        events += [
            span(clock.rank, "steps", f"step {each.step}", each.start_s - zero_s, each.end_s - zero_s)
            for each in bounds
        ]
        later = [each for each in clock.spans if each.end_s > zero_s]
        for each in sorted(later, key=lambda one: (one.start_s, one.end_s, one.row)):
            name = f"wait for {each.name}" if each.row == "wait" else each.name
            more = {"bytes": each.num_bytes, "ranks": list(each.ranks)} if each.row == "communication" else None
            start_s = max(each.start_s, zero_s) - zero_s
            events.append(span(clock.rank, _ROWS[each.row], name, start_s, each.end_s - zero_s, more))
    return events


def write_trace(path: Path, clocks: Sequence[VirtualClock], steps: Sequence[Sequence[StepBounds]]) -> None:
    """Writes the trace, compressed where its name ends in ``.gz``. Raises UsageError if it cannot be written."""
    write_events(path, trace_events(clocks, steps), {"kind": "simulated"})


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
        spans = [each for each in clock.spans if each.end_s > start_s and each.start_s < end_s]
        own = [(LETTERS.get(each.name, "?") if each.row == "compute" else ".", each) for each in spans]
        compute = _row([each for each in own if each[1].row != "communication"], start_s, end_s)
        network = _row([("=", each) for each in spans if each.row == "communication"], start_s, end_s)
        lines += [f"rank {clock.rank:<3} |{compute}|", f"{'':8} |{network}|"]
    if len(clocks) > most:
        lines.append(f"and {len(clocks) - most} ranks more: see the trace")
    return lines


def _row(spans: Iterable[tuple[str, ClockSpan]], start_s: float, end_s: float) -> str:
    cell_s = (end_s - start_s) / _WIDTH
    shares: list[dict[str, float]] = [{} for _ in range(_WIDTH)]
    for letter, each in spans:
        first = max(0, int((each.start_s - start_s) / cell_s))
        last = min(_WIDTH - 1, int((each.end_s - start_s) / cell_s))
        for cell in range(first, last + 1):
            low, high = start_s + cell * cell_s, start_s + (cell + 1) * cell_s
            share = min(high, each.end_s) - max(low, each.start_s)
            if share > 0:
                shares[cell][letter] = shares[cell].get(letter, 0.0) + share
    return "".join(max(sorted(share), key=lambda letter: share[letter]) if share else " " for share in shares)
