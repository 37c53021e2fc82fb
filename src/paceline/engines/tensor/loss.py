"""Logits that stay split by vocabulary: cross entropy and the best token without ever gathering them.

With z the logits of a token, of which each rank has a part, the loss is

    log sum_v exp(z_v - m) - (z_target - m)        m = max_v z_v

so three numbers a token travel: one all-reduce of maxima, one of the sums of exponentials together with the target's
logit. For N tokens that is 24 N bytes a rank in fp32 at most, where gathering would send 4 N V (T-1)/T. Backward sends
nothing: each rank has the probabilities of its own part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from paceline.comm.base import Communicator
from paceline.engines.nodes import moved
from paceline.engines.tensor.layout import Split
from paceline.errors import UsageError
from paceline.models.head_loss import check_targets

_HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, eq=False)
class SplitLogits:
    """This rank's part of the logits: those of the tokens from ``first`` on, in the last dim of ``local``."""

    local: Tensor
    comm: Communicator
    first: int
    vocab_size: int

    @property
    def shape(self) -> torch.Size:
        """The shape of all ranks' logits together."""
        return torch.Size((*self.local.shape[:-1], self.vocab_size))

    def cross_entropy(self, targets: Tensor, ignore_index: int = -100) -> Tensor:
        """Returns the summed cross entropy, the same on every rank; targets of ``ignore_index`` count nothing."""
        rows = self.local.reshape(-1, self.local.shape[-1])
        flat = targets.reshape(-1)
        if rows.shape[0] != flat.shape[0]:
            raise UsageError(
                f"{flat.shape[0]} targets for the logits of {rows.shape[0]} tokens\n  each token has one target\n"
                "  give targets of the logits' shape without its last dim"
            )
        if flat.device.type == "cpu":
            check_targets(flat, self.vocab_size, ignore_index)
        if rows.dtype in _HALF:  # sums and exponentials need more digits
            rows = rows.float()
        apply: Callable[..., Tensor] = _SplitCrossEntropy.apply
        return apply(rows, flat, self.comm, self.first, ignore_index)

    @torch.no_grad()
    def argmax(self, dim: int = -1) -> Tensor:
        """Returns the token of the largest logit, the first of equals; along the last dim alone."""
        if dim not in (-1, self.local.ndim - 1):
            raise UsageError(
                f"argmax(dim={dim}) of split logits\n  ranks have parts of the vocabulary, which is the last dim\n"
                "  take argmax(-1), or gather() for everything else"
            )
        value, index = self.local.max(-1)
        values = value.new_empty(self.comm.size, *value.shape)
        indices = index.new_empty(self.comm.size, *index.shape)
        for work in [
            self.comm.all_gather(values, value.contiguous()),
            self.comm.all_gather(indices, index + self.first),
        ]:
            work.wait()
        # The first of equals is on the first rank: within a rank max() gives any of them, as torch's argmax does.
        best = values.max(0).values
        owner = (values == best).int().argmax(0, keepdim=True)
        return indices.gather(0, owner).squeeze(0)

    def gather(self) -> Tensor:
        """Returns the logits of the whole vocabulary, on every rank. What follows must be the same on all of them."""
        split, comm = Split(shape=tuple(self.shape), dim=self.local.ndim - 1), self.comm
        first, last = self.first, self.first + self.local.shape[-1]
        # Not a method of this object, which would keep the logits until backward, where every rank has all gradients.
        return moved(self.local, lambda local: split.gather(local, comm), lambda gradient: gradient[..., first:last])

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"split logits have no {name!r}: this rank has a part of the vocabulary. They have cross_entropy(targets), "
            "argmax() and gather(); apply_tensor_parallel(..., gathers_logits=True) makes the model return whole logits"
        )


def causal_loss(
    logits: SplitLogits,
    labels: Tensor | None,
    vocab_size: int | None = None,  # those of the logits; as the library calls it
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **_others: Any,
) -> Tensor:
    """Returns the loss of Hugging Face's causal models from ``labels=``: each token predicts the next one."""
    del vocab_size
    if shift_labels is None:
        shift_labels = torch.nn.functional.pad(cast("Tensor", labels), (0, 1), value=ignore_index)[..., 1:]
    targets = shift_labels.to(logits.local.device)
    count = (targets != ignore_index).sum() if num_items_in_batch is None else num_items_in_batch
    return logits.cross_entropy(targets, ignore_index) / count


class _SplitCrossEntropy(torch.autograd.Function):
    """The summed cross entropy of rows of split logits."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, targets: Tensor, comm: Communicator, first: int, ignore_index: int) -> Tensor:
        peak = rows.amax(-1)
        comm.all_reduce(peak, "max").wait()
        shifted = rows - peak[:, None]
        counts = targets != ignore_index
        is_own = counts & (targets >= first) & (targets < first + rows.shape[1])
        index = torch.where(is_own, targets - first, 0)[:, None]
        own = shifted.gather(1, index).squeeze(1) * is_own
        exponentials = shifted.exp_()
        sums = torch.stack((exponentials.sum(-1), own))
        comm.all_reduce(sums).wait()
        ctx.save_for_backward(exponentials.div_(sums[0, :, None]), index, is_own, counts)
        return torch.where(counts, sums[0].log() - sums[1], 0.0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        probabilities, index, is_own, counts = ctx.saved_tensors
        rows = probabilities * counts[:, None]
        rows.scatter_add_(1, index, -is_own[:, None].to(rows.dtype))
        return rows.mul_(gradient), None, None, None, None
