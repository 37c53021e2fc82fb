"""A world of one: every verb is done when it is issued.

It is what ``connect()`` gives without a launcher, and what a group of one member is. The engines run on it unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.comm.base import DONE, Call, Communicator, Work, check_pieces
from paceline.errors import UsageError


class SoloCommunicator(Communicator):
    def __init__(self, device: torch.device, *, world_rank: int = 0) -> None:
        super().__init__(0, (world_rank,), device, backend="none")

    def issue(self, call: Call) -> Work:
        """Copies what one rank gives to where it is to be: the sum, mean and extremes of one value are that value."""
        if call.kind in ("send", "recv"):
            raise UsageError(f"{call.kind} in a world of one: there is no other rank")
        check_pieces(call.kind, whole=call.output, piece=call.tensor, size=1)
        # The two may be the same memory: that is how engines gather in place.
        if call.output.data_ptr() != call.tensor.data_ptr():
            call.output.data.view(-1).copy_(call.tensor.detach().reshape(-1))
        return DONE

    def barrier(self) -> None:
        """Returns at once."""

    def split(self, ranks: Sequence[int]) -> SoloCommunicator:
        if list(ranks) != [0]:
            raise UsageError(f"split({list(ranks)}) of a world of one: the only subgroup is [0]")
        return self
