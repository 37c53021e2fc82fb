"""A config as a layout: how the run that it asks for is spread, and the rules of layouts in the words of its keys."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields, replace
from pathlib import Path

from paceline.config.batch import batch_plan
from paceline.config.data_sections import known_shape
from paceline.config.schema import Config
from paceline.config.sections import gpt_shape
from paceline.errors import Problem, UsageError
from paceline.plan.layout import Compression, Layout, Offload
from paceline.plan.model_shape import ModelShape
from paceline.plan.plan import BatchPlan
from paceline.plan.rule_case import RuleCase
from paceline.plan.rules import rules
from paceline.schedule.text import read_csv

_RESNET_BLOCKS = {18: 8, 50: 16}  # by depth
_LINEAR_LAYERS = 3  # of an mlp
# A key of these sections that has the name of a field of the layout is that field, and is copied.
_FIELDS = {field.name for field in fields(Layout)}
_SHARED = {
    name: section
    for section in ("parallel", "comm", "memory", "train")
    for name in type(Config.model_fields[section].default).model_fields
    if name in _FIELDS
}
_OTHERS = {"ranks": "parallel", "compile": "model", "heads": "model", "kv_heads": "model", "context": "data"}
CONFIG_KEYS: Mapping[str, str] = {name: f"{section}." for name, section in (_SHARED | _OTHERS).items()}


def layout_of(config: Config, ranks: int | None = None, node_ranks: int | None = None) -> Layout:
    """Returns the layout that a config asks for; on so many ranks, if they are given, ``node_ranks`` on a host.

    With ranks, the batch is resolved too, and one rank that offloads nothing has the layout of ddp: its shards would be
    whole. A strategy that is still to be chosen stands as ddp; a precision that is to follow from a device that is not
    known stands as fp32.

    Raises ConfigError where the batch cannot be divided, UsageError where a schedule's file cannot be read.
    """
    parallel, comm, train = config.parallel, config.comm, config.train
    own = None if parallel.pipeline == 1 else parallel.schedule_file
    said = {name: getattr(getattr(config, section), name) for name, section in _SHARED.items()}
    said |= {
        "strategy": {"zero3": "fsdp", "auto": "ddp"}.get(parallel.strategy, parallel.strategy),
        "bucket_mb": None if comm.bucket_mb == "auto" else comm.bucket_mb,
        "tunes_buckets": comm.bucket_mb == "auto",
        "compression": Compression(**comm.compression.model_dump()),
        "schedule": parallel.schedule if own is None or not Path(own).is_file() else read_csv(Path(own)),
        "stages": "estimated" if parallel.stages == "auto" else parallel.stages,
        "gathers_logits": train.loss != "auto",  # a loss of one's own expects whole logits
        "offload": Offload.of(config.memory.offload),
        "compile": config.model.compile,
        "precision": train.precision_on(parallel.device),
        "microbatch": None,  # these two follow from the ranks
        "accumulate": None,
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


def with_precision(config: Config, device: str, *, has_bf16: bool = True) -> Config:
    """Returns the config with the precision that ``auto`` is on a device; for CPUs, where that is fp32, as it is."""
    name = config.train.precision_on(device, has_bf16=has_bf16)
    if name == config.train.precision or "cuda" not in (device, config.parallel.device):
        return config
    return config.with_values("train", precision=name)


def config_batch(config: Config, ranks: int) -> BatchPlan:
    """Resolves the batch of a config on this many ranks, of which only the data ranks share it.

    Raises ConfigError where it cannot be divided.
    """
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

    With ``sections``, by rules that read no other section of the config.
    ``node_ranks`` of ``ranks`` are on a host (None: all; 0: not known yet).
    """
    parallel = config.parallel
    undecided = {"strategy", "pipeline", "tensor"} if parallel.strategy == "auto" else set()

    def is_wanted(reads: tuple[str, ...]) -> bool:
        of = {CONFIG_KEYS[name].rstrip(".") for name in reads}
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
