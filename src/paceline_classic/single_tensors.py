"""Averages of single tensors, for loops that reduce by hand: over two groups, and compressed with what each owes.

For B bytes and H hosts of L ranks, what a rank sends inside a host, and what a host sends across:

    every rank has a group across    2 B (L-1)/L inside,  2 B (H-1)/H across, on the links of all its ranks
    one rank of a host has           3 B at most inside,  2 B (H-1)/H across, on the link of that rank
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeAlias

import torch

from paceline.comm.base import BucketShape, Communicator, Work
from paceline.comm.compress import Compressor
from paceline.comm.objects import gather_objects
from paceline.errors import UsageError
from paceline.plan.layout import Compression
from paceline.shards import flat_layout, round_up

Way: TypeAlias = Iterator[None]
"""How a piece of a tensor becomes the average, stage by stage: pieces go side by side."""


def connect_groups(inside: Communicator, across: Communicator | None) -> Callable[[torch.Tensor], Way]:
    """Learns how the groups lie, and returns how they average a piece. All ranks of all hosts call it.

    Raises UsageError where a part of a host's ranks has a group across, or hosts of different sizes give all one.
    """
    has_group = gather_objects(inside, across is not None)
    if sum(has_group) != 1 and not all(has_group):
        raise UsageError(
            f"{sum(has_group)} of the {inside.size} ranks of a host have a group across hosts\n"
            "  one of them stands for its host, or every one does with a slice\n  give a group to one rank, or to each"
        )
    # Of a host: its ranks, and whether each of them has a group across. A host of one rank fits either way.
    mine = inside.size, inside.size > 1 and all(has_group)
    told = gather_objects(inside, None if across is None else gather_objects(across, mine))
    seen = [hosts for hosts in told if hosts is not None]
    is_even = all(hosts == seen[0] for hosts in seen) and len(set(seen[0])) == 1
    if any(is_sliced for hosts in seen for _, is_sliced in hosts) and not is_even:
        sizes = sorted({size for hosts in seen for size, _ in hosts})
        raise UsageError(
            f"hosts of {sizes} ranks, with a group across for every rank\n  slices need hosts of equal size"
            "\n  give one rank of each host a group across, and None to the others"
        )
    if mine[1] and across is not None:
        return partial(_by_slices, inside, across)
    weight = inside.size * len(seen[0]) / sum(size for size, _ in seen[0])  # hosts count by their ranks
    return partial(_by_leader, inside, across, has_group.index(True), weight)


def once(start: Callable[[], Work]) -> Way:
    """Goes the way of a piece that one operation brings there, in stages: it starts, and it is there."""
    work = start()
    yield
    work.wait()


def _by_leader(
    inside: Communicator, across: Communicator | None, leader: int, weight: float, piece: torch.Tensor
) -> Way:
    """Averages a piece inside the host, lets one rank average that across, and hands it round."""
    if weight != 1.0:
        piece.mul_(weight)
    yield from once(partial(inside.all_reduce, piece, "avg"))
    if across is not None:
        yield from once(partial(across.all_reduce, piece, "avg"))
    yield from once(partial(inside.broadcast, piece, leader))


def _by_slices(inside: Communicator, across: Communicator, piece: torch.Tensor) -> Way:
    """Averages a piece inside the host, a slice on each rank, and that across; then gathers the slices."""
    length = round_up(piece.numel(), inside.size)
    whole, own = piece, piece.new_empty(length // inside.size)
    if length != piece.numel():
        whole = torch.nn.functional.pad(piece, (0, length - piece.numel()))
    yield from once(partial(inside.reduce_scatter, own, whole, "avg"))
    yield from once(partial(across.all_reduce, own, "avg"))
    yield from once(partial(inside.all_gather, whole, own))
    if whole is not piece:
        piece.copy_(whole[: piece.numel()])


class OwedTensor:
    """What one tensor owes, from call to call."""

    def __init__(self, name: str, lengths: list[int], dtype: torch.dtype, ratio: float) -> None:
        self._name, self._lengths, self._dtype = name, lengths, dtype
        # As a matrix of one row: tensors of one dim are biases and norms to an engine, and travel whole there.
        self._compressor = Compressor(Compression(policy="topk", ratio=ratio, min_size=0))
        shapes = [
            BucketShape(names=(f"{name} piece {number}",), layout=flat_layout([(1, length)]))
            for number, length in enumerate(lengths)
        ]
        self._reductions = self._compressor.bind(shapes)
        self._is_busy = False

    def begin(self, tensor: torch.Tensor) -> None:
        """Raises UsageError for a tensor that is not the one of this slot."""
        if self._is_busy:
            raise UsageError(f"tensor {self._name} is still on its way\n  wait for it, or give each a name")
        if tensor.numel() != sum(self._lengths) or tensor.dtype != self._dtype:
            raise UsageError(
                f"tensor {self._name} had {sum(self._lengths)} elements of {self._dtype}, and now has "
                f"{tensor.numel()} of {tensor.dtype}\n  give each tensor a name of its own"
            )
        self._is_busy = True

    def pieces(self, flat: torch.Tensor, comm: Communicator) -> list[Way]:
        """Returns the way of each piece of a tensor, with what it owes."""
        parts = torch.split(flat, self._lengths)
        return [once(partial(each.start, part, comm)) for each, part in zip(self._reductions, parts, strict=True)]

    def end(self, *, is_there: bool) -> None:
        """Keeps what was not sent, if the rest arrived; after a failed call, the tensor owes what it owed before."""
        if is_there:
            self._compressor.end_pass()
        else:
            self._compressor.abandon_pass()
        self._is_busy = False


class GradientOwners:
    """Finds the parameter whose gradient a tensor without a name is: a tensor does not know it.

    Shape and order of calls do not tell tensors apart: equal layers have one shape, and a step may leave one out.
    The memory of a gradient does, while its parameter holds it. Finding new parameters looks at all of Python's
    objects, some 50 ms; so after one that found nothing, the next waits until there are twice as many misses.
    """

    def __init__(self) -> None:
        self._known: list[weakref.ref[torch.Tensor]] = []
        self._by_memory: dict[tuple[int, int], weakref.ref[torch.Tensor]] = {}
        self._misses = 0

    def find(self, gradient: torch.Tensor) -> torch.Tensor | None:
        """Returns the parameter, or None where no parameter that was found holds this gradient."""
        owner = self._held(gradient)
        if owner is None:
            self._note_gradients()
            owner = self._held(gradient)
        if owner is None:
            self._misses += 1
            if self._misses & (self._misses - 1) == 0:  # 1, 2, 4, 8, ...
                # Not isinstance, which asks for __class__: lazy objects of other libraries warn when they are asked.
                tensors = (each for each in gc.get_objects() if issubclass(type(each), torch.Tensor))
                leaves = (each for each in tensors if each.is_leaf and each.requires_grad and not each.is_meta)
                self._known = [weakref.ref(each) for each in leaves]
                self._note_gradients()
                owner = self._held(gradient)
                self._misses = self._misses if owner is None else 0
        return owner

    def _held(self, gradient: torch.Tensor) -> torch.Tensor | None:
        found = self._by_memory.get(_memory_of(gradient))
        owner = None if found is None else found()
        is_held = owner is not None and owner.grad is not None and _memory_of(owner.grad) == _memory_of(gradient)
        return owner if is_held else None

    def _note_gradients(self) -> None:
        alive = [(each, parameter) for each in self._known if (parameter := each()) is not None]
        held = [(each, parameter.grad) for each, parameter in alive if parameter.grad is not None]
        self._known = [each for each, _ in alive]
        self._by_memory = {_memory_of(grad): each for each, grad in held if type(grad) is torch.Tensor}


def _memory_of(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.numel()
