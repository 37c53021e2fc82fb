"""Which parameters some rank has used: an all-reduce of one byte for each, of which few ranks need the answer."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from paceline.comm.base import Communicator, Work


class UsedFlags:
    """The flags of a model's parameters, which all ranks exchange at the end of a step's backward."""

    def __init__(self, comm: Communicator, names: Sequence[str]) -> None:
        self._comm = comm
        self._names = tuple(names)
        self._all_used = torch.ones(len(names), dtype=torch.uint8, device=comm.device)
        self._sent: tuple[torch.Tensor, Work] | None = None  # the flags live until they have been waited for

    def ask_others(self, used: Collection[str], missing: list[str]) -> list[str]:
        """Tells the others which parameters were used here; returns which of the missing ones no rank has used.

        A rank that misses none does not wait for the answer.
        """
        if self._sent is not None:
            self._sent[1].wait()
        flags = self._all_used
        if missing:
            is_used = [name in used for name in self._names]
            flags = torch.tensor(is_used, dtype=torch.uint8).to(self._comm.device, non_blocking=True)
        else:
            flags.fill_(1)
        self._sent = (flags, self._comm.all_reduce(flags, "max"))
        if not missing:
            return []
        self._sent[1].wait()
        # sync point, for models that leave parameters unused
        used_anywhere = dict(zip(self._names, flags.tolist(), strict=True))
        return [name for name in missing if not used_anywhere[name]]
