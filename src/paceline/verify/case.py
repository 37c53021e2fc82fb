"""What is verified: a model, batches and a loss, the same on every rank and in one process; and how: ``Settings``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from typing import Any, Literal, Protocol, TypeAlias, get_args

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from paceline.config import Config
from paceline.config.data_sections import may_ignore
from paceline.data.fetch import fetch_batch
from paceline.data.order import DataOrder, share
from paceline.data.registry import DataSplits
from paceline.engines.apply import STRATEGY_NAMES, layout_from
from paceline.engines.engine import Engine
from paceline.engines.precision import PRECISIONS, Precision, check_precision
from paceline.errors import Problem, UsageError
from paceline.models.registry import model_blocks
from paceline.plan.layout import Layout
from paceline.plan.rule_case import RuleCase, field_problems, unknown_word
from paceline.plan.rules import rules
from paceline.train.assemble import build_workload
from paceline.train.loss import Loss, Normalise, OutputLoss, build_loss
from paceline.train.optim import build_optimizer


class Case(Protocol):
    """Everything that a run needs, made anew wherever it is asked for. Picklable for real processes."""

    def make_model(self) -> nn.Module:
        """Builds the model: the same values each time."""

    def make_batch(self, step: int) -> Any:
        """Returns the global batch of a step as (inputs, targets) or a tree of tensors with samples along dim 0."""

    def make_loss(self) -> Loss: ...

    def make_optimizer(self, named: Any, engine: Engine | None = None) -> torch.optim.Optimizer:
        """Makes the optimizer over (name, parameter) pairs; ``engine`` is whose they are, unless one process's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionCase:
    model: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    loss: Callable[..., Any]
    optimizer: Callable[..., torch.optim.Optimizer] | None = None

    def make_model(self) -> nn.Module:
        """Builds the model from a fixed seed, so that a function without one of its own gives the same each time."""
        torch.manual_seed(0)
        return self.model()

    def make_batch(self, step: int) -> Any:
        return self.batch(step)

    def make_loss(self) -> Loss:
        return OutputLoss(self.loss, "loss_fn", may_count=True)

    def make_optimizer(self, named: Any, engine: Engine | None = None) -> torch.optim.Optimizer:
        del engine
        make = self.optimizer or partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.1)
        return make([parameter for _, parameter in named])


class ConfigCase:
    """A case from a config, without dropout; ``layers_as_blocks`` cuts a model without blocks by layers."""

    def __init__(self, config: Config, *, batch: int, layers_as_blocks: bool = False) -> None:
        plain = {"dropout": 0.0} if "dropout" in type(config.model).model_fields else {}
        self._config = config.with_values("model", compile=False, **plain)
        self._batch = batch
        self._layers_as_blocks = layers_as_blocks

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_data"}

    @cached_property
    def _data(self) -> DataSplits:
        return build_workload(self._config).data

    def make_model(self) -> nn.Module:
        model = build_workload(self._config).model
        if self._layers_as_blocks and not model_blocks(model):
            layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
            object.__setattr__(model, "blocks", lambda: layers)
        return model

    def make_batch(self, step: int) -> Any:
        train, shape = self._data.train, self._data.shape
        seed = self._config.train.seed if self._config.data.seed is None else self._config.data.seed
        order = DataOrder(length=len(train), global_batch=self._batch, seed=seed, shuffle=self._config.data.shuffle)
        at = order.batch_at(order.position_of_step(step))
        batch = fetch_batch(train, at.indices, at.epoch)
        if shape.mean is None or shape.std is None:
            return batch
        return Normalise(shape.mean, shape.std)(batch, torch.float64)  # of which every dtype is made

    def make_loss(self) -> Loss:
        config, shape = self._config, replace(self._data.shape, mean=None, std=None)
        return build_loss(config.train.loss, shape, may_ignore=may_ignore(config.data))

    def make_optimizer(self, named: Any, engine: Engine | None = None) -> torch.optim.Optimizer:
        return build_optimizer(self._config.optim, named, engine)


def num_samples(batch: Any) -> int:
    sizes = {leaf.shape[0] for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.ndim}
    if len(sizes) != 1:
        raise UsageError(f"a batch's tensors must have the same number of samples along dim 0; got {sorted(sizes)}")
    return int(sizes.pop())


def cut(batch: Any, part: int, parts: int) -> Any:
    """Returns one of ``parts`` contiguous pieces of a batch, or None if it has no samples."""
    rows = share(torch.arange(num_samples(batch)).numpy(), part, parts)
    if not len(rows):
        return None
    start, stop = int(rows[0]), int(rows[-1]) + 1
    return tree_map(lambda v: v[start:stop] if isinstance(v, torch.Tensor) and v.ndim else v, batch)


Backend: TypeAlias = Literal["virtual", "gloo", "shared_memory"]
BACKENDS: tuple[str, ...] = get_args(Backend)
VERIFIED = tuple(name for name in STRATEGY_NAMES if name != "auto")
# Buckets far smaller than real ones: even a small model is cut into several.
SMALL_BUCKETS: dict[str, Any] = {"bucket_mb": 0.02, "first_bucket_mb": 0.005}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a case is run: spread by ``layout``, for how long, on which backend, and how strictly it is compared.

    ``record_step`` asks for the activations of one step. ``caches_casts``: whether autocast casts a weight once in a
    pass; threads share that cache, so that one virtual rank would clear another's, and round other numbers than one
    process. ``keeps_dropout``: whether dropout modules draw, from the same seed in each step: see ``draws_alike``.
    """

    layout: Layout = field(default_factory=lambda: Layout(**SMALL_BUCKETS))
    strategy: str = ""  # as it was asked for, where that is another name of the layout's
    ranks: int = 4
    steps: int = 3
    clip: float | None = 1.0
    backend: Backend = "virtual"
    tolerance: float | None = None  # None: what rounding explains
    caches_casts: bool = True
    keeps_dropout: bool = False
    record_step: int | None = None

    @classmethod
    def of(cls, **options: Any) -> Settings:
        """Makes settings of their own fields and a layout's. Raises UsageError for names that neither has."""
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
        return max(1, self.ranks // max(1, self.layout.degree))

    @property
    def draws_alike(self) -> bool:
        """Whether ranks draw the random numbers of one process: those that share sequences, on whole batches."""
        alone = self.data_ranks == self.layout.pipeline == self.accumulate == 1
        return alone and self.layout.context_ranks > 1 and self.is_exact

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
    averaging = settings.data_ranks * settings.layout.context_ranks
    if settings.layout.strategy != "hybrid" or settings.layout.shard_ranks or averaging % 2:
        return settings
    return settings.with_layout(shard_ranks=averaging // 2)


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
    clip, tolerance = settings.clip, settings.tolerance
    if clip is not None and not clip > 0:
        yield Problem(what=f"clip = {clip}", rule="a largest norm is above 0", fix="give a number above 0, or none")
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
