"""PowerSGD: a matrix as the product of two thin ones, found by one power iteration a step (Vogels et al., 2019).

For a matrix of m x n float32 elements and rank r, two all-reduces carry 4 r (m + n) bytes in place of 4 m n:

    P = M Q            averaged over ranks, then made orthonormal: the same on all of them
    Q = M' P           averaged over ranks, and kept: the next step starts from it (warm start)
    M becomes P Q'     exact where the average has no more than rank r

Compute: 4 m n r for the two products and 2 m n r for the result, and a thin QR of each P. Messages are sums, so that
their size does not grow with the number of ranks. What is not sent is M less P Q', the same product on every rank.

A piece of a matrix that begins or ends inside a row is filled up with zeros; what P Q' has there is left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from paceline.comm.base import Communicator
from paceline.comm.compress.exchange import ExchangeContext, ExchangeRounds, Policy, VectorPart, seed_of


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerSGD(Policy):
    """Sends two factors of ``rank`` columns for each matrix."""

    num_rounds: ClassVar[int] = 2
    rank: int

    def takes(self, rows: int, columns: int) -> bool:
        return self.rank * (rows + columns) < rows * columns

    def exchange(self, vector: torch.Tensor, context: ExchangeContext, comm: Communicator) -> ExchangeRounds:
        parts, rank = context.parts, self.rank
        matrices = [_matrix(vector[part.start : part.stop], part) for part in parts]
        starts = [_first_factor(part, context, rank, vector) for part in parts]
        # In one buffer each, so that a bucket takes two collectives, however many matrices it has.
        left_flat, lefts = _factors([part.rows for part in parts], rank, vector)
        right_flat, rights = _factors([part.columns for part in parts], rank, vector)
        for matrix, right, left in zip(matrices, starts, lefts, strict=True):
            torch.mm(matrix, right, out=left)
        del starts
        yield comm.all_reduce(left_flat, "avg")
        for matrix, left, right in zip(matrices, lefts, rights, strict=True):
            left.copy_(torch.linalg.qr(left).Q)  # a zero column becomes a unit vector: an iteration never gets stuck
            torch.mm(matrix.t(), left, out=right)
        yield comm.all_reduce(right_flat, "avg")
        mean = torch.empty_like(vector)
        for part, left, right in zip(parts, lefts, rights, strict=True):
            mine = mean[part.start : part.stop]
            if part.is_ragged:
                mine.copy_(torch.mm(left, right.t()).view(-1)[part.lead : part.lead + part.size])
            else:
                torch.mm(left, right.t(), out=mine.view(part.rows, part.columns))
            context.new_factors[part.name] = right.clone()
        vector.sub_(mean)
        return mean


def _matrix(values: torch.Tensor, part: VectorPart) -> torch.Tensor:
    """Returns a part as a matrix; a copy where its first or last row is not whole."""
    if part.is_ragged:
        filled = values.new_zeros(part.rows * part.columns)
        filled[part.lead : part.lead + part.size] = values
        values = filled
    return values.view(part.rows, part.columns)


def _first_factor(part: VectorPart, context: ExchangeContext, rank: int, like: torch.Tensor) -> torch.Tensor:
    """Returns the right factor of the last step; in the first one random numbers that all ranks share."""
    known = context.factors.get(part.name)
    if known is not None and known.shape == (part.columns, rank):
        return known.to(like)
    generator = torch.Generator().manual_seed(seed_of(0, part.name))
    return torch.randn(part.columns, rank, generator=generator, dtype=torch.float64).to(like)


def _factors(lengths: list[int], rank: int, like: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Makes a flat buffer, and the factors as views into it."""
    flat = like.new_empty(sum(lengths) * rank)
    pieces = torch.split(flat, [length * rank for length in lengths])
    return flat, [piece.view(length, rank) for piece, length in zip(pieces, lengths, strict=True)]
