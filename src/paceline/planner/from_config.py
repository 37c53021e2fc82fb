"""From a config to what is searched for, and from what was found to the config that ``paceline train`` takes."""

from __future__ import annotations

from typing import Any

from paceline.cluster.devices import Cluster
from paceline.config import Config, config_batch, config_from_dict, gpt_shape, num_chunks, shard_group
from paceline.config.checks import check_ranks
from paceline.config.known_data import known_shape
from paceline.config.schema import GPTModelConfig
from paceline.config.sharding import FULLY_SHARDED, data_ranks
from paceline.config.yaml_text import dump_values
from paceline.errors import ConfigError, UsageError
from paceline.estimate.activations import ASSUMED_VOCABULARY
from paceline.planner.candidates import Candidate, Task, workload_of
from paceline.planner.search import Ranked
from paceline.planner.workload import Compute, Layout, ModelShape, Recompute
from paceline.units import format_bytes, format_seconds

_COMPUTE: dict[str, Compute] = {"fp32": "fp32", "bf16": "bf16", "bf16_master": "bf16", "fp16": "fp16"}
_RECOMPUTE: dict[str, Recompute] = {"none": "none", "matmuls": "selective", "full": "full"}
# What a plan decides, and what belongs to another machine.
_DECIDED = (
    *("ranks", "strategy", "sharding_strategy", "data", "pipeline", "tensor", "shard_ranks", "schedule", "chunks"),
    *("stages", "stage_layers", "schedule_file", "sequence_parallel", "device", "threads", "node_ranks"),
)
_OF_FULL_SHARDING = ("reshard_after_forward", "units", "unit_mb", "prefetch")


def task_of(config: Config, devices: int, shape: ModelShape | None = None) -> Task:
    """Reads what is to be trained; ``shape`` stands for the config's own. Raises UsageError for no transformer."""
    model, data = config.model, known_shape(config.data)
    if not isinstance(model, GPTModelConfig):
        raise UsageError(
            f"model.kind = {model.kind} is not a transformer whose shape is known\n"
            "  plans are made from the dimensions of a transformer, without running its code\n"
            "  describe it as model.kind: gpt, or name a Hugging Face config.json: --hf FILE"
        )
    sizes = gpt_shape(model)
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


def _global_batch(config: Config, devices: int) -> int:
    if config.train.global_batch is not None:
        return config.train.global_batch
    return config_batch(config, devices).global_batch


def candidate_of(config: Config, task: Task, cluster: Cluster) -> Candidate | None:
    """Returns what the config itself asks for on this cluster; None where it leaves that open, or cannot be."""
    parallel, train, memory = config.parallel, config.train, config.memory
    is_open = "auto" in (parallel.strategy, parallel.sharding_strategy, train.microbatch)
    is_priced = parallel.schedule in ("1f1b", "interleaved") and not memory.offload and not parallel.schedule_file
    if is_open or not is_priced or memory.checkpoint_activations not in _RECOMPUTE:
        return None
    devices, tensor = cluster.devices, parallel.tensor
    try:
        batch = config_batch(config, devices)
        problems = check_ranks(config, devices, cluster.node.devices)
    except ConfigError:
        return None
    if problems:
        return None
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
    recompute = _RECOMPUTE[memory.checkpoint_activations]
    workload = workload_of(task, layout, batch.microbatch, recompute)
    return Candidate(workload=workload, strategy=strategy, shard=group)


def planned_values(config: Config, candidate: Candidate, cluster: Cluster) -> dict[str, Any]:
    """Returns the config as it was given, with what was decided in place. Raises ConfigError where it cannot be."""
    values: dict[str, Any] = config.model_dump(mode="json", exclude_unset=True)
    parallel = {key: value for key, value in values.get("parallel", {}).items() if key not in _DECIDED}
    if candidate.strategy not in FULLY_SHARDED:
        parallel = {key: value for key, value in parallel.items() if key not in _OF_FULL_SHARDING}
    sections: dict[str, dict[str, Any]] = {
        "parallel": {"ranks": candidate.layout.devices},
        "memory": {key: value for key, value in values.get("memory", {}).items() if key != "offload"},
        "train": {**values.get("train", {}), "global_batch": int(candidate.workload.run.global_batch)},
    }
    for path, value in candidate.settings.items():
        section, _, key = path.partition(".")
        sections[section][key] = value
    sections["train"]["accumulate"] = candidate.accumulate
    sections["parallel"] |= parallel
    values |= sections
    planned = config_from_dict(values, "plan")
    if problems := check_ranks(planned, cluster.devices, cluster.node.devices):
        raise ConfigError(problems, source="plan")
    return values


def planned_yaml(config: Config, winner: Ranked, cluster: Cluster) -> str:
    """Returns the YAML that ``paceline train`` takes, with what is predicted for it on top."""
    low, high = winner.prediction.band
    lines = [
        f"# Planned for {cluster.name}: {winner.candidate}.",
        f"# Predicted: {format_seconds(winner.seconds)} a step ({format_seconds(low)} to {format_seconds(high)}), "
        f"{winner.tokens_per_s:,.0f} tokens/s, {format_bytes(winner.memory_bytes)} of a device's "
        f"{format_bytes(cluster.device.memory_bytes)}.",
    ]
    return "\n".join(lines) + "\n" + dump_values(planned_values(config, winner.candidate, cluster))
