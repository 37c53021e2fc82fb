"""The proof that a distributed run computes what one process would.

The reference is a plain loop in one process, without an engine. The run under test is the engine on N ranks, with the
same model, data and seed, its batch cut into ragged microbatches. Loss, every gradient, the clip norm, all parameters
and buffers are compared after each step, on every rank: in float64, or in mixed precision with a run of the same
policy. On a mismatch the run is repeated with its activations recorded, and the first module that diverges is named.
"""

from __future__ import annotations

import dataclasses
import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from paceline.comm.base import Communicator
from paceline.comm.shared.communicator import share_memory
from paceline.comm.virtual.communicator import run_virtual
from paceline.engines.apply import layout_from
from paceline.errors import RankFailedError, UsageError
from paceline.run.processes import run_processes
from paceline.train.randomness import compute_threads
from paceline.verify.case import Case, FunctionCase
from paceline.verify.locate import Divergence, locate
from paceline.verify.measure import Bound, Errors, absolute, bound_for, compare, merge
from paceline.verify.reference import Reference, run_reference
from paceline.verify.runs import run_distributed
from paceline.verify.settings import SMALL_BUCKETS, Settings, check_settings, complete
from paceline.verify.values import StepValues

Backend = Literal["virtual", "gloo", "shared_memory"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """What was verified, and how far the two runs were apart.

    ``errors`` and ``tolerance`` are absolute or relative differences, as ``measure`` says, and ``bound`` says why the
    tolerance is what it is; ``reference`` is what the ranks were compared with.
    """

    passed: bool
    max_abs_error: float
    measure: str
    tolerance: float
    bound: str
    errors: Errors
    divergence: Divergence | None
    reference: str
    strategy: str
    shard_ranks: int | None
    ranks: int
    pipeline: int
    tensor: int
    schedule: str | None
    backend: str
    steps: int
    accumulate: int
    clip: float | None
    checkpoint_activations: str
    precision: str
    num_parameters: int
    batch: int
    dtype: str
    seconds: float

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Thoroughness:
    """How long and how strictly is verified.

    The backends ``gloo`` and ``shared_memory`` are real processes, and need functions that can be pickled.
    """

    steps: int = 3
    clip: float | None = 1.0
    backend: Backend = "virtual"
    tolerance: float | None = None  # None: what rounding explains
    make_optimizer: Callable[..., torch.optim.Optimizer] | None = None


def verify(
    make_model: Callable[[], nn.Module],
    make_batch: Callable[[int], Any],
    loss_fn: Callable[..., Any],
    *,
    strategy: str = "ddp",
    ranks: int = 4,
    **options: Any,
) -> Certificate:
    """Verifies that ``strategy`` on ``ranks`` ranks trains ``make_model()`` exactly as one process would.

    ``make_batch(step)`` gives the global batch as (inputs, targets); ``loss_fn(outputs, targets)`` a mean over
    samples, or (sum, count) where elements weigh otherwise. Dropout modules are switched off, as their numbers depend
    on the rank. ``options`` are fields of a ``Layout``, as for ``parallelize`` (``precision="bf16"``, ``accumulate=3``,
    ``pipeline=2, schedule="zb-h1"``), and of ``Thoroughness``: ``steps``, ``clip``, ``backend``, ``tolerance``,
    ``make_optimizer``. ``precision="fp32"`` is verified in float64, any other against one process of the same policy.
    Without ``shard_ranks`` hybrid shards over half of the ranks.

    Raises UsageError, before anything starts, with all that is wrong with the arguments.
    """
    names = {each.name for each in dataclasses.fields(Thoroughness)}
    how = Thoroughness(**{name: value for name, value in options.items() if name in names})
    case = FunctionCase(model=make_model, batch=make_batch, loss=loss_fn, optimizer=how.make_optimizer)
    asked = layout_from({name: value for name, value in options.items() if name not in names})
    said: Any = "fsdp" if strategy == "zero3" else strategy
    layout = replace(asked, strategy=said, **SMALL_BUCKETS)
    settings = Settings(layout=layout, strategy=strategy, ranks=ranks, steps=how.steps, clip=how.clip)
    return certify(case, settings, backend=how.backend, tolerance=how.tolerance)


def certify(
    case: Case, settings: Settings, *, backend: Backend = "virtual", tolerance: float | None = None
) -> Certificate:
    """Runs a case both ways and compares. Raises UsageError for a case that cannot be compared."""
    settings = dataclasses.replace(complete(settings), caches_casts=backend != "virtual")
    check_settings(settings, backend=backend, tolerance=tolerance)
    if backend != "virtual":
        _check_picklable(case)
    start = time.perf_counter()
    reference, per_rank = _both(case, settings, backend)
    bound = bound_for(settings, reference.pieces, tolerance)
    errors, largest = Errors(), Errors()
    first_bad: int | None = None
    for step, expected in enumerate(reference.steps):
        found = [compare(values[step], expected, bound.measure) for values in per_rank]
        errors = merge([errors, *found])
        largest = merge([largest, *(compare(values[step], expected, absolute) for values in per_rank)])
        if first_bad is None and not all(error.largest <= bound.tolerance for error in found):
            first_bad = step
    divergence = None
    if first_bad is not None:
        recorded = dataclasses.replace(settings, record_step=first_bad)
        again, ranks = _both(case, recorded, backend)
        divergence = locate(case, recorded, bound, again.steps[first_bad], [values[first_bad] for values in ranks])
    return _certificate(
        case,
        settings,
        reference,
        bound,
        max_abs_error=largest.largest,
        errors=errors,
        divergence=divergence,
        backend=backend,
        seconds=time.perf_counter() - start,
    )


def _certificate(case: Case, settings: Settings, reference: Reference, bound: Bound, **found: Any) -> Certificate:
    layout = settings.layout
    pieces = "whole batches" if reference.pieces == 1 else f"batches in {reference.pieces} pieces"
    what = f"one process on {pieces}"
    if not settings.is_exact:
        what = f"one process of {layout.precision} on {pieces}, from the ranks' parameters in each step"
    return Certificate(
        passed=found["divergence"] is None,
        measure="relative" if bound.is_relative else "absolute",
        tolerance=bound.tolerance,
        bound=bound.reason,
        reference=what,
        strategy=settings.strategy or layout.strategy,
        shard_ranks=layout.shard_ranks or None,
        schedule=None if layout.pipeline == 1 else str(layout.schedule),
        **{name: getattr(settings, name) for name in ("ranks", "steps", "clip", "accumulate")},
        **{name: getattr(layout, name) for name in ("pipeline", "tensor", "checkpoint_activations", "precision")},
        num_parameters=sum(p.numel() for p in case.make_model().parameters()),
        batch=reference.samples,
        dtype=str(settings.dtype).removeprefix("torch."),
        **found,
    )


def _both(case: Case, settings: Settings, backend: Backend) -> tuple[Reference, list[list[StepValues]]]:
    """Runs one process and the ranks. In mixed precision one process follows the ranks, so these go first."""

    def one_process(followed: list[StepValues] | None) -> Reference:
        threads = torch.get_num_threads() if backend == "virtual" else 1  # as many as a rank has: they cut sums
        # The caller's random numbers go on as if nothing had happened.
        with torch.random.fork_rng(devices=[]), compute_threads(threads):
            return run_reference(case, settings, followed)

    if settings.is_exact:  # a case that cannot be compared is refused before any rank starts
        reference = one_process(None)
        return reference, _run(backend, settings.ranks, run_distributed, case, settings)
    per_rank: list[list[StepValues]] = _run(backend, settings.ranks, run_distributed, case, settings)
    return one_process(per_rank[0]), per_rank


def _run(backend: str, ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    def work(comm: Communicator) -> Any:
        return function(comm, *args)

    try:
        if backend == "virtual":
            return run_virtual(work, ranks)
        if backend == "shared_memory":
            function, args = _sharing_memory, (function, *args)
        return run_processes(function, ranks, args=args, threads=1)
    except RankFailedError as error:
        if isinstance(error.__cause__, UsageError):  # of the caller, whichever rank met it first
            raise error.__cause__ from None
        raise


def _sharing_memory(comm: Communicator, function: Callable[..., Any], *args: Any) -> Any:
    return function(share_memory(comm), *args)


def _check_picklable(case: Case) -> None:
    try:
        pickle.dumps(case)
    except Exception as error:
        raise UsageError(
            f"real ranks are processes, and the functions cannot be sent there: {error}\n"
            "  define make_model, make_batch and loss_fn at the top of a module, or use backend='virtual'"
        ) from error
