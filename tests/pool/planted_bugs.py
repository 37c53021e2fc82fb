"""Tools for planting bugs: models in which they show, ways to put them into the real code, and the check itself.

Each bug is planted by patching the real code, so that everything else runs as it does for a user. The same case passes
before the bug is planted: the certificate fails because of the bug and nothing else.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from paceline.comm.base import DONE, Communicator
from paceline.plan.layout import Layout
from paceline.train import step as steps
from paceline.train.loss import CrossEntropy, Loss
from paceline.verify import certificate
from paceline.verify.case import FunctionCase, Settings
from paceline.verify.certificate import Certificate, certify
from paceline.verify.runs import Reference, run_reference

CLIP = 0.05  # far below the norms here, so that clipping bites
SETTINGS = Settings.of(ranks=3, steps=2, accumulate=2, clip=CLIP)


def current_rank() -> int | None:
    """The virtual rank that runs; None in the one process that it is compared with."""
    name = threading.current_thread().name
    return int(name.removeprefix("rank-")) if name.startswith("rank-") else None


# Cases: each has what some bug needs in order to show.


class Plain(nn.Module):
    """Large enough for several of the certificate's small buckets, one of them a single weight."""

    def __init__(self, num_layers: int = 6) -> None:
        super().__init__()
        self.first = nn.Linear(6, 24)
        self.middle = nn.ModuleList(nn.Linear(24, 24) for _ in range(num_layers))
        self.wide = nn.Linear(24, 112)
        self.last = nn.Linear(112, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        for layer in self.middle:
            hidden = hidden + torch.tanh(layer(hidden))
        return self.last(torch.tanh(self.wide(hidden)))


class Tied(nn.Module):
    """A layer that uses the weight of another one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 6, bias=False)
        self.head = nn.Linear(6, 6, bias=False)
        self.head.weight = self.embed.weight
        self.out = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.head(torch.tanh(self.embed(x))))


class Branches(nn.Module):
    """Sends each sample to one of four experts; a rank without a sample for one does not use it. One more is idle."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(6, 3) for _ in range(4))
        self.scale = nn.Parameter(torch.ones(3))
        self.never = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = x[:, :4].argmax(1)
        output = x.new_zeros(len(x), 3)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().squeeze(1)
            if len(rows):
                output = output.index_add(0, rows, expert(x[rows]))
        return output * self.scale


class Remembers(Plain):
    """Has a buffer that the first sample of a batch moves: rank 0's is that of the one process."""

    def __init__(self, num_layers: int = 6) -> None:
        super().__init__(num_layers)
        self.register_buffer("level", torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = super().forward(x) * self.level.clone()
        if self.training:
            self.level.copy_(x[0, :1].detach().abs() + 0.5)
        return output


class DiffersByRank(Plain):
    """Starts from other values on other ranks; those of rank 0 are to count. A buffer too."""

    def __init__(self, num_layers: int = 6) -> None:
        super().__init__(num_layers)
        self.register_buffer("offset", torch.zeros(3))
        rank = current_rank() or 0
        with torch.no_grad():
            for parameter in self.parameters():
                parameter += 0.1 * rank
            self.offset += 0.1 * rank * torch.arange(3.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.offset


def make_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """19 samples: ragged in any cut here, and so few that a rank lacks some experts."""
    generator = torch.Generator().manual_seed(70 + step)
    return torch.randn(19, 6, generator=generator), torch.randint(3, (19,), generator=generator)


def make_even_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets = make_batch(step)
    return inputs[:18], targets[:18]


def make_short_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two samples for three ranks: one has none."""
    inputs, targets = make_batch(step)
    return inputs[:2], targets[:2]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CountKnown(FunctionCase):
    """A case whose loss says beforehand how much each sample counts."""

    def make_loss(self) -> Loss:
        return CrossEntropy(1.0)


def case(model: Callable[[], nn.Module], batch: Callable[[int], Any] = make_batch, **kwargs: Any) -> FunctionCase:
    return FunctionCase(model=model, batch=batch, loss=F.cross_entropy, **kwargs)


def known(model: Callable[[], nn.Module], batch: Callable[[int], Any] = make_batch) -> FunctionCase:
    return CountKnown(model=model, batch=batch, loss=F.cross_entropy)


# Planting.

Plant = Callable[[pytest.MonkeyPatch], None]


def replacing(owner: Any, name: str, make: Callable[[Any], Any]) -> Plant:
    """Puts ``make(original)`` in the place of ``owner.name``."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(owner, name, make(getattr(owner, name)))

    return plant


def also(*plants: Plant) -> Plant:
    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        for each in plants:
            each(monkeypatch)

    return plant


# How a step weighs and accumulates.


def accumulating(backward: Callable[..., Any]) -> Plant:
    """Replaces the loop over microbatches; ``backward(engine, run, number, count, scale)`` is the part that differs."""

    def make(_: Any) -> Any:
        def accumulate(passes: Any) -> list[Any]:
            engine, microbatches, loss = passes.engine, passes.microbatches, passes.loss
            values = []
            for number, microbatch in enumerate(microbatches):
                if microbatch is None:
                    with contextlib.nullcontext() if number == len(microbatches) - 1 else engine.no_sync():
                        engine.join_pass()
                    continue
                placed = steps.place(microbatch, engine.comm.device, passes.dtype)

                def run(placed: Any = placed) -> Any:
                    with engine.precision.context(engine.comm.device):
                        return loss(engine, placed)

                values.append(backward(engine, run, number, len(microbatches), passes.scale))
            return values

        return accumulate

    return replacing(steps, "accumulate", make)


def weighed(value: Any, scale: float | None) -> torch.Tensor:
    return value.total if scale is None else value.total * scale


def plain_backward(engine: Any, run: Any, number: int, count: int, scale: float | None) -> Any:
    """What the code does: the control for the replaced loop."""
    if number < count - 1:
        with engine.no_sync():
            value = run()
            weighed(value, scale).backward()
    else:
        value = run()
        weighed(value, scale).backward()
    return value


def mean_of_means(engine: Any, run: Any, number: int, count: int, scale: float | None) -> Any:
    del scale
    if number < count - 1:
        with engine.no_sync():
            value = run()
            (value.total / value.count / count).backward()
    else:
        value = run()
        (value.total / value.count / count).backward()
    return value


def never_synchronised(engine: Any, run: Any, number: int, count: int, scale: float | None) -> Any:
    del number, count
    with engine.no_sync():
        value = run()
        weighed(value, scale).backward()
    return value


def synchronised_first(engine: Any, run: Any, number: int, count: int, scale: float | None) -> Any:
    """Gradients are reduced with the first microbatch instead of the last."""
    return plain_backward(engine, run, count - 1 - number, count, scale)


def accumulation_lost(engine: Any, run: Any, number: int, count: int, scale: float | None) -> Any:
    """The gradient of a microbatch replaces that of the one before."""
    for parameter in engine.parameters():
        parameter.grad = None
    return plain_backward(engine, run, number, count, scale)


def gradients_kept(original: Any) -> Any:
    """Nobody clears the gradients after the update."""

    def zero_grad(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        if current_rank() is None:
            original(self, *args, **kwargs)

    return zero_grad


def misplaced(original: Any) -> Any:
    """Every tensor begins one element too early: neighbours share an element."""

    def layout(*args: Any, **kwargs: Any) -> Any:
        made = original(*args, **{**kwargs, "align": 1})
        slots = [
            dataclasses.replace(slot, offset=max(0, slot.offset - number)) for number, slot in enumerate(made.slots)
        ]
        return dataclasses.replace(made, slots=tuple(slots))

    return layout


def untied(original: Any) -> Any:
    """Wrapping gives each layer a weight of its own."""

    def wrap(model: Tied, *args: Any, **kwargs: Any) -> Any:
        model.head.weight = nn.Parameter(model.embed.weight.detach().clone())
        return original(model, *args, **kwargs)

    return wrap


class Quiet:
    """A communicator that only pretends to reduce and broadcast."""

    def __init__(self, inner: Communicator) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def all_reduce(self, *_: Any) -> Any:
        return DONE

    def broadcast(self, *_: Any) -> Any:
        return DONE


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bug:
    """A bug, the case in which it shows, and how: the first thing that differs, or the verdict of the communicator.

    ``module`` is given where the bug has a place of its own, which the certificate must then name.
    """

    plant: Plant
    case: FunctionCase
    shows: str
    step: int = 0
    module: str | None = None
    settings: Settings = SETTINGS
    verdict: type[Exception] | None = None


@functools.cache
def certify_clean(made: FunctionCase, settings: Settings) -> Certificate:
    """Certifies a case before a bug is planted; several bugs share a case."""
    return certify(made, settings)


@functools.cache
def kept_reference(made: FunctionCase, settings: Settings) -> Reference:
    """Trains in one process, once for all bugs of a case: no bug is planted there."""
    return run_reference(made, settings)


def keep_references(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the certificate take what one process computed for the same case before."""

    def reference(made: FunctionCase, settings: Settings, ranks: Any = None) -> Reference:
        if ranks is not None:  # it follows these ranks, which may have a bug
            return run_reference(made, settings, ranks)
        # One process knows of no ranks: it is the same under all strategies.
        layout = Layout(accumulate=settings.accumulate, precision=settings.layout.precision)
        return kept_reference(made, dataclasses.replace(settings, layout=layout, ranks=1))

    monkeypatch.setattr(certificate, "run_reference", reference)


def repeat_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the certificate look for the place among the values that it compared: all but the outputs of modules."""

    def both_once(*args: Any) -> Any:
        if not found:
            found.append(both(*args))
        return found[0]

    both, found = certificate._both, list[Any]()
    monkeypatch.setattr(certificate, "_both", both_once)


def check_found(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plants a bug and sees the certificate, or the communicator, find it, in no more steps than until it shows."""
    keep_references(monkeypatch)
    settings = bug.settings if bug.verdict else dataclasses.replace(bug.settings, steps=bug.step + 1)
    clean = certify_clean(bug.case, settings)
    assert clean.passed, clean.divergence
    bug.plant(monkeypatch)
    if bug.module is None and bug.shows != "forward":
        repeat_no_run(monkeypatch)
    if bug.verdict is not None:
        with pytest.raises(bug.verdict):
            certify(bug.case, settings)
        return
    found = certify(bug.case, settings)
    assert not found.passed
    assert found.errors.largest > found.tolerance
    assert found.divergence is not None
    assert (found.divergence.step, found.divergence.what.split()[0]) == (bug.step, bug.shows)
    assert bug.module in (None, found.divergence.module)
