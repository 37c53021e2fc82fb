"""One rank of a world of any size, which talks to nobody: what it issues is written down, and nothing moves.

Data is on the meta device: it has shapes and no values, and a collective leaves it as it is. Numbers that the host
reads (``control_device``) are real, and are what they would be if all ranks were alike:

    sum    size x own          avg, min, max, broadcast    own          all_gather    size copies of own

Ranks of a pipeline are not alike: a stage waits for what the one before tells it. So the ranks of one ``DryWorld`` are
run one after another, first stages first, and control messages and broadcasts of earlier ranks reach later ones. What
no earlier rank has sent (a pipeline whose last stage feeds a second chunk of the first rank) is taken to be as what
this rank itself has sent last.

    world = DryWorld(size=4096)
    comm = world.rank(7)                  every operation of it, and of what it is split into, is in comm.journal
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from paceline.comm.arguments import all_to_all_splits, check_peer, check_pieces, check_split
from paceline.comm.base import DONE, ReduceOp, Work
from paceline.comm.member import GroupMember
from paceline.errors import UsageError

META = torch.device("meta")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """How a collective travels that is made of messages: by which ``algorithm``; none: it is the backend's own.

    ``share`` is the part of its rounds that this is, and ``messages`` are those of this rank: kind, number, bytes.
    """

    algorithm: str = ""
    share: float = 1.0
    messages: tuple[tuple[str, int, int], ...] = ()


_WHOLE = Parcel()


@dataclass(frozen=True, slots=True, kw_only=True)
class DryOperation:
    """An operation that was issued. ``lane``: what is on one is done in order; ``peer``: the other end of a message."""

    number: int
    kind: str
    num_bytes: int
    ranks: tuple[int, ...]
    lane: str
    peer: int | None = None
    tag: int = 0
    parcel: Parcel = _WHOLE


class Journal(Protocol):
    """Is told what a rank issues, and when it waits."""

    def issue(self, operation: DryOperation) -> None:
        """An operation starts."""

    def wait(self, number: int) -> None:
        """What is computed from here on needs the result of an operation."""


@dataclass(slots=True)
class KeptJournal:
    """Keeps everything."""

    operations: list[DryOperation] = field(default_factory=list)
    waits: list[int] = field(default_factory=list)

    def issue(self, operation: DryOperation) -> None:
        """Keeps an operation."""
        self.operations.append(operation)

    def wait(self, number: int) -> None:
        """Keeps a wait."""
        self.waits.append(number)


class DryWorld:
    """The ranks of which some are run, and what those have told the others."""

    def __init__(self, size: int, stands_for: str = "cuda") -> None:
        """Takes the type of device that is meant: engines do some things otherwise on a CPU."""
        if size < 1:
            raise UsageError(f"a world of {size} ranks\n  it has at least one")
        self.size = size
        self.stands_for = stands_for
        self.mail: dict[tuple[int, int, int], deque[torch.Tensor]] = {}  # by sender, receiver and tag
        self.board: dict[tuple[tuple[int, ...], int], torch.Tensor] = {}  # broadcasts, by group and number

    def rank(self, rank: int, journal: Journal | None = None) -> DryCommunicator:
        """Returns the communicator of one rank."""
        check_peer("a dry run of", rank, self.size)
        own = _Rank(world=self, number=rank, journal=KeptJournal() if journal is None else journal)
        return DryCommunicator(own, tuple(range(self.size)), "world")


@dataclass(slots=True, kw_only=True)
class _Rank:
    """What all groups of one rank share."""

    world: DryWorld
    number: int
    journal: Journal
    num_issued: int = 0
    num_groups: int = 0
    num_broadcasts: dict[tuple[int, ...], int] = field(default_factory=dict)
    told: list[torch.Tensor] = field(default_factory=list)  # control messages that this rank has sent
    is_quiet: bool = False


class _DryWork:
    __slots__ = ("_journal", "_number")

    def __init__(self, journal: Journal, number: int) -> None:
        self._journal: Journal | None = journal
        self._number = number

    def wait(self) -> None:
        """Notes the first time that somebody needs the result."""
        if self._journal is not None:
            self._journal.wait(self._number)
            self._journal = None


class DryCommunicator(GroupMember):
    """One rank's handle on a group of a world that is not there."""

    takes_real_time = False

    def __init__(self, own: _Rank, ranks: tuple[int, ...], lane: str) -> None:
        super().__init__(ranks.index(own.number), ranks)
        self._own = own
        self._lane = lane

    @property
    def device(self) -> torch.device:
        """The meta device: data has no values."""
        return META

    @property
    def stands_for(self) -> str:
        """The type of device that is meant."""
        return self._own.world.stands_for

    @property
    def journal(self) -> Journal:
        """What is told of this rank's operations."""
        return self._own.journal

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Work:
        """Notes an all-reduce of the tensor's bytes; a real tensor becomes what equal ranks would make of it."""
        if not tensor.is_meta and op == "sum":
            tensor.detach().mul_(self.size)
        return self._issue("all_reduce", tensor)

    def reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor, op: ReduceOp = "sum") -> Work:
        """Notes a reduce-scatter of the whole input's bytes."""
        check_pieces("reduce_scatter", whole=tensor, piece=output, size=self.size)
        if not tensor.is_meta:
            piece = tensor.detach().reshape(self.size, -1)[self.rank].clone()
            output.detach().view(-1).copy_(piece * self.size if op == "sum" else piece)
        return self._issue("reduce_scatter", tensor)

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor) -> Work:
        """Notes an all-gather of the whole output's bytes."""
        check_pieces("all_gather", whole=output, piece=tensor, size=self.size)
        if not output.is_meta:
            output.detach().view(self.size, -1).copy_(tensor.detach().reshape(1, -1).clone().expand(self.size, -1))
        return self._issue("all_gather", output)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> Work:
        """Notes a broadcast; a real tensor becomes what the source has sent, if it was run before."""
        check_peer("broadcast from", source, self.size)
        if not tensor.is_meta:
            self._share_broadcast(tensor, source)
        return self._issue("broadcast", tensor)

    def all_to_all(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
    ) -> Work:
        """Notes an all-to-all of this rank's input; real pieces are all this rank's own."""
        theirs = all_to_all_splits(output, output_splits, self.size)
        ours = all_to_all_splits(tensor, input_splits, self.size)
        if not tensor.is_meta:
            mine = torch.split(tensor.detach(), ours)[self.rank].clone()
            for piece, rows in zip(torch.split(output.detach(), theirs), theirs, strict=True):
                piece.copy_(mine[:rows])
        return self._issue("all_to_all", tensor)

    def send(self, tensor: torch.Tensor, to: int, tag: int = 0) -> Work:
        """Notes a message; a real one is kept for the rank that receives it."""
        check_peer("send to", to, self.size)
        if not tensor.is_meta:
            kept = tensor.detach().clone()
            self._own.told.append(kept)
            key = (self._own.number, self.ranks[to], tag)
            self._own.world.mail.setdefault(key, deque()).append(kept)
        return self._issue("send", tensor, peer=self.ranks[to], tag=tag)

    def recv(self, tensor: torch.Tensor, source: int, tag: int = 0) -> Work:
        """Notes a message; a real tensor becomes what was sent to this rank."""
        check_peer("recv from", source, self.size)
        if not tensor.is_meta:
            tensor.detach().copy_(self._letter(tensor, source, tag))
        return self._issue("recv", tensor, peer=self.ranks[source], tag=tag)

    def barrier(self) -> None:
        """Notes a barrier, which is waited for."""
        self._issue("barrier", None).wait()

    def split(self, ranks: Sequence[int]) -> DryCommunicator:
        """Makes a subgroup with a lane of its own."""
        check_split(ranks, self.rank, self.size)
        self._own.num_groups += 1
        return DryCommunicator(self._own, tuple(self.ranks[r] for r in ranks), f"group {self._own.num_groups}")

    def note(self, kind: str, num_bytes: int, parcel: Parcel = _WHOLE) -> Work:
        """Notes a collective of this group."""
        return self._note(kind, num_bytes, self._lane, self.ranks, parcel=parcel)

    @contextlib.contextmanager
    def quietly(self) -> Iterator[None]:
        """Lets operations tell numbers that the host reads without being noted."""
        before, self._own.is_quiet = self._own.is_quiet, True
        try:
            yield
        finally:
            self._own.is_quiet = before

    def _issue(self, kind: str, tensor: torch.Tensor | None, peer: int | None = None, tag: int = 0) -> Work:
        own = self._own
        lane = self._lane
        ranks = self.ranks
        if peer is not None:  # messages of a pair do not wait for those of another
            first, second = (own.number, peer) if kind == "send" else (peer, own.number)
            lane, ranks = f"{first} to {second}", (first, second)
        num_bytes = 0 if tensor is None else tensor.numel() * tensor.element_size()
        return self._note(kind, num_bytes, lane, ranks, peer=peer, tag=tag)

    def _note(
        self,
        kind: str,
        num_bytes: int,
        lane: str,
        ranks: tuple[int, ...],
        *,
        peer: int | None = None,
        tag: int = 0,
        parcel: Parcel = _WHOLE,
    ) -> Work:
        own = self._own
        if own.is_quiet:
            return DONE
        operation = DryOperation(
            number=own.num_issued,
            kind=kind,
            num_bytes=num_bytes,
            ranks=ranks,
            lane=lane,
            peer=peer,
            tag=tag,
            parcel=parcel,
        )
        own.num_issued += 1
        own.journal.issue(operation)
        return _DryWork(own.journal, operation.number)

    def _share_broadcast(self, tensor: torch.Tensor, source: int) -> None:
        counts, board = self._own.num_broadcasts, self._own.world.board
        key = (self.ranks, counts.get(self.ranks, 0))
        counts[self.ranks] = key[1] + 1
        if source == self.rank:
            board[key] = tensor.detach().clone()
        elif key in board and board[key].shape == tensor.shape:
            tensor.detach().copy_(board[key])

    def _letter(self, tensor: torch.Tensor, source: int, tag: int) -> torch.Tensor:
        own, sender = self._own, self.ranks[source]
        waiting = own.world.mail.get((sender, own.number, tag))
        if waiting:
            return waiting.popleft()
        for told in reversed(own.told):
            if told.shape == tensor.shape and told.dtype == tensor.dtype:
                return told
        raise UsageError(
            f"rank {own.number} of a dry run waits for what rank {sender} tells it, and that was not run before\n"
            "  a stage of a pipeline learns the shapes of its inputs from the one before\n"
            "  run the ranks of the first stages first"
        )
