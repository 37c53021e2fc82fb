"""What a policy is: how the ranks exchange one flat vector, in fewer bytes than it has.

An exchange is a generator. Up to its first ``yield`` it makes the message small and sends it, as soon as the bucket is
complete: only then can its bytes leave while backward goes on with earlier layers. After its last ``yield`` it turns
messages into a gradient, when the step waits for it: nobody needs the values before. A policy that needs two rounds
issues the second one in ``advance``, which is called for all buckets before any is finished.
"""

from __future__ import annotations

import zlib
from collections.abc import Generator
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import torch

from paceline.comm.base import Communicator, Work

ExchangeRounds: TypeAlias = Generator[Work, None, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorPart:
    """One tensor of the vector, or a piece of one: its name, where it lies, and the matrix that it is.

    The matrix is the tensor's memory, row by row. Of a piece that begins inside a row, the first ``lead`` elements of
    that row are missing, and it may end before its last row does.
    """

    name: str
    start: int
    size: int
    rows: int
    columns: int
    lead: int = 0

    @property
    def stop(self) -> int:
        return self.start + self.size

    @property
    def is_ragged(self) -> bool:
        """Whether its first or last row is not whole."""
        return self.size != self.rows * self.columns


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeContext:
    """What a policy needs beside the vector. ``new_factors`` takes what the next step gets as ``factors``."""

    parts: tuple[VectorPart, ...]
    step: int
    factors: dict[str, torch.Tensor]
    new_factors: dict[str, torch.Tensor]


class Policy:
    """How vectors are exchanged: a subclass for each way."""

    num_rounds: ClassVar[int] = 1

    def takes(self, rows: int, columns: int) -> bool:
        """Says whether a matrix becomes smaller by this policy."""
        del rows, columns
        return True

    def exchange(self, vector: torch.Tensor, context: ExchangeContext, comm: Communicator) -> ExchangeRounds:
        """Compresses ``vector``, which it owns, and sends it on its way; all ranks have vectors of the same length.

        Yields every collective that it has issued, is resumed when that is done, and returns the average over the
        ranks, the same bits on each; the vector then holds what was not sent. The average of all that was sent and of
        all that was not is the average of the vectors, to rounding.
        """
        raise NotImplementedError


def seed_of(step: int, name: str) -> int:
    """Returns a seed that all ranks share and that differs by step and tensor."""
    return zlib.crc32(f"{step} {name}".encode())


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor's memory as bytes, without a copy."""
    return tensor.contiguous().view(-1).view(torch.uint8)
