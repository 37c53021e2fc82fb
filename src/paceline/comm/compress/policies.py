"""How a flat vector is exchanged in fewer bytes: the policies by name, in three kinds.

Few elements of many: the largest, a random choice, or all above a threshold. Bytes that a rank hands over for n
float32 elements, of which it keeps k, against 4 n:

    top-k, threshold    6 k + n / 16384     values, 16 bits of each index, and how many lie in each block of 65,536
    random-k            4 k                 values alone: all ranks draw the same indices from a shared seed

Random-k values are all-reduced, so that a rank sends 2 (N-1)/N times that, as for dense gradients. The others are
all-gathered: a rank sends (N-1) times its message, 4 n / (3 k N) times less than dense.

All elements in fewer bits: one bit, eight bits, or sixteen. Bytes of n float32 elements, against 4 n:

    sign        n / 8 + 4 a tensor      all-gathered: a rank sends (N-1) times that, 64 / N times less than dense
    int8        n + n / 64              twice: to the owner of each slice, and back; 3.94 times less at any N
    fp16, bf16  2 n                     all-reduced: half

PowerSGD: a matrix as the product of two thin ones, found by one power iteration a step (Vogels et al., 2019). For a
matrix of m x n float32 elements and rank r, two all-reduces carry 4 r (m + n) bytes in place of 4 m n:

    P = M Q            averaged over ranks, then made orthonormal: the same on all of them
    Q = M' P           averaged over ranks, and kept: the next step starts from it (warm start)
    M becomes P Q'     exact where the average has no more than rank r

Compute: 4 m n r for the two products and 2 m n r for the result, and a thin QR of each P. What is not sent is M less
P Q', the same product on every rank. A piece of a matrix that begins or ends inside a row is filled up with zeros.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TypeAlias

import torch

from paceline.comm.base import Communicator, Work
from paceline.errors import UsageError
from paceline.plan.layout import COMPRESSIONS, Compression
from paceline.shards import round_up

ExchangeRounds: TypeAlias = Generator[Work, None, torch.Tensor]
Exchange: TypeAlias = "Callable[[torch.Tensor, ExchangeContext, Communicator], ExchangeRounds]"
"""Compresses a vector, which it owns, and sends it on its way; all ranks have vectors of the same length.

Yields every collective that it has issued, is resumed when that is done, and returns the average over the ranks, the
same bits on each; the vector then holds what was not sent. The average of all that was sent and of all that was not is
the average of the vectors, to rounding. What comes before the first ``yield`` runs as soon as the bucket is complete,
what comes after the last one when the step waits. A second round is issued for all buckets before any is finished.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorPart:
    """One tensor of the vector, or a piece of one: where it lies, and the matrix that it is, row by row of its memory.

    Of a piece that begins inside a row, the first ``lead`` elements of that row are missing; it may end inside one too.
    """

    name: str
    start: int
    size: int
    rows: int
    columns: int
    lead: int = 0

    @property
    def stop(self) -> int:
        return self.start + self.size

    @property
    def is_ragged(self) -> bool:
        return self.size != self.rows * self.columns


@dataclass(frozen=True, slots=True)
class ExchangeContext:
    """What a policy needs beside the vector. ``new_factors`` takes what the next step gets as ``factors``."""

    settings: Compression
    parts: tuple[VectorPart, ...]
    step: int
    factors: dict[str, torch.Tensor]
    new_factors: dict[str, torch.Tensor]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


_BLOCK = 2**16  # elements whose place in a block fits into 16 bits
_ALIGN = 8  # bytes: so that every message of a gathered row can be read as numbers of any dtype


def top_k(vector: torch.Tensor, context: ExchangeContext, comm: Communicator) -> ExchangeRounds:
    """Sends the share ``ratio`` of the elements that are largest in magnitude, at least one."""
    chosen = torch.topk(vector.abs(), num_kept(context.settings.ratio, vector.numel()), sorted=False).indices
    return _gather(vector, chosen.sort().values, chosen.numel(), comm)


def above_threshold(vector: torch.Tensor, context: ExchangeContext, comm: Communicator) -> ExchangeRounds:
    """Sends the elements whose magnitude is at least ``threshold``; how many these are differs by rank and step."""
    is_below = vector.abs() < context.settings.threshold
    chosen = is_below.logical_not_().nonzero().view(-1)  # sync point; takes NaN along
    most = torch.tensor([chosen.numel()], device=vector.device)
    yield comm.all_reduce(most, "max")
    return (yield from _gather(vector, chosen, int(most.item()), comm))  # sync point


def random_k(vector: torch.Tensor, context: ExchangeContext, comm: Communicator) -> ExchangeRounds:
    """Sends the share ``ratio`` of the elements, at least one, chosen anew in each step and alike on all ranks.

    The vector is cut into as many pieces as elements are sent, and one is drawn from each: all have the same chance.
    """
    length = vector.numel()
    kept = num_kept(context.settings.ratio, length)
    # The same numbers on all ranks; in a dry run, whose tensors have no values, none.
    seed = zlib.crc32(f"{context.step} {context.parts[0].name}".encode())
    generator = None if vector.is_meta else torch.Generator(device=vector.device).manual_seed(seed)
    drawn = torch.rand(kept, dtype=torch.float64, device=vector.device, generator=generator)
    edges = torch.arange(kept + 1, device=vector.device) * length // kept
    first, width = edges[:-1], edges.diff()
    chosen = first + torch.minimum((drawn * width).long(), width - 1)
    values = vector[chosen]
    # An element that is not finite may not be among the chosen: its step must be left out all the same.
    values[:1] += vector.sum() * 0
    yield comm.all_reduce(values, "avg")
    mean = torch.zeros_like(vector)
    mean[chosen] = values
    vector[chosen] = 0
    return mean


def num_kept(ratio: float, length: int) -> int:
    return min(length, max(1, round(ratio * length)))


def _gather(vector: torch.Tensor, chosen: torch.Tensor, num_slots: int, comm: Communicator) -> ExchangeRounds:
    """Gathers messages of ``num_slots`` elements from every rank, filled up with zeros, and averages in rank order."""
    message = pack(vector[chosen], chosen, vector.numel(), num_slots)
    received = torch.empty(comm.size * message.numel(), dtype=torch.uint8, device=vector.device)
    yield comm.all_gather(received, message)
    mean = torch.zeros_like(vector)
    for row in received.view(comm.size, -1):
        values, indices = unpack(row, mean.dtype, mean.numel(), num_slots)
        mean.index_add_(0, indices, values)
    vector[chosen] = 0
    return mean.div_(comm.size)


def pack(values: torch.Tensor, indices: torch.Tensor, length: int, num_slots: int) -> torch.Tensor:
    """Writes elements and ascending indices into bytes: of an index the low 16 bits, the rest in counts of blocks."""
    blocks = indices // _BLOCK
    counts = torch.zeros(max(1, -(-length // _BLOCK)), dtype=torch.int32, device=values.device)
    counts.scatter_add_(0, blocks, torch.ones_like(blocks, dtype=torch.int32))
    counts[-1] += num_slots - values.numel()  # what fills the message up: zeros, added to the last block
    low = (indices % _BLOCK).to(torch.int16)  # wraps around; read back as if unsigned
    num_bytes = round_up(num_slots * (values.element_size() + 2) + 4 * counts.numel(), _ALIGN)
    message = torch.zeros(num_bytes, dtype=torch.uint8, device=values.device)
    place = 0
    for piece, slots in ((values, num_slots), (counts, counts.numel()), (low, num_slots)):
        data = as_bytes(piece)
        message[place : place + data.numel()] = data
        place += slots * piece.element_size()
    return message


def unpack(message: torch.Tensor, dtype: torch.dtype, length: int, num_slots: int) -> tuple[torch.Tensor, torch.Tensor]:
    num_blocks = max(1, -(-length // _BLOCK))
    sizes = [num_slots * dtype.itemsize, 4 * num_blocks, 2 * num_slots]
    values, counts, low = torch.split(message[: sum(sizes)], sizes)
    numbers = torch.arange(num_blocks, device=message.device)
    blocks = torch.repeat_interleave(numbers, counts.view(torch.int32).long(), output_size=num_slots)
    return values.view(dtype), blocks * _BLOCK + (low.view(torch.int16).long() & (_BLOCK - 1))


BLOCK = 256  # elements that share a scale
_LEVELS = 127


def cast(vector: torch.Tensor, context: ExchangeContext, comm: Communicator) -> ExchangeRounds:
    """Sends the elements in a narrower dtype, divided first: a sum may leave the range of fp16."""
    message = (vector / comm.size).to(_HALVES[context.settings.policy])
    vector.sub_(message, alpha=comm.size)
    yield comm.all_reduce(message)
    return message.to(vector.dtype)


def signs(vector: torch.Tensor, context: ExchangeContext, comm: Communicator) -> ExchangeRounds:
    """Sends the signs, and for each tensor the mean magnitude of its elements. A zero counts as positive."""
    parts = context.parts
    scales = torch.stack([vector[part.start : part.stop].abs().mean() for part in parts])
    bits = pack_bits(vector >= 0)
    message = torch.cat([as_bytes(scales), bits])
    vector.sub_(_signed(bits, scales, parts, vector.numel()))
    received = torch.empty(comm.size * message.numel(), dtype=torch.uint8, device=vector.device)
    yield comm.all_gather(received, message)
    mean = torch.zeros_like(vector)
    head = len(parts) * mean.element_size()
    for row in received.view(comm.size, -1):
        scales = row[:head].clone().view(mean.dtype)  # a copy: a row need not begin where a number may
        mean.add_(_signed(row[head:], scales, parts, mean.numel()))
    return mean.div_(comm.size)


def pack_bits(bits: torch.Tensor) -> torch.Tensor:
    """Packs booleans into bytes, eight in each, the first one lowest."""
    padded = torch.zeros(-(-bits.numel() // 8) * 8, dtype=torch.uint8, device=bits.device)
    padded[: bits.numel()] = bits
    rows, packed = padded.view(-1, 8), torch.zeros(padded.numel() // 8, dtype=torch.uint8, device=bits.device)
    for place in range(8):
        packed |= rows[:, place] << place
    return packed


def unpack_bits(packed: torch.Tensor, length: int) -> torch.Tensor:
    places = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(1) >> places) & 1).view(-1)[:length]


def _signed(bits: torch.Tensor, scales: torch.Tensor, parts: tuple[VectorPart, ...], length: int) -> torch.Tensor:
    signs = unpack_bits(bits, length).to(scales.dtype).mul_(2).sub_(1)
    for scale, part in zip(scales.unbind(), parts, strict=True):
        signs[part.start : part.stop] *= scale
    return signs


def int8(vector: torch.Tensor, _: ExchangeContext, comm: Communicator) -> ExchangeRounds:
    """Sends whole numbers from -127 to 127, and the scale of each block of 256 elements.

    A rank owns a slice: it adds it up in the vector's own dtype, and sends the average back in eight bits. What its
    rounding loses is added to what the owner still has to send.
    """
    per_rank = -(-vector.numel() // (comm.size * BLOCK))
    padded = vector.new_zeros(comm.size, per_rank * BLOCK)
    padded.view(-1)[: vector.numel()] = vector
    message = torch.stack([quantise(piece) for piece in padded])
    sent = torch.stack([dequantise(piece, vector.dtype) for piece in message])
    vector.sub_(sent.view(-1)[: vector.numel()])
    del padded, sent
    received = torch.empty_like(message)
    yield comm.all_to_all(received, message)
    total = dequantise(received[0], vector.dtype)
    for each in received[1:]:
        total += dequantise(each, vector.dtype)
    answer = quantise(total.div_(comm.size))
    error = total.sub_(dequantise(answer, total.dtype))
    # What the second rounding lost of the average is in no other residual: this rank sends it for all.
    mine = vector[comm.rank * error.numel() :][: error.numel()]
    mine.add_(error[: mine.numel()], alpha=comm.size)
    answers = torch.empty_like(message)
    yield comm.all_gather(answers, answer)
    whole = torch.stack([dequantise(each, vector.dtype) for each in answers])
    return whole.view(-1)[: vector.numel()]


def quantise(values: torch.Tensor) -> torch.Tensor:
    """Writes whole blocks as bytes: the scales in float32, then the numbers. The error is at most half a scale."""
    blocks = values.view(-1, BLOCK)
    scales = (blocks.abs().amax(dim=1, keepdim=True) / _LEVELS).to(torch.float32)
    safe = torch.where(scales == 0, torch.ones_like(scales), scales).to(values.dtype)
    # A block that is not finite has a scale that is not, and so has all that is made of it; its numbers mean nothing.
    numbers = (blocks / safe).nan_to_num(0.0, 0.0, 0.0).round_().clamp_(-_LEVELS, _LEVELS).to(torch.int8)
    return torch.cat([as_bytes(scales), as_bytes(numbers)])


def dequantise(message: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    num_blocks = message.numel() // (BLOCK + 4)
    scales = message[: 4 * num_blocks].view(torch.float32)
    numbers = message[4 * num_blocks :].view(torch.int8).view(num_blocks, BLOCK)
    return (numbers.to(dtype) * scales.to(dtype).unsqueeze(1)).view(-1)


def power_sgd(vector: torch.Tensor, context: ExchangeContext, comm: Communicator) -> ExchangeRounds:
    parts, rank = context.parts, context.settings.factor_rank
    matrices = [_matrix(vector[part.start : part.stop], part) for part in parts]
    starts = [_first_factor(part, context, rank, vector) for part in parts]
    # In one buffer each, so that a bucket takes two collectives, however many matrices it has.
    left_flat, lefts = _factors([part.rows for part in parts], rank, vector)
    right_flat, rights = _factors([part.columns for part in parts], rank, vector)
    for matrix, right, left in zip(matrices, starts, lefts, strict=True):
        torch.mm(matrix, right, out=left)
    del starts
    yield comm.all_reduce(left_flat, "avg")
    for matrix, left, right in zip(matrices, lefts, rights, strict=True):
        left.copy_(torch.linalg.qr(left).Q)  # a zero column becomes a unit vector: an iteration never gets stuck
        torch.mm(matrix.t(), left, out=right)
    yield comm.all_reduce(right_flat, "avg")
    mean = torch.empty_like(vector)
    for part, left, right in zip(parts, lefts, rights, strict=True):
        mine = mean[part.start : part.stop]
        if part.is_ragged:
            mine.copy_(torch.mm(left, right.t()).view(-1)[part.lead : part.lead + part.size])
        else:
            torch.mm(left, right.t(), out=mine.view(part.rows, part.columns))
        context.new_factors[part.name] = right.clone()
    vector.sub_(mean)
    return mean


def _matrix(values: torch.Tensor, part: VectorPart) -> torch.Tensor:
    if part.is_ragged:
        filled = values.new_zeros(part.rows * part.columns)
        filled[part.lead : part.lead + part.size] = values
        values = filled
    return values.view(part.rows, part.columns)


def _first_factor(part: VectorPart, context: ExchangeContext, rank: int, like: torch.Tensor) -> torch.Tensor:
    """Returns the right factor of the last step; in the first one random numbers that all ranks share."""
    known = context.factors.get(part.name)
    if known is not None and known.shape == (part.columns, rank):
        return known.to(like)
    generator = torch.Generator().manual_seed(zlib.crc32(f"0 {part.name}".encode()))
    return torch.randn(part.columns, rank, generator=generator, dtype=torch.float64).to(like)


def _factors(lengths: list[int], rank: int, like: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    flat = like.new_empty(sum(lengths) * rank)
    pieces = torch.split(flat, [length * rank for length in lengths])
    return flat, [piece.view(length, rank) for piece, length in zip(pieces, lengths, strict=True)]


POLICIES = tuple(name for name in COMPRESSIONS if name != "none")
_HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}
_EXCHANGES: dict[str, Exchange] = {
    "topk": top_k,
    "randomk": random_k,
    "threshold": above_threshold,
    "powersgd": power_sgd,
    "sign": signs,
    "int8": int8,
    "fp16": cast,
    "bf16": cast,
}


class Policy:
    """How vectors are exchanged, as the settings name it. Raises UsageError where they name none."""

    def __init__(self, settings: Compression) -> None:
        if settings.policy not in _EXCHANGES:
            what = f"compression policy = {settings.policy!r} is unknown"
            raise UsageError(f"{what}\n  it is one of {', '.join(POLICIES)}\n  take one of these")
        self.exchange = _EXCHANGES[settings.policy]
        self.num_rounds = 2 if settings.policy in ("threshold", "int8", "powersgd") else 1
        self._smallest_rank = settings.factor_rank if settings.policy == "powersgd" else 0

    def takes(self, rows: int, columns: int) -> bool:
        """Says whether a matrix becomes smaller by this policy."""
        return self._smallest_rank * (rows + columns) < rows * columns
