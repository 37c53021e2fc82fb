"""How the blocks of a model run: with less kept for backward, and compiled. A block may be both.

Activation checkpointing. For L blocks with an input of A bytes each, products (outputs of matrix products, convolutions
and attention) of M bytes, and S bytes saved in all, what waits for backward at its beginning, and the share of forward
that runs twice, is

    none       L S                        0
    full       L A                        1           each block runs again, from its input
    matmuls    L (A + M)                  the rest    each block again, but for its products, which cost the most
    every_n    L A / n + L S (n-1)/n      1 / n       every n-th block again

and S of the block that runs again. Only the instance's ``forward`` is wrapped: names, state dict and hooks stay as they
are, and the hooks (those of the sharded engines, say) run outside of it.

``torch.compile``. A graph for each block lets gradients arrive block by block, and communication overlap with backward;
one graph for the model is somewhat faster where there is nothing to overlap. Training and evaluation have a graph each.
The first dim of every input is marked as one that may change: a last, ragged batch then takes the graph that is there.
Where all batches are known to be alike (``fix_sizes``) the graph is made for that size: compiled in less time, and
convolutions find better layouts. What torch cannot compile runs as it is, and ``notes`` says so.

Max pooling of 3 x 3 pixels at every second one, as ResNets begin, has a backward pass of our own. A pixel lies in up to
four windows, and torch's compiler looks at all of them for each: on an H200 that takes as long as the largest
convolution of a ResNet-50. Here a program reads each gradient once, and takes the four pixels that share their windows:

    pixel            even, even    even, odd           odd, even           odd, odd
    its windows      own           own, right          own, below          own, right, below, both

The largest pixel of a window is kept as its number, 0 to 8, row by row, in a byte; of equals the first, and nan before
all others, as torch does.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.library import custom_op
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from paceline.engines.tiles import Tiled
from paceline.errors import UsageError
from paceline.models.attention import SequencePart, current_part, use_part
from paceline.models.registry import model_blocks
from paceline.plan.layout import CHECKPOINTS

T = TypeVar("T")

# By the beginnings of their names: attention has many, one for each kernel.
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "_scaled_mm", "_scaled_dot_product")
# Kept products never went through hooks such as those of offload; torch 2.15 asks whether it shall stay so.
_ASKED = "respect_saved_tensors_hooks"
_PRODUCTS_STAY = {_ASKED: False} if _ASKED in inspect.signature(checkpoint).parameters else {}


def checkpoint_blocks(blocks: Sequence[nn.Module], policy: str) -> list[nn.Module]:
    """Makes ``blocks`` keep for backward what ``policy`` says, in place, and returns those that run again.

    Raises UsageError for what cannot be.
    """
    if policy not in CHECKPOINTS:
        raise UsageError(f"checkpoint_activations = {policy!r} is unknown\n  it is one of {', '.join(CHECKPOINTS)}")
    if policy == "none":
        return []
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
    return chosen


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
    if kwargs.get("past_key_values") is not None:  # of transformers: a second run would fill it again
        kwargs["past_key_values"] = None
    runs: list[Replay] = []

    def replayed(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # the compiler moves no statistics in a second run
            return forward(*args, **kwargs)
        runs.append(runs[0] if runs else Replay(layers))
        with runs[0].run(is_second=len(runs) > 1):
            return forward(*args, **kwargs)

    if keeps_products:
        kwargs["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _is_kept)
        kwargs |= _PRODUCTS_STAY
    run = replayed if layers else forward
    if not torch.compiler.is_compiling() and (part := current_part()) is not None:
        run = functools.partial(_run_in, part, run)  # in backward, another one may be in use
    return checkpoint(run, *args, use_reentrant=False, **kwargs)


def _run_in(part: SequencePart, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with use_part(part):
        return forward(*args, **kwargs)


def _is_kept(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    name = str(operator).partition(".")[2]  # behind the library's
    return CheckpointPolicy.MUST_SAVE if name.startswith(_PRODUCTS) else CheckpointPolicy.PREFER_RECOMPUTE


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileNote:
    """One function that was compiled, and how long that took; or why it runs as it is."""

    what: str
    seconds: float
    problem: str = ""


_loading: list[threading.Thread] = []  # one at most


def load_compiler() -> None:
    """Starts to load torch's compiler, which takes seconds, in a thread; what is compiled next waits for it.

    Nothing that imports modules of torch should run until then.
    """

    def load() -> None:
        with contextlib.suppress(Exception):  # whoever compiles says what is missing
            importlib.import_module("torch._inductor.compile_fx")
            importlib.import_module("torch._inductor.async_compile").maybe_warm_pool()  # not in the warm server: here

    if not _loading:
        _loading.append(threading.Thread(target=load, name="compiler", daemon=True))
        _loading[0].start()


def try_compiler(device: str) -> None:
    """Compiles a small function and its backward pass, in which torch finds out what it remembers for all others."""
    inputs = torch.ones(8, 8, device=device, requires_grad=True)
    torch.compile(lambda: torch.nn.functional.gelu(inputs @ inputs).sum())().backward()  # type: ignore[no-untyped-call]


# Of a cast and its transposed copy torch 2.11 writes one kernel for CUDA, in which threads read what others may write
# later: gradients of experts with operands of 8 bits are wrong. Without the analysis, there are two kernels.
FLOAT8_EXPERTS: Final = {"triton.coalesce_tiling_analysis": False}


class Compiled:
    """A function whose first call compiles it; later calls of other sizes take the same graph."""

    def __init__(
        self,
        function: Callable[..., Any],
        what: str,
        fixed: Collection[bool] = (),
        options: dict[str, Any] | None = None,
    ) -> None:
        for thread in _loading:
            thread.join()
        self.notes: list[CompileNote] = []
        self._function = function
        self._graph = torch.compile(function, options=options)
        self._what = what
        self._modes: set[bool] = set()  # with and without gradients: each has a graph
        self.fixed = fixed  # modes whose batches are all of one size

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        mode = torch.is_grad_enabled()
        for each in () if mode in self.fixed else tree_leaves((args, kwargs)):
            if isinstance(each, Tensor) and each.dim():
                torch._dynamo.maybe_mark_dynamic(each, 0)
        if mode in self._modes:
            return self._graph(*args, **kwargs)
        self._modes.add(mode)
        start, what, problem = time.monotonic(), self._what if mode else f"{self._what}, without gradients", ""
        try:
            result = self._graph(*args, **kwargs)
        except torch._dynamo.exc.TorchDynamoException as error:
            what, problem = self._what, f"{type(error).__name__}: {' '.join(str(error).split()[:40])}"
            self._graph = self._function
            result = self._function(*args, **kwargs)
        self.notes.append(CompileNote(what=what, seconds=time.monotonic() - start, problem=problem))
        return result


def compile_model(model: nn.Module, *, whole: bool, units: Sequence[nn.Module] = ()) -> Sequence[nn.Module]:
    """Compiles each block in place, or the whole model where it has none; names stay as they are.

    The forward function is compiled, not the call: hooks on the module run outside of the graph. So must those of
    ``units``, which are gathered when they are called: where they lie inside, they are compiled one by one.
    """
    found = [] if whole else model_blocks(model)
    if any(_has_inside(part, units) for part in found or [model]):
        chosen = {unit for unit in units if not _has_inside(unit, units)}
        if found:  # what is outside of the blocks runs as it is, unit or not
            whole_blocks = {block for block in found if not _has_inside(block, units)}
            chosen = whole_blocks | {unit for block in found for unit in block.modules() if unit in chosen}
        found = [module for module in model.modules() if module in chosen]
    # Blocks of one class share their code. Where their sizes differ, as in a ResNet, each needs a graph; beyond torch's
    # limit the rest would run as they are, without a word.
    config: Any = torch._dynamo.config
    config.cache_size_limit = max(config.cache_size_limit, 4 * len(found))
    options: Any = FLOAT8_EXPERTS if any(getattr(each, "float8", None) for each in model.modules()) else None
    for number, block in enumerate(found or [model], start=1):
        what = f"block {number} of {len(found)}" if found else "the whole model"
        run: Any = block.forward
        if getattr(run, "func", None) is _run and any(isinstance(each.forward, Tiled) for each in block.modules()):
            # A graph that holds both runs of a block cannot be left in its middle, for the tiles.
            block.forward = functools.partial(_run, Compiled(run.args[0], what, options=options), *run.args[1:])
        else:
            block.forward = Compiled(run, what, options=options)
    tiled = [module.forward for module in model.modules() if isinstance(module.forward, Tiled)]
    for number, each in enumerate(tiled, start=1):
        each.compile(Compiled(each.function, f"MLP {number} of {len(tiled)}", fixed=(True, False)))
    return found or [model]


def _has_inside(module: nn.Module, others: Sequence[nn.Module]) -> bool:
    inside = {id(each) for each in module.modules()} - {id(module)}
    return any(id(each) in inside for each in others)


def fix_sizes(*places: Any, training: bool, evaluation: bool) -> None:
    """Says that all batches have one size, in training, in evaluation or in both."""
    for each in _compiled(places):
        each.fixed = {*each.fixed, *(mode for mode, is_fixed in ((True, training), (False, evaluation)) if is_fixed)}


def take_notes(*places: Any) -> list[CompileNote]:
    """Returns what was compiled since the last call, in modules and functions."""
    notes: list[CompileNote] = []
    for each in _compiled(places):
        notes, each.notes = notes + each.notes, []
    return notes


def _compiled(places: Sequence[Any]) -> list[Compiled]:
    functions = [each.forward for place in places if isinstance(place, nn.Module) for each in place.modules()]
    return [each for each in map(compiled_inside, (*functions, *places)) if each is not None]


def compiled_inside(function: Any) -> Compiled | None:
    """Returns what is compiled of a function: itself, or what is inside of a checkpoint, of tiles, of an offload."""
    while isinstance(function, Tiled) or (isinstance(function, functools.partial) and function.args):
        function = function.function if isinstance(function, Tiled) else function.args[0]
    return function if isinstance(function, Compiled) else None


_SIZE, _STRIDE, _PADDING = 3, 2, 1
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_LAST = torch.channels_last


def swap_pools(model: nn.Module, device: torch.device) -> int:
    """Lets max pooling run our way on a GPU, for images channels last; returns how many layers it fits."""
    has_kernels = device.type == "cuda" and importlib.util.find_spec("triton") is not None
    found = [each for each in model.modules() if has_kernels and _fits(each)]
    for each in found:
        each.forward = _forward
    return len(found)


def max_pool(x: Tensor) -> Tensor:
    """Pools images (samples, channels, height, width) that lie channels last."""
    return cast("Tensor", _pool(x)[0])


def _fits(module: nn.Module) -> bool:
    if type(module) is not nn.MaxPool2d or module.return_indices or module.ceil_mode:
        return False
    asked = (module.kernel_size, module.stride, module.padding, module.dilation)
    return all(each in (number, (number, number)) for each, number in zip(asked, (3, 2, 1, 1), strict=True))


def _forward(x: Tensor) -> Tensor:
    if x.is_cuda and x.dim() == 4 and x.dtype in _DTYPES and x.is_contiguous(memory_format=_LAST):
        return max_pool(x)
    return F.max_pool2d(x, _SIZE, _STRIDE, _PADDING)


def _empty_pooled(x: Tensor) -> tuple[Tensor, Tensor]:
    samples, channels, height, width = x.shape
    shape = (samples, channels, (height - 1) // 2 + 1, (width - 1) // 2 + 1)
    y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=_LAST)
    return y, torch.empty(shape, dtype=torch.int8, device=x.device, memory_format=_LAST)


def _run_pool(x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.contiguous(memory_format=_LAST)
    y, taps = _empty_pooled(x)
    if x.is_cuda:
        from paceline.engines.pooling_kernel import pool_on_gpu  # where there is no GPU, there is no triton

        pool_on_gpu(x, y, taps)
        return y, taps
    values, where = F.max_pool2d(x, _SIZE, _STRIDE, _PADDING, return_indices=True)
    row, column = (torch.arange(size, device=x.device) * 2 - 1 for size in y.shape[2:])
    taps.copy_((where // x.shape[3] - row[:, None]) * 3 + where % x.shape[3] - column)
    return y.copy_(values), taps


def _empty_gradient(g: Tensor, _: Tensor, height: int, width: int) -> Tensor:
    return torch.empty((*g.shape[:2], height, width), dtype=g.dtype, device=g.device, memory_format=_LAST)


def _run_gradient(g: Tensor, taps: Tensor, height: int, width: int) -> Tensor:
    dx, g = _empty_gradient(g, taps, height, width), g.contiguous(memory_format=_LAST)
    if g.is_cuda:
        from paceline.engines.pooling_kernel import gradient_on_gpu

        gradient_on_gpu(g, taps, dx)
        return dx
    wide = torch.zeros((*g.shape[:2], height + 3, width + 3), dtype=torch.float32, device=g.device)
    for tap in range(_SIZE * _SIZE):
        part = wide[:, :, tap // 3 :: 2, tap % 3 :: 2][:, :, : g.shape[2], : g.shape[3]]
        part += torch.where(taps == tap, g.float(), 0.0)
    return dx.copy_(wide[:, :, 1 : height + 1, 1 : width + 1])


def _keep(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1])
    ctx.size = inputs[0].shape[2:]
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, g: Tensor, _: Any) -> Tensor:
    return cast("Tensor", _gradient(g, *ctx.saved_tensors, *ctx.size))


_pool = custom_op("paceline::max_pool", _run_pool, mutates_args=(), schema="(Tensor x) -> (Tensor, Tensor)")
_pool.register_fake(_empty_pooled)
_gradient = custom_op(
    "paceline::max_pool_gradient",
    _run_gradient,
    mutates_args=(),
    schema="(Tensor g, Tensor taps, SymInt height, SymInt width) -> Tensor",
)
_gradient.register_fake(_empty_gradient)
_pool.register_autograd(_backward, setup_context=_keep)
