"""What replicas must agree on before they train: the same parameters by name, shape and dtype, with the same values."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from paceline.comm.base import Communicator, Work
from paceline.comm.objects import gather_objects
from paceline.errors import UsageError

_SMALL_BYTES = 2**20


def check_same_model(module: nn.Module, comm: Communicator) -> None:
    """Raises UsageError on every rank if the ranks built different models, naming the first difference."""
    if comm.size == 1:
        return
    rows = [f"{name} {tuple(p.shape)} {p.dtype} trainable={p.requires_grad}" for name, p in module.named_parameters()]
    rows += [f"{name} {tuple(b.shape)} {b.dtype} buffer" for name, b in module.named_buffers()]
    digest = hashlib.sha256("\n".join(rows).encode()).hexdigest()
    if len(set(gather_objects(comm, digest))) == 1:
        return
    everyone = gather_objects(comm, rows)
    for rank, theirs in enumerate(everyone):
        for ours, other in zip_longest(everyone[0], theirs, fillvalue="nothing more"):
            if ours != other:
                raise UsageError(
                    f"rank 0 and rank {rank} built different models: rank 0 has {ours}, rank {rank} has {other}\n"
                    "  every rank trains a replica of one model\n"
                    "  build it from the same config on all ranks, without branches on the rank"
                )


def broadcast_tensors(comm: Communicator, tensors: Sequence[torch.Tensor], source: int = 0) -> None:
    """Replaces tensors by those of rank ``source``: large ones in place, small ones together by dtype."""
    works: list[Work] = []
    together: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        value = tensor.detach()
        if value.numel() * value.element_size() >= _SMALL_BYTES and value.is_contiguous():
            works.append(comm.broadcast(value, source))
        elif value.numel():
            together.setdefault(value.dtype, []).append(value)
    flats = [(torch.cat([v.reshape(-1) for v in values]), values) for values in together.values()]
    works += [comm.broadcast(flat, source) for flat, _ in flats]
    for work in works:
        work.wait()
    for flat, values in flats:
        for value, piece in zip(values, torch.split(flat, [v.numel() for v in values]), strict=True):
            value.copy_(piece.view(value.shape))


def tensors_in(output: Any) -> Iterator[torch.Tensor]:
    """Iterates over the tensors of a module's output: in tuples, lists, dicts and dataclasses."""
    if isinstance(output, torch.Tensor):
        yield output
        return
    for leaf in tree_leaves(output):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            for field in dataclasses.fields(leaf):
                yield from tensors_in(getattr(leaf, field.name))
