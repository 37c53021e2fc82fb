"""A world of one: every verb is done when it is issued.

It is what ``connect()`` gives without a launcher, and what a group of one member is. The engines run on it unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.comm.base import DONE, ReduceOp, Splits, Work
from paceline.comm.group import GroupMember, all_to_all_splits, check_peer, check_pieces
from paceline.errors import UsageError


class SoloCommunicator(GroupMember):
    """The communicator of a group with one member."""

    def __init__(self, device: torch.device, *, world_rank: int = 0) -> None:
        super().__init__(0, (world_rank,), device, backend="none")

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Work:  # noqa: ARG002
        """Leaves ``tensor`` as it is: the sum, mean and extremes of one value are that value."""
        return DONE

    def reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor, op: ReduceOp = "sum") -> Work:  # noqa: ARG002
        check_pieces("reduce_scatter", whole=tensor, piece=output, size=1)
        return _copy(output, tensor)

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor) -> Work:
        check_pieces("all_gather", whole=output, piece=tensor, size=1)
        return _copy(output, tensor)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> Work:  # noqa: ARG002
        check_peer("broadcast from", source, 1)
        return DONE

    def all_to_all(
        self, output: torch.Tensor, tensor: torch.Tensor, output_splits: Splits = None, input_splits: Splits = None
    ) -> Work:
        all_to_all_splits(output, output_splits, 1)
        all_to_all_splits(tensor, input_splits, 1)
        check_pieces("all_to_all", whole=output, piece=tensor, size=1)
        return _copy(output, tensor)

    def send(self, tensor: torch.Tensor, to: int, tag: int = 0) -> Work:  # noqa: ARG002
        raise UsageError(f"send to rank {to} in a world of one: there is no other rank")

    def recv(self, tensor: torch.Tensor, source: int, tag: int = 0) -> Work:  # noqa: ARG002
        raise UsageError(f"recv from rank {source} in a world of one: there is no other rank")

    def barrier(self) -> None:
        """Returns at once."""

    def split(self, ranks: Sequence[int]) -> SoloCommunicator:
        if list(ranks) != [0]:
            raise UsageError(f"split({list(ranks)}) of a world of one: the only subgroup is [0]")
        return self


def _copy(output: torch.Tensor, tensor: torch.Tensor) -> Work:
    # The two may be the same memory: that is how engines gather in place.
    if output.data_ptr() != tensor.data_ptr():
        output.data.view(-1).copy_(tensor.detach().reshape(-1))
    return DONE
