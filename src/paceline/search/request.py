"""What a plan is asked for, and what comes of it: the config that ``paceline train`` takes, the plan of a run.

    plan = make_plan(config, RunMachine(device="cuda", ranks=16, node_ranks=8))

A model is read from a config, measured, or read from the ``config.json`` of a Hugging Face repository: Llama, Mistral
and Qwen shapes, GPT-2 and BERT, and mixtures of experts as Mixtral, OLMoE, Qwen 2 and Qwen 3 have them. What a config
of this package cannot say (a gated shared expert, dense layers between those with experts, BERT's attention in both
directions) is planned all the same, but has no YAML. A mixture's parameters, for E experts of width f in each of L'
layers, a shared one of width s with a gate, and L - L' layers with a dense MLP of width d:

    attention and ends  +  L' (3 h (E f + s) + h E + h)  +  (L - L') 3 h d
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.cluster.devices import Cluster
from paceline.cluster.entries import near_names
from paceline.cluster.wires import over_backend
from paceline.config import Config, check_ranks, config_batch, config_from_dict, layout_of, with_precision
from paceline.config.data_sections import RowsDataConfig, TokensDataConfig, are_apart, known_shape
from paceline.config.sections import GPTModelConfig
from paceline.errors import ConfigError, UsageError
from paceline.plan.layout import OF_FULL_SHARDING, Compression, Layout, Offload
from paceline.plan.model_shape import ModelShape, RouterRule
from paceline.plan.plan import Plan, RunMachine
from paceline.plan.workload import Compute, Workload, config_values
from paceline.predict.formulas.engine_costs import context_method
from paceline.predict.memory.activations import ASSUMED_VOCABULARY, describe_model, known_gpt
from paceline.predict.memory.facts import ModelFacts
from paceline.predict.memory.memory import EngineMemory, StateFacts
from paceline.search.candidates import CHECKPOINTS, TrainingTask
from paceline.untrusted import parse_json, read_regular

COMPUTE: dict[str, Compute] = {"fp32": "fp32", "bf16": "bf16", "bf16_master": "bf16", "fp16": "fp16"}
COMPUTE |= {"fp8": "fp8", "fp8_row": "fp8"}
PRECISIONS = tuple(COMPUTE)
# Where the precision is open, in this order: of equal ones the first is taken.
_OPEN = ("bf16_master", "bf16", "fp16", "fp32")
_DOCUMENT = 2048  # tokens on average, where a row has many: a ring sends those alone that ranks share
# What a plan decides, and what belongs to another machine.
_DECIDED = (
    *("ranks", "strategy", "sharding_strategy", "data", "pipeline", "tensor", "expert", "shard_ranks", "schedule"),
    *("chunks", "stages", "stage_layers", "schedule_file", "sequence_parallel", "device", "threads", "node_ranks"),
    *("reshard_after_forward", "context", "context_method"),
)


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
        offload = replace(offload, optimizer=True, gradients=False)
    layout = replace(
        layout,
        precision=task.base.precision,
        bucket_mb=task.base.bucket_mb if is_fully else layout.bucket_mb,
        reshard_after_forward=layout.reshard_after_forward is not False or not is_fully,
        offload=offload,
        compression=Compression(),
    )
    return task.workload(layout)


def with_context_method(config: Config, cluster: Cluster, ranks: int) -> Config:
    """Decides ``parallel.context_method: auto``: the one with which ranks of a cluster wait least for one another."""
    parallel = config.parallel
    is_open = parallel.context > 1 and parallel.context_method == "auto"
    if not is_open or not isinstance(config.model, GPTModelConfig):
        return config
    with contextlib.suppress(UsageError, ConfigError):  # then the ring, which goes with any heads
        layout = layout_of(config, ranks, min(ranks, cluster.node.devices))
        workload = task_of(config, ranks).workload(layout)
        is_packed = isinstance(config.data, TokensDataConfig | RowsDataConfig) and are_apart(config.data)
        method = context_method(workload, cluster, document_tokens=_DOCUMENT if is_packed else 0)
        return config.with_values("parallel", context_method=method)
    return config


def why_not_written(config: Config, cluster: Cluster) -> str:
    """Returns why formulas do not price a config as it is written on this cluster; nothing where they do."""
    parallel = config.parallel
    written = {"parallel.strategy": parallel.strategy, "train.microbatch": config.train.microbatch}
    is_open = [key for key, value in written.items() if value == "auto"]
    if is_open:
        return f"{' and '.join(is_open)} = auto: the first plan decides that"
    if parallel.schedule_file or (parallel.schedule == "gpipe" and parallel.pipeline > 1):
        return "its schedule has no formula: paceline predict prices it"
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
        parallel = {key: value for key, value in parallel.items() if key not in OF_FULL_SHARDING}
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


_LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3")
_MIXTURES = ("mixtral", "olmoe", "qwen2_moe", "qwen3_moe")
_KINDS = (*_LLAMA_LIKE, "gpt2", "bert", *_MIXTURES)
# What each family calls them.
_NAMES = {"layers": "num_hidden_layers", "heads": "num_attention_heads", "width": "hidden_size"}
_NAMES |= {"mlp_width": "intermediate_size", "vocab": "vocab_size", "context": "max_position_embeddings"}
_GPT2_NAMES = {"layers": "n_layer", "heads": "n_head", "width": "n_embd", "vocab": "vocab_size"}
_GPT2_NAMES |= {"context": "n_positions"}
_QWEN_NAMES = {"experts": "num_experts", "active": "num_experts_per_tok", "expert": "moe_intermediate_size"}
_MIXTURE_NAMES = {"mixtral": {"experts": "num_local_experts", "active": "num_experts_per_tok"}}
_MIXTURE_NAMES |= {"qwen2_moe": _QWEN_NAMES, "qwen3_moe": _QWEN_NAMES}
_MIXTURE_NAMES["olmoe"] = {"experts": "num_experts", "active": "num_experts_per_tok"}
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_intermediate_size")
_CLASSIC: dict[str, Any] = {"norm": "layer", "mlp": "gelu", "positions": "learned"}
_IN_A_CONFIG = ["layers", "heads", "kv_heads", "width", "mlp_width", "vocab_size", "norm", "mlp", "positions", "tied"]
_UNUSUAL = ["head_dim", "qk_norm", "experts", "active", "shared_experts", "expert_width", "dense_layers"]
_QK_NORMS = {"qwen3": "head", "qwen3_moe": "head", "olmoe": "whole"}
_TOKENS_OF_A_BATCH = 2**22
_SAMPLES = 2**16
_LONGEST = 4096  # of a sample, where nothing is said: many models allow more than they are trained with


def read_hugging_face(source: Path | Mapping[str, Any]) -> tuple[ModelShape, dict[str, Any]]:
    """Reads a model: its shape, and the values of a config. Raises UsageError with all that is missing or odd."""
    name = "the config" if isinstance(source, Mapping) else str(source)
    values: Any = source
    if isinstance(source, Path):
        fix = "  name the config.json of a Hugging Face model"
        try:
            values = parse_json(read_regular(source))
        except (OSError, UnicodeDecodeError) as error:
            told = error.strerror if isinstance(error, OSError) else "it is no text"
            raise UsageError(f"{source} cannot be read: {told}\n{fix}") from error
        except ValueError as error:
            raise UsageError(f"{source} is no JSON: {error}\n{fix}") from error
        if not isinstance(values, dict):
            raise UsageError(f"{source} holds a {type(values).__name__}\n  a config.json is an object with fields")
    values = dict(values)
    if isinstance(values.get("text_config"), dict):  # models of text and images keep the transformer in a part
        values |= values["text_config"]
    kind = values.get("model_type")
    if kind is None:
        if "hidden_size" in values and "num_hidden_layers" in values:
            raise UsageError(
                f"{name} lacks model_type\n  it says how the other fields are read\n  add one of {', '.join(_KINDS)}"
            )
        raise UsageError(
            f"{name} lacks model_type: it is not the config.json of a Hugging Face model\n"
            "  a transformer's has model_type, hidden_size, num_hidden_layers and others\n"
            "  name the config.json of the model's repository"
        )
    if kind not in _KINDS:
        near = near_names(str(kind), _KINDS)
        hint = f"did you mean {near[0]}?" if near else "describe it as model.kind: gpt in a config"
        raise UsageError(
            f"{name}: model_type {kind!r} is not known\n"
            f"  plans are for transformers with the shapes of {', '.join(_KINDS)}\n  {hint}"
        )
    return _of_kind(name, kind, values)


def _of_kind(source: str, kind: str, values: dict[str, Any]) -> tuple[ModelShape, dict[str, Any]]:
    fields = _Fields(source, values)
    sizes = fields.sizes((_GPT2_NAMES if kind == "gpt2" else _NAMES) | _MIXTURE_NAMES.get(kind, {}))
    kv_heads = fields.optional("num_key_value_heads") or sizes["heads"]
    head_dim = fields.optional("head_dim")
    heads, width = sizes["heads"], sizes["width"]
    mlp_width = sizes.get("mlp_width") or fields.optional("n_inner") or 4 * width
    if experts := [name for name in _EXPERTS if values.get(name) and kind not in _MIXTURES]:
        fields.problems.append(f"{experts[0]} = {values[experts[0]]}: a {kind} has no mixture of experts")
    if not head_dim and width % heads:
        fields.problems.append(f"{heads} heads do not divide a width of {width}")
    if heads % kv_heads:
        fields.problems.append(f"{kv_heads} heads of keys and values do not divide {heads} heads")
    fields.check()
    is_classic = kind in ("gpt2", "bert")
    window = values.get("sliding_window") if values.get("use_sliding_window", True) else 0
    shape = ModelShape(
        layers=sizes["layers"],
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        mlp_width=mlp_width,
        vocab_size=sizes["vocab"],
        **(_CLASSIC if is_classic else {}),
        tied=bool(values.get("tie_word_embeddings", is_classic)),
        causal=kind != "bert",
        head_dim=head_dim if head_dim != width // heads else 0,
        qk_norm=_QK_NORMS.get(kind, "none"),
        window=window if isinstance(window, int) else 0,
    )
    if kind in _MIXTURES:
        shape = _mixture(shape, sizes, fields, renormalises=kind == "mixtral" or bool(values.get("norm_topk_prob")))
        fields.check()
    context = min(sizes["context"], _LONGEST)
    batch = max(1, _TOKENS_OF_A_BATCH // context)
    samples = max(_SAMPLES, 4 * batch)  # of which as many are evaluated as a step has
    data = {"kind": "synthetic_tokens", "vocab_size": shape.vocab_size, "context": context, "samples": samples}
    return shape, {
        "name": kind,
        "model": {"kind": "gpt"} | {name: getattr(shape, name) for name in _IN_A_CONFIG} | _unusual_values(shape),
        "data": data | {"eval_fraction": round(batch / samples, 4)},
        "train": {"steps": 1000, "global_batch": batch, "precision": "bf16_master"},
    }


def why_no_config(shape: ModelShape) -> str:
    """Returns why a config of this package cannot say a shape; empty where it can."""
    if shape.experts and shape.total_params:
        return f"its {shape.experts} experts have dense layers between them, or a shared one with a gate"
    return "" if shape.causal else "its attention looks in both directions"


def _mixture(dense: ModelShape, sizes: dict[str, int], fields: _Fields, *, renormalises: bool) -> ModelShape:
    """Returns the shape with experts; where dense layers are not the first ones, or a shared expert has a gate, with
    the total that this comes to, and the shared one counted as so many of the others."""
    width = sizes.get("expert", dense.mlp_width)
    shared = fields.optional("shared_expert_intermediate_size")
    every = fields.optional("decoder_sparse_step") or 1
    if sizes["active"] > sizes["experts"]:
        fields.problems.append(f"num_experts_per_tok = {sizes['active']} of {sizes['experts']} experts")
    without = set(fields.values.get("mlp_only_layers") or ())
    is_sparse = [(each + 1) % every == 0 and each not in without for each in range(dense.layers)]
    shape = replace(
        dense,
        experts=sizes["experts"],
        active=sizes["active"],
        shared_experts=round(shared / width),
        expert_width=width if width != dense.mlp_width else 0,
        dense_layers=is_sparse.count(False),
        router=RouterRule(renormalise=renormalises),
    )
    if not shared and is_sparse == sorted(is_sparse):
        return shape
    gated = 3 * dense.width * (shared - shape.shared_experts * width) + (dense.width if shared else 0)
    return replace(shape, total_params=shape.params + shape.num_sparse * gated)


def _unusual_values(shape: ModelShape) -> dict[str, Any]:
    """Returns what a config says of a shape's experts, heads and their norms, where that is not the default."""
    router = {"router": {"renormalise": False}} if shape.experts and not shape.router.renormalise else {}
    return {name: value for name in _UNUSUAL if (value := getattr(shape, name)) != getattr(ModelShape, name)} | router


class _Fields:
    """Whole numbers of a file, and what is wrong with them; where one is, 1 stands for it until all are told."""

    def __init__(self, source: str, values: dict[str, Any]) -> None:
        self.source, self.values = source, values
        self.problems: list[str] = []

    def sizes(self, names: dict[str, str]) -> dict[str, int]:
        lacking = [name for name in names.values() if self.values.get(name) is None]
        if lacking:
            self.problems.append(f"lacks {', '.join(lacking)}")
        return {ours: self.optional(name) or 1 for ours, name in names.items()}

    def optional(self, name: str) -> int:
        value = self.values.get(name)
        if value is None:
            return 0
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            self.problems.append(f"{name} = {value!r} is no whole number above 0")
            return 1
        return value

    def check(self) -> None:
        if self.problems:
            told = "; ".join(dict.fromkeys(self.problems))
            raise UsageError(
                f"{self.source}: {told}\n  the shape of a transformer is read from these fields\n"
                "  take the whole config.json of the model"
            )


def make_plan(config: Config, machine: RunMachine, *, source: str = "config") -> Plan:
    """Decides all about a run whose strategy is decided. Raises ConfigError with all that these ranks break."""
    problems = check_ranks(config, machine.ranks, machine.node_ranks)
    if problems:
        raise ConfigError(problems, source=source)
    config = with_precision(config, machine.device)
    return Plan(
        name=config.name,
        layout=layout_of(config, machine.ranks, machine.node_ranks),
        device=machine.device,
        finds_microbatch=config.train.microbatch == "auto",
    )


def with_length(plan: Plan, config: Config, *, train_samples: int, eval_samples: int) -> Plan:
    batch, in_epoch = plan.batch.global_batch, train_samples
    if config.data.last_batch == "drop":
        in_epoch -= train_samples % batch
    steps_per_epoch = -(-in_epoch // batch)
    total_steps = config.train.steps
    if total_steps is None:
        total_steps = max(1, round((config.train.epochs_to_run or 1.0) * steps_per_epoch))
    whole, rest = divmod(total_steps, max(steps_per_epoch, 1))
    return replace(
        plan,
        train_samples=train_samples,
        eval_samples=eval_samples,
        steps_per_epoch=steps_per_epoch,
        total_steps=total_steps,
        total_samples=whole * in_epoch + rest * batch,
    )


def decided_config(config: Config, plan: Plan) -> Config:
    """Returns the config with what was decided in the place of what it left open: what a run's folder keeps."""
    return config.with_values("parallel", device=plan.device, ranks=plan.layout.ranks)
