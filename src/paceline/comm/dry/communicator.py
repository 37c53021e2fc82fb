"""One rank of a world of any size, alone: what it issues is recorded, and nothing moves.

Data is on the meta device: it has shapes and no values, and a collective leaves it as it is. Numbers that the host
reads (``control_device``) are real, and are what they would be if all ranks were alike:

    sum    size x own    product    own^size    avg, min, max, broadcast    own    all_gather    size copies of own

Ranks of a pipeline are not alike: a stage learns from the one before what it will get. So the ranks of one ``DryWorld``
are run one after another, first stages first, and control messages and broadcasts of earlier ranks reach later ones.
Where no earlier rank has sent a message, this rank's own last message of the same shape takes its place.

With algorithms of our own, what is recorded of an operation is its first round, which travels while the compute goes
on, when it is issued; and all others, which the compute waits for, when a ``wait`` carries them out.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeAlias

import torch

from paceline.cluster.costs import Algorithm
from paceline.comm.algorithms.communicator import MADE, AlgorithmCommunicator
from paceline.comm.algorithms.rounds import Round
from paceline.comm.base import DONE, Call, Communicator, ReduceOp, Work, WrappedCommunicator, check_peer, check_split
from paceline.errors import UsageError
from paceline.predict.replay.program import Issue

META = torch.device("meta")
Messages: TypeAlias = tuple[tuple[str, int, int], ...]  # of this rank: kind, number, bytes


class Journal(Protocol):
    """Records what a rank issues, and when what is computed from there on needs the result of an operation."""

    def issue(self, operation: Issue) -> None: ...

    def wait(self, number: int) -> None: ...


@dataclass(slots=True)
class KeptJournal:
    operations: list[Issue] = field(default_factory=list)
    waits: list[int] = field(default_factory=list)

    def issue(self, operation: Issue) -> None:
        self.operations.append(operation)

    def wait(self, number: int) -> None:
        self.waits.append(number)


class DryWorld:
    """Some ranks of a world, run one after another, and the messages of those that were run."""

    device, backend = META, "virtual"

    def __init__(self, size: int, device_kind: str = "cuda") -> None:
        """Takes the type of device to imitate: engines do some things differently on a CPU."""
        if size < 1:
            raise UsageError(f"a world of {size} ranks\n  it has at least one")
        self.size, self.device_kind = size, device_kind
        self.mail: dict[tuple[int, int, int], deque[torch.Tensor]] = {}  # by sender, receiver and tag
        self.board: dict[tuple[tuple[int, ...], int], torch.Tensor] = {}  # broadcasts, by group and number

    def rank(self, rank: int, journal: Journal | None = None) -> DryCommunicator:
        check_peer("a dry run of", rank, self.size)
        own = _DryRank(world=self, number=rank, journal=KeptJournal() if journal is None else journal)
        return DryCommunicator(own, tuple(range(self.size)), "world")


@dataclass(slots=True, kw_only=True)
class _DryRank:
    world: DryWorld
    number: int
    journal: Journal
    num_issued: int = 0
    num_groups: int = 0
    num_broadcasts: Counter[tuple[int, ...]] = field(default_factory=Counter)
    sent: list[torch.Tensor] = field(default_factory=list)  # control messages of this rank


@dataclass(slots=True, eq=False)
class _DryWork:
    journal: Journal | None
    number: int

    def wait(self) -> None:
        if self.journal is not None:
            self.journal.wait(self.number)
            self.journal = None


class DryCommunicator(Communicator):
    takes_real_time = False

    def __init__(self, own: _DryRank, ranks: tuple[int, ...], lane: str) -> None:
        super().__init__(ranks.index(own.number), ranks, own.world.device, backend=own.world.backend)
        self.device_kind = own.world.device_kind
        self.own, self.lane = own, lane

    def issue(self, call: Call) -> Work:
        if not call.tensor.is_meta:
            self.set_values(call)
        return self.record(call.kind, call.whole.nbytes, **self.pair(call))

    def pair(self, call: Call) -> dict[str, Any]:
        """Returns the fields of an ``Issue`` that a message has and a collective has not."""
        if call.kind not in ("send", "recv"):
            return {}
        own, other = self.own.number, self.ranks[call.peer]
        sender, receiver = (own, other) if call.kind == "send" else (other, own)
        # On a lane of its pair: messages of one pair do not wait for those of another.
        return {"ranks": (sender, receiver), "lane": f"{sender} to {receiver}", "tag": call.tag}

    def set_values(self, call: Call) -> None:
        """Gives tensors that the host reads their values."""
        output, tensor, own = call.output.detach(), call.tensor.detach(), self.own
        if call.kind == "all_reduce":
            tensor.copy_(self._reduced(tensor, call.op))
        elif call.kind == "reduce_scatter":
            piece = tensor.reshape(self.size, -1)[self.rank].clone()
            output.view(-1).copy_(self._reduced(piece, call.op))
        elif call.kind == "all_gather":
            output.view(self.size, -1).copy_(tensor.reshape(1, -1).clone().expand(self.size, -1))
        elif call.kind == "broadcast":  # what the source has sent, if it was run before
            key = (self.ranks, own.num_broadcasts[self.ranks])
            own.num_broadcasts[self.ranks] += 1
            if call.peer == self.rank:
                own.world.board[key] = tensor.clone()
            elif key in own.world.board and own.world.board[key].shape == tensor.shape:
                tensor.copy_(own.world.board[key])
        elif call.kind == "all_to_all" and call.splits is not None:  # all pieces are this rank's own
            theirs, ours = call.splits
            mine = torch.split(tensor, ours)[self.rank].clone()
            for piece, rows in zip(torch.split(output, theirs), theirs, strict=True):
                # As many rows as are expected: more, where it sends others more, are these again.
                piece.copy_(mine[torch.arange(rows) % len(mine)]) if len(mine) else piece.zero_()
        elif call.kind == "send":  # kept for the rank that receives it
            own.sent.append(tensor.clone())
            own.world.mail.setdefault((own.number, self.ranks[call.peer], call.tag), deque()).append(own.sent[-1])
        elif call.kind == "recv":
            waiting = own.world.mail.get((self.ranks[call.peer], own.number, call.tag))
            alike = (sent for sent in reversed(own.sent) if (sent.shape, sent.dtype) == (tensor.shape, tensor.dtype))
            found = waiting.popleft() if waiting else next(alike, None)
            if found is None:
                raise UsageError(
                    f"rank {own.number} of a dry run waits for what rank {self.ranks[call.peer]} tells it, and that "
                    "was not run before\n  a stage of a pipeline learns the shapes of its inputs from the one before\n"
                    "  run the ranks of the first stages first"
                )
            tensor.copy_(found)

    def _reduced(self, tensor: torch.Tensor, op: ReduceOp) -> torch.Tensor:
        return tensor * self.size if op == "sum" else tensor**self.size if op == "product" else tensor

    def barrier(self) -> None:
        self.record("barrier", 0).wait()

    def split(self, ranks: Sequence[int]) -> DryCommunicator:
        check_split(ranks, self.rank, self.size)
        self.own.num_groups += 1
        return type(self)(self.own, tuple(self.ranks[r] for r in ranks), f"group {self.own.num_groups}")

    def record(self, kind: str, num_bytes: int, **more: Any) -> Work:
        """Records an operation, by default a collective of this group; ``more`` are fields of an ``Issue``."""
        own, more = self.own, {"ranks": self.ranks, "lane": self.lane} | more
        own.journal.issue(Issue(number=own.num_issued, kind=kind, num_bytes=num_bytes, **more))
        own.num_issued += 1
        return _DryWork(own.journal, own.num_issued - 1)


class DryAlgorithmCommunicator(AlgorithmCommunicator):
    inner: DryCommunicator

    def issue(self, call: Call) -> Work:
        if call.kind in MADE and not call.tensor.is_meta:
            self.inner.set_values(call)
            output, tensor = (torch.empty_like(each, device="meta") for each in (call.output, call.tensor))
            call = call._replace(output=output, tensor=tensor)
        return super().issue(call)

    def split(self, ranks: Sequence[int]) -> DryAlgorithmCommunicator:
        inner, topology = self.inner.split(ranks), self.topology.restrict(ranks)
        return DryAlgorithmCommunicator(inner, self.algorithm, topology, in_flight=self._in_flight, table=self._table)

    def _messages(self, call: Call, algorithm: Algorithm, lanes: Sequence[list[Round]]) -> Communicator:
        kind, whole = call.kind, call.whole
        rounds = max(len(lane) for lane in lanes)

        def record(share: float, part: slice) -> Work:
            each = [each for lane in lanes for each in lane[part]]
            sent = [m.stop - m.start for one in each for m in one.sends]
            received = [m.stop - m.start for one in each for m in (*one.copies, *one.sums)]
            counted = (("send", [n for n in sent if n]), ("recv", [n for n in received if n]))
            messages = tuple((way, len(full), sum(full) * whole.element_size()) for way, full in counted if full)
            return self.inner.record(kind, whole.nbytes, algorithm=algorithm, share=share, messages=messages)

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

    def issue(self, call: Call) -> Work:
        del call
        return self

    def wait(self) -> None:
        """Records what is left of the operation, and that the compute waits for it."""
        begun, self._begun = self._begun, DONE
        begun.wait()
        record_rest, self._record_rest = self._record_rest, None
        if record_rest is not None:
            record_rest().wait()
