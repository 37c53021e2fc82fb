"""Inputs of checkpointed blocks on the host: they leave the device in forward, and come back ahead of backward.

    device   forward 1   forward 2   forward 3   backward 3   backward 2   backward 1
    bus                  out 1       out 2       in 2         in 1

For L blocks whose inputs take A bytes each, the device has two of them at a time in place of L A, and the host has L A
for each microbatch whose backward has not come. A step is longer by what of 2 L A / W_bus no block computes beside.

[Note: one stream] One stream carries all copies in the order in which they were issued: so memory of the host may be
written again as soon as the copy that reads it has been issued. An input leaves the device when the next one is there
to be copied: the device waits for its copy before it computes on, and writes over the input only after that. No host
waits. The input that came last is still on the device when backward begins, and each that backward asks for has the one
before it brought back. What autograd frees, with or without a backward, is free on the host as well.
"""

from __future__ import annotations

import functools
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from paceline.comm.base import DONE, Work
from paceline.engines.flat.shard import SideStream, dense_stride, host_empty
from paceline.engines.groups import tensors_in
from paceline.errors import UsageError
from paceline.free_memory import free_host_bytes
from paceline.units import GIB, MIB

PIECE_BYTES = 64 * MIB  # of pinned memory, which comes in powers of two, and takes long to get
_LEFT_FREE = 256 * MIB  # of the host's memory


class HostActivations:
    """Memory of the host where the inputs of blocks wait: made once, by need, and used again in every step."""

    def __init__(self, device: torch.device) -> None:
        self.bus = SideStream(device)
        self.host_bytes = 0
        self.device = device
        self._free: defaultdict[int, list[Tensor]] = defaultdict(list)  # by size
        self._newest: Callable[[], _Away | None] = lambda: None

    def __deepcopy__(self, memo: dict[int, Any]) -> HostActivations:
        return self

    def take_inputs(self, blocks: Sequence[nn.Module]) -> None:
        """Lets what is kept of the blocks' inputs wait on the host, in place. They keep them alone: they run again."""
        for block in blocks:
            block.forward = functools.partial(self._run, block.forward)

    def _run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # A leaf is held by whoever wants its gradient, and what needs none (masks, tables) by all blocks.
        inputs = {each.untyped_storage()._cdata for each in tensors_in((args, kwargs)) if each.grad_fn is not None}
        if not inputs or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        with saved_tensors_hooks(functools.partial(self._pack, inputs), self._unpack):
            return forward(*args, **kwargs)

    def _pack(self, inputs: Collection[int], tensor: Tensor) -> Tensor | _Away:
        is_input, dims = tensor.untyped_storage()._cdata in inputs, tensor.squeeze()
        if not is_input or not tensor.numel() or dims.stride() != dense_stride(dims):
            return tensor.detach()  # itself would keep the node that made it
        before = self._newest
        if (newest := before()) is not None:
            newest.leave()
        away = _Away(self, tensor.detach(), before)
        self._newest = weakref.ref(away)
        return away

    def _unpack(self, kept: Tensor | _Away) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        found = kept.come_back()
        if (before := kept.before()) is not None:
            before.start_back()
        return found

    def take(self, num_bytes: int) -> list[Tensor]:
        """Returns pieces of the host's memory for so many bytes. Raises UsageError where there is no room."""
        whole, rest = divmod(num_bytes, PIECE_BYTES)
        return [self._piece(PIECE_BYTES) for _ in range(whole)] + (
            [self._piece(1 << (rest - 1).bit_length())] if rest else []
        )

    def give(self, pieces: Sequence[Tensor]) -> None:
        for piece in pieces:
            self._free[piece.numel()].append(piece)

    def _piece(self, size: int) -> Tensor:
        if self._free[size]:
            return self._free[size].pop()
        if self.device.type != "meta" and (free := free_host_bytes()) < size + _LEFT_FREE:
            raise UsageError(
                f"offload of activations: {self.host_bytes / GIB:.1f} GiB of this rank's wait on the host, "
                f"and {free / GIB:.1f} GiB are left there\n"
                "  the input of every checkpointed block waits there for backward, for all ranks of a host\n"
                "  take a shorter context, a smaller microbatch or fewer ranks on a host; or leave activations out of "
                "memory.offload"
            )
        self.host_bytes += size
        return host_empty(size, torch.uint8, self.device)


class _Away:
    """One input: on the device, on the host, or on its way. See [Note: one stream]."""

    __slots__ = ("__weakref__", "_home", "_like", "_pieces", "_tensor", "_version", "_work", "before")

    def __init__(self, home: HostActivations, tensor: Tensor, before: Callable[[], _Away | None]) -> None:
        self._pieces: list[Tensor] = []  # before all that may fail
        self._tensor: Tensor | None = None
        self._home, self.before = home, before
        self._like = tensor.shape, tensor.stride(), tensor.dtype
        self._pieces = home.take(tensor.numel() * tensor.element_size())
        self._work = home.bus.issue(functools.partial(_copy, self._pieces, tensor, to_host=True))
        self._tensor, self._version = tensor, tensor._version

    def leave(self) -> None:
        """Frees the device's memory, once it has come past the copy."""
        if self._tensor is not None:
            self._check()
            self._work.wait()
            self._tensor = None

    def start_back(self) -> None:
        if self._tensor is None:
            shape, stride, dtype = self._like
            self._tensor = torch.empty_strided(shape, stride, dtype=dtype, device=self._home.device)
            self._work = self._home.bus.issue(functools.partial(_copy, self._pieces, self._tensor, to_host=False))
            self._version = self._tensor._version

    def come_back(self) -> Tensor:
        """Returns the input, on the device; it stays there until autograd frees it."""
        self.start_back()
        assert self._tensor is not None
        self._check()
        self._work.wait()
        return self._tensor

    def _check(self) -> None:
        if self._tensor is not None and self._tensor._version != self._version:
            raise UsageError(
                f"the input of a block, {tuple(self._like[0])}, was changed in place after the block had read it\n"
                "  the block runs again in backward, from the same input\n"
                "  write x = x + y in place of x += y, or leave activations out of memory.offload"
            )

    def __del__(self) -> None:
        if self._tensor is not None:
            self._work.wait()
        self._home.give(self._pieces)


def _copy(pieces: Sequence[Tensor], tensor: Tensor, *, to_host: bool) -> Work:
    flat = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    for piece, part in zip(pieces, torch.split(flat, PIECE_BYTES), strict=True):
        mine = piece[: part.numel()]
        target, source = (mine, part) if to_host else (part, mine)
        target.copy_(source, non_blocking=True)
    return DONE
