"""What a plan is asked for: a model and a cluster to train it on; and the config that ``paceline train`` takes of it.

A model is read from a config, from Hugging Face, or measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.cluster.devices import Cluster
from paceline.cluster.entries import near_names
from paceline.cluster.wires import over_backend
from paceline.config import Config, config_batch, config_from_dict, layout_of, with_precision
from paceline.config.checks import check_ranks
from paceline.config.data_sections import known_shape
from paceline.config.sections import GPTModelConfig
from paceline.errors import ConfigError, UsageError
from paceline.plan.layout import Compression, Layout, Offload
from paceline.plan.model_shape import ModelShape
from paceline.plan.workload import RECOMPUTES, Compute, Workload, config_values
from paceline.predict.memory.activations import ASSUMED_VOCABULARY, describe_model, known_gpt
from paceline.predict.memory.facts import ModelFacts
from paceline.predict.memory.memory import EngineMemory, StateFacts
from paceline.search.candidates import CHECKPOINTS, TrainingTask
from paceline.search.hugging_face import read_hugging_face, why_no_config

COMPUTE: dict[str, Compute] = {"fp32": "fp32", "bf16": "bf16", "bf16_master": "bf16", "fp16": "fp16"}
COMPUTE |= {"fp8": "fp8", "fp8_row": "fp8"}
PRECISIONS = tuple(COMPUTE)
# Where the precision is open, in this order: of equal ones the first is taken.
_OPEN = ("bf16_master", "bf16", "fp16", "fp32")
# What a plan decides, and what belongs to another machine.
_DECIDED = (
    *("ranks", "strategy", "sharding_strategy", "data", "pipeline", "tensor", "shard_ranks", "schedule", "chunks"),
    *("stages", "stage_layers", "schedule_file", "sequence_parallel", "device", "threads", "node_ranks"),
    "reshard_after_forward",
)
_OF_FULL_SHARDING = ("units", "unit_mb", "prefetch")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What is planned for, in each precision that may be, what was assumed, and why there can be no config of it."""

    config: Config
    cluster: Cluster
    tasks: tuple[TrainingTask, ...]
    assumed: tuple[str, ...] = ()
    no_config: str = ""
    host_memory: float = float("inf")  # bytes that the ranks of a node may take


def request_for(
    config: Config,
    cluster: Cluster,
    *,
    precision: str | None = None,
    shape: ModelShape | None = None,
    facts: ModelFacts | None = None,
    no_config: str = "",
) -> PlanRequest:
    """Makes a request; ``shape``, ``facts``: of a model that the config cannot describe. Raises UsageError."""
    if precision is not None and precision not in ("auto", *PRECISIONS):
        near = near_names(precision, [*PRECISIONS, "auto"])
        raise UsageError(
            f"precision {precision!r} is not known\n  it is auto, or one of {', '.join(PRECISIONS)}\n"
            f"  {f'did you mean {near[0]}?' if near else 'try auto'}"
        )
    device = "cpu" if cluster.device.is_cpu else "cuda"
    cluster = over_backend(cluster, config.comm.backend) if cluster.devices > 1 else cluster
    config = with_precision(config, device, has_bf16="bf16" in cluster.device.peak_flops)
    tasks = []
    for each in _OPEN if precision == "auto" else (precision,):
        asked = config if each is None else config.with_values("train", precision=each)
        need = EngineMemory.of(asked, device) if shape is None else None
        if facts is not None:
            need = EngineMemory(facts=facts, states=StateFacts.of(asked, device))
        task = task_of(asked, cluster.devices, shape, facts)
        tasks.append(replace(task, names_precision=each is not None, need=need))
    model = config.model
    is_open = isinstance(model, GPTModelConfig) and not (model.vocab_size or known_shape(config.data).vocab_size)
    vocabulary = f"a vocabulary of {ASSUMED_VOCABULARY}, as the text is not read (model.vocab_size)"
    return PlanRequest(
        config=config,
        cluster=cluster,
        tasks=tuple(tasks),
        assumed=(vocabulary,) if is_open and shape is None and facts is None else (),
        no_config=no_config,
    )


def request_for_hugging_face(
    source: Path | Mapping[str, Any], cluster: Cluster, overrides: Sequence[str] = (), precision: str | None = None
) -> PlanRequest:
    """Makes a request of a Hugging Face model, whose batch and tokens are assumed where ``overrides`` do not say."""
    shape, values = read_hugging_face(source)
    own = ["train.precision=fp32"] if cluster.device.is_cpu else []  # processors have no faster one
    config = config_from_dict(values, overrides=[*own, *overrides])
    no_config, context = why_no_config(shape), known_shape(config.data).context or 0
    texts = {
        "train.global_batch": f"a step of {config.train.global_batch} sequences (train.global_batch)",
        "data.context": f"sequences of {context} tokens (data.context)",
        "train.precision": f"{config.train.precision} (train.precision)",
    }
    said = {word.partition("=")[0] for word in overrides} | ({"train.precision"} if precision else set())
    found = [text for key, text in texts.items() if key not in said]
    assumed = [", ".join(found)] if found else []
    if 0 < shape.window < context:
        assumed.append(f"attention looks back {context} tokens, where the model's looks back {shape.window}")
    own_shape = shape if no_config else None
    made = request_for(config, cluster, precision=precision, shape=own_shape, no_config=no_config)
    return replace(made, assumed=tuple(assumed))


def task_of(
    config: Config, devices: int, shape: ModelShape | None = None, facts: ModelFacts | None = None
) -> TrainingTask:
    """Reads what is to be trained; ``shape``, ``facts``: of a model that the config cannot tell. Raises UsageError."""
    train, compiles = config.train, Layout(compile=config.model.compile).for_ranks(devices).compile
    precision = train.precision_on(config.parallel.device)
    seq_len, checkpoints = 1, CHECKPOINTS
    if isinstance(config.model, GPTModelConfig):
        known = known_gpt(config)
        if known is None:
            raise UsageError(
                "the model's context is not known: data.context and model.context are not given\n"
                "  a plan needs the tokens of a sample\n  set model.context, or data.context"
            )
        own, seq_len = known
    else:
        facts = facts or describe_model(config, "cuda")
        if facts is None or facts.work is None:
            raise UsageError(
                f"model.kind = {config.model.kind}: what a sample costs is not known\n"
                "  it follows from the sizes of the data, or from running the model's code on tensors without values\n"
                "  give the data's sizes, plan it with paceline.plan(...), or describe it as model.kind: gpt"
            )
        own, checkpoints = facts.work, CHECKPOINTS if facts.blocks else CHECKPOINTS[:1]
    return TrainingTask(
        model=shape or own,
        global_batch=train.global_batch or config_batch(config, devices).global_batch,
        seq_len=seq_len,
        compute=COMPUTE[precision],
        framework="eager" if compiles == "none" else "compiled",
        base=Layout(precision=precision, prefetch=config.parallel.prefetch, compile=compiles),
        checkpoints=checkpoints,
    )


def workload_as_written(config: Config, task: TrainingTask, cluster: Cluster) -> Workload | None:
    """Returns what the config itself asks for on this cluster; None where it leaves that open, or cannot be.

    What has no effect, or no formula, is as usual: buckets of full sharding, offload beside a CPU, compression.
    """
    if why_not_written(config, cluster):
        return None
    layout = layout_of(config, cluster.devices, cluster.node.devices)
    is_fully, offload = layout.is_fully_sharded, layout.offload
    if config.parallel.device == "cpu":
        offload = Offload()
    elif offload.updates_on_host:  # parameters bring the optimizer with them, and that the gradients, not named then
        offload = Offload(optimizer=True, parameters=offload.parameters)
    layout = replace(
        layout,
        precision=task.base.precision,
        bucket_mb=task.base.bucket_mb if is_fully else layout.bucket_mb,
        reshard_after_forward=layout.reshard_after_forward is not False or not is_fully,
        offload=offload,
        compression=Compression(),
    )
    return task.workload(layout)


def why_not_written(config: Config, cluster: Cluster) -> str:
    """Returns why formulas do not price a config as it is written on this cluster; nothing where they do."""
    parallel = config.parallel
    written = {"parallel.strategy": parallel.strategy, "train.microbatch": config.train.microbatch}
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
    if problems := check_ranks(config_from_dict(values, "plan"), cluster.devices, cluster.node.devices):
        raise ConfigError(problems, source="plan")
    return values
