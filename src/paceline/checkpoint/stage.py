"""Host memory that a save in the background copies to: one buffer, made ahead, and kept for the next time.

To map fresh pages takes longer than to copy into them, and to pin them longer still. So the buffer is made by a thread
while the run trains towards its first save: ``reserve``, and then ``copy`` costs what moving the bytes does. Memory:
what a rank writes.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from paceline.checkpoint.write import Share

_ALIGN_BYTES = 64
_PAGE_BYTES = 4096


class Stage:
    """A buffer on the host, pinned where the tensors are on a CUDA device."""

    def __init__(self) -> None:
        self.buffer = torch.empty(0, dtype=torch.uint8)
        self._thread: threading.Thread | None = None

    def reserve(self, shares: Sequence[Share]) -> None:
        """Begins to make room for shares as large as these, in a thread. It does no harm if that fails."""
        self._wait()
        length = _offsets(shares)[-1]
        if self.buffer.numel() < length:
            self.buffer = torch.empty(0, dtype=torch.uint8)  # the old one is free before the new one is there
            self._thread = threading.Thread(
                target=self._make, args=(length, _cuda_device(shares)), name="stage", daemon=True
            )
            self._thread.start()

    def copy(self, shares: Sequence[Share]) -> list[Share]:
        """Returns copies of shares, which last until the next time. Waits until they are made."""
        self._wait()
        offsets, device = _offsets(shares), _cuda_device(shares)
        if self.buffer.numel() < offsets[-1]:
            self.buffer = torch.empty(0, dtype=torch.uint8)
            self.buffer = torch.empty(offsets[-1], dtype=torch.uint8, pin_memory=device is not None)
        staged = []
        for share, offset in zip(shares, offsets, strict=False):
            place = self.buffer[offset : offset + share.num_bytes].view(share.flat.dtype)
            place.copy_(share.flat, non_blocking=True)
            staged.append(Share(name=share.name, region=share.region, flat=place))
        if device is not None:
            torch.cuda.synchronize(device)  # sync point: the next step may change what is being copied
        return staged

    def _make(self, length: int, device: torch.device | None) -> None:
        try:
            if device is not None:
                torch.cuda.set_device(device)  # a new thread has the first one, and would open it
                self.buffer = torch.empty(length, dtype=torch.uint8, pin_memory=True)
                return
            buffer = torch.empty(length, dtype=torch.uint8)
            buffer.numpy()[::_PAGE_BYTES] = 0  # by numpy: torch would start a second set of threads from here
            self.buffer = buffer
        except RuntimeError:
            return  # no memory: told by the save that needs it

    def _wait(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()


def _offsets(shares: Sequence[Share]) -> list[int]:
    """Returns where each share begins, and last where all end."""
    offsets = [0]
    for share in shares:
        offsets.append(offsets[-1] + -(-share.num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES)
    return offsets


def _cuda_device(shares: Sequence[Share]) -> torch.device | None:
    return next((share.flat.device for share in shares if share.flat.device.type == "cuda"), None)
