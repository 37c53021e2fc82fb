"""What surrounds every policy: which tensors it gets, what was not sent, and what is saved.

Error feedback: what a rank did not send of a gradient is added to its next one. Nothing is lost, it only comes later:

    vector = gradient + residual        residual = vector - what was sent

Memory: one residual for each compressed element, and while a pass is under way the vector too. Between two passes both
are kept, old and new: a pass whose gradients are dropped (memory ran out, a gradient was not finite) leaves no trace.

A residual is saved as one tensor with a row for each replica: as many replicas go on with their own rows, another
number with the mean of all. Where gradients are sharded inside a group and averaged across groups (hybrid), a bucket
and its residuals are slices, and the ranks that average are the replicas. Factors of PowerSGD are the same in all
replicas, and differ by slice. They are where an iteration starts, and nothing is lost by a start from elsewhere: a rank
takes the one of its slice, or of the last one that begins before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from paceline.comm.base import DONE, NARROW, BucketShape, Communicator, Work
from paceline.comm.compress.policies import ExchangeContext, ExchangeRounds, Policy, VectorPart
from paceline.errors import CheckpointError
from paceline.plan.layout import Compression
from paceline.shards import Region, Shard, Slot, whole_region

_RESIDUAL = "residual/"
_FACTOR = "factor/"


class TensorSource(Protocol):
    """Saved tensors: the shapes of those whose names begin so, by what follows; and one of them, or a flat region."""

    def shapes(self, prefix: str = "") -> dict[str, tuple[int, ...]]: ...

    def read(self, name: str, region: Region | None = None) -> torch.Tensor: ...


class Compressor:
    """Compresses the buckets of one engine, and keeps their residuals. One for each engine and rank."""

    def __init__(self, settings: Compression) -> None:
        self.settings = settings
        self.policy = Policy(settings)
        self.step = 0
        self.factors: dict[str, torch.Tensor] = {}
        self.residuals: dict[str, torch.Tensor] = {}  # by tensor, so that they outlive the buckets
        self.current = _GradientPass()
        self._pieces: dict[str, Region] = {}  # of tensors as flat ones, in the order of memory
        self._is_sharded = False
        self._replicas: Communicator | None = None

    def bind(self, buckets: Sequence[BucketShape], replicas: Communicator | None = None) -> list[_Bucket]:
        bound = [_Bucket(self, shape) for shape in buckets]
        self._pieces = {name: piece for bucket in bound for name, piece in bucket.pieces.items()}
        self._is_sharded = any(shape.shard is not None for shape in buckets)
        self._replicas = replicas
        return bound

    def end_pass(self, shards: Communicator | None = None) -> None:
        """Ends a pass, which comes into force when the next one begins. ``shards`` agree on whether it was finite."""
        self.current.is_ended = True
        if shards is not None and shards.size > 1:
            known = self.current.is_finite
            flag = torch.ones(1, device=shards.device) if known is None else known.to(shards.device).float().view(1)
            shards.all_reduce(flag, "min").wait()
            self.current.is_finite = None if known is None else flag[0] > 0

    def abandon_pass(self) -> None:
        if not self.current.is_ended:
            self.roll_back()

    def roll_back(self) -> None:
        self.current = _GradientPass()

    def keep_residuals(self, names: Sequence[str]) -> None:
        for name in names:
            self.current.residuals.pop(name, None)

    def residual_norm(self) -> float:
        """Returns the norm of this rank's residuals. A sync point."""
        self.apply_ended_pass()
        found = [residual.double().square().sum() for residual in self.residuals.values()]
        return float(torch.stack(found).sum().sqrt()) if found else 0.0

    def held(self) -> list[torch.Tensor]:
        """Returns what is kept between two passes: residuals and factors, of the last pass and of the one before."""
        kept = [self.residuals, self.current.residuals, self.factors, self.current.factors]
        return [tensor for tensors in kept for tensor in tensors.values()]

    def shards(self, comm: Communicator) -> Iterator[Shard]:
        """Yields this rank's interval of its replica's row of residuals, and its factors. ``comm`` has all ranks."""
        self.apply_ended_pass()
        replicas = self._replicas or comm
        for name, residual in self.residuals.items():
            piece = self._piece(name, residual.numel())
            (whole,) = piece.shape
            begin = replicas.rank * whole + piece.begin
            region = Region(shape=(replicas.size, whole), begin=begin, end=begin + piece.size)
            yield Shard(name=_RESIDUAL + name, region=region, tensor=residual)
        for name, factor in self.factors.items():  # the first replica writes them, by the place where a slice begins
            label, copy = f"{_FACTOR}{name}/{self._piece(name).begin}", 0 if replicas.rank == 0 else None
            yield Shard(name=label, region=whole_region(tuple(factor.shape)), tensor=factor, copy=copy)

    def load(self, source: TensorSource, step: int, comm: Communicator, prefix: str = "") -> None:
        """Goes on from what ``shards`` of any ranks gave. Raises CheckpointError, before it changes anything."""
        residuals = self._read_residuals(source, prefix + _RESIDUAL, comm) if self.settings.error_feedback else {}
        begins: dict[str, list[int]] = {}
        for label in source.shapes(prefix + _FACTOR):
            name, _, place = label.rpartition("/")
            if self._holds(name):
                begins.setdefault(name, []).append(int(place))
        factors = {}
        for name, known in begins.items():
            nearest = max((each for each in known if each <= self._piece(name).begin), default=min(known))
            factors[name] = source.read(f"{prefix}{_FACTOR}{name}/{nearest}")
        self.roll_back()
        self.step = step
        self.residuals = {name: each.to(comm.device) for name, each in residuals.items()}
        self.factors = {name: each.to(comm.device) for name, each in factors.items()}

    def _read_residuals(self, source: TensorSource, prefix: str, comm: Communicator) -> dict[str, torch.Tensor]:
        replicas, found = self._replicas or comm, {}
        for name, (num_rows, whole) in source.shapes(prefix).items():
            if not self._holds(name):
                continue
            piece = self._piece(name, whole)
            if piece.shape != (whole,):
                what = f"the residual of {name} has {whole} elements, the tensor {piece.shape[0]}"
                rule = "the residuals of compression belong to one model"
                raise CheckpointError(f"{what}\n  {rule}\n  resume with the config of the run")
            rows = [replicas.rank] if num_rows == replicas.size else range(num_rows)
            begins = [row * whole + piece.begin for row in rows]
            regions = [Region(shape=(num_rows, whole), begin=begin, end=begin + piece.size) for begin in begins]
            read = [source.read(prefix + name, region) for region in regions]
            found[name] = read[0] if len(read) == 1 else torch.stack(read).mean(dim=0)
        return found

    def _holds(self, name: str) -> bool:
        return not self._is_sharded or name in self._pieces

    def _piece(self, name: str, numel: int = 0) -> Region:
        """Returns what this rank has of a tensor: all of it, where no bucket cuts it."""
        return self._pieces.get(name) or whole_region((numel,))

    def advance(self) -> None:
        """Issues the second rounds of all buckets under way, in the order in which they left."""
        works, self.current.works = self.current.works, []
        for work in works:
            work.advance()

    def apply_ended_pass(self) -> None:
        """Brings an ended pass into force, unless a gradient was not finite: then its step was left out."""
        if not self.current.is_ended:
            return
        done = self.current
        self.roll_back()
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
        self.whole: dict[str, slice] = {}  # by tensor; the tail, which has no name, last
        self.pieces: dict[str, Region] = {}
        parts, length = [], 0
        first, last = shape.shard or (0, shape.layout.length)
        for name, slot in zip(shape.names, shape.layout.slots, strict=True):
            begin, end = max(slot.offset, first), min(slot.offset + slot.numel, last)
            if begin >= end:
                continue
            place = slice(begin - first, end - first)
            self.pieces[name] = Region(shape=(slot.numel,), begin=begin - slot.offset, end=end - slot.offset)
            part = _part(name, slot, self.pieces[name], length)
            if owner.settings.takes(name, slot.shape) and owner.policy.takes(part.rows, part.columns):
                parts.append(part)
                self.compressed.append(place)
                length += part.size
            else:
                self.whole[name] = place
        if shape.tail:
            self.whole[""] = slice(shape.layout.length - shape.tail, shape.layout.length)
        self.parts = tuple(parts)

    def start(self, buffer: torch.Tensor, comm: Communicator) -> Work:
        self.owner.apply_ended_pass()
        work = _BucketWork(self, buffer)
        if self.parts and self.owner.step >= self.owner.settings.plain_steps:
            work.send_compressed(comm)
        else:
            work.whole, work.whole_work = buffer, comm.all_reduce(buffer, "avg")
        self.owner.current.works.append(work)
        return work

    def split(self, vector: torch.Tensor) -> dict[str, torch.Tensor]:
        return {part.name: vector[part.start : part.stop] for part in self.parts}


class _BucketWork:
    def __init__(self, bucket: _Bucket, buffer: torch.Tensor) -> None:
        self.whole: torch.Tensor | None = None
        self.whole_work: Work = DONE
        self._bucket, self._buffer = bucket, buffer
        self._new_factors: dict[str, torch.Tensor] = {}
        self._vector: torch.Tensor | None = None
        self._rounds: ExchangeRounds | None = None  # what the policy still has to do
        self._round: Work = DONE
        self._num_later = 0  # rounds behind this one
        self._sent_residuals: dict[str, torch.Tensor] = {}
        self._is_done = False

    @torch.no_grad()
    def send_compressed(self, comm: Communicator) -> None:
        bucket, owner, buffer = self._bucket, self._bucket.owner, self._buffer
        residuals = owner.residuals
        if bucket.whole:
            # Tensors that travel whole may have residuals: they did not, in the run that this one goes on from.
            for name, place in bucket.whole.items():
                if name in residuals:
                    buffer[place] += residuals[name]
                    self._sent_residuals[name] = torch.zeros_like(residuals[name])
            self.whole = torch.cat([buffer[place] for place in bucket.whole.values()])
            self.whole_work = comm.all_reduce(self.whole, "avg")
        dtype = torch.float32 if buffer.dtype in NARROW else buffer.dtype
        vector = torch.cat([buffer[place] for place in bucket.compressed]).to(dtype)
        pieces = bucket.split(vector)
        if names := [name for name in pieces if name in residuals]:
            torch._foreach_add_([pieces[name] for name in names], [residuals[name] for name in names])
        context = ExchangeContext(owner.settings, bucket.parts, owner.step, owner.factors, self._new_factors)
        self._vector = vector
        self._rounds = owner.policy.exchange(vector, context, comm)
        self._num_later = owner.policy.num_rounds - 1
        self._round = next(self._rounds)

    @torch.no_grad()
    def advance(self) -> None:
        """Issues the second round, where there is one. Safe to call twice."""
        while self._rounds is not None and self._num_later:
            self._num_later -= 1
            self._round.wait()
            self._round = next(self._rounds)

    @torch.no_grad()
    def wait(self) -> None:
        """Puts the average into the bucket, and keeps what was not sent until the pass is known to count."""
        if self._is_done:
            return
        self._is_done = True
        bucket, buffer, owner = self._bucket, self._buffer, self._bucket.owner
        whole = list(bucket.whole.values())
        owner.advance()
        sums: list[torch.Tensor] = []
        if self.whole is not None:
            self.whole_work.wait()
            if self.whole is buffer:  # what lies between its tensors may be anything
                pieces = [buffer[place].sum() for place in whole + bucket.compressed]
                sums = [torch.stack(pieces).sum()] if pieces else []
            else:
                sums = [self.whole.sum()]
                _put(buffer, whole, self.whole)
        if self._rounds is not None:
            mean = self._finish(self._rounds)
            sums.append(mean.sum())
            _put(buffer, bucket.compressed, mean)
        is_finite = torch.ones((), dtype=torch.bool, device=buffer.device)
        for each in sums:
            is_finite &= each.isfinite()
        changes = owner.current
        changes.is_finite = is_finite if changes.is_finite is None else changes.is_finite & is_finite
        if owner.settings.error_feedback:
            left_over = {} if self._vector is None else bucket.split(self._vector)
            changes.residuals |= left_over | self._sent_residuals
        changes.factors |= self._new_factors

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
    for place, piece in zip(places, torch.split(values, [place.stop - place.start for place in places]), strict=True):
        buffer[place].copy_(piece)


def _part(name: str, slot: Slot, piece: Region, start: int) -> VectorPart:
    """Returns the part of the vector that a piece of a tensor is. A row is the outermost dim of its memory."""
    rows = 1
    if slot.shape and slot.numel:
        rows = slot.shape[max(range(len(slot.shape)), key=lambda dim: (slot.stride[dim], slot.shape[dim]))]
    columns = slot.numel // rows
    lead = piece.begin % columns
    rows = -(-(lead + piece.size) // columns)
    return VectorPart(name=name, start=start, size=piece.size, rows=rows, columns=columns, lead=lead)
