"""Which optimizers can work on flat slices: those that treat every element alone.

SGD, Adam and their kin update an element from its own gradient and its own state, so a slice of a matrix is updated as
the whole matrix would be. Muon, Shampoo and Adafactor look at rows and columns, LARS and LAMB at the norm of a tensor,
Prodigy at all tensors together: on a slice they would compute something else, without a word. No list of names can know
every optimizer, so one of the same class and settings is tried out on a small matrix, and others of it on slices.
"""

from __future__ import annotations

import contextlib
import inspect
import random
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.errors import UsageError

_SHAPE = (6, 5)
_CUT = 13  # inside a row
_NUM_STEPS = 3
_LR = 0.01  # enough to see an update
_PLAIN = (bool, int, float, str, type(None))  # what is told apart by how it is written

_found: dict[tuple[object, ...], str | None] = {}  # what speaks against a class with certain settings


def check_elementwise(optimizer: Optimizer) -> None:
    """Raises UsageError for an optimizer that is known to treat slices otherwise, and does not join them itself."""
    if getattr(optimizer, "gathers_matrices", False):
        return
    key = _what_counts(optimizer)
    reason = _found[key] if key in _found else _reason_against(optimizer)
    if key is not None:
        _found[key] = reason
    if reason is not None:
        raise UsageError(
            f"{type(optimizer).__name__} cannot update sharded parameters: {reason}\n"
            "  a rank holds a flat slice of each parameter, so every element must be updated by itself alone\n"
            "  use strategy = 'ddp', where ranks hold whole parameters, an optimizer such as AdamW, or paceline.Muon"
        )


def _what_counts(optimizer: Optimizer) -> tuple[object, ...] | None:
    """Returns all that a trial depends on; None where settings are more than plain values."""
    first = optimizer.param_groups[0]["params"][0]
    settings = [_adapted(optimizer.defaults), *_distinct_settings(optimizer)]
    values = [value for each in settings for value in each.values()]
    leaves = [leaf for value in values for leaf in (value if type(value) is tuple else (value,))]
    if not all(type(leaf) in _PLAIN for leaf in leaves) or "step" in vars(optimizer):
        return None
    written = repr([sorted(each.items()) for each in settings])
    return type(optimizer), type(optimizer).step, first.device, first.dtype, written


def _reason_against(optimizer: Optimizer) -> str | None:
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        return "its step() needs a closure, and looks at all parameters together"
    if isinstance(optimizer, torch.optim.SparseAdam):
        return "it takes sparse gradients, and that of a slice is dense"
    first = optimizer.param_groups[0]["params"][0]
    for device, dtype in dict.fromkeys([(torch.device("cpu"), torch.float64), (first.device, first.dtype)]):
        with _undisturbed(device):
            values, gradients = _matrix(device, dtype)
            try:
                whole, again = _run(optimizer, values, gradients), _run(optimizer, values, gradients)
            except Exception:  # nosec B112  # not an optimizer that can be tried out here
                continue
            if not torch.equal(whole, again):
                return None  # it draws random numbers: what it does cannot be compared
            return _compare(optimizer, values, gradients, whole)
    return None


def _compare(optimizer: Optimizer, values: Tensor, gradients: Sequence[Tensor], whole: Tensor) -> str | None:
    """Returns what speaks against slices: each has an optimizer of its own here, as if it were on a rank of its own."""

    def run_slice(begin: int, end: int) -> Tensor:
        return _run(optimizer, values.view(-1)[begin:end], [each.view(-1)[begin:end] for each in gradients])

    try:
        slices = torch.cat([run_slice(0, _CUT), run_slice(_CUT, values.numel())], dim=1)
    except Exception as error:
        return f"it refuses flat slices ({_first_line(error)})"
    update = (whole - values).flatten(1).abs().amax(1)
    difference = (slices - whole.flatten(1)).abs().amax(1)
    tolerance = 1e-6 if values.dtype == torch.float64 else 1e-2
    if bool((difference > tolerance * update).any()):
        return "it looks at whole matrices, or at all parameters together, and gives slices another update"
    try:
        run_slice(_CUT, _CUT)
    except Exception as error:
        return f"it fails on a slice without elements, as some rank may get ({_first_line(error)})"
    return None


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def _run(optimizer: Optimizer, values: Tensor, gradients: Sequence[Tensor]) -> Tensor:
    """Returns what an optimizer of the same class makes of ``values``, for each of the parameter groups' settings."""
    settings = _distinct_settings(optimizer)
    tensors = [nn.Parameter(values.clone()) for _ in settings]
    groups = [{"params": [tensor], **each} for tensor, each in zip(tensors, settings, strict=True)]
    make: Any = type(optimizer)
    accepted = inspect.signature(make).parameters
    twin = make(groups, **{key: value for key, value in _adapted(optimizer.defaults).items() if key in accepted})
    for gradient in gradients:
        for tensor in tensors:
            tensor.grad = gradient.clone()
        twin.step()
    return torch.stack([tensor.detach() for tensor in tensors])


def _distinct_settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Returns the settings of the parameter groups, without repetition: some give every layer a group."""
    found = {}
    for group in optimizer.param_groups:
        settings = _adapted({key: value for key, value in group.items() if key not in ("params", "param_names")})
        found[repr(sorted(settings.items()))] = settings
    return list(found.values())


def _adapted(settings: dict[str, Any]) -> dict[str, Any]:
    """Returns settings for the trial, which may run on a CPU, and must not have a rate of zero."""
    changes = {"lr": _LR, "initial_lr": _LR, "fused": False, "capturable": False}
    return {key: changes.get(key, value) for key, value in settings.items()}


def _matrix(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    values, *gradients = torch.randn(1 + _NUM_STEPS, *_SHAPE, generator=generator, dtype=torch.float64)
    rows = torch.linspace(1.0, 5.0, _SHAPE[0], dtype=torch.float64)[:, None]
    return (values * rows).to(device, dtype), [(3.0 * gradient / rows).to(device, dtype) for gradient in gradients]


@contextlib.contextmanager
def _undisturbed(device: torch.device) -> Iterator[None]:
    """Keeps what a trial does from being noticed: random states, warnings."""
    before = random.getstate()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        random.setstate(before)
