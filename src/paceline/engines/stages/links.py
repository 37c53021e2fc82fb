"""The links of a pipeline: trees of tensors from stage to stage, whose shapes the receiver learns once.

    forward   stage s --outputs--> stage s + 1          backward   stage s --gradients of its inputs--> stage s - 1

What a stage returns may be a tensor, or tuples, lists and dicts of tensors, numbers, strings and None. The first time
that a microbatch of some shape passes a boundary, a description goes ahead of the tensors; both sides know when that
is, since all stages see the shapes of the microbatch. From then on only the tensors travel, into memory that waits for
them. Gradients need no description: they look as the outputs did.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from paceline.comm.base import Communicator, Work
from paceline.comm.objects import receive_object, send_object
from paceline.engines.groups import tensors_in, wait_for_all
from paceline.errors import UsageError

_PLAIN = (int, float, str, bool, type(None))


@dataclass(frozen=True, slots=True)
class TensorShape:
    """A tensor without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device, requires_grad=self.requires_grad)


@dataclass(frozen=True, slots=True)
class Channel:
    """One way across one boundary, as one of its two ends sees it."""

    comm: Communicator
    peer: int
    tag: int

    def open(self, *, is_sender: bool) -> None:
        """Passes one number: NCCL connects with the first message, and both ends must be there for that."""
        number = [torch.zeros(1, device=self.comm.device)]
        wait_for_all(self.send(number) if is_sender else self.receive(number))

    def send(self, tensors: Iterable[Tensor]) -> list[Work]:
        return [self.comm.send(tensor.detach().contiguous(), self.peer, self.tag) for tensor in tensors]

    def receive(self, tensors: Iterable[Tensor]) -> list[Work]:
        return [self.comm.recv(tensor.detach(), self.peer, self.tag) for tensor in tensors]


@dataclass(slots=True)
class Arrival:
    """A tree of tensors on its way here."""

    tree: Any
    works: list[Work]

    def take(self) -> Any:
        wait_for_all(self.works)
        self.works = []
        return self.tree


class Links:
    """What this rank's stages send and receive."""

    def __init__(self, pipe: Communicator, placement: Sequence[int]) -> None:
        """Takes the rank of each stage. All ranks of the pipeline call it alike."""
        self._device = pipe.device
        self._described: dict[tuple[int, Hashable], Any] = {}  # by the receiving stage, and the microbatch's shape
        self._channels: dict[tuple[str, int], Channel] = {}
        is_cuda = pipe.device.type == "cuda"
        for stage in range(1, len(placement)):
            ends = placement[stage - 1], placement[stage]
            if ends[0] == ends[1]:
                continue
            for number, way in enumerate(("forward", "backward")):
                if pipe.rank in ends:
                    # NCCL knows no tags: it needs a communicator, and so a stream, for each way.
                    comm = pipe.split(sorted(ends)) if is_cuda else pipe
                    other = ends[1] if pipe.rank == ends[0] else ends[0]
                    peer = sorted(ends).index(other) if is_cuda else other
                    channel = self._channels[way, stage] = Channel(comm, peer, tag=2 * stage + number)
                    if is_cuda:
                        channel.open(is_sender=pipe.rank == ends[number])

    def knows(self, stage: int, key: Hashable) -> bool:
        """Says whether the inputs of a stage have been described."""
        return (stage, key) in self._described

    def send_outputs(self, stage: int, key: Hashable, tree: Any) -> list[Work]:
        """Sends what the stage before ``stage`` returned."""
        channel, shape = self._channels["forward", stage], describe(tree, stage - 1)
        works: list[Work] = []
        if not self.knows(stage, key):
            works = send_object(channel.comm, shape, channel.peer, channel.tag)
            self._described[stage, key] = shape
        elif shape != self._described[stage, key]:
            raise UsageError(
                f"stage {stage - 1} returned {shape}, and {self._described[stage, key]} before\n"
                "  for microbatches of one shape a stage returns tensors of one shape: the next stage waits for those\n"
                "  cut the model elsewhere (parallel.stages), or pad what differs"
            )
        return works + channel.send(tensors_in(tree))

    def post_inputs(self, stage: int, key: Hashable) -> Arrival:
        """Makes ready for the inputs of a stage; the first of their kind are waited for until they are described."""
        channel = self._channels["forward", stage]
        if not self.knows(stage, key):
            self._described[stage, key] = receive_object(channel.comm, channel.peer, channel.tag)
        tree = tree_map(
            lambda leaf: leaf.empty(self._device) if isinstance(leaf, TensorShape) else leaf,
            self._described[stage, key],
            is_leaf=lambda leaf: isinstance(leaf, TensorShape),
        )
        return Arrival(tree, channel.receive(tensors_in(tree)))

    def send_gradients(self, stage: int, gradients: Sequence[Tensor]) -> list[Work]:
        return self._channels["backward", stage].send(gradients)

    def post_gradients(self, stage: int, outputs: Sequence[Tensor]) -> Arrival:
        """Makes ready for the gradients of a stage's outputs."""
        tensors = [torch.empty(o.shape, dtype=o.dtype, device=o.device) for o in outputs]
        return Arrival(tensors, self._channels["backward", stage + 1].receive(tensors))


def describe(tree: Any, stage: int) -> Any:
    """Returns a tree with shapes in the place of tensors. Raises UsageError for what cannot be sent."""

    def shape_of(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return TensorShape(tuple(leaf.shape), leaf.dtype, leaf.requires_grad and leaf.is_floating_point())
        if isinstance(leaf, _PLAIN):
            return leaf
        raise UsageError(
            f"stage {stage} returns a {type(leaf).__name__}, which cannot be sent to stage {stage + 1}\n"
            "  a stage returns tensors, numbers, strings or None, also in tuples, lists and dicts\n"
            "  return its tensors, or cut the model at another layer"
        )

    return tree_map(shape_of, tree)


def map_tensors(change: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Returns a tree with other tensors, also in dataclasses."""

    def mapped(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return change(leaf)
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            fields = {f.name: map_tensors(change, getattr(leaf, f.name)) for f in dataclasses.fields(leaf)}
            return dataclasses.replace(leaf, **fields)
        return leaf

    return tree_map(mapped, tree)


def hand_over(tree: Any) -> Any:
    """Cuts a tree from its graph: what one stage returned becomes the input of another on the same rank."""
    return map_tensors(lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad), tree)


def shape_key(batch: Any, mode: str) -> Hashable:
    """Returns what two microbatches of the same shapes have in common."""
    leaves = [(tuple(v.shape), v.dtype) if isinstance(v, Tensor) else type(v) for v in tree_leaves(batch)]
    return mode, *leaves
