"""What compression owes, as a checkpoint would give it back."""

from __future__ import annotations

import torch

from paceline.comm.base import Communicator
from paceline.comm.compress import Compressor
from paceline.comm.objects import gather_objects
from paceline.shards import Region


class Saved:
    """What ranks have saved, whole: as a checkpoint gives it."""

    def __init__(self, shards: list[tuple[str, Region, torch.Tensor]]) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        for name, region, values in shards:
            whole = self.tensors.setdefault(name, torch.zeros(region.shape, dtype=values.dtype))
            whole.view(-1)[region.begin : region.end] = values.reshape(-1)

    def shapes(self, prefix: str = "") -> dict[str, tuple[int, ...]]:
        found = {name: tuple(value.shape) for name, value in self.tensors.items() if name.startswith(prefix)}
        return {name.removeprefix(prefix): shape for name, shape in found.items()}

    def read(self, name: str, region: Region | None = None) -> torch.Tensor:
        whole = self.tensors[name].clone()
        return whole if region is None else whole.view(-1)[region.begin : region.end]


def saved(comm: Communicator, compressor: Compressor) -> Saved:
    """What all ranks write, put together on every rank."""
    mine = [(each.name, each.region, each.tensor) for each in compressor.shards(comm) if each.copy is not None]
    return Saved([shard for shards in gather_objects(comm, mine) for shard in shards])
