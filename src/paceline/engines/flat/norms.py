"""One true norm of gradients of which ranks hold pieces, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from paceline.comm.base import Communicator
from paceline.engines.flat.flat import FlatGroup


@torch.no_grad()
def clip_pieces(
    pieces: Sequence[nn.Parameter],
    comm: Communicator,
    max_norm: float,
    norm_type: float = 2.0,
    *,
    norms: Sequence[torch.Tensor] | None = None,
    squares: torch.Tensor | None = None,
) -> torch.Tensor:
    """Clips gradients of which every rank of ``comm`` has pieces; returns their global norm.

    One all-reduce. The coefficient stays on the device: nothing waits for it. ``norms`` are those of the pieces, and
    ``squares`` the sum of all ranks', where these are known already.
    """
    gradients = [piece.grad for piece in pieces if piece.grad is not None and piece.grad.numel()]
    if squares is not None:
        norm = squares.sqrt()
    else:
        if norms is None:
            norms = torch._foreach_norm(gradients, norm_type) if gradients else []
        local = torch.zeros((), dtype=pieces[0].dtype if pieces else torch.float32, device=comm.device)
        if norms:
            stacked = torch.stack(list(norms)).to(comm.device)
            local = torch.dot(stacked, stacked) if norm_type == 2.0 else add_powers(stacked, norm_type)
        norm = reduce_norm(local, comm, norm_type)
    scale_to(max_norm, norm, gradients)
    return norm


def scale_to(max_norm: float, norm: torch.Tensor, gradients: list[torch.Tensor]) -> None:
    """Scales gradients of this global norm so that it is at most ``max_norm``, which may be infinite."""
    if not math.isinf(max_norm) and gradients:
        coefficient = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(gradients, coefficient.to(gradients[0]))


def add_powers(norms: torch.Tensor, norm_type: float) -> torch.Tensor:
    """Returns the sum of powers of norms, or the largest of them for the infinite norm."""
    return norms.max() if math.isinf(norm_type) else (norms**norm_type).sum()


def reduce_norm(local: torch.Tensor, comm: Communicator, norm_type: float) -> torch.Tensor:
    """Returns the global norm, from each rank's sum of powers of the norms of its gradients, or the largest norm."""
    total, is_max = local.reshape(1), math.isinf(norm_type)
    if is_max:  # the larger of a number and nan is the number, to some backends
        total.masked_fill_(total.isnan(), math.inf)
    if comm.size > 1:
        comm.all_reduce(total, "max" if is_max else "sum").wait()
    return total[0] if is_max else total[0] ** (1.0 / norm_type)


def measured_norms(groups: Sequence[FlatGroup]) -> list[torch.Tensor] | None:
    """Returns the norms that were taken in backward; None unless they are those of all gradients there are now."""
    norms: list[torch.Tensor] = []
    for group in groups:
        if any(piece.grad is not None for piece in group.pieces):
            measured = group.gradients.take_norms()
            if measured is None:
                return None
            norms += measured
    return norms or None
