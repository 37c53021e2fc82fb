"""What a policy is: how the ranks exchange one flat vector, in fewer bytes than it has.

The compute that makes a message small happens in ``start``, when the bucket is complete: only then can its bytes leave
while backward goes on with earlier layers. What turns messages into a gradient happens in ``finish``, when the step
waits for it: nobody needs the values before, and nothing has to run behind backward's back. A policy that needs two
rounds issues the second one in ``advance``, which is called for all buckets before any is finished.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Protocol

import torch

from paceline.comm.base import Communicator


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
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
        """One past its last element."""
        return self.start + self.size

    @property
    def is_ragged(self) -> bool:
        """Whether its first or last row is not whole."""
        return self.size != self.rows * self.columns


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What a policy needs to know beside the vector.

    ``factors`` is what it kept of the last step, by tensor; ``new_factors`` takes what it keeps of this one.
    """

    parts: tuple[Part, ...]
    step: int
    factors: dict[str, torch.Tensor]
    new_factors: dict[str, torch.Tensor]


class Exchange(Protocol):
    """A vector on its way. It owns the vector that it was started with."""

    def advance(self) -> None:
        """Issues the second round, where there is one. Safe to call twice."""

    def finish(self) -> torch.Tensor:
        """Returns the average over the ranks, the same bits on each; the vector then holds what was not sent.

        The average of all that was sent and of all that was not is the average of the vectors, to rounding.
        """


class Policy(Protocol):
    """How vectors are exchanged."""

    def takes(self, rows: int, columns: int) -> bool:
        """Says whether a matrix becomes smaller by this policy."""

    def start(self, vector: torch.Tensor, task: Task, comm: Communicator) -> Exchange:
        """Compresses ``vector`` and sends it on its way. All ranks call it with vectors of the same length."""


def seed_of(step: int, name: str) -> int:
    """Returns a seed that all ranks share and that differs by step and tensor."""
    return zlib.crc32(f"{step} {name}".encode())


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor's memory as bytes, without a copy."""
    return tensor.contiguous().view(-1).view(torch.uint8)
