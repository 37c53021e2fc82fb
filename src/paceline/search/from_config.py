"""From a config to what is searched for, and from what was found to the config that ``paceline train`` takes."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from paceline.cluster.devices import Cluster
from paceline.config import Config, config_batch, config_from_dict, gpt_shape, num_chunks, shard_group
from paceline.config.checks import check_ranks
from paceline.config.sections import GPTModelConfig, known_shape
from paceline.config.sharding import FULLY_SHARDED, data_ranks
from paceline.config.yaml_text import dump_values
from paceline.errors import ConfigError, UsageError
from paceline.plan.workload import Compute, Layout, ModelShape, Recompute, SampleModel
from paceline.predict.formulas.tuning import DEFAULT_BUCKET_MB
from paceline.predict.memory.activations import ASSUMED_VOCABULARY, describe_model
from paceline.predict.memory.facts import ModelFacts
from paceline.search.candidates import RECOMPUTE, Candidate, Task, Tuning, ZeroBubble, workload_of
from paceline.search.search import Ranked
from paceline.units import format_bytes, format_seconds

_COMPUTE: dict[str, Compute] = {"fp32": "fp32", "bf16": "bf16", "bf16_master": "bf16", "fp16": "fp16"}
RECOMPUTES: dict[str, Recompute] = {"none": "none", "matmuls": "selective", "full": "full"}
# What a plan decides, and what belongs to another machine.
_DECIDED = (
    *("ranks", "strategy", "sharding_strategy", "data", "pipeline", "tensor", "shard_ranks", "schedule", "chunks"),
    *("stages", "stage_layers", "schedule_file", "sequence_parallel", "device", "threads", "node_ranks"),
    "reshard_after_forward",
)
_OF_FULL_SHARDING = ("units", "unit_mb", "prefetch")
PRECISIONS = tuple(_COMPUTE)


def task_of(config: Config, devices: int, shape: ModelShape | None = None, facts: ModelFacts | None = None) -> Task:
    """Reads what is to be trained. ``shape`` stands for the config's own; ``facts`` are those of a model's own code.

    Raises UsageError for a model whose shape is not known.
    """
    model = config.model
    if not isinstance(model, GPTModelConfig):
        return _sample_task(config, devices, facts)
    data, sizes = known_shape(config.data), gpt_shape(model)
    context = data.context or (sizes.context if sizes else None)
    if sizes is None or context is None:
        raise UsageError(
            "the model's context is not known: data.context and model.context are not given\n"
            "  a plan needs the tokens of a sample\n  set model.context, or data.context"
        )
    shape = shape or ModelShape(
        layers=sizes.layers,
        hidden=sizes.width,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        ffn=sizes.mlp_width,
        vocab=model.vocab_size or data.vocab_size or ASSUMED_VOCABULARY,
        gated=sizes.mlp == "swiglu",
        tied=sizes.tied,
    )
    return Task(
        model=shape,
        global_batch=_global_batch(config, devices),
        seq_len=context,
        compute=_COMPUTE[config.train.precision],
        framework="compiled" if model.compile else "eager",
    )


def assumed_of(config: Config) -> tuple[str, ...]:
    """Returns in words what a task has that its config does not say."""
    model = config.model
    is_open = isinstance(model, GPTModelConfig) and not (model.vocab_size or known_shape(config.data).vocab_size)
    return (f"a vocabulary of {ASSUMED_VOCABULARY}, as the text is not read (model.vocab_size)",) if is_open else ()


def _sample_task(config: Config, devices: int, facts: ModelFacts | None) -> Task:
    """Reads a model that is known by what a sample of it costs: data-parallel meshes alone."""
    facts = facts or describe_model(config, "cuda")
    if facts is None or facts.work is None:
        raise UsageError(
            f"model.kind = {config.model.kind}: what a sample costs is not known\n"
            "  it follows from the sizes of the data, or from running the model's code on tensors without values\n"
            "  give the data's sizes, plan it with paceline.plan(...), or describe it as model.kind: gpt"
        )
    return Task(
        model=sample_model(facts),
        global_batch=_global_batch(config, devices),
        seq_len=1,
        compute=_COMPUTE[config.train.precision],
        framework="compiled" if config.model.compile else "eager",
        recompute=RECOMPUTE if facts.blocks else RECOMPUTE[:1],
    )


def sample_model(facts: ModelFacts) -> SampleModel:
    """Returns a model by what a sample of it costs. Raises UsageError where nobody has counted that."""
    work = facts.work
    if work is None:
        raise UsageError(f"{facts.name}: the FLOPs of a sample are not known\n  a step's time follows from them")
    return SampleModel(
        name=facts.name,
        params=float(facts.parameters),
        flops=work.flops,
        activations=work.written,
        kernels=work.kernels,
        kind="convolution" if work.is_convolutional else "attention",
    )


def _global_batch(config: Config, devices: int) -> int:
    if config.train.global_batch is not None:
        return config.train.global_batch
    return config_batch(config, devices).global_batch


def candidate_of(config: Config, task: Task, cluster: Cluster) -> Candidate | None:
    """Returns what the config itself asks for on this cluster; None where it leaves that open, or cannot be."""
    if why_no_candidate(config, cluster):
        return None
    parallel, memory = config.parallel, config.memory
    devices, tensor = cluster.devices, parallel.tensor
    batch = config_batch(config, devices)
    strategy = "fsdp" if parallel.strategy == "zero3" else parallel.strategy
    group = shard_group(parallel, devices, cluster.node.devices)
    layout = Layout(
        devices=devices,
        data=data_ranks(parallel, devices),
        tensor=tensor,
        pipeline=parallel.pipeline,
        chunks=num_chunks(parallel) if parallel.pipeline > 1 else 1,
        sharding="fsdp" if strategy == "hybrid" else strategy,  # type: ignore[arg-type]
        shard_group=group if strategy == "hybrid" else 0,
        sequence_parallel=parallel.sequence_parallel,
    )
    recompute = RECOMPUTES[memory.checkpoint_activations]
    return Candidate(
        workload=workload_of(task, layout, batch.microbatch, recompute),
        strategy=strategy,
        shard=group,
        zero_bubble=_zero_bubble(config),
        tuning=_tuning(config),
        precision=task.precision,
    )


def why_no_candidate(config: Config, cluster: Cluster) -> str:
    """Returns why a config, as it is written, is no candidate on this cluster; nothing where it is one."""
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


def _zero_bubble(config: Config) -> ZeroBubble:
    parallel = config.parallel
    if parallel.pipeline == 1 or parallel.schedule not in ("zb-h1", "zb-v"):
        return ""
    return "zb-h1" if parallel.schedule == "zb-h1" else "zb-v"


def _tuning(config: Config) -> Tuning:
    """Without what has no effect: buckets of full sharding, and offload beside a CPU."""
    bucket_mb, is_fully = config.comm.bucket_mb, config.parallel.strategy in FULLY_SHARDED
    is_usual = bucket_mb == "auto" or bucket_mb == DEFAULT_BUCKET_MB
    return Tuning(
        bucket_mb=None if is_usual or is_fully else float(bucket_mb),
        reshard=config.parallel.reshard_after_forward is not False or not is_fully,
        offload=() if config.parallel.device == "cpu" else _offload(config.memory.offload),
    )


def _offload(asked: Collection[str]) -> tuple[str, ...]:
    """In the words of candidates: parameters bring the optimizer with them, and the optimizer the gradients."""
    if not {"optimizer", "parameters"} & set(asked):
        return tuple(asked)
    return ("optimizer", "parameters") if "parameters" in asked else ("optimizer",)


def planned_values(config: Config, candidate: Candidate, cluster: Cluster) -> dict[str, Any]:
    """Returns the config as it was given, with what was decided in place. Raises ConfigError where it cannot be."""
    values: dict[str, Any] = config.model_dump(mode="json", exclude_unset=True)
    parallel = {key: value for key, value in values.get("parallel", {}).items() if key not in _DECIDED}
    if candidate.strategy not in FULLY_SHARDED:
        parallel = {key: value for key, value in parallel.items() if key not in _OF_FULL_SHARDING}
    comm = {key: value for key, value in values.get("comm", {}).items() if key != "bucket_mb" or value == "auto"}
    sections: dict[str, dict[str, Any]] = {
        "parallel": {"ranks": candidate.layout.devices},
        "comm": comm,
        "memory": {key: value for key, value in values.get("memory", {}).items() if key != "offload"},
        "train": {**values.get("train", {}), "global_batch": int(candidate.workload.run.global_batch)},
    }
    for path, value in candidate.settings.items():
        section, _, key = path.partition(".")
        sections[section][key] = value
    sections["train"]["accumulate"] = candidate.accumulate
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
    speed = f"{winner.tokens_per_s:,.0f} {unit_of(winner.candidate)}/s"
    lines = [
        f"# Planned for {cluster.name}: {winner.candidate}.",
        f"# Predicted: {format_seconds(winner.seconds)} a step ({format_seconds(low)} to {format_seconds(high)}), "
        f"{speed}, {format_bytes(winner.memory_bytes)} of a device's "
        f"{format_bytes(cluster.device.memory_bytes)}.",
    ]
    return "\n".join(lines) + "\n" + dump_values(planned_values(config, winner.candidate, cluster))


def unit_of(candidate: Candidate) -> str:
    """Returns what throughput counts: tokens, or samples of a model that has none."""
    return "tokens" if isinstance(candidate.workload.model, ModelShape) else "samples"
