"""Where numbers stop being finite: a bad step's passes are repeated and watched.

The parameters are still those of the step, as it changed nothing. In this order: samples that are not finite, then
parameters, then the first module whose output is not, then the loss, then the first gradient in the order of backward.
Costly (every output is looked at) and collective: all ranks replay the step together, and agree on the answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from paceline.comm.objects import gather_objects
from paceline.engines.agree import tensors_in
from paceline.engines.engine import Engine
from paceline.engines.precision import Precision
from paceline.train.step import Passes, RunPasses, accumulate
from paceline.train.survive.bad_steps import BadStep

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

    None where the repetition is finite, because it drew other random numbers, say. ``run`` takes the place of
    ``accumulate``, as in a step. Leaves no gradients.
    """
    engine, rank = passes.engine, passes.engine.world.rank
    first = engine.random_stream // engine.gradient_comm.size * _MANY  # stages of a pipeline are called in their order
    watch = _OutputWatch(engine.module)
    try:
        values = (run or accumulate)(passes)
    finally:
        watch.stop()
    findings = [
        *(Overflow(_DATA, place, rank, what) for place, what in enumerate(_bad_data(passes.microbatches))),
        *(Overflow(_PARAMETER, place, rank, what) for place, what in enumerate(_bad_parameters(engine))),
        *([] if watch.found is None else [Overflow(_FORWARD, watch.place + first, rank, watch.found)]),
        *(Overflow(_LOSS, 0, rank, f"the loss is {v.total.item()}") for v in values if not v.total.isfinite()),
        *_bad_gradients(engine, watch),
    ]
    for parameter in engine.parameters():
        parameter.grad = None
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
    step = wording.step
    scale = "" if bad.outcome.loss_scale is None else f", loss scale {float(bad.outcome.loss_scale):g}"
    where = finding or "none in a repetition: the step drew other random numbers, or parameters have changed since"
    return (
        f"{bad.num_in_a_row} {step}s in a row had gradients that are not finite, up to {step} {bad.step} "
        f"(gradient norm {bad.grad_norm}{scale})\n"
        f"  the first numbers that are not finite: {where}\n"
        f"  those {step}s were left out, and the parameters are as they were before; "
        f"{_advice(finding, precision, wording)}"
    )


def _advice(finding: Overflow | None, precision: Precision, wording: Wording) -> str:
    if finding is not None and finding.stage == _DATA:
        return "repair or leave out these samples"
    if finding is not None and finding.stage == _PARAMETER:
        return "start from an earlier checkpoint"
    if torch.float16 in (precision.autocast_dtype, precision.param_dtype):
        return f"use {wording.precision}, which has the range of fp32, or lower {wording.rate}"
    return f"lower {wording.rate}, set {wording.clip}, or look at the data of that {wording.step}"


class _OutputWatch:
    """Looks at what modules return, in the order of their calls."""

    def __init__(self, model: nn.Module) -> None:
        self.found: str | None = None
        self.place = 0
        self.calls: dict[str, int] = {}  # by module: the number of its last call
        self._num_calls = 0
        self._handles = [m.register_forward_hook(self._look(name)) for name, m in model.named_modules()]

    def stop(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _look(self, name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            del inputs
            self._num_calls += 1
            self.calls[name] = self._num_calls
            for tensor in tensors_in(output) if self.found is None else ():
                problem = _describe(tensor)
                if problem:
                    self.place = self._num_calls
                    title = f"{name or 'the model'} ({type(module).__name__})"
                    self.found = f"{title} in forward: {problem} of its output"
                    return

        return hook


def _bad_data(microbatches: Sequence[Any]) -> Iterator[str]:
    for number, microbatch in enumerate(microbatches):
        for leaf in tree_leaves(microbatch):
            problem = _describe(leaf) if isinstance(leaf, torch.Tensor) else ""
            if problem:
                yield f"the data of microbatch {number}: {problem} of shape {list(leaf.shape)}"


def _bad_parameters(engine: Engine) -> Iterator[str]:
    for name, parameter in engine.named_parameters():
        problem = _describe(parameter)
        if problem:
            yield f"the parameter {name} itself: {problem}"


def _bad_gradients(engine: Engine, watch: _OutputWatch) -> Iterator[Overflow]:
    """Yields the gradients that are not finite; those of the modules called last arise first."""
    engine.gradients()  # all of them at what the engine updates
    for name, parameter in engine.named_parameters():
        problem = "" if parameter.grad is None else _describe(parameter.grad)
        if problem:
            place = -watch.calls.get(name.rpartition(".")[0], 0)
            yield Overflow(_GRADIENT, place, engine.world.rank, f"the gradient of {name} in backward: {problem}")


def _describe(tensor: torch.Tensor) -> str:
    """Counts what is not finite in a tensor; empty if nothing is."""
    if not tensor.is_floating_point() or not tensor.numel():
        return ""
    value = tensor.detach()
    if value.isfinite().all():
        return ""
    num_nan = int(value.isnan().sum())
    num_inf = int(value.isinf().sum())
    parts = [f"{count} {kind}" for count, kind in ((num_nan, "nan"), (num_inf, "inf")) if count]
    return f"{' and '.join(parts)} in {value.numel()} numbers"
