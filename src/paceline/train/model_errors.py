"""What a model of the user's own code raised where it was run without values: its own error, and the line of it."""

from __future__ import annotations

import inspect
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch._subclasses import fake_tensor

from paceline.config import Config
from paceline.config.data_sections import is_own_code
from paceline.data.registry import DataSplits
from paceline.errors import PacelineError, UsageError
from paceline.imports import import_from_path

RULE = "the model is run once, on tensors that have shapes and no values"
_OURS = Path(__file__).parent.parent
_TORCH = Path(torch.__file__).parent
_PYTHON = Path(sysconfig.get_path("stdlib"))
_RECORDERS = (_OURS / "rehearse" / "dryrun", _OURS / "models" / "measured.py")  # they stand between a model and torch
_NEEDS_VALUES = (
    NotImplementedError,
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedFakeTensorException,
    fake_tensor.UnsupportedOperatorException,
)
_SPEAKS_OF_THEM = ("meta device", "meta tensor", ".numpy()")  # torch has no type for what these say


def needs_values(error: BaseException) -> bool:
    """Says whether a model asked for values, or for an operator that is not there without them."""
    return isinstance(error, _NEEDS_VALUES) or any(word in str(error) for word in _SPEAKS_OF_THEM)


def has_own_code(config: Config) -> bool:
    """Says whether model or data of a config are code of the user's, which may import anything."""
    return config.model.kind in ("factory", "hf") or is_own_code(config.data)


def is_users(config: Config) -> bool:
    """Says whether model, data or loss of a config are of the user's own code."""
    return has_own_code(config) or config.train.loss != "auto"


def raised_at(error: BaseException, model: nn.Module | None = None) -> str | None:
    """Returns the line of the user's code, and the module of the model, that raised an error.

    Such as ``at my_net.py:7 in forward, where head is Linear(...)``. None where it comes from Paceline itself.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    lines = [line for _, line in traceback.walk_tb(error.__traceback__)]
    ours = max((place for place, frame in enumerate(frames) if _is_ours(frame)), default=-1)
    own = [place for place, frame in enumerate(frames) if place > ours and _is_own(frame)]
    module = next((each for frame in reversed(frames[ours + 1 :]) if (each := _module(frame)) is not None), None)
    is_loss = ours >= 0 and Path(frames[ours].f_code.co_filename) == _OURS / "train" / "loss.py"
    if not own and module is None and not is_loss:
        return None
    name = "" if module is None or model is None else _name(module, model)
    if own:
        code = frames[own[-1]].f_code
        place = f"{Path(code.co_filename).name}:{lines[own[-1]]} in {code.co_name}"
        return f"at {place}" + (f", where {name}" if name else "")
    if name:
        return f"in its forward, where {name}"
    return "in its forward" if module is not None else "in the loss of what it returns"


def made_at(config: Config, make_model: Callable[[], nn.Module] | None = None) -> str:
    """Returns the line at which the function begins that makes the model; empty where there is none to be found."""
    if make_model is None and config.model.kind != "factory":
        return ""
    try:
        made: Any = make_model or import_from_path(config.model.factory, "model.factory")  # type: ignore[union-attr]
        found = inspect.unwrap(made)
        return f"{Path(inspect.getfile(found)).name}:{inspect.getsourcelines(found)[1]}"
    except (TypeError, OSError, PacelineError):
        return ""


def misfit(error: Exception, what: str, data: DataSplits, place: str, *, made: str = "") -> UsageError:
    """Returns what to say of a model that its own code or its data break. ``what`` is what cannot be."""
    maker = f"; {made} makes the model" if made and made.partition(":")[0] not in place else ""
    return UsageError(
        f"{what}: {type(error).__name__}: {first_line(error)}\n"
        f"  it is raised {place}{maker}\n"
        f"  {RULE}; the inputs of its data are {_inputs(data)}\n"
        "  mend the model, or take the data that it is made for"
    )


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0].rstrip(".")


def _is_ours(frame: FrameType) -> bool:
    file = Path(frame.f_code.co_filename)
    return file.is_relative_to(_OURS) and not any(file.is_relative_to(each) for each in _RECORDERS)


def _is_own(frame: FrameType) -> bool:
    """Whether a frame is neither ours, nor torch's, nor Python's."""
    name = frame.f_code.co_filename
    file = Path(name)
    if name.startswith("<") or file.is_relative_to(_OURS) or file.is_relative_to(_TORCH):
        return False
    return not file.is_relative_to(_PYTHON) or "site-packages" in file.parts or "dist-packages" in file.parts


def _module(frame: FrameType) -> nn.Module | None:
    """Returns the module whose forward a frame is."""
    found = frame.f_locals.get("self")
    return found if isinstance(found, nn.Module) and frame.f_code.co_name == "forward" else None


def _name(module: nn.Module, model: nn.Module) -> str:
    name = next((name for name, each in model.named_modules() if each is module), "")
    shown = type(module).__name__ if list(module.children()) else repr(module)
    return f"{name} is {shown}" if name else ""


def _inputs(data: DataSplits) -> str:
    sample: Any = data.train[0]
    inputs = sample[0] if isinstance(sample, tuple | list) and sample else sample
    shape = getattr(inputs, "shape", None)
    return f"of type {type(inputs).__name__}" if shape is None else f"{list(shape)} a sample"
