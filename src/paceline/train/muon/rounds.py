"""Who orthogonalises which matrix, and how the ranks hand each other what that needs.

The matrices go to owners, the costliest first, each to the rank with the least work so far. An owner's share is cut
into rounds, so that the products of one round run while the matrices of the next come in and those of the last go out.
What a rank sends in a step, for B bytes of matrices on N ranks:

    sharded       its slices to their owners, and its results back as slices      2 B / N (N-1)/N
    replicated    every rank has all gradients: results alone, to all ranks       B / N (N-1)

Matrices of one shape in one round are one batched product. The Newton-Schulz iteration takes the singular values of a
matrix near 1, with matrix products alone:

    X <- G / |G|,   then five times   X <- a X + (b A + c A^2) X   with A = X X^T

The coefficients are torch.optim.Muon's: singular values end between about 0.7 and 1.2. FLOPs for an m x n matrix with
m <= n, and i iterations, which give the same numbers but for rounding:

    on the matrix itself       i (4 m^2 n + 2 m^3)          what bf16 is computed with
    on its Gram matrix X X^T   4 m^2 n + (8 i - 6) m^3      fewer where n > 1.5 m; small eigenvalues need fp32 or more
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from paceline.comm.base import DONE, Communicator, Work
from paceline.units import MIB

_ROUND_BYTES = {"cpu": 4 * MIB}  # of an owner's matrices; on other devices 64 MiB, whose products fill them
_A, _B, _C = 3.4445, -4.7750, 2.0315
_EPS = 1e-7
Places: TypeAlias = Mapping[tuple[int, int], int]  # where the slice of each rank and matrix begins
_WIDE = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """A matrix as it lies in memory, and which of its elements each rank holds; no spans where all ranks hold all."""

    shape: tuple[int, int]
    spans: tuple[tuple[int, int], ...] = ()

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def share_out(costs: Sequence[float], ranks: int) -> list[int]:
    """Returns an owner for each cost: the costliest first, each to the rank with the least so far."""
    loads, owners = [0.0] * ranks, [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        owner = min(range(ranks), key=loads.__getitem__)
        owners[index] = owner
        loads[owner] += costs[index]
    return owners


def cut_into_rounds(indices: Sequence[int], costs: Sequence[float], rounds: int) -> list[list[int]]:
    """Cuts an owner's matrices, in their order, into so many parts of about the same cost; some may be empty."""
    total, done, parts = sum(costs[index] for index in indices), 0.0, [list[int]() for _ in range(rounds)]
    for index in indices:
        parts[min(int((done + costs[index] / 2) / total * rounds), rounds - 1) if total else 0].append(index)
        done += costs[index]
    return parts


def make_rounds(
    matrices: Mapping[int, Matrix], comm: Communicator, dtype: torch.dtype, iterations: int
) -> list[UpdateRound]:
    """Makes the rounds of a step over numbered matrices, the same on all ranks of ``comm``."""
    order = sorted(matrices, key=lambda number: (matrices[number].shape, number))  # equal shapes side by side
    costs = [float(orthogonal_flops(matrices[number].shape, iterations, dtype)) for number in order]
    owners = share_out(costs, comm.size)
    shares = [[index for index, owner in enumerate(owners) if owner == rank] for rank in range(comm.size)]
    most = max(sum(matrices[order[index]].numel for index in share) for share in shares) * dtype.itemsize
    limit = _ROUND_BYTES.get(comm.device_kind, 64 * MIB)
    num_rounds = max(1, min(-(-most // limit), max(map(len, shares))))
    cut = [cut_into_rounds(share, costs, num_rounds) for share in shares]
    kind = _Sharded if comm.size > 1 and any(matrix.spans for matrix in matrices.values()) else _Replicated
    shared = [[[order[index] for index in parts[number]] for parts in cut] for number in range(num_rounds)]
    return [kind(matrices, each, comm, dtype) for each in shared]


class _Round:
    """Some matrices of a step, of which this rank gives those ``needed``.

    ``start`` sends its elements (or zeros), ``compute`` orthogonalises and sends what it owns, ``finish`` returns its.
    """

    def __init__(
        self, matrices: Mapping[int, Matrix], shares: Sequence[Sequence[int]], comm: Communicator, dtype: torch.dtype
    ) -> None:
        """``shares`` are, by rank, the numbers of the matrices that it owns."""
        self.matrices, self.shares, self.comm, self.dtype = matrices, shares, comm, dtype
        self.owned = shares[comm.rank]
        self.numbers = [number for share in shares for number in share]
        self.needed = self.numbers if isinstance(self, _Sharded) else self.owned
        self._work: Work = DONE

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.comm.device)

    def _stacks(self) -> Iterator[tuple[list[int], torch.Tensor]]:
        """Yields the numbers of what this rank owns of each shape, with memory for them."""
        stacks: dict[tuple[int, int], list[int]] = {}
        for number in self.owned:
            stacks.setdefault(self.matrices[number].shape, []).append(number)
        for shape, numbers in stacks.items():
            yield numbers, self._empty(len(numbers), *shape)


class _Replicated(_Round):
    """Every rank holds all elements: an owner takes them where they are, and all ranks gather the results."""

    _updates: Mapping[int, torch.Tensor]
    _results: dict[int, torch.Tensor]

    def start(self, updates: Mapping[int, torch.Tensor]) -> None:
        self._updates = updates

    def compute(self, iterations: int) -> None:
        rows: dict[int, torch.Tensor] = {}
        for numbers, stack in self._stacks():
            if len(given := [number for number in numbers if number in self._updates]) < len(numbers):
                stack.zero_()
            by_number = dict(zip(numbers, stack, strict=True))
            if given:
                sources = [self._updates[number].reshape(stack.shape[1:]) for number in given]
                torch._foreach_copy_([by_number[number] for number in given], sources)
            rows |= zip(numbers, orthogonalise(stack, iterations), strict=True)
        self._updates = {}
        self._results = rows if self.comm.size == 1 else self._gather(rows)

    def _gather(self, rows: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Sends what this rank owns to all ranks; returns the views in which all matrices arrive."""
        length = max(sum(self.matrices[number].numel for number in share) for share in self.shares)
        gathered = self._empty(self.comm.size * length)
        views = {}
        for rank, share in enumerate(self.shares):
            begin = rank * length
            for number in share:
                matrix = self.matrices[number]
                views[number] = gathered[begin : begin + matrix.numel].view(matrix.shape)
                begin += matrix.numel
        if rows:
            torch._foreach_copy_([views[number] for number in rows], list(rows.values()))
        mine = gathered[self.comm.rank * length : (self.comm.rank + 1) * length]
        self._work = self.comm.all_gather(gathered, mine)
        return views

    def finish(self) -> dict[int, torch.Tensor]:
        self._work.wait()
        results = self._results
        del self._results
        return results


class _Sharded(_Round):
    """Every rank holds slices: they go to the owner, and come back."""

    _held: torch.Tensor  # this rank's slices, by owner
    _whole: torch.Tensor  # all slices of what this rank owns, by the rank that holds them

    def start(self, updates: Mapping[int, torch.Tensor]) -> None:
        self._held = self._empty(sum(self._held_splits()))
        self._whole = self._empty(sum(self._whole_splits()))
        views, sources, begin = [], [], 0
        for number in self.numbers:
            view = self._held[begin : begin + self._length(number, self.comm.rank)]
            begin += view.numel()
            if number in updates:
                views.append(view)
                sources.append(updates[number])
            else:
                view.zero_()
        if views:
            torch._foreach_copy_(views, sources)
        self._work = self.comm.all_to_all(self._whole, self._held, self._whole_splits(), self._held_splits())

    def compute(self, iterations: int) -> None:
        self._work.wait()
        places, begin = {}, 0  # where the slice of each rank and owned matrix begins
        for rank in range(self.comm.size):
            for number in self.owned:
                places[rank, number] = begin
                begin += self._length(number, rank)
        for numbers, stack in self._stacks():
            self._copy(places, numbers, stack, is_back=False)
            self._copy(places, numbers, orthogonalise(stack, iterations).contiguous(), is_back=True)
        self._work = self.comm.all_to_all(self._held, self._whole, self._held_splits(), self._whole_splits())

    def finish(self) -> dict[int, torch.Tensor]:
        self._work.wait()
        parts = torch.split(self._held, [self._length(number, self.comm.rank) for number in self.numbers])
        del self._held, self._whole
        return dict(zip(self.numbers, parts, strict=True))

    def _copy(self, places: Places, numbers: Sequence[int], stack: torch.Tensor, *, is_back: bool) -> None:
        inside, outside = [], []
        for row, number in zip(stack.flatten(1), numbers, strict=True):
            for rank, (first, end) in enumerate(self.matrices[number].spans):
                if first < end:
                    begin = places[rank, number]
                    inside.append(row[first:end])
                    outside.append(self._whole[begin : begin + end - first])
        torch._foreach_copy_(*((outside, inside) if is_back else (inside, outside)))

    def _length(self, number: int, rank: int) -> int:
        first, end = self.matrices[number].spans[rank]
        return end - first

    def _held_splits(self) -> list[int]:
        return [sum(self._length(number, self.comm.rank) for number in share) for share in self.shares]

    def _whole_splits(self) -> list[int]:
        return [sum(self._length(number, rank) for number in self.owned) for rank in range(self.comm.size)]


UpdateRound: TypeAlias = _Replicated | _Sharded


def orthogonalise(stack: torch.Tensor, iterations: int) -> torch.Tensor:
    """Returns a stack of matrices (b, rows, columns) with its singular values taken near 1, in the stack's dtype."""
    is_tall = stack.shape[-2] > stack.shape[-1]
    x = stack.mT if is_tall else stack
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=_EPS)
    if _uses_gram(x.shape[-2], x.shape[-1], x.dtype):
        x = _polynomial(_gram(x), iterations) @ x
    else:
        for _ in range(iterations):
            gram = _gram(x)
            x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return x.mT if is_tall else x


def orthogonal_flops(shape: tuple[int, int], iterations: int, dtype: torch.dtype) -> int:
    m, n = min(shape), max(shape)
    if _uses_gram(m, n, dtype):
        return 4 * m * m * n + max(8 * iterations - 6, 0) * m**3
    return iterations * (4 * m * m * n + 2 * m**3)


def _gram(x: torch.Tensor) -> torch.Tensor:
    """Returns X X^T. A CPU multiplies by a transposed copy up to three times as fast as by a transposed view."""
    return x @ (x.mT.contiguous() if x.device.type == "cpu" else x.mT)


def _uses_gram(short: int, long: int, dtype: torch.dtype) -> bool:
    return long > _WIDE * short and dtype in (torch.float32, torch.float64)


def _polynomial(gram: torch.Tensor, iterations: int) -> torch.Tensor:
    """Returns what the iterations multiply a matrix by, from its Gram matrix. All factors commute."""
    product: torch.Tensor | None = None
    for number in range(iterations):
        factor = torch.baddbmm(gram, gram, gram, beta=_B, alpha=_C)
        factor.diagonal(dim1=-2, dim2=-1).add_(_A)
        product = factor if product is None else product @ factor
        if number < iterations - 1:
            gram = factor @ gram @ factor
    assert product is not None
    return product
