"""A config as a layout: how the run that it asks for is spread, and the rules of layouts in the words of its keys."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.config.batch import batch_plan
from paceline.config.sections import gpt_shape, known_shape
from paceline.errors import Problem, UsageError
from paceline.plan.layout import Compression, Layout, Offload
from paceline.plan.plan import BatchPlan
from paceline.plan.rule_case import ModelOutline, Rule
from paceline.plan.rules import CONFIG_KEYS, rules
from paceline.schedule.text import read_csv

if TYPE_CHECKING:
    from paceline.config.schema import Config

_RESNET_BLOCKS = {18: 8, 50: 16}  # by depth
_LINEAR_LAYERS = 3  # of an mlp
_SAME = ("pipeline", "tensor", "units", "unit_mb", "prefetch", "reshard_after_forward", "sync_batchnorm")


def layout_of(config: Config, ranks: int | None = None, node_ranks: int | None = None) -> Layout:
    """Returns the layout that a config asks for; on so many ranks, if they are given, ``node_ranks`` on a host.

    With ranks, the batch is resolved too. A strategy that is still to be chosen stands as ddp.

    Raises ConfigError where the batch cannot be divided, UsageError where a schedule's file cannot be read.
    """
    parallel, comm, train = config.parallel, config.comm, config.train
    own = None if parallel.pipeline == 1 else parallel.schedule_file
    strategy: Any = {"zero3": "fsdp", "auto": "ddp"}.get(parallel.strategy, parallel.strategy)
    layout = Layout(
        strategy=strategy,
        data=parallel.data or 0,
        shard_ranks=parallel.shard_ranks or 0,
        node_ranks=parallel.node_ranks or 0,
        **{name: getattr(parallel, name) for name in _SAME},
        bucket_mb=Layout().bucket_mb if comm.bucket_mb == "auto" else comm.bucket_mb,
        first_bucket_mb=comm.first_bucket_mb,
        tunes_buckets=comm.bucket_mb == "auto",
        overlap=comm.overlap,
        algorithm=comm.algorithm,
        compression=Compression(**comm.compression.model_dump()),
        schedule=parallel.schedule if own is None or not Path(own).is_file() else read_csv(Path(own)),
        chunks=parallel.chunks or 0,
        stages="estimated" if parallel.stages == "auto" else parallel.stages,
        stage_layers=parallel.stage_layers,
        sequence_parallel=parallel.sequence_parallel,
        gathers_logits=train.loss != "auto",  # a loss of one's own expects whole logits
        precision=train.precision,
        checkpoint_activations=config.memory.checkpoint_activations,
        offload=Offload.of(config.memory.offload),
        compile=config.model.compile,
        buffers=comm.buffers,
    )
    if ranks is None:
        return layout
    layout = layout.for_ranks(ranks, node_ranks)
    batch = batch_plan(train, layout.data, layout.pipeline)
    return replace(layout, microbatch=batch.microbatch, accumulate=batch.accumulate)


def config_batch(config: Config, ranks: int) -> BatchPlan:
    """Resolves the batch of a config on this many ranks, of which only the data ranks share it.

    Raises ConfigError where it cannot be divided.
    """
    layout = layout_of(config).for_ranks(ranks)
    return batch_plan(config.train, layout.data, layout.pipeline)


def outline_of(config: Config) -> ModelOutline:
    """Returns what a config says of its model."""
    model, data = config.model, config.data
    context = getattr(data, "context", None)
    if model.kind == "gpt" and (shape := gpt_shape(model)) is not None:
        return ModelOutline(
            kind="gpt",
            blocks=shape.layers,
            layers=shape.layers + 2,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            context=context or shape.context or known_shape(data).context,
        )
    if model.kind == "resnet":
        return ModelOutline(kind="resnet", blocks=_RESNET_BLOCKS[model.depth], layers=_RESNET_BLOCKS[model.depth] + 2)
    if model.kind == "mlp":
        return ModelOutline(kind="mlp", blocks=_LINEAR_LAYERS, noun="linear layers", layers=_LINEAR_LAYERS)
    return ModelOutline(kind=model.kind, context=context)


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
    undecided = {"strategy"} if parallel.strategy == "auto" else set()
    if parallel.sharding_strategy == "auto":
        undecided |= {"pipeline", "tensor"}

    def is_wanted(rule: Rule) -> bool:
        read = {CONFIG_KEYS[name].rstrip(".") for name in rule.reads}
        is_asked = not only_of or only_of in rule.reads
        return is_asked and undecided.isdisjoint(rule.reads) and (sections is None or read <= set(sections))

    try:
        layout = layout_of(config)
    except UsageError as error:  # of a schedule's file
        return [Problem(what=str(error))] if not only_of and (sections is None or "parallel" in sections) else []
    return rules(
        layout,
        ranks=ranks,
        node_ranks=node_ranks,
        model=outline_of(config),
        keys=CONFIG_KEYS,
        strategy=parallel.strategy,
        only=is_wanted,
    )
