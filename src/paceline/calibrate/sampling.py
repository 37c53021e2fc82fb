"""How a thing is timed, and when a machine is too noisy to be believed. No torch.

A sample is many runs in a row, long enough for the clock (a millisecond at least). The median counts; the spread is the
distance between the quartiles over the median. Two things give a noisy machine away: samples that spread, and, on a
CPU, a thread that was not running while the clock was.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from paceline.errors import UsageError

_FEWEST = 3
MOST_SPREAD = 0.15
LEAST_SHARE = 0.90


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopwatch:
    """Times steps: seconds of one run. ``meet`` brings ranks together first, ``finish`` waits for a device.

    Takes ``samples``, or fewer, three at least, of a step that would take longer than ``most_s`` together. A sample
    is as many runs as take ``shortest_s``: a GPU's clocks fall under load, which a short one does not see. ``spreads``
    keeps how far the samples of what has a name spread.
    """

    samples: int = 9
    most_s: float = 2.0
    shortest_s: float = 1e-3
    meet: Callable[[], None] = lambda: None
    finish: Callable[[], None] = lambda: None
    spreads: dict[str, float] = field(default_factory=dict)

    def time(self, step: Callable[[], object], name: str = "") -> float:
        """Times a step that a rank runs by itself; the ranks meet once, since one may take fewer samples."""
        step()
        self.finish()
        self.meet()
        once = max(self._once(step, 1), 1e-7)
        repeats = max(1, round(self.shortest_s / once))
        samples = min(self.samples, max(_FEWEST, int(self.most_s / (once * repeats))))
        return self._median(name, [self._once(step, repeats) / repeats for _ in range(samples)])

    def time_together(self, step: Callable[[], object], repeats: int, name: str = "") -> float:
        """Times a step that all ranks run together, as often on each; they meet before each sample."""
        step()
        self.finish()
        found = []
        for _ in range(self.samples):
            self.meet()
            found.append(self._once(step, repeats) / repeats)
        return self._median(name, found)

    def time_host(self, step: Callable[[], object], name: str = "") -> float:
        """Times the host alone: a device's queue is empty before, and what it still has to do after is not counted."""
        watch = Stopwatch(samples=4 * self.samples, meet=self.finish, spreads=self.spreads)
        return watch.time_together(step, 1, name)

    def _once(self, step: Callable[[], object], repeats: int) -> float:
        start = time.perf_counter()
        for _ in range(repeats):
            step()
        self.finish()
        return time.perf_counter() - start

    def _median(self, name: str, samples: list[float]) -> float:
        seconds, spread = summarize(samples)
        if name:
            self.spreads[name] = spread
        return seconds


def summarize(samples: list[float]) -> tuple[float, float]:
    """Returns the median, and how far apart the quartiles are, over it."""
    middle = statistics.median(samples)
    low, _, high = statistics.quantiles(samples, n=4) if len(samples) > 1 else [middle] * 3
    return middle, (high - low) / middle


def processor_share(step: Callable[[], object], seconds: float = 0.3) -> float:
    """Returns the share of the time in which this busy thread really ran. 1: no other process took its core."""
    start, busy = time.perf_counter(), time.thread_time()
    while time.perf_counter() - start < seconds:
        step()
    return min(1.0, (time.thread_time() - busy) / (time.perf_counter() - start))


def check_quiet(spreads: Mapping[str, float], share: float) -> None:
    """Raises UsageError where a calibration is plainly off: half of all spread too far, or the processor was shared."""
    middle = statistics.median(spreads.values()) if spreads else 0.0
    if middle <= MOST_SPREAD and share >= LEAST_SHARE:
        return
    worst = sorted(spreads, key=lambda name: -spreads[name])[:3]
    shown = ", ".join(f"{name} {100 * spreads[name]:.0f} %" for name in worst)
    spread = f"samples spread by {100 * middle:.0f} % (the widest: {shown}), and " if spreads else ""
    raise UsageError(
        f"this machine is too noisy to be measured: {spread}a thread had the processor {100 * share:.0f} % of "
        "the time\n"
        f"  a calibration takes {100 * MOST_SPREAD:.0f} % of spread at most, and {100 * LEAST_SHARE:.0f} % of a "
        "processor at least\n"
        "  end what else runs here and try again, or take it as it is with --noisy"
    )
