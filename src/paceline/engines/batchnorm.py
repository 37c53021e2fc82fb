"""Batch norm over the samples of all ranks: the statistics of a batch do not depend on how it is cut.

Every rank reduces its own samples to a count n, a mean m and a sum of squared deviations q for each channel. One
all-gather brings the ranks' numbers together, and (Chan et al. 1979)

    N = sum n        mean = sum n m / N        variance = (sum q + sum n (m - mean)^2) / N

which loses no digits where a plain sum of squares would. Backward needs the sums of dy and dy * xhat over the whole
batch: one all-reduce. Per layer and pass, for C channels: 16 C bytes gathered from each rank, and 16 C reduced.

A rank that runs no forward (``engine.join_pass()``) stands in with messages of count zero, and moves its running
statistics as the others do. Its messages leave before the pass begins, on a communicator of the layers' own, so that it
neither waits for other ranks' computation nor disturbs the engine's collectives. It assumes that layers are called as
often as in its own last pass of the same kind; before its first one, once each.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from paceline.comm.base import Communicator, Work
from paceline.engines.blocks import Replay
from paceline.engines.groups import wait_for_all
from paceline.errors import UsageError

_HEAD = 2  # in front of the channels: how many values, and the number of the layer (0: this rank stands in)


def synchronise_batchnorm(module: nn.Module, comm: Communicator) -> nn.Module:
    """Lets batch norms compute over all ranks' samples, in place, but for those with a forward of their own."""
    plain = [each for each in module.modules() if isinstance(each, _BatchNorm)]
    layers = [each for each in plain if isinstance(each, nn.SyncBatchNorm) or type(each).forward is _BatchNorm.forward]
    if comm.size == 1 or not layers:
        return module
    exchange = Exchange(module, comm.split(range(comm.size)))
    # No compiler follows a conversation between ranks. Said here, as a decorator would load it with this file.
    forward = cast("Any", torch.compiler).disable(SyncBatchNorm.forward)
    for layer in layers:
        kind = type(layer)
        # A class that is both: the layer's own kind knows its shapes and how it is initialised.
        layer.__class__ = type(f"Sync{kind.__name__}", (SyncBatchNorm, kind), {"forward": forward})
        exchange.add(cast("SyncBatchNorm", layer))
    return module


def standing_in(module: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Stands in for the layers of ``module`` in a pass of the other ranks: around what the engine itself does there."""
    exchange = next((layer.exchange for layer in module.modules() if isinstance(layer, SyncBatchNorm)), None)
    return contextlib.nullcontext() if exchange is None else exchange.standing_in()


@dataclass(frozen=True, slots=True)
class Moments:
    """Statistics of a layer's input over all ranks."""

    count: Tensor
    mean: Tensor
    variance: Tensor


def combine(counts: Tensor, means: Tensor, squares: Tensor) -> Moments:
    """Combines counts (ranks, 1), means and sums of squared deviations (ranks, channels) of parts into those of all."""
    count = counts.sum()
    safe = count.clamp(min=1.0)  # where nobody has a value, everything is zero
    mean = (counts * means).sum(0) / safe
    return Moments(count, mean, (squares + counts * (means - mean).square()).sum(0) / safe)


class SyncBatchNorm(_BatchNorm):
    """Batch norm whose statistics are those of all ranks' samples."""

    exchange: Exchange
    number: int
    replay: Replay | None = None  # set while a checkpointed block runs: the second run asks nobody

    @property
    def uses_batch_statistics(self) -> bool:
        """Whether the layer looks at the batch: in training, and always where it keeps no running statistics."""
        return self.training or self.running_mean is None

    def forward(self, x: Tensor) -> Tensor:
        """Normalises ``x`` (samples, channels, ...); asks the other ranks where it looks at the batch."""
        self._check_input_dim(x)  # type: ignore[no-untyped-call]
        if not self.uses_batch_statistics:
            return _BatchNorm.forward(self, x)
        moments = self._moments(x) if self.replay is None else self.replay.once(lambda: self._moments(x))
        apply: Callable[..., Tensor] = _Normalise.apply
        return apply(x, self.weight, self.bias, moments, self.eps, self.exchange)

    @torch.no_grad()
    def _moments(self, x: Tensor) -> Moments:
        wide = x.to(_statistics_dtype(x))
        count = x.numel() // max(x.shape[1], 1)
        if count:
            variance, mean = torch.var_mean(wide, [0, *range(2, x.ndim)], correction=0)
        else:
            variance = mean = wide.new_zeros(x.shape[1])
        moments = self.exchange.gather(self.number, count, mean, variance * count)
        self.move_statistics(moments)
        return moments

    @torch.no_grad()
    def move_statistics(self, moments: Moments) -> None:
        if not (self.training and self.track_running_stats) or self.running_mean is None or self.running_var is None:
            return
        factor: Tensor | float = 0.0 if self.momentum is None else self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                factor = 1.0 / self.num_batches_tracked.to(self.running_mean.dtype)
        unbiased = moments.variance * (moments.count / (moments.count - 1.0).clamp(min=1.0))
        self.running_mean.lerp_(moments.mean.to(self.running_mean.dtype), factor)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), factor)


class _Normalise(torch.autograd.Function):
    """(x - mean) / sqrt(variance + eps) * weight + bias, where mean and variance depend on every rank's x."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, whole: Moments, eps: float, exchange: Exchange
    ) -> Tensor:
        dtype = _statistics_dtype(x)
        mean, variance = whole.mean.to(dtype), whole.variance.to(dtype)
        ctx.save_for_backward(x, weight, mean, variance, whole.count)
        ctx.eps, ctx.exchange, ctx.bias_dtype = eps, exchange, None if bias is None else bias.dtype
        if not x.numel():
            return x.clone()
        return F.batch_norm(x, mean, variance, _to(weight, dtype), _to(bias, dtype), False, 0.0, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, variance, count = ctx.saved_tensors
        scale = _to(weight, mean.dtype)
        if x.numel():
            # As if the statistics were constants: the gradient of x, and in the same pass the two sums.
            # CUDA wants the saved statistics there, though it does not use them then.
            saved = (mean, (variance + ctx.eps).rsqrt())
            dx, products, sums = torch.ops.aten.native_batch_norm_backward(
                gradient, x, scale, mean, variance, *saved, False, ctx.eps, [True, True, True]
            )
        else:
            dx, products, sums = gradient.clone(), torch.zeros_like(mean), torch.zeros_like(mean)
        totals = ctx.exchange.add_up(sums, products) / count.clamp(min=1.0)
        inverse = (variance + ctx.eps).rsqrt()
        shape = [1, -1] + [1] * (x.ndim - 2)
        mean_sum, mean_product = (each.to(mean.dtype) for each in totals)
        slope = inverse if scale is None else inverse * scale
        constant, linear = (slope * mean_sum).view(shape), (slope * inverse * mean_product).view(shape)
        dx.sub_(torch.addcmul(constant, x - mean.view(shape), linear))  # what the statistics' own gradients take back
        of_weight = None if weight is None else products.to(weight.dtype)
        of_bias = None if ctx.bias_dtype is None else sums.to(ctx.bias_dtype)  # there may be a weight without a bias
        return dx, of_weight, of_bias, None, None, None


class _PassKind(NamedTuple):
    """A kind of pass: passes of one kind call the layers equally often."""

    looks_at_batch: tuple[bool, ...]
    has_gradients: bool
    num_trained: int  # layers that backward will reach: something at or before them is trained, as far as can be told


class Exchange:
    """What the synchronised layers of a model share: a communicator of their own, and how often they are called."""

    def __init__(self, module: nn.Module, comm: Communicator) -> None:
        self.comm = comm
        self.layers: list[SyncBatchNorm] = []
        self._modules = list(module.modules())
        self._width = 0  # every message is as long as the longest: who stands in need not know whose turn it is
        self._kind: _PassKind | None = None
        self._num_forward = self._num_backward = 0
        self._num_calls: dict[_PassKind, tuple[int, int]] = {}
        module.register_forward_pre_hook(self._begin)

    def __deepcopy__(self, memo: dict[int, Any]) -> Exchange:
        return self

    def add(self, layer: SyncBatchNorm) -> None:
        self.layers.append(layer)
        layer.exchange, layer.number = self, len(self.layers)
        self._width = max(self._width, layer.num_features)

    # What a layer asks for in a pass of this rank.

    def gather(self, number: int, count: int, mean: Tensor, squares: Tensor) -> Moments:
        """Returns the statistics over all ranks from this rank's."""
        self._num_forward += 1
        channels = mean.numel()
        row = self._new(_HEAD + 2 * self._width)
        row[0], row[1] = count, number
        row[_HEAD : _HEAD + channels] = mean
        row[_HEAD + self._width : _HEAD + self._width + channels] = squares
        rows, work = self._send_row(row)
        work.wait()
        if rows.device.type == "cpu":  # elsewhere, looking would make the host wait for the device
            for rank, other in enumerate(rows[:, 1].tolist()):
                if other not in (0, number):
                    raise UsageError(
                        f"rank {self.comm.rank} is at batch-norm layer {number}, rank {rank} at layer {int(other)} "
                        f"of {len(self.layers)}\n"
                        "  synchronised layers are called in the same order on all ranks\n"
                        "  do not let the order depend on the rank or its samples, or set parallel.sync_batchnorm = "
                        "false"
                    )
        return self._read(rows, channels)

    def add_up(self, *sums: Tensor) -> Tensor:
        """Returns the two sums over all ranks."""
        self._num_backward += 1
        totals = self._new(2, self._width)
        totals[:, : sums[0].numel()] = torch.stack(sums)
        self.comm.all_reduce(totals).wait()
        return totals[:, : sums[0].numel()]

    # What a rank does that has no samples.

    @contextlib.contextmanager
    def standing_in(self) -> Iterator[None]:
        """Sends messages of count zero for a pass's calls; at the end, statistics move as the other ranks' have."""
        self._remember()
        kind = self._kind_now()
        guess = (sum(kind.looks_at_batch), kind.num_trained if kind.has_gradients else 0)
        num_forward, num_backward = self._num_calls.get(kind, guess)
        forward = [self._send_row(self._new(_HEAD + 2 * self._width)) for _ in range(num_forward)]
        zeros = [self._new(2, self._width) for _ in range(num_backward)]  # alive until they are reduced
        backward = [self.comm.all_reduce(totals) for totals in zeros]
        yield
        for rows, work in forward:
            work.wait()
            number = int(rows[:, 1].max().item())  # sync point
            if number:  # else no rank has samples
                layer = self.layers[number - 1]
                layer.move_statistics(self._read(rows, layer.num_features))
        wait_for_all(backward)

    def _begin(self, *_: Any) -> None:
        self._remember()
        self._kind = self._kind_now()

    def _kind_now(self) -> _PassKind:
        num_trained, is_trained = 0, False
        for module in self._modules:
            is_trained = is_trained or any(p is not None and p.requires_grad for p in module._parameters.values())
            if isinstance(module, SyncBatchNorm) and module.uses_batch_statistics:
                num_trained += is_trained or module.weight is None
        looks = tuple(layer.uses_batch_statistics for layer in self.layers)
        return _PassKind(looks, torch.is_grad_enabled(), num_trained)

    def _remember(self) -> None:
        """Notes how often layers were called in the pass that has ended; the most, as one may have been broken off."""
        if self._kind is not None and (self._num_backward or not self._kind.has_gradients):
            forward, backward = self._num_calls.get(self._kind, (0, 0))
            self._num_calls[self._kind] = max(forward, self._num_forward), max(backward, self._num_backward)
        self._kind = None
        self._num_forward = self._num_backward = 0

    def _new(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float64, device=self.comm.device)

    def _send_row(self, row: Tensor) -> tuple[Tensor, Work]:
        """Returns where all ranks' rows will be, and what to wait for."""
        rows = self._new(self.comm.size, row.numel())
        return rows, self.comm.all_gather(rows, row)

    def _read(self, rows: Tensor, channels: int) -> Moments:
        first, second = rows[:, _HEAD : _HEAD + self._width], rows[:, _HEAD + self._width :]
        return combine(rows[:, :1], first[:, :channels], second[:, :channels])


def _statistics_dtype(x: Tensor) -> torch.dtype:
    return torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype


def _to(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else tensor.to(dtype)
