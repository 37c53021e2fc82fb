"""One optimizer step over this rank's microbatches: the one that training, simulation and verification all run.

    scale = ranks / count                      count over all ranks and microbatches, known before backward
    for each microbatch:                       all but the last without synchronisation
        (summed loss * scale).backward()       gradients are averaged over ranks: the ranks cancel
    clip by the global norm; update            unless that norm is not finite

So the gradient is that of the mean over the global batch, however it was cut. Every rank goes through the same number
of microbatches, and sits out those for which it has no samples. The norm is the same on all ranks, and not finite as
soon as any gradient of any rank is not: all ranks update, or none does.

[Note: skipping] On a CPU the host decides by the norm. On CUDA it would have to wait for the device in every step, so
that fused optimizers are handed a flag on the device; with others, or parameters on the host, the host waits.

[Note: clipping] To read and write gradients again only to scale them costs as much as a fifth of the update. So a CPU
does it in the steps that need it, and fused optimizers on CUDA are handed the factor, that of masters the norm.

[Note: scaling] The smallest numbers of fp16 are too large for many gradients. There the loss is scaled besides:

    loss * scale --backward--> gradients * scale --/ scale--> gradients
    a gradient overflows:         the step is left out, scale *= backoff
    2,000 good steps since:       scale *= growth

Powers of two scale exactly, and the host never waits for scale or counts. What is scaled is a microbatch's share of the
mean over the global batch: which steps are left out does not depend on the ranks. Where the count of elements is
exchanged after backward, that of the step before stands for it until then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch.utils._pytree import tree_map_only

from paceline.data.loader import StepBatch
from paceline.engines.engine import Engine, OnPhase, ignore_phase
from paceline.engines.loss_sums import LossSum
from paceline.engines.precision import Precision
from paceline.errors import UsageError
from paceline.train.loss import Loss
from paceline.train.master_adamw import MasterAdamW, Scaling


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalerPolicy:
    """How the scale starts and moves."""

    initial: float = 65536.0
    growth: float = 2.0
    backoff: float = 0.5
    growth_interval: int = 2000

    def __post_init__(self) -> None:
        if self.initial <= 0 or self.growth < 1 or not 0 < self.backoff < 1 or self.growth_interval < 1:
            rule = "the scale is above 0, growth at least 1, backoff between 0 and 1"
            raise UsageError(f"{self}\n  {rule}\n  leave them at their defaults: 65536, 2, 2000, 0.5")


class LossScaler:
    """The scale of the loss, and how many good steps there were since it last moved."""

    def __init__(self, device: torch.device, policy: ScalerPolicy | None = None) -> None:
        self.policy = policy or ScalerPolicy()
        self.scale = torch.full((), self.policy.initial, dtype=torch.float32, device=device)
        self._num_good = torch.zeros((), dtype=torch.int32, device=device)
        self.elements: torch.Tensor | None = None

    def factors(self, ranks: int, count: float | None, guess: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns what a summed loss is multiplied by before backward, and the averaged gradients after it.

        With a known ``count`` of elements the gradients are then those of the mean over them. Without one they are
        those of the sum; ``guess`` stands for the count until one is known, and all ranks must give the same.
        """
        if count is not None:
            return self.scale / count, ranks / self.scale
        elements = torch.full_like(self.scale, guess) if self.elements is None else self.elements
        return self.scale / elements, elements / self.scale

    def note_elements(self, elements: torch.Tensor) -> None:
        """Takes how many elements the step had over all ranks: the next one will have about as many."""
        self.elements = elements.to(self.scale).clamp(min=1.0)

    @torch.no_grad()
    def update(self, norm: torch.Tensor) -> None:
        is_bad = norm.isfinite().logical_not_().to(device=self.scale.device, dtype=torch.float32)
        # A new tensor each time: the scale of the step before may still be on its way into a record.
        self.scale = self.scale.clone()
        rule = self.policy
        torch._amp_update_scale_(self.scale, self._num_good, is_bad, rule.growth, rule.backoff, rule.growth_interval)

    def state_dict(self) -> dict[str, Any]:
        """Returns scale and counts as plain numbers. Waits for the device."""
        elements = None if self.elements is None else float(self.elements)
        return {"scale": float(self.scale), "num_good": int(self._num_good), "elements": elements}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale = torch.full_like(self.scale, float(state["scale"]))
        self._num_good.fill_(int(state["num_good"]))
        elements = state["elements"]
        self.elements = None if elements is None else torch.full_like(self.scale, elements)


def make_scaler(precision: Precision, device: torch.device, initial: float = 65536.0) -> LossScaler | None:
    """Makes the scaler that a precision needs; None where gradients have the range of fp32."""
    return LossScaler(device, ScalerPolicy(initial=initial)) if precision.scales_loss else None


@dataclass(frozen=True, slots=True)
class Passes:
    """The passes of a step, which differentiate summed losses times ``scale``; ``dtype``: of floating point samples."""

    engine: Engine
    microbatches: Sequence[Any]
    loss: Loss
    scale: float | torch.Tensor | None = None
    dtype: torch.dtype | None = None
    on_phase: OnPhase = ignore_phase


RunPasses = Callable[[Passes], Sequence[LossSum]]
"""Leaves the gradients of all microbatches, reduced; returns the losses of those that had samples."""
OnGradients = Callable[[torch.Tensor | None], None]
"""Looks at the gradients of a step before they are clipped; is given a factor that they still lack, if there is one."""


@dataclass(slots=True, kw_only=True)
class StepOutcome:
    """What a step computed on this rank; tensors stay on the device until somebody asks.

    ``grad_norm`` is that before clipping, ``factor`` of summed losses. ``is_updated``: None where the device knows.
    """

    loss_sum: torch.Tensor
    count: torch.Tensor | float
    grad_norm: torch.Tensor
    loss_scale: torch.Tensor | None = None
    factor: float | torch.Tensor | None = None
    is_updated: bool | None = None


@dataclass(slots=True)
class StepResult:
    """A step that was issued, whose numbers come later. Not frozen: it is made where every call counts."""

    step: int
    position: int
    local_samples: list[int]
    lr: float
    outcome: StepOutcome
    steps_per_epoch: int
    is_last: bool

    @property
    def epoch(self) -> float:
        return self.step / max(self.steps_per_epoch, 1)

    @property
    def samples(self) -> int:
        return sum(self.local_samples)

    @property
    def loss(self) -> float:
        """The mean loss of this rank's samples, nan without any. On CUDA, reading it waits for the device."""
        count = float(self.outcome.count)
        return float(self.outcome.loss_sum) / count if count else math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPolicy:
    """What may be chosen about a step. The norm is measured without ``clip_norm``, too: it tells what to leave out."""

    clip_norm: float | None = None
    dtype: torch.dtype = torch.float32
    loss_scale: float = 65536.0
    max_bad_steps: int = 10
    histogram_every: int | None = None  # steps; None: no histograms
    loads_every: int = 10  # steps between records of what routers of experts did


class StepCallbacks(NamedTuple):
    """Who hears of the end of each phase of a step, and who looks at its gradients before the update."""

    on_phase: OnPhase = ignore_phase
    on_gradients: OnGradients | None = None


_NO_CALLBACKS = StepCallbacks()


def train_step(
    engine: Engine,
    optimizer: torch.optim.Optimizer,
    batch: StepBatch,
    loss: Loss,
    policy: StepPolicy,
    callbacks: StepCallbacks = _NO_CALLBACKS,
    scaler: LossScaler | None = None,
    passes: RunPasses | None = None,
) -> StepOutcome:
    """Trains on one global batch, unless a gradient is not finite. ``passes`` takes the place of ``accumulate``."""
    on_phase, on_gradients = callbacks
    scale = None if scaler is None else scaler.scale
    per_sample, ranks, undo = loss.elements_per_sample, engine.gradient_comm.size, None
    # Where every sample counts alike the count needs no communication: all ranks know the global batch.
    known = None if per_sample is None else batch.global_samples * per_sample
    factor: float | torch.Tensor | None = None if known is None else ranks / known
    if scaler is not None:
        factor, undo = scaler.factors(ranks, known, guess=batch.global_samples)
    values = (passes or accumulate)(Passes(engine, batch.microbatches, loss, factor, policy.dtype, on_phase))
    totals = [value.total.detach() for value in values]
    loss_sum = torch.stack(totals).sum() if totals else torch.zeros((), device=engine.device)
    count = sum((value.count for value in values), 0.0)
    if undo is not None:
        scale_gradients(engine, undo)
    weight: torch.Tensor | None = None  # of the gradients, where to weigh them is part of the update
    if per_sample is None:
        if isinstance(optimizer, MasterAdamW):
            weight = finite_or_zero(engine.loss_scale(count))
        else:
            given = weigh_gradients(engine, count)
            if scaler is not None:
                scaler.note_elements(ranks / given)
        on_phase("backward")
    norm = engine.clip_grad_norm_(math.inf)  # measures; to clip is part of the update
    norm = norm if weight is None else norm * weight
    if on_gradients is not None:
        on_gradients(weight)
    done = update_if_finite(optimizer, norm, policy.clip_norm, weight)
    engine.move_biases(norm)
    if scaler is not None:
        scaler.update(norm)
    optimizer.zero_grad(set_to_none=True)
    on_phase("optimizer")
    return StepOutcome(loss_sum=loss_sum, count=count, grad_norm=norm, loss_scale=scale, factor=factor, is_updated=done)


def accumulate(passes: Passes) -> Sequence[LossSum]:
    """Runs forward and backward over the microbatches, each brought to the device when its turn comes."""
    engine, loss, dtype = passes.engine, passes.loss, passes.dtype

    def loss_of_placed(model: Callable[..., Any], batch: Any) -> LossSum:
        return loss(model, place(batch, engine.device, dtype))

    return engine.run_microbatches(passes.microbatches, loss_of_placed, passes.scale, passes.on_phase)


def weigh_gradients(engine: Engine, count: float | torch.Tensor) -> torch.Tensor:
    """Turns averaged gradients of sums into those of the global mean, 0 where nothing counts; returns the factor."""
    factor = engine.loss_scale(count)
    scale_gradients(engine, finite_or_zero(factor))
    return factor


def finite_or_zero(factor: torch.Tensor) -> torch.Tensor:
    """Returns a factor of summed gradients; zero where it is not finite, because nothing counts on any rank."""
    return torch.where(factor.isfinite(), factor, torch.zeros_like(factor))


@torch.no_grad()
def scale_gradients(engine: Engine, factor: torch.Tensor) -> None:
    gradients = engine.gradients()
    if gradients:
        torch._foreach_mul_(gradients, factor.to(gradients[0]))


def place(batch: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    """Brings a batch to the device, and its floating point tensors to ``dtype`` if there is one."""

    def move(value: torch.Tensor) -> torch.Tensor:
        target = dtype if dtype is not None and value.is_floating_point() else value.dtype
        return value.to(device=device, dtype=target, non_blocking=True)

    return tree_map_only(torch.Tensor, move, batch)


_EPS = 1e-6  # as torch.nn.utils.clip_grad_norm_ has it
_BEGUN: WeakSet[torch.optim.Optimizer] = WeakSet()  # that made an update on a GPU


def update_if_finite(
    optimizer: torch.optim.Optimizer,
    norm: torch.Tensor,
    max_norm: float | None = None,
    weight: torch.Tensor | None = None,
) -> bool | None:
    """Makes one optimizer step, clipped to ``max_norm``, unless the norm is not finite: then all stays as it is.

    Returns if it did; None: the device knows. ``weight`` is a factor that a MasterAdamW's gradients lack, not the norm.
    """
    if norm.is_cuda and optimizer not in _BEGUN:  # state that is made now, and stays, does not cut up passes' memory
        _BEGUN.add(optimizer)
        torch.cuda.empty_cache()
    if isinstance(optimizer, MasterAdamW):
        optimizer.step_scaled(Scaling(norm=norm, max_norm=max_norm, weight=weight))
        return None
    if norm.device.type != "cpu" and _takes_flag(optimizer, norm.device):
        extras = {"found_inf": torch.isfinite(norm).logical_not_().to(torch.float32)}
        # The kernels' factor is a float32: not exact enough for doubles.
        is_single = all(p.dtype != torch.float64 for group in optimizer.param_groups for p in group["params"])
        if max_norm is not None and is_single:
            extras["grad_scale"] = ((norm + _EPS) / max_norm).clamp_(min=1.0).to(torch.float32)  # a divisor
        elif max_norm is not None:
            _scale(optimizer, (max_norm / (norm + _EPS)).clamp_(max=1.0))
        vars(optimizer).update(extras)  # which the fused kernels read
        try:
            optimizer.step()
        finally:
            for name in extras:
                delattr(optimizer, name)
        return None
    if not math.isfinite(norm.item()):  # sync point, except on a CPU
        return False
    if max_norm is not None and max_norm < norm.item() + _EPS:
        _scale(optimizer, max_norm / (norm + _EPS))
    optimizer.step()
    return True


@torch.no_grad()
def _scale(optimizer: torch.optim.Optimizer, coefficient: torch.Tensor) -> None:
    found = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for gradient in found:
        kinds.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    for (device, dtype), gradients in kinds.items():
        torch._foreach_mul_(gradients, coefficient.to(device, dtype))


def _takes_flag(optimizer: torch.optim.Optimizer, device: torch.device) -> bool:
    """Says whether the optimizer's kernels can leave a step out: not SGD's first, which makes its momentum."""
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    groups = optimizer.param_groups
    has_state = bool(optimizer.state) or not any(group.get("momentum") for group in groups)
    return has_state and all(p.device == device for group in groups for p in group["params"][:1])
