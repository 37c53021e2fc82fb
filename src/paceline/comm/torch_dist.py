"""Ranks as processes: NCCL and Gloo through ``torch.distributed``, or shared memory on one host.

On CUDA, ``wait()`` makes the current stream wait and leaves the host free; on Gloo it blocks the caller.

Over Gloo, some collectives are messages between all pairs of ranks:

    reduce-scatter   every rank sends each other one the slice that it owns, and adds up what it gets, in rank order
    all-gather       every rank sends its piece to each other one, straight to its place
    all-reduce       of two ranks, if small: each sends the other all of it; one way instead of a ring's two

For a tensor of B bytes a rank sends B (N-1)/N bytes in N-1 messages. Gloo itself has no reduce-scatter: torch makes one
from a copy and an all-reduce, which moves twice as much; and its all-gather copies everything once more.
"""

from __future__ import annotations

import datetime
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist

from paceline.comm.base import OPS, Call, Communicator, ReduceOp, Work, check_split, reduce_in_order
from paceline.comm.meeting import Meeting, threads_that_do_not_preempt, wait_until_all_joined
from paceline.comm.meeting import disconnect as disconnect
from paceline.comm.shared.communicator import SharedMemoryCommunicator, share_memory
from paceline.comm.shared.segment import FOLDER, no_folder
from paceline.comm.solo import SoloCommunicator
from paceline.errors import CommunicationError, LateRankError, LostRankError, UsageError, is_connection_lost
from paceline.shards import round_up

# Far from the tags of users: a reduce-scatter and a gather of two ranks are matched by tag, then by order.
_SLICE_TAG = 2**30
_PIECE_TAG = 2**30 + 1
_WHOLE_TAG = 2**30 + 2
_WORD = 16  # bytes: memory of any dtype is made of whole ones
_C10D: Any = dist.distributed_c10d  # private; what is used of it is the same in torch 2.10 and 2.15


@dataclass(slots=True, eq=False)
class ExchangeWork:
    receives: list[Any]
    sends: list[Any]
    timeout: datetime.timedelta
    combine: Callable[[], None] | None = None

    def wait(self) -> None:
        for work in self.receives:
            work.wait(self.timeout)
        if self.combine is not None:
            self.combine()
        for work in self.sends:
            work.wait(self.timeout)
        self.receives, self.sends, self.combine = [], [], None


class GlooExchanges:
    """The collectives of one rank of a Gloo group, on flat tensors.

    The two largest pieces of memory for what arrives stay: to touch new memory costs as much as to fill it.
    """

    def __init__(self, group: Any, rank: int, size: int, timeout_s: float) -> None:
        self._group, self._rank, self._size = group, rank, size
        self._others = [(rank + step) % size for step in range(1, size)]  # its neighbour first: not all to the same one
        self._timeout = datetime.timedelta(seconds=timeout_s)
        self._free: list[torch.Tensor] = []

    def _take_memory(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        num_bytes = numel * dtype.itemsize
        for piece in self._free:
            if piece.numel() >= num_bytes:
                self._free.remove(piece)
                return piece.view(dtype)
        return torch.empty(round_up(num_bytes, _WORD), dtype=torch.uint8).view(dtype)

    def reduce_scatter(self, output: torch.Tensor, whole: torch.Tensor, op: ReduceOp) -> ExchangeWork:
        length = output.numel()
        pieces = list(whole.view(self._size, length))
        memory = self._take_memory((self._size - 1) * length, whole.dtype)
        slices = list(pieces)
        for place, other in enumerate(self._others):
            slices[other] = memory[place * length : (place + 1) * length]
        receives = [self._group.recv([slices[other]], other, _SLICE_TAG) for other in self._others]
        sends = [self._group.send([pieces[other]], other, _SLICE_TAG) for other in self._others]

        def combine() -> None:
            self._reduce(slices, output, op)
            self._free = sorted([*self._free, memory.view(torch.uint8)], key=lambda each: -each.numel())[:2]

        return ExchangeWork(receives, sends, self._timeout, combine)

    def all_gather(self, whole: torch.Tensor, piece: torch.Tensor) -> ExchangeWork:
        places = list(whole.view(self._size, piece.numel()))
        if places[self._rank].data_ptr() != piece.data_ptr():
            places[self._rank].copy_(piece)
        receives = [self._group.recv([places[other]], other, _PIECE_TAG) for other in self._others]
        sends = [self._group.send([piece], other, _PIECE_TAG) for other in self._others]
        return ExchangeWork(receives, sends, self._timeout)

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> ExchangeWork:
        arriving, (other,) = torch.empty_like(tensor), self._others
        receive = self._group.recv([arriving], other, _WHOLE_TAG)
        send = self._group.send([tensor], other, _WHOLE_TAG)

        def combine() -> None:
            send.wait(self._timeout)  # what leaves is overwritten
            self._reduce([tensor, arriving] if self._rank == 0 else [arriving, tensor], tensor, op)

        return ExchangeWork([receive], [], self._timeout, combine)

    def _reduce(self, slices: Sequence[torch.Tensor], output: torch.Tensor, op: ReduceOp) -> None:
        """Reduces the slices in rank order into ``output``, which may be this rank's own, in the memory of another."""
        free = slices[self._rank == 0]
        reduce_in_order(slices, op, output, lambda to: free if to == free.dtype else torch.empty_like(free, dtype=to))


_OPS = {op: getattr(dist.ReduceOp, op.upper()) for op in OPS}
# Named all_gather_single and reduce_scatter_single since torch 2.13; the older names warn there.
_ALL_GATHER: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_REDUCE_SCATTER: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
_SMALL_BYTES = 4096  # up to here two messages, one each way, cost less than a ring's four

Backend = Literal["auto", "nccl", "gloo", "shared_memory"]
Group: TypeAlias = Communicator | dist.ProcessGroup


def connect(
    backend: Backend = "auto", *, device: str | torch.device | None = None, timeout_s: float = 300.0
) -> Communicator:
    """Joins the ranks that a launcher such as torchrun started, or makes a world of one where none did.

    Returns on no rank before all have joined. ``auto`` takes NCCL where this rank has a GPU to itself; else shared
    memory, if all ranks are on one host and there is room for it, or Gloo. Raises CommunicationError when the
    launcher's environment is incomplete, the others do not come within ``timeout_s``, or the ranks cannot share the
    memory that was asked for.
    """
    where = _device(device, backend)
    if not {"RANK", "WORLD_SIZE"} & os.environ.keys() and not dist.is_initialized():
        return SoloCommunicator(where)
    if dist.is_initialized():
        return _join(backend, where, timeout_s)
    meeting = Meeting(timeout_s)
    meeting.initialize("nccl" if backend in ("auto", "nccl") and where.type == "cuda" else "gloo")
    comm = _join(backend, where, timeout_s)
    meeting.wait_until_all_joined()
    return comm


def is_connected() -> bool:
    """Says whether this process is in a process group already: ours, or one that somebody else made."""
    return dist.is_initialized()


def launched_rank() -> int:
    """Returns the number of this process among those that a launcher started, connected or not; 0 where none did."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def launched_ranks() -> int:
    """Returns how many processes a launcher started, connected or not; 1 where none did."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def _join(backend: Backend, where: torch.device, timeout_s: float) -> Communicator:
    group = dist.group.WORLD
    assert group is not None
    if dist.get_world_size() == 1:
        return SoloCommunicator(where)
    comm = TorchCommunicator(group, where, timeout_s=timeout_s)
    if backend == "shared_memory":
        return SharedMemoryCommunicator.join(comm, timeout_s=timeout_s)
    if backend != "auto" or dist.get_backend(group) != "gloo":
        return comm
    try:
        shared = share_memory(comm, timeout_s=timeout_s)
        why = "" if shared is not comm or FOLDER.is_dir() else no_folder()
    except CommunicationError as error:  # too little of it, on all ranks alike: Gloo does as well
        shared, why = comm, str(error)
    comm.why_gloo = why.partition("\n")[0]
    if why and comm.rank == 0:
        warnings.warn(f"ranks talk through Gloo, which is slower than shared memory: {why}", stacklevel=3)
    return shared


def communicator_of(group: Group | None, device: torch.device, *, timeout_s: float = 300.0) -> Communicator:
    """Returns a torch process group, or all ranks, as a communicator. Raises UsageError outside it, or for no group."""
    if is_outside(group):
        what = "this rank is not a member of the group"
        raise UsageError(f"{what}\n  only members call a collective\n  leave it out here")
    if group is None:
        if not dist.is_initialized():
            return connect(device=device)
        group = dist.group.WORLD
        assert group is not None
    if not isinstance(group, dist.ProcessGroup):
        if not isinstance(group, Communicator):
            raise UsageError(
                f"a {type(group).__name__} is no group\n"
                "  give a communicator, as paceline.connect() and its split() make, or a torch process group"
            )
        return group
    if dist.get_world_size(group) == 1:
        return SoloCommunicator(device, world_rank=dist.get_rank())
    return TorchCommunicator(group, device, timeout_s=timeout_s)


def is_outside(group: object) -> bool:
    """Says whether a group is what torch gives to ranks that are not in the group that they made."""
    return group is not None and group is dist.GroupMember.NON_GROUP_MEMBER


def _device(device: str | torch.device | None, backend: str) -> torch.device:
    if device is None:
        device = "cuda" if backend in ("auto", "nccl") and torch.cuda.is_available() else "cpu"
    where = torch.device(device)
    if str(where) == "cuda":
        where = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    if where.type == "cuda":
        if where.index is not None and where.index >= torch.cuda.device_count():
            what = f"local rank {where.index} has no GPU: this machine has {torch.cuda.device_count()}"
            rule = "every rank of a node needs a GPU of its own"
            raise CommunicationError(f"{what}\n  {rule}\n  start fewer ranks, or ask for device='cpu'")
        torch.cuda.set_device(where)
    if backend == "shared_memory" and where.type != "cpu":
        raise CommunicationError(f"backend 'shared_memory' joins ranks on CPUs, not on {where}\n  use 'auto' or 'nccl'")
    if backend == "nccl" and where.type != "cuda":
        raise CommunicationError("backend 'nccl' needs a CUDA device on every rank\n  use backend 'gloo' on CPUs")
    return where


class _TorchWork:
    """A torch.distributed work that keeps its tensors alive and turns backend errors into ours."""

    __slots__ = ("_comm", "_kind", "_tensors", "_work")

    def __init__(self, work: Any, comm: TorchCommunicator, kind: str, *tensors: torch.Tensor) -> None:
        self._work, self._comm, self._kind, self._tensors = work, comm, kind, tensors

    def wait(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            raise self._comm._explain(self._kind, error) from error
        self._tensors = ()


class TorchCommunicator(Communicator):
    def __init__(self, group: dist.ProcessGroup, device: torch.device, *, timeout_s: float) -> None:
        backend = "nccl" if device.type == "cuda" else "gloo"
        super().__init__(dist.get_rank(group), tuple(dist.get_process_group_ranks(group)), device, backend=backend)
        self._group = group
        self._timeout_s = timeout_s
        self.why_gloo = ""  # where shared memory would have been faster
        sends_pairwise = dist.get_backend(group) == "gloo" and device.type == "cpu"
        self._exchanges = GlooExchanges(group, self.rank, self.size, timeout_s) if sends_pairwise else None
        self._is_nccl = dist.get_backend(group) == "nccl"
        self._pairs: dict[int, dist.ProcessGroup] = {}  # of this rank and another one, over NCCL
        self._all_reduce_options = {name: _all_reduce_options(op) for name, op in _OPS.items()}

    def _all_reduce(self, call: Call) -> Work:
        tensor, op = call.tensor, call.op
        is_small = 0 < tensor.nbytes <= _SMALL_BYTES and tensor.is_contiguous()
        has_op = tensor.is_floating_point() or op != "avg"  # a mean of integers is torch's to refuse
        if self._exchanges is not None and self.size == 2 and is_small and has_op:
            return self._attempt("all_reduce", self._exchanges.all_reduce, _flat(tensor), op)
        # The group's own method: the module-level function costs 40 us more, on every bucket of every step.
        try:
            work = self._group.allreduce([tensor.detach()], self._all_reduce_options[op])
        except RuntimeError as error:
            raise self._explain("all_reduce", error) from error
        return _TorchWork(work, self, "all_reduce", tensor)

    def _reduce_scatter(self, call: Call) -> Work:
        output, tensor = _flat(call.output), _flat(call.tensor)
        if self._exchanges is not None and output.numel() and output.is_floating_point():
            return self._attempt("reduce_scatter", self._exchanges.reduce_scatter, output, tensor, call.op)
        return self._start("reduce_scatter", _REDUCE_SCATTER, output, tensor, op=_OPS[call.op])

    def _all_gather(self, call: Call) -> Work:
        output, tensor = _flat(call.output), _flat(call.tensor)
        if self._exchanges is not None and output.numel():
            return self._attempt("all_gather", self._exchanges.all_gather, output, tensor)
        return self._start("all_gather", _ALL_GATHER, output, tensor)

    def _broadcast(self, call: Call) -> Work:
        return self._start("broadcast", dist.broadcast, call.tensor.detach(), group_src=call.peer)

    def _all_to_all(self, call: Call) -> Work:
        assert call.splits is not None
        theirs, ours = call.splits
        output, tensor = call.output.detach(), call.tensor.detach()
        sizes = {"output_split_sizes": theirs, "input_split_sizes": ours}
        return self._start("all_to_all", dist.all_to_all_single, output, tensor, **sizes)

    def _message(self, call: Call) -> Work:
        """Sends or receives. NCCL has no tags: there, order alone matches."""
        is_send, tensor = call.kind == "send", call.tensor.detach()
        kind = f"{'send to' if is_send else 'recv from'} rank {self.ranks[call.peer]}"
        verb = dist.isend if is_send else dist.irecv
        if self._is_nccl:
            return self._attempt(kind, self._nccl_message, verb, tensor, call.peer)
        other = {"group_dst" if is_send else "group_src": call.peer}
        return self._attempt(kind, verb, tensor, group=self._group, tag=call.tag, **other)

    _send = _recv = _message

    def _nccl_message(self, verb: Any, tensor: torch.Tensor, other: int) -> Any:
        """Sends or receives: each pair of ranks has a group of its own, and each message is a batch of one.

        A communicator of NCCL has one stream, on which a message waits for those before it, whoever they are for: ranks
        that all send to their neighbour first would wait for one another. Outside a batch torch makes a communicator
        for each pair by itself, with a warning.
        """
        group, peer = self._group, other
        # One that is connected as a whole has no groups of pairs: they would need all ranks of the world.
        if getattr(group, "bound_device_id", None) is None:
            if other not in self._pairs:  # both find it under one name, whoever needs it first
                places = sorted({self.rank, other})
                name = f"messages {places} of {group.group_name}"
                known = next((each for each, its_name in _C10D._world.pg_names.items() if its_name == name), None)
                members = [self.ranks[place] for place in places]
                self._pairs[other] = known or _make_group(name, members, self._timeout_s)
            group, peer = self._pairs[other], int(self.rank < other)
        (work,) = dist.batch_isend_irecv([dist.P2POp(verb, tensor, group=group, group_peer=peer)])
        return work

    def barrier(self) -> None:
        where = {"device_ids": [self.device.index]} if self.device.type == "cuda" else {}
        self._start("barrier", dist.barrier, **where).wait()

    def split(self, ranks: Sequence[int]) -> Communicator:
        check_split(ranks, self.rank, self.size)
        members = [self.ranks[r] for r in ranks]
        if len(members) == 1:
            return SoloCommunicator(self.device, world_rank=members[0])
        # ``dist.new_group`` sorts the ranks, and names a group that only its members make after the number of groups
        # that the process has made so far: members that differ in it would wait in vain. So it is named here, after its
        # members and how many groups these have already.
        stem = f"paceline {members} "
        number = sum(each.startswith(stem) for each in _C10D._world.pg_names.values())
        try:
            group = _make_group(f"{stem}{number}", members, self._timeout_s)
        except RuntimeError as error:
            raise self._explain(f"split({list(ranks)})", error) from error
        return TorchCommunicator(group, self.device, timeout_s=self._timeout_s)

    def _start(self, kind: str, verb: Any, *tensors: torch.Tensor, **options: Any) -> Work:
        return self._attempt(kind, partial(verb, group=self._group, async_op=True), *tensors, **options)

    def _attempt(self, kind: str, verb: Any, *arguments: Any, **options: Any) -> Work:
        try:
            work = verb(*arguments, **options)
        except RuntimeError as error:
            raise self._explain(kind, error) from error
        return _TorchWork(work, self, kind, *(each for each in arguments if isinstance(each, torch.Tensor)))

    def _explain(self, kind: str, error: Exception) -> CommunicationError:
        text = str(error)
        first = text.splitlines()[0] if text else type(error).__name__
        head = f"rank {self.ranks[self.rank]}: {kind} in group {list(self.ranks)} failed"
        if is_connection_lost(error):
            return LostRankError(f"{head}: another rank is gone (its connection closed)\n  {first}")
        if "timed out" in text.lower() or "timeout" in text.lower():
            return LateRankError(f"{head}: another rank did not come within {self._timeout_s:g} s\n  {first}")
        return CommunicationError(f"{head}\n  {first}")


def _make_group(name: str, members: list[int], timeout_s: float) -> dist.ProcessGroup:
    """Makes the group of ``members``, in that order, who alone call this. Over Gloo they go on together."""
    store, timeout = _C10D._get_default_store(), datetime.timedelta(seconds=timeout_s)
    place, backend = members.index(dist.get_rank()), dist.Backend(dist.get_backend())
    group: dist.ProcessGroup
    with threads_that_do_not_preempt():
        group, _ = _C10D._new_process_group_helper(len(members), place, members, backend, store, name, timeout=timeout)
    _C10D._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(members)}
    if dist.get_backend() == "gloo":  # NCCL connects when the group is first used
        wait_until_all_joined(_C10D.PrefixStore(name, store), f"{name}/", len(members), timeout)
    return group


def _all_reduce_options(op: Any) -> Any:
    options = dist.AllreduceOptions()
    options.reduceOp = op
    options.asyncOp = True  # on CUDA, use the backend's own stream
    return options


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(-1)
