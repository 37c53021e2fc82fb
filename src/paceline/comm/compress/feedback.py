"""What surrounds every policy: which tensors it gets, what was not sent, and what is saved.

Error feedback: what a rank did not send of a gradient is added to its next one. Nothing is lost, it only comes later:

    vector = gradient + residual        residual = vector - what was sent

Memory: one residual for each compressed element, and while a pass is under way the vector too. Between two passes both
are kept, old and new: a pass whose gradients are dropped (memory ran out, a gradient was not finite) leaves no trace.

The residuals are in units of the gradient's average over ranks: what N ranks have not sent yet is the *mean* of
their residuals. So another number of ranks goes on with that mean on every rank.

Where gradients are sharded inside a group and averaged across groups (hybrid), a bucket is a slice: residuals
are of that slice, and the ranks that average are the replicas.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from paceline.comm.base import DONE, BucketShape, Communicator, Work
from paceline.comm.compress import state
from paceline.comm.compress.exchange import ExchangeContext, ExchangeRounds, VectorPart
from paceline.comm.compress.policies import make_policy
from paceline.plan.layout import Compression
from paceline.shards import Shard, Slot


class Compressor:
    """Compresses the buckets of one engine, and keeps their residuals. One for each engine and rank."""

    def __init__(self, settings: Compression) -> None:
        self.settings = settings
        self.policy = make_policy(settings)
        self.step = 0
        self.factors: dict[str, torch.Tensor] = {}
        self.residuals: dict[str, torch.Tensor] = {}  # by tensor, so that they outlive the buckets
        self._pieces: dict[str, state.TensorPiece] = {}
        self._is_sharded = False
        self._replicas: Communicator | None = None
        self._pass = _GradientPass()

    # What engines call.

    def bind(self, buckets: Sequence[BucketShape], replicas: Communicator | None = None) -> list[_Bucket]:
        bound = [_Bucket(self, shape) for shape in buckets]
        self._pieces = {name: piece for bucket in bound for name, piece in bucket.pieces.items()}
        self._is_sharded = any(shape.shard is not None for shape in buckets)
        self._replicas = replicas
        return bound

    def end_pass(self, shards: Communicator | None = None) -> None:
        """Ends a pass: what it changes comes into force when the next one begins.

        A gradient that is not finite may lie in the slice of another of the ``shards``: they tell one another.
        """
        self._pass.is_ended = True
        if shards is not None and shards.size > 1:
            known = self._pass.is_finite
            flag = torch.ones(1, device=shards.device) if known is None else known.to(shards.device).float().view(1)
            shards.all_reduce(flag, "min").wait()
            self._pass.is_finite = None if known is None else flag[0] > 0

    def abandon_pass(self) -> None:
        if not self._pass.is_ended:
            self._pass = _GradientPass()

    def roll_back(self) -> None:
        self._pass = _GradientPass()

    def keep_residuals(self, names: Sequence[str]) -> None:
        """Keeps the residuals of tensors whose average is not used as they were."""
        for name in names:
            self._pass.residuals.pop(name, None)

    # State.

    def residual_norm(self) -> float:
        """Returns the norm of this rank's residuals. A sync point."""
        self.apply_ended_pass()
        found = [residual.double().square().sum() for residual in self.residuals.values()]
        return float(torch.stack(found).sum().sqrt()) if found else 0.0

    def held(self) -> list[torch.Tensor]:
        """Returns what is kept between two passes: residuals and factors, of the last pass and of the one before."""
        kept = [self.residuals, self._pass.residuals, self.factors, self._pass.factors]
        return [tensor for tensors in kept for tensor in tensors.values()]

    def shards(self, comm: Communicator) -> Iterator[Shard]:
        """Yields this rank's residuals, and its factors, to be saved. ``comm`` has all ranks."""
        self.apply_ended_pass()
        yield from state.residual_shards(self.residuals, self._pieces, self._replica(comm))
        yield from state.factor_shards(self.factors, self._pieces, self._replica(comm))

    def load(self, source: state.TensorSource, step: int, comm: Communicator) -> None:
        """Goes on from what ``shards`` of any ranks gave: each replica with its own row, or with the mean of all.

        Raises CheckpointError where a tensor has another size now; nothing is loaded then.
        """
        held = None if not self._is_sharded else self._pieces.keys()
        residuals = {}
        if self.settings.error_feedback:
            residuals = state.read_residuals(source, self._pieces, held, self._replica(comm))
        factors = state.read_factors(source, self._pieces, held)
        self._pass = _GradientPass()
        self.step = step
        self.residuals = {name: each.to(comm.device) for name, each in residuals.items()}
        self.factors = {name: each.to(comm.device) for name, each in factors.items()}

    def _replica(self, comm: Communicator) -> tuple[int, int]:
        """Returns which replica this rank belongs to, and how many there are."""
        replicas = self._replicas or comm
        return replicas.rank, replicas.size

    # One pass.

    def add_work(self, work: _BucketWork) -> None:
        self._pass.works.append(work)

    def advance(self) -> None:
        """Issues the second rounds of all buckets under way, in the order in which they left."""
        works, self._pass.works = self._pass.works, []
        for work in works:
            work.advance()

    def note(
        self, is_finite: torch.Tensor, residuals: dict[str, torch.Tensor], factors: dict[str, torch.Tensor]
    ) -> None:
        """Keeps what a bucket did not send, until the pass is known to count."""
        known = self._pass.is_finite
        self._pass.is_finite = is_finite if known is None else known & is_finite
        self._pass.residuals |= residuals if self.settings.error_feedback else {}
        self._pass.factors |= factors

    def apply_ended_pass(self) -> None:
        """Brings an ended pass into force, unless a gradient was not finite: then its step was left out.

        The first bucket of a pass that leaves does this for the pass before.
        """
        if not self._pass.is_ended:
            return
        done, self._pass = self._pass, _GradientPass()
        self.step += 1
        is_finite = done.is_finite
        if is_finite is None or (is_finite.device.type == "cpu" and not is_finite):
            return
        changes = ((self.residuals, done.residuals, torch.zeros_like), (self.factors, done.factors, torch.ones_like))
        for kept, changed, first in changes:
            for name, new in changed.items():
                if new.device.type != "cpu":  # a GPU decides without the host
                    new = torch.where(is_finite, new, kept[name] if name in kept else first(new))
                kept[name] = new


@dataclass(slots=True)
class _GradientPass:
    """What a pass will have changed when it counts."""

    is_ended: bool = False
    is_finite: torch.Tensor | None = None
    works: list[_BucketWork] = field(default_factory=list)
    residuals: dict[str, torch.Tensor] = field(default_factory=dict)
    factors: dict[str, torch.Tensor] = field(default_factory=dict)


class _Bucket:
    """The reduction of one bucket: its compressed tensors as one vector, all others whole."""

    def __init__(self, owner: Compressor, shape: BucketShape) -> None:
        self.owner = owner
        self.compressed: list[slice] = []  # of the bucket's buffer, one for each part
        self.whole: list[slice] = []
        self.whole_names: list[str] = []
        self.pieces: dict[str, state.TensorPiece] = {}
        parts, length = [], 0
        first, last = shape.shard or (0, shape.layout.length)
        for name, slot in zip(shape.names, shape.layout.slots, strict=True):
            begin, end = max(slot.offset, first), min(slot.offset + slot.numel, last)
            if begin >= end:
                continue
            place = slice(begin - first, end - first)
            self.pieces[name] = state.TensorPiece(begin=begin - slot.offset, size=end - begin, whole=slot.numel)
            part = _part(name, slot, self.pieces[name], length)
            if owner.settings.takes(name, slot.shape) and owner.policy.takes(part.rows, part.columns):
                parts.append(part)
                self.compressed.append(place)
                length += part.size
            else:
                self.whole.append(place)
                self.whole_names.append(name)
        if shape.tail:
            self.whole.append(slice(shape.layout.length - shape.tail, shape.layout.length))
        self.parts = tuple(parts)

    def start(self, buffer: torch.Tensor, comm: Communicator) -> Work:
        self.owner.apply_ended_pass()
        work = _BucketWork(self, buffer)
        if self.parts and self.owner.step >= self.owner.settings.plain_steps:
            work.send_compressed(comm)
        else:
            work.send_whole(comm)
        self.owner.add_work(work)
        return work

    def is_finite(self, buffer: torch.Tensor) -> torch.Tensor:
        """Says whether all tensors in the buffer are finite. What lies between them may be anything."""
        sums = [buffer[place].sum() for place in self.whole + self.compressed]
        return torch.stack(sums).sum().isfinite() if sums else torch.ones((), dtype=torch.bool, device=buffer.device)

    def split(self, vector: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns a vector's pieces by the names of their tensors."""
        return {part.name: vector[part.start : part.stop] for part in self.parts}


class _BucketWork:
    """A bucket under way: a vector in the policy's hands, and the rest in an all-reduce."""

    def __init__(self, bucket: _Bucket, buffer: torch.Tensor) -> None:
        self.bucket = bucket
        self.new_factors: dict[str, torch.Tensor] = {}
        self._buffer = buffer
        self._vector: torch.Tensor | None = None
        self._rounds: ExchangeRounds | None = None  # what the policy still has to do
        self._round: Work = DONE
        self._num_later = 0  # rounds behind this one
        self._whole: torch.Tensor | None = None
        self._whole_work: Work | None = None
        self._sent_residuals: dict[str, torch.Tensor] = {}
        self._is_done = False

    def send_whole(self, comm: Communicator) -> None:
        self._whole = self._buffer
        self._whole_work = comm.all_reduce(self._buffer, "avg")

    @torch.no_grad()
    def send_compressed(self, comm: Communicator) -> None:
        """Hands what is compressed to the policy, and averages the rest."""
        bucket, owner, buffer = self.bucket, self.bucket.owner, self._buffer
        if bucket.whole:
            self._add_residuals()
            self._whole = torch.cat([buffer[place] for place in bucket.whole])
            self._whole_work = comm.all_reduce(self._whole, "avg")
        narrow = buffer.dtype in (torch.float16, torch.bfloat16)
        vector = torch.cat([buffer[place] for place in bucket.compressed]).to(torch.float32 if narrow else buffer.dtype)
        pieces, residuals = bucket.split(vector), owner.residuals
        if names := [name for name in pieces if name in residuals]:
            torch._foreach_add_([pieces[name] for name in names], [residuals[name] for name in names])
        context = ExchangeContext(
            parts=bucket.parts, step=owner.step, factors=owner.factors, new_factors=self.new_factors
        )
        self._vector = vector
        self._rounds = owner.policy.exchange(vector, context, comm)
        self._num_later = owner.policy.num_rounds - 1
        self._round = next(self._rounds)

    def _add_residuals(self) -> None:
        """Adds residuals to tensors that travel whole: they did not, in the run that this one goes on from."""
        for name, place in zip(self.bucket.whole_names, self.bucket.whole, strict=False):
            residual = self.bucket.owner.residuals.get(name)
            if residual is not None:
                self._buffer[place] += residual
                self._sent_residuals[name] = torch.zeros_like(residual)

    @torch.no_grad()
    def advance(self) -> None:
        """Issues the second round, where there is one. Safe to call twice."""
        while self._rounds is not None and self._num_later:
            self._num_later -= 1
            self._round.wait()
            self._round = next(self._rounds)

    @torch.no_grad()
    def wait(self) -> None:
        """Puts the average into the bucket."""
        if self._is_done:
            return
        self._is_done = True
        self.bucket.owner.advance()
        is_finite = torch.ones((), dtype=torch.bool, device=self._buffer.device)
        if self._whole is not None and self._whole_work is not None:
            self._whole_work.wait()
            if self._whole is self._buffer:
                is_finite &= self.bucket.is_finite(self._buffer)
            else:
                is_finite &= self._whole.sum().isfinite()
                _put(self._buffer, self.bucket.whole, self._whole)
        if self._rounds is not None:
            mean = self._finish(self._rounds)
            is_finite &= mean.sum().isfinite()
            _put(self._buffer, self.bucket.compressed, mean)
        left_over = {} if self._vector is None else self.bucket.split(self._vector)
        self.bucket.owner.note(is_finite, left_over | self._sent_residuals, self.new_factors)

    def _finish(self, rounds: ExchangeRounds) -> torch.Tensor:
        self.advance()
        self._round.wait()
        try:
            next(rounds)
        except StopIteration as stop:
            mean: torch.Tensor = stop.value
            return mean
        raise AssertionError("an exchange has more rounds than it said")


def _put(buffer: torch.Tensor, places: Sequence[slice], values: torch.Tensor) -> None:
    """Copies consecutive pieces of ``values`` to their places."""
    for place, piece in zip(places, torch.split(values, [place.stop - place.start for place in places]), strict=True):
        buffer[place].copy_(piece)


def _part(name: str, slot: Slot, piece: state.TensorPiece, start: int) -> VectorPart:
    """Returns the part of the vector that a piece of a tensor is."""
    columns = slot.numel // _rows(slot)
    lead = piece.begin % columns
    rows = -(-(lead + piece.size) // columns)
    return VectorPart(name=name, start=start, size=piece.size, rows=rows, columns=columns, lead=lead)


def _rows(slot: Slot) -> int:
    """Returns the rows of a tensor's memory seen as a matrix: the size of its outermost dim there."""
    if not slot.shape or not slot.numel:
        return 1
    outermost = max(range(len(slot.shape)), key=lambda dim: (slot.stride[dim], slot.shape[dim]))
    return slot.shape[outermost]
