"""What a forward pass leaves behind for backward, counted exactly; and values of tensors that have none.

Activations are counted by storage, block by block, on real tensors and on fake ones, for which nothing is allocated. On
meta tensors too, but autocast and kernels are not those of a device. Parameters and buffers do not count.

A model on the meta device may ask whether its positions are 0, 1, 2, ... or whether a mask hides anything. Tensors that
``arange``, ``ones`` and the like made, and whole numbers and truth values that are computed from these alone, have an
answer (``KnownValues``). It is worked out when somebody asks: each remembers how it was made, and no tensor is kept.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakTensorKeyDictionary

from paceline.plan.model_shape import ModelShape
from paceline.predict.memory.facts import BlockFacts, ModelFacts

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "_scaled_dot_product")


@dataclass(slots=True, kw_only=True)
class BlockBytes:
    """One call of a block: what it saves, its inputs, and the outputs of its matrix products."""

    saved: int = 0
    inputs: int
    products: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationBytes:
    """What one forward pass leaves for backward: ``outside`` of all blocks, and in each block in order of calls."""

    outside: int
    blocks: tuple[BlockBytes, ...]
    largest: int  # of a single tensor
    written_bytes: int  # by all operations, for backward or not
    work: ModelShape  # of all samples of the pass

    @property
    def total(self) -> int:
        return self.outside + sum(block.saved for block in self.blocks)


def measure_activations(
    model: nn.Module, loss: Callable[[nn.Module, Any], torch.Tensor], batch: Any, blocks: Sequence[nn.Module] = ()
) -> ActivationBytes:
    """Runs a forward pass of ``loss(model, batch)`` and counts what autograd keeps: a tensor once."""
    counter = ForwardCounter(sum(each.numel() for each in model.parameters()), [*model.parameters(), *model.buffers()])
    with counter.counting(blocks):
        total = loss(model, batch)
    del total
    return counter.result()


def measure_model(
    model: nn.Module,
    loss: Callable[[nn.Module, Any], torch.Tensor],
    make_batch: Callable[[int], Any],
    blocks: Sequence[nn.Module] = (),
) -> ModelFacts:
    """Returns what the estimates need to know of a model, from two forward passes on 2 and on 4 samples.

    What grows from one to the other belongs to samples, the rest to the weights, such as autocast's copies of them.
    """
    few, more = (measure_activations(model, loss, make_batch(samples), blocks) for samples in (2, 4))
    sizes = [sum(parameter.numel() for parameter in block.parameters()) for block in blocks]
    found = [
        BlockFacts(
            parameters=size,
            saved_bytes=(b.saved - a.saved) / 2,
            input_bytes=(b.inputs - a.inputs) / 2,
            product_bytes=(b.products - a.products) / 2,
            cast_bytes=max(0, 2 * a.saved - b.saved),
        )
        for size, a, b in zip(sizes, few.blocks, more.blocks, strict=True)
    ]
    total = sum(parameter.numel() for parameter in model.parameters())
    saved, cast = (more.outside - few.outside) / 2, max(0, 2 * few.outside - more.outside)
    root = BlockFacts(parameters=total - sum(sizes), saved_bytes=saved, cast_bytes=cast)
    return ModelFacts(
        blocks=tuple(found),
        root=root,
        buffer_bytes=_num_bytes(model.buffers()),
        temporary_bytes=2 * (more.largest - few.largest) / 2,  # its gradient, and that of what it was made from
        work=replace(
            more.work,
            flops=(more.work.flops - few.work.flops) / 2,
            activations=(more.work.activations - few.work.activations) / 2,
        ),
    )


class EagerMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operator. Nothing inside is compiled: torch need not load its compiler, and ask it each time."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class ForwardCounter(EagerMode):  # type: ignore[no-untyped-call]
    """Sees every tensor that is saved and every product that is computed, and knows inside which block."""

    def __init__(self, parameters: int, held: Iterable[torch.Tensor]) -> None:
        """There are so many ``parameters``; tensors that are ``held`` anyway do not count as kept for backward."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._params = float(parameters)
        self._seen = {_storage_key(tensor) for tensor in held}
        self._kept: list[torch.Tensor] = []  # alive, so that no storage is taken for another at the same place
        self._calls: list[BlockBytes] = []
        self._depth = 0  # of the blocks that are running: what happens counts for the outermost
        self._outside = 0
        self._flops = {"convolution": 0.0, "other": 0.0}
        self._written = self._written_bytes = self._kernels = 0

    @contextlib.contextmanager
    def counting(self, blocks: Sequence[nn.Module] = ()) -> Iterator[None]:
        """Counts what a forward pass inside does; the pass itself is as it would be."""
        with contextlib.ExitStack() as stack:
            for block in blocks:
                stack.enter_context(self.watch(block))
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self.pack, lambda tensor: tensor))
            stack.enter_context(self)
            yield

    @contextlib.contextmanager
    def watch(self, block: nn.Module) -> Iterator[None]:
        """Attributes what happens inside ``block`` to it; a block inside another counts for the outer one."""
        enters = block.register_forward_pre_hook(self._enter, with_kwargs=True)
        leaves = block.register_forward_hook(self._leave, always_call=True)
        with enters, leaves:  # which removes them
            yield

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        key = _storage_key(tensor)
        if key in self._seen:
            return tensor
        self._seen.add(key)
        self._kept.append(tensor)
        num_bytes = tensor.untyped_storage().nbytes()
        if self._depth:
            self._calls[-1].saved += num_bytes
        else:
            self._outside += num_bytes
        return tensor

    def result(self) -> ActivationBytes:
        largest = max((tensor.untyped_storage().nbytes() for tensor in self._kept), default=0)
        work = ModelShape(
            total_params=self._params,
            flops=sum(self._flops.values()),
            activations=float(self._written),
            kernels=self._kernels,
            kind="convolution" if self._flops["convolution"] > self._flops["other"] else "attention",
        )
        blocks, written = tuple(self._calls), self._written_bytes
        return ActivationBytes(outside=self._outside, blocks=blocks, largest=largest, written_bytes=written, work=work)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.count(func, args, kwargs or {}, result)
        return result

    def count(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Counts an operation that has run."""
        if not func.is_view:
            self._kernels += 1
            self._written_bytes += _num_bytes(tree_leaves(result))
        name = func.overloadpacket._qualified_op_name.removeprefix("aten::")
        if name.startswith(_PRODUCTS):
            outputs = result if isinstance(result, tuple) else (result,)
            self._written += outputs[0].numel()
            if func.overloadpacket in flop_registry:
                kind = "convolution" if name.startswith("convolution") else "other"
                self._flops[kind] += operator_flops(func, args, kwargs, result)
            if self._depth:
                self._calls[-1].products += _num_bytes(outputs[:1])

    def _enter(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        if not self._depth:
            self._calls.append(BlockBytes(inputs=_num_bytes(tree_leaves((args, kwargs)))))
        self._depth += 1

    def _leave(self, *_: Any) -> None:
        self._depth -= 1


def operator_flops(func: Any, args: Any, kwargs: Any, result: Any) -> float:
    """Returns the FLOPs of one call of an operator: of products, convolutions and attention; 0 of all others."""
    # Torch's registry has not the CPU's attention, and wants as many heads of keys as of queries.
    if "scaled_dot_product" in func.__name__:
        shapes = [each.shape for each in tree_leaves(args) if isinstance(each, torch.Tensor) and each.ndim == 4]
        is_backward = "backward" in func.__name__
        query, key, value = shapes[1:4] if is_backward else shapes[:3]
        # Two products, of the queries with the keys and of the weights with the values.
        forward = 2.0 * math.prod(query[:-2]) * query[-2] * key[-2] * (query[-1] + value[-1])
        return 2.5 * forward if is_backward else forward
    count = flop_registry.get(func.overloadpacket)
    return 0.0 if count is None else float(count(*args, **kwargs, out_val=result))


def _storage_key(tensor: torch.Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata  # fake and meta tensors have no address
    return key


def _num_bytes(tensors: Iterable[Any]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor))


_MAKERS = frozenset(("arange", "ones", "zeros", "full", "scalar_tensor", "eye", "tril_indices", "triu_indices"))
_FILLED = {"ones_like": 1, "new_ones": 1, "zeros_like": 0, "new_zeros": 0}  # whatever the values of their argument are
_MOST = 2**24  # elements of a tensor that is worked out


@dataclass(slots=True)
class _Made:
    """How a tensor was made. ``version`` is torch's count of writes to it, when that was noted."""

    make: Callable[[], Any]
    version: int
    value: Any = None

    def result(self) -> Any:
        self.value = self.make() if self.value is None else self.value
        return self.value


class KnownValues:
    def __init__(self) -> None:
        self._made: MutableMapping[torch.Tensor, _Made] = WeakTensorKeyDictionary()

    def tell(self, tensor: torch.Tensor, make: Callable[[], torch.Tensor]) -> None:
        self._made[tensor] = _Made(make, tensor._version)

    def note(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        """Remembers how an operator made its result, if that can be told from shapes alone."""
        if type(result) is not torch.Tensor or not result.is_meta:
            return
        name = func._overloadpacket.__name__
        if result.is_floating_point() and name not in _MAKERS and name not in _FILLED:
            return  # what layers compute: nobody knows it, and there is much of it
        if name in _FILLED:
            filled, shape, dtype = _FILLED[name], result.shape, result.dtype
            self.tell(result, lambda: torch.full(shape, filled, dtype=dtype))
            return
        if "empty" in name or torch.Tag.nondeterministic_seeded in func.tags:
            return
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        sources = [self._source(each) for each in tensors]
        if None in sources or not (sources or name in _MAKERS) or result.numel() > _MOST:
            return
        if any(each is result for each in tensors):  # written in place: its views have changed, too
            return
        places = {id(tensor): source for tensor, source in zip(tensors, sources, strict=True)}
        given = tree_map(lambda value: places.get(id(value), value), (args, kwargs))

        def plain(value: Any) -> Any:
            if isinstance(value, _Made):
                return value.result()
            return torch.device("cpu") if isinstance(value, torch.device) else value

        def work_out() -> Any:
            args, kwargs = tree_map(plain, given)
            return func(*args, **kwargs)

        self.tell(result, work_out)

    def value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Returns the values of a tensor, on the CPU; None where they are not known."""
        source = self._source(tensor)
        if source is None:
            return None
        with _disable_current_modes():
            found: torch.Tensor = source.result()
        return found

    def _source(self, tensor: torch.Tensor) -> _Made | None:
        """Returns how a tensor was made; None where nobody knows, or somebody has written to it since."""
        if not tensor.is_meta:  # an index, say, which has values
            with _disable_current_modes():
                return _Made(tensor.clone, tensor._version, tensor.detach().clone())
        found = self._made.get(tensor)
        return found if found is not None and found.version == tensor._version else None


def indexed(args: Any) -> Any:
    """Returns the arguments of ``tensor[...]`` with lists as tensors on the CPU: torch would drop their values."""
    tensor, index = args
    if not tensor.is_meta:
        return args
    parts = index if isinstance(index, tuple) else (index,)
    kept = tuple(torch.tensor(each, device="cpu") if isinstance(each, list) else each for each in parts)
    return tensor, kept if isinstance(index, tuple) else kept[0]


class _KeepsIndices(TorchFunctionMode):
    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*(indexed(args) if func is torch.Tensor.__getitem__ else args), **(kwargs or {}))


class _Answers(EagerMode):  # type: ignore[no-untyped-call]
    def __init__(self, values: KnownValues) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._values = values

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = self._values.value(args[0]) if func is torch.ops.aten._local_scalar_dense.default else None
        if known is not None:
            return known.item()
        result = func(*args, **(kwargs or {}))
        self._values.note(func, args, kwargs or {}, result)
        return result


@contextlib.contextmanager
def answering(values: KnownValues) -> Iterator[None]:
    """Answers a model on the meta device that reads a number which is known; torch refuses all others."""
    with _KeepsIndices(), _Answers(values):
        yield
