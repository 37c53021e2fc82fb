"""What is done when something goes wrong: pure functions from what happened to a decision.

    a step's gradients are not finite  on_bad_step(policy, num_in_a_row, limit, ...)        asked by every rank
    the loss jumped                    find_spike(losses) then on_spike(policy, ...)        asked by every rank

Nothing here talks, reads a clock or imports torch: whoever asks with the same values gets the same answer, so that
ranks which hold the same numbers agree without a word. What is done about ranks that died or hung is decided by
``health/diagnosis.py``.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from paceline.config.sections import RecoveryConfig
from paceline.health.diagnosis import Stop

_MAD_TO_DEVIATION = 1.4826  # of a normal distribution


@dataclass(slots=True)
class StopRequest:
    """What a signal leaves for the loop: its number, 0 before one came."""

    signal: int = 0

    def ask(self, number: int) -> None:
        """Asks for a stop. Safe in a signal handler."""
        self.signal = number


@dataclass(frozen=True, slots=True, kw_only=True)
class Spike:
    """A loss that lies far above those before it, at ``times`` of the threshold's unit."""

    loss: float
    median: float
    times: float

    def __str__(self) -> str:
        return f"{self.loss:.4g} after a median of {self.median:.4g}"


def find_spike(policy: RecoveryConfig, losses: Sequence[float], loss: float) -> Spike | None:
    """Says whether ``loss`` is a spike after ``losses``: those of the window, of which half must be there.

    ``factor``: it is more than the threshold times their median; for losses below zero, that far above its size.
    ``deviations``: it lies more than the threshold of robust standard deviations (1.48 x the median distance from the
    median) above it. A loss that is not finite is one.
    """
    known = [each for each in losses[-policy.spike_window :] if math.isfinite(each)]
    if len(known) < max(2, policy.spike_window // 2):
        return None
    median = statistics.median(known)
    if not math.isfinite(loss):
        return Spike(loss=loss, median=median, times=math.inf)
    if policy.spike_by == "factor":
        size = abs(median)
        times = (loss - median) / size + 1.0 if size else math.inf if loss > median else 1.0
    else:
        spread = _MAD_TO_DEVIATION * statistics.median(abs(each - median) for each in known)
        times = (loss - median) / spread if spread else math.inf if loss > median else 0.0
    return Spike(loss=loss, median=median, times=times) if times > policy.spike_threshold else None


@dataclass(frozen=True, slots=True, kw_only=True)
class GoBack:
    """The run goes back to its last checkpoint: behind the data since then, or with rates times ``rate_factor``."""

    reason: str
    skips_data: bool
    rate_factor: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GoOn:
    """Nothing is done; ``is_noted``: but written down."""

    is_noted: bool = False


Reaction: TypeAlias = GoBack | GoOn | Stop


def on_spike(policy: RecoveryConfig, spike: Spike, *, num_roll_backs: int, has_checkpoint: bool) -> Reaction:
    """Decides about a spike of the loss."""
    if policy.on_spike in ("ignore", "note"):
        return GoOn(is_noted=policy.on_spike == "note")
    what = f"the loss jumped to {spike}"
    if policy.on_spike == "stop":
        return Stop(reason=what)
    return _go_back(policy, policy.on_spike, what, num_roll_backs=num_roll_backs, has_checkpoint=has_checkpoint)


def on_bad_steps(
    policy: RecoveryConfig, *, num_in_a_row: int, limit: int, num_roll_backs: int, has_checkpoint: bool
) -> Reaction:
    """Decides about steps in a row whose gradients are not finite, and which were left out."""
    if policy.on_nan == "stop":
        return Stop(reason="recovery.on_nan = stop")
    if num_in_a_row < limit:
        return GoOn()
    if policy.on_nan == "skip":
        return Stop()
    what = f"{num_in_a_row} steps in a row had gradients that are not finite"
    return _go_back(policy, policy.on_nan, what, num_roll_backs=num_roll_backs, has_checkpoint=has_checkpoint)


def _go_back(policy: RecoveryConfig, how: str, what: str, *, num_roll_backs: int, has_checkpoint: bool) -> Reaction:
    if not has_checkpoint:
        return Stop(reason=f"{what}, and there is no checkpoint yet to go back to")
    if num_roll_backs >= policy.max_roll_backs:
        return Stop(reason=f"{what}, after the run went back recovery.max_roll_backs = {policy.max_roll_backs} times")
    if how == "lower_rate":
        return GoBack(reason=what, skips_data=False, rate_factor=policy.rate_factor)
    return GoBack(reason=what, skips_data=True)
