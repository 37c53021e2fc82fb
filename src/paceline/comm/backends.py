"""Which backends this torch was built with."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def available_backends() -> list[str]:
    """Returns the names of the backends that can be used; empty for a torch that cannot talk."""
    if not dist.is_available():
        return []
    found = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available(), "mpi": dist.is_mpi_available()}
    return [name for name, is_there in found.items() if is_there]


def nccl_version() -> str | None:
    """Returns the version of NCCL, such as ``2.28.3``; None where there is none, or it cannot tell without a GPU."""
    if "nccl" not in available_backends() or not torch.cuda.is_available():
        return None
    nccl: Any = torch.cuda.nccl  # not annotated
    return ".".join(str(part) for part in nccl.version())
