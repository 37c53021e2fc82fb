"""Which backends this torch was built with. Apart from ``torch_dist.py``, which a torch without any cannot load."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def available_backends() -> list[str]:
    """Returns the names of the backends; empty for a torch without ``torch.distributed``."""
    if not dist.is_available():
        return []
    found = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available(), "mpi": dist.is_mpi_available()}
    return [name for name, is_there in found.items() if is_there]


def nccl_version() -> str | None:
    """Returns the version of NCCL, such as ``2.28.3``; None without NCCL or without a GPU."""
    if "nccl" not in available_backends() or not torch.cuda.is_available():
        return None
    nccl: Any = torch.cuda.nccl  # not annotated
    return ".".join(str(part) for part in nccl.version())
