"""One rank of a world of any size, alone: what it issues is recorded, and nothing moves.

Data is on the meta device: it has shapes and no values, and a collective leaves it as it is. Numbers that the host
reads (``control_device``) are real, and are what they would be if all ranks were alike:

    sum    size x own          avg, min, max, broadcast    own          all_gather    size copies of own

Ranks of a pipeline are not alike: a stage learns from the one before what it will get. So the ranks of one ``DryWorld``
are run one after another, first stages first, and control messages and broadcasts of earlier ranks reach later ones.
Where no earlier rank has sent a message (a pipeline whose last stage feeds a second chunk of the first rank), this
rank's own last message of the same shape takes its place.

    world = DryWorld(size=4096)
    comm = world.rank(7)                  every operation of it, and of its subgroups, is in comm.journal

With algorithms of our own, what is recorded of an operation is its first round, which travels while the compute goes
on, when it is issued; and all others, which the compute waits for, when a ``wait`` carries them out. Each has its share
of the rounds and of the messages. What the operation takes is a matter of the formulas in ``cluster/costs.py``:
messages of one rank do not tell how long a tree of many is.
"""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeAlias

import torch

from paceline.cluster.costs import Algorithm
from paceline.comm.algorithms.communicator import AlgorithmCommunicator
from paceline.comm.algorithms.rounds import Round
from paceline.comm.base import DONE, Communicator, ReduceOp, Splits, Work
from paceline.comm.group import (
    GroupMember,
    WrappedCommunicator,
    all_to_all_splits,
    check_peer,
    check_pieces,
    check_split,
)
from paceline.errors import UsageError
from paceline.predict.replay.events import Issue

META = torch.device("meta")
Messages: TypeAlias = tuple[tuple[str, int, int], ...]  # of this rank: kind, number, bytes


class Journal(Protocol):
    """Records what a rank issues, and when it waits."""

    def issue(self, operation: Issue) -> None:
        """Records that an operation starts."""

    def wait(self, number: int) -> None:
        """Records that what is computed from here on needs the result of an operation."""


@dataclass(slots=True)
class KeptJournal:
    """Keeps every operation and every wait."""

    operations: list[Issue] = field(default_factory=list)
    waits: list[int] = field(default_factory=list)

    def issue(self, operation: Issue) -> None:
        self.operations.append(operation)

    def wait(self, number: int) -> None:
        self.waits.append(number)


class DryWorld:
    """Some ranks of a world, run one after another, and the messages of those that were run."""

    def __init__(self, size: int, device_kind: str = "cuda") -> None:
        """Takes the type of device to imitate: engines do some things differently on a CPU."""
        if size < 1:
            raise UsageError(f"a world of {size} ranks\n  it has at least one")
        self.size = size
        self.device_kind = device_kind
        self.mail: dict[tuple[int, int, int], deque[torch.Tensor]] = {}  # by sender, receiver and tag
        self.board: dict[tuple[tuple[int, ...], int], torch.Tensor] = {}  # broadcasts, by group and number

    def rank(self, rank: int, journal: Journal | None = None) -> DryCommunicator:
        check_peer("a dry run of", rank, self.size)
        own = _DryRank(world=self, number=rank, journal=KeptJournal() if journal is None else journal)
        return DryCommunicator(own, tuple(range(self.size)), "world")


@dataclass(slots=True, kw_only=True)
class _DryRank:
    """What all groups of one rank share."""

    world: DryWorld
    number: int
    journal: Journal
    num_issued: int = 0
    num_groups: int = 0
    num_broadcasts: Counter[tuple[int, ...]] = field(default_factory=Counter)
    sent: list[torch.Tensor] = field(default_factory=list)  # control messages of this rank
    is_recording: bool = True


@dataclass(slots=True, eq=False)
class _DryWork:
    """An operation whose first wait is recorded."""

    journal: Journal | None
    number: int

    def wait(self) -> None:
        if self.journal is not None:
            self.journal.wait(self.number)
            self.journal = None


class DryCommunicator(GroupMember):
    """One rank's handle on a group of a world of which nobody else is there."""

    takes_real_time = False

    def __init__(self, own: _DryRank, ranks: tuple[int, ...], lane: str) -> None:
        super().__init__(ranks.index(own.number), ranks, META, backend="virtual")
        self.device_kind = own.world.device_kind
        self.journal = own.journal  # where this rank's operations are recorded
        self._own = own
        self._lane = lane

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Work:
        """Records an all-reduce of the tensor's bytes; a real tensor becomes what equal ranks would make of it."""
        if not tensor.is_meta and op == "sum":
            tensor.detach().mul_(self.size)
        return self.record("all_reduce", tensor.nbytes)

    def reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor, op: ReduceOp = "sum") -> Work:
        check_pieces("reduce_scatter", whole=tensor, piece=output, size=self.size)
        if not tensor.is_meta:
            piece = tensor.detach().reshape(self.size, -1)[self.rank].clone()
            output.detach().view(-1).copy_(piece * self.size if op == "sum" else piece)
        return self.record("reduce_scatter", tensor.nbytes)

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor) -> Work:
        check_pieces("all_gather", whole=output, piece=tensor, size=self.size)
        if not output.is_meta:
            output.detach().view(self.size, -1).copy_(tensor.detach().reshape(1, -1).clone().expand(self.size, -1))
        return self.record("all_gather", output.nbytes)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> Work:
        """Records a broadcast; a real tensor becomes what the source has sent, if it was run before."""
        check_peer("broadcast from", source, self.size)
        if not tensor.is_meta:
            counts, board = self._own.num_broadcasts, self._own.world.board
            key = (self.ranks, counts[self.ranks])
            counts[self.ranks] += 1
            if source == self.rank:
                board[key] = tensor.detach().clone()
            elif key in board and board[key].shape == tensor.shape:
                tensor.detach().copy_(board[key])
        return self.record("broadcast", tensor.nbytes)

    def all_to_all(
        self, output: torch.Tensor, tensor: torch.Tensor, output_splits: Splits = None, input_splits: Splits = None
    ) -> Work:
        """Records an all-to-all of this rank's input; real pieces are all this rank's own."""
        theirs = all_to_all_splits(output, output_splits, self.size)
        ours = all_to_all_splits(tensor, input_splits, self.size)
        if not tensor.is_meta:
            mine = torch.split(tensor.detach(), ours)[self.rank].clone()
            for piece, rows in zip(torch.split(output.detach(), theirs), theirs, strict=True):
                piece.copy_(mine[:rows])
        return self.record("all_to_all", tensor.nbytes)

    def send(self, tensor: torch.Tensor, to: int, tag: int = 0) -> Work:
        """Records a message; a real one is kept for the rank that receives it."""
        check_peer("send to", to, self.size)
        if not tensor.is_meta:
            kept = tensor.detach().clone()
            self._own.sent.append(kept)
            key = (self._own.number, self.ranks[to], tag)
            self._own.world.mail.setdefault(key, deque()).append(kept)
        return self._record_message("send", tensor, self._own.number, self.ranks[to], tag)

    def recv(self, tensor: torch.Tensor, source: int, tag: int = 0) -> Work:
        """Records a message; a real tensor becomes what was sent to this rank."""
        check_peer("recv from", source, self.size)
        if not tensor.is_meta:
            tensor.detach().copy_(self._message(tensor, source, tag))
        return self._record_message("recv", tensor, self.ranks[source], self._own.number, tag)

    def barrier(self) -> None:
        self.record("barrier", 0).wait()

    def split(self, ranks: Sequence[int]) -> DryCommunicator:
        check_split(ranks, self.rank, self.size)
        self._own.num_groups += 1
        return DryCommunicator(self._own, tuple(self.ranks[r] for r in ranks), f"group {self._own.num_groups}")

    def record(
        self, kind: str, num_bytes: int, *, algorithm: str = "", share: float = 1.0, messages: Messages = ()
    ) -> Work:
        """Records a collective of this group; for what an ``algorithm`` makes of it see ``Issue``."""
        sent = {"algorithm": algorithm, "share": share, "messages": messages}
        return self._record(kind=kind, num_bytes=num_bytes, ranks=self.ranks, lane=self._lane, **sent)

    @contextlib.contextmanager
    def unrecorded(self) -> Iterator[None]:
        """Lets operations in here give the host its numbers without being recorded."""
        before, self._own.is_recording = self._own.is_recording, False
        try:
            yield
        finally:
            self._own.is_recording = before

    def _record_message(self, kind: str, tensor: torch.Tensor, sender: int, receiver: int, tag: int) -> Work:
        """Records a message, on a lane of its pair: messages of one pair do not wait for those of another."""
        lane, ranks = f"{sender} to {receiver}", (sender, receiver)
        return self._record(kind=kind, num_bytes=tensor.nbytes, ranks=ranks, lane=lane, tag=tag)

    def _record(self, **operation: Any) -> Work:
        own = self._own
        if not own.is_recording:
            return DONE
        own.journal.issue(Issue(number=own.num_issued, **operation))
        own.num_issued += 1
        return _DryWork(own.journal, own.num_issued - 1)

    def _message(self, tensor: torch.Tensor, source: int, tag: int) -> torch.Tensor:
        own, sender = self._own, self.ranks[source]
        waiting = own.world.mail.get((sender, own.number, tag))
        if waiting:
            return waiting.popleft()
        for sent in reversed(own.sent):
            if sent.shape == tensor.shape and sent.dtype == tensor.dtype:
                return sent
        raise UsageError(
            f"rank {own.number} of a dry run waits for what rank {sender} tells it, and that was not run before\n"
            "  a stage of a pipeline learns the shapes of its inputs from the one before\n"
            "  run the ranks of the first stages first"
        )


class DryAlgorithmCommunicator(AlgorithmCommunicator):
    """Records what an ``AlgorithmCommunicator`` would send for collectives of one rank."""

    inner: DryCommunicator

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Work:
        self._set_values(self.inner.all_reduce, tensor, op)
        return super().all_reduce(_shape(tensor), op)

    def reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor, op: ReduceOp = "sum") -> Work:
        self._set_values(self.inner.reduce_scatter, output, tensor, op)
        return super().reduce_scatter(_shape(output), _shape(tensor), op)

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor) -> Work:
        self._set_values(self.inner.all_gather, output, tensor)
        return super().all_gather(_shape(output), _shape(tensor))

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> Work:
        self._set_values(self.inner.broadcast, tensor, source)
        return super().broadcast(_shape(tensor), source)

    def split(self, ranks: Sequence[int]) -> DryAlgorithmCommunicator:
        inner, topology = self.inner.split(ranks), self.topology.restrict(ranks)
        return DryAlgorithmCommunicator(inner, self.algorithm, topology, in_flight=self._in_flight, table=self._table)

    def _set_values(self, verb: Callable[..., Work], tensor: torch.Tensor, *arguments: object) -> None:
        """Gives tensors that the host reads the values that ``verb`` of the dry communicator makes up."""
        if not tensor.is_meta:
            with self.inner.unrecorded():
                verb(tensor, *arguments)

    def _messages(
        self, kind: str, algorithm: Algorithm, flat: torch.Tensor, lanes: Sequence[list[Round]]
    ) -> Communicator:
        rounds = max(len(lane) for lane in lanes)

        def record(share: float, part: slice) -> Work:
            messages = _count_messages([lane[part] for lane in lanes], flat.element_size())
            return self.inner.record(kind, flat.nbytes, algorithm=algorithm, share=share, messages=messages)

        rest = partial(record, 1 - 1 / rounds, slice(1, None)) if rounds > 1 else None
        return _DryMessages(self.inner, record(1 / rounds, slice(1)), rest)


class _DryMessages(WrappedCommunicator):
    """Takes the messages of one operation. The first wait for one of them records all rounds that are left."""

    inner: DryCommunicator

    def __init__(self, inner: DryCommunicator, begun: Work, record_rest: Callable[[], Work] | None) -> None:
        super().__init__(inner)
        self.device = torch.device("cpu" if inner.device_kind == "cpu" else "meta")  # receives are posted as there
        self._begun = begun
        self._record_rest = record_rest

    def send(self, tensor: torch.Tensor, to: int, tag: int = 0) -> Work:
        del tensor, to, tag
        return self

    def recv(self, tensor: torch.Tensor, source: int, tag: int = 0) -> Work:
        del tensor, source, tag
        return self

    def split(self, ranks: Sequence[int]) -> DryCommunicator:
        return self.inner.split(ranks)

    def wait(self) -> None:
        """Records what is left of the operation, and that the compute waits for it."""
        begun, self._begun = self._begun, DONE
        begun.wait()
        record_rest, self._record_rest = self._record_rest, None
        if record_rest is not None:
            record_rest().wait()


def _count_messages(lanes: Sequence[Sequence[Round]], element_size: int) -> Messages:
    """Counts what a rank sends and receives in rounds: kind, number and bytes."""
    rounds = [each for lane in lanes for each in lane]
    sent = [m.stop - m.start for each in rounds for m in each.sends]
    received = [m.stop - m.start for each in rounds for m in (*each.copies, *each.sums)]
    counted = [(kind, [each for each in lengths if each]) for kind, lengths in (("send", sent), ("recv", received))]
    return tuple((kind, len(full), sum(full) * element_size) for kind, full in counted if full)


def _shape(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor of the same shape without values."""
    return tensor if tensor.is_meta else torch.empty_like(tensor, device="meta")
