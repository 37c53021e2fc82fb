"""What an engine may ask of other ranks, and of the communicator through which it talks to them.

Every data verb is asynchronous and returns a ``Work``. The work owns its tensors until ``wait()``: the caller neither
reads nor writes them in between. One calling convention is one thing to simulate, trace, compress and time.

Bytes that each of N ranks sends for a tensor of B bytes, with the bandwidth-optimal algorithms:

    all_reduce      2 B (N-1)/N        reduce_scatter  B (N-1)/N   (B = the whole input)
    broadcast       B                  all_gather      B (N-1)/N   (B = the whole output)
    all_to_all      B (N-1)/N          send            B

Ranks are numbered within the group: ``comm.rank`` runs from 0 to ``comm.size - 1``, and so do ``source`` and ``to``.
All ranks of a group issue the same collectives in the same order.

A communicator declares what it can do (``takes_real_time``, ``clock``, ...): nobody looks at its type.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeAlias, get_args

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from paceline.clock import Clock, DeviceClock, Mark, seconds_between
from paceline.errors import UsageError
from paceline.plan.layout import Compression
from paceline.shards import FlatLayout

if TYPE_CHECKING:
    from paceline.comm.ledger.ledger import Ledger, TrainedParameters

ReduceOp = Literal["sum", "avg", "min", "max", "product"]
OPS: tuple[ReduceOp, ...] = get_args(ReduceOp)
Splits = Sequence[int] | None  # rows of dim 0 for each rank; None: as many for each


class Work(Protocol):
    """An operation in flight."""

    def wait(self) -> None:
        """Returns when the result may be used; on CUDA it orders streams and does not block the host."""


class Call(NamedTuple):
    """What a rank asks of its group: a verb, and what it was given. One thing to pass on, record, count and time."""

    kind: str
    output: torch.Tensor  # where the result goes
    tensor: torch.Tensor  # what this rank gives: the same one, where the result takes its place
    op: ReduceOp = "sum"
    peer: int = 0  # the source of a broadcast, or the other end of a message
    tag: int = 0
    splits: tuple[list[int], list[int]] | None = None  # of an all-to-all: rows of the output, and of the tensor

    @property
    def whole(self) -> torch.Tensor:
        """The tensor whose bytes count."""
        return self.output if self.kind == "all_gather" else self.tensor


class Communicator:
    """A group of ranks that talk. Engines know this class and no backend. The verbs refuse here what none can do."""

    rank: int  # this rank's number within the group
    size: int
    ranks: tuple[int, ...]  # the members by their rank in the world, in group order
    device: torch.device  # where this rank's tensors live
    device_kind: str  # the type of device that engines adapt to: that of the tensors, or the one a dry run imitates
    backend: str  # how bytes travel: ``nccl``, ``gloo``, ``shared_memory``, ``virtual``, or ``none`` in a world of one
    takes_real_time: bool = True  # whether a duration that a rank measures is its own: not so where ranks take turns
    clock: Clock | None = None  # this rank's virtual clock; None where its time is that of its device
    ledger: Ledger | None = None  # where every operation is written down for whoever looks for a hang, if anywhere
    trained: TrainedParameters | None = None  # whose updates are compared between ranks, where they are
    trace: Trace | None = None  # what counts operations, bytes and waits, if anything does

    def __init__(self, rank: int, ranks: tuple[int, ...], device: torch.device, *, backend: str) -> None:
        self.rank, self.ranks, self.size = rank, ranks, len(ranks)
        self.device, self.device_kind = device, device.type
        self.backend = backend

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0: the one that prints, and talks to the world."""
        return self.rank == 0

    def print(self, *values: object, **options: Any) -> None:
        """Prints on rank 0 alone, as ``print`` does; any rank may call it, nobody waits."""
        if self.is_main:
            print(*values, **{"flush": True} | options)

    def shared_buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Returns zeros that collectives use in place, or None on all ranks. All call it, with the same arguments."""
        del numel, dtype
        return None

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Work:
        """Replaces ``tensor`` by the reduction over all ranks, the same bits on each."""
        return self.issue(_checked(Call("all_reduce", tensor, tensor, op)))

    def reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor, op: ReduceOp = "sum") -> Work:
        """Puts this rank's slice of the reduction of ``tensor`` into ``output``, which may be that slice itself."""
        check_pieces("reduce_scatter", whole=tensor, piece=output, size=self.size)
        return self.issue(_checked(Call("reduce_scatter", output, tensor, op)))

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor) -> Work:
        """Fills ``output`` with every rank's ``tensor`` in rank order, which may be its own slice of ``output``."""
        check_pieces("all_gather", whole=output, piece=tensor, size=self.size)
        return self.issue(_checked(Call("all_gather", output, tensor)))

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> Work:
        """Replaces ``tensor`` by that of rank ``source``."""
        check_peer("broadcast from", source, self.size)
        return self.issue(_checked(Call("broadcast", tensor, tensor, "sum", source)))

    def all_to_all(
        self, output: torch.Tensor, tensor: torch.Tensor, output_splits: Splits = None, input_splits: Splits = None
    ) -> Work:
        """Sends the i-th piece of ``tensor`` to rank i, and puts that of rank i at place i. Splits: rows of dim 0."""
        splits = (_rows(output, output_splits, self.size), _rows(tensor, input_splits, self.size))
        return self.issue(_checked(Call("all_to_all", output, tensor, "sum", 0, 0, splits)))

    def send(self, tensor: torch.Tensor, to: int, tag: int = 0) -> Work:
        """Sends ``tensor``; matched with a receive of the same tag, in the order they were issued."""
        check_peer("send to", to, self.size)
        return self.issue(_checked(Call("send", tensor, tensor, "sum", to, tag)))

    def recv(self, tensor: torch.Tensor, source: int, tag: int = 0) -> Work:
        """Receives into ``tensor``."""
        check_peer("recv from", source, self.size)
        return self.issue(_checked(Call("recv", tensor, tensor, "sum", source, tag)))

    def barrier(self) -> None:
        """Returns when every rank has called it."""
        raise NotImplementedError

    def split(self, ranks: Sequence[int]) -> Communicator:
        """Makes the subgroup of ``ranks`` of this group, in their order. The members alone call it, with the same."""
        raise NotImplementedError

    def issue(self, call: Call) -> Work:
        """Starts what a verb asks for. A backend has a method for each: ``_all_reduce`` and so on."""
        work: Work = getattr(self, f"_{call.kind}")(call)
        return work


def _checked(call: Call) -> Call:
    if call.tensor.layout is not torch.strided:
        what = f"{call.kind} of a tensor with layout {call.tensor.layout}"
        rule = "ranks exchange dense tensors"
        raise UsageError(f"{what}\n  {rule}\n  call to_dense() first, or exchange its indices and values")
    if call.op not in OPS:
        raise UsageError(f"{call.kind} with op {call.op!r}: the ops are {', '.join(OPS)}")
    return call


def check_peer(kind: str, peer: int, size: int) -> None:
    """Raises UsageError unless ``peer`` is a rank of a group of ``size``."""
    if not 0 <= peer < size:
        raise UsageError(f"{kind} rank {peer} in a group of {size}: its ranks are 0 to {size - 1}")


def check_pieces(kind: str, *, whole: torch.Tensor, piece: torch.Tensor, size: int) -> None:
    """Raises UsageError unless ``whole`` holds one ``piece`` for each rank, of the same dtype."""
    if whole.numel() != piece.numel() * size:
        raise UsageError(
            f"{kind} on {size} ranks with {whole.numel()} elements in all and {piece.numel()} a rank: "
            f"the whole must be {size} times the piece"
        )
    if whole.dtype != piece.dtype:
        raise UsageError(f"{kind} between {whole.dtype} and {piece.dtype}: both tensors have the same dtype")


def _rows(tensor: torch.Tensor, splits: Splits, size: int) -> list[int]:
    """Returns the rows of ``tensor`` that belong to each rank; raises UsageError where they do not add up."""
    rows = tensor.shape[0]
    if splits is None and rows % size:
        raise UsageError(f"all_to_all of {rows} rows on {size} ranks: give splits, or rows that divide")
    result = list(splits) if splits is not None else [rows // size] * size
    if len(result) != size or sum(result) != rows or min(result) < 0:
        raise UsageError(f"all_to_all splits {result} do not make {rows} rows on {size} ranks")
    return result


def check_split(ranks: Sequence[int], rank: int, size: int) -> None:
    """Raises UsageError unless ``ranks`` are distinct ranks of a group of ``size``, with ``rank`` among them."""
    if rank not in ranks or len(set(ranks)) != len(ranks) or not all(0 <= r < size for r in ranks):
        what = f"split({list(ranks)}) on rank {rank} of {size}: give distinct ranks of this group, this one among them"
        raise UsageError(what)


def control_device(comm: Communicator) -> torch.device:
    """Returns the device of numbers that the host reads: the rank's own, or the CPU where that one holds no values."""
    return torch.device("cpu") if comm.device.type == "meta" else comm.device


def clock_of(comm: Communicator) -> Clock:
    """Returns the clock that a rank's time is read from: its virtual clock if it has one, else that of its device."""
    return DeviceClock(comm.device) if comm.clock is None else comm.clock


def available_backends() -> dict[str, str | None]:
    """Returns the backends that this torch was built with, and of NCCL the version, where there is a GPU."""
    if not dist.is_available():
        return {}
    found = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available(), "mpi": dist.is_mpi_available()}
    nccl: Any = torch.cuda.nccl  # not annotated
    version = ".".join(map(str, nccl.version())) if found["nccl"] and torch.cuda.is_available() else None
    return {name: version if name == "nccl" else None for name, is_there in found.items() if is_there}


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
        """Makes the reductions of an engine's buckets; ``replicas`` average, where these are not all that train."""

    def end_pass(self, shards: Communicator | None = None) -> None:
        """Ends a pass: every bucket was waited for. ``shards`` have the other parts of the gradient; all call it."""

    def abandon_pass(self) -> None:
        """Forgets a pass that was broken off, if one was."""

    def roll_back(self) -> None:
        """Forgets the last pass, ended or not: its gradients were dropped, and come again."""

    def keep_residuals(self, names: Sequence[str]) -> None:
        """Takes back what this pass sent of tensors that get no gradient, so that it is not lost."""


def unwatched() -> contextlib.AbstractContextManager[Any]:
    """Surrounds a collective, which differs from run to run: selective checkpointing compares the operators of two."""
    return _disable_current_modes() if torch._C._len_torch_dispatch_stack() else contextlib.nullcontext()


class WrappedCommunicator(Communicator):
    """Passes every call on to ``inner``. Subclasses add what they are for, in ``issue``."""

    def __init__(self, inner: Communicator) -> None:
        super().__init__(inner.rank, inner.ranks, inner.device, backend=inner.backend)
        self.inner = inner
        self.device_kind = inner.device_kind
        self.takes_real_time = inner.takes_real_time
        self.clock, self.ledger, self.trace = inner.clock, inner.ledger, inner.trace
        self.trained = inner.trained

    def shared_buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor | None:
        return self.inner.shared_buffer(numel, dtype)

    def issue(self, call: Call) -> Work:
        return self.inner.issue(call)

    def barrier(self) -> None:
        self.inner.barrier()


def check_reduction(kind: str, dtype: torch.dtype, op: ReduceOp) -> None:
    """Raises UsageError for a mean of whole numbers and for the smallest or largest of complex ones."""
    if op == "avg" and not (dtype.is_floating_point or dtype.is_complex):
        what = f"{kind}: avg of {dtype}: a mean of whole numbers is not one"
        raise UsageError(f"{what}\n  take 'sum' in place of 'avg', or convert to floats first")
    if op in ("min", "max") and dtype.is_complex:
        raise UsageError(f"{kind}: {op} of {dtype}: complex numbers have no order")


NARROW = (torch.float16, torch.bfloat16)  # added up in float32, so that a sum is rounded once


def reduce_pair(one: torch.Tensor, other: torch.Tensor, op: ReduceOp, out: torch.Tensor) -> None:
    """Puts the sum of two (also for a mean, which is divided at the end), or what else the op says, into ``out``."""
    _PAIRS.get(op, torch.add)(one, other, out=out)


_PAIRS: dict[str, Callable[..., Any]] = {"min": torch.minimum, "max": torch.maximum, "product": torch.mul}


def reduce_in_order(
    pieces: Sequence[torch.Tensor], op: ReduceOp, output: torch.Tensor, scratch: Callable[[torch.dtype], torch.Tensor]
) -> None:
    """Reduces pieces in rank order into ``output``, which may be one of them; ``scratch`` gives memory for sums."""
    if output.dtype in NARROW:
        total = scratch(torch.float32).copy_(pieces[0])
        for piece in pieces[1:]:
            reduce_pair(total, piece, op, total)
        if op == "avg":
            total.div_(len(pieces))
        output.copy_(total)
        return
    total = pieces[0]
    for piece in pieces[1:-1]:
        sums = scratch(output.dtype)
        reduce_pair(total, piece, op, sums)
        total = sums
    reduce_pair(total, pieces[-1], op, output)
    if op == "avg":
        output.div_(len(pieces))


_MOST_ENDED = 4096

Issued: TypeAlias = tuple[str, int, tuple[int, ...], float, Mark | float]
"""An operation on its way: kind, bytes, group, and when it was issued, as the host and as the device has it."""


@dataclass(frozen=True, slots=True)
class TracedOperation:
    """One operation of one rank. ``end_s`` is when this rank's wait for it returned."""

    kind: str
    num_bytes: int
    group: tuple[int, ...]
    start_s: float
    end_s: float


@dataclass(slots=True, kw_only=True)
class GroupTotal:
    """The operations of one kind in one group that have ended: how many, their bytes, their seconds added up."""

    kind: str
    group: tuple[int, ...]
    calls: int = 0
    num_bytes: int = 0
    seconds: float = 0.0


class Trace:
    """What a rank's communicators did: totals always, single operations on request."""

    def __init__(self, device: torch.device, *, keep: bool = False, clock: Clock | None = None) -> None:
        """Reads the time of ``clock``; None: of the device."""
        self.keep, self.clock = keep, clock
        self.operations: list[TracedOperation] = []
        self.num_operations: Counter[str] = Counter()
        self.num_bytes: Counter[str] = Counter()
        self._clock = DeviceClock(device) if clock is None else clock
        self._is_waiting = False
        self._is_cuda = device.type == "cuda"
        self.times_calls = device.type == "cpu"  # elsewhere they take time of the host, and none of the device
        self.waits: list[tuple[Mark, Mark]] = []  # always the same list: a meter looks at its length
        self.adds_up = False  # by kind and group, for whoever takes the totals
        self._totals: dict[tuple[str, tuple[int, ...]], GroupTotal] = {}
        self._ended: list[tuple[Issued, Mark | float]] = []  # not in the totals yet

    def count(self, kind: str, num_bytes: int) -> None:
        self.num_operations[kind] += 1
        self.num_bytes[kind] += num_bytes

    def begin_wait(self) -> Mark | None:
        """Marks where the compute begins to wait; None where it waits already, or a graph is recorded: none is read."""
        if self._is_waiting or (self._is_cuda and torch.cuda.is_current_stream_capturing()):
            return None
        self._is_waiting = True
        return self._clock.mark()

    def end_wait(self, start: Mark | None) -> None:
        if start is not None:
            self._is_waiting = False
            self.waits.append((start, self._clock.mark()))

    def take_waits(self) -> list[tuple[Mark, Mark]]:
        """Returns the waits since the last call; their times are read when the device is past them."""
        waits = self.waits[:]
        self.waits.clear()
        return waits

    def issue(self, kind: str, num_bytes: int, group: tuple[int, ...]) -> Issued:
        start_s = time.perf_counter()
        takes_mark = self.adds_up and len(group) > 1 and not (self.times_calls and self.clock is None)
        return kind, num_bytes, group, start_s, self._clock.take() if takes_mark else start_s

    def take_totals(self, *, wait: bool = False) -> list[GroupTotal]:
        """Returns what ended since the last call and the device has passed; with ``wait``, all that ended."""
        self._add_up(wait=wait)
        totals, self._totals = self._totals, {}
        return list(totals.values())

    def _add_up(self, *, wait: bool) -> None:
        ended, self._ended = self._ended, []
        for place, ((kind, num_bytes, group, _, start), end) in enumerate(ended):
            if not (wait or isinstance(end, float) or end.is_past()):
                self._ended = ended[place:]
                break
            total = self._totals.get((kind, group))
            if total is None:
                total = self._totals[kind, group] = GroupTotal(kind=kind, group=group)
            total.calls += 1
            total.num_bytes += num_bytes
            total.seconds += seconds_between(start, end)

    def finish(self, issued: Issued | None) -> None:
        if issued is None:
            return
        if self.adds_up and len(issued[2]) > 1:
            self._ended.append((issued, self._clock.take()))
            if len(self._ended) >= _MOST_ENDED:  # nobody has asked for long
                self._add_up(wait=False)
        if self.keep:
            self.operations.append(TracedOperation(*issued[:4], time.perf_counter()))
