"""What compression owes, whole and free of ranks: so that other ranks can go on from it.

A residual is saved as whole tensors, one row for each replica. Where a replica is one rank (data parallelism) its row
is what that rank owes; where it is several (hybrid) each of them gives its slice. As many replicas go on with their own
rows, another number with the mean of all, and each rank takes the slice that it has now.

Factors of PowerSGD are the same in all replicas, and differ by slice. They are where an iteration starts, and nothing
is lost by a start from elsewhere: a rank takes the one of its slice, or of the last one that begins before it.

Cost: every rank sends its residuals to rank 0, which holds N times the compressed gradients on the CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from paceline.comm.base import Communicator
from paceline.comm.objects import gather_objects
from paceline.errors import CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What a rank has of a tensor: ``size`` of its ``whole`` elements, from ``begin`` on, in the order of memory."""

    begin: int
    size: int
    whole: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Offer:
    """What a rank has of one tensor, for rank 0 to know what it will receive."""

    piece: Piece
    replica: int
    shape: tuple[int, ...]
    dtype: torch.dtype


def gather_residuals(
    residuals: Mapping[str, torch.Tensor], pieces: Mapping[str, Piece], comm: Communicator, replica: tuple[int, int]
) -> dict[str, torch.Tensor]:
    """Returns on rank 0 what all owe: for each tensor a row for each replica, on the CPU; nothing on the others."""
    rows: dict[str, torch.Tensor] = {}
    for name, offer, values in _collect(residuals, pieces, comm, replica[0]):
        if name not in rows:
            rows[name] = torch.zeros(replica[1], offer.piece.whole, dtype=offer.dtype)
        rows[name][offer.replica, offer.piece.begin : offer.piece.begin + offer.piece.size] = values
    return rows


def gather_factors(
    factors: Mapping[str, torch.Tensor], pieces: Mapping[str, Piece], comm: Communicator, replica: tuple[int, int]
) -> dict[str, dict[int, torch.Tensor]]:
    """Returns on rank 0 the factors of the first replica, by the place in the tensor where their slice begins."""
    mine = factors if replica[0] == 0 else {}
    found: dict[str, dict[int, torch.Tensor]] = {}
    for name, offer, values in _collect(mine, pieces, comm, replica[0]):
        found.setdefault(name, {})[offer.piece.begin] = values
    return found


def own_residual(name: str, rows: torch.Tensor, piece: Piece | None, replica: tuple[int, int]) -> torch.Tensor:
    """Returns what this rank goes on with. Raises CheckpointError where the tensor has another size now."""
    if piece is not None and rows.shape[1] != piece.whole:
        raise CheckpointError(
            f"the residual of {name} has {rows.shape[1]} elements, the tensor {piece.whole}\n"
            "  what compression owes belongs to one model\n  resume with the config of the run"
        )
    row = rows[replica[0]] if len(rows) == replica[1] else rows.mean(dim=0)
    return row if piece is None else row[piece.begin : piece.begin + piece.size]


def own_factor(found: Mapping[int, torch.Tensor], piece: Piece | None) -> torch.Tensor:
    """Returns the factor that this rank's slice starts from."""
    begin = 0 if piece is None else piece.begin
    return found[max((each for each in found if each <= begin), default=min(found))]


def _collect(
    tensors: Mapping[str, torch.Tensor], pieces: Mapping[str, Piece], comm: Communicator, replica: int
) -> list[tuple[str, _Offer, torch.Tensor]]:
    """Brings every rank's tensors to rank 0, on the CPU; nothing on the others. All ranks call it."""
    names = sorted(tensors)
    mine = {name: _offer(tensors[name], pieces.get(name), replica) for name in names}
    offers = gather_objects(comm, mine)
    if comm.rank != 0:
        for name in names:
            comm.send(tensors[name], 0).wait()
        return []
    found = [(name, mine[name], tensors[name].to("cpu", copy=True)) for name in names]
    for source in range(1, comm.size):
        for name, offer in offers[source].items():
            received = torch.empty(offer.shape, dtype=offer.dtype, device=comm.device)
            comm.recv(received, source).wait()
            found.append((name, offer, received.cpu()))
    return found


def _offer(tensor: torch.Tensor, piece: Piece | None, replica: int) -> _Offer:
    whole = Piece(begin=0, size=tensor.numel(), whole=tensor.numel())  # of a tensor that no bucket has: one rank alone
    return _Offer(piece=piece or whole, replica=replica, shape=tuple(tensor.shape), dtype=tensor.dtype)
