"""Predictions of published runs: what a row does not state is chosen, and the result is in the row's own metric.

FLOP conventions: predictions are made in seconds, and the rest is derived. ``tflops_per_gpu`` counts the recomputed
forward where everything is recomputed (Megatron's formula of 2021) and model FLOPs else; ``mfu_pct`` counts model
FLOPs; both count attention in full, as their sources do.
"""

from __future__ import annotations

from dataclasses import replace

from paceline.plan.model_shape import ModelShape, SampleModel
from paceline.plan.workload import Workload
from paceline.predict.formulas.constants import ConstantSets
from paceline.predict.formulas.predict import Prediction, model_flops, predict
from paceline.predict.memory.footprint import footprint
from paceline.predict.scored.published import PublishedRun
from paceline.units import GIB


def predict_case(case: PublishedRun, sets: ConstantSets | None = None) -> Prediction:
    """Predicts a row. What it does not state (microbatch, chunks, expert ranks) is the fastest choice that fits.

    Of experts, the fewest ranks are taken that hold them: more cost more messages.
    """
    found = [predict(each, case.cluster, sets) for each in _choices(case)]
    chosen = min(found, key=lambda each: (not each.fits, each.seconds / each.workload.global_batch))
    return chosen if chosen.fits else _leaner(case, chosen)


def _leaner(case: PublishedRun, chosen: Prediction) -> Prediction:
    """Of a run that does not fit: what it holds if it does without what the row leaves open, where that fits."""
    workload = replace(chosen.workload, run=replace(chosen.workload.run, split_loss=True))
    if case.chooses_recompute:
        workload = replace(workload, layout=replace(workload.layout, checkpoint_activations="full"))
    memory = footprint(workload)
    return replace(chosen, memory=memory, fits=True) if memory.total <= case.cluster.device.memory_bytes else chosen


def _choices(case: PublishedRun) -> list[Workload]:
    workload = case.workload
    local = workload.global_batch / workload.layout.data
    sizes = [1, 2, 4, 8, 16] if case.chooses_micro_batch else [workload.micro_batch]
    layers = workload.model.layers if isinstance(workload.model, ModelShape) else 1
    each = max(1, layers // workload.layout.pipeline)
    chunks = [count for count in (1, 2, 3, 4) if each % count == 0] if case.chooses_chunks else [workload.layout.chunks]
    found = [
        replace(workload, run=replace(workload.run, micro_batch=size), layout=replace(workload.layout, chunks=count))
        for size in sizes
        if not case.chooses_micro_batch or (size <= local and local % size == 0)
        for count in chunks
    ] or [workload]
    return [_holding_experts(each, case) for each in found]


def _holding_experts(workload: Workload, case: PublishedRun) -> Workload:
    """Returns the workload with as many expert-parallel ranks as it takes to fit; the least number where none does."""
    for ranks in case.expert_ranks:
        spread = replace(workload, layout=replace(workload.layout, expert=ranks))
        if footprint(spread).total <= case.cluster.device.memory_bytes:
            return spread
    return workload


def in_metric(case: PublishedRun, prediction: Prediction) -> float:
    """Returns a prediction in the metric of its row."""
    workload = prediction.workload
    run, devices = workload.run, workload.layout.ranks
    match case.metric:
        case "mem_gib":
            return prediction.memory.shown(run.shown) / GIB
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


def _sample_flops(workload: Workload) -> float:
    flops = model_flops(workload)
    if workload.recompute != "full" or isinstance(workload.model, SampleModel):
        return flops
    head = 6 * workload.run.seq_len * workload.model.vocab_size * workload.model.width
    return head + (flops - head) * 4 / 3
