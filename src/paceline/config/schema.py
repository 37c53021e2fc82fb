"""What a user may ask for: one strict schema.

Every section is frozen and refuses unknown keys. Validation is strict: a whole number is an ``int``, ``true`` is not 1,
and text is never read as a number. Each field carries a description, which the docs, the JSON Schema and the error
messages all use. Sections with forms or rules of their own have files of their own.

``None`` means "decided elsewhere": from the data, from the model's size, or by the batch algebra (``batch.py``).
``paceline config explain`` shows what it became.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, JsonValue, Strict, model_validator

from paceline.config.data_sections import DataConfig
from paceline.config.sections import (
    CheckpointConfig,
    Count,
    ImportPath,
    ModelConfig,
    MonitorConfig,
    NotNegative,
    Positive,
    Probability,
    RecoveryConfig,
    Section,
    Seed,
)
from paceline.plan.field_types import MEANINGS
from paceline.plan.layout import Algorithm, Buffers, Checkpointing, Compression, Layout, OffloadPart, Policy

# YAML has lists and no tuples, so these are converted; what they hold is strict all the same.
Texts: TypeAlias = Annotated[tuple[str, ...], Strict(False)]
Decay: TypeAlias = Annotated[float, Field(gt=0, lt=1)]
Counts: TypeAlias = Annotated[tuple[Annotated[int, Field(ge=0)], ...], Strict(False)]
NcclAlgorithm: TypeAlias = Literal["Ring", "Tree", "CollnetDirect", "CollnetChain", "NVLS", "NVLSTree", "PAT"]
NcclSubsystem: TypeAlias = Literal[
    "INIT",
    "COLL",
    "P2P",
    "SHM",
    "NET",
    "GRAPH",
    "TUNING",
    "ENV",
    "ALLOC",
    "CALL",
    "PROXY",
    "NVLS",
    "BOOTSTRAP",
    "REG",
    "PROFILE",
    "RAS",
    "ALL",
]


# What a layout says where nothing else does: the defaults stand there alone.
_LAYOUT, _COMPRESSION = Layout(), Compression()


class ParallelConfig(Section):
    """On how many ranks, and how the model is spread over them."""

    strategy: Literal["ddp", "zero1", "zero2", "zero3", "fsdp", "hybrid", "auto"] = Field(
        default="ddp", description=MEANINGS["strategy"]
    )
    sharding_strategy: Literal["manual", "auto"] = Field(
        default="manual", description="auto: an older way to write strategy: auto, and read as that"
    )
    ranks: Literal["auto"] | Count = Field(
        default="auto", description="number of ranks; auto: one for each GPU, or chosen for the CPU"
    )
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="where the ranks compute")
    threads: Annotated[int, Field(ge=1, le=1024)] | None = Field(
        default=None, description="CPU threads of each rank; null: the cores are shared out"
    )
    own_cores: bool = Field(
        default=True, description="on CPUs (Linux): each rank keeps to its share of the host's cores, if they divide"
    )
    node_ranks: Count | None = Field(default=None, description="ranks that share a host; null: detected")
    shard_ranks: Count | None = Field(default=None, description=MEANINGS["shard_ranks"])
    reshard_after_forward: bool | Count = Field(
        default=_LAYOUT.reshard_after_forward, description=MEANINGS["reshard_after_forward"]
    )
    units: Texts | None = Field(default=None, description=MEANINGS["units"])
    unit_mb: Positive | None = Field(default=None, description=MEANINGS["unit_mb"])
    prefetch: Count = Field(default=_LAYOUT.prefetch, description=MEANINGS["prefetch"])
    sync_batchnorm: bool = Field(default=_LAYOUT.sync_batchnorm, description=MEANINGS["sync_batchnorm"])
    pipeline: Count = Field(default=_LAYOUT.pipeline, description=MEANINGS["pipeline"])
    tensor: Count = Field(default=_LAYOUT.tensor, description=MEANINGS["tensor"])
    data: Count | None = Field(default=None, description=MEANINGS["data"])
    schedule: Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"] = Field(
        default="1f1b", description=MEANINGS["schedule"]
    )
    chunks: Count | None = Field(default=None, description=MEANINGS["chunks"])
    stages: Literal["auto", "measured"] | Texts = Field(default="auto", description=MEANINGS["stages"])
    stage_layers: Counts | None = Field(default=None, description=MEANINGS["stage_layers"])
    sequence_parallel: bool = Field(default=False, description=MEANINGS["sequence_parallel"])
    schedule_file: str | None = Field(
        default=None, description="pipeline: a CSV file with a schedule of your own; null: see schedule"
    )

    @property
    def decided_ranks(self) -> int:
        """The number of ranks, in a config in which it is decided."""
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


class MemoryConfig(Section):
    """What is traded for memory: time, by computing again or by moving to the host."""

    checkpoint_activations: Checkpointing = Field(default="none", description=MEANINGS["checkpoint_activations"])
    offload: Annotated[tuple[OffloadPart, ...], Strict(False)] = Field(
        default=(), description="what lives in the host's memory: optimizer, gradients, parameters"
    )


class CompressionConfig(Section):
    """How gradients are made smaller on their way."""

    policy: Policy = Field(
        default="none",
        description="none; topk, randomk, threshold: few elements; powersgd: two thin factors of a matrix; sign, int8, "
        "fp16, bf16: few bits",
    )
    ratio: float = Field(
        default=_COMPRESSION.ratio, gt=0, le=1, description="topk, randomk: the share of elements that is sent"
    )
    factor_rank: Count = Field(default=_COMPRESSION.factor_rank, description="powersgd: columns of a factor")
    threshold: Positive = Field(default=_COMPRESSION.threshold, description="threshold: smaller elements are not sent")
    error_feedback: bool = Field(
        default=_COMPRESSION.error_feedback, description="what a step did not send is added to the next one"
    )
    plain_steps: int = Field(default=_COMPRESSION.plain_steps, ge=0, description="first steps, which compress nothing")
    min_size: int = Field(default=_COMPRESSION.min_size, ge=0, description="tensors with fewer elements travel whole")
    exclude: Texts = Field(
        default=_COMPRESSION.exclude, description="tensors that travel whole, by patterns such as embed.*"
    )


class NcclConfig(Section):
    """Settings of NCCL; null leaves each to NCCL, which knows the machine well."""

    p2p: bool | None = Field(default=None, description="GPUs of a host read one another's memory (NCCL_P2P_DISABLE)")
    p2p_level: Literal["LOC", "NVL", "PIX", "PXB", "PHB", "SYS"] | None = Field(
        default=None,
        description="how far they reach: LOC not at all, NVL over NVLink, PIX one PCI switch, PXB several, PHB one "
        "NUMA node, SYS anywhere (NCCL_P2P_LEVEL)",
    )
    shared_memory: bool | None = Field(
        default=None,
        description="GPUs of a host that cannot reach one another go through its memory (NCCL_SHM_DISABLE)",
    )
    min_channels: Annotated[int, Field(ge=1, le=32)] | None = Field(
        default=None, description="least thread blocks that communicate at once (NCCL_MIN_NCHANNELS)"
    )
    max_channels: Count | None = Field(
        default=None,
        description="most thread blocks that communicate: fewer leave more of a GPU to compute (NCCL_MAX_NCHANNELS)",
    )
    socket_interface: str | None = Field(
        default=None,
        description="network interfaces by prefix, as eth,ib; =eth0 by name; ^docker all others (NCCL_SOCKET_IFNAME)",
    )
    socket_threads: Annotated[int, Field(ge=1, le=16)] | None = Field(
        default=None, description="CPU threads of a connection over sockets (NCCL_SOCKET_NTHREADS)"
    )
    sockets_per_thread: Annotated[int, Field(ge=1, le=64)] | None = Field(
        default=None, description="sockets of each thread; 64 for all together at most (NCCL_NSOCKS_PERTHREAD)"
    )
    ib: bool | None = Field(default=None, description="InfiniBand or RoCE between hosts (NCCL_IB_DISABLE)")
    ib_hca: str | None = Field(
        default=None, description="InfiniBand cards and ports, as mlx5, =mlx5_0:1,mlx5_1:1 or ^=mlx5_4 (NCCL_IB_HCA)"
    )
    ib_gid_index: Annotated[int, Field(ge=0)] | None = Field(
        default=None, description="RoCE: which address of a card (NCCL_IB_GID_INDEX)"
    )
    ib_timeout: Annotated[int, Field(ge=1, le=31)] | None = Field(
        default=None, description="n: an InfiniBand card waits 4.096 us x 2^n for an answer (NCCL_IB_TIMEOUT)"
    )
    gdr_level: Literal["LOC", "PIX", "PXB", "PHB", "SYS"] | None = Field(
        default=None,
        description="how far a network card reaches into a GPU's memory, as p2p_level (NCCL_NET_GDR_LEVEL)",
    )
    cross_nic: Literal[0, 1, 2] | None = Field(
        default=None, description="a ring may change network cards: 0 never, 1 yes, 2 if faster (NCCL_CROSS_NIC)"
    )
    algorithms: Annotated[tuple[NcclAlgorithm, ...], Strict(False)] | None = Field(
        default=None, description="the only algorithms that NCCL may take (NCCL_ALGO)"
    )
    protocols: Annotated[tuple[Literal["LL", "LL128", "Simple"], ...], Strict(False)] | None = Field(
        default=None, description="the only protocols that NCCL may take (NCCL_PROTO)"
    )
    debug: Literal["VERSION", "WARN", "INFO", "TRACE"] | None = Field(
        default=None, description="what NCCL writes to the logs of the ranks (NCCL_DEBUG)"
    )
    debug_subsystems: Annotated[tuple[NcclSubsystem, ...], Strict(False)] | None = Field(
        default=None, description="debug = INFO: of which of its parts (NCCL_DEBUG_SUBSYS)"
    )


class CommConfig(Section):
    """How gradients travel between ranks."""

    backend: Literal["auto", "nccl", "gloo", "shared_memory", "virtual"] = Field(
        default="auto",
        description="auto: nccl on GPUs; on CPUs shared memory if the ranks share a host, else gloo; virtual: all "
        "ranks take turns in one process, on one device",
    )
    algorithm: Algorithm = Field(
        default="native",
        description="how collectives are made: by the backend; of messages, as a ring, two trees, by halving, or "
        "inside hosts and then across them; auto: the fastest of those by size and hosts",
    )
    algorithm_table: str | None = Field(
        default=None,
        description="algorithm = auto: a benchmark's record of all-reduces, asked in place of formulas; null: formulas",
    )
    bucket_mb: Literal["auto"] | Positive = Field(default=_LAYOUT.bucket_mb, description=MEANINGS["bucket_mb"])
    first_bucket_mb: Positive = Field(default=_LAYOUT.first_bucket_mb, description=MEANINGS["first_bucket_mb"])
    timeout_s: Positive = Field(default=300.0, description="seconds until a rank that does not answer is an error")
    buffers: Buffers = Field(default="broadcast", description=MEANINGS["buffers"])
    overlap: bool = Field(default=_LAYOUT.overlap, description=MEANINGS["overlap"])
    interface: str | None = Field(
        default=None,
        description="network interface of Gloo and NCCL, as eth0; null: loopback on one host, else their choice",
    )
    compression: CompressionConfig = Field(
        default=CompressionConfig(), description="how gradients are made smaller on their way"
    )
    nccl: NcclConfig = Field(default=NcclConfig(), description="settings of NCCL, for GPU ranks")


class ScheduleConfig(Section):
    """How the learning rate moves over the run."""

    kind: Literal["constant", "linear", "cosine", "one_cycle", "range"] = Field(
        default="constant",
        description="the curve after the warmup; range: rises from final_ratio to 1 by the same factor each step",
    )
    warmup: NotNegative = Field(default=0.0, description="how long the rate rises from 0 to optim.lr, in units of unit")
    unit: Literal["steps", "samples"] = Field(default="steps", description="what warmup and length count")
    length: Positive | None = Field(default=None, description="where the curve ends; null: with the run")
    final_ratio: float = Field(default=0.0, ge=0, le=1, description="the last rate, as a share of optim.lr")


class ParameterGroupConfig(Section):
    """What is different for some parameters."""

    lr: Positive | None = Field(default=None, description="their peak learning rate; null: optim.lr")
    weight_decay: NotNegative | None = Field(default=None, description="their weight decay; null: as for all others")
    frozen: bool = Field(default=False, description="they are not trained")


class MuonConfig(Section):
    """Muon: the matrices of hidden layers. AdamW updates all else, with optim.betas and optim.eps."""

    momentum: Probability = Field(default=0.95, description="momentum of the matrices")
    nesterov: bool = Field(default=True, description="Nesterov's momentum")
    iterations: Count = Field(default=5, description="Newton-Schulz iterations that orthogonalise a matrix")
    lr_shape: Literal["match_rms_adamw", "original"] = Field(
        default="match_rms_adamw",
        description="what lr is multiplied by for a matrix: match_rms_adamw: 0.2 sqrt(max(rows, columns)), so that one "
        "lr serves AdamW too; original: sqrt(max(1, rows / columns))",
    )
    adamw_lr_factor: Positive = Field(default=1.0, description="the rate of what AdamW updates, as a multiple of lr")
    adamw_for: Texts | None = Field(
        default=None,
        description="names that AdamW updates, as patterns such as *embed*; null: embeddings and the output layer. "
        "What is not a matrix it updates in any case",
    )


class OptimConfig(Section):
    """The optimizer, its learning rate and clipping."""

    kind: Literal["adamw", "sgd", "muon"] | ImportPath = Field(
        default="adamw", description="adamw, sgd, muon, or package.module:Class of a torch optimizer"
    )
    lr: Positive = Field(default=3e-4, description="the peak learning rate")
    lr_scaling: Literal["none", "linear", "sqrt"] = Field(
        default="none", description="how lr grows with global_batch / lr_batch: not, in proportion, as its square root"
    )
    lr_batch: Count | None = Field(default=None, description="the global batch that lr is meant for")
    weight_decay: NotNegative = Field(default=0.01, description="weight decay")
    betas: Annotated[tuple[Probability, Probability], Strict(False)] = Field(
        default=(0.9, 0.999), description="adamw, muon: decay of AdamW's two moments"
    )
    eps: Positive = Field(default=1e-8, description="adamw, muon: added to AdamW's denominator")
    momentum: Probability = Field(default=0.9, description="sgd: momentum")
    nesterov: bool = Field(default=False, description="sgd: Nesterov's momentum")
    muon: MuonConfig = Field(default=MuonConfig(), description="settings of muon")
    args: dict[str, JsonValue] = Field(default={}, description="keyword arguments of an optimizer given by its path")
    groups: dict[str, ParameterGroupConfig] = Field(
        default={}, description="settings by patterns of parameter names, such as embed.*: the first that fits"
    )
    clip_norm: Positive | None = Field(default=1.0, description="largest global gradient norm; null: no clipping")
    schedule: ScheduleConfig = Field(default=ScheduleConfig(), description="how the learning rate moves")


class EarlyStopConfig(Section):
    """When a run ends before its time: nothing has become better for some evaluations."""

    patience: Count | None = Field(default=None, description="evaluations in a row without a better one; null: never")
    metric: str = Field(default="eval_loss", description="what must become better: eval_loss, eval_accuracy, eval_NAME")
    min_delta: NotNegative = Field(default=0.0, description="by how much, to count as better")
    mode: Literal["min", "max"] | None = Field(
        default=None, description="whether less or more is better; null: less of a loss or perplexity, else more"
    )


class TrainConfig(Section):
    """How long, with what batch, and with which seed."""

    steps: Count | None = Field(default=None, description="length of the run in steps; give this or epochs")
    epochs: Positive | None = Field(default=None, description="length of the run in epochs; null: 1, if no steps")
    global_batch: Count | None = Field(
        default=None, description="samples of one step over all ranks; null: microbatch x accumulate x ranks, or 64"
    )
    microbatch: Literal["auto"] | Count | None = Field(
        default=None,
        description="samples that a rank processes at once; null: global_batch / (accumulate x ranks); auto: the most "
        "that fit into memory",
    )
    accumulate: Count | None = Field(default=None, description=MEANINGS["accumulate"])
    seed: Seed = Field(default=0, description="seed of weights, dropout and data order")
    deterministic: bool = Field(default=False, description="only deterministic kernels; slower, bit-for-bit the same")
    dtype: Literal["float32", "float64"] = Field(default="float32", description="dtype in which the model is built")
    precision: Literal["auto", "fp32", "bf16", "fp16", "bf16_master", "fp8", "fp8_row"] = Field(
        default="auto", description=MEANINGS["precision"]
    )
    cuda_graphs: bool | Literal["auto"] = Field(
        default="auto",
        description="CUDA, one rank: replay the step from a graph, so that the host issues it as one call; auto: where "
        "the host is measured to be what limits the first steps",
    )
    loss_scale: Positive = Field(default=65536.0, description="fp16: what the loss is first multiplied by")
    max_bad_steps: Count = Field(
        default=10, description="steps in a row without finite gradients, skipped, that stop the run"
    )
    loss: Literal["auto"] | ImportPath = Field(
        default="auto",
        description="auto: cross entropy; or package.module:function of (model, batch) that returns (sum, count)",
    )
    fused_loss: Literal["auto"] | bool = Field(default=_LAYOUT.fused_loss, description=MEANINGS["fused_loss"])
    eval_every: Count | Literal["epoch"] | None = Field(
        default=None, description="steps between evaluations; epoch: after each; null: at the end only"
    )
    early_stop: EarlyStopConfig = Field(default=EarlyStopConfig(), description="when the run ends before its time")
    metrics: dict[str, ImportPath] = Field(
        default={},
        description="evaluated beside the loss, as eval_NAME: package.module:function of (model, batch) that returns "
        "(sum, count)",
    )
    hooks: Annotated[tuple[ImportPath, ...], Strict(False)] = Field(
        default=(),
        description="called as hook(trainer, result) after each step: package.module:name of a function, or class",
    )
    ema_decay: Decay | None = Field(
        default=None, description="keep a moving average of the parameters with this decay, such as 0.999"
    )
    ema_eval: bool = Field(default=False, description="evaluate the average instead of the parameters")

    def precision_on(self, device: str, *, has_bf16: bool = True) -> str:
        """Returns the precision of ranks on a device, which may or may not compute in bf16: what ``auto`` is there."""
        if self.precision != "auto":
            return self.precision
        return "bf16_master" if device == "cuda" and has_bf16 and self.dtype == "float32" else "fp32"

    def precision_reason(self, device: str, *, has_bf16: bool = True) -> str:
        """Returns why ``auto`` is that."""
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


class Config(Section):
    """Everything a run is asked to do."""

    name: str = Field(default="run", description="name of the run, and of its folder")
    model: Annotated[ModelConfig, Field(discriminator="kind")] = Field(description="what is trained")
    data: Annotated[DataConfig, Field(discriminator="kind")] = Field(description="what it learns from")
    parallel: ParallelConfig = Field(default=ParallelConfig(), description="on how many ranks, and how")
    comm: CommConfig = Field(default=CommConfig(), description="how gradients travel")
    memory: MemoryConfig = Field(default=MemoryConfig(), description="what is traded for memory")
    optim: OptimConfig = Field(default=OptimConfig(), description="the optimizer")
    train: TrainConfig = Field(default=TrainConfig(), description="length, batch and seed")
    checkpoint: CheckpointConfig = Field(default=CheckpointConfig(), description="when the run is saved")
    recovery: RecoveryConfig = Field(default=RecoveryConfig(), description="what is done when something goes wrong")
    monitor: MonitorConfig = Field(default=MonitorConfig(), description="what the run writes about itself")

    def with_values(self, section: str, **values: Any) -> Config:
        """Returns the config with some values of a section changed; they are not checked."""
        return self.model_copy(update={section: getattr(self, section).model_copy(update=values)})


def json_schema() -> dict[str, Any]:
    """Returns the JSON Schema of a config file, fit for completion and checks in an editor."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **Config.model_json_schema(),
        "title": "Paceline config",
    }
