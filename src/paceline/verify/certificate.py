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
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from paceline.comm.virtual.communicator import run_virtual
from paceline.errors import RankFailedError, UsageError
from paceline.notebook import Shown
from paceline.plan.layout import StrategyName
from paceline.run.function_ranks import run_processes
from paceline.train.randomness import compute_threads
from paceline.verify import measure as measures
from paceline.verify.case import Case, FunctionCase, Settings, check_settings, complete
from paceline.verify.measure import Bound, Errors, Tensors, absolute, errors_by_step, merge, movement, worst
from paceline.verify.runs import Calls, Reference, StepValues, run_distributed, run_reference

_MAGNIFIED = (
    "its gradient cancels, up to the rounding of its sums, and an optimizer that divides by the size of gradients "
    "magnifies that\n  a bias before a norm is such a parameter: drop it, or give the optimizer a larger eps"
)
_OF_LAYOUT = ("pipeline", "tensor", "expert", "checkpoint_activations", "precision")  # what a certificate repeats
_UNSTEADY = "the run was repeated to find the place, and then agreed: its results differ from run to run"


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """The first place where a rank differs. ``what`` is forward, gradient, norm, update, buffer or loss."""

    step: int
    module: str
    what: str
    error: float
    hint: str

    def __str__(self) -> str:
        where = f"step {self.step}, {self.what} of {self.module or 'the model'}: off by {self.error:.3g}"
        return f"{where}\n  {self.hint}" if self.hint else where


def locate(
    case: Case, settings: Settings, bound: Bound, expected: StepValues, per_rank: Sequence[StepValues]
) -> Divergence:
    """Names the first place where a rank differs in ``settings.record_step``, whose activations were recorded."""
    step = settings.record_step
    assert step is not None
    hint = ""
    norms = (isinstance(module, nn.modules.batchnorm._BatchNorm) for module in case.make_model().modules())
    if not settings.layout.sync_batchnorm and any(norms):
        hint = (
            "the model has BatchNorm, which normalises over the samples of one rank: its results depend on how the "
            "batch is cut\n  synchronise it over the ranks (sync_batchnorm), or use GroupNorm or LayerNorm"
        )
    for what, name, error in _errors(settings, bound, expected, per_rank):
        if not error <= bound.tolerance:
            module, _, tensor = name.rpartition(".")
            gradient = expected.gradients.get(name)
            if what == "update" and gradient is not None and gradient.numel() and float(gradient.abs().max()) < 1e-13:
                hint = _MAGNIFIED  # of float64, that is nothing but rounding
            where = name if what == "forward" else module
            what = f"{what} ({tensor})" if what in ("gradient", "update", "buffer") else what
            return Divergence(step=step, module=where, what=what, error=error, hint=hint)
    return Divergence(step=step, module="", what="repeating it, nothing", error=0.0, hint=_UNSTEADY)


def _errors(
    settings: Settings, bound: Bound, expected: StepValues, per_rank: Sequence[StepValues]
) -> Iterator[tuple[str, str, float]]:
    """Goes through all that was compared, in the order in which a step computes it: what, name, error."""

    def unclipped(values: StepValues) -> Tensors:  # clipping spreads a gradient that is wrong over all of them
        clip = settings.clip
        factor = 1.0 if clip is None else min(1.0, clip / (float(values.norm) + 1e-6))  # torch's own formula
        return {name: None if each is None else each / factor for name, each in values.gradients.items()}

    activations = [values.activations for values in per_rank]
    for name, error in _forward_errors(bound, expected.activations, activations, settings.accumulate):
        yield "forward", name, error
    gradients = _largest(bound, per_rank, expected, unclipped)
    # Those of the modules called last come first: the order in which gradients arise.
    called = {name: index for calls in expected.activations.values() for index, (name, _) in enumerate(calls)}
    for name in sorted(expected.gradients, key=lambda name: -called.get(name.rpartition(".")[0], -1)):
        yield "gradient", name, gradients[name]
    yield "norm", "", _largest(bound, per_rank, expected, lambda values: {"": values.norm})[""]
    moved = movement(expected)
    for name, error in _largest(bound, per_rank, expected, lambda values: values.parameters, moved).items():
        yield "update", name, error
    for name, tensor in expected.buffers.items():
        errors = [worst(bound.measure(values.buffers, {name: tensor}, {})) for values in per_rank]
        yield "buffer", name, max(errors)
    yield "loss", "", _largest(bound, per_rank, expected, lambda values: {"": values.loss})[""]


def _largest(
    bound: Bound,
    per_rank: Sequence[StepValues],
    expected: StepValues,
    tensors: Callable[[StepValues], Tensors],
    scale: Tensors | None = None,
) -> dict[str, float]:
    wanted = tensors(expected)
    found = [bound.measure(tensors(values), wanted, scale or {}) for values in per_rank]
    return {name: worst({str(rank): errors[name] for rank, errors in enumerate(found)}) for name in wanted}


def _forward_errors(
    bound: Bound, expected: dict[int, Calls], per_rank: Sequence[dict[int, Calls]], accumulate: int
) -> list[tuple[str, float]]:
    """Returns how far each call's output is from the reference's, where the pieces of all ranks can be put together.

    Microbatch m of rank r is piece m * ranks + r of the batch: the k-th outputs of a module are put together in that
    order. Outputs without samples along dim 0 are left out.
    """
    errors = []
    theirs = [_numbered(expected[number]) for number in sorted(expected)]
    pieces = [_numbered(calls[m]) for m in range(accumulate) for calls in per_rank if m in calls]
    for call in dict.fromkeys(call for piece in theirs for call in piece):
        whole, ours = _joined(theirs, call), _joined(pieces, call)
        if whole is not None and ours is not None and ours.shape == whole.shape:
            errors.append((call[0], worst(bound.measure({"": ours}, {"": whole}, {}))))
    return errors


def _joined(pieces: Sequence[dict[tuple[str, int], torch.Tensor]], call: tuple[str, int]) -> torch.Tensor | None:
    """Returns the outputs of a call in all pieces, one after another; None where they do not fit together."""
    outputs = [piece[call] for piece in pieces if call in piece]
    if not outputs or any(not output.ndim or output.shape[1:] != outputs[0].shape[1:] for output in outputs):
        return None
    return torch.cat(outputs)


def _numbered(calls: Calls) -> dict[tuple[str, int], torch.Tensor]:
    outputs: dict[tuple[str, int], torch.Tensor] = {}
    seen: Counter[str] = Counter()
    for name, output in calls:
        outputs[name, seen[name]] = output
        seen[name] += 1
    return outputs


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Certificate(Shown):
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
    context: int
    tensor: int
    expert: int
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

    def facts(self) -> dict[str, object]:
        what, result = f"{self.strategy} on {self.ranks} ranks ({self.backend})", "passed" if self.passed else "failed"
        found = {"result": result, "what": what, "largest error": f"{self.max_abs_error:.2e}"}
        diverges = None if self.divergence is None else str(self.divergence)
        return found | {"allowed": f"{self.tolerance:.0e}", "diverges": diverges, "steps": self.steps}


def verify(
    make_model: Callable[[], nn.Module],
    make_batch: Callable[[int], Any],
    loss_fn: Callable[..., Any],
    *,
    strategy: StrategyName = "ddp",
    ranks: int = 4,
    make_optimizer: Callable[..., torch.optim.Optimizer] | None = None,
    **options: Any,
) -> Certificate:
    """Verifies that ``strategy`` on ``ranks`` ranks trains ``make_model()`` exactly as one process would.

    ``make_batch(step)`` gives the global batch as (inputs, targets); ``loss_fn(outputs, targets)`` a mean over
    samples, or (sum, count) where elements weigh otherwise. Dropout modules are switched off, as their numbers depend
    on the rank; but not where all ranks share each sequence, and draw alike. ``options`` are fields of a ``Layout``, as
    for ``parallelize`` (``precision="bf16"``, ``accumulate=3``, ``pipeline=2, schedule="zb-h1"``), and besides
    ``steps`` (3), ``clip`` (1.0), ``backend`` ("virtual"; "gloo" and "shared_memory" are real processes, whose
    functions can be pickled) and ``tolerance`` (None: what rounding explains). ``precision="fp32"`` is verified in
    float64, any other against one process of the same policy. Raises UsageError, before anything starts, with all that
    is wrong with the arguments.
    """
    case = FunctionCase(model=make_model, batch=make_batch, loss=loss_fn, optimizer=make_optimizer)
    return certify(case, Settings.of(strategy=strategy, ranks=ranks, **options))


def certify(case: Case, settings: Settings) -> Certificate:
    settings = complete(settings)
    is_virtual = settings.backend == "virtual"
    settings = dataclasses.replace(settings, caches_casts=not is_virtual, keeps_dropout=settings.draws_alike)
    check_settings(settings)
    if not is_virtual:
        try:
            pickle.dumps(case)
        except Exception as error:
            what = f"real ranks are processes, and the functions cannot be sent there: {error}"
            rule = "define make_model, make_batch and loss_fn at the top of a module, or use backend='virtual'"
            raise UsageError(f"{what}\n  {rule}") from error
    start = time.perf_counter()
    reference, per_rank = _both(case, settings)
    bound, follows = measures.bound_for(settings, reference.pieces), False
    errors = errors_by_step(reference, per_rank, bound.measure)
    if settings.is_exact and settings.tolerance is None and not merge(errors).largest <= bound.tolerance:
        followed = _one_process(case, settings, per_rank[0])
        of_noise = measures.noise_bound(settings, reference, followed)
        if of_noise is not None:
            reference, bound, follows = followed, of_noise, True
            errors = errors_by_step(reference, per_rank, bound.measure)
    first_bad = next((step for step, each in enumerate(errors) if not each.largest <= bound.tolerance), None)
    divergence = None
    if first_bad is not None:
        recorded = dataclasses.replace(settings, record_step=first_bad)
        again, ranks = _both(case, recorded)
        if follows:
            again = _one_process(case, recorded, ranks[0])
        divergence = locate(case, recorded, bound, again.steps[first_bad], [values[first_bad] for values in ranks])
    return _certificate(
        case,
        settings,
        reference,
        bound,
        max_abs_error=merge(errors_by_step(reference, per_rank, absolute)).largest,
        errors=merge(errors),
        divergence=divergence,
        seconds=time.perf_counter() - start,
    )


def _certificate(case: Case, settings: Settings, reference: Reference, bound: Bound, **found: Any) -> Certificate:
    layout = settings.layout
    pieces = "whole batches" if reference.pieces == 1 else f"batches in {reference.pieces} pieces"
    what = f"one process on {pieces}"
    if bound.is_relative:
        kind = "" if settings.is_exact else f" of {layout.precision}"
        what = f"one process{kind} on {pieces}, from the ranks' parameters in each step"
    return Certificate(
        passed=found["divergence"] is None,
        measure="relative" if bound.is_relative else "absolute",
        tolerance=bound.tolerance,
        bound=bound.reason,
        reference=what,
        strategy=settings.strategy or layout.strategy,
        shard_ranks=layout.shard_ranks or None,
        context=layout.context_ranks,
        schedule=None if layout.pipeline == 1 else str(layout.schedule),
        **{name: getattr(settings, name) for name in ("ranks", "backend", "steps", "clip", "accumulate")},
        **{name: getattr(layout, name) for name in _OF_LAYOUT},
        num_parameters=sum(p.numel() for p in case.make_model().parameters()),
        batch=reference.samples,
        dtype=str(settings.dtype).removeprefix("torch."),
        **found,
    )


def _both(case: Case, settings: Settings) -> tuple[Reference, list[list[StepValues]]]:
    """Runs one process and the ranks. In mixed precision one process follows the ranks, so these go first."""
    if settings.is_exact:  # a case that cannot be compared is refused before any rank starts
        reference = _one_process(case, settings, None)
        return reference, _run(case, settings)
    per_rank: list[list[StepValues]] = _run(case, settings)
    return _one_process(case, settings, per_rank[0]), per_rank


def _one_process(case: Case, settings: Settings, followed: list[StepValues] | None) -> Reference:
    threads = torch.get_num_threads() if settings.backend == "virtual" else 1  # as many as a rank has: they cut sums
    # The caller's random numbers go on as if nothing had happened.
    with torch.random.fork_rng(devices=[]), compute_threads(threads):
        return run_reference(case, settings, followed)


def _run(case: Case, settings: Settings) -> list[list[StepValues]]:
    try:
        if settings.backend == "virtual":
            return run_virtual(lambda comm: run_distributed(comm, case, settings), settings.ranks)
        return run_processes(run_distributed, settings.ranks, args=(case, settings), threads=1)
    except RankFailedError as error:
        if isinstance(error.__cause__, UsageError):  # of the caller, whichever rank met it first
            raise error.__cause__ from None
        raise
