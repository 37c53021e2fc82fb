"""Buffers that all ranks have in common: before a step and an evaluation, those of rank 0 are everyone's.

A rank moves its own buffers (batch-norm statistics, say) in every forward. One model is trained, so one set counts.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn

from paceline.comm.base import Communicator
from paceline.engines.agree import broadcast_tensors

BufferPolicy = Literal["broadcast", "local"]


class SharedBuffers:
    """The persistent buffers of a module, and how they are kept alike."""

    def __init__(self, module: nn.Module, comm: Communicator, policy: BufferPolicy) -> None:
        self.comm = comm
        self.policy = policy
        persistent = module.state_dict(keep_vars=True)
        paths = [name.rpartition(".") for name, _ in module.named_buffers() if name in persistent]
        # By owner and name: a module may put another tensor in a buffer's place.
        self._places = [(module.get_submodule(owner), name) for owner, _, name in paths]

    def share(self) -> None:
        """Gives every rank the buffers of rank 0, where the policy says so. All ranks call it."""
        if self.policy == "broadcast" and self.comm.size > 1 and self._places:
            broadcast_tensors(self.comm, self.tensors())

    def tensors(self) -> list[torch.Tensor]:
        """Returns the buffers as they are now."""
        found = [owner._buffers[name] for owner, name in self._places]
        return [buffer for buffer in found if buffer is not None]
