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

    One all-reduce. The coefficient stays on the device: nothing waits for it. An infinite ``max_norm`` only measures.
    ``norms`` are those of the pieces, and ``squares`` the sum of all ranks', where these are known already.
    """
    gradients = [piece.grad for piece in pieces if piece.grad is not None and piece.grad.numel()]
    device = gradients[0].device if gradients else comm.device
    norm = squares.sqrt() if squares is not None else _global_norm(gradients, pieces, comm, norm_type, norms)
    if not math.isinf(max_norm) and gradients:
        coefficient = (max_norm / (norm + 1e-6)).clamp(max=1.0).to(device)
        torch._foreach_mul_(gradients, coefficient.to(gradients[0].dtype))
    return norm


def _global_norm(
    gradients: list[torch.Tensor],
    pieces: Sequence[nn.Parameter],
    comm: Communicator,
    norm_type: float,
    norms: Sequence[torch.Tensor] | None,
) -> torch.Tensor:
    is_max = math.isinf(norm_type)
    if norms is None:
        norms = torch._foreach_norm(gradients, norm_type) if gradients else []
    if norms:
        stacked = torch.stack(list(norms)).to(comm.device)
        if norm_type == 2.0:
            local = torch.dot(stacked, stacked)
        else:
            local = stacked.max() if is_max else (stacked**norm_type).sum()
    else:
        local = torch.zeros((), dtype=pieces[0].dtype if pieces else torch.float32, device=comm.device)
    return reduce_norm(local, comm, norm_type)


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
