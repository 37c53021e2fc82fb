"""Collectives through shared memory, in rounds of one chunk each.

Every rank has an area of a few slots, which it alone writes and all read. A round takes the same slot of all areas:

    all_reduce      a reduce_scatter, and an all_gather of the slices
    reduce_scatter  a rank puts in the slices of others and reduces its own
    all_gather      a rank puts in its piece and takes out the others'
    broadcast       the source puts in, the others take out

For a tensor of B bytes on N ranks, an all-reduce copies B (N-1)/N in and as much out, and reads B once for the sums.
Sums are taken in rank order, in float32 where the tensor is narrower: the bits are the same on every rank, and those of
virtual ranks. A small tensor goes in whole and every rank reduces all of it, which saves one of two meetings.

A rank says in counters which round's data it has put in (``ARRIVED``), and no longer needs (``_DONE``); the compiled
code has one more, of what it has reduced. A slot is free for round t when every rank is done with round t - SLOTS.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from paceline.comm.base import OPS, Call, ReduceOp, reduce_in_order
from paceline.comm.shared.progress import Fence, Steps
from paceline.errors import CollectiveMismatchError

ARRIVED, _DONE = 0, 2
_STAMPS = 3  # then one word for each slot: what this rank calls there; then one of each for the compiled code
WORDS = 16  # of a rank, two cache lines
SLOTS = 5
SMALL_BYTES = 32 * 1024
_ALIGN = 16  # elements: slices of two ranks share no cache line

DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint8, torch.bool, torch.complex64, torch.complex128),
)
KINDS = ("barrier", "all_reduce", "reduce_scatter", "all_gather", "broadcast")
_Move = Callable[[int, int], None]  # of a chunk, by its number and its ticket


class Board:
    def __init__(self, words: memoryview, areas: Sequence[Sequence[torch.Tensor]], rank: int, fence: Fence) -> None:
        self.rank = rank
        self.size = len(areas)
        self.slot_bytes = areas[0][0].numel()
        self._fence = fence
        self.words = words
        self._areas = {torch.uint8: [list(slots) for slots in areas]}
        self._scratch: dict[torch.dtype, torch.Tensor] = {}
        self._ticket = 0

    def take(self, rounds: int) -> int:
        first = self._ticket + 1
        self._ticket += rounds
        return first

    def behind(self, counter: int, ticket: int) -> tuple[int, ...]:
        """Returns the ranks whose counter has not come to ``ticket``; if there are none, their data may be read."""
        words = self.words
        missing = tuple([rank for rank in range(self.size) if words[rank * WORDS + counter] < ticket])
        if not missing:
            self._fence()
        return missing

    def publish(self, counter: int, ticket: int) -> None:
        """Says that this rank has come to ``ticket``, after everything that it wrote and read before."""
        self._fence()
        self.words[self.rank * WORDS + counter] = ticket

    def enter(self, ticket: int, stamp: int) -> Steps:
        """Waits until this rank's slot of the round is free, and signs it."""
        while missing := self.behind(_DONE, ticket - SLOTS):
            yield missing
        self.words[self.rank * WORDS + _STAMPS + ticket % SLOTS] = stamp

    def meet(self, ticket: int, stamp: int, ranks: Sequence[int] | None = None) -> Steps:
        """Waits until ``ranks`` (all) have put in their data, and sees that they called the same."""
        others = range(self.size) if ranks is None else ranks
        while missing := tuple([rank for rank in self.behind(ARRIVED, ticket) if rank in others]):
            yield missing
        self._fence()
        for rank in others:
            if self.words[rank * WORDS + _STAMPS + ticket % SLOTS] != stamp:
                raise self.mismatch(stamp, rank, ticket)

    def mismatch(self, stamp: int, rank: int, ticket: int) -> CollectiveMismatchError:
        theirs = self.words[rank * WORDS + _STAMPS + ticket % SLOTS]
        what = f"this rank called {describe(stamp)}, rank {rank} of the group {describe(theirs)}"
        rule = "every rank of a group issues the same operations in the same order, with the same shapes"
        return CollectiveMismatchError(f"{what}\n  {rule}")

    def slot(self, rank: int, ticket: int, dtype: torch.dtype) -> torch.Tensor:
        if dtype not in self._areas:
            self._areas[dtype] = [[slot.view(dtype) for slot in slots] for slots in self._areas[torch.uint8]]
        return self._areas[dtype][rank][ticket % SLOTS]

    def scratch(self, dtype: torch.dtype, length: int) -> torch.Tensor:
        """Returns memory of this rank alone; one piece of work at a time uses it."""
        if dtype not in self._scratch:
            self._scratch[dtype] = torch.empty(self.slot_bytes // min(2, dtype.itemsize), dtype=dtype)
        return self._scratch[dtype][:length]


def stamp_of(kind: str, tensor: torch.Tensor | None = None, detail: int = 0) -> int:
    """Returns a number that says what a rank calls; ranks whose numbers differ call different things."""
    if tensor is None:
        return KINDS.index(kind)
    dtype = DTYPES.index(tensor.dtype) if tensor.dtype in DTYPES else len(DTYPES)
    return KINDS.index(kind) | dtype << 4 | detail << 12 | tensor.numel() << 28


def describe(stamp: int) -> str:
    kind, dtype, detail, numel = KINDS[stamp & 15], stamp >> 4 & 255, stamp >> 12 & 65535, stamp >> 28
    if kind == "barrier":
        return "barrier()"
    name = str(DTYPES[dtype]).removeprefix("torch.") if dtype < len(DTYPES) else "another dtype"
    how = {"all_gather": "", "broadcast": f"source={detail}, "}.get(kind)
    return f"{kind}({f'{OPS[detail]}, ' if how is None else how}{numel} elements of {name})"


class Collectives:
    def __init__(self, board: Board) -> None:
        self.board = board

    def barrier(self) -> Steps:
        return self._in_rounds(1, stamp_of("barrier"), lambda *_: None, lambda *_: None)

    def start(self, call: Call, output: torch.Tensor, tensor: torch.Tensor, stamp: int) -> Steps:
        """Carries out a collective on flat tensors; those that are only moved are bytes."""
        if call.kind == "all_reduce":
            return self._all_reduce(tensor, call.op, stamp)
        if call.kind == "reduce_scatter":
            return self._reduce_slices(output, tensor.view(self.board.size, output.numel()), call.op, stamp)
        if call.kind == "all_gather":
            return self._all_gather(output, tensor, stamp)
        return self._broadcast(tensor, call.peer, stamp)

    def _all_reduce(self, tensor: torch.Tensor, op: ReduceOp, stamp: int) -> Steps:
        """Reduces a tensor: slice by slice where it is large, and whole, which saves a meeting, where it is not."""
        board = self.board
        body = 0
        if tensor.numel() * tensor.element_size() > min(SMALL_BYTES, board.slot_bytes):
            body = tensor.numel() // board.size * board.size
            slices = tensor[:body].view(board.size, -1)
            yield from self._reduce_slices(slices[board.rank], slices, op, stamp)
            yield from self._all_gather(as_bytes(tensor[:body]), as_bytes(slices[board.rank]), stamp)
        rest = tensor[body:]
        if body and not rest.numel():
            return

        def put(_: int, ticket: int) -> None:
            board.slot(board.rank, ticket, tensor.dtype)[: rest.numel()].copy_(rest)

        def take(_: int, ticket: int) -> None:
            pieces = [board.slot(rank, ticket, tensor.dtype)[: rest.numel()] for rank in range(board.size)]
            _combine(board, pieces, op, rest)

        yield from self._in_rounds(1, stamp, put, take)

    def _in_rounds(self, count: int, stamp: int, put: _Move, take: _Move) -> Steps:
        """Puts chunks in and takes them out, one round later."""
        board = self.board
        first = board.take(count)
        for step in range(count + 1):
            if step < count:
                yield from board.enter(first + step, stamp)
                put(step, first + step)
                board.publish(ARRIVED, first + step)
            if step >= 1:
                yield from board.meet(first + step - 1, stamp)
                take(step - 1, first + step - 1)
                board.publish(_DONE, first + step - 1)

    def _reduce_slices(self, output: torch.Tensor, whole: torch.Tensor, op: ReduceOp, stamp: int) -> Steps:
        board = self.board
        size, me, dtype = board.size, board.rank, whole.dtype
        cell = cell_of(board, whole.element_size())
        targets = torch.split(output, cell)

        def put(number: int, ticket: int) -> None:
            low, length = number * cell, targets[number].numel()
            own = board.slot(me, ticket, dtype)
            for rank in range(size):
                if rank != me:
                    own[rank * cell : rank * cell + length].copy_(whole[rank, low : low + length])

        def take(number: int, ticket: int) -> None:
            low, length = number * cell, targets[number].numel()
            pieces = [board.slot(rank, ticket, dtype)[me * cell : me * cell + length] for rank in range(size)]
            pieces[me] = whole[me, low : low + length]
            _combine(board, pieces, op, targets[number])

        return self._in_rounds(len(targets), stamp, put, take)

    def _all_gather(self, output: torch.Tensor, tensor: torch.Tensor, stamp: int) -> Steps:
        """Fills ``output`` with every rank's ``tensor``, which may be its own place in it; both are flat bytes."""
        board = self.board
        places = output.view(board.size, tensor.numel())
        own = torch.split(tensor, board.slot_bytes)
        is_in_place = places[board.rank].data_ptr() == tensor.data_ptr()
        taken = [rank for rank in range(board.size) if rank != board.rank or not is_in_place]

        def put(number: int, ticket: int) -> None:
            board.slot(board.rank, ticket, torch.uint8)[: own[number].numel()].copy_(own[number])

        def take(number: int, ticket: int) -> None:
            low, length = number * board.slot_bytes, own[number].numel()
            for rank in taken:
                places[rank, low : low + length].copy_(board.slot(rank, ticket, torch.uint8)[:length])

        return self._in_rounds(len(own), stamp, put, take)

    def _broadcast(self, tensor: torch.Tensor, source: int, stamp: int) -> Steps:
        """Replaces flat bytes by those of rank ``source``, which does not wait for the others to take them."""
        board = self.board
        chunks = torch.split(tensor, board.slot_bytes)
        first = board.take(len(chunks))
        for ticket, chunk in enumerate(chunks, start=first):
            slot = board.slot(source, ticket, torch.uint8)[: chunk.numel()]
            if board.rank == source:
                yield from board.enter(ticket, stamp)
                slot.copy_(chunk)
                board.publish(ARRIVED, ticket)
            else:
                yield from board.meet(ticket, stamp, (source,))
                chunk.copy_(slot)
            board.publish(_DONE, ticket)


def cell_of(board: Board, element_bytes: int) -> int:
    """Returns how many elements of a slot each rank has in a reduce-scatter, aligned as slices are."""
    return max(1, board.slot_bytes // element_bytes // board.size // _ALIGN * _ALIGN)


def as_bytes(flat: torch.Tensor) -> torch.Tensor:
    return (torch.view_as_real(flat).view(-1) if flat.is_complex() else flat).view(torch.uint8)


def _combine(board: Board, pieces: Sequence[torch.Tensor], op: ReduceOp, output: torch.Tensor) -> None:
    reduce_in_order(pieces, op, output, lambda dtype: board.scratch(dtype, output.numel()))
