"""How long a run took to come to its first step, and what for: an event ``first_step`` in the records of each rank.

processes    from the launcher's start to the rank's first line: Python, torch, the decisions
joining      the ranks find one another
data, model  made by the rank; with the engine around the model, the optimizer and the loaders
checkpoint   read, where the run goes on from one
step         the first step, in which torch compiles
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from paceline.train.step import StepResult
    from paceline.train.trainer import Trainer


@dataclass(slots=True)
class StartTimes:
    """Adds up the parts of a start, and writes them down after the first step: it is one of the trainer's hooks."""

    began: float  # by time.monotonic()
    parts: dict[str, float] = field(default_factory=dict)
    is_told: bool = False

    @classmethod
    def since_start_of(cls, process: int) -> Self:
        """Begins when a process did; where nobody can tell, now."""
        return cls(time.monotonic() - process_age(process))

    def lap(self, part: str) -> None:
        """Ends a part of the start."""
        self.parts[part] = time.monotonic() - self.began - sum(self.parts.values())

    def __call__(self, trainer: Trainer, result: StepResult) -> None:
        if not self.is_told:
            self.is_told = True
            self.lap("step")
            parts = {part: round(seconds, 3) for part, seconds in self.parts.items()}
            trainer.note("first_step", {"seconds": round(sum(self.parts.values()), 3), **parts}, step=result.step)


def process_age(process: int) -> float:
    """Returns for how many seconds a process has been there, on Linux; 0 where nobody can tell."""
    with contextlib.suppress(OSError, ValueError, AttributeError, IndexError):
        # Of psutil's figure the start of the machine is a part, in whole seconds.
        after_name = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        started = int(after_name[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)
    return 0.0
