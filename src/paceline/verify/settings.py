"""How a case is verified: the strategy and its options, and what cannot be asked for together."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from paceline.engines.apply import STRATEGIES
from paceline.engines.checkpointing import POLICIES
from paceline.engines.composition import Parallelism
from paceline.engines.fsdp import ShardingPolicy
from paceline.engines.precision import PRECISIONS, Precision, check_precision
from paceline.errors import Problem, UsageError

BACKENDS = ("virtual", "gloo", "shared_memory")
VERIFIED = tuple(strategy for strategy in STRATEGIES if strategy != "auto")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a case is run. ``record_step`` asks for the activations of one step.

    ``caches_casts``: whether autocast casts a weight once in a pass, though it be used twice. Threads share that cache,
    so that one virtual rank would clear another's, and round other numbers than one process.
    """

    strategy: str = "ddp"
    ranks: int = 4
    steps: int = 3
    accumulate: int = 1
    clip: float | None = 1.0
    precision: str = "fp32"
    checkpoint_activations: str = "none"
    sharding: ShardingPolicy = field(default_factory=ShardingPolicy)
    sync_batchnorm: bool = True
    spread: Parallelism = field(default_factory=Parallelism)
    caches_casts: bool = True
    record_step: int | None = None

    @property
    def data_ranks(self) -> int:
        """How many ranks share the batch: those that are left when the model is spread."""
        return max(1, self.ranks // max(1, self.spread.pipeline * self.spread.tensor))

    @property
    def policy(self) -> Precision:
        """The precision policy."""
        return PRECISIONS[self.precision]

    @property
    def is_exact(self) -> bool:
        """Whether both runs compute in float64, where nothing but the order of sums can differ."""
        return self.precision == "fp32"

    @property
    def dtype(self) -> torch.dtype:
        """What the model is built in: that of its masters, where it computes in another one."""
        return torch.float64 if self.is_exact else torch.float32


def complete(settings: Settings) -> Settings:
    """Fills in what follows from the rest: without a size, hybrid shards over half of the ranks."""
    sharding = settings.sharding
    if settings.strategy != "hybrid" or sharding.shard_ranks is not None or settings.data_ranks % 2:
        return settings
    return dataclasses.replace(settings, sharding=dataclasses.replace(sharding, shard_ranks=settings.data_ranks // 2))


def check_settings(
    settings: Settings, *, backend: str = "virtual", tolerance: float | None = None, batch: int | None = None
) -> None:
    """Raises UsageError with everything that is wrong with completed settings, before anything is started."""
    problems = [
        *_unknown_names(settings, backend),
        *_numbers(settings, tolerance, batch),
        *_spread(settings),
        *_shards(settings),
        *_precision(settings),
    ]
    if problems:
        raise UsageError("\n".join(map(str, problems)))


def _unknown_names(settings: Settings, backend: str) -> Iterator[Problem]:
    if settings.strategy == "auto":
        rule = "a run decides by its memory, and each strategy is verified by itself"
        yield Problem(what="strategy = 'auto'", rule=rule, fix=f"give one of {', '.join(VERIFIED)}")
    known: list[tuple[str, str, Sequence[str]]] = [
        ("strategy", settings.strategy, (*VERIFIED, "auto")),
        ("precision", settings.precision, tuple(PRECISIONS)),
        ("checkpoint_activations", settings.checkpoint_activations, POLICIES),
        ("backend", backend, BACKENDS),
    ]
    for name, value, choices in known:
        if value in choices:
            continue
        rule = f"it is one of {', '.join(choices)}"
        near = difflib.get_close_matches(str(value), choices, n=1)
        yield Problem(what=f"{name} = {value!r} is unknown", rule=rule, fix=f"did you mean {near[0]}?" if near else "")


def _numbers(settings: Settings, tolerance: float | None, batch: int | None) -> Iterator[Problem]:
    counts = {name: getattr(settings, name) for name in ("ranks", "steps", "accumulate")}
    for name, value in {**counts, "batch": 1 if batch is None else batch}.items():
        if value < 1:
            yield Problem(what=f"{name} = {value}", rule="there is at least one", fix=f"give {name} = 1 or more")
    if settings.clip is not None and not settings.clip > 0:
        yield Problem(
            what=f"clip = {settings.clip}", rule="a largest norm is above 0", fix="give a number above 0, or none"
        )
    if tolerance is not None and not (tolerance > 0 and math.isfinite(tolerance)):
        yield Problem(
            what=f"tolerance = {tolerance}", rule="a difference is allowed up to a number above 0", fix="leave it out"
        )


def _spread(settings: Settings) -> Iterator[Problem]:
    spread = settings.spread
    for name in ("pipeline", "tensor"):
        if getattr(spread, name) < 1:
            yield Problem(what=f"{name} = {getattr(spread, name)}", rule="there is at least one", fix="give 1 or more")
            return
    parts = spread.pipeline * spread.tensor
    if settings.ranks % parts:
        yield Problem(
            what=f"pipeline = {spread.pipeline} and tensor = {spread.tensor} on {settings.ranks} ranks",
            rule="their product divides the ranks, and what is left shares the batch",
            fix=f"give ranks = {parts * max(1, settings.ranks // parts)}, or other degrees",
        )
    elif spread.data is not None and spread.data != settings.ranks // parts:
        yield Problem(
            what=f"data = {spread.data} with {spread.pipeline} x {spread.tensor} on {settings.ranks} ranks",
            rule="the product of pipeline, tensor and data is the number of ranks",
            fix=f"give ranks = {parts * spread.data}, or data = {settings.ranks // parts}",
        )


def _shards(settings: Settings) -> Iterator[Problem]:
    ranks, shard_ranks = settings.data_ranks, settings.sharding.shard_ranks
    if settings.strategy != "hybrid":
        if shard_ranks is not None:
            yield Problem(
                what=f"shard_ranks = {shard_ranks} with strategy = {settings.strategy!r}",
                rule="only hybrid has shard groups of a size of their own",
                fix="leave shard_ranks out, or give strategy = 'hybrid'",
            )
    elif ranks >= 1 and (shard_ranks is None or shard_ranks < 1 or ranks % shard_ranks):
        yield Problem(
            what=f"strategy = 'hybrid' on {ranks} ranks with shard_ranks = {shard_ranks}",
            rule="the ranks of a shard group must divide the ranks",
            fix=f"give shard_ranks as one of {[n for n in range(1, ranks + 1) if ranks % n == 0]}",
        )


def _precision(settings: Settings) -> Iterator[Problem]:
    if settings.precision in PRECISIONS:
        try:
            check_precision(settings.policy, torch.device("cpu"))
        except UsageError as error:
            yield Problem(what=str(error))
