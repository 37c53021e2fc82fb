"""What only a run of the model without values tells: its memory, for ``parallel.strategy: auto``, and its FLOPs.

Of what a model of the user's own code raises there, its own error and the line of it are told.

FLOPs of one sample, forward and backward. GPTs, by the formula of predictions, for N weights that a token is multiplied
with, L layers of width W, T tokens:

    T (6 N + 6 L W T)         of causal attention what is computed: the half of the square that no mask hides

Papers that count all of it have 12 in the place of the second 6: at 65,536 tokens of GPT-1.1B an MFU of 86 % for one
of 50 %. Residual networks and MLPs of ours: three times the forward pass. Any other model is counted once: a copy of it
on the meta device runs forward and backward on two samples, in milliseconds and without memory. Activations that are
computed again in backward do not count: they are work of the run, and not of the model.
"""

from __future__ import annotations

import copy
import inspect
import logging
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from paceline.cluster.detect import Machine, detect_machine
from paceline.cluster.devices import Cluster
from paceline.comm.base import Communicator
from paceline.comm.ledger.call_sites import LIBRARY, USER, kind_of_file
from paceline.comm.objects import ask_first_rank
from paceline.config import Config, with_precision
from paceline.config.data_sections import is_own_code, may_ignore
from paceline.data.fetch import fetch_batch
from paceline.data.registry import DataSplits, data_of
from paceline.engines.precision import precision_named
from paceline.errors import PacelineError, UsageError
from paceline.free_memory import measure_machine
from paceline.imports import import_from_path
from paceline.models.gpt import GPT
from paceline.models.measured import KnownValues, answering, measure_model
from paceline.models.registry import build_model, model_blocks
from paceline.plan.plan import RunMachine
from paceline.predict.formulas.step import transformer_flops
from paceline.predict.memory.activations import describe_model
from paceline.predict.memory.facts import ModelFacts
from paceline.search.automatic import Choice, apply_choice, choose
from paceline.train.loss import Loss, build_loss
from paceline.train.randomness import capture_random_states, restore_random_states

RULE = "the model is run once, on tensors that have shapes and no values"
_OURS = Path(__file__).parent.parent
_RECORDERS = (_OURS / "rehearse" / "dryrun", _OURS / "models" / "measured.py")  # they stand between a model and torch
_NEEDS_VALUES = (
    *(NotImplementedError, fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException),
    *(fake_tensor.UnsupportedFakeTensorException, fake_tensor.UnsupportedOperatorException),
)
_SPEAKS_OF_THEM = ("meta device", "meta tensor", ".numpy()")  # torch has no type for what these say
_SAMPLES = 2  # batch norms refuse a single one
_CPU = torch.device("cpu")


def needs_values(error: BaseException) -> bool:
    """Says whether a model asked for values, or for an operator that is not there without them."""
    return isinstance(error, _NEEDS_VALUES) or any(word in str(error) for word in _SPEAKS_OF_THEM)


def has_own_code(config: Config) -> bool:
    """Says whether model or data of a config are code of the user's, which may import anything."""
    return config.model.kind in ("factory", "hf") or is_own_code(config.data)


def is_users(config: Config) -> bool:
    return has_own_code(config) or config.train.loss != "auto"


def raised_at(error: BaseException, model: nn.Module | None = None) -> str | None:
    """Returns such as ``at my_net.py:7 in forward, where head is Linear(...)``; None where Paceline raised it."""
    calls = [(frame, line, Path(frame.f_code.co_filename)) for frame, line in traceback.walk_tb(error.__traceback__)]
    inside = [file.is_relative_to(_OURS) and not any(map(file.is_relative_to, _RECORDERS)) for _, _, file in calls]
    ours = [place for place, is_ours in enumerate(inside) if is_ours]
    behind = calls[ours[-1] + 1 :] if ours else calls
    own = [call for call in behind if kind_of_file(str(call[2])) in (USER, LIBRARY)]
    module = next((each for frame, _, _ in reversed(behind) if (each := _module(frame)) is not None), None)
    is_loss = bool(ours) and calls[ours[-1]][2] == _OURS / "train" / "loss.py"
    if not own and module is None and not is_loss:
        return None
    name = "" if module is None or model is None else _name(module, model)
    if own:
        frame, line, file = own[-1]
        return f"at {file.name}:{line} in {frame.f_code.co_name}" + (f", where {name}" if name else "")
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
    cause = f"{what}: {type(error).__name__}: {first_line(error)}\n  it is raised {place}{maker}"
    rule = f"{RULE}; the inputs of its data are {_inputs(data)}"
    return UsageError(f"{cause}\n  {rule}\n  mend the model, or take the data that it is made for")


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0].rstrip(".")


def _module(frame: FrameType) -> nn.Module | None:
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


def resolve_strategy(
    config: Config, where: RunMachine, machine: Machine | Cluster | None = None
) -> tuple[Config, Choice]:
    """Decides what ``parallel`` and ``memory`` leave open: the fastest that fits, or the first. Raises ConfigError."""
    config = with_precision(config, where.device)
    model = describe_model(config, where.device) or measure_config(config, where.device)
    choice = choose(config, model, where, machine or detect_machine(with_gpus=where.device == "cuda"))
    return apply_choice(config, choice), choice


def resolve_together(
    config: Config, comm: Communicator, node_ranks: int | None = None, machine: Machine | None = None
) -> tuple[Config, Choice]:
    """Decides on rank 0, and tells the others. ``machine``: for ranks that keep to some cores, and see only those."""

    def decide() -> tuple[Config, Choice]:
        return resolve_strategy(config, measure_machine(comm.device.type, comm.size, node_ranks or comm.size), machine)

    return ask_first_rank(comm, decide)


def measure_config(
    config: Config,
    device: str,
    *,
    make_model: Callable[[], nn.Module] | None = None,
    asked: str = "parallel.strategy = auto",
    fix: str = "set parallel.strategy yourself: ddp if the model fits beside its batch, else fsdp",
) -> ModelFacts:
    """Measures the model of a config on samples of its data, with fake tensors: nothing is allocated or computed.

    ``make_model`` stands for the config's own. Raises UsageError, with ``asked`` and ``fix``, for a model that looks at
    values in its forward pass, and for one that its data do not fit.
    """
    data = data_of(config)
    precision = precision_named(config.train.precision_on(config.parallel.device))
    dtype = precision.param_dtype or getattr(torch, config.train.dtype)
    loss = build_loss(config.train.loss, data.shape, may_ignore=may_ignore(config.data), dtype=dtype)
    model: nn.Module | None = None
    log = logging.getLogger(fake_tensor.__name__)
    was_off = log.disabled
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:

        def make_batch(samples: int) -> Any:
            return _fake_batch(data, samples, mode, torch.device(device), dtype)

        def total(model: nn.Module, batch: Any) -> torch.Tensor:
            with precision.context(torch.device(device)):
                return loss(model, batch).total

        try:
            log.disabled = True  # torch would print where in itself a fake tensor failed: the error says it
            with torch.device(device):
                model = build_model(config.model, data.shape) if make_model is None else make_model()
            _cast(model, dtype)
            return measure_model(model, total, make_batch, model_blocks(model))
        except PacelineError:
            raise
        except Exception as error:  # whatever the user's code raises on tensors without values
            what, place = f"{asked} cannot measure the model", raised_at(error, model)
            if place is not None and not needs_values(error):
                raise misfit(error, what, data, place, made=made_at(config, make_model)) from error
            cause = f"{type(error).__name__}: {first_line(error)}" + ("" if place is None else f", {place}")
            raise UsageError(f"{what}: {cause}\n  {RULE}\n  {fix}") from error
        finally:
            log.disabled = was_off


def _fake_batch(data: DataSplits, samples: int, mode: FakeTensorMode, device: torch.device, dtype: torch.dtype) -> Any:
    """Returns the first samples of the data as fake tensors on the device; an item that is there once is repeated."""
    with torch.utils._python_dispatch._disable_current_modes():
        real = fetch_batch(data.train, torch.arange(samples).remainder(len(data.train)).numpy())

    def fake(value: torch.Tensor) -> torch.Tensor:
        return torch.empty(value.shape, dtype=dtype if value.is_floating_point() else value.dtype, device=device)

    with mode:
        return tree_map_only(torch.Tensor, fake, real)


def _cast(model: nn.Module, dtype: torch.dtype) -> None:
    """As ``model.to(dtype)``, which cannot swap fake tensors."""
    seen: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_floating_point() and parameter.dtype != dtype:
                cast = nn.Parameter(parameter.detach().to(dtype), parameter.requires_grad)
                module._parameters[name] = seen.setdefault(id(parameter), cast)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleCost:
    """What one sample of a run counts as, and the model FLOPs that it takes; None: nobody knows."""

    unit: Literal["tokens", "images", "samples"] = "samples"
    units: float = 1.0
    flops: float | None = None


def cost_of_sample(config: Config, data: DataSplits, model: nn.Module) -> SampleCost:
    flops, shape = sample_flops(config, data, model), data.shape
    if shape.kind == "tokens" and shape.context is not None:
        return SampleCost(unit="tokens", units=float(shape.context), flops=flops)
    return SampleCost(unit="samples" if shape.channels is None else "images", flops=flops)


def sample_flops(config: Config, data: DataSplits, model: nn.Module) -> float | None:
    """Returns what one sample takes; None for a model that cannot run without values. Model and random states stay."""
    if isinstance(model, GPT):
        return transformer_flops(model.config, data.shape.context or model.config.context)
    known = describe_model(config, "cpu")
    if known is not None and known.work is not None:
        return 3 * known.work.flops
    states = capture_random_states(_CPU)
    loss = build_loss(config.train.loss, data.shape, may_ignore=may_ignore(config.data))
    try:
        batch = fetch_batch(data.train, np.arange(_SAMPLES, dtype=np.int64) % len(data.train))
        return count_flops(model, loss, batch) / _SAMPLES
    except Exception:  # whatever code of the user's raises on tensors without values: then nobody knows
        return None
    finally:
        restore_random_states(states, _CPU)


def count_flops(model: nn.Module, loss: Loss, batch: Any) -> float:
    """Counts the FLOPs of forward and backward over a batch, without values. Raises what the model's code raises."""
    shadow, values = on_meta(model), KnownValues()

    def place(value: torch.Tensor) -> torch.Tensor:
        placed = value.to("meta")
        if not value.is_floating_point():  # token ids, which a model may look for padding in
            values.tell(placed, lambda: value)
        return placed

    with FlopCounterMode(display=False) as counter, answering(values), _MaskedHalves() as masked:
        total = loss(shadow, tree_map_only(torch.Tensor, place, batch)).total
        if total.requires_grad:
            total.backward()  # type: ignore[no-untyped-call]
    return float(counter.get_total_flops() - masked.flops)


class _MaskedHalves(TorchFunctionMode):
    """Adds up what causal attention does not compute of the square that torch counts, forward and backward."""

    flops = 0

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func is F.scaled_dot_product_attention:
            names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
            given = dict(zip(names, args, strict=False)) | (kwargs or {})
            query, key, value = (given[name] for name in names[:3])
            if given.get("is_causal"):
                both: int = query.shape[:-1].numel() * key.shape[-2] * (query.shape[-1] + value.shape[-1])
                self.flops += both * (3 if found.requires_grad else 1)
        return found


def on_meta(model: nn.Module) -> nn.Module:
    """Returns a copy of a model whose parameters and buffers have no values; shared ones stay shared."""
    memo: dict[int, Any] = {id(each): nn.Parameter(each.to("meta"), each.requires_grad) for each in model.parameters()}
    memo |= {id(each): each.to("meta") for each in model.buffers()}
    return copy.deepcopy(model, memo)
