"""What is done when something goes wrong: pure functions from what happened to a decision.

    a step's gradients are not finite  on_bad_step(policy, num_in_a_row, limit, ...)        asked by every rank
    the loss jumped                    find_spike(losses) then on_spike(policy, ...)        asked by every rank

These neither talk nor read a clock: ranks that hold the same numbers agree without a word. What is done about ranks
that died or hung is decided by ``health/diagnosis.py``.

A bad step was left out (see step.py); here the host learns of it. Every rank reads the same norm at the same point of
its program, so all of them can stop and replay the step together. On CUDA the norm is read when the next step has been
issued: the device always has work. Once a step was bad, the norm is read at once, for the parameters of a bad step are
only there until the next good one.

Where numbers stop being finite is found by a replay with these parameters: samples first, then parameters, then the
first module's output, the loss, the first gradient in the order of backward. Costly and collective.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from paceline.comm.objects import gather_objects
from paceline.config.sections import RecoveryConfig
from paceline.engines.groups import tensors_in
from paceline.engines.precision import Precision
from paceline.health.diagnosis import Stop
from paceline.train.step import Passes, RunPasses, StepOutcome, accumulate

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
    """Says whether ``loss`` is a spike after ``losses``, or not finite; half of the window must be there.

    ``factor``: it is more than the threshold times their median; for losses below zero, that far above its size.
    ``deviations``: it lies more than the threshold of robust standard deviations (1.48 x the median distance) above.
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
    is_slower = how == "lower_rate"
    return GoBack(reason=what, skips_data=not is_slower, rate_factor=policy.rate_factor if is_slower else 1.0)


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


class BadSteps:
    """How many steps were left out: in all, and in a row up to now."""

    def __init__(self) -> None:
        self.num_skipped = 0
        self.num_in_a_row = 0
        # Step, outcome, batch, the norm on the host, and when it is there.
        self._unread: deque[tuple[int, StepOutcome, Any, torch.Tensor, torch.cuda.Event | None]] = deque()

    def note(self, step: int, outcome: StepOutcome, batch: Any) -> Iterator[BadStep]:
        """Takes a step that was issued; yields the bad ones among those that are known by now."""
        norm, copied = outcome.grad_norm.detach(), None
        if norm.device.type != "cpu":
            norm = norm.to("cpu", non_blocking=True)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record()
        self._unread.append((step, outcome, batch, norm, copied))
        return self.read(leave=0 if copied is None else 1)

    def state_dict(self) -> dict[str, int]:
        return {"num_skipped": self.num_skipped, "num_in_a_row": self.num_in_a_row}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.num_skipped, self.num_in_a_row = state["num_skipped"], state["num_in_a_row"]
        self._unread.clear()

    def read(self, leave: int = 0) -> Iterator[BadStep]:
        """Yields the bad ones among the steps issued, but for the last ``leave``. Waits for the device."""
        while len(self._unread) > (0 if self.num_in_a_row else leave):
            step, outcome, batch, measured, copied = self._unread.popleft()
            if copied is not None:
                copied.synchronize()  # sync point, with the step before the last one issued
            norm = measured.item()
            if math.isfinite(norm):
                self.num_in_a_row = 0
                continue
            self.num_skipped += 1
            self.num_in_a_row += 1
            yield BadStep(step=step, grad_norm=norm, num_in_a_row=self.num_in_a_row, outcome=outcome, batch=batch)


_DATA, _PARAMETER, _FORWARD, _LOSS, _GRADIENT = range(5)
_MANY = 2**40  # more calls than a step has


@dataclass(frozen=True, slots=True, order=True)
class Overflow:
    """Something that is not finite; the smallest finding is the cause of the others."""

    stage: int
    place: int
    rank: int
    what: str

    def __str__(self) -> str:
        return f"{self.what}, on rank {self.rank}"


def find_overflow(passes: Passes, run: RunPasses | None = None) -> Overflow | None:
    """Repeats the passes of a step and returns where its numbers stop being finite, the same on every rank.

    None where the repetition is finite, because it drew other random numbers, say. Leaves no gradients.
    """
    engine, rank = passes.engine, passes.engine.world.rank
    first = engine.groups.pipeline.rank * _MANY  # stages of a pipeline are called in their order
    findings: list[Overflow] = []
    calls: dict[str, int] = {}  # by module: the number of its last call
    next_call = count(1).__next__

    def look(stage: int, place: int, tensor: Any, before: str, after: str = "") -> None:
        problem = _describe(tensor) if isinstance(tensor, torch.Tensor) else ""
        if problem:
            findings.append(Overflow(stage, place, rank, f"{before}: {problem}{after}"))

    def watch(name: str) -> Any:
        def hook(module: nn.Module, _: Any, output: Any) -> None:
            calls[name] = next_call()
            for tensor in tensors_in(output):
                if not findings:
                    title = f"{name or 'the model'} ({type(module).__name__}) in forward"
                    look(_FORWARD, first + calls[name], tensor, title, " of its output")

        return hook

    handles = [module.register_forward_hook(watch(name)) for name, module in engine.module.named_modules()]
    try:
        values = (run or accumulate)(passes)
    finally:
        for handle in handles:
            handle.remove()
    for number, microbatch in enumerate(passes.microbatches):
        for leaf in tree_leaves(microbatch):
            shape = f" of shape {list(getattr(leaf, 'shape', ()))}"
            look(_DATA, len(findings), leaf, f"the data of microbatch {number}", shape)
    for name, parameter in engine.named_parameters():
        look(_PARAMETER, len(findings), parameter, f"the parameter {name} itself")
    findings += [Overflow(_LOSS, 0, rank, f"the loss is {v.total.item()}") for v in values if not v.total.isfinite()]
    engine.gradients()  # all of them at what the engine updates
    for name, parameter in engine.named_parameters():  # gradients of the modules called last arise first
        place = -calls.get(name.rpartition(".")[0], 0)
        look(_GRADIENT, place, parameter.grad, f"the gradient of {name} in backward")
    engine.zero_grad()
    everyone = gather_objects(engine.world, min(findings, default=None))
    return min((finding for finding in everyone if finding is not None), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wording:
    """What a user calls the things that an explanation names."""

    step: str = "step"
    rate: str = "optim.lr"
    clip: str = "optim.clip_norm"
    precision: str = "train.precision = bf16"


def explain_bad_steps(
    bad: BadStep, finding: Overflow | None, precision: Precision, wording: Wording | None = None
) -> str:
    """Writes why a run stops: how many steps in a row were left out, where the first number overflowed, what to do."""
    wording = wording or Wording()
    step, stage = wording.step, None if finding is None else finding.stage
    scale = "" if bad.outcome.loss_scale is None else f", loss scale {float(bad.outcome.loss_scale):g}"
    where = finding or "none in a repetition: the step drew other random numbers, or parameters have changed since"
    if stage == _DATA:
        advice = "repair or leave out these samples"
    elif stage == _PARAMETER:
        advice = "start from an earlier checkpoint"
    elif torch.float16 in (precision.autocast_dtype, precision.param_dtype):
        advice = f"use {wording.precision}, which has the range of fp32, or lower {wording.rate}"
    else:
        advice = f"lower {wording.rate}, set {wording.clip}, or look at the data of that {step}"
    return (
        f"{bad.num_in_a_row} {step}s in a row had gradients that are not finite, up to {step} {bad.step} "
        f"(gradient norm {bad.grad_norm}{scale})\n"
        f"  the first numbers that are not finite: {where}\n"
        f"  those {step}s were left out, and the parameters are as they were before; {advice}"
    )


def _describe(tensor: torch.Tensor) -> str:
    """Counts what is not finite in a tensor; empty if nothing is."""
    if not tensor.is_floating_point() or not tensor.numel():
        return ""
    counts = {"nan": int(tensor.detach().isnan().sum()), "inf": int(tensor.detach().isinf().sum())}
    parts = [f"{count} {kind}" for kind, count in counts.items() if count]
    return f"{' and '.join(parts)} in {tensor.numel()} numbers" if parts else ""
