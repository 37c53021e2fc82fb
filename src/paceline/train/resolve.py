"""``parallel.strategy: auto`` with what only torch can tell: a model of the user's own code, and free memory."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map

from paceline.cluster.detect import Machine, detect_machine
from paceline.comm.base import Communicator
from paceline.comm.objects import ask_first_rank
from paceline.config import Config, with_precision
from paceline.config.data_sections import may_ignore
from paceline.data.fetch import fetch_batch
from paceline.data.registry import DataSplits, data_of
from paceline.engines.precision import precision_named
from paceline.errors import PacelineError, UsageError
from paceline.free_memory import measure_machine
from paceline.models.measured import measure_model
from paceline.models.registry import build_model, model_blocks
from paceline.plan.plan import RunMachine
from paceline.predict.memory.activations import describe_model
from paceline.predict.memory.facts import ModelFacts
from paceline.search.automatic import Choice, apply_choice, choose
from paceline.train.loss import build_loss
from paceline.train.model_errors import RULE, first_line, made_at, misfit, needs_values, raised_at


def resolve_strategy(config: Config, where: RunMachine, machine: Machine | None = None) -> tuple[Config, Choice]:
    """Decides ``parallel.strategy: auto``; returns the config, and why.

    Of what fits, the fastest by prediction is taken; the first in order where the machine cannot be priced. None: the
    present one. Raises ConfigError where nothing fits, UsageError for a model that cannot be measured.
    """
    config = with_precision(config, where.device)
    model = describe_model(config, where.device) or measure_config(config, where.device)
    choice = choose(config, model, where, machine or detect_machine(with_gpus=where.device == "cuda"))
    return apply_choice(config, choice), choice


def resolve_together(
    config: Config, comm: Communicator, node_ranks: int | None = None, machine: Machine | None = None
) -> tuple[Config, Choice]:
    """Decides on rank 0, by the memory that it finds, and tells the others. All ranks call it.

    ``machine`` is for ranks that keep to some of its cores, and see only those.
    """

    def decide() -> tuple[Config, Choice]:
        return resolve_strategy(config, measure_machine(comm.device.type, comm.size, node_ranks or comm.size), machine)

    return ask_first_rank(comm, decide)


_BY_HAND = "set parallel.strategy yourself: ddp if the model fits beside its batch, else fsdp"


def measure_config(
    config: Config,
    device: str,
    *,
    make_model: Callable[[], nn.Module] | None = None,
    asked: str = "parallel.strategy = auto",
    fix: str = _BY_HAND,
) -> ModelFacts:
    """Measures the model of a config on samples of its data, with fake tensors: nothing is allocated or computed.

    ``make_model`` stands for the config's own. Raises UsageError for a model that looks at values in its forward pass,
    which fake tensors do not have; ``asked`` and ``fix`` are what that says. And for one that its data do not fit.
    """
    data = data_of(config)
    precision = precision_named(config.train.precision_on(config.parallel.device))
    dtype = precision.param_dtype or getattr(torch, config.train.dtype)
    loss = build_loss(config.train.loss, data.shape, may_ignore=may_ignore(config.data), dtype=dtype)
    model: nn.Module | None = None
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, _without_its_log():

        def make_batch(samples: int) -> Any:
            return _fake_batch(data, samples, mode, torch.device(device), dtype)

        def total(model: nn.Module, batch: Any) -> torch.Tensor:
            with precision.context(torch.device(device)):
                return loss(model, batch).total

        try:
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


@contextlib.contextmanager
def _without_its_log() -> Iterator[None]:
    """Keeps torch from printing where in itself a fake tensor failed: the error says it."""
    log = logging.getLogger(fake_tensor.__name__)
    was_off, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = was_off


def _fake_batch(data: DataSplits, samples: int, mode: FakeTensorMode, device: torch.device, dtype: torch.dtype) -> Any:
    """Returns the first samples of the data as fake tensors on the device; an item that is there once is repeated."""
    with torch.utils._python_dispatch._disable_current_modes():
        length = len(data.train)
        real = fetch_batch(data.train, torch.arange(samples).remainder(length).numpy())

    def fake(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        wanted = dtype if value.is_floating_point() else value.dtype
        return torch.empty(value.shape, dtype=wanted, device=device)

    with mode:
        return tree_map(fake, real)


def _cast(model: nn.Module, dtype: torch.dtype) -> None:
    """As ``model.to(dtype)``, which cannot swap fake tensors."""
    seen: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_floating_point() and parameter.dtype != dtype:
                cast = seen.setdefault(
                    id(parameter), nn.Parameter(parameter.detach().to(dtype), parameter.requires_grad)
                )
                module._parameters[name] = cast
