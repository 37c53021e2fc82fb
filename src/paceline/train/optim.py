"""The optimizer that a config asks for (AdamW, SGD, Muon, or any torch optimizer by its path), and its learning rates.

Rates are a pure function of progress, the same for any number of ranks. Progress counts optimizer steps or samples,
never microbatches or a rank's own share. A step from ``before`` to ``after`` gets, for warm-up w, length n and
t = (before - w) / (n - w):

    warm-up     after / w                          while before < w
    constant    1
    linear      final + (1 - final) (1 - t)
    cosine      final + (1 - final) (1 + cos pi t) / 2
    range       final ^ (1 - t)                    up to 1 by the same factor each step: a range test
    one_cycle   cosine from 1/25 up to 1 over w (30 % of the length if w is 0), then cosine down to final
"""

from __future__ import annotations

import difflib
import fnmatch
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from paceline.config import OptimConfig
from paceline.config.schema import ParameterGroupConfig, RateKind
from paceline.engines.engine import Engine
from paceline.engines.flat.shard import full_shape
from paceline.errors import UsageError
from paceline.imports import import_from_path
from paceline.train.master_adamw import MasterAdamW, can_update
from paceline.train.muon.muon import Muon

_ONE_CYCLE_START = 1 / 25
_ONE_CYCLE_RISE = 0.3
_SMALLEST = 1e-9  # of a range, which cannot begin at 0


def build_optimizer(
    config: OptimConfig,
    named: Iterable[tuple[str, nn.Parameter]],
    engine: Engine | None = None,
    rate_scale: float = 1.0,
) -> torch.optim.Optimizer:
    """Makes the optimizer over ``named`` parameters; those with one dim (biases, norms) get no weight decay.

    A parameter may be a flat slice: the whole one's dims count. An ``engine`` gives its copies of masters, and Muon the
    ranks that share its work. ``config.lr`` is scaled already; ``rate_scale`` is for the rates of ``config.groups``.
    """
    trained = [(name, parameter) for name, parameter in named if parameter.requires_grad]
    parameters = [parameter for _, parameter in trained]
    groups, lr = _groups(config, trained, rate_scale), config.lr
    betas, eps = (config.betas[0], config.betas[1]), config.eps
    # Fused is one kernel for all parameters on CUDA, and one pass over each on CPU.
    can_fuse = all(p.is_floating_point() and p.device.type in ("cpu", "cuda") for p in parameters)
    if config.kind == "muon":
        decay, settings = config.weight_decay, config.muon
        return Muon(trained, engine, lr=lr, weight_decay=decay, betas=betas, eps=eps, settings=settings)
    if config.kind == "adamw":
        if engine is not None and engine.can_fuse_cast and can_update(parameters):
            return MasterAdamW(groups, engine.fuse_cast(), lr=lr, betas=betas, eps=eps)
        return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=can_fuse)
    if config.kind == "sgd":
        return torch.optim.SGD(groups, lr=lr, momentum=config.momentum, nesterov=config.nesterov, fused=can_fuse)
    make = import_from_path(config.kind, "optim.kind")
    try:
        optimizer = make(groups, lr=config.lr, **config.args)
    except Exception as error:
        what = f"optim.kind = {config.kind} failed with lr = {config.lr} and optim.args = {config.args}: {error}"
        raise UsageError(f"{what}\n  it is called as Class(parameter_groups, lr=..., **args)") from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"optim.kind = {config.kind} made a {type(optimizer).__name__}, not a torch optimizer")
    return optimizer


def freeze_parameters(model: nn.Module, groups: Mapping[str, ParameterGroupConfig]) -> None:
    """Freezes parameters before an engine has them. Raises UsageError for a pattern without any, or if none is left."""
    for problem in unmatched_patterns([name for name, _ in model.named_parameters()], groups):
        raise problem
    for name, parameter in model.named_parameters():
        found = _pattern_of(name, groups)
        if found is not None and groups[found].frozen:
            parameter.requires_grad_(False)
    if groups and not any(parameter.requires_grad for parameter in model.parameters()):
        raise UsageError("optim.groups freezes every parameter\n  at least one must be trained")


def unmatched_patterns(names: list[str], groups: Mapping[str, ParameterGroupConfig]) -> Iterator[UsageError]:
    for pattern in groups:
        if not fnmatch.filter(names, pattern):
            near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.3) or names[:3]
            what, rule = f"optim.groups: {pattern!r} fits no parameter", "'*' stands for any text in a parameter's name"
            yield UsageError(f"{what}\n  {rule}\n  some names are {', '.join(near)}")


def _pattern_of(name: str, groups: Mapping[str, ParameterGroupConfig]) -> str | None:
    return next((pattern for pattern in groups if fnmatch.fnmatchcase(name, pattern)), None)


def _groups(config: OptimConfig, trained: list[tuple[str, nn.Parameter]], rate_scale: float) -> list[dict[str, Any]]:
    """Returns the groups of each pattern, with decay and without, in one order on all ranks; none that is empty."""
    found: list[dict[str, Any]] = []
    for pattern in (None, *config.groups):
        given = ParameterGroupConfig() if pattern is None else config.groups[pattern]
        own = [p for name, p in trained if _pattern_of(name, config.groups) == pattern]
        decay = config.weight_decay if given.weight_decay is None else given.weight_decay
        rate = {} if given.lr is None else {"lr": given.lr * rate_scale}
        matrices, vectors = ([p for p in own if (len(full_shape(p)) >= 2) is wide] for wide in (True, False))
        found.append({"params": matrices, "weight_decay": decay, **rate})
        found.append({"params": vectors, "weight_decay": given.weight_decay or 0.0, **rate})
    return [group for group in found if group["params"]]


def set_learning_rate(optimizer: torch.optim.Optimizer, factor: float) -> float:
    """Sets every group to ``factor`` times its initial rate; returns the first group's rate."""
    groups = optimizer.param_groups
    for group in groups:
        if "initial_lr" not in group:
            group["initial_lr"] = group["lr"]
        group["lr"] = group["initial_lr"] * factor
    return float(groups[0]["lr"])


@dataclass(frozen=True, slots=True, kw_only=True)
class RateSchedule:
    """How the learning rate moves over a run of ``length`` units; ``unit`` says what they are."""

    kind: RateKind = "constant"
    unit: Literal["steps", "samples"] = "steps"
    warmup: float = 0.0
    length: float
    final_ratio: float = 0.0

    @property
    def is_constant(self) -> bool:
        return self.kind == "constant" and self.warmup <= 0

    def factor(self, *, before: float, after: float) -> float:
        """Returns the share of the peak rate for the step that takes progress from ``before`` to ``after``."""
        is_cycle = self.kind == "one_cycle"
        rise = self.warmup or (_ONE_CYCLE_RISE * self.length if is_cycle else 0.0)
        if before < rise:
            return _cosine(_ONE_CYCLE_START, 1.0, before / rise) if is_cycle else min(1.0, after / rise)
        t = min(1.0, (before - rise) / max(self.length - rise, 1e-12))
        if self.kind == "linear":
            return self.final_ratio + (1.0 - self.final_ratio) * (1.0 - t)
        if self.kind == "range":
            return float(max(self.final_ratio, _SMALLEST) ** (1.0 - t))
        return 1.0 if self.kind == "constant" else _cosine(1.0, self.final_ratio, t)


def _cosine(start: float, end: float, t: float) -> float:
    return end + (start - end) * (1.0 + math.cos(math.pi * t)) / 2.0
