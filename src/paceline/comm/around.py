"""A communicator around another one, which it asks who and where it is."""

from __future__ import annotations

import torch

from paceline.comm.base import Communicator, shared_buffer


class AroundCommunicator:
    """What every wrapper has in common: the group is that of ``inner``."""

    def __init__(self, inner: Communicator) -> None:
        self.inner = inner

    @property
    def rank(self) -> int:
        """This rank's number within the group."""
        return self.inner.rank

    @property
    def size(self) -> int:
        """How many ranks the group has."""
        return self.inner.size

    @property
    def ranks(self) -> tuple[int, ...]:
        """The members by their rank in the world."""
        return self.inner.ranks

    @property
    def device(self) -> torch.device:
        """Where this rank's tensors live."""
        return self.inner.device

    def new_buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Makes zeros that the collectives of ``inner`` use in place, if it has such."""
        return shared_buffer(self.inner, numel, dtype)
