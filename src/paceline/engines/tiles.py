"""MLPs in tiles along the tokens: the hidden features of one tile at a time take memory. Norms likewise.

    forward     y[a:b] = mlp(x[a:b])                                for all tiles, in turn
    backward    dx[a:b], dw += gradients of mlp at x[a:b], which runs again

For T tokens in tiles of R, a hidden width H and k tensors of that width (4 with a gate), k R H numbers are there in
place of k T H, and x waits for backward. Each token is computed as ever, and weight gradients are sums over tiles.
Those of 16 bits are added in fp32: beside the one rounding that a whole MLP has, each tile's sum is rounded once.

[Note: a second run] Where the block is checkpointed, its second run comes to the MLP and needs x, not what the MLP
makes of it. So x is kept by a node of its own, *before* the MLP computes: a second run that misses nothing more ends
there, and the MLP runs twice in all, as it does without tiles. In a block that keeps its activations it runs once more.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import Function, once_differentiable
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.utils.checkpoint import get_device_states, set_device_states

from paceline.engines.nodes import same
from paceline.errors import UsageError
from paceline.models.registry import model_mlps
from paceline.plan.layout import tile_rows

_MIX_TOKENS = (_ConvNd, _NormBase, nn.GroupNorm, nn.RNNBase, nn.MultiheadAttention)
_NORMS, _IN_ONE_KERNEL = ("RMSNorm", "LayerNorm"), (nn.RMSNorm, nn.LayerNorm)
_HALF = (torch.bfloat16, torch.float16)


def tile_mlps(model: nn.Module, tiles: int, *, with_norms: bool = False) -> None:
    """Lets the MLPs of a model's blocks run in so many tiles, 0: by their sizes, in place.

    ``with_norms``: and all norms that a library has composed of operators, each of which makes a tensor in fp32; a
    compiler makes one kernel of them. Raises UsageError where there are no MLPs, or what is called so computes no token
    by itself.
    """
    mlps = model_mlps(model)
    if not mlps:
        raise UsageError(
            f"mlp_tiles = {tiles or 'auto'}, and no MLP is found in the blocks of {type(model).__name__}\n"
            "  that is a module inside of a block that is called mlp, feed_forward or ffn\n"
            "  give the model a method mlps() that returns these modules, or set mlp_tiles = 1"
        )
    for mlp in mlps:
        if reason := _why_not(mlp):
            raise _not_by_token(mlp, reason)
    inside = model.modules() if with_norms else ()
    norms = [each for each in inside if type(each).__name__.endswith(_NORMS) and not isinstance(each, _IN_ONE_KERNEL)]
    for module in (*mlps, *(norm for norm in norms if not _why_not(norm))):
        module.forward = Tiled(module, tiles)


class Tiled:
    """The forward of a module, tile by tile. An object, not a closure: a deep copy of a model runs its own."""

    def __init__(self, module: nn.Module, tiles: int) -> None:
        self._module = module
        self._tiles = tiles
        self._width = max((max(p.shape) for p in module.parameters() if p.ndim), default=1)
        self.function: Callable[[Tensor], Tensor] = module.forward
        self.run = self._run

    def __call__(self, x: Tensor) -> Tensor:
        return self.run(x)

    def compile(self, function: Callable[[Tensor], Tensor]) -> None:
        """Takes what runs a tile, compiled by itself: a graph of all tiles may keep the hidden features of all."""
        self.function = function
        self.run = cast("Any", torch.compiler).disable(self.run)

    def _run(self, x: Tensor) -> Tensor:
        rows = x.numel() // x.shape[-1]
        step = tile_rows(rows, self._width * x.element_size(), self._tiles)
        if rows <= step:
            return self._tile(x)
        if torch.is_grad_enabled() and not x.requires_grad:
            x = x.detach().requires_grad_()
        keep: Callable[[Tensor], Tensor] = _Keep.apply
        run: Callable[..., Tensor] = _InTiles.apply
        flat = keep(x.reshape(rows, *[1] * (x.ndim - 2), x.shape[-1]))
        y = run(flat, self._tile, step, *self._module.parameters())
        return y.reshape(*x.shape[:-1], y.shape[-1])

    def _tile(self, x: Tensor) -> Tensor:
        y: object = self.function(x)
        if not isinstance(y, Tensor):
            raise _not_by_token(self._module, f"returns a {type(y).__name__}")
        return y


class _Keep(Function):
    """The same tensor, kept for backward. See [Note: a second run]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return same(x)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return gradient


class _InTiles(Function):
    """A module of ``parameters`` that ``run`` calls, on tiles of ``step`` rows of what ``_Keep`` has kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, run: Callable[[Tensor], Tensor], step: int, *parameters: Tensor) -> Tensor:
        ctx.kept, ctx.run, ctx.step, ctx.parameters = x.grad_fn, run, step, parameters
        ctx.surroundings = _Surroundings(x)
        y: Tensor | None = None
        with ctx.surroundings.autocast():
            for first in range(0, x.shape[0], step):
                part = run(x[first : first + step])
                y = part.new_empty(x.shape[0], *part.shape[1:]) if y is None else y
                y[first : first + step] = part
        assert y is not None
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.kept.saved_tensors
        trained = [each for each in ctx.parameters if each.requires_grad]
        dx = torch.empty_like(x)
        sums: dict[Tensor, Tensor | None] = dict.fromkeys(ctx.parameters)
        with ctx.surroundings.again():
            for first in range(0, x.shape[0], ctx.step):
                part = x[first : first + ctx.step].detach().requires_grad_()
                with torch.enable_grad():
                    y = ctx.run(part)
                rows = gradient[first : first + ctx.step]
                dx[first : first + ctx.step], *found = torch.autograd.grad(y, (part, *trained), rows, allow_unused=True)
                del y
                sums |= {each: _add(sums[each], term) for each, term in zip(trained, found, strict=True)}
        return dx, None, None, *(None if total is None else total.to(each.dtype) for each, total in sums.items())


def _add(total: Tensor | None, term: Tensor | None) -> Tensor | None:
    if total is None or term is None:
        return total if term is None else term.float() if term.dtype in _HALF else term
    return total + term


class _Surroundings:
    """Autocast and random numbers, as they are where a function runs first, for when it runs again."""

    def __init__(self, x: Tensor) -> None:
        self._kind = x.device.type
        self._state, self._devices = torch.get_rng_state(), get_device_states(x)
        self._has_autocast = torch.amp.is_autocast_available(self._kind)
        if self._has_autocast:
            self._dtype, self._is_on = torch.get_autocast_dtype(self._kind), torch.is_autocast_enabled(self._kind)

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Casts as then; casts without a graph must not be found by who needs one, so none is kept."""
        if not self._has_autocast:
            return contextlib.nullcontext()
        return torch.autocast(self._kind, self._dtype, enabled=self._is_on, cache_enabled=False)

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        ids, states = self._devices
        with torch.random.fork_rng(ids), self.autocast():
            torch.set_rng_state(self._state)
            set_device_states(ids, states)
            yield


def _why_not(module: nn.Module) -> str:
    """Says why a module cannot run in tiles, as far as that can be seen."""
    asked = [each for each in inspect.signature(module.forward).parameters.values() if each.default is each.empty]
    problems = {f"has a {type(each).__name__}": isinstance(each, _MIX_TOKENS) for each in module.modules()} | {
        "has experts, which take their tokens from all": any("expert" in name for name, _ in module.named_modules()),
        "runs in tiles already": isinstance(module.forward, Tiled),
        f"takes {', '.join(each.name for each in asked)}": len(asked) != 1,
    }
    return next((problem for problem, is_there in problems.items() if is_there), "")


def _not_by_token(mlp: nn.Module, why: str) -> UsageError:
    return UsageError(
        f"mlp_tiles: an MLP ({type(mlp).__name__}) {why}\n"
        "  what runs in tiles takes one tensor, and computes each token by itself\n"
        "  give the model a method mlps() that returns the modules that do, or set mlp_tiles = 1"
    )
