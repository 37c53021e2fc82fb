"""Steps whose gradients are not finite: counted alike on all ranks, until there are too many in a row.

A bad step was left out (see update.py); here the host learns of it. Every rank reads the same norm of the same step at
the same point of its program, so all of them can stop together, and replay the step together.

On CUDA the norm of a step is read when the next one has been issued: the device always has work, and the host runs one
step ahead of it at most. Once a step was bad, the norm is read at once, for the parameters of a bad step are only there
until the next good one.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from paceline.train.step import StepOutcome


@dataclass(frozen=True, slots=True, kw_only=True)
class BadStep:
    """A step that was left out, with what a replay needs of it."""

    step: int
    grad_norm: float
    num_in_a_row: int
    outcome: StepOutcome
    batch: Any

    def detail(self) -> dict[str, Any]:
        """Returns what a record tells of it. Waits for the device."""
        scale = self.outcome.loss_scale
        scaled = {} if scale is None else {"loss_scale": float(scale)}
        return {"grad_norm": self.grad_norm, "in_a_row": self.num_in_a_row, **scaled}


@dataclass(slots=True)
class _Unread:
    step: int
    outcome: StepOutcome
    batch: Any
    norm: torch.Tensor
    copied: torch.cuda.Event | None


class BadSteps:
    """How many steps were left out: in all, and in a row up to now."""

    def __init__(self) -> None:
        self.num_skipped = 0
        self.num_in_a_row = 0
        self._unread: deque[_Unread] = deque()

    def note(self, step: int, outcome: StepOutcome, batch: Any) -> Iterator[BadStep]:
        """Takes a step that was issued; yields the bad ones among those that are known by now."""
        norm, copied = outcome.grad_norm.detach(), None
        if norm.device.type != "cpu":
            norm = norm.to("cpu", non_blocking=True)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record()
        self._unread.append(_Unread(step, outcome, batch, norm, copied))
        return self._read(leave=0 if copied is None else 1)

    def read_all(self) -> Iterator[BadStep]:
        """Yields the bad ones among all steps issued. Waits for the device."""
        return self._read(leave=0)

    def state_dict(self) -> dict[str, int]:
        """Returns the counts, of the steps that were read."""
        return {"num_skipped": self.num_skipped, "num_in_a_row": self.num_in_a_row}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.num_skipped, self.num_in_a_row = state["num_skipped"], state["num_in_a_row"]
        self._unread.clear()

    def _read(self, leave: int) -> Iterator[BadStep]:
        while len(self._unread) > (0 if self.num_in_a_row else leave):
            unread = self._unread.popleft()
            if unread.copied is not None:
                unread.copied.synchronize()  # sync point, with the step before the last one issued
            norm = unread.norm.item()
            if math.isfinite(norm):
                self.num_in_a_row = 0
                continue
            self.num_skipped += 1
            self.num_in_a_row += 1
            yield BadStep(
                step=unread.step,
                grad_norm=norm,
                num_in_a_row=self.num_in_a_row,
                outcome=unread.outcome,
                batch=unread.batch,
            )
