"""All elements in fewer bits: one bit, eight bits, or sixteen.

Bytes that a rank hands over for n float32 elements, against 4 n:

    sign        n / 8 + 4 a tensor      all-gathered: a rank sends (N-1) times that, 64 / N times less than dense
    int8        n + n / 64              twice: to the owner of each slice, and back; 3.94 times less at any N
    fp16, bf16  2 n                     all-reduced: half

Compute: a few passes over the elements; sign unpacks the messages of all N ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from paceline.comm.base import Communicator
from paceline.comm.compress.exchange import ExchangeContext, ExchangeRounds, Policy, VectorPart, as_bytes

BLOCK = 256  # elements that share a scale
_LEVELS = 127


@dataclass(frozen=True, slots=True, kw_only=True)
class Cast(Policy):
    """Sends the elements in a narrower dtype; backends add up in it too."""

    dtype: torch.dtype

    def exchange(self, vector: torch.Tensor, context: ExchangeContext, comm: Communicator) -> ExchangeRounds:
        """Casts and reduces. Divided first, for a sum may leave the range of fp16 where the average does not."""
        del context
        message = (vector / comm.size).to(self.dtype)
        vector.sub_(message, alpha=comm.size)
        yield comm.all_reduce(message)
        return message.to(vector.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign(Policy):
    """Sends the signs, and for each tensor the mean magnitude of its elements. A zero counts as positive."""

    def exchange(self, vector: torch.Tensor, context: ExchangeContext, comm: Communicator) -> ExchangeRounds:
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
    """Returns the first ``length`` bits as numbers, 0 or 1."""
    places = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(1) >> places) & 1).view(-1)[:length]


def _signed(bits: torch.Tensor, scales: torch.Tensor, parts: tuple[VectorPart, ...], length: int) -> torch.Tensor:
    """Returns plus or minus the scale of each element's tensor."""
    signs = unpack_bits(bits, length).to(scales.dtype).mul_(2).sub_(1)
    for scale, part in zip(scales.unbind(), parts, strict=True):
        signs[part.start : part.stop] *= scale
    return signs


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8(Policy):
    """Sends whole numbers from -127 to 127, and the scale of each block of 256 elements.

    A rank owns a slice of the vector: it gets that slice from all ranks, adds up in the vector's own dtype, and sends
    the average back in eight bits. What its rounding loses is added to what the owner still has to send.
    """

    num_rounds: ClassVar[int] = 2

    def exchange(self, vector: torch.Tensor, context: ExchangeContext, comm: Communicator) -> ExchangeRounds:
        del context
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
        # What the second rounding lost of the average, this rank alone owes: so it owes it for all.
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
