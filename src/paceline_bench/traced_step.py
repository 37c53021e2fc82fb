"""One step as the GPU ran it: kernels, when it computed nothing, and when its wires were busy meanwhile.

time line of torch's profiler --what_ran--> kernels launched, idle gaps, and coarse spans that a picture is made of
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import torch

Spans: TypeAlias = list[tuple[float, float]]

_ON_WIRES = ("_hold_kernel", "nccl")  # what names of kernels that communicate have in them
_KINDS = ("kernel", "gpu_memcpy", "gpu_memset")
_GAP_MS = 0.01  # shorter pauses between two kernels are not counted
_SEEN = 0.002  # of a step: shorter pauses are not drawn


def trace_step(step: Callable[[], object], device: torch.device) -> dict[str, Any]:
    """Runs a step and returns what ran on the GPU; nothing on a CPU."""
    if device.type != "cuda":
        return {}
    torch.cuda.synchronize(device)
    # The GPU alone: to look at the host's operators would slow it, and the pauses are what is asked for.
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as look:
        step()
        torch.cuda.synchronize(device)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "step.json"
        look.export_chrome_trace(str(path))
        return what_ran(json.loads(path.read_text(encoding="utf-8"))["traceEvents"])


def what_ran(events: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns what a time line of torch's profiler says of the GPU; nothing where no kernel was seen.

    ``idle_ms``: when no kernel computed, between the first and the last; ``waits_ms``: of that, when wires were busy.
    """
    seen = [event for event in events if event.get("cat") in _KINDS]
    wires = [event for event in seen if any(word in event["name"] for word in _ON_WIRES)]
    computed = [event for event in seen if not any(word in event["name"] for word in _ON_WIRES)]
    if not computed:
        return {}
    busy, sent = _merged(computed), _merged(wires)
    first, last = busy[0][0], busy[-1][1]
    gaps = [(end, start) for (_, end), (start, _) in pairwise(busy)]
    waits = sum(max(0.0, min(end, until) - max(start, begin)) for start, end in gaps for begin, until in sent)
    return {
        "kernels": sum(event["cat"] == "kernel" for event in computed),
        "gaps": sum(end - start >= _GAP_MS for start, end in gaps),
        "idle_ms": round(sum(end - start for start, end in gaps), 4),
        "waits_ms": round(waits, 4),
        "timeline": {
            "compute": _coarse(busy, first, _SEEN * (last - first)),
            "wires": _coarse(sent, first, _SEEN * (last - first)),
        },
    }


def _merged(events: Sequence[Mapping[str, Any]]) -> Spans:
    """Returns the milliseconds in which one of these ran at least, in order."""
    found: Spans = []
    for start, end in sorted((event["ts"] / 1e3, (event["ts"] + event["dur"]) / 1e3) for event in events):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def _coarse(spans: Spans, first: float, pause: float) -> list[list[float]]:
    """Returns spans since ``first``, those joined that lie no further apart than ``pause``."""
    found: list[list[float]] = []
    for start, end in spans:
        if found and start - first - found[-1][1] <= pause:
            found[-1][1] = round(end - first, 3)
        else:
            found.append([round(start - first, 3), round(end - first, 3)])
    return found
