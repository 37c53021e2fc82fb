"""How many CPU threads this process computes with, for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def compute_threads(number: int) -> Iterator[None]:
    """Computes with so many threads, and with as many as before afterwards. How sums are cut depends on it."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
