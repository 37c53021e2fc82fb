"""``parallelize``: from a plain module to an engine. The only place where wrap order is decided.

Order: synchronise batch norm, checkpoint blocks, compile, agree on the values, replicate or shard. Where there are
several ranks, blocks are compiled one by one, not the model as a whole: gradients then arrive block by block, and
communication overlaps with backward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from paceline.comm.base import Communicator, GradientCompression, takes_real_time
from paceline.engines.agree import broadcast_tensors, check_same_model
from paceline.engines.automatic import choose_for_module
from paceline.engines.batchnorm import synchronise_batchnorm
from paceline.engines.buckets.buckets import BucketPolicy
from paceline.engines.buckets.choice import choose_for_link
from paceline.engines.buckets.tuner import probe_link
from paceline.engines.buffers import BufferPolicy
from paceline.engines.checkpointing import checkpoint_blocks
from paceline.engines.composition import Parallelism, combine, parallelism_of
from paceline.engines.ddp import DataParallel, DDPPolicy
from paceline.engines.engine import Engine
from paceline.engines.flat.materialize import build_units
from paceline.engines.flat.partition import choose_units
from paceline.engines.fsdp import FullySharded, Groups, ShardingPolicy
from paceline.engines.offload import Offload, check_offload
from paceline.engines.precision import Precision, check_precision, precision_named
from paceline.engines.zero import ZeroParallel, ZeroPolicy, parameters_to_bucket
from paceline.errors import UsageError
from paceline.mesh import Mesh
from paceline.models.registry import model_apart, model_blocks, model_ends
from paceline.units import MIB

STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "fsdp", "hybrid", "auto")
_MARK = "_paceline_engine"
_LARGE_UNIT_MB = 64.0  # of a model without blocks: below that, one unit is as good as several


def parallelize(
    model: nn.Module,
    comm: Communicator,
    strategy: str = "ddp",
    *,
    precision: str | Precision = "fp32",
    bucket_mb: float | Literal["auto"] = 25.0,
    first_bucket_mb: float = 1.0,
    buffers: BufferPolicy = "broadcast",
    overlap: bool = True,
    compile_blocks: bool = False,
    checkpoint_activations: str = "none",
    offload: Offload | None = None,
    sharding: ShardingPolicy | None = None,
    sync_batchnorm: bool = True,
    compression: GradientCompression | None = None,
    parallel: Parallelism | Mapping[str, Any] | None = None,
) -> Engine:
    """Makes an engine that trains ``model`` on the ranks of ``comm``.

    ``ddp`` replicates the model; ``zero1`` shards the optimizer's state, ``zero2`` the gradients too, ``fsdp`` (or
    ``zero3``) everything; ``hybrid`` shards within groups of ``sharding.shard_ranks`` and replicates across. The module
    stays as it is, under its own names; its values become those of rank 0. Every rank passes a module of its own.
    Gradients are averaged over ranks as backward produces them. For ``fsdp`` and ``hybrid`` the model may be on the
    meta device. ``auto`` takes the cheapest of these that fits, judged by the parameters alone. ``compression``, a
    ``Compressor``, makes gradients smaller on their way: between all ranks for ``ddp``, across groups for ``hybrid``.
    ``bucket_mb="auto"`` finds the size of buckets by measuring: for ``ddp`` the first steps, for ZeRO the link alone;
    ``engine.bucket_choice`` says what was found. Virtual ranks, whose times mean nothing, keep the default.
    ``parallel`` spreads the model itself over ranks, ``{"pipeline": 2, "tensor": 2}``: the strategy, which may stand in
    there too, is then that of the ranks that share the batch.

    Raises UsageError for what cannot work: a model that cannot be split up so, options that exclude one another.
    """
    spread, said = parallelism_of(parallel)
    strategy = said or strategy
    options = _Options(
        precision=precision_named(precision),
        bucket_mb=bucket_mb,
        first_bucket_mb=first_bucket_mb,
        buffers=buffers,
        overlap=overlap,
        compile_blocks=compile_blocks,
        checkpoint_activations=checkpoint_activations,
        offload=offload or Offload(),
        sharding=sharding,
        sync_batchnorm=sync_batchnorm,
        compression=compression,
    )
    _check_strategy(strategy, sharding, options.offload)
    if not spread.is_any:
        return _share(model, comm, strategy, options)
    _check_model(model, may_be_meta=comm.device.type == "meta")
    _check_spread(spread, options)
    engine = combine(model, comm, strategy, spread, lambda part, data: _share(part, data, strategy, options))
    object.__setattr__(model, _MARK, True)
    return engine


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    """What was asked of an engine besides its strategy."""

    precision: Precision
    bucket_mb: float | Literal["auto"]
    first_bucket_mb: float
    buffers: BufferPolicy
    overlap: bool
    compile_blocks: bool
    checkpoint_activations: str
    offload: Offload
    sharding: ShardingPolicy | None
    sync_batchnorm: bool
    compression: GradientCompression | None


def _share(model: nn.Module, comm: Communicator, strategy: str, options: _Options) -> Engine:
    """Makes the engine of a model, or of a stage of one, over the ranks that share the batch."""
    policy, offload, compression = options.precision, options.offload, options.compression
    if strategy == "auto":
        _check_model(model, may_be_meta=False)
        chosen = choose_for_module(model, comm, model_blocks(model), policy.name).chosen.layout
        strategy = chosen.strategy
        offload = Offload(**dict.fromkeys(chosen.offload.parts, True)) if chosen.offload.is_any else offload
    _check_compression(strategy, compression)
    _check_model(model, may_be_meta=strategy in ("zero3", "fsdp", "hybrid") or comm.device.type == "meta")
    check_precision(policy, comm.device)
    check_offload(offload, comm.device, sum(p.numel() for p in model.parameters()) // comm.size)
    object.__setattr__(model, _MARK, True)  # before the first collective: virtual ranks may share the object by mistake
    check_same_model(model, comm)
    _prepare_blocks(model, comm, strategy, options)
    if strategy in ("zero3", "fsdp", "hybrid"):
        sharding = options.sharding or ShardingPolicy()
        return _shard(model, comm, strategy, sharding, policy, offload, (options.buffers, compression))
    model.to(comm.device)
    broadcast_tensors(comm, [*model.parameters(), *model.buffers()])
    return _replicate(model, comm, strategy, options, offload)


def _prepare_blocks(model: nn.Module, comm: Communicator, strategy: str, options: _Options) -> None:
    """Synchronises batch norm, checkpoints and compiles blocks, in this order."""
    if options.sync_batchnorm and comm.size > 1:
        synchronise_batchnorm(model, comm)
    is_plain = options.checkpoint_activations == "none"
    if not is_plain:
        checkpoint_blocks(model_blocks(model), options.checkpoint_activations)
    if options.compile_blocks:
        # One rank has no communication to overlap: one graph loses nothing.
        is_whole = comm.size == 1 and strategy == "ddp" and options.precision.param_dtype is None and is_plain
        compile_model(model, whole=is_whole)


def _replicate(model: nn.Module, comm: Communicator, strategy: str, options: _Options, offload: Offload) -> Engine:
    """Makes an engine whose ranks compute with whole parameters."""
    tunes = options.bucket_mb == "auto" and comm.size > 1 and takes_real_time(comm)
    buckets = _default_buckets(options.bucket_mb, options.first_bucket_mb)
    if strategy == "ddp":
        replicas = DDPPolicy(buckets=buckets, buffers=options.buffers, overlap=options.overlap, tunes_buckets=tunes)
        return DataParallel(model, comm, replicas, options.precision, options.compression)
    choice = choose_for_link(*parameters_to_bucket(model), probe_link(comm)) if tunes else None
    zero = ZeroPolicy(
        stage=1 if strategy == "zero1" else 2,
        buckets=buckets if choice is None else choice.policy,
        buffers=options.buffers,
        overlap=options.overlap,
    )
    engine = ZeroParallel(model, comm, zero, options.precision, offload)
    engine.bucket_choice = choice
    return engine


def compile_model(model: nn.Module, *, whole: bool) -> Sequence[nn.Module]:
    """Compiles each block in place, or the whole model where it has none; names stay as they are.

    The forward function is compiled, not the call: hooks on the module run outside of the graph.
    """
    blocks = [model] if whole else model_blocks(model) or [model]
    for block in blocks:
        block.forward = torch.compile(block.forward)
    return blocks


def _shard(
    model: nn.Module,
    comm: Communicator,
    strategy: str,
    policy: ShardingPolicy,
    precision: Precision,
    offload: Offload,
    rest: tuple[BufferPolicy, GradientCompression | None],
) -> FullySharded:
    groups = _groups(comm, strategy, policy)
    blocks = model_blocks(model)
    unit_mb = policy.unit_mb or (None if blocks or policy.units else _LARGE_UNIT_MB)
    named = choose_units(
        model, blocks, model_ends(model), names=policy.units, unit_mb=unit_mb, apart=model_apart(model)
    )
    units = build_units(model, named, comm, groups.shards, precision, offload)
    engine = FullySharded(model, groups, units, policy, precision, *rest)
    engine.watch([*(module for _, module in named), model])
    return engine


def _default_buckets(bucket_mb: float | Literal["auto"], first_bucket_mb: float) -> BucketPolicy:
    """Returns the buckets that were asked for; for ``auto``, those to begin with."""
    default = BucketPolicy()
    bucket_bytes = default.bucket_bytes if bucket_mb == "auto" else int(bucket_mb * MIB)
    return BucketPolicy(bucket_bytes=bucket_bytes, first_bucket_bytes=int(first_bucket_mb * MIB))


def _groups(comm: Communicator, strategy: str, policy: ShardingPolicy) -> Groups:
    """Splits the ranks: neighbours shard, counterparts replicate."""
    shard_ranks = policy.shard_ranks if strategy == "hybrid" else comm.size
    if shard_ranks is None or comm.size % shard_ranks:
        raise UsageError(
            f"hybrid sharding of {comm.size} ranks with shard_ranks = {shard_ranks}\n"
            "  the ranks of a shard group, usually those of a node, must divide the ranks\n"
            f"  set shard_ranks to one of {[n for n in range(1, comm.size + 1) if comm.size % n == 0]}"
        )
    mesh = Mesh.of(replicate=comm.size // shard_ranks, shard=shard_ranks)
    shards = comm if shard_ranks == comm.size else comm.split(mesh.group(comm.rank, "shard"))
    replicas = comm.split(mesh.group(comm.rank, "replicate"))
    reshard = policy.reshard_after_forward
    if isinstance(reshard, bool):
        return Groups(world=comm, shards=shards, replicas=replicas)
    if reshard < 1 or shard_ranks % reshard:
        raise UsageError(
            f"reshard_after_forward = {reshard} with {shard_ranks} ranks in a shard group\n"
            "  the smaller group must divide the shard group\n"
            f"  take True, False, or one of {[n for n in range(1, shard_ranks + 1) if shard_ranks % n == 0]}"
        )
    first = shards.rank - shards.rank % reshard
    small = shards.split(range(first, first + reshard))
    return Groups(world=comm, shards=shards, replicas=replicas, small=small)


def _check_strategy(strategy: str, sharding: ShardingPolicy | None, offload: Offload) -> None:
    if strategy not in STRATEGIES:
        raise UsageError(f"strategy = {strategy!r} is unknown\n  it is one of {', '.join(STRATEGIES)}")
    problems = []
    if offload.is_any and strategy == "ddp":
        problems.append(
            "offload with strategy = 'ddp'\n  data parallelism keeps whole parameters on the device\n"
            "  take strategy = 'zero1' or 'fsdp', with one rank too"
        )
    if offload.parameters and strategy in ("zero1", "zero2"):
        problems.append(
            f"offload of parameters with strategy = {strategy!r}\n  it keeps whole parameters on the device\n"
            "  take strategy = 'fsdp', or offload the optimizer alone"
        )
    if sharding is not None and sharding.prefetch < 0:
        problems.append(f"prefetch = {sharding.prefetch}\n  units are gathered that many ahead\n  give 0 or more")
    if problems:
        raise UsageError("\n".join(problems))


def _check_spread(spread: Parallelism, options: _Options) -> None:
    problems = []
    if options.compile_blocks and spread.splits_backward:
        problems.append(
            f"compile_blocks with schedule = {str(spread.schedule)!r}\n"
            "  it runs backward in two parts, which a compiled block does in one\n"
            "  take schedule = '1f1b', or leave compile_blocks out"
        )
    if options.compression is not None:
        problems.append(
            "compression with pipeline or tensor\n"
            "  a tensor that several ranks or stages hold must get the same gradient on all of them\n"
            "  leave compression out"
        )
    if options.offload.is_any:
        problems.append(
            "offload with pipeline or tensor\n"
            "  gradients that stages or tensor ranks share are exchanged on the device\n"
            "  leave offload out, and take strategy = 'zero2' for more room"
        )
    if problems:
        raise UsageError("\n".join(problems))


def _check_compression(strategy: str, compression: GradientCompression | None) -> None:
    if compression is not None and strategy not in ("ddp", "hybrid"):
        raise UsageError(
            f"compression with strategy = {strategy!r}\n"
            "  it works where replicas average the same gradients, and here each rank gets a slice of its own\n"
            "  take strategy = 'ddp', or 'hybrid', which averages slices across groups; or leave compression out"
        )


def _check_model(model: Any, *, may_be_meta: bool) -> None:
    if not isinstance(model, nn.Module):
        raise UsageError(f"parallelize takes an nn.Module, not {type(model).__name__}")
    if getattr(model, _MARK, False):
        raise UsageError(
            "this module is parallelized already\n  each rank needs a module of its own, wrapped once\n"
            "  build the model inside the function that each rank runs"
        )
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    meta = [name for name, tensor in tensors.items() if tensor.is_meta]
    if meta and not may_be_meta:
        raise UsageError(
            f"{meta[0]} and {len(meta) - 1} more are on the meta device and hold no values\n"
            "  this strategy keeps the whole model on every rank\n"
            "  build it on a real device, or take strategy = 'fsdp'"
        )
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
            raise UsageError(
                f"{name or 'the model'} is an embedding with sparse=True\n"
                "  its sparse gradient cannot join a dense bucket\n  build it with sparse=False, or freeze it"
            )
    if not any(isinstance(p, torch.Tensor) and p.requires_grad for p in model.parameters()):
        raise UsageError("no parameter of the model requires a gradient\n  there is nothing to train")
