"""The batch algebra, in one place, and how the learning rate grows with the batch.

    global_batch = microbatch x accumulate x ranks

``microbatch`` is the number of samples that a rank processes at once, ``accumulate`` the number of microbatches of one
step. What is not given is derived: accumulate is 1 unless the other two say otherwise, and the global batch is 64
unless a microbatch is given. The global batch is what training sees; the other three only say how it is computed, so a
number of ranks that does not fit is refused rather than met with another batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from paceline.errors import ConfigError, Problem
from paceline.mesh import divisors
from paceline.plan.plan import BatchPlan

if TYPE_CHECKING:
    from paceline.config.schema import OptimConfig, TrainConfig

DEFAULT_GLOBAL_BATCH = 64

_KEYS = {
    "global_batch": "train.global_batch",
    "microbatch": "train.microbatch",
    "accumulate": "train.accumulate",
    "ranks": "parallel.ranks",
}


def resolve_batch(global_batch: int | None, microbatch: int | None, accumulate: int | None, ranks: int) -> BatchPlan:
    """Derives what is not given.

    Raises ConfigError when a value is below 1, the values contradict one another, or the batch cannot be divided.
    """
    problems = check_batch(global_batch, microbatch, accumulate, ranks)
    if problems:
        raise ConfigError(problems, source="batch")
    total = _AskedBatch(global_batch=global_batch, microbatch=microbatch, accumulate=accumulate, ranks=ranks).total
    microbatch = microbatch or total // ((accumulate or 1) * ranks)
    accumulate = accumulate or total // (microbatch * ranks)
    return BatchPlan(global_batch=total, microbatch=microbatch, accumulate=accumulate, ranks=ranks)


def batch_plan(train: TrainConfig, ranks: int, pipeline: int = 1) -> BatchPlan:
    """Resolves the batch of a config on this many ranks. Raises ConfigError as ``resolve_batch`` does.

    ``train.microbatch = auto`` counts as not given: one microbatch a step is where the search for a size that fits
    begins. A ``pipeline`` of several ranks has at least as many microbatches, where nothing else is said.
    """
    microbatch = None if train.microbatch == "auto" else train.microbatch
    accumulate = train.accumulate
    if pipeline > 1 and microbatch is None and accumulate is None:
        samples, rest = divmod(train.global_batch or DEFAULT_GLOBAL_BATCH, ranks)
        accumulate = None if rest else next((n for n in divisors(samples) if n >= pipeline), samples or None)
    return resolve_batch(train.global_batch, microbatch, accumulate, ranks)


def peak_learning_rate(optim: OptimConfig, global_batch: int) -> float:
    """Returns the peak rate of a run with this global batch, where ``optim.lr`` is meant for ``optim.lr_batch``.

        none      lr
        linear    lr x global_batch / lr_batch           the step follows the sum of as many small ones (SGD)
        sqrt      lr x sqrt(global_batch / lr_batch)     keeps the noise of an adaptive optimizer's step (Adam)

    A large batch that is scaled linearly usually needs a warmup.
    """
    ratio = global_batch / (optim.lr_batch or global_batch)
    return optim.lr * {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[optim.lr_scaling]


def check_batch(
    global_batch: int | None,
    microbatch: int | None,
    accumulate: int | None,
    ranks: int | None,
    ranks_key: str = "parallel.ranks",
) -> list[Problem]:
    """Lists what is wrong with a batch; with ``ranks=None``, what is wrong whatever the number of ranks will be.

    ``ranks_key`` is what the messages call the ranks: where the model is split, only some of them share the batch.
    """
    given: dict[str, Any] = dict(zip(_KEYS, (global_batch, microbatch, accumulate, ranks), strict=True))
    too_small = [
        Problem(what=f"{_KEYS[name]} = {value}", rule="it is a count, of at least 1", fix=f"try {_KEYS[name]} = 1")
        for name, value in given.items()
        if value is not None and value < 1
    ]
    if too_small:
        return too_small
    asked = _AskedBatch(**given, ranks_key=ranks_key)
    if asked.fits():
        return []
    if ranks is not None and ranks > asked.total:
        what = f"{asked.text('ranks')} is more than {asked.text('global_batch')}"
        rule = "every rank needs at least one sample of each step"
    elif asked.is_complete:
        what = f"{asked.text('global_batch')} is not {asked.product_text()}"
        rule = "global_batch = microbatch x accumulate x ranks; any of the first three may be left out"
    else:
        derived = next(name for name in ("microbatch", "accumulate", "ranks") if getattr(asked, name) is None)
        what = f"{asked.text('global_batch')} is not a multiple of {asked.product_text()}"
        rule = f"global_batch = microbatch x accumulate x ranks, and {derived} must be a whole number"
    return [Problem(what=what, rule=rule, fix=_fix(asked))]


@dataclass(frozen=True, slots=True, kw_only=True)
class _AskedBatch:
    """What was asked for; None: not given."""

    global_batch: int | None
    microbatch: int | None
    accumulate: int | None
    ranks: int | None
    ranks_key: str = _KEYS["ranks"]

    @property
    def total(self) -> int:
        """The global batch: if it is not given, from the microbatch where there is one, else by default."""
        return self.global_batch or (DEFAULT_GLOBAL_BATCH if self.microbatch is None else self.unit)

    @property
    def unit(self) -> int:
        """What must divide the global batch."""
        return (self.microbatch or 1) * (self.accumulate or 1) * (self.ranks or 1)

    @property
    def is_complete(self) -> bool:
        return None not in (self.microbatch, self.accumulate, self.ranks)

    def fits(self) -> bool:
        """Says whether whole numbers satisfy the algebra."""
        return self.unit == self.total if self.is_complete else self.total % self.unit == 0

    def text(self, name: str) -> str:
        """Writes one value as it stands in a config: ``train.global_batch = 64 (the default)``."""
        is_default = name == "global_batch" and self.global_batch is None
        return f"{self.key(name)} = {self.value(name)}" + (" (the default)" if is_default else "")

    def value(self, name: str) -> Any:
        return self.total if name == "global_batch" else getattr(self, name)

    def key(self, name: str) -> str:
        return self.ranks_key if name == "ranks" else _KEYS[name]

    def product_text(self) -> str:
        """Writes the given factors and what they make: ``train.microbatch = 8 x parallel.ranks = 3, which is 24``."""
        parts = [self.text(name) for name in ("microbatch", "accumulate", "ranks") if getattr(self, name) is not None]
        return " x ".join(parts) + (f", which is {self.unit}" if len(parts) > 1 else "")


def _fix(asked: _AskedBatch) -> str:
    """Suggests, for each value that may be changed alone, the nearest ones that work."""
    options = []
    for name in _KEYS:
        value: Any = asked.value(name)
        if value is None or (name == "ranks" and asked.ranks_key != _KEYS["ranks"]):
            continue  # the ranks that share a batch follow from others
        tried = divisors(asked.total)
        if name == "global_batch":
            below = asked.total // asked.unit * asked.unit
            tried = [each for each in (asked.unit, below, below + asked.unit) if each]
        changes: list[dict[str, Any]] = [{name: each} for each in tried]
        fitting = sorted({each[name] for each in changes if replace(asked, **each).fits()})
        near = [each for each in fitting if each < value][-1:] + [each for each in fitting if each > value][:1]
        if near:
            words = " or ".join(map(str, sorted(near, key=lambda each: abs(each - value))))
            options.append(f"{asked.key(name)} = {words}")
    return "try " + (", ".join(options[:-1]) + ", or " if len(options) > 1 else "") + options[-1]
