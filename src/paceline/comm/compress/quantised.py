"""All elements in fewer bits: one bit, eight bits, or sixteen.

Bytes that a rank hands over for n float32 elements, against 4 n:

    sign        n / 8 + 4 a tensor      all-gathered: a rank sends (N-1) times that, 64 / N times less than dense
    int8        n + n / 64              twice: to the owner of each slice, and back; 3.94 times less at any N
    fp16, bf16  2 n                     all-reduced: half

Compute: a few passes over the elements; sign unpacks the messages of all N ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paceline.comm.base import Communicator, Work
from paceline.comm.compress.exchange import Exchange, Part, Task, as_bytes

BLOCK = 256  # elements that share a scale
_LEVELS = 127


class _TakesAll:
    """Takes every tensor."""

    def takes(self, rows: int, columns: int) -> bool:
        """Says that a matrix of this shape is compressed."""
        del rows, columns
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Cast(_TakesAll):
    """Sends the elements in a narrower dtype; backends add up in it too."""

    dtype: torch.dtype

    def start(self, vector: torch.Tensor, task: Task, comm: Communicator) -> Exchange:
        """Casts and reduces. Divided first, for a sum may leave the range of fp16 where the average does not."""
        del task
        message = (vector / comm.size).to(self.dtype)
        vector.sub_(message, alpha=comm.size)
        return _CastExchange(vector, message, comm.all_reduce(message))


class _CastExchange:
    def __init__(self, vector: torch.Tensor, message: torch.Tensor, work: Work) -> None:
        self._vector = vector
        self._message = message
        self._work = work

    def advance(self) -> None:
        """There is one round."""

    def finish(self) -> torch.Tensor:
        """Casts back."""
        self._work.wait()
        return self._message.to(self._vector.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign(_TakesAll):
    """Sends the signs, and for each tensor the mean magnitude of its elements. A zero counts as positive."""

    def start(self, vector: torch.Tensor, task: Task, comm: Communicator) -> Exchange:
        """Packs eight signs into a byte, and gathers."""
        scales = torch.stack([vector[part.start : part.stop].abs().mean() for part in task.parts])
        bits = pack_bits(vector >= 0)
        message = torch.cat([as_bytes(scales), bits])
        vector.sub_(_signed(bits, scales, task.parts, vector.numel()))
        received = torch.empty(comm.size * message.numel(), dtype=torch.uint8, device=vector.device)
        return _SignExchange(vector, task.parts, received, message, comm)


class _SignExchange:
    def __init__(
        self,
        vector: torch.Tensor,
        parts: tuple[Part, ...],
        received: torch.Tensor,
        message: torch.Tensor,
        comm: Communicator,
    ) -> None:
        self._vector = vector
        self._parts = parts
        self._received = received
        self._size = comm.size
        self._message = message
        self._work = comm.all_gather(received, message)

    def advance(self) -> None:
        """There is one round."""

    def finish(self) -> torch.Tensor:
        """Adds up the messages in the order of ranks."""
        self._work.wait()
        mean = torch.zeros_like(self._vector)
        head = len(self._parts) * mean.element_size()
        for row in self._received.view(self._size, -1):
            scales = row[:head].clone().view(mean.dtype)  # a copy: a row need not begin where a number may
            mean.add_(_signed(row[head:], scales, self._parts, mean.numel()))
        return mean.div_(self._size)


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


def _signed(bits: torch.Tensor, scales: torch.Tensor, parts: tuple[Part, ...], length: int) -> torch.Tensor:
    """Returns plus or minus the scale of each element's tensor."""
    signs = unpack_bits(bits, length).to(scales.dtype).mul_(2).sub_(1)
    for scale, part in zip(scales.unbind(), parts, strict=True):
        signs[part.start : part.stop] *= scale
    return signs


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8(_TakesAll):
    """Sends whole numbers from -127 to 127, and the scale of each block of 256 elements.

    A rank owns a slice of the vector: it gets that slice from all ranks, adds up in the vector's own dtype, and sends
    the average back in eight bits. What its rounding loses is added to what the owner still has to send.
    """

    def start(self, vector: torch.Tensor, task: Task, comm: Communicator) -> Exchange:
        """Quantises the slices and sends each to its owner."""
        del task
        return _Int8Exchange(vector, comm)


class _Int8Exchange:
    def __init__(self, vector: torch.Tensor, comm: Communicator) -> None:
        self._vector = vector
        self._comm = comm
        per_rank = -(-vector.numel() // (comm.size * BLOCK))
        padded = vector.new_zeros(comm.size, per_rank * BLOCK)
        padded.view(-1)[: vector.numel()] = vector
        self._message = torch.stack([quantise(piece) for piece in padded])
        sent = torch.stack([dequantise(piece, vector.dtype) for piece in self._message])
        vector.sub_(sent.view(-1)[: vector.numel()])
        self._received = torch.empty_like(self._message)
        self._work = comm.all_to_all(self._received, self._message)
        self._answers: torch.Tensor | None = None

    def advance(self) -> None:
        """Averages the slice that this rank owns, and sends it to all."""
        if self._answers is not None:
            return
        self._work.wait()
        total = dequantise(self._received[0], self._vector.dtype)
        for message in self._received[1:]:
            total += dequantise(message, total.dtype)
        total /= self._comm.size
        answer = quantise(total)
        self._keep_error(total.sub_(dequantise(answer, total.dtype)))
        self._answers = torch.empty_like(self._message)
        self._message = answer
        self._work = self._comm.all_gather(self._answers, answer)

    def _keep_error(self, error: torch.Tensor) -> None:
        """Adds what the second rounding lost of the average: this rank alone owes it, so it owes it for all."""
        first = self._comm.rank * error.numel()
        mine = self._vector[first : first + error.numel()]
        mine.add_(error[: mine.numel()], alpha=self._comm.size)

    def finish(self) -> torch.Tensor:
        """Puts the slices together."""
        self.advance()
        self._work.wait()
        assert self._answers is not None
        whole = torch.stack([dequantise(answer, self._vector.dtype) for answer in self._answers])
        return whole.view(-1)[: self._vector.numel()]


def quantise(values: torch.Tensor) -> torch.Tensor:
    """Writes whole blocks as bytes: the scales in float32, then the numbers. The error is at most half a scale."""
    blocks = values.view(-1, BLOCK)
    scales = (blocks.abs().amax(dim=1, keepdim=True) / _LEVELS).to(torch.float32)
    safe = torch.where(scales == 0, torch.ones_like(scales), scales).to(values.dtype)
    # A block that is not finite has a scale that is not, and so has all that is made of it; its numbers mean nothing.
    numbers = (blocks / safe).nan_to_num(0.0, 0.0, 0.0).round_().clamp_(-_LEVELS, _LEVELS).to(torch.int8)
    return torch.cat([as_bytes(scales), as_bytes(numbers)])


def dequantise(message: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Reads what ``quantise`` wrote."""
    num_blocks = message.numel() // (BLOCK + 4)
    scales = message[: 4 * num_blocks].view(torch.float32)
    numbers = message[4 * num_blocks :].view(torch.int8).view(num_blocks, BLOCK)
    return (numbers.to(dtype) * scales.to(dtype).unsqueeze(1)).view(-1)
