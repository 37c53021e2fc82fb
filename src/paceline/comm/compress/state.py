"""The residuals of compression, whole and free of ranks: so that other ranks can go on from them.

A residual is saved as one tensor with a row for each replica, of which every rank writes its own. Where a replica
is one rank (data parallelism) that is a row; where it is several (hybrid) each of them has its slice. As many replicas
go on with their own rows, another number with the mean of all, and each rank reads the slice that it has now.

Factors of PowerSGD are the same in all replicas, and differ by slice. They are where an iteration starts, and nothing
is lost by a start from elsewhere: a rank takes the one of its slice, or of the last one that begins before it.

Cost: a checkpoint holds N times the compressed gradients; nothing is sent.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from paceline.errors import CheckpointError
from paceline.shards import Region, Shard, whole_region

_RESIDUAL = "residual/"
_FACTOR = "factor/"


class TensorSource(Protocol):
    """Saved tensors, by name."""

    def shapes(self, prefix: str = "") -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the tensors whose names begin so, by what follows."""

    def read(self, name: str, region: Region | None = None) -> torch.Tensor:
        """Returns a region of a tensor, flat, or a whole one; zeros where nobody has saved anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPiece:
    """What a rank has of a tensor: ``size`` of its ``whole`` elements, from ``begin`` on, in the order of memory."""

    begin: int
    size: int
    whole: int


def residual_shards(
    residuals: Mapping[str, torch.Tensor], pieces: Mapping[str, TensorPiece], replica: tuple[int, int]
) -> Iterator[Shard]:
    """Yields this rank's residuals: its interval of its replica's row."""
    for name, residual in residuals.items():
        piece = pieces.get(name) or TensorPiece(begin=0, size=residual.numel(), whole=residual.numel())
        begin = replica[0] * piece.whole + piece.begin
        region = Region(shape=(replica[1], piece.whole), begin=begin, end=begin + piece.size)
        yield Shard(name=_RESIDUAL + name, region=region, tensor=residual)


def factor_shards(
    factors: Mapping[str, torch.Tensor], pieces: Mapping[str, TensorPiece], replica: tuple[int, int]
) -> Iterator[Shard]:
    """Yields the factors, which the first replica writes, by the place where their slice begins."""
    for name, factor in factors.items():
        piece = pieces.get(name)
        label = f"{_FACTOR}{name}/{0 if piece is None else piece.begin}"
        region = whole_region(tuple(factor.shape))
        yield Shard(name=label, region=region, tensor=factor, copy=0 if replica[0] == 0 else None)


def read_residuals(
    source: TensorSource, pieces: Mapping[str, TensorPiece], held: Collection[str] | None, replica: tuple[int, int]
) -> dict[str, torch.Tensor]:
    """Returns what this rank goes on with: its replica's row, or the mean of all, of those ``held`` (None: of all)."""
    found = {}
    for name, (num_rows, whole) in source.shapes(_RESIDUAL).items():
        if held is not None and name not in held:
            continue
        piece = pieces.get(name) or TensorPiece(begin=0, size=whole, whole=whole)
        if piece.whole != whole:
            raise CheckpointError(
                f"the residual of {name} has {whole} elements, the tensor {piece.whole}\n"
                "  the residuals of compression belong to one model\n  resume with the config of the run"
            )
        rows = [replica[0]] if num_rows == replica[1] else list(range(num_rows))
        begins = [row * whole + piece.begin for row in rows]
        regions = [Region(shape=(num_rows, whole), begin=begin, end=begin + piece.size) for begin in begins]
        read = [source.read(_RESIDUAL + name, region) for region in regions]
        found[name] = read[0] if len(read) == 1 else torch.stack(read).mean(dim=0)
    return found


def read_factors(
    source: TensorSource, pieces: Mapping[str, TensorPiece], held: Collection[str] | None
) -> dict[str, torch.Tensor]:
    """Returns the factors that this rank's slices start from, of the tensors ``held`` (None: of all)."""
    begins: dict[str, list[int]] = {}
    for label in source.shapes(_FACTOR):
        name, _, place = label.rpartition("/")
        if held is None or name in held:
            begins.setdefault(name, []).append(int(place))
    found = {}
    for name, known in begins.items():
        begin = pieces[name].begin if name in pieces else 0
        nearest = max((each for each in known if each <= begin), default=min(known))
        found[name] = source.read(f"{_FACTOR}{name}/{nearest}")
    return found
