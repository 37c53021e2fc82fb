"""The proof that a distributed run computes what one process would.

The reference is a plain loop on the whole batch, without an engine. The run under test is the engine on N ranks, with
the same model, data and seed, its batch cut into ragged microbatches. Loss, every gradient, the clip norm and all
parameters are compared after each step, on every rank, in float64. On a mismatch the run is repeated with its
activations recorded, and the first module that diverges is named.
"""

from __future__ import annotations

import dataclasses
import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from paceline.comm.base import Communicator
from paceline.comm.virtual import run_virtual
from paceline.errors import RankFailedError, UsageError
from paceline.launch.processes import run_processes
from paceline.parity.case import Case, FunctionCase
from paceline.parity.locate import Divergence, difference, locate
from paceline.parity.runs import Settings, StepValues, run_distributed, run_reference

TOLERANCE = 1e-10


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """The largest absolute differences found, by what was compared."""

    loss: float = 0.0
    gradients: float = 0.0
    norm: float = 0.0
    parameters: float = 0.0

    @property
    def largest(self) -> float:
        """The largest of all."""
        return max(self.loss, self.gradients, self.norm, self.parameters)


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """What was verified, and how far the two runs were apart."""

    passed: bool
    max_abs_error: float
    tolerance: float
    errors: Errors
    divergence: Divergence | None
    strategy: str
    ranks: int
    backend: str
    steps: int
    accumulate: int
    clip: float | None
    num_parameters: int
    batch: int
    dtype: str
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Returns the certificate as plain data."""
        return dataclasses.asdict(self)


def verify(
    make_model: Callable[[], nn.Module],
    make_batch: Callable[[int], Any],
    loss_fn: Callable[..., Any],
    *,
    strategy: str = "ddp",
    ranks: int = 4,
    steps: int = 3,
    accumulate: int = 1,
    clip: float | None = 1.0,
    backend: Literal["virtual", "gloo"] = "virtual",
    tolerance: float = TOLERANCE,
    make_optimizer: Callable[..., torch.optim.Optimizer] | None = None,
) -> Certificate:
    """Verifies that ``strategy`` on ``ranks`` ranks trains ``make_model()`` exactly as one process would.

    ``make_batch(step)`` gives the global batch as (inputs, targets); ``loss_fn(outputs, targets)`` a mean over samples,
    or (sum, count) where elements weigh otherwise. Dropout modules are switched off, as their numbers depend on the
    rank. ``backend="gloo"`` uses real processes, and needs functions that can be pickled.
    """
    case = FunctionCase(model=make_model, batch=make_batch, loss=loss_fn, optimizer=make_optimizer)
    settings = Settings(strategy=strategy, ranks=ranks, steps=steps, accumulate=accumulate, clip=clip)
    return certify(case, settings, backend=backend, tolerance=tolerance)


def certify(
    case: Case, settings: Settings, *, backend: Literal["virtual", "gloo"] = "virtual", tolerance: float = TOLERANCE
) -> Certificate:
    """Runs a case both ways and compares. Raises UsageError for a case that cannot be compared."""
    _check_settings(settings, backend)
    if backend == "gloo":
        _check_picklable(case)
    start = time.perf_counter()
    with torch.random.fork_rng(devices=[]):  # the caller's random numbers go on as if nothing had happened
        reference = run_reference(case, settings)
    per_rank: list[list[StepValues]] = _run(backend, settings.ranks, run_distributed, case, settings)
    errors = Errors()
    first_bad: int | None = None
    for step, expected in enumerate(reference):
        found = [compare(values[step], expected) for values in per_rank]
        errors = _worst([errors, *found])
        if first_bad is None and not all(e.largest <= tolerance for e in found):
            first_bad = step
    divergence = None
    if first_bad is not None:
        divergence = locate(
            case,
            dataclasses.replace(settings, record_step=first_bad),
            lambda function, *args: _run(backend, settings.ranks, function, *args),
            tolerance=tolerance,
        )
    return Certificate(
        passed=first_bad is None,
        max_abs_error=errors.largest,
        tolerance=tolerance,
        errors=errors,
        divergence=divergence,
        strategy=settings.strategy,
        ranks=settings.ranks,
        backend=backend,
        steps=settings.steps,
        accumulate=settings.accumulate,
        clip=settings.clip,
        num_parameters=sum(p.numel() for p in case.make_model().parameters()),
        batch=reference[0].samples,
        dtype="float64",
        seconds=time.perf_counter() - start,
    )


def compare(ours: StepValues, expected: StepValues) -> Errors:
    """Returns the largest differences of one step on one rank."""
    return Errors(
        loss=difference(ours.loss, expected.loss),
        gradients=max((difference(ours.gradients[n], g) for n, g in expected.gradients.items()), default=0.0),
        norm=difference(ours.norm, expected.norm),
        parameters=max((difference(ours.parameters[n], p) for n, p in expected.parameters.items()), default=0.0),
    )


def _worst(errors: list[Errors]) -> Errors:
    fields = [field.name for field in dataclasses.fields(Errors)]
    return Errors(**{name: max(getattr(error, name) for error in errors) for name in fields})


def _run(backend: str, ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    def work(comm: Communicator) -> Any:
        return function(comm, *args)

    try:
        return run_processes(function, ranks, args=args) if backend == "gloo" else run_virtual(work, ranks)
    except RankFailedError as error:
        if isinstance(error.__cause__, UsageError):  # of the caller, whichever rank met it first
            raise error.__cause__ from None
        raise


def _check_settings(settings: Settings, backend: str) -> None:
    if backend not in ("virtual", "gloo"):
        raise UsageError(f"backend = {backend!r} is unknown\n  it is 'virtual' or 'gloo'")
    wrong = [
        f"{name} = {getattr(settings, name)}"
        for name in ("ranks", "steps", "accumulate")
        if getattr(settings, name) < 1
    ]
    if settings.clip is not None and settings.clip <= 0:
        wrong.append(f"clip = {settings.clip}")
    if wrong:
        raise UsageError(f"{', '.join(wrong)}: must be at least 1, and a clip norm above 0")


def _check_picklable(case: Case) -> None:
    try:
        pickle.dumps(case)
    except Exception as error:
        raise UsageError(
            f"backend = 'gloo' starts real processes, and the functions cannot be sent there: {error}\n"
            "  define make_model, make_batch and loss_fn at the top of a module, or use backend='virtual'"
        ) from error
