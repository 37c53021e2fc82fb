"""Single functions that scripts around torch's own data parallelism have: each is one line over something else here.

setup_distributed(rank, world_size)                 # run/own_loop.py: a process that the script itself started
...
cleanup_distributed()                               # disconnect
compress_gradients(gradients, compression_ratio=0.1)
auto_scale_batch_size(world_size, base_batch_size)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_map

from paceline.classic.arguments import expect, refuse
from paceline.comm.compress.policies import num_kept
from paceline.comm.torch_dist import disconnect

cleanup_distributed = disconnect


def compress_gradients(gradients: Any, compression_ratio: float = 0.1) -> Any:
    """Keeps the largest elements of each gradient, by magnitude: sparse tensors of indices and values.

    ``gradients`` is a tensor, or several in a list, tuple, dict or generator; None stays None, and ``.to_dense()``
    fills up with zeros. What is left out is dropped; ``CommunicationOptimizer`` keeps it for the next step.
    """
    is_share = isinstance(compression_ratio, int | float) and 0 < compression_ratio <= 1
    rule = "it is the share of elements that is kept, above 0 and at most 1"
    refuse("compress_gradients", expect(is_share, f"compression_ratio = {compression_ratio!r}", rule, "try 0.1"))

    def compress(gradient: Any) -> Any:
        if not isinstance(gradient, torch.Tensor):
            return gradient
        flat = gradient.detach().reshape(-1)
        kept = flat.abs().topk(num_kept(compression_ratio, flat.numel())).indices.sort().values
        places = torch.stack(torch.unravel_index(kept, gradient.shape)) if gradient.ndim else kept.new_zeros(0, 1)
        return torch.sparse_coo_tensor(places, flat[kept], gradient.shape, is_coalesced=True, check_invariants=True)

    return tree_map(compress, list(gradients) if isinstance(gradients, Iterator) else gradients)


def auto_scale_batch_size(world_size: int, base_batch_size: int) -> int:
    """Returns the global batch of ``world_size`` ranks that have ``base_batch_size`` samples each."""
    numbers = {"world_size": world_size, "base_batch_size": base_batch_size}
    rule = "it is a whole number of at least 1"
    wrong = [expect(type(value) is int and value >= 1, f"{name} = {value!r}", rule) for name, value in numbers.items()]
    refuse("auto_scale_batch_size", [problem for each in wrong for problem in each])
    return world_size * base_batch_size
