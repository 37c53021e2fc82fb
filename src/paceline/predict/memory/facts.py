"""What the estimates know of a model, block by block, and what one rank has of it where it is split.

For T tensor ranks, a layer whose parameters are p, of which s are split, has p - s + s / T of them on each. What is
saved for backward is in three parts: inside attention and MLP (1 / T), the stream between (whole; 1 / T under sequence
parallelism), and what split layers read (whole). Beside that, a stage keeps the output of each microbatch in flight.

A pipeline is as fast as its slowest stage. With c_i the cost of layer i (forward and backward), and best[s][j] the
smallest possible cost of the slowest of s stages that run layers 0 to j - 1,

    best[s][j] = min over i < j of max(best[s - 1][i], c_i + ... + c_(j-1))        stages x layers^2 / 2 steps

and stages whose memory is more than the limit cost infinitely much. Among cuts that are as fast, the one is taken whose
largest stage needs the least memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

from paceline.errors import UsageError
from paceline.plan.layout import Layout, tile_rows
from paceline.plan.model_shape import ModelShape
from paceline.units import MIB

GRADIENTS = 3  # tensors of an MLP's hidden features that its backward makes: of the product, of gate and of up
# Shares of keys and values on a ring beside a rank's own: those that it reads and those that come in, their gradients,
# and sums of these in fp32, here and on their way; besides, those of the queries.
_TRAVELLING = 7


class MlpFacts(NamedTuple):
    """The hidden features of an MLP: tokens of a sample, bytes of a token in one tensor, and how many are saved.

    ``attention_bytes`` of a sample: what the backward of attention, which comes next, takes more than is gone by then.
    """

    tokens: float
    row_bytes: float
    saved: int
    attention_bytes: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockFacts:
    """One part of a model. Activations are bytes a sample, and ``cast_bytes`` does not depend on the batch."""

    parameters: int
    saved_bytes: float = 0.0  # what its forward leaves for its backward, its inputs among it
    input_bytes: float = 0.0  # its inputs: what is left of it where it is checkpointed whole
    product_bytes: float = 0.0  # outputs of matrix products: what selective checkpointing keeps besides
    cast_bytes: int = 0  # copies of its weights in autocast's dtype, saved for backward too
    largest_parameter: int = 0  # numbers of its largest tensor; 0: not known
    columns: int = 0  # of its matrices, added up: what the right factors of low-rank gradients are long
    buffer_bytes: int = 0
    temporary_bytes: float = 0.0  # bytes a sample that live only while one operation runs
    mlp: MlpFacts | None = None  # None: nobody knows what an MLP in tiles would save
    kv_bytes: float = 0.0  # keys and values of a sample, of all heads
    operations: float = 0.0  # what its forward costs for a sample, in the unit of ``engines/stages/costs.py``
    expert_parameters: int = 0  # of ``parameters``: in experts that tokens choose from, which expert ranks share
    # What the ranks of a tensor group share of the figures above; nothing, where its layers have no plan.
    split_parameters: int = 0
    split_bytes: float = 0.0  # of ``saved_bytes``
    stream_bytes: float = 0.0  # of ``saved_bytes``: shared only under sequence parallelism
    split_products: float = 0.0  # of ``product_bytes``

    @classmethod
    def together(cls, layers: Iterable[BlockFacts], *, tied: int = 0, tied_columns: int = 0) -> BlockFacts:
        """Returns some layers as one, as far as a rank holds it; ``tied`` parameters are counted twice in them."""
        parts = tuple(layers)
        return cls(
            parameters=sum(each.parameters for each in parts) - tied,
            expert_parameters=sum(each.expert_parameters for each in parts),
            saved_bytes=sum(each.saved_bytes for each in parts),
            cast_bytes=sum(each.cast_bytes for each in parts),
            largest_parameter=max((each.largest_parameter for each in parts), default=0),
            columns=sum(each.columns for each in parts) - tied_columns,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LossFacts:
    """What a loss keeps of the logits of a sample, and what one takes that is fused with the output layer."""

    vocabulary: int
    width: int
    tokens: int
    element_bytes: int
    kept_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """A model as the estimates see it: repeated blocks, and the rest as one block called root.

    ``ModelShape`` says what a model looks like; these are the bytes and operations of its parts on one device, which
    follow from a shape, a batch's sample and a precision, or were measured of a module that has no shape.
    """

    blocks: tuple[BlockFacts, ...]
    root: BlockFacts
    buffer_bytes: int = 0
    temporary_bytes: float = 0.0  # bytes a sample that live only while one operation runs, outside of ``blocks``
    # The layers before and after the blocks, where a pipeline may cut; none: only the model's own code knows them.
    entry: tuple[BlockFacts, ...] = ()
    exit: tuple[BlockFacts, ...] = ()
    tied_parameters: int = 0  # that the first and the last layer both use
    loss: LossFacts | None = None  # None: the loss is not fused with the output layer
    work: ModelShape | None = None  # None: a transformer, whose dimensions say more

    @property
    def parameters(self) -> int:
        return self.root.parameters + sum(block.parameters for block in self.blocks)

    @property
    def expert_parameters(self) -> int:
        return sum(block.expert_parameters for block in self.blocks)

    @property
    def layers(self) -> tuple[BlockFacts, ...]:
        """The layers in the order in which they run, where a pipeline may cut; none: it cannot be cut."""
        return (*self.entry, *self.blocks, *self.exit) if self.entry else ()

    @property
    def columns(self) -> int:
        return self.root.columns + sum(block.columns for block in self.blocks)

    @property
    def largest_block(self) -> int:
        return max((block.parameters for block in self.blocks), default=self.root.parameters)


def as_laid_out(model: ModelFacts, layout: Layout) -> ModelFacts:
    """Returns the facts of a model as a layout has its sequences, MLPs and experts: cut among ranks, run in tiles."""
    ranks = layout.context_ranks
    if layout.expert > 1:
        model = replace(model, blocks=tuple(_expert_share(block, layout.expert) for block in model.blocks))
    if ranks > 1:
        entry, blocks, exit_ = (
            tuple(_cut(part, layout) for part in row) for row in (model.entry, model.blocks, model.exit)
        )
        loss = model.loss and replace(
            model.loss, tokens=model.loss.tokens // ranks, kept_bytes=model.loss.kept_bytes / ranks
        )
        temporary = model.temporary_bytes / ranks
        root = _cut(model.root, layout)
        model = replace(model, entry=entry, blocks=blocks, exit=exit_, root=root, temporary_bytes=temporary, loss=loss)
    if layout.mlp_tiles != 1:
        model = replace(model, blocks=tuple(_tiled(block, layout) for block in model.blocks))
    return model


@lru_cache(maxsize=64)
def _expert_share(block: BlockFacts, ranks: int) -> BlockFacts:
    """Returns a block's facts on one of the ranks that share its experts. Rows come and go: as many stay, evenly."""
    gone = block.expert_parameters - block.expert_parameters // ranks
    whole = max(1, block.parameters)
    return replace(
        block,
        parameters=block.parameters - gone,
        expert_parameters=block.expert_parameters - gone,
        split_parameters=block.split_parameters - gone,
        cast_bytes=round(block.cast_bytes * (1 - gone / whole)),
        largest_parameter=-(-block.largest_parameter // ranks) if gone else block.largest_parameter,
    )


@lru_cache(maxsize=64)  # the blocks of a model are alike
def _cut(part: BlockFacts, layout: Layout) -> BlockFacts:
    """Returns a part's facts for its share of a sequence; attention has keys and values of other ranks besides."""
    ranks = layout.context_ranks
    names = ("saved", "input", "product", "temporary", "split", "stream", "kv")
    shares = {f"{name}_bytes": getattr(part, f"{name}_bytes") / ranks for name in names}
    if layout.context_method == "gather":  # and a mask of a byte for each pair
        shares["temporary_bytes"] += part.kv_bytes + (part.mlp.tokens**2 / ranks if part.mlp else 0.0)
    else:  # when the MLP is done
        moving = _TRAVELLING * shares["kv_bytes"] + 2 * shares["input_bytes"]
        shares["temporary_bytes"] = max(shares["temporary_bytes"], moving)
    mlp = part.mlp and part.mlp._replace(
        tokens=part.mlp.tokens / ranks, attention_bytes=part.mlp.attention_bytes / ranks
    )
    return replace(
        part, **shares, split_products=part.split_products / ranks, operations=part.operations / ranks, mlp=mlp
    )


@lru_cache(maxsize=64)
def _tiled(block: BlockFacts, layout: Layout) -> BlockFacts:
    """Returns a block's facts where hidden features of one tile alone are there, with their gradients; none is kept."""
    if block.mlp is None:
        return block
    tokens, row_bytes, saved, attention_bytes = block.mlp
    rows = tile_rows(round(layout.microbatch * tokens), round(row_bytes), layout.mlp_tiles) / layout.microbatch
    kept = saved * tokens * row_bytes
    temporary = block.temporary_bytes - GRADIENTS * tokens * row_bytes + (saved + GRADIENTS) * rows * row_bytes
    split = block.split_bytes - kept if block.split_bytes else 0.0
    temporary = max(temporary, attention_bytes)
    return replace(block, saved_bytes=block.saved_bytes - kept, split_bytes=split, temporary_bytes=temporary)


class RankPart(NamedTuple):
    """One rank's part of a model, and of how many microbatches at once it keeps the activations."""

    model: ModelFacts
    in_flight: float = 1.0
    edge_bytes: float = 0.0  # of a sample, what comes from another stage


def parts_of(model: ModelFacts, layout: Layout) -> Iterator[RankPart]:
    """Iterates over the parts of the pipeline's ranks, one where there is none. Raises UsageError for few layers."""
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
        blocks=blocks,
        root=replace(root, saved_bytes=root.saved_bytes + outputs),
        buffer_bytes=sum(facts.buffer_bytes for facts in chosen.values()),
        temporary_bytes=max((facts.temporary_bytes for facts in ends), default=0.0),
    )


def bounds_of(model: ModelFacts, layout: Layout) -> tuple[int, ...]:
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
    costs = [
        LayerCost(name="", forward=each.operations, backward=2 * each.operations, state_bytes=16 * each.parameters)
        for each in model.layers
    ]
    return choose_bounds(costs, stages)


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
        expert_parameters=-(-layer.expert_parameters // tensor),
        largest_parameter=-(-layer.largest_parameter // tensor),
        saved_bytes=whole + layer.split_bytes / tensor + layer.stream_bytes / between,
        input_bytes=layer.input_bytes / between,
        product_bytes=layer.product_bytes - layer.split_products * (1 - 1 / tensor),
        cast_bytes=layer.cast_bytes // tensor,
        temporary_bytes=layer.temporary_bytes / tensor,
        mlp=layer.mlp
        and layer.mlp._replace(
            row_bytes=layer.mlp.row_bytes / tensor, attention_bytes=layer.mlp.attention_bytes / tensor
        ),
        kv_bytes=layer.kv_bytes / tensor,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost:
    """What one layer costs: times are seconds or any other unit, the same for all layers of a model."""

    name: str
    forward: float
    backward: float
    state_bytes: int = 0  # that parameters, gradients and optimizer state need all the time
    activation_bytes: int = 0  # that one microbatch keeps for backward

    @property
    def total(self) -> float:
        return self.forward + self.backward


def choose_bounds(
    costs: Sequence[LayerCost], stages: int, *, memory_bytes: float = math.inf, in_flight: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Returns the cut into ``stages`` whose slowest stage is the fastest, among those that fit into ``memory_bytes``.

    ``in_flight``: how many microbatches each stage keeps at once (1F1B: stages - s); None: one. Raises UsageError where
    there are fewer layers than stages, or no cut fits.
    """
    if stages < 1 or len(costs) < stages:
        raise UsageError(
            f"{stages} stages of a model with {len(costs)} layers\n"
            "  every stage runs at least one whole layer\n"
            f"  take {len(costs)} stages or fewer, or a deeper model"
        )
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
        needs = {cost.name: cost.state_bytes + min(in_flight) * cost.activation_bytes for cost in costs}
        largest = max(needs, key=lambda name: needs[name])
        raise UsageError(
            f"no cut into {stages} stages fits into {memory_bytes / MIB:.0f} MiB a rank\n"
            f"  the largest layer, {largest}, needs {needs[largest] / MIB:.0f} MiB by itself, and parameters with "
            f"their states {states[-1] / stages / MIB:.0f} MiB a stage on average\n"
            "  take more stages, a smaller microbatch, activation checkpointing, or a strategy that shards"
        )
    bounds = [len(costs)]
    for begins in reversed(cuts):
        bounds.append(begins[bounds[-1]])
    return tuple(reversed(bounds))
