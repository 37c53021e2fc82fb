"""Writes down what a rank does: every kernel, every operation of its communicator, all memory that it takes.

A block's kernels are known by where they come from: in forward by the module that is being called, in backward by the
node of the graph, whose number lies between those at the beginning and the end of the block's forward.

Some functions of torch behave otherwise on meta tensors than on a device, and are put right. Attention has no fused
kernel there: here it is one kernel forward and one backward, which keep what the fused ones keep: their inputs, the
output and one number a row. ``rms_norm`` is fused on GPUs alone: it is put down as the layer norm, which keeps its
input too. ``max_pool2d`` keeps 8 bytes a number for where the largest was; compiled for a GPU, one
(``engines/blocks.py``). Autocast knows no meta device: the same functions cast here.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._pytree import tree_map

from paceline.cluster.kernels import Operation
from paceline.errors import UntraceableError
from paceline.models.measured import EagerMode, KnownValues, indexed
from paceline.predict.replay.program import Event, Issue, OnHost, Run, Wait
from paceline.rehearse.dryrun.held import HOST, HeldMemory
from paceline.rehearse.dryrun.operators import ATTENTION, KnownCalls, OperatorCall, whole_call
from paceline.train.resolve import first_line

# Called for an attention kernel: ``(tensors, *, is_causal, is_back)``. These are query, key, value and all else that it
# reads; the last tensor is what it writes.
SeesAttention: TypeAlias = Callable[..., None]


def _named(owner: Any, names: str) -> set[Callable[..., Any]]:
    return {getattr(owner, name) for name in names.split()}


_GIVES_VALUES = (
    _named(torch.Tensor, "normal_ uniform_ fill_ zero_")
    | _named(nn.init, "normal_ uniform_ trunc_normal_ constant_ ones_ zeros_")
    | _named(nn.init, "kaiming_uniform_ kaiming_normal_ xavier_uniform_ xavier_normal_")
)
_IN_HALF = (
    _named(F, "linear bilinear conv1d conv2d conv3d scaled_dot_product_attention")
    | _named(F, "conv_transpose1d conv_transpose2d conv_transpose3d")
    | _named(torch, "conv1d conv2d conv3d matmul mm bmm addmm baddbmm einsum")
    | _named(torch.Tensor, "matmul __matmul__ mm bmm")
)
_IN_FULL = (
    _named(F, "layer_norm group_norm softmax log_softmax cross_entropy nll_loss mse_loss")
    | _named(torch, "softmax log_softmax layer_norm exp log pow rsqrt cumsum norm")
    | _named(torch.Tensor, "softmax log_softmax exp log pow rsqrt cumsum norm")
)

_POOLS = {F.max_pool2d, torch.max_pool2d}


class NoValues(TorchFunctionMode):
    """Leaves out what gives first values to tensors that have none: torch would work out their shapes in Python."""

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _GIVES_VALUES:
            tensor = kwargs.get("tensor", args[0] if args else None)
            if isinstance(tensor, torch.Tensor) and tensor.is_meta:
                return tensor
        return func(*args, **kwargs)


class MetaFunctions(TorchFunctionMode):
    """Runs attention as one kernel, and casts as autocast does if there is a dtype for it."""

    def __init__(
        self,
        seer: SeesAttention,
        autocast: torch.dtype | None = None,
        *,
        on_gpu: bool = False,
        pools_in_bytes: bool = False,
    ) -> None:
        super().__init__()
        self._seer, self._autocast, self._pools_in_bytes = seer, autocast, pools_in_bytes
        self._on_gpu, self._fuses_norms = on_gpu, on_gpu and hasattr(torch.ops.aten, "_fused_rms_norm")
        self._copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def back_on(self) -> contextlib.AbstractContextManager[object]:
        """Returns what makes it work where it does not: backward leaves modes behind, and blocks are computed again."""
        is_on = any(mode is self for mode in _get_current_function_mode_stack())  # type: ignore[no-untyped-call]
        return contextlib.nullcontext() if is_on else self

    def forget_copies(self) -> None:
        self._copies.clear()

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._autocast is not None:
            if func in _IN_HALF:
                args, kwargs = tree_map(self._halve, (args, kwargs))
            elif func in _IN_FULL:
                args, kwargs = tree_map(_widen, (args, kwargs))
        if func is torch.Tensor.__getitem__:
            return func(*indexed(args))
        if func is F.scaled_dot_product_attention:
            return self._attend(func, *args, **kwargs)
        if func is F.multi_head_attention_forward:
            return self._attend_in_parts(func, args, kwargs)
        if func is F.dropout and self._on_gpu:
            return _drop(*args, **kwargs)
        if func is F.rms_norm and self._fuses_norms:
            given = dict(zip(("input", "normalized_shape", "weight", "eps"), args, strict=False)) | kwargs
            return F.layer_norm(given["input"], given["normalized_shape"], given.get("weight"))
        if func in _POOLS and self._pools_in_bytes and not kwargs.get("return_indices"):
            names = ("kernel_size", "stride", "padding", "dilation", "ceil_mode")
            given = dict(zip(("input", *names), args, strict=False)) | kwargs
            defaults = {"stride": given["kernel_size"], "padding": 0, "dilation": 1, "ceil_mode": False}
            settings = [given.get(name, defaults.get(name)) for name in names]
            pooled: torch.Tensor = _MetaPool.apply(given["input"], settings)  # type: ignore[no-untyped-call]
            return pooled
        return func(*args, **kwargs)

    def _halve(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.dtype != torch.float32 or not value.is_meta:
            return value
        if not (value.is_leaf and value.requires_grad):
            return value.to(self._autocast)
        kept = self._copies.get(id(value))  # a parameter is cast once in a forward
        if kept is None:
            kept = self._copies[id(value)] = (value, value.to(self._autocast))
        return kept[1]

    def _attend(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        given = dict(zip(names, args, strict=False)) | kwargs
        query, mask = given["query"], given.get("attn_mask")
        if not query.is_meta or query.ndim < 3:
            return func(*args, **kwargs)
        # Fused kernels of a GPU take a mask, or a bias, whose rows are neighbours (torch's sdp_utils.h).
        if self._on_gpu and mask is not None and (mask.stride(-1) != 1 or query.shape[-1] % 8):
            return _attend_unfused(given)
        is_causal = bool(given.get("is_causal", False))
        return _MetaAttention.apply(query, given["key"], given["value"], is_causal, self._seer, self._on_gpu)  # type: ignore[no-untyped-call]

    def _attend_in_parts(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs what torch would hand to a mode as one function, with the mode on for what is inside."""
        asks = vars(F)["has_torch_function"]
        vars(F)["has_torch_function"] = lambda _: False
        try:
            with self:
                return func(*args, **kwargs)
        finally:
            vars(F)["has_torch_function"] = asks


def _attend_unfused(given: dict[str, Any]) -> torch.Tensor:
    """Attention as torch has it where no fused kernel can: in fp32, and keeping the scores."""
    query, key, value, mask = (given[name] for name in ("query", "key", "value", "attn_mask"))
    root = math.sqrt(given.get("scale") or query.shape[-1] ** -0.5)
    if given.get("enable_gqa"):
        key, value = (each.repeat_interleave(query.shape[-3] // each.shape[-3], -3) for each in (key, value))
    scores = query.float() * root @ (key.float().transpose(-2, -1) * root)
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), -math.inf)
    weights = torch.ops.aten._safe_softmax(scores.add_(mask), -1)
    attended: torch.Tensor = (_drop(weights, given.get("dropout_p", 0.0)) @ value.float()).to(query.dtype)
    return attended


def _drop(x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """Dropout as GPUs have it: one kernel, which keeps a byte a number."""
    if not training or not 0 < p < 1 or inplace:
        return F.dropout(x, p, training, inplace)
    return torch.native_dropout(x, p, True)[0]


class _MetaAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        is_causal: bool,
        seer: SeesAttention,
        on_gpu: bool,
    ) -> torch.Tensor:
        output: torch.Tensor = getattr(torch.ops.paceline, ATTENTION)(query, key, value, is_causal)
        rows = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, rows)
        ctx.is_causal, ctx.seer, ctx.on_gpu = is_causal, seer, on_gpu
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, output, _ = ctx.saved_tensors
        found = (torch.empty_like(query), torch.empty_like(key), torch.empty_like(value))
        size = _workspace_bytes(query, key) if ctx.on_gpu and query.element_size() == 2 else 0
        workspace = query.new_empty(size, dtype=torch.uint8)
        ctx.seer([query, key, value, output, gradient, *found], is_causal=ctx.is_causal, is_back=True)
        del workspace
        return *found, None, None, None


def _workspace_bytes(query: torch.Tensor, key: torch.Tensor) -> int:
    """What backward in 16 bits works in: the query's gradient in fp32, and those of shared keys and values by head."""
    heads, of_keys = query.shape[-3], key.shape[-3] if key.ndim > 3 else query.shape[-3]
    return 4 * query.numel() + (2 * 2 * key.numel() * heads // of_keys if of_keys < heads else 0)


class _MetaPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, settings: list[Any]) -> torch.Tensor:
        pooled, where = torch.ops.aten.max_pool2d_with_indices(x, *map(_pair, settings))
        ctx.save_for_backward(torch.empty(where.shape, dtype=torch.int8, device=where.device))
        ctx.shape, ctx.settings = x.shape, settings
        found: torch.Tensor = pooled
        return found

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (where,) = ctx.saved_tensors
        x = gradient.new_empty(ctx.shape)
        back = torch.ops.aten.max_pool2d_with_indices_backward
        found: torch.Tensor = back(gradient, x, *map(_pair, ctx.settings), where.to(torch.int64))
        return found, None


def _pair(value: Any) -> Any:
    return [value, value] if type(value) is int else value


def _widen(value: Any) -> Any:
    is_half = isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if is_half else value


_ROOMS = tuple(f"{Path(__file__).parents[2] / room}" for room in ("engines", "train", "comm"))
_OURS = str(Path(__file__).parent)
_TORCH = str(Path(torch.__file__).parent)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A step that was written down: its events, bytes that were there all the time, where phases and actions end."""

    events: tuple[Event, ...]
    resident: dict[str, int]
    laps: tuple[int, ...]
    acts: tuple[int, ...] = ()


class _Kernel(NamedTuple):
    """A kernel whose phase is not over: its ``kind``, and the tensors that this one goes through."""

    kind: Operation
    reads: tuple[tuple[int, int], ...]
    writes: tuple[tuple[int, int], ...]
    block: str


class Recorder(EagerMode):  # type: ignore[no-untyped-call]
    """Records what is run inside; ``start`` forgets what came before."""

    def __init__(self, calls: KnownCalls) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.memory, self.values, self._calls = HeldMemory(), KnownValues(), calls
        self.functions = MetaFunctions(self.attention)
        self._places: dict[tuple[int, int], int] = {}
        self._block, self.rests = "", False  # rests: notes no kernels, but follows memory
        self._forget()

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kind = _kind(func)
        if kind == "view":
            view = func(*args, **kwargs)
            self.values.note(func, args, kwargs, view)
            return view
        if kind == "reads":
            value = self._read(func, args, kwargs)
            if value is not None:
                return value
        call = whole_call(None, args, kwargs) if kind == "fused" else self._call(func, args, kwargs)
        self.values.note(func, args, kwargs, call.result)
        if call.known is not None or any(tensor.is_meta for tensor in call.tensors):
            if not self.rests:
                self._note(self._calls.kernels(func, args, kwargs, call), call.tensors)
            self.memory.note(call.returned)
            if kwargs.get("pin_memory"):
                self.memory.claim(call.returned, HOST)
        return call.result

    def attention(self, tensors: list[torch.Tensor], *, is_causal: bool, is_back: bool) -> None:
        self._note((self._calls.attention(tensors, is_causal=is_causal, is_back=is_back),), tensors)

    def issue(self, operation: Issue) -> None:
        self._add(operation)

    def wait(self, number: int) -> None:
        self._add(Wait(number))

    def lap(self, phase: str) -> None:
        self._phases += [phase] * (len(self._events) - len(self._phases))
        self._laps.append(len(self._events))
        self.functions.forget_copies()

    def watch(self, blocks: Sequence[nn.Module]) -> None:
        for index, block in enumerate(blocks):
            # Not by hooks: a block that is computed again is not called, but its forward is.
            block.forward = self.watched(f"block {index}", block.forward)

    def watched(self, label: str, function: Callable[..., Any]) -> Callable[..., Any]:
        return functools.partial(self._call_block, label, function)

    def start(self) -> None:
        self._forget()
        self.memory.start()

    def _forget(self) -> None:
        self._events: list[_Kernel | Issue | Wait | OnHost] = []
        self._acts: list[int] = []
        self._phases: list[str] = []
        self._laps: list[int] = []
        self._again: set[int] = set()
        self._starts: list[int] = []  # numbers of graph nodes at which the owner changes
        self._owners: list[str] = []

    def finish(self) -> Recorded:
        """Ends a step; of one that nobody wants to know of there is nothing to tell."""
        self.memory.look()
        if self.rests:
            return Recorded(events=(), resident={}, laps=())
        self.lap("optimizer")
        lying: dict[int, list[int]] = {}
        for (storage, _), tensor in self._places.items():
            lying.setdefault(storage, []).append(tensor)
        changes, resident = self.memory.events(self._phases, self._again, lying)
        rows: list[tuple[tuple[int, int, bool], Event]] = [((act, place, False), each) for act, place, each in changes]
        for place, (event, phase) in enumerate(zip(self._events, self._phases, strict=True)):
            done: Event
            if isinstance(event, _Kernel):
                done = Run(replace(event.kind, reads=event.reads, writes=event.writes, phase=phase), event.block)
            else:
                done = replace(event, phase=phase)
            rows.append(((self._acts[place], place, True), done))
        rows.sort(key=lambda row: row[0])
        acts, places = [row[0][0] for row in rows], [row[0][1] for row in rows]
        return Recorded(
            events=tuple(event for _, event in rows),
            resident=resident,
            laps=tuple(bisect.bisect_left(places, lap) for lap in self._laps),
            acts=tuple(bisect.bisect_left(acts, act) for act in range(1 + max(acts, default=0))),
        )

    def _call_block(self, label: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._enter(label)
        try:
            with self.functions.back_on():
                return forward(*args, **kwargs)
        finally:
            if torch._C._current_graph_task_id() != -1:  # computed again: copies of parameters belong to this graph
                self.functions.forget_copies()
            self._enter("")

    def _enter(self, label: str) -> None:
        self._block = label
        if torch._C._current_graph_task_id() == -1:
            self._starts.append(torch._C._autograd._get_sequence_nr())
            self._owners.append(label)

    def _owner(self) -> str:
        if torch._C._current_graph_task_id() == -1:
            return self._block
        node = torch._C._current_autograd_node()
        if node is None or torch.is_grad_enabled():  # a hook of the engine; or a block that is computed again
            return self._block if torch.is_grad_enabled() else ""
        place = bisect.bisect_right(self._starts, node._sequence_nr()) - 1
        return self._owners[place] if 0 <= place < len(self._owners) else ""

    def _note(self, kernels: Sequence[Operation], tensors: Sequence[torch.Tensor]) -> None:
        """Notes the kernels of a call, which know tensors by their places; all memory is taken before the first."""
        numbered = []
        for kernel in kernels:
            reads = tuple([(self._number(tensors[place]), size) for place, size in kernel.reads])
            writes = tuple([(self._number(tensors[place]), size) for place, size in kernel.writes])
            numbered.append(_Kernel(kernel, reads, writes, self._owner()))
        is_again = torch._C._current_graph_task_id() != -1 and torch.is_grad_enabled()
        for each in numbered:
            if is_again:
                self._again.add(len(self._events))
            self._add(each)

    def _add(self, event: _Kernel | Issue | Wait | OnHost) -> None:
        self._events.append(event)
        self._acts.append(self.memory.act())
        self.memory.place = len(self._events)

    def places(self) -> dict[int, int]:
        return {tensor: storage for (storage, _), tensor in self._places.items()}

    def _number(self, tensor: torch.Tensor) -> int:
        """Returns a number for what a tensor lies in: parts of one buffer are different things."""
        key = (self.memory.number(tensor), int(tensor.storage_offset()))
        return self._places.setdefault(key, len(self._places))

    def _call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> OperatorCall:
        try:
            return self._calls.call(func, args, kwargs)
        except NotImplementedError as error:
            raise no_answer(
                f"torch cannot run {func} without values: {first_line(error)}", f"at {_asker()[1]}"
            ) from error

    def _read(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Answers who asks for a value: what is known of it, and an engine gets 0; else a model is refused."""
        name, device = func._overloadpacket.__name__, kwargs.get("device")
        is_moved = device is not None and torch.device(device).type != "meta"
        if not args[0].is_meta or (name == "_to_copy" and not is_moved):
            return None
        known = self.values.value(args[0])
        if known is not None:
            return known.to(kwargs.get("dtype") or known.dtype) if name == "_to_copy" else known.item()
        file, place = _asker()
        if not file.startswith(_ROOMS):  # an engine asks for flags of what this rank did not use, nor did any alike
            raise no_answer(f"it reads a value of a tensor ({func})", f"at {place}")
        tensor: torch.Tensor = args[0]
        if self.memory.has_host:  # a host that works itself is not ahead of the device: it waits here
            self._add(OnHost("read", 0, reads=True))
        if name == "_to_copy":
            return torch.zeros(tensor.shape, dtype=kwargs.get("dtype") or tensor.dtype, device="cpu")
        return 0.0 if tensor.is_floating_point() else 0


@functools.cache
def _kind(func: Any) -> str:
    """Says what is special about an operator: a view touches nothing and makes no memory."""
    name = func._overloadpacket.__name__
    if name in ("_local_scalar_dense", "_to_copy"):
        return "reads"
    if name.startswith("_fused_") and name.endswith("_"):  # optimizers of CUDA: torch has none on meta
        return "fused"
    returns = func._schema.returns
    is_view = bool(returns) and all(each.alias_info is not None and not each.alias_info.is_write for each in returns)
    return "view" if is_view and name != "lift_fresh" else "plain"


def _asker() -> tuple[str, str]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((_OURS, _TORCH, "<")):
            return file, f"{Path(file).name}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return "", "code that cannot be told"


def no_answer(what: str, place: str) -> UntraceableError:
    """Returns what to say of a model that asks for what a dry run does not have; ``place`` is where it does."""
    return UntraceableError(
        f"the model cannot be traced: {what}, {place}\n"
        "  a dry run has shapes and no values: .item(), .tolist(), if tensor.sum() > 0, tensor[mask] and operators\n"
        "  without a meta kernel have no answer there\n"
        "  compute with masks (torch.where) in the place of branches, or register a meta kernel (torch.library);\n"
        "  paceline simulate runs such a model with values, on virtual ranks"
    )
