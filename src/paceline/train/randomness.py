"""What the bits of a result depend on: one seed for the model, a stream a rank for dropout, and the threads."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from paceline.data.order import mix_seed


def seed_everything(*numbers: int) -> None:
    """Seeds torch (CPU and CUDA), numpy and Python from a few numbers, such as (seed, rank)."""
    seed = mix_seed(*numbers)
    torch.manual_seed(seed % 2**63)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def make_deterministic() -> None:
    """Lets torch use deterministic kernels alone; it raises where there is none. For the process's whole life."""
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def capture_random_states(device: torch.device) -> dict[str, Any]:
    """Reads this rank's random states, as plain values that a checkpoint can hold."""
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    version, words, gauss_next = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "numpy": [str(name), torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, gauss],
        "python": [version, list(words), gauss_next],
    }


def restore_random_states(states: dict[str, Any], device: torch.device) -> None:
    torch.set_rng_state(states["torch"])
    if device.type == "cuda" and states["cuda"] is not None:
        torch.cuda.set_rng_state(states["cuda"], device)
    name, keys, position, has_gauss, gauss = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    version, words, gauss_next = states["python"]
    random.setstate((version, tuple(words), gauss_next))


@contextlib.contextmanager
def compute_threads(number: int) -> Iterator[None]:
    """Computes with so many threads, and with as many as before afterwards. How sums are cut depends on it."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
