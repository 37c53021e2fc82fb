"""Which part of each tensor a rank of a tensor-parallel group holds, by the names and shapes of the whole model.

A tensor is cut along one dim into contiguous pieces, as equal as can be: the first ranks have one more where it does
not divide. A fused one (queries, keys and values in one matrix) has several groups along that dim, each cut so:

    whole   | q0 q1 q2 q3 | k0 k1 k2 k3 | v0 v1 v2 v3 |      rank 1 of 2   | q2 q3 | k2 k3 | v2 v3 |

What is not cut is the same on all ranks. Gathering one tensor takes one all-gather of its size.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.comm.base import Communicator
from paceline.engines.flat.optimizer_state import numbered_parameters
from paceline.engines.flat.shard import full_shape
from paceline.engines.groups import expert_dim
from paceline.errors import UsageError
from paceline.shards import Region


def split_range(extent: int, size: int, rank: int) -> tuple[int, int]:
    """Returns the first and the one-past-last of ``extent`` items that ``rank`` of ``size`` has."""
    each, more = divmod(extent, size)
    first = rank * each + min(rank, more)
    return first, first + each + (rank < more)


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """How one tensor of the whole model's ``shape`` is cut: along ``dim`` in each of ``groups``; None: it is not."""

    shape: tuple[int, ...]
    dim: int | None = None
    groups: int = 1

    def local_shape(self, rank: int, size: int) -> tuple[int, ...]:
        if self.dim is None:
            return self.shape
        extent = sum(last - first for first, last in self.spans(rank, size))
        return (*self.shape[: self.dim], extent, *self.shape[self.dim + 1 :])

    def spans(self, rank: int, size: int) -> tuple[tuple[int, int], ...]:
        """Returns what a rank has of the dim that is cut: an interval in each group."""
        assert self.dim is not None
        extent = self.shape[self.dim] // self.groups
        first, last = split_range(extent, size, rank)
        return tuple((group * extent + first, group * extent + last) for group in range(self.groups))

    def cut(self, full: Tensor, rank: int, size: int) -> Tensor:
        """Returns a rank's piece, in memory of its own."""
        if self.dim is None:
            return full.clone()
        spans = self.spans(rank, size)
        return torch.cat([full.narrow(self.dim, first, last - first) for first, last in spans], self.dim)

    def gather(self, local: Tensor, comm: Communicator) -> Tensor:
        """Returns the whole from all ranks' pieces; all ranks call it."""
        shapes = [self.local_shape(rank, comm.size) for rank in range(comm.size)]
        sizes = [math.prod(shape) for shape in shapes]
        padded = local.new_zeros(max(sizes))  # the pieces of an all-gather have one length
        padded[: local.numel()] = local.detach().reshape(-1)
        rows = local.new_empty(comm.size, max(sizes))
        comm.all_gather(rows, padded).wait()
        return self.join([row[:size].view(shape) for row, size, shape in zip(rows, sizes, shapes, strict=True)])

    def join(self, pieces: list[Tensor]) -> Tensor:
        """Returns the whole from the pieces of all ranks, in rank order."""
        assert self.dim is not None
        groups = zip(*(piece.chunk(self.groups, self.dim) for piece in pieces), strict=True)
        return torch.cat([part for group in groups for part in group], self.dim)


@contextlib.contextmanager
def drawn_whole(layer: nn.Module, splits: Mapping[str, Split], comm: Communicator) -> Iterator[None]:
    """Gives a layer whole parameters to draw values for; afterwards it has its own, with this rank's part of these."""
    local = dict(layer._parameters)
    for name, split in splits.items():
        layer._parameters[name] = nn.Parameter(cast("Tensor", local[name]).new_empty(split.shape))
    try:
        yield
        with torch.no_grad():
            for name, split in splits.items():
                whole = cast("Tensor", layer._parameters[name])
                cast("Tensor", local[name]).copy_(split.cut(whole, comm.rank, comm.size))
    finally:
        layer._parameters.update(local)


class SplitParts:
    """This rank's parts of tensors of which the ranks of ``comm`` hold different ones, by name."""

    def __init__(self, splits: Mapping[str, Split], comm: Communicator) -> None:
        """Leaves out what is not cut, and everything on one rank."""
        self.splits = {name: split for name, split in splits.items() if split.dim is not None and comm.size > 1}
        self._comm = comm

    def __contains__(self, name: str) -> bool:
        return name in self.splits

    def region(self, name: str, region: Region) -> Region:
        """Returns which elements of the whole tensor a region of this rank's part is."""
        split = self.splits.get(name)
        if split is None or split.dim is None:
            return region
        shape = (*region.shape[: split.dim], split.shape[split.dim], *region.shape[split.dim + 1 :])
        spans = split.spans(self._comm.rank, self._comm.size)
        return replace(region, shape=shape, cuts=(*region.cuts, (split.dim, spans)))

    def whole(self, name: str, value: Any) -> Any:
        """Returns the whole tensor of a parameter's part, or of a state of its shape; all ranks call it."""
        split = self.splits.get(name)
        if split is None or not _has_shape(value, split.local_shape(self._comm.rank, self._comm.size)):
            return value
        return split.gather(value.to(self._comm.device), self._comm).to(value.device)

    def part(self, name: str, value: Any) -> Any:
        split = self.splits.get(name)
        if split is None or not _has_shape(value, split.shape):
            return value
        return split.cut(value, self._comm.rank, self._comm.size)


def _has_shape(value: Any, shape: tuple[int, ...]) -> bool:
    return isinstance(value, Tensor) and tuple(value.shape) == shape and value.ndim > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorLayout:
    """The split of every parameter and buffer, by its name in the model; a tied one is listed under all its names."""

    splits: Mapping[str, Split]

    def full_shape(self, name: str) -> tuple[int, ...]:
        """Returns the tensor's shape in the plain model."""
        if name not in self.splits:
            raise UsageError(f"{name} is no tensor of the model; there are {', '.join(list(self.splits)[:5])}, ...")
        return self.splits[name].shape

    def full(self, name: str, local: Tensor, comm: Communicator) -> Tensor:
        """Returns the whole tensor from every rank's piece, in memory of its own; all ranks call it."""
        whole, split = self.full_shape(name), self.splits[name]
        expected = split.local_shape(comm.rank, comm.size)
        if tuple(local.shape) != expected:
            raise UsageError(
                f"{name} has the shape {list(local.shape)}, but rank {comm.rank} of {comm.size} holds {list(expected)}"
                f" of {list(whole)}\n  the whole is put together from the ranks' pieces\n"
                "  give the tensor of the split model, or its gradient or optimizer state"
            )
        return local.detach().clone() if split.dim is None else split.gather(local, comm)


class ExpertParts(SplitParts):
    """Parts of the parameters of which ranks hold different experts along one dim; of most models, none.

        whole   | expert 0 | expert 1 | expert 2 | expert 3 |      rank 1 of 2   | expert 2 | expert 3 |

    Engines compute with a rank's part. States, gradients and checkpoints are those of the whole model.
    """

    def __init__(self, module: nn.Module, comm: Communicator) -> None:
        splits: dict[str, Split] = {}
        for name, parameter in module.named_parameters() if comm.size > 1 else ():
            dim = expert_dim(parameter)
            if dim is not None:
                shape = list(full_shape(parameter))
                shape[dim] *= comm.size
                splits[name] = Split(shape=tuple(shape), dim=dim)
        super().__init__(splits, comm)

    def __bool__(self) -> bool:
        return bool(self.splits)

    def change_states(
        self, optimizer: Optimizer, packed: dict[str, Any], names: Mapping[int, str], change: Callable[[str, Any], Any]
    ) -> dict[str, Any]:
        """Returns an optimizer's state dict with ``whole`` or ``part`` of its tensors; ``names`` are by id."""
        if not self:
            return packed
        known = {number: names[id(each)] for number, each in numbered_parameters(optimizer, packed).items()}
        states = {
            number: {key: change(known[number], value) for key, value in values.items()} if number in known else values
            for number, values in packed["state"].items()
        }
        return {**packed, "state": states}
