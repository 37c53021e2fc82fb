"""What an engine's rank holds of the model, tensor by tensor: for checkpoints, which know shards and no engines.

A parameter is whole on every rank, or a flat piece of a group; either way its shard says which elements of the whole
tensor it has. Buffers are those of the first rank, as everywhere. Nothing is copied or sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn

from paceline.engines.flat.flat import FlatGroup, dense_stride
from paceline.shards import Region, Shard, memory_order, whole_region


def parameter_shards(
    named: Iterable[tuple[str, nn.Parameter]],
    groups: Sequence[FlatGroup],
    *,
    whole: tuple[int, int],
    pieces: tuple[int, int],
) -> Iterator[Shard]:
    """Yields what an optimizer updates. ``whole`` and ``pieces``: which of how many copies this rank has of either."""
    places = {id(piece): (group, place) for group in groups for place, piece in enumerate(group.pieces)}
    for name, parameter in named:
        if id(parameter) in places:
            group, place = places[id(parameter)]
            region, (copy, copies) = piece_region(group, place), pieces
        else:
            region, (copy, copies) = own_region(parameter), whole
        yield Shard(name=name, region=region, tensor=parameter, copy=copy, copies=copies)


def buffer_shards(module: nn.Module, names: Iterable[str], *, is_writer: bool) -> Iterator[Shard]:
    """Yields the buffers that a state dict has; ``names`` are those of the parameters."""
    known = set(names)
    for name, value in module.state_dict(keep_vars=True).items():
        is_buffer = isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter)
        if is_buffer and name not in known:
            yield Shard(name=name, region=own_region(value), tensor=value, copy=0 if is_writer else None)


def own_region(tensor: torch.Tensor) -> Region:
    """Returns the region of a tensor that is whole, in the order of its memory."""
    return whole_region(tuple(tensor.shape), memory_order(tensor.shape, dense_stride(tensor)))


def piece_region(group: FlatGroup, place: int) -> Region:
    """Returns which part of its n-th parameter lies in this rank's slice of a group."""
    slot = group.layout.slots[place]
    begin, end = group.span(place)
    first = min(max(group.start - slot.offset, 0), slot.numel)
    order = memory_order(slot.shape, slot.stride)
    return Region(shape=slot.shape, begin=first, end=first + end - begin, order=order)
