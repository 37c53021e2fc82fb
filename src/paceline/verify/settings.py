"""How a case is verified: the strategy and its options, and what cannot be asked for together."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypeAlias, get_args

import torch

from paceline.engines.apply import STRATEGY_NAMES, layout_from
from paceline.engines.precision import PRECISIONS, Precision, check_precision
from paceline.errors import Problem, UsageError
from paceline.plan.layout import Layout
from paceline.plan.rule_case import RuleCase, field_problems, unknown_word
from paceline.plan.rules import rules

Backend: TypeAlias = Literal["virtual", "gloo", "shared_memory"]
BACKENDS: tuple[str, ...] = get_args(Backend)
VERIFIED = tuple(name for name in STRATEGY_NAMES if name != "auto")
# Buckets far smaller than real ones: even a small model is cut into several.
SMALL_BUCKETS: dict[str, Any] = {"bucket_mb": 0.02, "first_bucket_mb": 0.005}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a case is run: spread by ``layout``, for how long, on which backend, and how strictly it is compared.

    The backends ``gloo`` and ``shared_memory`` are real processes, and need functions that can be pickled.
    ``record_step`` asks for the activations of one step.

    ``caches_casts``: whether autocast casts a weight once in a pass, though it be used twice. Threads share that cache,
    so that one virtual rank would clear another's, and round other numbers than one process.
    """

    layout: Layout = field(default_factory=lambda: Layout(**SMALL_BUCKETS))
    strategy: str = ""  # as it was asked for, where that is another name of the layout's
    ranks: int = 4
    steps: int = 3
    clip: float | None = 1.0
    backend: Backend = "virtual"
    tolerance: float | None = None  # None: what rounding explains
    caches_casts: bool = True
    record_step: int | None = None

    @classmethod
    def of(cls, **options: Any) -> Settings:
        """Makes settings of their own fields and a layout's: ``Settings.of(ranks=2, strategy="fsdp", accumulate=3)``.

        Raises UsageError for names that neither has.
        """
        own = {each.name for each in fields(cls)} - {"layout", "strategy"}
        said = options.get("strategy", "")
        given = {name: value for name, value in options.items() if name not in own}
        layout = layout_from({**SMALL_BUCKETS, **given, **({"strategy": "fsdp"} if said == "zero3" else {})})
        return cls(layout=layout, strategy=said, **{name: options[name] for name in own if name in options})

    def with_layout(self, **changes: Any) -> Settings:
        return replace(self, layout=replace(self.layout, **changes))

    @property
    def accumulate(self) -> int:
        return self.layout.accumulate

    @property
    def data_ranks(self) -> int:
        """How many ranks share the batch: those that are left when the model is spread."""
        return max(1, self.ranks // max(1, self.layout.pipeline * self.layout.tensor))

    @property
    def policy(self) -> Precision:
        return PRECISIONS[self.layout.precision]

    @property
    def is_exact(self) -> bool:
        """Whether both runs compute in float64, where nothing but the order of sums can differ."""
        return self.layout.precision == "fp32"

    @property
    def dtype(self) -> torch.dtype:
        """What the model is built in: that of its masters, where it computes in another one."""
        return torch.float64 if self.is_exact else torch.float32


def complete(settings: Settings) -> Settings:
    """Fills in what follows from the rest: without a size, hybrid shards over half of the ranks."""
    if settings.layout.strategy != "hybrid" or settings.layout.shard_ranks or settings.data_ranks % 2:
        return settings
    return settings.with_layout(shard_ranks=settings.data_ranks // 2)


def check_settings(settings: Settings, *, batch: int | None = None) -> None:
    """Raises UsageError with everything that is wrong with completed settings, before anything is started."""
    if problems := list(_problems(settings, batch)):
        raise UsageError("\n".join(map(str, problems)))


def _problems(settings: Settings, batch: int | None) -> Iterator[Problem]:
    layout, strategy = settings.layout, str(settings.layout.strategy)
    if strategy == "auto":
        rule = "a run decides by its memory, and each strategy is verified by itself"
        yield Problem(what="strategy = 'auto'", rule=rule, fix=f"give one of {', '.join(VERIFIED)}")
    yield from unknown_word("strategy", strategy, (*VERIFIED, "auto"))
    yield from unknown_word("precision", layout.precision, tuple(PRECISIONS))
    yield from unknown_word("backend", settings.backend, BACKENDS)
    counts = {"ranks": settings.ranks, "steps": settings.steps, "batch": 1 if batch is None else batch}
    for name, value in counts.items():
        if value < 1:
            yield Problem(what=f"{name} = {value}", rule="there is at least one", fix=f"give {name} = 1 or more")
    if settings.clip is not None and not settings.clip > 0:
        rule = "a largest norm is above 0"
        yield Problem(what=f"clip = {settings.clip}", rule=rule, fix="give a number above 0, or none")
    tolerance = settings.tolerance
    if tolerance is not None and not (tolerance > 0 and math.isfinite(tolerance)):
        rule = "a difference is allowed up to a number above 0"
        yield Problem(what=f"tolerance = {tolerance}", rule=rule, fix="leave it out")
    wrong = field_problems(replace(layout, strategy="ddp"))  # another strategy that is none is told above
    yield from wrong or rules(RuleCase(layout, ranks=settings.ranks if settings.ranks >= 1 else None))
    if settings.layout.precision in PRECISIONS:
        try:
            check_precision(settings.policy, torch.device("cpu"))
        except UsageError as error:
            yield Problem(what=str(error))
