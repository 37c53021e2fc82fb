"""What one rank has of a model that is split: a stage's layers, and of each a tensor group's share.

For T tensor ranks, a layer whose parameters are p, of which s are split, has p - s + s / T of them on each. What is
saved for backward is in three parts: inside attention and MLP (1 / T), the stream between (whole; 1 / T under sequence
parallelism), and what split layers read (whole).

How many microbatches a rank of a pipeline has in flight: the table in ``schedule/schedules.py``, and never more than
there are. Beside what autograd saves, a stage keeps the output of each, from which backward begins.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise

from paceline.plan.layout import Layout
from paceline.predict.memory.cutting import LayerCost, choose_bounds
from paceline.predict.memory.facts import BlockFacts, ModelFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPart:
    """One rank's part of a model, and of how many microbatches at once it keeps the activations."""

    model: ModelFacts
    in_flight: float = 1.0
    edge_bytes: float = 0.0  # of a sample, what comes from another stage


def parts_of(model: ModelFacts, layout: Layout) -> Iterator[RankPart]:
    """Iterates over the parts of the pipeline's ranks; over the one part of all ranks where there is no pipeline.

    Raises UsageError where there are fewer layers than stages.
    """
    tensor, is_sequence = layout.tensor, layout.sequence_parallel
    if layout.pipeline == 1:
        yield RankPart(model=part_of(model, range(len(model.layers)), tensor=tensor, is_sequence=is_sequence))
        return
    ranges = [range(*ends) for ends in pairwise(bounds_of(model, layout))]
    for rank in range(layout.pipeline):
        mine = [ranges[stage] for stage in stages_of(layout, rank)]
        layers = [index for each in mine for index in each]
        edges = [model.layers[each.start].input_bytes for each in mine if each.start]
        yield RankPart(
            model=part_of(model, layers, tensor=tensor, is_sequence=is_sequence),
            in_flight=num_in_flight(layout, rank) / layout.chunks,
            edge_bytes=max(edges, default=0.0) / (tensor if is_sequence else 1),
        )


def part_of(model: ModelFacts, layers: Sequence[int], *, tensor: int = 1, is_sequence: bool = False) -> ModelFacts:
    """Returns the facts of some layers of a model, given by their numbers, on one of ``tensor`` ranks."""
    chosen = {index: _share(model.layers[index], tensor, is_sequence) for index in layers}
    first, end = len(model.entry), len(model.entry) + len(model.blocks)
    blocks = tuple(facts for index, facts in chosen.items() if first <= index < end)
    ends = [facts for index, facts in chosen.items() if not first <= index < end]
    last = len(model.layers) - 1
    tied = -(-model.tied_parameters // tensor) if {0, last} <= chosen.keys() else 0
    outputs = sum(
        _share(model.layers[index + 1], tensor, is_sequence).input_bytes
        for index in chosen
        if index < last and index + 1 not in chosen
    )
    root = BlockFacts.together(ends, tied=tied)
    return ModelFacts(
        name=model.name,
        blocks=blocks,
        root=replace(root, saved_bytes=root.saved_bytes + outputs),
        buffer_bytes=sum(facts.buffer_bytes for facts in chosen.values()),
        temporary_bytes=max((facts.temporary_bytes for facts in chosen.values()), default=0.0),
        source=model.source,
    )


def bounds_of(model: ModelFacts, layout: Layout) -> tuple[int, ...]:
    """Returns where the stages of a layout begin, and the end: as it says, else by cost."""
    entry = len(model.entry) if model.blocks else 0
    if layout.stage_layers is not None:
        return (0, *(entry + done for done in list(accumulate(layout.stage_layers))[:-1]), len(model.layers))
    if isinstance(layout.stages, tuple) and model.blocks:
        places = {f"layers.{number}": entry + number for number in range(len(model.blocks))}
        cuts = sorted(places.get(name, len(model.layers) - 1) for name in layout.stages)
        return (0, *cuts, len(model.layers))
    return stage_bounds(model, layout.num_stages)


@lru_cache(maxsize=64)  # a search asks again and again
def stage_bounds(model: ModelFacts, stages: int) -> tuple[int, ...]:
    """Returns where ``parallel.stages = auto`` cuts, by the costs of the formulas. Raises UsageError for few layers."""
    return choose_bounds(
        [
            LayerCost(
                name=str(number),
                forward=layer.operations,
                backward=2 * layer.operations,
                state_bytes=16 * layer.parameters,
            )
            for number, layer in enumerate(model.layers)
        ],
        stages,
    )


def stages_of(layout: Layout, rank: int) -> tuple[int, ...]:
    """Returns the stages that a rank runs: in turn, and for zb-v down and up again."""
    ranks = layout.pipeline
    if layout.schedule == "zb-v":
        return rank, 2 * ranks - 1 - rank
    return tuple(rank + ranks * chunk for chunk in range(layout.chunks))


def num_in_flight(layout: Layout, rank: int) -> int:
    """Returns how many activations a rank holds at once, of one microbatch in one chunk each."""
    ranks, chunks, microbatches = layout.pipeline, layout.chunks, layout.accumulate
    most = chunks * microbatches
    match layout.schedule:
        case "gpipe":
            return most
        case "1f1b":
            return min(most, ranks - rank)
        case "interleaved":
            groups = max(1, microbatches // ranks)
            return min(most, (chunks - 1) * -(-microbatches // groups) + 2 * (ranks - rank) - 1)
        case _:
            return min(most, chunks * ranks)


@lru_cache(maxsize=256)  # the blocks of a model are alike
def _share(layer: BlockFacts, tensor: int, is_sequence: bool) -> BlockFacts:
    if tensor == 1:
        return layer
    between = tensor if is_sequence else 1
    whole = layer.saved_bytes - layer.split_bytes - layer.stream_bytes
    return replace(
        layer,
        parameters=layer.parameters - layer.split_parameters + -(-layer.split_parameters // tensor),
        largest_parameter=-(-layer.largest_parameter // tensor),
        saved_bytes=whole + layer.split_bytes / tensor + layer.stream_bytes / between,
        input_bytes=layer.input_bytes / between,
        product_bytes=layer.product_bytes - layer.split_products * (1 - 1 / tensor),
        cast_bytes=layer.cast_bytes // tensor,
        temporary_bytes=layer.temporary_bytes / tensor,
    )
