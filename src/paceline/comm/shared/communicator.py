"""Ranks of one host that talk through shared memory, for CPU tensors.

A group has one segment: an area and counters of each rank for collectives (``board.py``), and a ring of cells for each
pair of ranks for messages. Operations go on when their process issues or waits (``progress.py``).
For a tensor of B bytes on N ranks at memory bandwidth W per rank, an all-reduce takes about (4 N - 1)/N B/W, with no
more latency than one look at a counter in another core's cache. About ten times a second a rank that waits sees whether
those it waits for are alive. A group in which an operation failed is broken: every later one is refused.
"""

from __future__ import annotations

import ctypes
import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from paceline.comm.base import OPS, Call, Communicator, Work, check_reduction, check_split
from paceline.comm.objects import gather_objects, receive_object, send_object
from paceline.comm.shared import board
from paceline.comm.shared.native import collectives as native
from paceline.comm.shared.progress import Inbox, OperationLane, OperationQueue, PendingOperation, ProgressLoop
from paceline.comm.shared.segment import FOLDER, Process, RankLocation, SegmentLayout, SharedSegment, no_folder
from paceline.comm.solo import SoloCommunicator
from paceline.errors import CollectiveMismatchError, CommunicationError, LateRankError, LostRankError, UsageError
from paceline.shards import round_up

T = TypeVar("T")

# Far from the tags of users.
_EXCHANGE_TAG = -(2**40)
_SPLIT_TAG = -(2**41)
_BUFFER_TAG = -(2**42)
_PAGE = 4096


def share_memory(comm: Communicator, *, timeout_s: float = 300.0) -> Communicator:
    """Returns the ranks as a group that shares memory, or ``comm`` where they cannot. Raises where it is too little."""
    if comm.size == 1 or comm.device.type != "cpu":
        return comm
    everyone = gather_objects(comm, (RankLocation.here(), FOLDER.is_dir()))
    if len({place.host for place, _ in everyone}) > 1 or not all(has_folder for _, has_folder in everyone):
        return comm
    return SharedMemoryCommunicator.join(comm, timeout_s=timeout_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Resources:
    progress: ProgressLoop
    code: ctypes.CDLL | None
    timeout_s: float

    def layout(self, size: int) -> SegmentLayout:
        return SegmentLayout(size, is_quick=self.code is not None and self.progress.may_spin)


@dataclass(slots=True, eq=False)
class _SharedWork:
    comm: SharedMemoryCommunicator
    operation: PendingOperation
    lane: OperationLane

    def wait(self) -> None:
        if not self.operation.is_done:
            watch = partial(self.comm._watch, self.operation, self.lane)
            self.comm._resources.progress.wait(self.operation, watch)
        if self.operation.error is not None:
            raise type(self.operation.error)(str(self.operation.error))  # a new one: each has its own traceback


@dataclass(slots=True, eq=False)
class _JointWork:
    works: list[Work]
    finish: Callable[[], object] | None

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        if self.finish is not None:
            self.finish()
        self.works, self.finish = [], None


class SharedMemoryCommunicator(Communicator):
    """A group of ranks on one host. Made by ``join``, ``split`` and ``share_memory``."""

    def __init__(
        self,
        segment: SharedSegment,
        rank: int,
        ranks: tuple[int, ...],
        processes: Sequence[Process],
        resources: _Resources,
    ) -> None:
        layout, progress = resources.layout(len(ranks)), resources.progress
        super().__init__(rank, ranks, torch.device("cpu"), backend="shared_memory")
        self._processes, self._resources = processes, resources
        self.is_compiled = resources.code is not None
        self._failures = layout.failures(segment)
        self._broken: CommunicationError | None = None
        made, code = layout.make_board(segment, rank, progress.fence), resources.code
        self._calls = board.Collectives(made)
        if code is not None and made.size <= native.MOST_RANKS:
            self._calls = native.CompiledCollectives(code, made, progress)
        self._collectives = OperationQueue(self._break)
        self._outboxes = [OperationQueue(self._break) for _ in ranks]
        self._outgoing = [layout.make_ring(segment, rank, to, progress.fence) for to in range(len(ranks))]
        incoming = [layout.make_ring(segment, source, rank, progress.fence) for source in range(len(ranks))]
        self._inboxes = [Inbox(ring, source, self._break) for source, ring in enumerate(incoming)]

    @classmethod
    def join(cls, inner: Communicator, *, timeout_s: float = 300.0, compiled: bool = True) -> SharedMemoryCommunicator:
        """Makes the group of the ranks of ``inner``, compiled where every rank can have that. All call it.

        Raises CommunicationError, on every rank, where they do not share a host or it has too little shared memory.
        """
        if inner.size == 1 or inner.device.type != "cpu":
            ranks = f"{inner.size} rank(s) on {inner.device}"
            raise UsageError(f"shared memory for {ranks}: it joins two or more ranks on CPUs")
        if not FOLDER.is_dir():
            raise CommunicationError(no_folder())
        code: ctypes.CDLL | None = None
        if compiled:  # the first rank builds it before the others look for it
            first = native.load().code if inner.rank == 0 else None
            gather_objects(inner, first is not None)
            code = native.load().code
            code = code if all(gather_objects(inner, code is not None)) else None
        # Cores of all ranks together: each may be kept to its own.
        cores = set[int]().union(*gather_objects(inner, os.sched_getaffinity(0)))
        progress = ProgressLoop(may_spin=inner.size <= len(cores))
        resources = _Resources(progress=progress, code=code, timeout_s=timeout_s)
        return _establish(lambda value: gather_objects(inner, value), inner.rank, inner.ranks, resources)

    def _collective(self, call: Call) -> Work:
        """Joins a collective in which all ranks have tensors alike. Those that are only moved are bytes."""
        kind, dtype, op = call.kind, call.tensor.dtype, call.op
        is_reduction = kind in ("all_reduce", "reduce_scatter")
        if is_reduction:
            if dtype not in board.DTYPES:
                raise UsageError(f"{kind} of {dtype}: it has no sum here; convert the tensor first")
            check_reduction(kind, dtype, op)
        flat, finish = _flat_output(call.output)
        given = None if call.output is call.tensor else _flat(call.tensor)
        stamp = board.stamp_of(kind, call.whole, OPS.index(op) if is_reduction else call.peer)
        if not is_reduction:
            flat, given = board.as_bytes(flat), None if given is None else board.as_bytes(given)
        steps = self._calls.start(call, flat, flat if given is None else given, stamp)
        return self._start(kind, finish, self._collectives, steps)

    _all_reduce = _reduce_scatter = _all_gather = _broadcast = _collective

    def _all_to_all(self, call: Call) -> Work:
        """Sends the i-th piece of a tensor to rank i; as messages, since each pair exchanges what it likes."""
        assert call.splits is not None
        wanted, given = call.splits
        flat, finish = _flat_output(call.output)
        into, out_of = board.as_bytes(flat), board.as_bytes(_flat(call.tensor))
        targets = torch.split(into, [count * into.numel() // max(1, call.output.shape[0]) for count in wanted])
        pieces = torch.split(out_of, [count * out_of.numel() // max(1, call.tensor.shape[0]) for count in given])
        if pieces[self.rank].numel() != targets[self.rank].numel():
            raise CollectiveMismatchError(
                f"all_to_all: rank {self.ranks[self.rank]} keeps {given[self.rank]} rows and expects "
                f"{wanted[self.rank]} of itself\n  a rank's input and output split for itself are the same"
            )
        targets[self.rank].copy_(pieces[self.rank])
        order = [(self.rank + step) % self.size for step in range(1, self.size)]  # not all to the same one at once
        works = [self._start("all_to_all", None, self._inboxes[peer], targets[peer], _EXCHANGE_TAG) for peer in order]
        works += [self._put("all_to_all", pieces[peer], peer, _EXCHANGE_TAG) for peer in order]
        return _JointWork(works, finish)

    def _send(self, call: Call) -> Work:
        """Sends a message; done when the last of it is on its way, the first of which may have arrived."""
        kind = f"send to rank {self.ranks[call.peer]}"
        return self._put(kind, board.as_bytes(_flat(call.tensor)), call.peer, call.tag)

    def _recv(self, call: Call) -> Work:
        flat, finish = _flat_output(call.tensor)
        kind = f"recv from rank {self.ranks[call.peer]}"
        return self._start(kind, finish, self._inboxes[call.peer], board.as_bytes(flat), call.tag)

    def barrier(self) -> None:
        self._start("barrier", None, self._collectives, self._calls.barrier()).wait()

    def split(self, ranks: Sequence[int]) -> Communicator:
        """Makes the subgroup of ``ranks``; only its members call. They meet through messages of this group."""
        check_split(ranks, self.rank, self.size)
        members = tuple(self.ranks[rank] for rank in ranks)
        if len(members) == 1:
            return SoloCommunicator(self.device, world_rank=members[0])
        tag = _SPLIT_TAG - zlib.crc32(repr(members).encode())  # groups may be made in another order on each rank
        rank = list(ranks).index(self.rank)
        return _establish(lambda value: self._exchange(value, ranks, tag), rank, members, self._resources)

    def shared_buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Returns zeros that all ranks can reach, freed with the last tensor in them; None without room for them."""
        calls = self._calls
        if not isinstance(calls, native.CompiledCollectives) or calls.num_buffers == native.MOST_BUFFERS or not numel:
            return None
        area = round_up(numel * dtype.itemsize, _PAGE)
        everyone = range(self.size)
        try:
            segment = _common_segment(
                lambda value: self._exchange(value, everyone, _BUFFER_TAG), self.rank, self.ranks, area * self.size
            )
        except CommunicationError:  # no room: plain memory does as well
            return None
        segment.when_freed(calls.add_buffer(segment.address, area))
        return segment.bytes(self.rank * area, numel * dtype.itemsize).view(dtype)

    def _put(self, kind: str, message: torch.Tensor, to: int, tag: int) -> Work:
        return self._start(kind, None, self._outboxes[to], self._outgoing[to].put(message, to, tag))

    def _start(self, kind: str, finish: Callable[[], object] | None, lane: OperationLane, *what: Any) -> Work:
        if self._broken is not None:
            earlier = str(self._broken).replace("\n", "\n  ")
            raise type(self._broken)(f"{self._head(kind)}: the group is broken since\n  {earlier}")
        operation = PendingOperation(kind, finish)
        self._resources.progress.issue(lane, operation, *what)
        return _SharedWork(self, operation, lane)

    def _exchange(self, value: T, ranks: Sequence[int], tag: int) -> list[T]:
        sends = [work for rank in ranks for work in send_object(self, value, rank, tag)]
        found = [receive_object(self, rank, tag) for rank in ranks]
        for work in sends:
            work.wait()
        return found

    def _watch(self, operation: PendingOperation, lane: OperationLane, waited_s: float) -> None:
        """Ends an operation whose ranks will not come: they are gone, have given up, or are too late."""
        missing = lane.missing()
        gone = [rank for rank in missing if not self._processes[rank].is_alive()]
        if gone:
            lane.pump()  # what it did just before it ended counts
            gone = [rank for rank in lane.missing() if rank in gone]
        if operation.is_done:
            return
        if gone:
            self._give_up(LostRankError, operation.kind, f"{self._name(gone)} gone (process ended)")
        elif quitters := [rank for rank in missing if self._failures[rank]]:
            others = [rank for rank, process in enumerate(self._processes) if not process.is_alive()]
            cause = f" ({self._name(others)} gone)" if others else ""
            what = f"an operation failed on {self._name(quitters, verb=False)}{cause}"
            self._give_up(LostRankError if others else CommunicationError, operation.kind, what)
        elif waited_s > self._resources.timeout_s:
            who = self._name(missing, verb=False)
            self._give_up(LateRankError, operation.kind, f"{who} did not come within {self._resources.timeout_s:g} s")

    def _name(self, ranks: Sequence[int], *, verb: bool = True) -> str:
        names = ", ".join(str(self.ranks[rank]) for rank in ranks)
        return f"rank {names}" + " is" * verb if len(ranks) == 1 else f"ranks {names}" + " are" * verb

    def _head(self, kind: str) -> str:
        return f"rank {self.ranks[self.rank]}: {kind} in group {list(self.ranks)} failed"

    def _break(self, kind: str, error: BaseException) -> None:
        """Ends everything after an operation raised halfway: what the others read of it would be wrong."""
        made = CollectiveMismatchError if isinstance(error, CollectiveMismatchError) else CommunicationError
        self._give_up(made, kind, str(error) or type(error).__name__)

    def _give_up(self, made: type[CommunicationError], kind: str, what: str) -> None:
        self._broken = error = made(f"{self._head(kind)}: {what}")
        self._failures[self.rank] = 1
        lanes: list[OperationLane] = [self._collectives, *self._outboxes, *self._inboxes]
        for lane in lanes:
            lane.fail(error)


_Exchange = Callable[[Any], list[Any]]  # gives a value to all ranks of a group, and returns theirs


def _establish(
    exchange: _Exchange, rank: int, ranks: tuple[int, ...], resources: _Resources
) -> SharedMemoryCommunicator:
    """Makes a group and its segment. All ranks succeed, or all raise."""
    num_bytes = resources.layout(len(ranks)).num_bytes
    everyone: list[RankLocation] = exchange(RankLocation.here())
    for other, place in zip(ranks, everyone, strict=True):
        if place.host != everyone[0].host:
            what = f"ranks {ranks[0]} and {other} do not share a host: {everyone[0]} and {place}"
            rule = "shared memory joins processes of one machine that can see one another"
            raise CommunicationError(f"{what}\n  {rule}\n  use plain Gloo for these ranks, or split by host first")
    segment = _common_segment(exchange, rank, ranks, num_bytes)
    return SharedMemoryCommunicator(segment, rank, ranks, [place.process for place in everyone], resources)


def _common_segment(exchange: _Exchange, rank: int, ranks: tuple[int, ...], num_bytes: int) -> SharedSegment:
    """Makes a segment, has every rank map it, and takes its name away. All ranks succeed, or all raise."""
    segment: SharedSegment | None = None
    try:
        segment, problem = _attempt(lambda: SharedSegment.create(num_bytes)) if rank == 0 else (None, "")
        name, problem = exchange(("" if segment is None else segment.name, problem))[0]
        if rank and not problem:
            segment, problem = _attempt(lambda: SharedSegment.open(name, num_bytes))
        problems = exchange(problem)
    finally:
        if rank == 0 and segment is not None:
            segment.unlink()
    for other, found in zip(ranks, problems, strict=True):
        if found:
            raise CommunicationError(f"ranks {list(ranks)} cannot share memory; rank {other} says: {found}")
    assert segment is not None
    return segment


def _attempt(make: Callable[[], SharedSegment]) -> tuple[SharedSegment | None, str]:
    try:
        return make(), ""
    except (CommunicationError, OSError) as error:
        return None, str(error)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the elements in a row: a view where the tensor is one, else a copy."""
    if tensor.device.type != "cpu":
        raise UsageError(f"a tensor on {tensor.device} in a group that shares memory: its tensors live on the CPU")
    plain = tensor.detach() if tensor.requires_grad else tensor
    if not plain.is_contiguous() or plain.is_conj() or plain.is_neg():
        return plain.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    if plain.dim() == 1 and plain.stride(0) == 1:
        return plain
    return plain.as_strided((plain.numel(),), (1,))  # the view of a single element would keep its odd stride


def _flat_output(tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], object] | None]:
    """Returns the elements in a row, and what brings a result back to the tensor where that is a copy."""
    flat = _flat(tensor)
    if flat is tensor or (flat.data_ptr() == tensor.data_ptr() and tensor.is_contiguous()):
        return flat, None
    plain = tensor.detach()
    return flat, lambda: plain.copy_(flat.view(plain.shape))
