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
        """Compresses ``vector`` and sends it on its way. All ranks call it with vectors of the same length."""
        raise NotImplementedError


class GradientExchange:
    """A vector on its way. It owns the vector that it was started with.

    The policy's generator yields every collective that it has issued, is resumed when that is done, and returns the
    average over the ranks, the same bits on each; the vector then holds what was not sent. The average of all that was
    sent and of all that was not is the average of the vectors, to rounding.
    """

    def __init__(self, policy: Policy, vector: torch.Tensor, context: ExchangeContext, comm: Communicator) -> None:
        self._rounds = policy.exchange(vector, context, comm)
        self._num_later = policy.num_rounds - 1
        self._work = next(self._rounds)

    def advance(self) -> None:
        """Issues the second round, where there is one. Safe to call twice."""
        while self._num_later:
            self._num_later -= 1
            self._work.wait()
            self._work = next(self._rounds)

    def finish(self) -> torch.Tensor:
        self.advance()
        self._work.wait()
        try:
            next(self._rounds)
        except StopIteration as stop:
            mean: torch.Tensor = stop.value
            return mean
        raise AssertionError("an exchange has more rounds than it said")


def seed_of(step: int, name: str) -> int:
    """Returns a seed that all ranks share and that differs by step and tensor."""
    return zlib.crc32(f"{step} {name}".encode())


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor's memory as bytes, without a copy."""
    return tensor.contiguous().view(-1).view(torch.uint8)
