"""What a user may ask for: one strict schema.

Every section is frozen and refuses unknown keys. Validation is strict: a whole number is an ``int``, ``true`` is not 1,
and text is never read as a number. ``descriptions.yaml`` says what each key means. ``None`` means "decided elsewhere":
from the data, from the model's size, or by the batch algebra (``layout.py``); ``paceline config explain`` shows it.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Field, JsonValue, Strict, model_validator

from paceline.bounded_yaml import load_shipped
from paceline.config import sections
from paceline.config.data_sections import DataConfig
from paceline.plan import layout
from paceline.plan.rule_case import FIELDS, MEANINGS

# YAML has lists and no tuples, so these are converted; what they hold is strict all the same.
Texts: TypeAlias = Annotated[tuple[str, ...], Strict(False)]
RateKind: TypeAlias = Literal["constant", "linear", "cosine", "one_cycle", "range"]
NcclAlgorithm: TypeAlias = Literal["Ring", "Tree", "CollnetDirect", "CollnetChain", "NVLS", "NVLSTree", "PAT"]
NcclSubsystem: TypeAlias = Literal[
    "INIT", "COLL", "P2P", "SHM", "NET", "GRAPH", "TUNING", "ENV", "ALLOC",
    "CALL", "PROXY", "NVLS", "BOOTSTRAP", "REG", "PROFILE", "RAS", "ALL",
]  # fmt: skip

# What a layout says where nothing else does: the defaults stand there alone.
_LAYOUT, _COMPRESSION = layout.Layout(), layout.Compression()


class ParallelConfig(sections.Section):
    """On how many ranks, and how the model is spread over them."""

    strategy: layout.StrategyName = "ddp"
    sharding_strategy: Literal["manual", "auto"] = "manual"
    ranks: Literal["auto"] | sections.Count = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    own_cores: bool = True
    node_ranks: sections.Count | None = None
    shard_ranks: sections.Count | None = None
    reshard_after_forward: bool | sections.Count = _LAYOUT.reshard_after_forward
    units: Texts | None = None
    unit_mb: sections.Positive | None = None
    prefetch: sections.Count = _LAYOUT.prefetch
    sync_batchnorm: bool = _LAYOUT.sync_batchnorm
    pipeline: sections.Count = _LAYOUT.pipeline
    context: sections.Count = _LAYOUT.context_ranks
    context_method: layout.ContextMethod = _LAYOUT.context_method
    tensor: sections.Count = _LAYOUT.tensor
    expert: sections.Count = _LAYOUT.expert
    data: sections.Count | None = None
    schedule: Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"] = "1f1b"
    chunks: sections.Count | None = None
    stages: Literal["auto", "measured"] | Texts = "auto"
    stage_layers: Annotated[tuple[sections.NotNegativeCount, ...], Strict(False)] | None = None
    sequence_parallel: bool = False
    schedule_file: str | None = None

    @property
    def degree(self) -> int:
        """How many ranks work on the same samples: those that remain share the batch."""
        return self.pipeline * self.context * self.tensor

    @property
    def decided_ranks(self) -> int:
        assert self.ranks != "auto", "the ranks of this config are not decided yet"
        return self.ranks

    @model_validator(mode="before")
    @classmethod
    def _read_older_key(cls, values: Any) -> Any:
        """Reads ``sharding_strategy: auto`` as the strategy, unless another one is given beside it."""
        is_open = isinstance(values, dict) and values.get("sharding_strategy") == "auto"
        if is_open and values.get("strategy", "auto") == "auto":
            return {**values, "strategy": "auto", "sharding_strategy": "manual"}
        return values


class MemoryConfig(sections.Section):
    """What is traded for memory: time, by computing again or by moving to the host. ``memory: auto`` leaves it open."""

    auto: bool = False
    checkpoint_activations: layout.Checkpointing = "none"
    offload: Annotated[tuple[layout.OffloadPart, ...], Strict(False)] = ()
    mlp_tiles: Literal["auto"] | sections.Count = _LAYOUT.mlp_tiles


def _of_word(values: Any) -> Any:
    """Reads ``memory: auto``."""
    return {"auto": True} if values == "auto" else values


class CompressionConfig(sections.Section):
    """How gradients are made smaller on their way."""

    policy: layout.Policy = "none"
    ratio: float = Field(default=_COMPRESSION.ratio, gt=0, le=1)
    factor_rank: sections.Count = _COMPRESSION.factor_rank
    threshold: sections.Positive = _COMPRESSION.threshold
    error_feedback: bool = _COMPRESSION.error_feedback
    plain_steps: int = Field(default=_COMPRESSION.plain_steps, ge=0)
    min_size: int = Field(default=_COMPRESSION.min_size, ge=0)
    exclude: Texts = _COMPRESSION.exclude


class NcclConfig(sections.Section):
    """Settings of NCCL; null leaves each to NCCL, which knows the machine well."""

    p2p: bool | None = None
    p2p_level: Literal["LOC", "NVL", "PIX", "PXB", "PHB", "SYS"] | None = None
    shared_memory: bool | None = None
    min_channels: Annotated[int, Field(ge=1, le=32)] | None = None
    max_channels: sections.Count | None = None
    socket_interface: str | None = None
    socket_threads: Annotated[int, Field(ge=1, le=16)] | None = None
    sockets_per_thread: Annotated[int, Field(ge=1, le=64)] | None = None
    ib: bool | None = None
    ib_hca: str | None = None
    ib_gid_index: Annotated[int, Field(ge=0)] | None = None
    ib_timeout: Annotated[int, Field(ge=1, le=31)] | None = None
    gdr_level: Literal["LOC", "PIX", "PXB", "PHB", "SYS"] | None = None
    cross_nic: Literal[0, 1, 2] | None = None
    algorithms: Annotated[tuple[NcclAlgorithm, ...], Strict(False)] | None = None
    protocols: Annotated[tuple[Literal["LL", "LL128", "Simple"], ...], Strict(False)] | None = None
    debug: Literal["VERSION", "WARN", "INFO", "TRACE"] | None = None
    debug_subsystems: Annotated[tuple[NcclSubsystem, ...], Strict(False)] | None = None


class CommConfig(sections.Section):
    """How gradients travel between ranks."""

    backend: Literal["auto", "nccl", "gloo", "shared_memory", "virtual"] = "auto"
    algorithm: layout.Algorithm = "native"
    algorithm_table: str | None = None
    bucket_mb: Literal["auto"] | sections.Positive = _LAYOUT.bucket_mb
    first_bucket_mb: sections.Positive = _LAYOUT.first_bucket_mb
    timeout_s: sections.Positive = 300.0
    buffers: layout.Buffers = "broadcast"
    overlap: bool = _LAYOUT.overlap
    interface: str | None = None
    compression: CompressionConfig = CompressionConfig()
    nccl: NcclConfig = NcclConfig()


class ScheduleConfig(sections.Section):
    """How the learning rate moves over the run."""

    kind: RateKind = "constant"
    warmup: sections.NotNegative = 0.0
    unit: Literal["steps", "samples"] = "steps"
    length: sections.Positive | None = None
    final_ratio: float = Field(default=0.0, ge=0, le=1)


class ParameterGroupConfig(sections.Section):
    """What is different for some parameters."""

    lr: sections.Positive | None = None
    weight_decay: sections.NotNegative | None = None
    frozen: bool = False


class MuonConfig(sections.Section):
    """Muon: the matrices of hidden layers. AdamW updates all else, with optim.betas and optim.eps."""

    momentum: sections.Probability = 0.95
    nesterov: bool = True
    iterations: sections.Count = 5
    lr_shape: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    adamw_lr_factor: sections.Positive = 1.0
    adamw_for: Texts | None = None


class OptimConfig(sections.Section):
    """The optimizer, its learning rate and clipping."""

    kind: Literal["adamw", "sgd", "muon"] | sections.ImportPath = "adamw"
    lr: sections.Positive = 0.0003
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    lr_batch: sections.Count | None = None
    weight_decay: sections.NotNegative = 0.01
    betas: Annotated[tuple[sections.Probability, sections.Probability], Strict(False)] = (0.9, 0.999)
    eps: sections.Positive = 1e-08
    momentum: sections.Probability = 0.9
    nesterov: bool = False
    muon: MuonConfig = MuonConfig()
    args: dict[str, JsonValue] = Field(default={})
    groups: dict[str, ParameterGroupConfig] = Field(default={})
    clip_norm: sections.Positive | None = 1.0
    schedule: ScheduleConfig = ScheduleConfig()


class EarlyStopConfig(sections.Section):
    """When a run ends before its time: nothing has become better for some evaluations."""

    patience: sections.Count | None = None
    metric: str = "eval_loss"
    min_delta: sections.NotNegative = 0.0
    mode: Literal["min", "max"] | None = None


class TrainConfig(sections.Section):
    """How long, with what batch, and with which seed."""

    steps: sections.Count | None = None
    epochs: sections.Positive | None = None
    global_batch: sections.Count | None = None
    microbatch: Literal["auto"] | sections.Count | None = None
    accumulate: sections.Count | None = None
    seed: sections.Seed = 0
    deterministic: bool = False
    dtype: Literal["float32", "float64"] = "float32"
    precision: Literal["auto", "fp32", "bf16", "fp16", "bf16_master", "fp8", "fp8_row"] = "auto"
    cuda_graphs: bool | Literal["auto"] = "auto"
    loss_scale: sections.Positive = 65536.0
    max_bad_steps: sections.Count = 10
    loss: Literal["auto"] | sections.ImportPath = "auto"
    fused_loss: Literal["auto"] | bool = _LAYOUT.fused_loss
    eval_every: sections.Count | Literal["epoch"] | None = None
    early_stop: EarlyStopConfig = EarlyStopConfig()
    metrics: dict[str, sections.ImportPath] = Field(default={})
    hooks: Annotated[tuple[sections.ImportPath, ...], Strict(False)] = ()
    ema_decay: sections.Factor | None = None
    ema_eval: bool = False

    def precision_on(self, device: str, *, has_bf16: bool = True) -> str:
        """Returns the precision of ranks on a device, which may or may not compute in bf16: what ``auto`` is there."""
        if self.precision != "auto":
            return self.precision
        return "bf16_master" if device == "cuda" and has_bf16 and self.dtype == "float32" else "fp32"

    def precision_reason(self, device: str, *, has_bf16: bool = True) -> str:
        if self.dtype != "float32":
            return f"train.dtype = {self.dtype} is for exactness"
        if device != "cuda":
            return "ranks on CPUs, where bf16 is often slower than fp32"
        if not has_bf16:
            return "this GPU has no units for bf16; fp16 has a smaller range and a loss scale, so ask for it by name"
        return "GPUs multiply bf16 several times as fast as fp32, and fp32 masters lose no update"

    @property
    def epochs_to_run(self) -> float | None:
        """Returns the epochs that this run lasts: 1 where no length was given, ``None`` where ``steps`` says it."""
        if self.steps is not None:
            return None
        return 1.0 if self.epochs is None else self.epochs


class Config(sections.Section):
    """Everything a run is asked to do."""

    name: str = "run"
    model: Annotated[sections.ModelConfig, Field(discriminator="kind")]
    data: Annotated[DataConfig, Field(discriminator="kind")]
    parallel: ParallelConfig = ParallelConfig()
    comm: CommConfig = CommConfig()
    memory: Annotated[MemoryConfig, BeforeValidator(_of_word)] = MemoryConfig()
    optim: OptimConfig = OptimConfig()
    train: TrainConfig = TrainConfig()
    checkpoint: sections.CheckpointConfig = sections.CheckpointConfig()
    recovery: sections.RecoveryConfig = sections.RecoveryConfig()
    monitor: sections.MonitorConfig = sections.MonitorConfig()

    @property
    def opens_strategy(self) -> bool:
        """Whether the strategy is to be decided: ``auto``, or not given where memory is to be."""
        parallel = self.parallel
        is_given = "strategy" in parallel.model_fields_set or parallel.degree > 1
        return parallel.strategy == "auto" or (self.memory.auto and not is_given)

    @property
    def is_open(self) -> bool:
        return self.opens_strategy or self.memory.auto

    def with_values(self, section: str, **values: Any) -> Config:
        """Returns the config with some values of a section changed; they are not checked."""
        return self.model_copy(update={section: getattr(self, section).model_copy(update=values)})


@cache
def descriptions() -> dict[str, dict[str, str]]:
    """Returns what each key means, by the name of its section's class. They are read when they are first needed."""
    texts = load_shipped((Path(__file__).parent / "descriptions.yaml").read_text(encoding="utf-8"))
    found: dict[str, dict[str, str]] = {}
    classes: list[type[sections.Section]] = [sections.Section]
    for each in classes:
        known = [texts.get(base.__name__, {}) for base in each.__mro__]
        found[each.__name__] = {
            key: next((text[key] for text in known if key in text), MEANINGS.get(FIELDS.get(key, key), ""))
            for key in each.model_fields
        }
        classes += each.__subclasses__()
    return found


def json_schema() -> dict[str, Any]:
    """Returns the JSON Schema of a config file, fit for completion and checks in an editor."""
    schema = Config.model_json_schema()
    for name, section in {"Config": schema, **schema["$defs"]}.items():
        for key, spec in section.get("properties", {}).items():
            section["properties"][key] = dict(sorted({**spec, "description": descriptions()[name][key]}.items()))
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "Paceline config"}
