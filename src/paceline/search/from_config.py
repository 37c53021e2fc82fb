"""From a config to what is searched for, and from what was found to the config that ``paceline train`` takes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from paceline.cluster.devices import Cluster
from paceline.config import Config, config_batch, config_from_dict, layout_of
from paceline.config.checks import check_ranks
from paceline.config.data_sections import known_shape
from paceline.config.sections import GPTModelConfig
from paceline.config.yaml_text import dump_values
from paceline.errors import ConfigError, UsageError
from paceline.plan.describe import config_values
from paceline.plan.layout import Compression, Layout, Offload
from paceline.plan.model_shape import ModelShape
from paceline.plan.workload import RECOMPUTES, Compute, Workload
from paceline.predict.memory.activations import ASSUMED_VOCABULARY, describe_model, known_gpt
from paceline.predict.memory.facts import ModelFacts
from paceline.search.candidates import CHECKPOINTS, TrainingTask
from paceline.search.search import Ranked
from paceline.units import format_bytes, format_seconds

COMPUTE: dict[str, Compute] = {"fp32": "fp32", "bf16": "bf16", "bf16_master": "bf16", "fp16": "fp16"}
COMPUTE |= {"fp8": "fp8", "fp8_row": "fp8"}
# What a plan decides, and what belongs to another machine.
_DECIDED = (
    *("ranks", "strategy", "sharding_strategy", "data", "pipeline", "tensor", "shard_ranks", "schedule", "chunks"),
    *("stages", "stage_layers", "schedule_file", "sequence_parallel", "device", "threads", "node_ranks"),
    "reshard_after_forward",
)
_OF_FULL_SHARDING = ("units", "unit_mb", "prefetch")
PRECISIONS = tuple(COMPUTE)


def task_of(
    config: Config, devices: int, shape: ModelShape | None = None, facts: ModelFacts | None = None
) -> TrainingTask:
    """Reads what is to be trained. ``shape`` stands for the config's own; ``facts`` are those of a model's own code.

    Raises UsageError for a model whose shape is not known.
    """
    train, compiles = config.train, Layout(compile=config.model.compile).for_ranks(devices).compile
    precision = train.precision_on(config.parallel.device)
    if isinstance(config.model, GPTModelConfig):
        own, details = _of_gpt(config)
    else:
        own, details = _of_samples(config, facts)
    return TrainingTask(
        model=shape or own,
        global_batch=train.global_batch or config_batch(config, devices).global_batch,
        compute=COMPUTE[precision],
        framework="eager" if compiles == "none" else "compiled",
        base=Layout(precision=precision, prefetch=config.parallel.prefetch, compile=compiles),
        **details,
    )


def _of_gpt(config: Config) -> tuple[ModelShape, dict[str, Any]]:
    known = known_gpt(config)
    if known is None:
        raise UsageError(
            "the model's context is not known: data.context and model.context are not given\n"
            "  a plan needs the tokens of a sample\n  set model.context, or data.context"
        )
    return known[0], {"seq_len": known[1]}


def _of_samples(config: Config, facts: ModelFacts | None) -> tuple[ModelShape, dict[str, Any]]:
    """Reads a model that is known by what a sample of it costs: data-parallel meshes alone."""
    facts = facts or describe_model(config, "cuda")
    if facts is None or facts.work is None:
        raise UsageError(
            f"model.kind = {config.model.kind}: what a sample costs is not known\n"
            "  it follows from the sizes of the data, or from running the model's code on tensors without values\n"
            "  give the data's sizes, plan it with paceline.plan(...), or describe it as model.kind: gpt"
        )
    return facts.work, {"seq_len": 1, "checkpoints": CHECKPOINTS if facts.blocks else CHECKPOINTS[:1]}


def assumed_of(config: Config) -> tuple[str, ...]:
    """Returns in words what a task has that its config does not say."""
    model = config.model
    is_open = isinstance(model, GPTModelConfig) and not (model.vocab_size or known_shape(config.data).vocab_size)
    return (f"a vocabulary of {ASSUMED_VOCABULARY}, as the text is not read (model.vocab_size)",) if is_open else ()


def workload_as_written(config: Config, task: TrainingTask, cluster: Cluster) -> Workload | None:
    """Returns what the config itself asks for on this cluster; None where it leaves that open, or cannot be.

    What has no effect, or no formula, is as usual: buckets of full sharding, offload beside a CPU, compression.
    """
    if why_not_written(config, cluster):
        return None
    layout = layout_of(config, cluster.devices, cluster.node.devices)
    is_fully = layout.is_fully_sharded
    layout = replace(
        layout,
        precision=task.base.precision,
        bucket_mb=task.base.bucket_mb if is_fully else layout.bucket_mb,
        reshard_after_forward=layout.reshard_after_forward is not False or not is_fully,
        offload=Offload() if config.parallel.device == "cpu" else _implied(layout.offload),
        compression=Compression(),
    )
    return task.workload(layout)


def _implied(offload: Offload) -> Offload:
    """Parameters bring the optimizer with them, and the optimizer the gradients, which are not named then."""
    if not offload.updates_on_host:
        return offload
    return Offload(optimizer=True, parameters=offload.parameters)


def why_not_written(config: Config, cluster: Cluster) -> str:
    """Returns why formulas do not price a config as it is written on this cluster; nothing where they do."""
    parallel = config.parallel
    written = {
        "parallel.strategy": parallel.strategy,
        "parallel.sharding_strategy": parallel.sharding_strategy,
        "train.microbatch": config.train.microbatch,
    }
    is_open = [key for key, value in written.items() if value == "auto"]
    if is_open:
        return f"{' and '.join(is_open)} = auto: the first plan decides that"
    if parallel.schedule_file or (parallel.schedule == "gpipe" and parallel.pipeline > 1):
        return "its schedule has no formula: paceline predict prices it"
    kept = config.memory.checkpoint_activations
    if kept not in RECOMPUTES:
        return f"memory.checkpoint_activations = {kept} has no formula: paceline predict prices it"
    try:
        config_batch(config, cluster.devices)
        problems = check_ranks(config, cluster.devices, cluster.node.devices)
    except ConfigError as error:
        problems = error.problems
    return "; ".join(f"{problem.what}: {problem.rule}" for problem in problems)


def planned_values(config: Config, workload: Workload, cluster: Cluster) -> dict[str, Any]:
    """Returns the config as it was given, with what was decided in place. Raises ConfigError where it cannot be."""
    values: dict[str, Any] = config.model_dump(mode="json", exclude_unset=True)
    parallel = {key: value for key, value in values.get("parallel", {}).items() if key not in _DECIDED}
    layout = workload.layout
    if not layout.is_fully_sharded:
        parallel = {key: value for key, value in parallel.items() if key not in _OF_FULL_SHARDING}
    comm = {key: value for key, value in values.get("comm", {}).items() if key != "bucket_mb" or value == "auto"}
    sections: dict[str, dict[str, Any]] = {
        "parallel": {"ranks": layout.ranks},
        "comm": comm,
        "memory": {key: value for key, value in values.get("memory", {}).items() if key != "offload"},
        "train": {**values.get("train", {}), "global_batch": int(workload.global_batch)},
    }
    for path, value in config_values(layout, names_precision=workload.run.names_precision).items():
        section, _, key = path.partition(".")
        sections[section][key] = value
    sections["train"]["accumulate"] = layout.accumulate
    sections["parallel"] |= parallel
    values |= {name: section for name, section in sections.items() if section}
    if "comm" in values and not sections["comm"]:
        del values["comm"]
    planned = config_from_dict(values, "plan")
    if problems := check_ranks(planned, cluster.devices, cluster.node.devices):
        raise ConfigError(problems, source="plan")
    return values


def planned_yaml(config: Config, winner: Ranked, cluster: Cluster) -> str:
    """Returns the YAML that ``paceline train`` takes, with what is predicted for it on top."""
    low, high = winner.prediction.band
    speed = f"{winner.tokens_per_s:,.0f} {winner.unit}/s"
    lines = [
        f"# Planned for {cluster.name}: {winner}.",
        f"# Predicted: {format_seconds(winner.seconds)} a step ({format_seconds(low)} to {format_seconds(high)}), "
        f"{speed}, {format_bytes(winner.memory_bytes)} of a device's "
        f"{format_bytes(cluster.device.memory_bytes)}.",
    ]
    return "\n".join(lines) + "\n" + dump_values(planned_values(config, winner.workload, cluster))
