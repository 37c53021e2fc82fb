"""A prediction: step time and memory of a workload on a cluster, and the same in the units that tables use.

FLOP conventions: predictions are made in seconds, and the rest is derived. ``tflops_per_gpu`` counts the recomputed
forward where everything is recomputed (Megatron's formula of 2021) and model FLOPs else; ``mfu_pct`` counts model
FLOPs; both
count attention in full, as their sources do.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from paceline.cluster.devices import Cluster
from paceline.plan.workload import ModelShape, SampleModel, Workload
from paceline.predict.formulas.constants import Constants, ConstantSets, between, constants_for, fitted_constants
from paceline.predict.formulas.domain import outside_of
from paceline.predict.formulas.samples import sample_step
from paceline.predict.formulas.step import StepSeconds, transformer_step
from paceline.predict.memory.footprint import Footprint, footprint
from paceline.predict.scored.published import Case
from paceline.units import GIB

# Errors that nine of ten rows of the split dev stay below, inside the calibrated domain (without the table whose very
# blocks were measured) and outside.
FITTED_P90 = 0.15
COMPOSED_P90 = 0.29


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What a step takes and needs. ``outside``: why it lies outside the calibrated domain (predict/formulas/domain.py).

    ``fitted``: whether it lies inside, with constants that were fitted for this generation and framework.
    """

    workload: Workload
    step: StepSeconds
    memory: Footprint
    fits: bool
    fitted: bool
    outside: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        return self.step.total

    @property
    def band(self) -> tuple[float, float]:
        """Seconds between which nine of ten published runs of this kind would be: see docs/prediction.md."""
        error = FITTED_P90 if self.fitted else COMPOSED_P90
        return self.seconds * (1 - error), self.seconds * (1 + error)

    @property
    def samples_per_s(self) -> float:
        run, layout = self.workload.run, self.workload.layout
        return run.micro_batch * self.workload.microbatches * layout.data / self.seconds


def predict(workload: Workload, cluster: Cluster, sets: ConstantSets | None = None) -> Prediction:
    """Predicts a step of a workload on a cluster."""
    sets = fitted_constants() if sets is None else sets
    constants, fitted = _constants(workload, cluster, sets)
    price = sample_step if isinstance(workload.model, SampleModel) else transformer_step
    memory = footprint(workload)
    outside = outside_of(workload, cluster, is_fitted=fitted)
    return Prediction(
        workload=workload,
        step=price(workload, cluster, constants),
        memory=memory,
        fits=memory.total <= cluster.device.memory_bytes,
        fitted=not outside,
        outside=outside,
    )


def _constants(workload: Workload, cluster: Cluster, sets: ConstantSets) -> tuple[Constants, bool]:
    """Returns the set for a workload. Tensor-parallel layers of torch break a compiled block into pieces."""
    generation, framework = cluster.device.generation, workload.run.framework
    if framework == "compiled" and workload.layout.tensor > 1:
        return between(sets, generation, "compiled", "eager"), (generation, "compiled") in sets
    return constants_for(sets, generation, framework)


def predict_case(case: Case, sets: ConstantSets | None = None) -> Prediction:
    """Predicts a row. What it does not state (microbatch, chunks, expert ranks) is the fastest choice that fits.

    Of experts, the fewest ranks are taken that hold them: more cost more messages.
    """
    found = [predict(each, case.cluster, sets) for each in _choices(case)]
    chosen = min(found, key=lambda each: (not each.fits, each.seconds / each.workload.run.global_batch))
    return chosen if chosen.fits else _leaner(case, chosen)


def _leaner(case: Case, chosen: Prediction) -> Prediction:
    """Of a run that does not fit: what it holds if it does without what the row leaves open, where that fits."""
    run = replace(chosen.workload.run, split_loss=True)
    if case.chooses_recompute:
        run = replace(run, recompute="full")
    memory = footprint(replace(chosen.workload, run=run))
    return replace(chosen, memory=memory, fits=True) if memory.total <= case.cluster.device.memory_bytes else chosen


def _choices(case: Case) -> list[Workload]:
    workload = case.workload
    local = workload.run.global_batch / workload.layout.data
    sizes = [1, 2, 4, 8, 16] if case.chooses_micro_batch else [workload.run.micro_batch]
    layers = workload.model.layers if isinstance(workload.model, ModelShape) else 1
    each = max(1, layers // workload.layout.pipeline)
    chunks = [count for count in (1, 2, 3, 4) if each % count == 0] if case.chooses_chunks else [workload.layout.chunks]
    found = [
        replace(
            workload,
            run=replace(workload.run, micro_batch=size),
            layout=replace(workload.layout, chunks=count),
        )
        for size in sizes
        if not case.chooses_micro_batch or (size <= local and local % size == 0)
        for count in chunks
    ] or [workload]
    return [_holding_experts(each, case) for each in found]


def _holding_experts(workload: Workload, case: Case) -> Workload:
    """Returns the workload with as many expert-parallel ranks as it takes to fit; the least number where none does."""
    for ranks in case.expert_ranks:
        spread = replace(workload, layout=replace(workload.layout, expert=ranks))
        if footprint(spread).total <= case.cluster.device.memory_bytes:
            return spread
    return workload


def in_metric(case: Case, prediction: Prediction) -> float:
    """Returns a prediction in the metric of its row."""
    workload = prediction.workload
    run, devices = workload.run, workload.layout.devices
    match case.metric:
        case "mem_gib":
            return prediction.memory.part(run.part) / GIB
        case "step_time_s":
            return prediction.seconds
        case "img_per_s" | "seq_per_s":
            return prediction.samples_per_s
        case "tokens_per_s_per_gpu":
            each = run.seq_len if isinstance(workload.model, ModelShape) else 1
            return prediction.samples_per_s * each / devices
        case "tflops_per_gpu":
            return prediction.samples_per_s * _sample_flops(workload) / devices / 1e12
        case _:
            rate = prediction.samples_per_s * model_flops(workload) / devices
            return 100 * rate / case.cluster.device.peak(run.compute)


def model_flops(workload: Workload) -> float:
    """Of one sequence (or sample), forward and backward, attention in full."""
    model, length = workload.model, workload.run.seq_len
    if isinstance(model, SampleModel):
        return 3 * model.flops
    return length * (6 * model.active_matmul_params + 12 * model.layers * model.score_width * length)


def _sample_flops(workload: Workload) -> float:
    flops = model_flops(workload)
    if workload.run.recompute != "full" or isinstance(workload.model, SampleModel):
        return flops
    head = 6 * workload.run.seq_len * workload.model.vocab * workload.model.hidden
    return head + (flops - head) * 4 / 3
