"""What an engine may ask of other ranks, and of the communicator through which it talks to them.

Every data verb is asynchronous and returns a ``Work``. The work owns its tensors until ``wait()``: the caller neither
reads nor writes them in between. One calling convention is one thing to simulate, trace, compress and time.

Bytes that each of N ranks sends for a tensor of B bytes, with the bandwidth-optimal algorithms:

    all_reduce      2 B (N-1)/N        reduce_scatter  B (N-1)/N   (B = the whole input)
    broadcast       B                  all_gather      B (N-1)/N   (B = the whole output)
    all_to_all      B (N-1)/N          send            B

Ranks are numbered within the group: ``comm.rank`` runs from 0 to ``comm.size - 1``, and so do ``source`` and ``to``.
All ranks of a group issue the same collectives in the same order.

A communicator declares what it can do (``takes_real_time``, ``clock``, ``backend``, ...): nobody looks at its type, or
at what it wraps. ``group.py`` has the base classes that declare it: one for backends, one for wrappers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

import torch

from paceline.clock import Clock, DeviceClock
from paceline.plan.layout import Compression
from paceline.shards import FlatLayout

if TYPE_CHECKING:
    from paceline.comm.ledger.ledger import Ledger
    from paceline.comm.ledger.updates import TrainedParameters
    from paceline.comm.trace import Trace

ReduceOp = Literal["sum", "avg", "min", "max"]
Splits = Sequence[int] | None  # rows of dim 0 for each rank; None: as many for each


class Work(Protocol):
    """An operation in flight."""

    def wait(self) -> None:
        """Returns when the result may be used; on CUDA it orders streams and does not block the host."""


@runtime_checkable
class Communicator(Protocol):
    """A group of ranks that talk. Engines know this protocol and no backend."""

    rank: int  # this rank's number within the group
    size: int
    ranks: tuple[int, ...]  # the members by their rank in the world, in group order
    device: torch.device  # where this rank's tensors live
    device_kind: (
        str  # the type of device that engines adapt to: that of the tensors, or the one that a dry run imitates
    )
    backend: str  # how bytes travel: ``nccl``, ``gloo``, ``shared_memory``, ``virtual``, or ``none`` in a world of one
    takes_real_time: bool  # whether a duration that a rank measures is its own: not so where ranks take turns

    @property
    def clock(self) -> Clock | None:
        """This rank's virtual clock; None where its time is that of its device."""

    @property
    def ledger(self) -> Ledger | None:
        """Where every operation is written down for whoever looks for a hang, if anywhere."""

    @property
    def trained(self) -> TrainedParameters | None:
        """The parameters whose updates are compared between ranks, where they are: engines add theirs."""

    @property
    def trace(self) -> Trace | None:
        """What counts operations, bytes and waits, if anything does."""

    def shared_buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Returns zeros that collectives use in place, without a copy; None, on all ranks, where there are none.

        Called by every rank at the same time, with the same arguments. Any other tensor gives the same results.
        """

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Work:
        """Replaces ``tensor`` by the reduction over all ranks, the same bits on each."""

    def reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor, op: ReduceOp = "sum") -> Work:
        """Puts this rank's slice of the reduction of ``tensor`` into ``output``: ``numel`` is 1/size of the input's.

        ``output`` may be this rank's own slice of ``tensor``.
        """

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor) -> Work:
        """Fills ``output`` with every rank's ``tensor`` in rank order; all have the same shape.

        ``tensor`` may be this rank's own slice of ``output``.
        """

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> Work:
        """Replaces ``tensor`` by that of rank ``source``."""

    def all_to_all(
        self, output: torch.Tensor, tensor: torch.Tensor, output_splits: Splits = None, input_splits: Splits = None
    ) -> Work:
        """Sends the i-th piece of ``tensor`` to rank i and puts the piece from rank i at place i of ``output``.

        Splits count rows of dim 0; without them the pieces are equal.
        """

    def send(self, tensor: torch.Tensor, to: int, tag: int = 0) -> Work:
        """Sends ``tensor``; matched with a receive of the same tag, in the order they were issued."""

    def recv(self, tensor: torch.Tensor, source: int, tag: int = 0) -> Work:
        """Receives into ``tensor``."""

    def barrier(self) -> None:
        """Returns when every rank has called it."""

    def split(self, ranks: Sequence[int]) -> Communicator:
        """Makes the subgroup of ``ranks`` (numbers within this group).

        Called by the members alone, each with the same ``ranks``; a member's rank is its place in ``ranks``.
        """


def control_device(comm: Communicator) -> torch.device:
    """Returns the device of numbers that the host reads: the rank's own, or the CPU where that one holds no values."""
    return torch.device("cpu") if comm.device.type == "meta" else comm.device


def clock_of(comm: Communicator) -> Clock:
    """Returns the clock that a rank's time is read from: its virtual clock if it has one, else that of its device."""
    return DeviceClock(comm.device) if comm.clock is None else comm.clock


class Done:
    """The work of an operation that had finished when it was issued."""

    __slots__ = ()

    def wait(self) -> None:
        """Returns at once."""


DONE = Done()


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketShape:
    """What lies in a bucket: tensors by name, and ``tail`` elements behind them that always travel whole.

    ``shard`` is the part of the layout, from its first element to one past its last, that the buffer holds; None: all.
    """

    names: tuple[str, ...]
    layout: FlatLayout
    tail: int = 0
    shard: tuple[int, int] | None = None


class BucketReduction(Protocol):
    """Averages one bucket over the ranks, step after step."""

    def start(self, buffer: torch.Tensor, comm: Communicator) -> Work:
        """Sends a bucket on its way; when waited for, ``buffer`` holds the average, the same bits on every rank."""


class GradientCompression(Protocol):
    """What an engine may use in place of a bucket's all-reduce. It remembers what a step did not send."""

    settings: Compression

    def bind(self, buckets: Sequence[BucketShape], replicas: Communicator | None = None) -> Sequence[BucketReduction]:
        """Makes the reductions of an engine's buckets; those of buckets that it had before end.

        ``replicas`` are the ranks that average, where these are not all that train.
        """

    def end_pass(self, shards: Communicator | None = None) -> None:
        """Ends a pass: every bucket was waited for. ``shards`` have the other parts of the gradient; all call it."""

    def abandon_pass(self) -> None:
        """Forgets a pass that was broken off; without one under way nothing happens."""

    def roll_back(self) -> None:
        """Forgets the last pass, ended or not: its gradients were dropped, and come again."""

    def keep_residuals(self, names: Sequence[str]) -> None:
        """Takes back what this pass sent of tensors that get no gradient, so that it is not lost."""
