"""Where a model is cut: by hand, by names, or so that the slowest stage is the fastest.

``predict/memory/parts.py`` does the arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from torch import nn

from paceline.errors import UsageError
from paceline.models.layers import PipelineLayer
from paceline.predict.memory.parts import LayerCost, choose_bounds, stage_totals

__all__ = ["LayerCost", "bounds_from_layers", "bounds_from_names", "choose_bounds", "stage_totals"]


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
