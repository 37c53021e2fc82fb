"""What users do with a module, done with an engine: as they expect, or an error that names what to call."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import torch
from torch import nn

from paceline.engines.module_guard import forget_gradients
from paceline.errors import UsageError

_CASTS = {"half": torch.float16, "float": torch.float32, "double": torch.float64, "bfloat16": torch.bfloat16}
_MOVES = ("cuda", "cpu", "xpu")


class _Whole(Protocol):
    """What an engine has for this."""

    module: nn.Module

    @property
    def device(self) -> torch.device: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def full_state_dict(self, *, rank0_only: bool = False) -> dict[str, torch.Tensor]: ...

    def load_full_state_dict(self, state: dict[str, torch.Tensor]) -> None: ...

    def parameters(self) -> Any: ...

    def to(self, *args: Any, **kwargs: Any) -> Any: ...


class ModuleFace:
    """The methods of a module that mean something else for an engine. All other attributes are the module's own."""

    def forward(self: _Whole, *args: Any, **kwargs: Any) -> Any:
        """Runs the module, as a call of the engine does: hooks and all."""
        return self(*args, **kwargs)

    def state_dict(self: _Whole) -> dict[str, torch.Tensor]:
        """Returns all parameters and buffers, whole, on the CPU, under the module's names. All ranks call it.

        ``full_state_dict(rank0_only=True)`` needs the memory on one rank only; ``paceline.save`` on none.
        """
        return self.full_state_dict()

    def load_state_dict(self: _Whole, state: dict[str, torch.Tensor], strict: bool = True) -> Any:
        """Loads what ``state_dict`` gave, each rank its part. All ranks call it; returns what is missing or too much.

        Raises RuntimeError, if ``strict``, unless all names are there and no other.
        """
        if strict:
            self.load_full_state_dict(state)
            return nn.modules.module._IncompatibleKeys([], [])
        mine = self.full_state_dict()
        self.load_full_state_dict({name: state.get(name, value) for name, value in mine.items()})
        missing = [name for name in mine if name not in state]
        return nn.modules.module._IncompatibleKeys(missing, [name for name in state if name not in mine])

    def zero_grad(self: _Whole, set_to_none: bool = True) -> None:
        """Forgets the gradients: of what is updated, and of the module's own parameters."""
        forget_gradients((*self.parameters(), *self.module.parameters()), set_to_none)

    def to(self: _Whole, *args: Any, **kwargs: Any) -> Any:
        """Returns the engine, which is on its communicator's device. Raises UsageError for another device or dtype."""
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        here = self.device
        is_here = device is None or (device.type == here.type and device.index in (None, here.index))
        if not is_here:
            _refuse(f"engine.to({device})", f"its tensors are on {here}, that of the communicator", _ELSEWHERE)
        if dtype is not None and any(parameter.dtype != dtype for parameter in self.module.parameters()):
            _refuse(f"engine.to({dtype})", "the engine holds its parameters in buffers of one dtype", _OTHER_DTYPE)
        return self

    def apply(self, *_: Any) -> NoReturn:
        """Raises UsageError: values are set before the ranks share them."""
        rule, fix = "a rank may hold parts of parameters, as vectors", "call model.apply(...) before parallelize()"
        _refuse("engine.apply(...)", rule, fix)

    def compile(self, *_: Any, **__: Any) -> NoReturn:
        """Raises UsageError: what is compiled is part of the layout."""
        rule, fix = (
            "blocks are compiled one by one, so that communication overlaps",
            'give parallelize(..., compile="auto")',
        )
        _refuse("engine.compile()", rule, fix)

    def __deepcopy__(self, memo: object) -> NoReturn:
        """Raises UsageError: an engine is tied to its ranks."""
        del memo
        fix = "copy engine.state_dict(); for an average: paceline.WeightAverage(engine, decay)"
        _refuse("a copy of an engine", "it is tied to its module, its optimizer and the other ranks", fix)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Raises UsageError: an engine is tied to its ranks."""
        del protocol
        fix = "save engine.state_dict(), or call paceline.save(folder, engine, optimizer, step=step)"
        _refuse("a pickle of an engine", "it is tied to its module, its optimizer and the other ranks", fix)

    if not TYPE_CHECKING:  # else a wrong name would be right to a type checker

        def __getattr__(self, name: str) -> Any:
            """Returns the module's attribute of a name that the engine does not have."""
            if name.startswith("_") or name == "module":
                raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
            if name in _CASTS:
                return functools.partial(self.to, dtype=_CASTS[name])
            if name in _MOVES:
                return functools.partial(_move, self, name)
            if name == "type":
                _refuse("engine.type(...)", "the engine holds its parameters in buffers of one dtype", _OTHER_DTYPE)
            if name == "to_empty":
                _refuse("engine.to_empty()", "its tensors are on the device of the communicator", _ELSEWHERE)
            try:
                return getattr(self.module, name)
            except AttributeError:
                kinds = f"neither {type(self).__name__} nor its module, a {type(self.module).__name__},"
                raise AttributeError(f"{kinds} has an attribute {name!r}") from None


_ELSEWHERE = "choose it when the ranks meet: paceline.connect(device=...)"
_OTHER_DTYPE = 'cast the model before parallelize(), or give precision="bf16" or another one'


def _move(engine: _Whole, kind: str, device: Any = None) -> Any:
    """Does what ``module.cuda(device)`` and its kin do: nothing where the engine is there already."""
    if device is None:
        return engine.to(kind)
    return engine.to(torch.device(kind, device) if isinstance(device, int) else device)


def _refuse(what: str, rule: str, fix: str) -> NoReturn:
    raise UsageError(f"{what}\n  {rule}\n  {fix}")
