"""``parallelize``: from a plain module to an engine. The only place where wrap order is decided.

Order: move to the device, compile, agree on the values, replicate. Where there are several ranks, blocks are compiled
one by one, not the model as a whole: gradients then arrive block by block, and communication overlaps with backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from paceline.comm.base import Communicator
from paceline.errors import NotYetError, UsageError
from paceline.models.registry import model_blocks
from paceline.parallel.agree import broadcast_tensors, check_same_model
from paceline.parallel.buckets import BucketPolicy
from paceline.parallel.ddp import BufferPolicy, DataParallel, DDPPolicy
from paceline.units import MIB

STRATEGIES = ("ddp",)
PLANNED = ("zero1", "zero2", "zero3", "fsdp", "hybrid", "auto")
_MARK = "_paceline_engine"


def parallelize(
    model: nn.Module,
    comm: Communicator,
    strategy: str = "ddp",
    *,
    bucket_mb: float = 25.0,
    first_bucket_mb: float = 1.0,
    buffers: BufferPolicy = "broadcast",
    overlap: bool = True,
    compile_blocks: bool = False,
) -> DataParallel:
    """Makes an engine that trains ``model`` on the ranks of ``comm``.

    The module stays as it is, under its own names; its values become those of rank 0. Every rank passes a module of its
    own. Gradients are averaged over ranks as backward produces them.

    Raises UsageError for a model that cannot be replicated (meta tensors, sparse gradients, other shapes on some rank).
    """
    _check_strategy(strategy)
    _check_model(model)
    object.__setattr__(model, _MARK, True)  # before the first collective: virtual ranks may share the object by mistake
    model.to(comm.device)
    if compile_blocks:
        compile_model(model, whole=comm.size == 1)
    check_same_model(model, comm)
    broadcast_tensors(comm, [*model.parameters(), *model.buffers()])
    policy = DDPPolicy(
        buckets=BucketPolicy(bucket_bytes=int(bucket_mb * MIB), first_bucket_bytes=int(first_bucket_mb * MIB)),
        buffers=buffers,
        overlap=overlap,
    )
    return DataParallel(model, comm, policy)


def compile_model(model: nn.Module, *, whole: bool) -> Sequence[nn.Module]:
    """Compiles each block in place, or the whole model where it has none; names stay as they are.

    One rank has no communication to overlap, so nothing is lost by one graph.
    """
    blocks = [model] if whole else model_blocks(model) or [model]
    for block in blocks:
        block.compile()
    return blocks


def _check_strategy(strategy: str) -> None:
    if strategy in STRATEGIES:
        return
    if strategy in PLANNED:
        raise NotYetError(f"strategy = {strategy!r} is not built yet\n  use strategy = 'ddp' for now")
    raise UsageError(f"strategy = {strategy!r} is unknown\n  it is one of {', '.join(STRATEGIES + PLANNED)}")


def _check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise UsageError(f"parallelize takes an nn.Module, not {type(model).__name__}")
    if getattr(model, _MARK, False):
        raise UsageError(
            "this module is parallelized already\n  each rank needs a module of its own, wrapped once\n"
            "  build the model inside the function that each rank runs"
        )
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    meta = [name for name, tensor in tensors.items() if tensor.is_meta]
    if meta:
        raise UsageError(
            f"{meta[0]} and {len(meta) - 1} more are on the meta device and hold no values\n"
            "  data parallelism replicates the whole model\n  build it on a real device"
        )
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
            raise UsageError(
                f"{name or 'the model'} is an embedding with sparse=True\n"
                "  its sparse gradient cannot join a dense bucket\n  build it with sparse=False, or freeze it"
            )
    if not any(isinstance(p, torch.Tensor) and p.requires_grad for p in model.parameters()):
        raise UsageError("no parameter of the model requires a gradient\n  there is nothing to train")
