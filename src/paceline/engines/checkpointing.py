"""Activation checkpointing: keep less for backward, compute it again when backward comes.

For L blocks, each with an input of A bytes, products (outputs of matrix products, convolutions and attention) of M
bytes, and S bytes saved in all, what waits for backward at its beginning, and the share of forward that runs twice, is

    none       L S                        0
    full       L A                        1           each block runs again, from its input
    matmuls    L (A + M)                  the rest    each block again, but for its products, which cost the most
    every_n    L A / n + L S (n-1)/n      1 / n       every n-th block again

and S of the block that runs again. Only the instance's ``forward`` is wrapped: names, state dict and hooks stay as they
are, and the hooks (those of the sharded engines, say) run outside of it. A block may be compiled on top.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from paceline.errors import UsageError
from paceline.plan.layout import CHECKPOINTS

T = TypeVar("T")

# By the beginnings of their names: attention has many, one for each kernel.
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "_scaled_mm", "_scaled_dot_product")


def checkpoint_blocks(blocks: Sequence[nn.Module], policy: str) -> None:
    """Makes ``blocks`` keep for backward what ``policy`` says, in place. Raises UsageError for what cannot be."""
    if policy not in CHECKPOINTS:
        raise UsageError(f"checkpoint_activations = {policy!r} is unknown\n  it is one of {', '.join(CHECKPOINTS)}")
    if policy == "none":
        return
    step = int(policy.removeprefix("every_")) if policy.startswith("every_") else 1
    chosen = list(dict.fromkeys(blocks))[::step]
    if not chosen:
        raise UsageError(
            f"checkpoint_activations = {policy!r}, but the model has no blocks\n"
            "  a model is checkpointed block by block: what its method blocks() returns, or the children of its\n"
            "  largest ModuleList or Sequential whose children are all of one type\n"
            "  give the model a method blocks() that returns its repeated parts, or set checkpoint_activations = none"
        )
    for block in chosen:
        if any(getattr(module.forward, "func", None) is _run for module in block.modules()):
            raise UsageError(
                f"a block ({type(block).__name__}) is checkpointed already, or contains one that is\n"
                "  each would run again inside the other's second run\n"
                "  call checkpoint_blocks once, on blocks of which none contains another"
            )
    for block in chosen:
        layers = tuple(module for module in block.modules() if isinstance(module, _BatchNorm))
        # A partial, not a closure: a deep copy of the model must run its own blocks.
        block.forward = functools.partial(_run, block.forward, layers, policy == "matmuls")


def parts_by_size(model: nn.Module) -> list[nn.Module]:
    """Returns the parts of a model without blocks that are worth a second run each: two or more, with layers."""
    inside = model
    while True:
        parts = [each for each in inside.children() if any(True for _ in each.parameters())]
        with_layers = [each for each in parts if len(list(each.children())) > 1]
        if len(parts) != 1:
            return with_layers if len(with_layers) > 1 else []
        inside = parts[0]


class Replay:
    """One call of a checkpointed block: what its layers do in the first run, and must not do again in the second.

    In the second run plain batch norms move copies of their statistics. A layer that asks other ranks has an attribute
    ``replay``, and passes what is to happen once through ``once``.
    """

    def __init__(self, layers: Sequence[_BatchNorm]) -> None:
        self._asking: list[Any] = [layer for layer in layers if hasattr(layer, "replay")]
        self._plain = [layer for layer in layers if not hasattr(layer, "replay")]
        self._copies: list[dict[str, Tensor | None]] = []
        self._results: list[Any] = []
        self._is_second = False
        self._next = 0

    def once(self, compute: Callable[[], T]) -> T:
        """Returns what ``compute`` gives in the first run, and the same again in later ones."""
        if not self._is_second:
            self._results.append(compute())
        self._next += 1
        return self._results[self._next - 1]  # type: ignore[no-any-return]

    @contextlib.contextmanager
    def run(self, *, is_second: bool) -> Iterator[None]:
        """Surrounds a run, however far it comes: the second one stops when backward has what it needs."""
        self._is_second, self._next = is_second, 0
        kept = [dict(layer._buffers) for layer in self._plain]
        if is_second:
            self._set_buffers(self._copies)
        else:  # copied now: selective checkpointing knows no operator that only the second run has
            self._copies = [{n: None if b is None else b.clone() for n, b in buffers.items()} for buffers in kept]
        for asking in self._asking:
            asking.replay = self
        try:
            yield
        finally:
            if is_second:
                self._set_buffers(kept)
            for asking in self._asking:
                asking.replay = None

    def _set_buffers(self, buffers: list[dict[str, Tensor | None]]) -> None:
        for layer, values in zip(self._plain, buffers, strict=True):
            layer._buffers.update(values)


def _run(
    forward: Callable[..., Any], layers: tuple[_BatchNorm, ...], keeps_products: bool, *args: Any, **kwargs: Any
) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    runs: list[Replay] = []

    def replayed(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # the compiler moves no statistics in a second run
            return forward(*args, **kwargs)
        runs.append(runs[0] if runs else Replay(layers))
        with runs[0].run(is_second=len(runs) > 1):
            return forward(*args, **kwargs)

    if keeps_products:
        kwargs["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _is_kept)
    return checkpoint(replayed if layers else forward, *args, use_reentrant=False, **kwargs)


def _is_kept(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    name = str(operator).removeprefix("aten.")
    return CheckpointPolicy.MUST_SAVE if name.startswith(_PRODUCTS) else CheckpointPolicy.PREFER_RECOMPUTE
