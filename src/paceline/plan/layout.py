"""How a run is spread over ranks: the one type that says so, from the config to the engines; and who a rank talks to.

    ranks = pipeline x data x context x tensor   data ranks share the batch, context ranks each of its sequences
    data x context = replicas x shard_ranks      shard_ranks hold one copy of the states together; see ``strategy``
    stages = pipeline x chunks                   chunks: stages of each rank
    samples of a step = microbatch x accumulate x data

A layout is frozen data that serialises to JSON. Its fields have the names of the config's keys, and the defaults stand
here and nowhere else. ``rules.py`` says what goes together. A 0 of ``data``, ``shard_ranks`` or ``chunks`` means "what
follows from the rest", and of ``node_ranks`` "as the machine says": ``for_ranks`` fills them in.

Every group of ranks, by the question that it answers; this is the only place that makes them:

    batch              who reads other samples than I do?                replicate x shard
    gradients          over whom is a parameter's gradient averaged?     replicate x shard x context
    shard              who holds other slices of my parameters?          shard, with context where they are cut so
    replicate          who holds the same slices?                        those of gradients that are not in shard
    context            who has other tokens of my samples?               context
    pipeline, tensor   who has other layers, other parts of my layers?   pipeline, tensor
    expert             who holds other experts?                          neighbours among gradients
    expert_gradients   over whom is an expert's gradient averaged?       those of gradients that hold the same experts
    expert_shard       who holds other slices of my experts?             those of shard that hold the same experts
    expert_replicate   who holds the same slices of my experts?          those of replicate that hold the same experts

Experts have no axis of their own: they are laid over the ranks of ``gradients``, which are data-parallel for the dense
layers. A new axis of the mesh gets its place in ``Layout.mesh``, and its questions a line here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from math import prod
from typing import Any, Generic, Literal, TypeAlias, TypeVar, get_args

from paceline.errors import UsageError, did_you_mean
from paceline.mesh import Mesh
from paceline.schedule.grid import Schedule
from paceline.schedule.schedules import CHUNKS
from paceline.schedule.text import format_csv, parse_csv
from paceline.units import MIB

Strategy: TypeAlias = Literal["ddp", "zero1", "zero2", "fsdp", "hybrid"]
# As people write it: zero3 is another name of fsdp, and auto is decided with the model and the machine.
StrategyName: TypeAlias = Literal["ddp", "zero1", "zero2", "zero3", "fsdp", "hybrid", "auto"]
Algorithm: TypeAlias = Literal["native", "ring", "tree", "halving_doubling", "hierarchical", "auto"]
Stages: TypeAlias = Literal["estimated", "measured"] | tuple[str, ...]

Checkpointing: TypeAlias = Literal["none", "full", "matmuls", "every_2", "every_3", "every_4"]
OffloadPart: TypeAlias = Literal["optimizer", "gradients", "parameters", "activations"]
Policy: TypeAlias = Literal["none", "topk", "randomk", "threshold", "powersgd", "sign", "int8", "fp16", "bf16"]
Buffers: TypeAlias = Literal["broadcast", "local"]
ContextMethod: TypeAlias = Literal["auto", "ring", "ulysses", "both", "gather"]
Compile: TypeAlias = Literal["none", "blocks", "whole", "auto"]  # auto: decided with the ranks
FusedLoss: TypeAlias = Literal["auto"] | bool
LARGE_VOCABULARY = 8192  # from here on, logits take more memory and time than a loss in chunks does
LOSS_CHUNK_BYTES = 2**30  # of the logits that a fused loss has at once
TILE_BYTES = 2**28  # of the hidden features of an MLP in tiles, in each of the few tensors that a tile has of them
_LEAST_ROWS = 128

STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
OF_FULL_SHARDING = ("reshard_after_forward", "units", "unit_mb", "prefetch")  # fields that these alone read
CHECKPOINTS: tuple[str, ...] = get_args(Checkpointing)
WITH_MASTERS = ("bf16_master", "fp8", "fp8_row")  # precisions of bf16 parameters that are cast from fp32 masters
OFFLOAD_PARTS: tuple[str, ...] = get_args(OffloadPart)
COMPRESSIONS: tuple[str, ...] = get_args(Policy)
_MOMENTS = 2  # of Adam


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """Which states the N ranks of a group cut among themselves, each holding the others whole; and so what they send.

    In a step of k microbatches, counted in copies of the parameters:

        strategy       1 / N on a rank     reduced     gathered
        ddp            nothing             1           1           an all-reduce is both
        zero1          optimizer state     1           1           once a step
        zero2          gradients too       k           1
        fsdp, hybrid   parameters too      k           2 k         before forward and before backward
    """

    optimizer: bool = False
    gradients: bool = False
    parameters: bool = False

    def copies_sent(self, microbatches: int) -> int:
        """Returns how often as many numbers as there are parameters are reduced or gathered in a step."""
        return (microbatches if self.gradients else 1) + (2 * microbatches if self.parameters else 1)

    def share_of_states(self, ranks: int) -> float:
        """Returns what a rank holds of parameters, gradients and the moments of Adam, as a share of all of them."""
        whole = (not self.parameters) + (not self.gradients) + _MOMENTS * (not self.optimizer)
        states = 2 + _MOMENTS
        return (whole + (states - whole) / ranks) / states

    @property
    def collectives(self) -> tuple[str, ...]:
        """The collectives of a step with one microbatch, each of as many numbers as there are parameters."""
        if self.parameters:
            return ("all_gather", "all_gather", "reduce_scatter")
        return ("reduce_scatter", "all_gather") if self.optimizer else ("all_reduce",)


SHARING: Mapping[str, Sharing] = {
    "ddp": Sharing(),
    "zero1": Sharing(optimizer=True),
    "zero2": Sharing(optimizer=True, gradients=True),
    "fsdp": Sharing(optimizer=True, gradients=True, parameters=True),
    "hybrid": Sharing(optimizer=True, gradients=True, parameters=True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload:
    """What lives in the host's memory instead of the device's. The first three are states, which shards alone have.

    optimizer     fp32 shards and optimizer state are on the host, and the update runs there
    gradients     reduced gradients are accumulated on the host (implied by ``optimizer``)
    parameters    the device keeps no shard: a unit is copied from the host before it is gathered
    activations   inputs of checkpointed blocks wait on the host for backward
    """

    optimizer: bool = False
    gradients: bool = False
    parameters: bool = False
    activations: bool = False

    @property
    def host_bytes(self) -> int:
        """Bytes on the host for each parameter that a rank updates: masters, gradients, moments, a staged copy."""
        return (18 if self.optimizer else 8) if self.moves_states else 0

    @classmethod
    def of(cls, parts: Collection[str]) -> Offload:
        return cls(**dict.fromkeys(parts, True))

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(name for name in OFFLOAD_PARTS if getattr(self, name))

    @property
    def is_any(self) -> bool:
        return bool(self.parts)

    @property
    def moves_states(self) -> bool:
        return self.optimizer or self.gradients or self.parameters

    @property
    def updates_on_host(self) -> bool:
        """Whether the host holds the masters, and updates them."""
        return self.optimizer or self.parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class Compression:
    """How gradients are made smaller on their way. ``error_feedback`` adds what a step did not send to the next one.

    Tensors of one dim always travel whole, as do those below ``min_size`` elements or with a name of ``exclude``.
    """

    policy: str = "none"
    ratio: float = 0.01
    factor_rank: int = 4
    threshold: float = 1e-3
    error_feedback: bool = True
    plain_steps: int = 0
    min_size: int = 1024
    exclude: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raises UsageError for numbers that no policy can work with."""
        if self.policy not in COMPRESSIONS:
            names = COMPRESSIONS[1:]
            hint = did_you_mean(self.policy, names, "take one of these", cutoff=0.5)
            raise UsageError(
                f"compression policy = {self.policy!r} is unknown\n  it is one of {', '.join(names)}\n  {hint}"
            )
        limits = [
            (0 < self.ratio <= 1, f"ratio = {self.ratio:g}", "it is the share of elements sent", "above 0, at most 1"),
            (self.factor_rank >= 1, f"factor_rank = {self.factor_rank}", "factors have so many columns", "1 or more"),
            (self.threshold > 0, f"threshold = {self.threshold:g}", "smaller elements are not sent", "above 0"),
            (self.plain_steps >= 0, f"plain_steps = {self.plain_steps}", "it counts steps", "0 or more"),
            (self.min_size >= 0, f"min_size = {self.min_size}", "it counts elements", "0 or more"),
        ]
        problems = [
            f"compression {what}\n  {rule}\n  give a number that is {fix}"
            for is_good, what, rule, fix in limits
            if not is_good
        ]
        if problems:
            raise UsageError("\n".join(problems))

    @property
    def is_any(self) -> bool:
        return self.policy != "none"

    def takes(self, name: str, shape: tuple[int, ...]) -> bool:
        if len(shape) < 2 or prod(shape) < max(self.min_size, 1):
            return False
        return not any(fnmatchcase(name, pattern) for pattern in self.exclude)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How a run is spread. ``meanings.json`` has a sentence on each field that a config may set.

    A 0 of the mesh's fields stands for what follows from the rest. ``units`` = () makes one unit of the whole model.
    ``context_ranks`` share each sequence, while the context of a model or of data is a number of tokens.
    """

    strategy: Strategy = "ddp"
    # The mesh.
    data: int = 0
    pipeline: int = 1
    tensor: int = 1
    shard_ranks: int = 0
    node_ranks: int = 0  # ranks of a host
    context_ranks: int = 1
    expert: int = 1
    # What is gathered together, how far ahead, and when it is freed again.
    units: tuple[str, ...] | None = None  # names of modules; None: the model's repeated blocks
    unit_mb: float | None = None  # modules together up to this size; None: block by block
    prefetch: int = 1
    reshard_after_forward: bool | int = True
    # Gradients on their way.
    bucket_mb: float = 25.0
    first_bucket_mb: float = 1.0
    tunes_buckets: bool = False  # bucket_mb is where measuring begins
    overlap: bool = True
    algorithm: Algorithm = "native"
    compression: Compression = Compression()
    # A pipeline, and sequences and layers that several ranks share.
    context_method: ContextMethod = "auto"  # how attention reaches the tokens of other ranks
    schedule: str | Schedule = "1f1b"
    chunks: int = 0
    stages: Stages = "estimated"  # how the cuts are found, or the names of the layers that begin a stage
    stage_layers: tuple[int, ...] | None = None  # blocks of each stage; None: see stages
    sequence_parallel: bool = False
    gathers_logits: bool = False  # whole logits for the loss
    # How each rank computes.
    precision: str = "fp32"
    checkpoint_activations: str = "none"
    offload: Offload = Offload()
    mlp_tiles: int = 1  # 0: by their sizes, see tile_rows
    compile: Compile | bool = "none"  # True is auto, False is none
    fused_loss: FusedLoss = "auto"
    buffers: Buffers = "broadcast"
    sync_batchnorm: bool = True
    # The batch.
    microbatch: int = 1
    accumulate: int = 1

    def __post_init__(self) -> None:
        if isinstance(self.compile, bool):
            object.__setattr__(self, "compile", "auto" if self.compile else "none")

    @property
    def is_compiled(self) -> bool:
        return self.compile != "none"

    @property
    def ranks(self) -> int:
        return self.data * self.degree

    @property
    def degree(self) -> int:
        """How many ranks work on the same samples, each on a part of the model or of their tokens."""
        return self.pipeline * self.context_ranks * self.tensor

    @property
    def replicas(self) -> int:
        return self.data * self.context_ranks // self.shards

    @property
    def shards(self) -> int:
        """Ranks that hold one copy of the states together; 1 where every data rank has its own."""
        return 1 if self.strategy == "ddp" else self.shard_ranks

    @property
    def shards_over_context(self) -> bool:
        """Whether ranks that share a sequence hold different slices of the states, as ranks with other samples do."""
        return self.shards > 1 and self.shards % self.context_ranks == 0

    @property
    def mesh(self) -> Mesh:
        """All ranks on their axes, those that talk the most as neighbours. ``groups_of`` says who talks to whom."""
        shard = self.shards // self.context_ranks if self.shards_over_context else self.shards
        return Mesh.of(
            pipeline=self.pipeline,
            replicate=self.data // shard,
            shard=shard,
            context=self.context_ranks,
            tensor=self.tensor,
        )

    @property
    def axes(self) -> dict[str, int]:
        """The axes of the mesh that have several ranks, and ``replicate``, outermost first."""
        return {axis: size for axis, size in self.mesh.axes if size > 1 or axis == "replicate"}

    @property
    def is_split(self) -> bool:
        """Whether the model itself is spread over ranks, by layers or inside them; its sequences are another matter."""
        return self.pipeline > 1 or self.tensor > 1

    @property
    def sharing(self) -> Sharing:
        return SHARING[self.strategy]

    @property
    def is_fully_sharded(self) -> bool:
        """Whether parameters are cut among ranks, and gathered before they are used."""
        return self.strategy in SHARING and self.sharing.parameters  # unknown ones are for the rules to refuse

    def fuses_loss(self, vocabulary: int, device: str) -> bool:
        """Whether a model, if it can, computes its loss with its output layer; not a loss that is of logits alone."""
        is_worth_it = device == "cuda" and vocabulary >= LARGE_VOCABULARY
        needs_logits = self.is_split or self.gathers_logits
        return not needs_logits and (is_worth_it if self.fused_loss == "auto" else self.fused_loss)

    @property
    def num_stages(self) -> int:
        if self.pipeline == 1:
            return 1
        if isinstance(self.schedule, Schedule):
            return self.schedule.stages
        return self.pipeline * (self.chunks or CHUNKS.get(self.schedule, (1, 1))[0])

    @property
    def schedule_name(self) -> str:
        return self.schedule if isinstance(self.schedule, str) else self.schedule.name

    @property
    def splits_backward(self) -> bool:
        if self.pipeline == 1:
            return False
        return self.schedule.splits_backward if isinstance(self.schedule, Schedule) else self.schedule.startswith("zb-")

    @property
    def bucket_bytes(self) -> int:
        return int(self.bucket_mb * MIB)

    @property
    def first_bucket_bytes(self) -> int:
        """The first bucket, which is small so that communication starts early."""
        return int(min(self.first_bucket_mb, self.bucket_mb) * MIB)

    def shards_nothing(self, ranks: int) -> bool:
        """Whether a strategy that shards cuts nothing among so many ranks: there is one, and its host holds no part."""
        return self.strategy != "ddp" and ranks == 1 and not self.is_split and not self.offload.moves_states

    def without_sharding(self) -> Layout:
        """Returns the layout under ddp, with fields that only full sharding reads as they are by default."""
        usual = {name: getattr(Layout(), name) for name in ("shard_ranks", *OF_FULL_SHARDING)}
        return replace(self, strategy="ddp", **usual)

    def for_ranks(self, ranks: int, node_ranks: int | None = None) -> Layout:
        """Returns the layout on this many ranks, ``node_ranks`` of them on a host (None: all).

        Where the degrees do not divide the ranks, which ``rules`` refuses, data is what fits.
        """
        data = max(1, ranks // self.degree)
        local = self.node_ranks or node_ranks or ranks
        shards = {"ddp": 1, "hybrid": self.shard_ranks}.get(self.strategy, data * self.context_ranks)
        if not shards:  # Tensor ranks are neighbours, and data ranks come next: those of one host.
            shards = min(data * self.context_ranks, max(1, local // self.tensor)) if self.is_split else local
        chunks = self.num_stages // self.pipeline
        compiles = self.compile
        if compiles == "auto":  # one rank has nothing to overlap, and one graph is faster than many
            is_alone = ranks == 1 and self.strategy == "ddp" and self.checkpoint_activations == "none"
            # A graph of fp8 layers has so many kernels that a whole model takes minutes to compile.
            compiles = "whole" if is_alone and not self.precision.startswith("fp8") else "blocks"
        if compiles == "whole" and (self.offload.activations or self.mlp_tiles != 1):
            compiles = "blocks"  # one graph would have all inputs at its end, and all tiles in itself
        return replace(self, data=data, shard_ranks=shards, node_ranks=local, chunks=chunks, compile=compiles)

    def to_json(self) -> dict[str, Any]:
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        values |= {name: dataclasses.asdict(values[name]) for name in ("compression", "offload")}
        if isinstance(self.schedule, Schedule):
            values["schedule"] = format_csv(self.schedule)
        return values

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Layout:
        known = _with_tuples(values)
        known |= {"context_ranks": known.pop("context")} if "context" in known else {}  # of earlier plans
        if "\n" in known["schedule"]:
            known["schedule"] = parse_csv(known["schedule"])
        known["compression"] = Compression(**_with_tuples(known["compression"]))
        known["offload"] = Offload(**known["offload"])
        return cls(**known)


def loss_rows(vocabulary: int, element_bytes: int) -> int:
    """Returns of how many tokens a fused loss has the logits at once: a power of two, which suits products."""
    return _rows(LOSS_CHUNK_BYTES, vocabulary * element_bytes)


def tile_rows(tokens: int, hidden_bytes: int, tiles: int) -> int:
    """Returns how many tokens of a microbatch a tile of an MLP has; ``hidden_bytes``: of a token, in one tensor.

    That is ``Layout.mlp_tiles``: so many tiles, or by their sizes, a power of two.
    """
    return -(-tokens // tiles) if tiles else min(tokens, _rows(TILE_BYTES, hidden_bytes))


def _rows(most_bytes: int, row_bytes: int) -> int:
    return 1 << (max(most_bytes // row_bytes, _LEAST_ROWS).bit_length() - 1)


def _with_tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


Ranks = tuple[int, ...]

GroupT = TypeVar("GroupT")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroups(Generic[GroupT]):
    """The groups of one rank: their ranks in order, with the rank itself among them, or what an engine has for each."""

    world: GroupT
    batch: GroupT
    gradients: GroupT
    shard: GroupT
    replicate: GroupT
    context: GroupT
    pipeline: GroupT
    tensor: GroupT
    expert: GroupT
    expert_gradients: GroupT
    expert_shard: GroupT
    expert_replicate: GroupT


def names_of(groups: RankGroups[Ranks]) -> dict[Ranks, str]:
    """Returns what records call the groups of several ranks: the whole world, then axes, ``data``, experts'."""
    found = {groups.world: "world"}
    others = {"data": "gradients", "expert": "expert", "expert data": "expert_gradients"}
    axes = {name: name for name in ("pipeline", "replicate", "shard", "context", "tensor")}
    for name, group in (axes | others).items():
        if len(ranks := getattr(groups, group)) > 1:
            found.setdefault(ranks, name)
    return found


GROUP_NAMES = tuple(field.name for field in fields(RankGroups))


def groups_of(layout: Layout, rank: int) -> RankGroups[Ranks]:
    """Returns the groups of a rank; the layout says how many ranks there are (``Layout.for_ranks``)."""
    mesh = layout.mesh
    gradients = mesh.group(rank, "replicate", "shard", "context")
    shard = mesh.group(rank, *(("shard", "context") if layout.shards_over_context else ("shard",)))
    replicate = mesh.group(rank, *(("replicate",) if layout.shards_over_context else ("replicate", "context")))
    place = gradients.index(rank)
    first = place - place % layout.expert
    same_experts = gradients[place % layout.expert :: layout.expert]
    return RankGroups(
        world=tuple(range(mesh.size)),
        batch=mesh.group(rank, "replicate", "shard"),
        gradients=gradients,
        shard=shard,
        replicate=replicate,
        context=mesh.group(rank, "context"),
        pipeline=mesh.group(rank, "pipeline"),
        tensor=mesh.group(rank, "tensor"),
        expert=gradients[first : first + layout.expert],
        expert_gradients=same_experts,
        expert_shard=tuple(each for each in shard if each in same_experts),
        expert_replicate=tuple(each for each in replicate if each in same_experts),
    )
