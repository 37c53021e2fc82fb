"""A config as a layout: how the run that it asks for is spread, and its batch.

    global_batch = microbatch x accumulate x ranks

``microbatch`` is the number of samples that a rank processes at once, ``accumulate`` the number of microbatches of one
step. What is not given is derived: accumulate is 1 unless the other two say otherwise, and the global batch is 64
unless a microbatch is given. The global batch is what training sees: ranks that do not fit it are refused.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.config.data_sections import known_shape
from paceline.config.schema import Config
from paceline.config.sections import gpt_shape
from paceline.errors import ConfigError, Problem, UsageError
from paceline.mesh import divisors
from paceline.plan.layout import Compression, Layout, Offload
from paceline.plan.model_shape import ModelShape
from paceline.plan.plan import BatchPlan
from paceline.plan.rule_case import DEGREES, FIELDS, RuleCase
from paceline.plan.rules import rules
from paceline.schedule.text import read_csv

if TYPE_CHECKING:
    from paceline.config.schema import OptimConfig, TrainConfig


_RESNET_BLOCKS = {18: 8, 50: 16}  # by depth
_LINEAR_LAYERS = 3  # of an mlp
# A key of these sections that has the name of a field of the layout is that field, and is copied.
_FIELDS = {field.name for field in fields(Layout)}
_SHARED = {
    FIELDS.get(name, name): (section, name)
    for section in ("parallel", "comm", "memory", "train")
    for name in type(Config.model_fields[section].default).model_fields
    if FIELDS.get(name, name) in _FIELDS
}
_OTHERS = {"ranks": "parallel", "compile": "model", "heads": "model", "kv_heads": "model", "context": "data"}
CONFIG_KEYS: Mapping[str, str] = {
    **{field: f"{section}.{key}" for field, (section, key) in _SHARED.items()},
    **{name: f"{section}.{name}" for name, section in _OTHERS.items()},
}


def layout_of(config: Config, ranks: int | None = None, node_ranks: int | None = None) -> Layout:
    """Returns the layout that a config asks for; on so many ranks, if they are given, ``node_ranks`` on a host.

    With ranks, the batch is resolved too, and one rank that offloads nothing has the layout of ddp: its shards would be
    whole. A strategy still to be chosen stands as ddp; a precision that follows from an unknown device as fp32.
    Raises ConfigError where the batch cannot be divided, UsageError where a schedule's file cannot be read.
    """
    parallel, comm, train = config.parallel, config.comm, config.train
    own = None if parallel.pipeline == 1 else parallel.schedule_file
    said = {name: getattr(getattr(config, section), key) for name, (section, key) in _SHARED.items()}
    said |= {
        "strategy": {"zero3": "fsdp", "auto": "ddp"}.get(parallel.strategy, parallel.strategy),
        "bucket_mb": None if comm.bucket_mb == "auto" else comm.bucket_mb,
        "tunes_buckets": comm.bucket_mb == "auto",
        "compression": Compression(**comm.compression.model_dump()),
        "schedule": parallel.schedule if own is None or not Path(own).is_file() else read_csv(Path(own)),
        "stages": "estimated" if parallel.stages == "auto" else parallel.stages,
        "gathers_logits": train.loss != "auto",  # a loss of one's own expects whole logits
        "offload": Offload.of(config.memory.offload),
        "mlp_tiles": 0 if config.memory.mlp_tiles == "auto" else config.memory.mlp_tiles,
        "compile": config.model.compile,
        "precision": train.precision_on(parallel.device),
        **dict.fromkeys(("microbatch", "accumulate")),  # these two follow from the ranks
    }
    layout = Layout(**{name: value for name, value in said.items() if value is not None})
    if ranks is None:
        return layout
    layout = (layout.without_sharding() if layout.shards_nothing(ranks) else layout).for_ranks(ranks, node_ranks)
    batch = batch_plan(train, layout.data, layout.pipeline)
    return replace(layout, microbatch=batch.microbatch, accumulate=batch.accumulate)


def why_not_sharded(config: Config, ranks: int) -> str:
    """Says why a run that was asked to shard is one of ddp; nothing where it shards, or was not asked to."""
    if not layout_of(config).shards_nothing(ranks):
        return ""
    reason = "one rank has nobody to share its states with, and without shards it computes the same in less time"
    return f"parallel.strategy = {config.parallel.strategy} runs as ddp: {reason}"


def why_by_blocks(config: Config) -> str:
    """Says why a model that was asked to be compiled whole is not; nothing where it is, or was not asked to be."""
    if config.model.compile != "whole" or layout_of(config).for_ranks(1).compile == "whole":
        return ""
    reason = "one graph would hold until its end what memory.offload or memory.mlp_tiles is to free"
    return f"model.compile = whole compiles block by block: {reason}"


def with_precision(config: Config, device: str, *, has_bf16: bool = True) -> Config:
    """Returns the config with the precision that ``auto`` is on a device; for CPUs, where that is fp32, as it is."""
    name = config.train.precision_on(device, has_bf16=has_bf16)
    if name == config.train.precision or "cuda" not in (device, config.parallel.device):
        return config
    return config.with_values("train", precision=name)


def config_batch(config: Config, ranks: int) -> BatchPlan:
    """Resolves the batch on this many ranks, of which the data ranks share it. Raises ConfigError where it cannot."""
    layout = layout_of(config).for_ranks(ranks)
    return batch_plan(config.train, layout.data, layout.pipeline)


def layout_problems(
    config: Config,
    ranks: int | None = None,
    node_ranks: int | None = None,
    *,
    sections: Collection[str] | None = None,
    only_of: str = "",
) -> list[Problem]:
    """Lists what does not go together in the layout of a config, by the rules that read the field ``only_of``.

    With ``sections``, by rules that read no other. ``node_ranks`` are on a host (None: all; 0: not known yet).
    """
    parallel = config.parallel
    undecided = {"strategy", *DEGREES} if parallel.strategy == "auto" else set()

    def is_wanted(reads: tuple[str, ...]) -> bool:
        of = {CONFIG_KEYS[name].partition(".")[0] for name in reads}
        is_asked = not only_of or only_of in reads
        return is_asked and undecided.isdisjoint(reads) and (sections is None or of <= set(sections))

    try:
        layout = layout_of(config)
    except UsageError as error:  # of a schedule's file
        return [Problem(what=str(error))] if not only_of and (sections is None or "parallel" in sections) else []
    model, context = config.model, known_shape(config.data).context or 0
    layers = _LINEAR_LAYERS if model.kind == "mlp" else _RESNET_BLOCKS[model.depth] if model.kind == "resnet" else 0
    shape = ModelShape(kind=model.kind, layers=layers, context=context)
    if model.kind == "gpt" and (known := gpt_shape(model)) is not None:
        shape = replace(known, context=context or known.context)
    case = RuleCase(
        layout, ranks=ranks, node_ranks=node_ranks, model=shape, keys=CONFIG_KEYS, strategy=parallel.strategy
    )
    return rules(case, is_wanted)


DEFAULT_GLOBAL_BATCH = 64

_KEYS = {name: f"train.{name}" for name in ("global_batch", "microbatch", "accumulate")} | {"ranks": "parallel.ranks"}


def resolve_batch(global_batch: int | None, microbatch: int | None, accumulate: int | None, ranks: int) -> BatchPlan:
    """Derives what is not given. Raises ConfigError for values that contradict one another or are below 1."""
    if problems := check_batch(global_batch, microbatch, accumulate, ranks):
        raise ConfigError(problems, source="batch")
    total = _AskedBatch(global_batch=global_batch, microbatch=microbatch, accumulate=accumulate, ranks=ranks).total
    microbatch = microbatch or total // ((accumulate or 1) * ranks)
    accumulate = accumulate or total // (microbatch * ranks)
    return BatchPlan(global_batch=total, microbatch=microbatch, accumulate=accumulate, ranks=ranks)


def batch_plan(train: TrainConfig, ranks: int, pipeline: int = 1) -> BatchPlan:
    """Resolves the batch of a config on this many ranks. Raises ConfigError as ``resolve_batch`` does.

    ``train.microbatch = auto`` counts as not given. A ``pipeline`` has as many microbatches as ranks, or more.
    """
    microbatch = None if train.microbatch == "auto" else train.microbatch
    accumulate = train.accumulate
    if pipeline > 1 and microbatch is None and accumulate is None:
        samples, rest = divmod(train.global_batch or DEFAULT_GLOBAL_BATCH, ranks)
        accumulate = None if rest else next((n for n in divisors(samples) if n >= pipeline), samples or None)
    return resolve_batch(train.global_batch, microbatch, accumulate, ranks)


def peak_learning_rate(optim: OptimConfig, global_batch: int) -> float:
    """Returns the peak rate of a run with this global batch, where ``optim.lr`` is meant for ``optim.lr_batch``.

    linear    lr x global_batch / lr_batch           the step follows the sum of as many small ones (SGD)
    sqrt      lr x sqrt(global_batch / lr_batch)     keeps the noise of an adaptive optimizer's step (Adam)
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
    """Lists what is wrong with a batch; ``ranks=None``: for any number of them, which messages call ``ranks_key``."""
    given: dict[str, Any] = dict(zip(_KEYS, (global_batch, microbatch, accumulate, ranks), strict=True))
    if too_small := [
        Problem(what=f"{_KEYS[name]} = {value}", rule="it is a count, of at least 1", fix=f"try {_KEYS[name]} = 1")
        for name, value in given.items()
        if value is not None and value < 1
    ]:
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
        return (self.microbatch or 1) * (self.accumulate or 1) * (self.ranks or 1)

    @property
    def is_complete(self) -> bool:
        return None not in (self.microbatch, self.accumulate, self.ranks)

    def fits(self) -> bool:
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
