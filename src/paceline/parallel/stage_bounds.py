"""Where a model is cut: by hand, by names, or so that the slowest stage is as fast as it can be.

A pipeline is as fast as its slowest stage. With c_i the cost of layer i (forward and backward), and best[s][j] the
smallest possible cost of the slowest of s stages that run layers 0 to j - 1,

    best[s][j] = min over i < j of max(best[s - 1][i], c_i + ... + c_(j-1))        stages x layers^2 / 2 steps

and stages whose memory is more than the limit cost infinitely much. Among cuts that are as fast, the one is taken whose
largest stage needs the least memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from torch import nn

from paceline.errors import UsageError
from paceline.models.layers import PipelineLayer
from paceline.units import MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost:
    """What one layer costs: times are seconds or any other unit, the same for all layers of a model.

    ``state_bytes`` is what its parameters need all the time (with gradients and optimizer state), ``activation_bytes``
    what one microbatch keeps for backward.
    """

    name: str
    forward: float
    backward: float
    state_bytes: int = 0
    activation_bytes: int = 0

    @property
    def total(self) -> float:
        """Forward and backward."""
        return self.forward + self.backward


def choose_bounds(
    costs: Sequence[LayerCost],
    stages: int,
    *,
    memory_bytes: float = math.inf,
    in_flight: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """Returns the cut into ``stages`` whose slowest stage is the fastest, among those that fit into ``memory_bytes``.

    ``in_flight``: how many microbatches each stage keeps at once (1F1B: stages - s); None: one. Raises UsageError where
    there are fewer layers than stages, or no cut fits.
    """
    _check_enough(len(costs), stages)
    in_flight = in_flight or [1] * stages
    times = [0.0, *accumulate(cost.total for cost in costs)]
    states = [0, *accumulate(cost.state_bytes for cost in costs)]
    kept = [0, *accumulate(cost.activation_bytes for cost in costs)]
    no_way = (math.inf, math.inf)
    # best[j]: slowest stage and largest memory of the first s stages over layers 0 to j - 1, and where the last begins.
    best: list[tuple[float, float]] = [(0.0, 0.0), *([no_way] * len(costs))]
    cuts: list[list[int]] = []
    for stage in range(stages):
        begins, found = [0] * len(best), [no_way] * len(best)
        for end in range(stage + 1, len(costs) - (stages - stage - 1) + 1):
            for begin in range(stage, end):
                memory = states[end] - states[begin] + in_flight[stage] * (kept[end] - kept[begin])
                if memory > memory_bytes:
                    continue
                way = (max(best[begin][0], times[end] - times[begin]), max(best[begin][1], memory))
                if way < found[end]:
                    found[end], begins[end] = way, begin
        best, cuts = found, [*cuts, begins]
    if best[-1][0] == math.inf:
        raise UsageError(_too_large(costs, stages, memory_bytes, in_flight))
    bounds = [len(costs)]
    for begins in reversed(cuts):
        bounds.append(begins[bounds[-1]])
    return tuple(reversed(bounds))


def bounds_from_layers(
    layers: Sequence[PipelineLayer],
    counts: Sequence[int],
    blocks: Sequence[nn.Module] = (),
    *,
    stages: int | None = None,
) -> tuple[int, ...]:
    """Returns the cut with so many blocks in each stage; layers before the first block join it, others the one before.

    Where the layers have none of the model's ``blocks``, every layer counts. A stage of 0 blocks is possible where it
    has such a layer: the first, with the embedding alone, or the last, with the head.

    Raises UsageError for counts that do not add up, stages without a layer, and other than ``stages``, where given.
    """
    known = {id(block) for block in blocks}
    places = [i for i, layer in enumerate(layers) if any(id(module) in known for module in layer.modules)]
    places, noun = (places, "blocks") if places else (list(range(len(layers))), "layers")
    _check_counts(counts, len(counts) if stages is None else stages, len(places), noun)
    # No block yet: what comes before the first one is a stage. All blocks: what comes behind the last one is.
    begins = [*places, places[-1] + 1]
    bounds = [0, *(begins[done] for done in list(accumulate(counts))[:-1]), len(layers)]
    empty = [stage for stage, (begin, end) in enumerate(pairwise(bounds)) if begin >= end]
    if empty:
        raise UsageError(
            f"stage_layers = {list(counts)} leaves nothing for stage {empty[0]}\n"
            "  every stage runs at least one layer; 0 is for a first or last stage with the embedding or head alone\n"
            f"  try {_even(len(places), len(counts))}"
        )
    return tuple(bounds)


def bounds_from_names(
    layers: Sequence[PipelineLayer], names: Sequence[str], *, stages: int | None = None
) -> tuple[int, ...]:
    """Returns the cut before each of the layers named; their order does not matter.

    Raises UsageError for names that are no layers, the first layer, names given twice, and other than ``stages``.
    """
    known = {layer.name: index for index, layer in enumerate(layers)}
    wrong = [name for name in names if not known.get(name) or list(names).count(name) > 1]
    if not wrong and stages in (None, len(names) + 1):
        return (0, *sorted(known[name] for name in names), len(layers))
    what = f"{len(names)} split points for {stages} stages"
    if wrong:
        what = f"{wrong[0]!r} " + ("is named twice" if known.get(wrong[0]) else "is no layer to cut before")
    raise UsageError(
        f"stages = {list(names)}: {what}\n"
        "  a new stage begins at each of the layers named, so that there is one more stage than names\n"
        f"  the layers are {', '.join(list(known)[1:])}"
    )


def stage_totals(costs: Sequence[LayerCost], bounds: Sequence[int]) -> tuple[float, ...]:
    """Returns the cost of each stage, forward and backward."""
    return tuple(sum(cost.total for cost in costs[begin:end]) for begin, end in pairwise(bounds))


def _check_enough(num_layers: int, stages: int) -> None:
    if stages < 1 or num_layers < stages:
        raise UsageError(
            f"{stages} stages of a model with {num_layers} layers\n"
            "  every stage runs at least one whole layer\n"
            f"  take {num_layers} stages or fewer, or a deeper model"
        )


def _check_counts(counts: Sequence[int], stages: int, num_layers: int, noun: str) -> None:
    negative = [count for count in counts if count < 0]
    if not negative and len(counts) == stages and sum(counts) == num_layers:
        return
    what = f"adds up to {sum(counts)}, and the model has {num_layers} {noun}"
    if negative or len(counts) != stages:
        what = f"has {negative[0]}" if negative else f"is for {len(counts)} stages, and there are {stages}"
    raise UsageError(
        f"stage_layers = {list(counts)} {what}\n"
        f"  it says how many {noun} each stage runs, and together they run all\n"
        f"  try {_even(num_layers, stages)}"
    )


def _even(num_layers: int, stages: int) -> list[int]:
    """Returns counts as equal as they can be, the larger ones first."""
    return [num_layers // stages + (stage < num_layers % stages) for stage in range(stages)]


def _too_large(costs: Sequence[LayerCost], stages: int, memory_bytes: float, in_flight: Sequence[int]) -> str:
    largest = max(costs, key=lambda cost: cost.state_bytes + min(in_flight) * cost.activation_bytes)
    need = sum(cost.state_bytes for cost in costs) / stages
    return (
        f"no cut into {stages} stages fits into {memory_bytes / MIB:.0f} MiB a rank\n"
        f"  the largest layer, {largest.name}, needs "
        f"{(largest.state_bytes + min(in_flight) * largest.activation_bytes) / MIB:.0f} MiB by itself, and parameters "
        f"with their states {need / MIB:.0f} MiB a stage on average\n"
        "  take more stages, a smaller microbatch, activation checkpointing, or a strategy that shards"
    )
