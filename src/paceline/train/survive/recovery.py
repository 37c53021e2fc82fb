"""What is done when something goes wrong: pure functions from what happened to a decision.

    a rank died, raised, hung         after_failure(policy, attempts) -> Restart | Stop     asked by the launcher
    a step's gradients are not finite  on_bad_step(policy, num_in_a_row, limit, ...)        asked by every rank
    the loss jumped                    find_spike(losses) then on_spike(policy, ...)        asked by every rank
    a checkpoint cannot be written     on_full_disk(policy, ...)                            asked by every rank

Nothing here talks, reads a clock or imports torch: whoever asks with the same values gets the same answer, so that
ranks which hold the same numbers agree without a word. A run that is started again must get further than before, and
an error that comes twice at the same step comes a third time.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

Kind = Literal["killed", "error", "mistake", "out_of_memory", "full_disk", "hang", "lost", "refused"]
SpikeRule = Literal["factor", "deviations"]

# Errors of the program and not of its surroundings: they come again.
MISTAKES: Final = frozenset(
    {
        "AssertionError",
        "AttributeError",
        "ImportError",
        "ModuleNotFoundError",
        "NameError",
        "NotImplementedError",
        "SyntaxError",
        "TypeError",
        "UnboundLocalError",
    }
)
_MAD_TO_DEVIATION = 1.4826  # of a normal distribution


@dataclass(slots=True)
class StopRequest:
    """What a signal leaves for the loop: its number, 0 before one came."""

    signal: int = 0

    def ask(self, number: int) -> None:
        """Asks for a stop. Safe in a signal handler."""
        self.signal = number


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """What ended an attempt: its kind, on which rank, after how many steps, and the first line that tells of it."""

    kind: Kind
    rank: int
    step: int
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One start of the ranks: from which step, how far it came, and what ended it."""

    first_step: int
    incident: Incident

    @property
    def last_step(self) -> int:
        """The last step that was trained."""
        return max(self.first_step, self.incident.step)


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """How often ranks are started again, and after what."""

    max_restarts: int = 3
    max_stalled_restarts: int = 1
    on_oom: Literal["stop", "restart", "halve"] = "stop"
    on_hang: Literal["restart", "stop"] = "restart"


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """The ranks are started again; ``halves_microbatch`` with half as many samples at a time."""

    number: int
    halves_microbatch: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """The run ends. ``reason`` is empty where the incident says it all; ``gives_up``: after it was started again."""

    reason: str = ""
    gives_up: bool = False


def after_failure(policy: RestartPolicy, attempts: Sequence[Attempt]) -> Restart | Stop:
    """Decides about a run whose attempts have all failed, the last one just now."""
    incident, number = attempts[-1].incident, len(attempts)
    if incident.kind == "refused" or policy.max_restarts == 0:
        return Stop()
    if incident.kind == "mistake":
        return Stop(reason="not started again: an error of this kind comes again")
    if incident.kind == "out_of_memory" and policy.on_oom == "stop":
        return Stop(reason="not started again: memory would run out again (see recovery.on_oom)")
    if incident.kind == "full_disk":
        return Stop(reason="not started again: it must be able to write first")
    if incident.kind == "hang" and policy.on_hang == "stop":
        return Stop(reason="not started again: recovery.on_hang = stop")
    halves = incident.kind == "out_of_memory" and policy.on_oom == "halve"
    if number > 1 and _is_same(attempts[-2].incident, incident) and not halves:
        return Stop(reason=f"not started again: the same came twice, after step {incident.step}", gives_up=True)
    if incident.kind == "error" and incident.step == 0 and number == 1 and attempts[-1].first_step == 0:
        return Stop(reason="not started again: it came before the first step, and would again")
    if number > policy.max_restarts:
        reason = f"not started again: recovery.max_restarts = {policy.max_restarts} is reached"
        return Stop(reason=reason, gives_up=True)
    stalled = num_stalled(attempts)
    if stalled > policy.max_stalled_restarts:
        times = "the last restart" if stalled == 1 else f"each of the last {stalled} restarts"
        return Stop(reason=f"not started again: {times} came no further than step {_best(attempts)}", gives_up=True)
    return Restart(number=number, halves_microbatch=halves)


def num_stalled(attempts: Sequence[Attempt]) -> int:
    """Counts the attempts since the one that came furthest; an earlier one counts where two came as far."""
    best = _best(attempts)
    first = next(place for place, attempt in enumerate(attempts) if attempt.last_step == best)
    return len(attempts) - 1 - first


def _best(attempts: Sequence[Attempt]) -> int:
    return max(attempt.last_step for attempt in attempts)


def _is_same(before: Incident, now: Incident) -> bool:
    return (before.kind, before.rank, before.step, before.message) == (now.kind, now.rank, now.step, now.message)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossPolicy:
    """What is done about losses that jump and gradients that are not finite."""

    on_nan: Literal["skip", "roll_back", "lower_rate", "stop"] = "skip"
    on_spike: Literal["ignore", "note", "roll_back", "lower_rate", "stop"] = "ignore"
    spike_by: SpikeRule = "factor"
    spike_threshold: float = 3.0
    spike_window: int = 50
    rate_factor: float = 0.5
    max_roll_backs: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Spike:
    """A loss that lies far above those before it, at ``times`` of the threshold's unit."""

    loss: float
    median: float
    times: float

    def __str__(self) -> str:
        return f"{self.loss:.4g} after a median of {self.median:.4g}"


def find_spike(losses: Sequence[float], loss: float, *, by: SpikeRule, threshold: float, window: int) -> Spike | None:
    """Says whether ``loss`` is a spike after ``losses``: the last ``window``, of which half must be there.

    ``factor``: it is more than ``threshold`` times their median; for losses below zero, that far above its size.
    ``deviations``: it lies more than ``threshold`` robust standard deviations (1.48 x the median distance from the
    median) above it. A loss that is not finite is one.
    """
    known = [each for each in losses[-window:] if math.isfinite(each)]
    if len(known) < max(2, window // 2):
        return None
    median = statistics.median(known)
    if not math.isfinite(loss):
        return Spike(loss=loss, median=median, times=math.inf)
    if by == "factor":
        size = abs(median)
        times = (loss - median) / size + 1.0 if size else math.inf if loss > median else 1.0
    else:
        spread = _MAD_TO_DEVIATION * statistics.median(abs(each - median) for each in known)
        times = (loss - median) / spread if spread else math.inf if loss > median else 0.0
    return Spike(loss=loss, median=median, times=times) if times > threshold else None


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


def on_spike(policy: LossPolicy, spike: Spike, *, num_roll_backs: int, has_checkpoint: bool) -> Reaction:
    """Decides about a spike of the loss."""
    if policy.on_spike in ("ignore", "note"):
        return GoOn(is_noted=policy.on_spike == "note")
    what = f"the loss jumped to {spike}"
    if policy.on_spike == "stop":
        return Stop(reason=what)
    return _go_back(policy, policy.on_spike, what, num_roll_backs=num_roll_backs, has_checkpoint=has_checkpoint)


def on_bad_steps(
    policy: LossPolicy, *, num_in_a_row: int, limit: int, num_roll_backs: int, has_checkpoint: bool
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


def _go_back(policy: LossPolicy, how: str, what: str, *, num_roll_backs: int, has_checkpoint: bool) -> GoBack | Stop:
    if not has_checkpoint:
        return Stop(reason=f"{what}, and there is no checkpoint yet to go back to")
    if num_roll_backs >= policy.max_roll_backs:
        return Stop(reason=f"{what}, after the run went back recovery.max_roll_backs = {policy.max_roll_backs} times")
    if how == "lower_rate":
        return GoBack(reason=what, skips_data=False, rate_factor=policy.rate_factor)
    return GoBack(reason=what, skips_data=True)


def on_full_disk(policy: Literal["stop", "warn"], *, is_last: bool) -> GoOn | Stop:
    """Decides about a checkpoint that could not be written. The last one of a run or before its end must be."""
    return GoOn(is_noted=True) if policy == "warn" and not is_last else Stop()
