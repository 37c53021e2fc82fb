"""What ``True`` means for a trainer's arguments on this machine and for this model; told where it is not the usual."""

from __future__ import annotations

import warnings

from torch import nn

from paceline.cluster.detect import bf16_instructions
from paceline.comm.base import Communicator
from paceline.comm.objects import ask_first_rank
from paceline.engines.checkpointing import checkpoint_blocks, parts_by_size
from paceline.engines.precision import Precision, mixed_precision
from paceline.models.registry import model_blocks


def usual_precision(comm: Communicator) -> Precision | str:
    """Returns what ``mixed_precision=True`` is: not bf16 on a CPU that has no instructions for it, which is told."""
    if comm.device.type != "cpu" or ask_first_rank(comm, bf16_instructions):
        return mixed_precision(comm.device)
    if comm.rank == 0:
        warnings.warn(
            "mixed_precision=True computes in fp32 here: this CPU has no bf16 instructions, and emulates it slowly\n"
            "  for bf16 all the same: mixed_precision='bf16'",
            stacklevel=4,
        )
    return "fp32"


def checkpoint_parts(model: nn.Module, comm: Communicator) -> str:
    """Returns the policy for blocks; where there are none, checkpoints parts by size, or tells that none would gain."""
    if model_blocks(model):
        return "full"
    parts = parts_by_size(model)
    if parts:
        checkpoint_blocks(parts, "full")
    elif comm.rank == 0:
        warnings.warn(
            f"enable_activation_checkpointing=True has nothing to gain in {type(model).__name__}: it has no repeated "
            "blocks, and no two parts with layers inside\n"
            "  it trains without; for parts of your choice, give the model a method blocks()",
            stacklevel=4,
        )
    return "none"
